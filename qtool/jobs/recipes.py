"""qtool recipe: the recipe that a command line means; and recipes that are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtool.errors import FormatError, OutputError, UsageError
from qtool.formats import files
from qtool.jobs import streams
from qtool.jobs.target import Target
from qtool.layouts.metadata import read_metadata
from qtool.recipe import Recipe, effective, over, toml
from qtool.report import is_report, read_report

# What an option takes the place of where another place gave it, as over() does for words.
_INSTEAD = {
    "scale": {"method", "symmetric", "target_bits", "target_sqnr", "candidates", "importance"},
    "target_bits": {"target_sqnr", "scale", "zero_point"},
    "target_sqnr": {"target_bits", "scale", "zero_point"},
    "method": {"scale", "zero_point"},
    "symmetric": {"scale", "zero_point"},
    "importance": {"scale", "zero_point"},
    "json_lines": {"json"},
    "json": {"json_lines"},
}


def layered(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What options mean together that several places give, the later ones nearer: option by option
    the nearest, but without those of farther places that contradict it; see over()."""
    merged: dict[str, Any] = {}
    for layer in layers:
        gone = set().union(*(_INSTEAD.get(name, ()) for name in layer)) - layer.keys()
        merged = over(layer, {k: v for k, v in merged.items() if k not in gone})
    return merged


def asked(**options: Any) -> Recipe:
    """The recipe that options of quantize_file mean together; see recipe.effective().

    Raises UsageError for those that contradict each other.
    """
    for name in ("rules", "include", "exclude", "candidates"):
        if isinstance(value := options.get(name), str):  # from Python
            options[name] = [value]
    recipe = effective(**options)
    has_target = Target.of(recipe.options) is not None
    if "scale" in recipe.options:
        said = [recipe.words, *(rule.words for rule in recipe.rules)]
        if any(words.get(name) is not None for words in said for name in ("method", "symmetric")):
            rule = "replaces --method and --symmetric"
            raise UsageError("--scale", rule, "leave one of them out")
        if "importance" in recipe.options:
            raise UsageError("--scale", "leaves nothing to weigh", "leave --importance out")
        if has_target:
            raise UsageError("--scale", "leaves no candidates to choose from", "leave it out")
    elif "zero_point" in recipe.options:
        raise UsageError("--zero-point", "given without --scale", "give both")
    if (size := recipe.words.get("block_size")) is not None and size < 1:
        raise UsageError("--block-size", f"{size} is not positive", "use for example 32")
    recipe.check(typed_later=has_target)
    return recipe


def recipe_of(src: str | Path) -> str:
    """The recipe that a file or folder says it was made by, as TOML; "-" is standard input.

    A report has the recipe too. What a terminal would obey is escaped. Raises FormatError where
    there is none.
    """
    if str(src) != streams.STANDARD and is_report(Path(src)):
        text = read_report(src).get("recipe")
        if not isinstance(text, str):
            raise FormatError(str(src), "holds no recipe", "give a report of `qtool quantize`")
        return toml.shown(text)
    with streams.opened(src) as source:
        made = read_metadata(source).provenance
        if made is None:
            rule = "does not say what it was made by"
            raise FormatError(str(source.path), rule, "name what a qtool of this kind has written")
        return toml.shown(made.recipe)


def recipe_text(**options: Any) -> str:
    """asked() as TOML, which the option --recipe reads."""
    return toml.written(asked(**options))


def text_of(recipe: Recipe) -> str:
    """The recipe as TOML, for outputs and reports: what an array from Python is stands for it."""
    said = {
        name: f"{v.dtype} array of shape {v.shape}" if isinstance(v, np.ndarray) else v
        for name, v in recipe.options.items()
    }
    return toml.written(replace(recipe, options=said))


class Keeping:
    """Where a recipe is to be kept, if anywhere.

    force: replace a file that says something else. Raises OutputError where the path must not be
    written.
    """

    def __init__(self, path: str | Path | None, others: Sequence[Path], *, force: bool) -> None:
        self._path = None if path is None else Path(path)
        self._force = force
        if self._path is None:
            return
        for other in others:
            if os.path.realpath(other) == os.path.realpath(self._path):
                raise OutputError(f"recipe {path}", f"is also {other}", "choose another name")
            files.check_target(self._path, other, force=True)

    def keep(self, recipe: Recipe) -> None:
        """Write it, whole or not at all; not in the place of another one."""
        if self._path is None:
            return
        text = toml.written(recipe).encode("utf-8")
        if self._path.exists() and not self._force and self._path.read_bytes() != text:
            rule = "exists and says something else"
            raise OutputError(f"recipe {self._path}", rule, "choose another name or --force")
        with files.replacing(self._path) as temporary:
            temporary.write_bytes(text)

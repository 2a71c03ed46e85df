"""The recipe that a command line means, with the file that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtool.dtypes import resolve, resolve_target
from qtool.errors import usage_errors
from qtool.recipe import toml
from qtool.recipe.recipe import Recipe
from qtool.recipe.rule import Rule
from qtool.recipe.words import WORDS, over

_TYPES = ("dtype", "scale_dtype", "precision", "source_dtype")


def effective(
    recipe: str | Path | None = None,
    rules: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    **options: Any,
) -> Recipe:
    """The recipe in a file, with options over its own, and rules behind its own.

    options: under the names of words.WORDS and toml.OPTIONS; None, False or nothing in it: not
    given, but for words and act_order, of which None alone is not given.
    Raises UsageError for what contradicts itself, FormatError for a file that is no recipe.
    """
    base = Recipe({}) if recipe is None else toml.read(recipe)
    words = {k: _named(k, v) for k, v in options.items() if k in WORDS and v is not None}
    others = {
        k: _named(k, v)
        for k, v in options.items()
        if k not in WORDS
        and v is not None
        and not (_is_list(v) and not v)
        and (v is not False or k == "act_order")
    }
    return replace(
        base,
        words=over(words, base.words),
        rules=(*base.rules, *map(Rule.parse, rules)),
        include=tuple(include) or base.include,
        exclude=tuple(exclude) or base.exclude,
        options={**base.options, **others},
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _named(word: str, value: Any) -> Any:
    """Types by their names, which recipes know them by."""
    if word == "tile":
        return tuple(value)
    if word not in _TYPES or isinstance(value, str):
        return value
    with usage_errors():
        if word == "dtype":
            return resolve_target(value).name
        return None if value == 0 and isinstance(value, int) else resolve(value, word).name

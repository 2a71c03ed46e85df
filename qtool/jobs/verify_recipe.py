"""How codes came about, from the recipe that a file or its report holds."""

from __future__ import annotations

import json
from typing import Any

from qtool.dtypes import DTYPES
from qtool.errors import QtoolError, SpecError
from qtool.formats import Source
from qtool.layouts.metadata import KEY
from qtool.layouts.stored import Stored
from qtool.recipe import Recipe, toml
from qtool.recipe.choice import Choice
from qtool.spec import PRECISIONS, QuantSpec


def provenance(source: Source) -> dict[str, Any] | None:
    """Tool, version and recipe in the metadata of a file, as far as they are there; None: there is
    nothing."""
    try:
        said = json.loads(source.metadata[KEY])
        tool, recipe = said.get("tool", {}), said.get("recipe")
        found = {"tool": tool.get("name"), "version": tool.get("version"), "recipe": recipe}
    except (KeyError, ValueError, AttributeError, RecursionError):
        return None
    if not all(isinstance(value, str | None) for value in found.values()):
        return None
    return found if any(found.values()) else None


def recipe_of(text: str | None, thing: str) -> tuple[Recipe | None, str | None]:
    """The recipe in a text; or what is wrong with it."""
    if text is None:
        return None, None
    try:
        return toml.parsed(text.encode("utf-8", "replace"), thing), None
    except QtoolError as error:
        return None, f"its recipe cannot be read: {error}"


def spec_of(name: str, stored: Stored, recipe: Recipe | None) -> QuantSpec | None:
    """How the elements of a tensor became codes, for what is clipped; as by default where no recipe
    says more. None for codes that are no target of quantization."""
    if not stored.dtype.is_target:
        return None
    choice = None if recipe is None else _choice(name, recipe)
    try:
        return _spec(stored, recipe, choice)
    except SpecError:  # the recipe is of other codes
        return _spec(stored, None, None)


def _spec(stored: Stored, recipe: Recipe | None, choice: Choice | None) -> QuantSpec:
    precision = DTYPES["float32"]
    if recipe is None or choice is None:
        return QuantSpec(
            stored.dtype, stored.granularity, symmetric=True, precision=precision, bias=stored.bias
        )
    said = choice.spec
    if said.semantics != "onednn":
        if recipe.options.get("scale") is not None and stored.scale_dtype in PRECISIONS:
            precision = stored.scale_dtype
        precision = said.precision or precision
    return QuantSpec(
        stored.dtype, stored.granularity, symmetric=True, precision=precision,
        saturate=said.saturate, narrow_range=said.narrow_range,
        semantics="onednn" if said.semantics == "onednn" else "onnx", bias=stored.bias,
    )  # fmt: skip


def _choice(name: str, recipe: Recipe) -> Choice | None:
    try:
        return recipe.choice(name)
    except QtoolError:
        return None

"""How codes came about, from the recipe that a file or its report holds."""

from __future__ import annotations

import re
from dataclasses import replace

from qtool.dtypes import DTYPES
from qtool.errors import QtoolError, SpecError
from qtool.layouts.stored import Stored
from qtool.recipe import Recipe, toml
from qtool.recipe.choice import Choice
from qtool.spec import PRECISIONS, QuantSpec

_OF_DYNAMIC = ("graph", "per_tensor")  # which say nothing of how codes come about
# What `dynamic` says of its arithmetic, which is that of onnx, int8 without its lowest code.
_DYNAMIC = re.compile(r'^semantics = "dynamic"$', re.MULTILINE)


def recipe_of(text: str | None, thing: str) -> tuple[Recipe | None, str | None]:
    """The recipe in a text; or what is wrong with it."""
    if text is None:
        return None, None
    is_dynamic = _DYNAMIC.search(text) is not None
    more = (*_OF_DYNAMIC, "semantics") if is_dynamic else _OF_DYNAMIC
    try:
        found = toml.parsed(text.encode("utf-8", "replace"), thing, more)
        if is_dynamic and found.words.get("dtype") == "int8":
            found = replace(found, words={**found.words, "narrow_range": True})
        return found, None
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
    except SpecError:
        return None

"""The choices that decide the output, for the report."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from qtool.dtypes import DType
from qtool.jobs.given import Given
from qtool.recipe import Recipe
from qtool.spec import QuantSpec

if TYPE_CHECKING:
    from qtool.jobs.second_order import SecondOrder

# Those of tensors, not of all.
_OWN = ("granularity", "bias")


def settings(
    recipe: Recipe,
    given: Given | None,
    target: dict[str, Any] | None,
    second_order: SecondOrder | None,
) -> dict[str, Any]:
    """What was asked for. target: what mixed precision says of its choice."""
    default = recipe.default
    names = [f.name for f in fields(QuantSpec) if f.name not in _OWN]
    choices = {name: default and getattr(default.spec, name) for name in names}
    if given is not None:
        choices |= {"method": "given", "symmetric": None}
    named = {k: v.name if isinstance(v, DType) else v for k, v in choices.items()}
    return named | {
        "preset": recipe.preset,
        "axis": default and default.axis,
        "block_size": default and default.block_size,
        "tile": list(default.tile) if default and default.tile else None,
        "layout": recipe.options.get("layout"),
        "dynamic_activations": bool(default and default.activations and not recipe.silent),
        "include": list(recipe.include),
        "exclude": list(recipe.exclude),
        "rules": [rule.described() for rule in recipe.rules],
        "target": target,
        "importance": list(recipe.options.get("importance", ())),
        "requantize": recipe.options.get("requantize", False),
        "graph": None,
        "hessian": [], "activations": [], "damping": None, "act_order": None,
    } | (second_order.settings if second_order else {})  # fmt: skip

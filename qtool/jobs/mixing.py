"""Mixed precision: of each tensor the candidate with which all together have the least error
within a budget of bits, or the least size above a floor of SQNR.

Sizes and squared errors add up over tensors, and both are known before: what is predicted is what
comes out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError
from qtool.formats import Source
from qtool.jobs.allocation import Option, allocate
from qtool.jobs.curves import Curve, Way, curves, squares
from qtool.jobs.progress import Progress
from qtool.jobs.target import KEYS, Target
from qtool.layouts import Layout
from qtool.plan import Planned
from qtool.recipe import Recipe, Rule, Words, escaped, over, words
from qtool.stats import Stats, decibels

if TYPE_CHECKING:
    from qtool.jobs.importance import Importance

_MOST = 3000.0  # dB; a ratio of float64 numbers
PlanOf = Callable[[Recipe], list[Planned]]


@dataclass(frozen=True)
class Mixture:
    """What was chosen: as a recipe that says it by rules with exact names, and the plan that it
    means; said: for the report, None where there was no choice."""

    recipe: Recipe
    plan: list[Planned]
    said: dict[str, Any] | None


def mixed(
    source: Source,
    recipe: Recipe,
    plan_of: PlanOf,
    layout: Layout,
    name: str,
    jobs: int,
    progress: Progress,
    importance: Importance | None = None,
) -> Mixture:
    """Choose for every tensor, where the recipe has a target.

    name: of the layout. plan_of: the plan that a recipe means. importance: weighs the errors of
    some tensors; those of others count as they are.
    Raises QtoolError where the target cannot be reached, with what can.
    """
    target = Target.of(recipe.options)
    if target is None:
        return Mixture(recipe, plan_of(recipe), None)
    candidates = target.for_layout(name, recipe)
    base = replace(recipe, options={k: v for k, v in recipe.options.items() if k not in KEYS})
    recipes = [replace(base, words=over(one, base.words)) for one in candidates]
    for one in recipes:
        one.check(typed_later=False)
    plans = [plan_of(one) for one in recipes]
    found = curves(source, plans, layout, jobs, progress, importance)
    order = {planned.info.name: place for place, planned in enumerate(plans[0])}
    chosen = _chosen(found, target, order)
    ways = [curve[number] for curve, number in zip(found, chosen, strict=True)]
    numbers = {
        p.info.name: number for way, number in zip(ways, chosen, strict=True) for p in way.planned
    }
    counts = Counter(numbers.values())
    for planned in plans[0]:  # what no candidate suits: the plan of one says why
        if recipes[0].reason_against(planned.info) is None:
            numbers.setdefault(planned.info.name, 0)
    said = {
        "bits_per_weight": target.bits,
        "sqnr_db": target.sqnr,
        "candidates": [
            {"words": words.phrase(one), "tensors": counts[number]}
            for number, one in enumerate(candidates)
        ],
        "predicted": _predicted(ways, order),
    }
    rules = _rules(candidates, {name: numbers[name] for name in order if name in numbers})
    made = replace(base, rules=(*rules, *base.rules))
    return Mixture(made, plan_of(made), said)


def _rules(candidates: Sequence[Words], numbers: dict[str, int]) -> list[Rule]:
    """One for each candidate that is chosen. They come before the user's, which hold as well."""
    names: dict[int, list[str]] = {}
    for name, number in numbers.items():
        names.setdefault(number, []).append(escaped(name))
    return [Rule(tuple(names[number]), candidates[number]) for number in sorted(names)]


def _chosen(found: Sequence[Curve], target: Target, order: dict[str, int]) -> list[int]:
    """The number of the candidate for each curve."""
    numbers = [list(curve) for curve in found]
    if target.bits is not None:
        places = _within_bits(found, target.bits)
    else:
        assert target.sqnr is not None
        places = _above_sqnr(found, target.sqnr, order)
    return [known[place] for known, place in zip(numbers, places, strict=True)]


def _within_bits(found: Sequence[Curve], bits: float) -> list[int]:
    elements = sum(p.info.size for curve in found for p in next(iter(curve.values())).planned)
    units = [[Option(way.nbytes, way.error) for way in curve.values()] for curve in found]
    most = math.fsum(max(option.cost for option in unit) for unit in units)
    places = allocate(units, min(most, math.floor(Fraction(bits) * elements / 8)))
    if places is None:
        least = 8 * sum(min(option.cost for option in unit) for unit in units) / elements
        rule = f"{bits:g} bits per weight cannot be reached with these candidates"
        raise QtoolError("--target-bits", rule, f"the least is {_up(least)}")
    return places


def _above_sqnr(found: Sequence[Curve], sqnr: float, order: dict[str, int]) -> list[int]:
    units = [[Option(way.error, way.nbytes) for way in curve.values()] for curve in found]
    energy = math.fsum(
        squares(stats)[0] for curve in found for stats in next(iter(curve.values())).stats
    )
    decibels = Decimal(min(max(sqnr, -_MOST), _MOST))
    budget = energy / float(Decimal(10) ** (decibels / 10))  # libm's powers differ
    while (places := allocate(units, budget)) is not None:
        ways = [[*curve.values()][i] for curve, i in zip(found, places, strict=True)]
        reached = _sqnr(ways, order)
        if reached is None or reached >= sqnr:
            return places
        budget = budget * (1 - 2**-50)  # sums of another order are not the same to the last bit
    best = [min(curve.values(), key=lambda way: way.error) for curve in found]
    most = _sqnr(best, order)
    assert most is not None
    rule = f"{sqnr:g} dB cannot be reached with these candidates"
    raise QtoolError("--target-sqnr", rule, f"the most is {math.floor(most * 1000) / 1000:g}")


def _up(bits: float) -> str:
    """Bits that are enough, in a few digits."""
    return f"{math.ceil(bits * 10000) / 10000:.4f}".rstrip("0").rstrip(".")


def _ordered(ways: Sequence[Way], order: dict[str, int]) -> list[Stats]:
    """The figures of all tensors, in the order of the report."""
    found = [pair for way in ways for pair in zip(way.planned, way.stats, strict=True)]
    found.sort(key=lambda pair: order[pair[0].info.name])
    return [stats for _, stats in found]


def _sqnr(ways: Sequence[Way], order: dict[str, int]) -> float | None:
    """That of all tensors, in dB, weighted where there are weights."""
    signal = noise = 0.0
    for of_tensor, error in map(squares, _ordered(ways, order)):  # added as the report does
        signal, noise = signal + of_tensor, noise + error
    return decibels(signal, noise)


def _predicted(ways: Sequence[Way], order: dict[str, int]) -> dict[str, Any]:
    """What the report's totals will be."""
    total = Stats()
    for stats in _ordered(ways, order):
        total.merge(stats)
    figures = total.figures()
    nbytes = sum(way.nbytes for way in ways)
    return {
        "bits_per_weight": 8 * nbytes / total.elements if total.elements else None,
        "sqnr_db": figures["sqnr_db"],
        "mse": figures["mse"],
        "weighted_sqnr_db": figures["weighted_sqnr_db"],
        "weighted_mse": figures["weighted_mse"],
    }

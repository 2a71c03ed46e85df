"""Choosing one option of each unit: the least sum of values within a budget of costs.

A multiple-choice knapsack. The options of a unit that are best for some price of costs form the
lower convex hull of its points (cost, value). Over all units, the hulls' steps taken in the order
of value gained per cost are the best choice of all for the budgets where one of them ends
(Everett, Generalized Lagrange multiplier method, 1963; Shoham and Gersho, Efficient bit allocation,
1988). What is left of another budget is filled greedily, so that the sum of values exceeds the
least possible one by no more than what the first step that did not fit would have gained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Option(NamedTuple):
    """One option of a unit: what it costs, and the value that is to be small."""

    cost: float
    value: float


class _Step(NamedTuple):
    """From one option of a unit to another that costs more; gain: value saved per cost."""

    gain: float
    unit: int
    before: int
    after: int


def allocate(units: Sequence[Sequence[Option]], budget: float) -> list[int] | None:
    """The number of the option chosen for each unit; None where no choice is within budget."""
    chosen = [unit.index(min(unit)) for unit in units]
    left = budget - math.fsum(unit[i].cost for unit, i in zip(units, chosen, strict=True))
    if left < 0:
        return None
    steps = [step for number, unit in enumerate(units) for step in _hull(number, unit)]
    for step in sorted(steps, key=lambda step: -step.gain):
        unit = units[step.unit]
        cost = unit[step.after].cost - unit[step.before].cost
        if cost > left:
            break
        chosen[step.unit], left = step.after, left - cost
    while (filled := _fill(units, chosen, left)) != left:
        left = filled
    return chosen


def _hull(number: int, unit: Sequence[Option]) -> Iterator[_Step]:
    """The steps along the lower convex hull of a unit, from its cheapest option on."""
    hull: list[int] = []
    for i in sorted(range(len(unit)), key=unit.__getitem__):
        if hull and unit[i].value >= unit[hull[-1]].value:
            continue
        while len(hull) > 1 and _gain(unit, hull[-2], hull[-1]) <= _gain(unit, hull[-1], i):
            hull.pop()
        hull.append(i)
    for before, after in pairwise(hull):
        yield _Step(_gain(unit, before, after), number, before, after)


def _gain(unit: Sequence[Option], before: int, after: int) -> float:
    """Value saved per cost, between options in the order of their costs."""
    saved, cost = unit[before].value - unit[after].value, unit[after].cost - unit[before].cost
    return saved / cost if cost > 0 else math.inf


def _fill(units: Sequence[Sequence[Option]], chosen: list[int], left: float) -> float:
    """Take what fits, one step per unit, the best gain first; what is left of the budget."""
    steps = [
        _Step(_gain(unit, chosen[number], i), number, chosen[number], i)
        for number, unit in enumerate(units)
        for i in range(len(unit))
        if unit[i].value < unit[chosen[number]].value
        and unit[i].cost - unit[chosen[number]].cost <= left
    ]
    for step in sorted(steps, key=lambda step: -step.gain):
        unit = units[step.unit]
        cost = unit[step.after].cost - unit[step.before].cost
        if cost <= left and chosen[step.unit] == step.before:
            chosen[step.unit], left = step.after, left - cost
    return left

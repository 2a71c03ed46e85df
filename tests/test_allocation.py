"""The choice among options: beside every choice that there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from qtool.jobs.allocation import Option, allocate

Units = list[list[Option]]


def case(seed: int) -> Units:
    """Some units with options as quantizers have them, and some without any order."""
    rng = np.random.default_rng(seed)
    units = []
    for _ in range(rng.integers(1, 7)):
        size = int(rng.integers(1, 5000))
        bits = rng.choice([2.5, 4.125, 4.25, 4.5, 5, 8.25, 9], rng.integers(1, 6), replace=False)
        energy = float(rng.lognormal(0, 3))
        noise = rng.uniform(0.5, 2, bits.size) if seed % 2 else np.ones(bits.size)
        units.append([
            Option(int(size * b), energy * size * 4.0**-b * n)
            for b, n in zip(bits.tolist(), noise.tolist(), strict=True)
        ])  # fmt: skip
    return units


def total(units: Units, chosen: tuple[int, ...] | list[int], field: int) -> float:
    return math.fsum(unit[i][field] for unit, i in zip(units, chosen, strict=True))


def best(units: Units, budget: float) -> float | None:
    """The least sum of values of all choices within budget."""
    every = itertools.product(*(range(len(unit)) for unit in units))
    values = [total(units, c, 1) for c in every if total(units, c, 0) <= budget]
    return min(values, default=None)


def slack(units: Units, budget: float) -> float:
    """What the linear relaxation leaves open: the least upper bound, over all prices of costs, of
    what any choice within budget must have, against the choice for that price that fits."""
    prices = {
        (a.value - b.value) / (b.cost - a.cost)
        for unit in units for a in unit for b in unit if b.cost > a.cost and b.value < a.value
    }  # fmt: skip
    return max(
        sum(min(o.value + price * o.cost for o in unit) for unit in units) - price * budget
        for price in {0.0, *prices}
    )


@pytest.mark.parametrize("seed", range(120))
def test_the_choice_is_within_the_last_step_of_the_best(seed: int) -> None:
    units = case(seed)
    least = sum(min(o.cost for o in unit) for unit in units)
    most = sum(max(o.cost for o in unit) for unit in units)
    for share in (0, 0.1, 0.3, 0.5, 0.8, 1):
        budget = math.floor(least + share * (most - least))
        chosen = allocate(units, budget)
        assert chosen is not None
        assert total(units, chosen, 0) <= budget
        value, optimum = total(units, chosen, 1), best(units, budget)
        assert optimum is not None
        steps = [a.value - b.value for unit in units for a in unit for b in unit]
        assert slack(units, budget) <= optimum * (1 + 1e-12) <= value * (1 + 2e-12)
        assert value - slack(units, budget) <= max(steps) * (1 + 1e-12)
    assert allocate(units, least - 1) is None


@pytest.mark.parametrize("seed", range(40))
def test_where_a_step_ends_the_choice_is_the_best_of_all(seed: int) -> None:
    units = case(seed)
    price = float(np.random.default_rng(seed).lognormal(0, 4))
    chosen = [
        min(range(len(unit)), key=lambda i, unit=unit: unit[i].value + price * unit[i].cost)
        for unit in units
    ]
    budget = total(units, chosen, 0)
    found = allocate(units, budget)
    assert found is not None
    assert total(units, found, 1) == best(units, budget)


def test_many_tensors_come_close_to_the_bound() -> None:
    rng = np.random.default_rng(5)
    units = [
        [Option(int(n * b), e * n * 4.0**-b) for b in (4.125, 4.25, 4.5, 5, 8.25, 9)]
        for n, e in zip(rng.integers(100, 10000, 300).tolist(), rng.lognormal(0, 2, 300).tolist(),
                        strict=True)
    ]  # fmt: skip
    budget = sum(unit[2].cost for unit in units)
    chosen = allocate(units, budget)
    assert chosen is not None
    assert total(units, chosen, 0) <= budget
    assert total(units, chosen, 1) < 1.003 * slack(units, budget)


@pytest.mark.parametrize(
    ("units", "budget", "chosen"),
    [
        ([], 0, []),
        ([[Option(5, 1)]], 4, None),
        ([[Option(5, 1)]], 5, [0]),
        ([[Option(5, 1), Option(5, 0.5)]], 5, [1]),
        ([[Option(4, 9), Option(8, 1), Option(6, 2)]], 7, [2]),
        # (6, 7) is above the hull: only what is left of the budget goes to it
        ([[Option(4, 9), Option(8, 1), Option(6, 7)]], 7, [2]),
        ([[Option(4, 9), Option(8, 1), Option(6, 10)]], 7, [0]),
        ([[Option(4, 9), Option(8, 1)], [Option(4, 9), Option(8, 2)]], 12, [1, 0]),
    ],
)
def test_small_cases(units: Units, budget: float, chosen: list[int] | None) -> None:
    assert allocate(units, budget) == chosen

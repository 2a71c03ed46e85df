"""Logarithms beside those of decimal, of 40 digits."""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
import pytest

from qtool.scales.logarithm import log
from qtool.stats import decibels

EXACT = Context(prec=40)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("low", "high"), [(-1, 1), (-0.01, 0.01), (-1e-9, 1e-9), (-25, 25), (-700, 700)]
)
def test_the_natural_logarithm_is_within_a_unit_in_the_last_place(low: float, high: float) -> None:
    x = np.exp(RNG.uniform(low, high, 1000))
    for value, found in zip(x.tolist(), log(x).tolist(), strict=True):
        error = abs(Decimal(found) - EXACT.ln(Decimal(value)))
        assert error < Decimal(math.ulp(found)), value


def test_it_is_0_for_1_and_keeps_the_shape() -> None:
    x = np.array([[1.0, 2.0, 0.5], [4.0, 2.0**-1022, 2.0**1023]])
    assert (log(x) == np.array([0, 1, -1, 2, -1022, 1023]).reshape(2, 3) * math.log(2)).all()


def test_decibels_are_rounded_twice_at_most() -> None:
    signals, noises = np.exp(RNG.uniform(-80, 80, (2, 500))).tolist()
    for signal, noise in zip(signals, noises, strict=True):
        exact = EXACT.log10(Decimal(signal / noise))
        assert decibels(signal, noise) == 10 * float(exact)
    assert decibels(100.0, 1.0) == 20
    assert (decibels(0.0, 1.0), decibels(1.0, 0.0), decibels(math.inf, 1.0)) == (None, None, None)

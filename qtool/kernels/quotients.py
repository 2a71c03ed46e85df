"""Scales from the largest magnitudes of groups, rounded to the type that they are stored in."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer


def divide(
    bound: Pointer, n: int, levels: float, limits: Pointer, grid: Pointer, out: Pointer
) -> None:
    """out = bound / levels, in float64, rounded once to a type's grid; 1 where bound is 0.

    limits: the smallest and the largest value; smaller and larger quotients become these. grid:
    exponent of the smallest normal value and mantissa bits. Adding a power of two whose last bit
    counts what the quotient's last digit does, and subtracting it again, rounds half to even.
    """
    smallest, largest = np.float64(limits[0]), np.float64(limits[1])
    lowest, mantissa = np.int64(grid[0]), np.int64(grid[1])
    for i in range(n):
        quotient = np.float64(np.float64(bound[i]) / levels)
        exponent = np.int64(np.float64(quotient).view(np.int64) >> np.int64(52))
        exponent = exponent if exponent > lowest + 1023 else np.int64(lowest + 1023)
        steps = np.int64(np.int64(exponent + 52 - mantissa) << np.int64(52)).view(np.float64)
        value = np.float64(np.float64(quotient + steps) - steps)
        value = value if value > smallest else smallest
        value = value if value < largest else largest
        out[i] = np.float32(value if bound[i] > 0 else np.float64(1))

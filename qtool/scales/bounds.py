"""Between which scales, and in which windows, the least error of a group lies: the proofs stand in
optimal.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.scales.squares import UNCLIPPED, Best, Groups, spread

Array = NDArray[Any]

_SLACK = 1 + 2.0**-20


def bounds(groups: Groups, best: Best, window: int, unhalved: float) -> tuple[Array, Array]:
    """float64 [low, high] in which scales of a window may be better; UNCLIPPED: of any window.

    unhalved: the largest scale whose half cannot be stored.
    """
    grid = groups.grid
    above, below = groups.reach(best.error)
    least, most = groups.low.astype(np.float64), groups.high.astype(np.float64)
    if window == UNCLIPPED:
        low = (above + below) / grid.width
        high = (least + most) / np.floor(grid.width / 2)
    else:
        last, first = float(grid.highs[window]), -float(grid.lows[window])
        low = np.maximum(above / last, below / first)
        high = np.maximum(most / grid.beyond_half(last), least / grid.beyond_half(first))
    all_zero = 2 * groups.absmax.astype(np.float64) / grid.smallest
    high = np.minimum(np.maximum(high, unhalved), all_zero)
    return low / _SLACK, np.where(groups.is_huge, all_zero, high) * _SLACK


def unclipped(groups: Groups, which: Array, scale: Array) -> tuple[Array, Array]:
    """Whether a window of an asymmetric grid clips no value, and the first that does not."""
    with np.errstate(over="ignore", under="ignore"):
        below = np.rint(groups.low[which] / scale)
        above = np.rint(groups.high[which] / scale)
        fits = below + above <= groups.grid.width
    window = np.where(fits, below, 0).astype(np.int64)
    if groups.is_huge.any():
        low, high = groups.grid.lows[window], groups.grid.highs[window]
        fits &= ~groups.overflows(which, scale, low, high)
    return fits, window


def windows(groups: Groups, best: Best, which: Array, largest: Array) -> tuple[Array, Array]:
    """The windows of an asymmetric grid that may be better with scales up to the largest ones:
    numbers of these pairs, and windows."""
    above, below = groups.reach(best.error)
    reach = largest.astype(np.float64) * _SLACK
    first = np.ceil(below[which] / reach)
    last = np.floor(groups.grid.width - above[which] / reach)
    pair, number = spread(np.maximum(last - first + 1, 0).astype(np.int64))
    return pair, first[pair].astype(np.int64) + number

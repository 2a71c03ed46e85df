"""Sums of squared errors of groups of values under any scales, and what bounds them.

A scale s > 0 and a window [low, high], low <= 0 <= high, of codes less the zero point stand for the
values k * s. E(s) = sum of w (x - k s)^2, with k = x / s, divided in float32, rounded half to
even and kept within the window, and the rest in float64, added in the order of stats.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.kernels import CHUNK, LANES
from qtool.scales.ranges import largest
from qtool.spec import QuantSpec

Array = NDArray[Any]

UNCLIPPED = -1  # a window without ends that matter
_FAR = 2.0**30
_TERMS = 1 << 18  # as many as a core's cache holds


class Grid:
    """The codes of a type less its zero point: numbers from lows[w] to highs[w] in window w.

    symmetric: one window, and with spec.negative_scale its mirror image, the codes of -s, where
    that is another one. asymmetric: window w has the zero point qmin + w.
    The last one, number UNCLIPPED, is wider than any. smallest: positive number.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self.dtype, self.shifts = spec.dtype, not spec.symmetric
        self.width = int(spec.dtype.qmax - spec.qmin)
        middle = 2 ** (spec.dtype.bits - 1) if spec.dtype.kind == "uint" else 0
        lows = np.array([spec.qmin - middle])
        if self.shifts:
            lows = -np.arange(self.width + 1)
        elif spec.negative_scale and self.width != -2 * lows[0]:
            lows = np.array([lows[0], -lows[0] - self.width])
        self.lows, self.highs = np.append(lows, -_FAR), np.append(lows + self.width, _FAR)
        self.count = lows.size
        self.smallest = (
            1.0 if self.dtype.is_integer else float(self.dtype.limits.smallest_subnormal)
        )

    def rounded(self, quotient: Array) -> Array:
        """float32 quotients as float64 numbers of the grid continued without end."""
        if self.dtype.is_integer:
            return np.rint(quotient).astype(np.float64)
        return ops.round_to_grid(quotient.astype(np.float64), self.dtype)

    def beyond_half(self, last: float) -> float:
        """Smaller quotients get codes up to half of the last one."""
        if self.dtype.is_integer:
            return float(np.floor(last / 2)) + 0.5
        exponent = math.frexp(last / 2)[1] - 1
        return last / 2 + math.ldexp(1.0, exponent - int(self.dtype.limits.nmant)) / 2

    @property
    def form(self) -> tuple[int, int]:
        """Mantissa bits, -1 for integers, and exponent of the smallest normal number."""
        if self.dtype.is_integer:
            return -1, 0
        return int(self.dtype.limits.nmant), int(self.dtype.limits.minexp)

    def numbers(self, unhalved: float) -> Array:
        """What the kernel wants to know; see kernels.optimal."""
        numbers = np.zeros(10)
        for w in range(0 if self.shifts else self.count):
            low, high = -self.lows[w], self.highs[w]
            halves = self.beyond_half(low), self.beyond_half(high)
            numbers[4 * w : 4 * w + 4] = -low, high, *halves
        numbers[8:] = unhalved, self.smallest
        return numbers


class Groups:
    """Groups of float32 values (G, n) with weights (G, n) or None, and what is known of each.

    Values that are not finite count as 0. low, high: largest -x and x >= 0 that have a weight;
    absmax: the larger one; lowest, highest: of all. norm: square root of the sum of w x^2.
    is_huge: whether values may come back larger than `limit`, see ranges.largest().
    """

    def __init__(self, values: Array, weights: Array | None, grid: Grid, storage: DType) -> None:
        padding = ((0, -values.shape[1] % LANES), (0, 0))
        self.grid = grid
        self.x = np.pad(np.where(np.isfinite(values), values, np.float32(0)).T, padding)
        counted, self.weights = self.x, None
        if weights is not None:
            self.weights = np.pad(weights.T.astype(np.float64), padding)
            counted = np.where(self.weights > 0, self.x, np.float32(0))
        self.low, self.high = -counted.min(axis=0, initial=0), counted.max(axis=0, initial=0)
        self.lowest, self.highest = -self.x.min(axis=0, initial=0), self.x.max(axis=0, initial=0)
        self.absmax = np.maximum(self.low, self.high)
        self.norm = np.sqrt(self._weighted(counted.astype(np.float64) ** 2))
        top = np.maximum(self.lowest, self.highest)
        self.limit = largest(top, storage)
        self.is_huge = top >= self.limit / 4

    @property
    def count(self) -> int:
        return int(self.x.shape[1])

    def errors(self, which: Array, scale: Array, window: Array | int) -> Array:
        """E of groups number `which` under float32 scales and windows, all of one length; Inf
        where a value comes back beyond what its reader holds."""
        low, high = (
            np.broadcast_to(ends[window], which.shape) for ends in (self.grid.lows, self.grid.highs)
        )
        step = max(1, _TERMS // min(len(self.x), CHUNK))
        parts = [slice(at, at + step) for at in range(0, which.size, step)]
        sums = [self._errors(which[p], scale[p], low[p], high[p]) for p in parts]
        error = np.concatenate([np.empty(0), *sums])
        if self.is_huge.any():
            error[self.overflows(which, scale, low, high)] = np.inf
        return error

    def overflows(self, which: Array, scale: Array, low: Array, high: Array) -> Array:
        """Whether a value comes back larger than the group's limit, unless there are no ends."""
        with np.errstate(over="ignore", under="ignore"):
            above = np.minimum(self.grid.rounded(self.highest[which] / scale), high)
            below = np.minimum(self.grid.rounded(self.lowest[which] / scale), -low)
        value = np.maximum(above, below) * scale.astype(np.float64)
        return np.asarray((value > self.limit[which]) & (high < _FAR))

    def _errors(self, which: Array, scale: Array, low: Array, high: Array) -> Array:
        total = np.zeros(which.size)
        for begin in range(0, len(self.x), CHUNK):
            x = self.x[begin : begin + CHUNK].take(which, axis=1)
            with np.errstate(over="ignore", under="ignore"):
                term = self.grid.rounded(x / scale)
            np.clip(term, low, high, out=term)
            term *= scale.astype(np.float64)
            np.subtract(x, term, out=term)
            term *= term
            if self.weights is not None:
                term *= self.weights[begin : begin + CHUNK].take(which, axis=1)
            lanes = np.add.reduce(term.reshape(-1, LANES, which.size), axis=0)
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            total += lanes[0]
        return total

    def reach(self, error: Array) -> tuple[Array, Array]:
        """(a, b) of every group: codes that end at or before a, or -b on the other side, clip
        values by more than the error given.

        sum of w max(0, x - a)^2 falls with a: bisection in [0, high].
        """
        limit = error * (1 + 1e-9)
        ends = []
        for side, top in ((self.x, self.high), (-self.x, self.low)):
            outside, inside = np.zeros(self.count), top.astype(np.float64)
            for _ in range(12):
                middle = (outside + inside) / 2
                clips = self._weighted(np.maximum(side - middle, 0.0) ** 2) > limit
                outside, inside = np.where(clips, middle, outside), np.where(clips, inside, middle)
            ends.append(outside)
        return ends[0], ends[1]

    def _weighted(self, terms: Array) -> Array:
        return np.asarray((terms if self.weights is None else terms * self.weights).sum(axis=0))


class Best:
    """The least error of every group so far, its scale and window: of equal errors the smaller
    scale, then the first window."""

    def __init__(self, groups: Groups, scale: Array, window: Array) -> None:
        self.scale, self.window = scale, window
        self.error = groups.errors(np.arange(groups.count), scale, window)

    def offer(self, which: Array, error: Array, scale: Array, window: Array | int) -> None:
        """Candidates, group by group."""
        if not which.size:
            return
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        least = np.minimum.reduceat(error, starts)
        ties = np.flatnonzero(error == np.repeat(least, np.diff(starts, append=which.size)))
        window = np.broadcast_to(window, which.shape)
        ties = ties[np.lexsort((window[ties], scale[ties], which[ties]))]
        first = ties[np.flatnonzero(np.diff(which[ties], prepend=-1))]
        group, error, scale, window = which[first], error[first], scale[first], window[first]
        old = (self.error[group], self.scale[group], self.window[group])
        same = error == old[0]
        better = (error < old[0]) | (same & (scale < old[1]))
        better |= same & (scale == old[1]) & (window < old[2])
        group = group[better]
        self.error[group], self.scale[group] = error[better], scale[better]
        self.window[group] = window[better]


def spread(counts: Array) -> tuple[Array, Array]:
    """counts[i] times i for every i, and the number of each among its equals."""
    which = np.repeat(np.arange(counts.size), counts)
    number = np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, number

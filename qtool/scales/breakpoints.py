"""The float32 scale of least squared error.

Between breakpoints, scales at which a quotient x / s lies halfway between neighbouring codes, the
codes k are the same and E(s) = X - 2 s A + s^2 B is a parabola: X, A, B = sums of w x^2, w k x and
w k^2. Between the bounds that optimal.py proves:

Cells. The float32 numbers that begin with the same bits are a cell. With c one of its scales, s any
other, r = |c / s - 1| and k the codes at s,
    sqrt(E(c)) <= ||x - k c|| <= ||x - k s|| + r ||k s|| <= sqrt(E(s)) + r (||x|| + sqrt(E(s)))
(codes of a window are the nearest ones), so that a cell with sqrt(E(c)) > e + r (||x|| + e) has no
error below e^2. Asymmetric: first without a window's ends, then window by window.

Sweeps. In the cells that are left, breakpoints are sorted and A and B followed from the cell's
right end to its left one. Of an interval between breakpoints, the best float32 numbers are the
neighbours of the parabola's minimum in it, or those of an end; codes are as in real arithmetic
except within two float32 numbers of a breakpoint. So the eight float32 numbers around the minimum
are candidates, wherever the minimum is below the least error known, and these get their real codes.

Errors are within 1e-12 of the least one; of scales on one parabola, float64 sums may tell no more.

Cost: elements times cells, 10 ns each: 128 per octave for types of up to 4 bits, 512 for longer
float and 1024 for longer integer types; then 1 us per breakpoint in the cells that are left.
Asymmetric, 2 to 10 times that. The kernel, which looks at fewer cells, takes 0.1 to 0.5 us per
element all in all, and up to 15 us for uint8 groups of 100000 with zero points.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.scales.bounds import bounds, unclipped, windows
from qtool.scales.squares import UNCLIPPED, Best, Grid, Groups, spread

Array = NDArray[Any]

_UNHALVED = 2.0**-125 - 2.0**-149
_LARGEST = np.int32(0x7F7FFFFF)
_TINY = 1e-15  # of X, beyond what rounding does to errors along a sweep
_TERMS, _SWEEPS = 1 << 20, 1 << 12  # that are done together
_AROUND = np.arange(-4, 5, dtype=np.int32)


def sweep(groups: Groups, best: Best) -> None:
    """Offer the float32 scales that may be better."""
    grid = groups.grid
    if groups.is_huge.any():
        _offer_limits(groups, best)
    if not grid.shifts:
        for number in range(grid.count):
            _search(groups, best, *_cells(groups, best, number), number)
        return
    which, cell = _cells(groups, best, UNCLIPPED)
    near = _promising(groups, best, which, cell, UNCLIPPED)
    which, cell = which[near], cell[near]
    fits, window = unclipped(groups, which, _edges(cell, grid)[0])
    _search(groups, best, which[fits], cell[fits], window[fits])
    which, cell = which[~fits], cell[~fits]
    pair, window = windows(groups, best, which, _edges(cell, grid)[1])
    _search(groups, best, which[pair], cell[pair], window)
    fits, window = unclipped(groups, np.arange(groups.count), best.scale)
    fits &= groups.absmax > 0
    best.window[fits] = window[fits]


def _offer_limits(groups: Groups, best: Best) -> None:
    """Offer, in all windows, the largest scales with which codes do not come back too large."""
    codes = _Levels(groups.grid).positive(groups.grid.width)
    largest = np.minimum(groups.limit[groups.is_huge][:, None] / codes, ops.FLOAT32.qmax)
    scale = _around(largest.reshape(-1).astype(np.float32))
    which = np.repeat(np.flatnonzero(groups.is_huge), codes.size * _AROUND.size)
    for window in range(groups.grid.count):
        best.offer(which, groups.errors(which, scale, window), scale, window)


def _around(scale: Array) -> Array:
    """The float32 numbers around each one."""
    bits = scale.view(np.int32)[:, None] + _AROUND
    return np.asarray(np.clip(bits, 1, _LARGEST).reshape(-1).view(np.float32))


def _cells(groups: Groups, best: Best, window: int) -> tuple[Array, Array]:
    """All cells between the bounds: numbers of groups and of cells."""
    shift = cell_bits(groups.grid)
    low, high = bounds(groups, best, window, _UNHALVED)
    first, last = (
        np.minimum(end, ops.FLOAT32.qmax).astype(np.float32).view(np.int32) >> shift
        for end in (low, high)
    )
    which, number = spread(np.where(high > 0, np.maximum(last - first, 0) + 1, 0))
    return which, (first[which] + number).astype(np.int32)


def cell_bits(grid: Grid) -> int:
    """Bits in which the float32 numbers of a cell differ: errors, relative to x, are larger than
    the cells are wide."""
    if grid.dtype.bits <= 4:
        return 16
    return 13 if grid.dtype.is_integer else 14


def middles(cell: Array, grid: Grid) -> Array:
    shift = cell_bits(grid)
    return ((cell << shift) + np.int32(1 << (shift - 1))).view(np.float32)


def _edges(cell: Array, grid: Grid) -> tuple[Array, Array]:
    """The smallest scale of every cell and the one after the largest."""
    shift = cell_bits(grid)
    left, right = np.maximum(cell << shift, 1), np.minimum((cell + 1) << shift, _LARGEST)
    return left.view(np.float32), right.view(np.float32)


def _promising(groups: Groups, best: Best, which: Array, cell: Array, window: Array | int) -> Array:
    """Which cells may have an error below the best one, after offering the middle of all."""
    middle = middles(cell, groups.grid)
    error = groups.errors(which, middle, window)
    if np.ndim(window) or window != UNCLIPPED:
        best.offer(which, error, middle, window)
    left = _edges(cell, groups.grid)[0].astype(np.float64)
    least, norm = np.sqrt(best.error[which]), groups.norm[which]
    bound = least + (middle / left - 1) * (norm + least) + 1e-6 * norm
    return np.asarray((np.sqrt(error) <= bound) | groups.is_huge[which])


def _search(groups: Groups, best: Best, which: Array, cell: Array, window: Array | int) -> None:
    """Sweep the promising ones of cells, a few at a time."""
    near = _promising(groups, best, which, cell, window)
    window = np.broadcast_to(window, which.shape)[near]
    which, (left, right) = which[near], _edges(cell[near], groups.grid)
    while (wide := right / 2 > left).any():  # of subnormal numbers: sums would lose digits
        order = np.argsort(np.concatenate([which, which[wide]]), kind="stable")
        middle, rest = right.copy(), right[wide]
        middle[wide] = 2 * left[wide]
        left = np.concatenate([left, middle[wide]])[order]
        right = np.concatenate([middle, rest])[order]
        which, window = (np.concatenate([of, of[wide]])[order] for of in (which, window))
    step = max(1, min(_SWEEPS, _TERMS // len(groups.x)))
    for at in range(0, which.size, step):
        part = slice(at, at + step)
        _sweep(groups, best, which[part], left[part], right[part], window[part])


def _sweep(
    groups: Groups, best: Best, which: Array, left: Array, right: Array, window: Array
) -> None:
    """Offer what is around the minima of E in every [left, right]: first around the least one of
    each group, then around all that are below what that has given.

    As functions of u = s / right - 1, relative to X: E = c + g u + b u^2.
    """
    pair, start, end, c, g, b = _intervals(groups, which, left, right, window)
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.clip(np.where(b > 0, -0.5 * g / b, 0.0), end, start)
    error = c + g * u + b * u * u
    margin, square = 2.0**-52 * (64 + len(groups.x)), groups.norm[which] ** 2
    first = np.flatnonzero(np.diff(which[pair], prepend=-1))
    least = np.minimum.reduceat(error, first)
    is_least = error == np.repeat(least, np.diff(first, append=pair.size))
    for chosen in (is_least, ~is_least):
        near = error <= (best.error[which] / square * (1 + margin) + _TINY)[pair]
        some, at = pair[chosen & near], u[chosen & near]
        scale = _around(((1 + at) * right[some]).astype(np.float32)).view(np.int32)
        keys = np.unique(np.repeat(some, _AROUND.size) << 32 | scale)
        some, scale = keys >> 32, keys.astype(np.int32).view(np.float32)
        best.offer(
            which[some], groups.errors(which[some], scale, window[some]), scale, window[some]
        )


def _intervals(
    groups: Groups, which: Array, left: Array, right: Array, window: Array
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The intervals between breakpoints, from right to left: number of the pair of group and
    [left, right], the interval's right and left end in u, and c, g and b.

    At a breakpoint u = d of a code k and the next one, m, E becomes larger by
    (m^2 - k^2) (u^2 + (1 - d) u - d).
    """
    x = groups.x[:, which].astype(np.float64)
    weight = 1.0 if groups.weights is None else groups.weights[:, which]
    high, low = groups.grid.highs[window], groups.grid.lows[window]
    unit, levels = right.astype(np.float64), _Levels(groups.grid)
    last = levels.index(np.where(x > 0, high, -low))
    x = np.abs(x) / unit
    inner = np.minimum(levels.index(x), last)
    count = np.minimum(levels.index(x / (left / unit)), last) - inner
    share = np.broadcast_to((unit / groups.norm[which]) ** 2 * weight, x.shape)
    value = levels.value(inner)
    steps = [(share * (x - value) ** 2).sum(axis=0), (-2 * share * value * (x - value)).sum(axis=0)]
    steps.append((share * value * value).sum(axis=0))
    element, number = spread(count.T.reshape(-1))
    pair = np.concatenate([np.arange(which.size), element // len(x)])
    index = inner.T.reshape(-1)[element] + number
    d = x.T.reshape(-1)[element] / levels.halfway(index) - 1
    step = share.T.reshape(-1)[element]
    step = step * (levels.value(index + 1) ** 2 - levels.value(index) ** 2)
    start = np.concatenate([np.zeros(which.size), d])
    order = np.lexsort((-start, np.arange(pair.size) >= which.size, pair))
    pair, start = pair[order], start[order]
    end = np.roll(start, -1)
    final = np.flatnonzero(np.diff(pair, append=-1))
    end[final] = (left / unit - 1)[pair[final]]
    c, g, b = (
        _running(np.concatenate([at_right, change])[order], pair)
        for at_right, change in zip(steps, (-step * d, step * (1 - d), step), strict=True)
    )
    return pair, start, end, c, g, b


def _running(steps: Array, pair: Array) -> Array:
    """Sums of the steps of every pair so far; longer floats, as all sums of the others come in."""
    total = np.cumsum(steps, dtype=np.longdouble)
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    return (total - (total - steps)[first][pair]).astype(np.float64)


class _Levels:
    """The codes of a grid from 0 upwards, by their number."""

    def __init__(self, grid: Grid) -> None:
        self._values = None
        if not grid.dtype.is_integer:
            codes = np.arange(1 << (grid.dtype.bits - 1), dtype=np.uint8)
            values = codes.view(grid.dtype.numpy).astype(np.float64)
            self._values = np.append(np.sort(values[np.isfinite(values)]), np.inf)
            self._halfway = (self._values[1:] + self._values[:-1]) / 2

    def positive(self, width: int) -> Array:
        """All codes above 0, up to width."""
        return np.arange(1.0, width + 1) if self._values is None else self._values[1:-1]

    def index(self, quotient: Array) -> Array:
        """Number of the nearest code."""
        if self._values is None:
            return np.rint(np.minimum(quotient, 2.0**30)).astype(np.int64)
        return np.searchsorted(self._halfway, quotient)

    def value(self, index: Array) -> Array:
        return index.astype(np.float64) if self._values is None else self._values[index]

    def halfway(self, index: Array) -> Array:
        """Between a code and the next one."""
        return index + 0.5 if self._values is None else self._halfway[index]

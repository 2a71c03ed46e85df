"""The ranges of groups whose values come in pieces, in passes over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.scales import entropy
from qtool.scales.ranges import between
from qtool.spec import QuantSpec

Array = NDArray[Any]

# A piece: the first of the groups that it has values of, and those: float32 (rows, groups, more).
Piece = tuple[int, Array]
# Gives all pieces, in any order, whenever it is called.
Pieces = Callable[[], Iterator[Piece]]

_COUNTERS = 1 << 23  # that a pass of order_statistics() has at most, where it can


@dataclass(frozen=True, slots=True)
class Extremes:
    """The range of the finite values of every group, (0, 0) without any, and their number."""

    low: Array
    high: Array
    count: Array


def ranges(pieces: Pieces, groups: int, spec: QuantSpec) -> tuple[Array, Array]:
    """float64 (low, high) of every group by percentile or entropy, as of all values at once."""
    found = extremes(pieces, groups)
    if spec.method == "entropy":
        levels = entropy.levels_of(spec.dtype)
        absmax = np.maximum(-found.low, found.high)
        counts = np.zeros((groups, entropy.bins_of(levels)), np.int64)
        for first, values in pieces():
            last = first + values.shape[1]
            rows = _finite(values).swapaxes(0, 1).reshape(values.shape[1], -1)
            entropy.add_histograms(counts[first:last], rows, absmax[first:last])
        return entropy.within(counts, found.low, found.high, levels)
    p = spec.percentile
    assert p is not None
    if spec.symmetric:
        upper = percentiles(pieces, found.count, [p], magnitudes=True)[0]
        lower = -upper
    else:
        ends = [100 - p, p]
        lower, upper = percentiles(pieces, found.count, ends)
    return between(lower, upper, found.low, found.high, spec)


def extremes(pieces: Pieces, groups: int) -> Extremes:
    """From one pass."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    count = np.zeros(groups, np.int64)
    for first, values in pieces():
        place = slice(first, first + values.shape[1])
        finite = _finite(values)
        np.fmin(low[place], np.fmin.reduce(finite, axis=(0, 2)), out=low[place])
        np.fmax(high[place], np.fmax.reduce(finite, axis=(0, 2)), out=high[place])
        count[place] += np.count_nonzero(~np.isnan(finite), axis=(0, 2))
    return Extremes(np.where(count, low, 0.0), np.where(count, high, 0.0), count)


def percentiles(
    pieces: Pieces, count: Array, percents: list[float], *, magnitudes: bool = False
) -> Array:
    """Percentiles of the finite values of every group, or of their magnitudes, as np.percentile()
    gives them in float64; 0 for a group without any.

    count: finite values of every group. Returns (percents, groups).
    """
    virtual = np.maximum(count - 1, 0) * (np.array(percents)[:, None] / 100)
    below = np.floor(virtual).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(count - 1, 0))
    both = order_statistics(pieces, np.concatenate([below, above]), magnitudes=magnitudes)
    a, b = np.split(both.astype(np.float64), 2)
    t = virtual - below
    step = b - a
    found = np.where(t >= 0.5, b - step * (1 - t), a + step * t)
    return np.where(count, found, 0.0)


def order_statistics(pieces: Pieces, ranks: Array, *, magnitudes: bool = False) -> Array:
    """The values of those ranks, from 0 for the least, among the finite ones of every group.

    ranks: (many, groups). float32 bits, made so that they count up with the values, are chosen
    from the highest down, some in every pass: memory does not depend on how many values there are.
    """
    many, groups = ranks.shape
    bits = next((b for b in (16, 8) if many * groups << b <= _COUNTERS), 4)
    rest, prefix = ranks.copy(), np.zeros(ranks.shape, np.uint32)
    for shift in range(32 - bits, -1, -bits):
        distinct, which = np.unique(prefix, axis=0, return_inverse=True)
        counts = np.zeros((len(distinct), groups, 1 << bits), np.int64)
        for first, values in pieces():
            keys, numbers = _keys(np.abs(values) if magnitudes else values, first)
            for of_prefix, chosen in zip(counts, distinct, strict=True):
                inside, group = keys, numbers
                if shift + bits < 32:
                    same = keys >> np.uint32(shift + bits) == chosen[numbers]
                    inside = keys[same]
                    group = np.broadcast_to(numbers, keys.shape)[same] if groups > 1 else numbers
                digit = inside >> np.uint32(shift) & np.uint32((1 << bits) - 1)
                place = digit + (group << bits) if groups > 1 else digit.astype(np.intp)
                entropy.add_counts(of_prefix.reshape(-1), place)
        totals = np.cumsum(counts, axis=2)[which]
        digit = (totals <= rest[..., None]).sum(axis=2)
        digit = np.minimum(digit, (1 << bits) - 1)  # of a group without values
        before = totals - counts[which]
        rest -= np.take_along_axis(before, digit[..., None], axis=2)[..., 0]
        prefix = prefix << np.uint32(bits) | digit.astype(np.uint32)
    return _values(prefix)


def _finite(values: Array) -> Array:
    """The values, NaN for those that are not finite."""
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, np.float32(np.nan))


def _keys(values: Array, first: int) -> tuple[Array, Array]:
    """uint32 in the order of the finite values, and the numbers of their groups, to be broadcast;
    first: that of the first one."""
    numbers = np.arange(first, first + values.shape[1])[:, None]
    finite = np.isfinite(values)
    if not finite.all():
        numbers = np.broadcast_to(numbers, values.shape)[finite]
        values = values[finite]
    bits = np.ascontiguousarray(values).view(np.int32)
    return (bits ^ (bits >> 31 | np.int32(-(1 << 31)))).view(np.uint32), numbers


def _values(keys: Array) -> Array:
    """The float32 values of keys."""
    sign = np.uint32(0x80000000)
    return np.where(keys & sign, keys & ~sign, ~keys).view(np.float32)

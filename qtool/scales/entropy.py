"""The range of a group in which its values, quantized, keep most of their distribution.

    threshold = the t of least KL(P || Q)

P is the histogram of the values, those beyond [-t, t] counted into its outermost bins. Q is the
histogram within [-t, t] merged into as many runs of bins as there are codes, the last one with what
is left over, and spread evenly, in whole numbers, over those of a run's bins where P is not empty;
every bin of the run gets such a share, those left over get none. In both, empty bins take 0.0001
counts from the others in equal parts. A t is the outer edge of any bin between the one that gives
every code a bin and the last one.

Source: S. Migacz, 8-bit Inference with TensorRT, GTC 2017; the details are those of onnxruntime's
HistogramCollector.get_entropy_threshold, which this equals on the same
histogram, but for ones with no divergence at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.scales.logarithm import log

Array = NDArray[Any]

_EPSILON = 0.0001
_BINS = 16  # of every code, as in TensorRT: 2048 on each side for 128 codes
_MOST_CODES = 256  # finer grids clip nothing that such a one would keep
_PIECE = 1 << 16  # values that are counted at once
_TOGETHER = 1 << 17  # bins of groups whose thresholds are found at once


def levels_of(dtype: DType) -> int:
    """How many codes the histograms for a type are merged into."""
    return int(min(2**dtype.bits, _MOST_CODES))


def ranges(x: Array, levels: int) -> tuple[Array, Array]:
    """float64 (low, high) of every group: [-t, t], as far as values of it reach.

    x: float32 (groups, elements). NaN is left out; a group without values has (0, 0).
    """
    low = np.fmin.reduce(x, axis=1, initial=np.inf).astype(np.float64)
    high = np.fmax.reduce(x, axis=1, initial=-np.inf).astype(np.float64)
    is_empty = low > high
    low, high = np.where(is_empty, 0.0, low), np.where(is_empty, 0.0, high)
    counts = np.zeros((len(x), bins_of(levels)), np.int64)
    add_histograms(counts, x, np.maximum(-low, high))
    return within(counts, low, high, levels)


def bins_of(levels: int) -> int:
    """How many bins a histogram has: zero is in the middle of one."""
    return levels * _BINS + 1


def add_histograms(counts: Array, x: Array, absmax: Array) -> None:
    """Count how many values of a group lie in each of equal bins of [-absmax, absmax].

    counts: int64 (groups, bins), added to. x: (groups, elements), of magnitudes up to absmax
    (groups,); NaN is left out.
    """
    bins = counts.shape[1]
    unit = np.where(absmax > 0, absmax, 1.0)[:, None]
    begins = np.arange(len(x))[:, None] * bins
    wide = max(_PIECE // max(len(x), 1), 1)
    for start in range(0, x.shape[1], wide):
        place = x[:, start : start + wide] / unit
        place += 1.0
        place *= bins / 2
        np.minimum(place, bins - 1, out=place)
        is_number = ~np.isnan(place)
        if is_number.all():
            number = place.astype(np.intp)
            number += begins
        else:
            number = (np.where(is_number, place, 0).astype(np.intp) + begins)[is_number]
        add_counts(counts.reshape(-1), number)


def add_counts(counts: Array, places: Array) -> None:
    """counts[place] += 1 for every place."""
    if places.size < counts.size:
        np.add.at(counts, places, 1)
    else:
        counts += np.bincount(places.reshape(-1), minlength=counts.size)


def within(counts: Array, low: Array, high: Array, levels: int) -> tuple[Array, Array]:
    """[-t, t] of groups with such histograms, as far as [low, high] reaches.

    All of [low, high] for a group of fewer values than bins, which has no distribution to speak of.
    """
    bins = counts.shape[1]
    steps = np.full(len(counts), bins // 2)
    [many] = np.nonzero(counts.sum(axis=1) >= bins)
    together = max(_TOGETHER // bins, 1)
    for start in range(0, len(many), together):
        part = many[start : start + together]
        steps[part] = thresholds(counts[part], levels)
    t = np.maximum(-low, high) * ((2 * steps + 1) / bins)
    return np.maximum(low, -t), np.minimum(high, t)


def thresholds(counts: Array, levels: int) -> Array:
    """How many bins beside the middle one lie within the threshold of every group.

    counts: (groups, bins), not all of them empty. Of equal divergences the first one is taken; all
    bins where there is none.
    """
    middle, bins = counts.shape[1] // 2, counts.shape[1]
    before = np.cumsum(counts, axis=1)
    least = np.full(len(counts), np.inf)
    found = np.full(len(counts), middle)
    for step in range(levels // 2, middle + 1):
        start, end = middle - step, min(middle + step + 1, bins)
        inside = counts[:, start:end]
        p = inside.copy()
        p[:, 0] += before[:, start] - counts[:, start]
        p[:, -1] += before[:, -1] - before[:, end - 1]
        divergence = _divergence(p, _merged(inside, p != 0, levels))
        is_better = divergence < least
        least = np.where(is_better, divergence, least)
        found = np.where(is_better, step, found)
    return found


def _merged(inside: Array, is_filled: Array, levels: int) -> Array:
    """The counts that are left of those inside by so many codes."""
    run = inside.shape[1] // levels
    whole = run * levels
    sums = inside[:, :whole].reshape(-1, levels, run).sum(axis=2)
    sums[:, -1] += inside[:, whole:].sum(axis=1)
    filled = is_filled[:, :whole].reshape(-1, levels, run).sum(axis=2)
    q = np.zeros(inside.shape, np.int64)
    q[:, :whole] = np.repeat(np.where(filled, sums // np.maximum(filled, 1), 0), run, axis=1)
    return q


def _divergence(p: Array, q: Array) -> Array:
    """KL of smoothed counts, each row divided by its sum; infinite where q has none at all."""
    has_none = ~q.any(axis=1)
    p, q = _smoothed(p), _smoothed(q)
    p /= p.sum(axis=1, keepdims=True)
    q /= q.sum(axis=1, keepdims=True)
    return np.where(has_none, np.inf, (p * log(p / q)).sum(axis=1))


def _smoothed(counts: Array) -> Array:
    """Counts of which empty bins take a little from the others."""
    is_empty = counts == 0
    empty = is_empty.sum(axis=1, keepdims=True)
    share = _EPSILON * empty / np.maximum(counts.shape[1] - empty, 1)
    return np.where(is_empty, _EPSILON, counts - share)

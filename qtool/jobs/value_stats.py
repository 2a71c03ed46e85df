"""Figures of the values of a tensor: range, special values, outliers, histogram."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops

BINS = 16
_PIECE = 1 << 20


def figures_of(values: NDArray[Any], bins: int = BINS) -> dict[str, Any]:
    """Figures of the finite values; histogram: counts in equal bins from min to max."""
    pieces = [slice(start, start + _PIECE) for start in range(0, values.size, _PIECE)]
    nan = inf = zeros = 0
    low, high = math.inf, -math.inf
    for piece in pieces:
        x = ops.cast(values[piece], ops.FLOAT64)
        finite = np.isfinite(x)
        nan += int(np.isnan(x).sum())
        inf += int(np.isinf(x).sum())
        zeros += int(np.count_nonzero(x == 0))
        low = min(low, float(x.min(where=finite, initial=math.inf)))
        high = max(high, float(x.max(where=finite, initial=-math.inf)))
    count = values.size - nan - inf
    figures: dict[str, Any] = {"nan_count": nan, "inf_count": inf, "zero_count": zeros}
    if not count:
        return figures | dict.fromkeys(("min", "max", "rms", "outlier_ratio", "histogram"))
    absmax = max(abs(low), abs(high))
    squares = 0.0
    histogram = np.zeros(bins, np.int64)
    for piece in pieces:
        x = ops.cast(values[piece], ops.FLOAT64)
        x = x[np.isfinite(x)] / (absmax or 1.0)  # scaled, so that squares cannot overflow
        squares += float(np.square(x).sum())
        histogram += _histogram(x, low / (absmax or 1.0), high / (absmax or 1.0), bins)
    rms = math.sqrt(squares / count)
    return figures | {
        "min": low,
        "max": high,
        "rms": rms * absmax,
        "outlier_ratio": 1 / rms if rms else None,
        "histogram": histogram.tolist(),
    }


def _histogram(x: NDArray[Any], low: float, high: float, bins: int) -> NDArray[np.int64]:
    """Counts of x in equal bins; np.histogram refuses ranges of a few units in the last
    place."""
    place = (x - low) * (bins / (high - low)) if high > low else np.full(x.shape, bins / 2)
    return np.bincount(np.clip(place.astype(np.int64), 0, bins - 1), minlength=bins)

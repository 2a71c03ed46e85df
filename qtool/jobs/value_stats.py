"""Figures of the values of a tensor: range, special values, outliers, histogram."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.engine import restore_plain
from qtool.formats import Source
from qtool.layouts.dequantized import DequantizedSource
from qtool.spec import TensorInfo

Array = NDArray[Any]

BINS = 16
_PIECE = 1 << 17


def figures_of(source: Source, info: TensorInfo, bins: int = BINS) -> dict[str, Any]:
    """Figures of the finite values of one tensor; histogram: counts in equal bins from min to max.

    The source is read twice, in pieces.
    """
    nan = inf = zeros = 0
    low, high = math.inf, -math.inf
    for x in _pieces(source, info):
        finite = np.isfinite(x)
        nan += int(np.isnan(x).sum())
        inf += int(np.isinf(x).sum())
        zeros += int(np.count_nonzero(x == 0))
        low = min(low, float(x.min(where=finite, initial=math.inf)))
        high = max(high, float(x.max(where=finite, initial=-math.inf)))
    count = info.size - nan - inf
    figures: dict[str, Any] = {"nan_count": nan, "inf_count": inf, "zero_count": zeros}
    if not count:
        return figures | dict.fromkeys(("min", "max", "rms", "outlier_ratio", "histogram"))
    absmax = max(abs(low), abs(high))
    squares = 0.0
    histogram = np.zeros(bins, np.int64)
    for piece in _pieces(source, info):
        x = piece[np.isfinite(piece)] / (absmax or 1.0)  # scaled, so that squares cannot overflow
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


def _pieces(source: Source, info: TensorInfo) -> Iterator[Array]:
    """All values in order, in pieces of one size; of quantized tensors what codes stand for."""
    room, held = np.empty(min(_PIECE, info.size)), 0
    for values in _values(source, info):
        while values.size:
            part = values[: room.size - held]
            room[held : held + part.size] = ops.cast(part, ops.FLOAT64)
            held, values = held + part.size, values[part.size :]
            if held == room.size:
                yield room
                held = 0
    if held:
        yield room[:held]


def _values(source: Source, info: TensorInfo) -> Iterator[Array]:
    if isinstance(source, DequantizedSource) and info.name in source.tensors:
        with source.codes(info.name) as codes:
            yield from restore_plain.values(codes, info.dtype)
        return
    with source.reading(info.name) as read:
        for start in range(0, info.size, _PIECE):
            values = np.empty(min(_PIECE, info.size - start), info.dtype.numpy)
            read(start, values)
            yield values


def _histogram(x: Array, low: float, high: float, bins: int) -> NDArray[np.int64]:
    """Counts of x in equal bins; np.histogram refuses ranges of a few units in the last
    place."""
    place = (x - low) * (bins / (high - low)) if high > low else np.full(x.shape, bins / 2)
    return np.bincount(np.clip(place.astype(np.int64), 0, bins - 1), minlength=bins)

"""The range of every group of a tensor: from minimum to maximum, or as a method narrows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.scales import entropy
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, Shape, Tiled

Array = NDArray[Any]


def ranges(x: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """float64 (low, high) of each group; (0, 0) for a group without finite values."""
    if x.size == 0:
        empty = np.zeros(spec.granularity.scale_shape(x.shape))
        return empty, empty
    finite = np.isfinite(x)
    all_finite = bool(finite.all())
    if spec.method == "entropy":
        numbers = x if all_finite else np.where(finite, x, np.float32(np.nan))
        rows = grouped(numbers, spec.granularity, np.nan)
        shape = spec.granularity.scale_shape(x.shape)
        low, high = entropy.ranges(rows, entropy.levels_of(spec.dtype))
        return low.reshape(shape), high.reshape(shape)
    masked = x if all_finite else np.where(finite, x, np.float32(0))
    low = _reduce(np.minimum, masked, spec.granularity).astype(np.float64)
    high = _reduce(np.maximum, masked, spec.granularity).astype(np.float64)
    if spec.percentile is None:
        return low, high
    if not all_finite:
        # NaN marks what to leave out; a group without finite values is one of zeros.
        some = _reduce(np.logical_or, finite, spec.granularity)
        some = _expanded(some, x.shape, spec.granularity)
        x = np.where(finite, x, np.where(some, np.float32(np.nan), np.float32(0)))
    return _percentiles(x, spec, spec.percentile, low, high)


def largest(bound: Array | float, storage: DType) -> Array:
    """What values of groups with that largest magnitude may come back as, float64: the largest
    finite float32, or value of a 16-bit type of the scale's own that holds the group."""
    top = ops.FLOAT32.qmax
    own = min(storage.qmax, top) if storage.bits == 16 else top
    return np.asarray(np.where(bound <= own, own, top))


def _percentiles(
    x: Array, spec: QuantSpec, p: float, low: Array, high: Array
) -> tuple[Array, Array]:
    """The range between percentiles p and 100 - p of a group, or [-t, t] with t the percentile p
    of its absolute values; the whole range where that is empty."""
    if spec.symmetric:
        upper = _group_percentile(np.abs(x), p, spec.granularity)
        return between(-upper, upper, low, high, spec)
    lower = _group_percentile(x, 100 - p, spec.granularity)
    return between(lower, _group_percentile(x, p, spec.granularity), low, high, spec)


def between(
    lower: Array, upper: Array, low: Array, high: Array, spec: QuantSpec
) -> tuple[Array, Array]:
    """The range between percentiles, with 0 in it; [low, high] where that is empty."""
    if not spec.symmetric:
        lower, upper = np.minimum(lower, 0.0), np.maximum(upper, 0.0)
    usable = upper > lower
    return np.where(usable, lower, low), np.where(usable, upper, high)


def _group_percentile(x: Array, p: float, granularity: Granularity) -> Array:
    """The percentile p (linear interpolation, in float64) of each group, NaN left out."""
    percentile = np.nanpercentile if np.isnan(x).any() else np.percentile
    x = x.astype(np.float64)
    if isinstance(granularity, PerTensor):
        return np.asarray(percentile(x, p))
    if isinstance(granularity, Tiled):
        return _by_bands(lambda band, blocks: _group_percentile(band, p, blocks), x, granularity)
    axis = granularity.axis
    if isinstance(granularity, PerAxis):
        others = tuple(i for i in range(x.ndim) if i != axis)
        return np.asarray(percentile(x, p, axis=others))
    size = granularity.block_size
    whole = x.shape[axis] // size * size
    full, tail = np.split(x, [whole], axis=axis)
    shape = (*x.shape[:axis], whole // size, size, *x.shape[axis + 1 :])
    parts = [percentile(full.reshape(shape), p, axis=axis + 1)]
    if tail.shape[axis]:
        parts.append(np.expand_dims(percentile(tail, p, axis=axis), axis))
    return np.concatenate(parts, axis=axis)


def _reduce(ufunc: np.ufunc, x: Array, granularity: Granularity) -> Array:
    """ufunc over the elements of each group."""
    if isinstance(granularity, PerTensor):
        return np.asarray(ufunc.reduce(x, axis=None))
    if isinstance(granularity, PerAxis):
        others = tuple(i for i in range(x.ndim) if i != granularity.axis)
        return np.asarray(ufunc.reduce(x, axis=others))
    if isinstance(granularity, Tiled):
        return _by_bands(lambda band, blocks: _reduce(ufunc, band, blocks), x, granularity)
    starts = np.arange(0, x.shape[granularity.axis], granularity.block_size)
    return np.asarray(ufunc.reduceat(x, starts, axis=granularity.axis))


def _by_bands(
    of_groups: Callable[[Array, Granularity], Array], x: Array, granularity: Tiled
) -> Array:
    """of_groups() of every row of tiles: a tile's columns one after another are a block."""
    parts = []
    for start in range(0, x.shape[-2], granularity.rows):
        band = x[..., start : start + granularity.rows, :]
        lines = band.swapaxes(-1, -2).reshape(*band.shape[:-2], -1)
        blocks = Blocked(lines.ndim - 1, granularity.columns * band.shape[-2])
        parts.append(of_groups(lines, blocks))
    return np.stack(parts, axis=-2)


def _expanded(values: Array, shape: Shape, granularity: Granularity) -> Array:
    """values of the scale shape, broadcastable to the tensor's."""
    if isinstance(granularity, Tiled):
        values, granularity = granularity.by_rows(values, shape)
    attributes = {"axis": 0, "block_size": 0} | granularity.attributes
    return ops.expand(values, shape, **attributes, thing="x")


def grouped(x: Array, granularity: Granularity, filler: float = 0.0) -> Array:
    """The elements of every group in a row, in their order, completed by the filler: (G, n)."""
    if isinstance(granularity, Tiled):
        rows, columns = map(min, granularity.shape, x.shape[-2:])
        padded = _padded(_padded(x, -2, rows, filler), -1, columns, filler)
        shape = (*x.shape[:-2], padded.shape[-2] // rows, rows, -1, columns)
        return padded.reshape(shape).swapaxes(-3, -2).reshape(-1, rows * columns)
    if isinstance(granularity, PerTensor):
        return x.reshape(1, -1)
    axis = granularity.axis
    if isinstance(granularity, PerAxis):
        return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    size = min(granularity.block_size, x.shape[axis])
    padded = _padded(x, axis, size, filler)
    blocks = padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return np.moveaxis(blocks, axis + 1, -1).reshape(-1, size)


def _padded(x: Array, axis: int, size: int, filler: float) -> Array:
    """x completed by the filler to a multiple of size along an axis."""
    rest = -x.shape[axis] % size
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, rest)
    return np.pad(x, widths, constant_values=filler) if rest else x

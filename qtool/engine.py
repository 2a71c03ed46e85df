"""Quantizes one tensor: chooses the scale, then walks the tensor in boxes of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool import ops, scales
from qtool.dtypes import DType, names, resolve
from qtool.errors import SpecError, TensorError
from qtool.spec import (
    PRECISIONS,
    Blocked,
    Granularity,
    PerTensor,
    QuantSpec,
    Shape,
)
from qtool.stats import Accumulator
from qtool.tensor import QuantizedTensor, operator_scale

Array = NDArray[Any]

BOX = 1 << 16  # elements: their float64 temporaries stay in the L2 cache


def quantize(
    x: ArrayLike,
    spec: QuantSpec,
    *,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    name: str = "x",
) -> QuantizedTensor:
    """Quantize one tensor as spec says.

    x: float32, float16, bfloat16, float64 (rounded to float32 first) or int32, any shape.
    scale, zero_point: given ones instead of spec.method: a number for every group, or an array of
        the granularity's scale shape. Without a zero point it is 0.
    name: what messages call the tensor.

    The codes are computed from the scale as it is stored; a chosen scale divides in float32 unless
    spec.precision says otherwise, a given one in the standard's default precision; oneDNN's
    semantics always divide in float32.
    Raises SpecError for arguments that do not fit, TensorError for NaN and Inf in x unless
    spec.nonfinite is "allow".
    """
    x = np.asarray(x, order="C")
    source = resolve(x.dtype, name)
    if source not in ops.SOURCES:
        raise SpecError(name, f"{source} is not a source type", f"use {names(ops.SOURCES)}")
    spec = spec.at(spec.granularity.resolve(x.shape))
    single = x if source.is_integer else ops.cast(x, ops.FLOAT32)
    if spec.nonfinite == "error" or spec.semantics == "dynamic":
        _check_finite(x, single, name)
    if scale is not None:
        thing, scale = f"scale of {name}", np.asarray(scale)
        storage = spec.storage_dtype(source, resolve(scale.dtype, thing))
        shape = spec.granularity.scale_shape(x.shape)
        stored = given_scale(scale, storage, shape, thing, negative=spec.negative_scale)
        zero = _given_zero_point(zero_point, spec, stored.shape, name)
        precision = _precision(spec, resolve(stored.dtype))
    elif zero_point is not None:
        raise SpecError(f"zero_point of {name}", "given without a scale", "give both")
    else:
        stored, zero = _chosen(single, spec, source, name)
        precision = _precision(spec, ops.FLOAT32)
    ops.check_scale(ops.cast(operator_scale(stored), precision), f"scale of {name}")
    return _quantize_boxes(x, single, stored, zero, spec, precision)


def _precision(spec: QuantSpec, default: DType) -> DType:
    """The type of the division: as asked for, or else the default where it can divide."""
    if spec.semantics == "onednn" or default not in PRECISIONS:
        default = ops.FLOAT32
    return spec.precision or default


def _quantize_boxes(
    x: Array, single: Array, scale: Array, zero: Array | None, spec: QuantSpec, precision: DType
) -> QuantizedTensor:
    """Codes and figures, box by box in C order, so that temporaries stay small."""
    dtype = spec.dtype
    y = np.empty(x.shape, dtype.numpy)
    figures = Accumulator(spec.qmin, dtype.qmax)
    shape = _folded(x.shape, spec.granularity)
    source, original, codes = single.reshape(shape), x.reshape(shape), y.reshape(shape)
    groups = _Groups(shape, spec.granularity)
    divisor = operator_scale(scale)
    for box in _boxes(shape):
        s = groups.of(divisor, box)
        z = None if zero is None else groups.of(zero, box)
        if spec.semantics == "onednn":
            v = ops.rounded_onednn(ops.cast(source[box], ops.FLOAT32), s, z, dtype)
        else:
            v = ops.rounded(source[box], s, z, dtype, precision)
        codes[box] = ops.saturate_cast(v, z, dtype, saturate=spec.saturate, qmin=spec.qmin)
        x_hat = ops.scaled(codes[box], s, z, ops.FLOAT32)
        figures.update(original[box], v, x_hat)
    return QuantizedTensor(y, scale, zero, spec, figures.finish(), precision)


class _Groups:
    """Finds the scale or zero point of every element of a box."""

    def __init__(self, shape: Shape, granularity: Granularity) -> None:
        outer, size, inner = shape
        blocked = isinstance(granularity, Blocked)
        block = granularity.block_size if isinstance(granularity, Blocked) else 1
        self._shape = (outer, -1, inner) if blocked else (1, -1, 1)
        self._blocked = blocked
        self._index = np.arange(size) // block  # of the group, along the axis

    def of(self, values: Array, box: tuple[slice, slice, slice]) -> Array:
        """values of the granularity's scale shape, broadcastable to the box."""
        if values.ndim == 0:
            return values
        rows, along, inner = box
        groups = values.reshape(self._shape)
        if not self._blocked:
            return groups[:, along]
        return groups[rows, :, inner].take(self._index[along], axis=1)


def _folded(shape: Shape, granularity: Granularity) -> Shape:
    """The shape as (before, along, after) the axis of the granularity."""
    if isinstance(granularity, PerTensor):
        return (1, 1, math.prod(shape))
    axis = granularity.axis
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def _boxes(shape: Shape) -> Iterator[tuple[slice, slice, slice]]:
    """The whole shape in contiguous pieces of about BOX elements, in C order."""
    outer, size, inner = shape
    if 0 in shape:
        return
    everything = slice(None)
    if size * inner <= BOX:
        for rows in _runs(outer, BOX // (size * inner)):
            yield rows, everything, everything
    elif inner <= BOX:
        for row in _runs(outer, 1):
            for along in _runs(size, BOX // inner):
                yield row, along, everything
    else:
        for row in _runs(outer, 1):
            for along in _runs(size, 1):
                for piece in _runs(inner, BOX):
                    yield row, along, piece


def _runs(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _check_finite(x: Array, single: Array, name: str) -> None:
    if single.dtype.kind == "i" or np.isfinite(single).all():
        return
    bad = ~np.isfinite(single)
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    value = x[index]
    what = f"{value} at {[int(i) for i in index]}, {int(bad.sum())} of {x.size} values"
    rule = "is not finite" if not np.isfinite(value) else "overflows float32"
    raise TensorError(
        f"tensor {name}",
        f"{what}: {rule}",
        "mend the weights, or use --nonfinite allow to saturate",
    )


def _chosen(single: Array, spec: QuantSpec, source: DType, name: str) -> tuple[Array, Array | None]:
    """The scale and zero point that the spec's method chooses."""
    try:
        return scales.choose(ops.cast(single, ops.FLOAT32), spec, spec.storage_dtype(source))
    except TensorError as error:  # from an operator, which knows no names
        raise TensorError(f"tensor {name}", error.rule, error.remedy) from None


def given_scale(
    scale: Array, storage: DType, shape: Shape, thing: str, *, negative: bool = False
) -> Array:
    """A given scale in its storage type and in the scale shape.

    Raises SpecError where it does not fit, is zero or not finite, or negative but must not be.
    """
    values = _fit(scale, shape, thing).astype(np.float64)
    if not negative and (values < 0).any():
        raise SpecError(thing, "a value below zero", "use --negative-scale if it is meant")
    stored = ops.cast(values, storage)
    ops.check_scale(stored, thing)
    return stored


def _given_zero_point(
    zero_point: ArrayLike | None, spec: QuantSpec, shape: Shape, name: str
) -> Array | None:
    """A given zero point as codes in the scale shape; None where none is given."""
    if zero_point is None:
        return None
    thing = f"zero_point of {name}"
    if spec.semantics == "onednn" and not spec.dtype.is_integer:
        raise SpecError(thing, f"oneDNN Quantize takes none for {spec.dtype}", "leave it out")
    return given_codes(zero_point, spec.dtype, shape, thing)


def given_codes(
    zero_point: ArrayLike, dtype: DType, shape: Shape, thing: str = "zero_point"
) -> Array:
    """A given zero point as codes of dtype, in the scale shape."""
    values = _fit(np.asarray(zero_point), shape, thing).astype(np.float64)
    codes = ops.saturate_cast(values, None, dtype)
    if not np.array_equal(codes.astype(np.float64), values):
        raise SpecError(
            thing,
            f"a value that {dtype} cannot hold",
            f"use values in [{dtype.qmin:g}, {dtype.qmax:g}]",
        )
    return np.asarray(codes)


def _fit(values: Array, shape: Shape, thing: str) -> Array:
    """values in the scale shape: one value stands for all groups."""
    resolve(values.dtype, thing)
    if values.shape == shape:
        return values
    if values.shape in ((), (1,)):
        return np.full(shape, values.reshape(()))
    raise SpecError(
        thing,
        f"shape {values.shape}, but the granularity needs {shape}",
        "give one value or that shape, or another --axis or --block-size",
    )

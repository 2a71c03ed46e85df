"""QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool.dtypes import DTYPES, DType, DTypeLike, names, resolve, resolve_target
from qtool.errors import SpecError
from qtool.ops.arithmetic import FLOAT32, cast, check_scale, rounded, saturate_cast, scaled
from qtool.ops.shapes import check_same_shape, expand
from qtool.spec import PRECISIONS

Array = NDArray[Any]

SOURCES = tuple(DTYPES[n] for n in ("float32", "float16", "bfloat16", "int32", "float64"))
Q_SCALES = tuple(DTYPES[n] for n in ("float32", "float16", "bfloat16", "int32", "float8e8m0"))
DQ_SCALES = tuple(DTYPES[n] for n in ("float32", "float16", "bfloat16", "float8e8m0"))


def quantize_linear(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
    precision: DTypeLike | None = None,
    saturate: bool = True,
) -> Array:
    """y = saturate(round_half_even(x / y_scale) + y_zero_point), in x's shape.

    x: (..., D, ...) of float32, float16, bfloat16 or int32; float64 is rounded to float32.
    y_scale, y_zero_point: () or (1,) per tensor, (D,) per axis, and with block_size B > 0 x's
        shape with ceil(D / B) in place of D.
    output_dtype: type of y; None or 0: y_zero_point's type, or uint8 without one.
    precision: type of the division, correctly rounded; None or 0: y_scale's type, or float32 for
        int32 and float8e8m0 scales.
    saturate: for the float8 types: out of range gives the largest finite value, or else NaN
        (Inf for float8e5m2).
    Float targets round once, from x / y_scale + y_zero_point, to their nearest value, ties to
    even. The zero point is added without overflow. NaN gives the type's NaN where it has one and
    else the zero point (0 for float4 and float6).

    Raises SpecError naming the input. Source: ONNX QuantizeLinear, versions 10 to 28.
    """
    inputs = quantize_inputs(x, y_scale, y_zero_point, output_dtype, precision)
    x, y_scale, zero_point, dtype, divide_in = inputs
    layout = (x.shape, axis, block_size)
    scale = expand(y_scale, *layout, "y_scale")
    zero = None if zero_point is None else expand(zero_point, *layout, "y_zero_point")
    return saturate_cast(rounded(x, scale, zero, dtype, divide_in), zero, dtype, saturate=saturate)


def dequantize_linear(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
) -> Array:
    """y = (x - x_zero_point) * x_scale, in x's shape.

    x: a type that QuantizeLinear produces, or int32 (which has no zero point).
    x_scale, x_zero_point: shapes as in quantize_linear.
    output_dtype: float32, float16 or bfloat16, the type of y and of the multiplication; None or
        0: x_scale's type (which must be named for float8e8m0).
    The difference is exact and rounded once to the output type, as is the product.

    Raises SpecError naming the input. Source: ONNX DequantizeLinear, versions 10 to 28.
    """
    x, x_scale = np.asarray(x), np.asarray(x_scale)
    source = resolve(x.dtype, "x")
    if not source.is_target and source.name != "int32":
        raise SpecError(
            "x",
            f"DequantizeLinear does not take {source}",
            "give codes of a quantized type or int32",
        )
    scale_dtype = _one_of(x_scale.dtype, DQ_SCALES, "x_scale")
    zero_point = None if x_zero_point is None else np.asarray(x_zero_point)
    if zero_point is not None:
        if resolve(zero_point.dtype, "x_zero_point") != source:
            raise SpecError("x_zero_point", f"{zero_point.dtype} does not match x", f"use {source}")
        if source.name == "int32":
            raise SpecError("x_zero_point", "int32 has no zero point", "leave it out")
        check_same_shape(x_scale, zero_point, "x_scale", "x_zero_point")
    output = _one_of(output_dtype or scale_dtype, PRECISIONS, "output_dtype")
    layout = (x.shape, axis, block_size)
    scale = expand(x_scale, *layout, "x_scale")
    zero = None if zero_point is None else expand(zero_point, *layout, "x_zero_point")
    return scaled(x, scale, zero, output)


def quantize_inputs(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None,
    output: DTypeLike | None,
    precision: DTypeLike | None,
) -> tuple[Array, Array, Array | None, DType, DType]:
    """The inputs of quantize_linear as arrays, the type of y and that of the division, checked but
    for the shapes."""
    x, scale = np.asarray(x), np.asarray(y_scale)
    if _one_of(x.dtype, SOURCES, "x").name == "float64":
        x = cast(x, FLOAT32)
    _one_of(scale.dtype, Q_SCALES, "y_scale")
    divide_in = _precision(precision, resolve(scale.dtype))
    check_scale(cast(scale, divide_in), "y_scale")
    dtype = resolve_target(output, "output_dtype") if output else None
    if y_zero_point is None:
        return x, scale, None, dtype or DTYPES["uint8"], divide_in
    zero_point = np.asarray(y_zero_point)
    zero_dtype = resolve_target(zero_point.dtype, "y_zero_point")
    if dtype not in (None, zero_dtype):
        raise SpecError(
            "output_dtype",
            f"{dtype} disagrees with a zero point of type {zero_dtype}",
            "leave one of them out",
        )
    check_same_shape(scale, zero_point, "y_scale", "y_zero_point")
    return x, scale, zero_point, zero_dtype, divide_in


def _precision(value: DTypeLike | None, scale: DType) -> DType:
    if not value:
        return scale if scale in PRECISIONS else FLOAT32
    return _one_of(value, PRECISIONS, "precision")


def _one_of(value: DTypeLike, allowed: Sequence[DType], thing: str) -> DType:
    dtype = resolve(value, thing, allowed)
    if dtype not in allowed:
        raise SpecError(thing, f"type {dtype} is not allowed", f"use {names(allowed)}")
    return dtype

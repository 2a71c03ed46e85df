"""DynamicQuantizeLinear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool.dtypes import DType, DTypeLike, resolve
from qtool.errors import SpecError, TensorError
from qtool.ops.arithmetic import FLOAT32, float32_source, rounded, saturate_cast

Array = NDArray[Any]


def dynamic_quantize_linear(
    x: ArrayLike, *, dtype: DTypeLike = "uint8"
) -> tuple[Array, Array, Array]:
    """(y, y_scale, y_zero_point) of x, in float32.

        y_scale = (max(0, max(x)) - min(0, min(x))) / (qmax - qmin)
        y_zero_point = round_half_even(saturate(qmin - min(0, min(x)) / y_scale))
        y = saturate(round_half_even(x / y_scale) + y_zero_point)

    x: any shape, float32 (float64 is rounded, float16 and bfloat16 are widened). y_scale (float32)
    and y_zero_point are scalars. dtype: uint8 with [0, 255], or int8 with [-127, 127].
    An empty or all-zero x gives scale 1 and zero point 0; a scale that underflows becomes the
    smallest positive float32.

    Raises SpecError for other types, TensorError for NaN, Inf, or a range beyond float32.
    Source: ONNX DynamicQuantizeLinear, version 11.
    """
    target = resolve(dtype)
    qmin = _dynamic_qmin(target)
    x = float32_source(np.asarray(x), "x")
    scale, zero_point = dynamic_parameters(x.min(initial=0), x.max(initial=0), target)
    codes = rounded(x, scale, zero_point, target, FLOAT32)
    return saturate_cast(codes, None, target, qmin=qmin), scale, zero_point


def dynamic_parameters(low: Any, high: Any, dtype: DType) -> tuple[Array, Array]:
    """y_scale and y_zero_point of dynamic_quantize_linear for float32 values in [low, high]."""
    qmin, qmax = np.float32(_dynamic_qmin(dtype)), np.float32(dtype.qmax)
    low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # a signalling NaN
        scale = np.float32((high - low) / (qmax - qmin))
    if not np.isfinite(scale):
        raise TensorError(
            "x",
            f"the range [{low}, {high}] is not finite in float32",
            "DynamicQuantizeLinear needs finite values and a range below 3.4e38",
        )
    if low == high:
        return np.array(1, np.float32), np.array(0, dtype.numpy)
    scale = max(scale, np.finfo(np.float32).smallest_subnormal)
    zero_point = np.rint(np.minimum(qmin - low / scale, qmax))  # low <= 0: never below qmin
    return np.array(scale), np.array(zero_point).astype(dtype.numpy)


def _dynamic_qmin(dtype: DType) -> float:
    """Lowest code of DynamicQuantizeLinear: 0 for uint8, -127 for int8."""
    if dtype.name not in ("uint8", "int8"):
        raise SpecError(
            "dtype", f"DynamicQuantizeLinear does not produce {dtype}", "use uint8 or int8"
        )
    return max(dtype.qmin, -127.0)

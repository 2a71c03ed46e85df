"""The nearest code, and what a code stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.spec import QuantSpec

Array = NDArray[Any]


def codes_of(
    x: Array, scale: Array, zero_point: Array | None, spec: QuantSpec, precision: DType
) -> tuple[Array, Array]:
    """The rounded values before saturation, in float64, and the codes.

    scale, zero_point: broadcastable to x. precision: type of the division.
    """
    v = unbounded(x, scale, zero_point, spec, precision)
    return v, ops.saturate_cast(v, zero_point, spec.dtype, saturate=spec.saturate, qmin=spec.qmin)


def unbounded(
    x: Array, scale: Array, zero_point: Array | None, spec: QuantSpec, precision: DType
) -> Array:
    """The rounded values before saturation, in float64; see codes_of()."""
    if spec.semantics == "onednn":
        return ops.rounded_onednn(ops.cast(x, ops.FLOAT32), scale, zero_point, spec.dtype)
    return ops.rounded(x, scale, zero_point, spec.dtype, precision)


def estimated(
    codes: Array, scale: Array, zero_point: Array | None, bias: Array | None, dtype: DType
) -> Array:
    """What codes of dtype stand for, in float32; bias: in place of a zero point, see QuantSpec."""
    if bias is None:
        return ops.scaled(codes, scale, zero_point, ops.FLOAT32)
    return ops.biased(codes.astype(np.int32) - int(dtype.qmin), scale, bias, ops.FLOAT32)

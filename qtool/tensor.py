"""QuantizedTensor: codes, scale and zero point, and what they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DTYPES, DType, DTypeLike, resolve
from qtool.spec import Blocked, Granularity, QuantSpec, Reader, Shape, Tiled, Writer, describe
from qtool.stats import Stats

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class OutputError:
    """The error of a layer's outputs, relative to them: sqrt(tr(D H D^T) / tr(W H W^T)).

    second_order: with the codes that it was to be least for; nearest: with the nearest ones.
    Both are None where the outputs are zero.
    """

    second_order: float | None
    nearest: float | None

    @classmethod
    def of(cls, second_order: float, nearest: float, outputs: float) -> OutputError:
        """From tr(D H D^T) of both, and tr(W H W^T)."""
        if not outputs > 0:
            return cls(None, None)
        return cls(math.sqrt(second_order / outputs), math.sqrt(nearest / outputs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be said of a quantized tensor, without its codes.

    spec: what was asked for, its axis counted from the front. stats: clipping and error against
    the source. precision: the type in which x was divided by the scale.
    """

    spec: QuantSpec
    precision: DType
    scale_dtype: DType
    num_scales: int
    scale_min: float | None
    scale_max: float | None
    has_zero_point: bool
    stats: Stats
    global_scale: float | None = None
    output_error: OutputError | None = None

    def describe(self) -> dict[str, Any]:
        """How the tensor is quantized, under the names of the report."""
        second_order = self.output_error
        return {
            "dtype": self.spec.dtype.name,
            **describe(self.spec.granularity),
            "precision": self.precision.name,
            "scale_dtype": self.scale_dtype.name,
            "mx_rule": self.spec.mx_rule,
            "num_scales": self.num_scales,
            "scale_min": self.scale_min,
            "scale_max": self.scale_max,
            "global_scale": self.global_scale,
            "zero_point": self.has_zero_point,
            "rounding": None if second_order is None else "second-order",
            "output_error": second_order and second_order.second_order,
            "output_error_nearest": second_order and second_order.nearest,
        }


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """x_hat = (y - zero_point) * scale.

    y: codes in the shape of the source, one per element, of spec.dtype.
    scale: () per tensor, (D,) per axis, (..., ceil(D / block_size), ...) blocked, in its storage
        type. zero_point: the same shape, of spec.dtype, or None for 0.
    spec: what was asked for, its axis counted from the front.
    stats: clipping and error against the source.
    precision: the type in which x was divided by the scale.
    global_scale: multiplies every scale, where there is one: x_hat = y * (scale * global_scale).
    output_error: of a layer whose inputs' Hessian chose the codes.
    """

    y: Array
    scale: Array
    zero_point: Array | None
    spec: QuantSpec
    stats: Stats
    precision: DType
    global_scale: float | None = None
    output_error: OutputError | None = None

    @property
    def scale_dtype(self) -> DType:
        """The storage type of the scale."""
        return resolve(self.scale.dtype)

    @property
    def outcome(self) -> Outcome:
        """The tensor without its codes."""
        scale = operator_scale(self.scale, self.global_scale).astype(np.float64)
        low, high = (float(scale.min()), float(scale.max())) if scale.size else (None, None)
        return Outcome(
            self.spec, self.precision, self.scale_dtype, scale.size, low, high,
            self.zero_point is not None, self.stats, self.global_scale, self.output_error,
        )  # fmt: skip

    def dequantize(self, dtype: DTypeLike = "float32") -> Array:
        """(y - zero_point) * scale, computed in dtype: float32, float16 or bfloat16."""
        scale = operator_scale(self.scale, self.global_scale)
        bias = None
        if self.spec.bias:
            bias = bias_of(self.scale, self.zero_point, self.spec.dtype)
        return dequantize(self.y, scale, self.zero_point, self.spec.granularity, dtype, bias)


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized tensor that is stored somewhere, to be dequantized.

    read: fills uint8 arrays with the stored bytes from a number of byte on. shape: of the codes.
    granularity: of the scale, its axis counted from the front.
    is_packed: whether codes of less than 8 bits are packed, as opposed to one in each byte.
    global_scale: multiplies every scale, where there is one.
    bias: float32, in the place of a zero point; see QuantSpec.
    """

    read: Reader
    dtype: DType
    shape: Shape
    scale: Array
    zero_point: Array | None
    granularity: Granularity
    is_packed: bool = True
    global_scale: float | None = None
    bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where the parts of a tensor go: codes (packed or one per element), scale, zero point, and
    the global scale as one float32."""

    codes: Writer
    scale: Writer
    zero_point: Writer | None
    is_packed: bool
    global_scale: Writer | None = None


def dequantize(
    y: Array,
    scale: Array,
    zero_point: Array | None,
    granularity: Granularity,
    dtype: DTypeLike,
    bias: Array | None = None,
) -> Array:
    """DequantizeLinear of codes whose scale may be in any storage type; with a bias, (y - lowest
    code) * scale + bias.

    Differences of 16-bit codes do not fit a 16-bit float, so their products are computed in
    float32 and rounded once.
    """
    output = resolve(dtype, "output_dtype")
    if isinstance(granularity, Tiled):
        zero_point = None if zero_point is None else granularity.by_rows(zero_point, y.shape)[0]
        scale, granularity = granularity.by_rows(scale, y.shape)
    if bias is not None:
        assert isinstance(granularity, Blocked)
        steps = y.astype(np.int32) - int(resolve(y.dtype).qmin)
        axis, block_size = granularity.axis, granularity.block_size
        s = ops.expand(operator_scale(scale), y.shape, axis, block_size, "scale")
        return ops.biased(steps, s, ops.expand(bias, y.shape, axis, block_size, "bias"), output)
    wide = resolve(y.dtype).bits == output.bits == 16
    computed = ops.dequantize_linear(
        y,
        operator_scale(scale),
        zero_point,
        output_dtype=ops.FLOAT32 if wide else output,
        **granularity.attributes,
    )
    return ops.cast(computed, output) if wide else computed


def bias_of(scale: Array, zero_point: Array | None, dtype: DType) -> Array:
    """-(zero_point - lowest code) * scale, rounded to the scale's type, as float32."""
    zero = np.float32(0) if zero_point is None else zero_point.astype(np.float32)
    product = (np.float32(dtype.qmin) - zero) * operator_scale(scale).astype(np.float32)
    return ops.cast(product, resolve(scale.dtype)).astype(np.float32)


_EVERY_BYTE = np.arange(256, dtype=np.uint8)
_FLOAT8E4M3FN = _EVERY_BYTE.view(DTYPES["float8e4m3fn"].numpy).astype(np.float32)


def operator_scale(scale: Array, global_scale: float | None = None) -> Array:
    """The scale in a type that the standard's operators take: float8e4m3fn widened, exactly, and
    multiplied in float32 by the global scale, which is exact where that is a power of two."""
    if scale.dtype == DTYPES["float8e4m3fn"].numpy:
        scale = np.asarray(_FLOAT8E4M3FN[scale.view(np.uint8)])  # ten times as fast as astype()
    if global_scale is None:
        return scale
    return np.asarray(scale.astype(np.float32, copy=False) * np.float32(global_scale))

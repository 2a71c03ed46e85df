"""Codes and reconstructions of float32 elements, each with its own scale and zero point.

The same numbers as ops.rounded, ops.saturate_cast and ops.scaled give with float32 precision.
"""

from __future__ import annotations

import numpy as np

from qtool.dtypes import DType
from qtool.kernels.compiled import Array, compiled


@compiled
def integers(
    x: Array,
    scale: Array,
    zero: Array,
    qmin: np.float32,
    qmax: np.float32,
    zero_first: bool,
    wide: Array,
    x_hat: Array,
    clipped: Array,
) -> None:
    """wide = saturate(round(x / scale) + zero) as int32; x_hat = (wide - zero) * scale.

    The sum is exact in float32 wherever it is not clipped. zero_first: oneDNN's order,
    round(x / scale + zero). clipped: counts low and high.
    """
    low, high = np.int32(0), np.int32(0)
    for i in range(x.size):
        q = np.float32(x[i] / scale[i])
        v = np.rint(np.float32(q + zero[i])) if zero_first else np.float32(np.rint(q) + zero[i])
        low = np.int32(low + np.int32(v < qmin))
        high = np.int32(high + np.int32(v > qmax))
        code = v if v >= qmin else qmin
        code = code if code <= qmax else qmax
        code = code if v == v else zero[i]
        wide[i] = np.int32(code)
        x_hat[i] = np.float32(code - zero[i]) * scale[i]
    clipped[0] += low
    clipped[1] += high


def grid(dtype: DType) -> Array:
    """What the kernels must know of a float type, as int32.

    shift: mantissa bits of float32 that are dropped; normal: bits of the smallest normal value;
    magic: bits of the float32 whose last bit counts smallest subnormal values; rebias: difference
    of the exponents' biases, in place; top: code of the largest finite value; sign: place of the
    sign bit; whether there is a negative zero; nan: code of NaN.
    """
    mantissa, emin = dtype.limits.nmant, dtype.limits.minexp
    shift = 23 - mantissa
    rebias = (126 + emin) << mantissa
    normal, magic, largest = np.array(
        [2.0**emin, 2.0 ** (emin - mantissa + 23), dtype.qmax], np.float32
    ).view(np.int32)
    nan = np.array(np.nan if dtype.has_nan else 0.0).astype(dtype.numpy).view(np.uint8)
    has_negative_zero = not dtype.name.endswith("fnuz")
    top = (int(largest) >> shift) - rebias
    return np.array(
        (shift, normal, magic, rebias, top, dtype.bits - 1, has_negative_zero, nan), np.int32
    )


@compiled
def quotients(x: Array, scale: Array, magic: np.float32, quotient: Array, shifted: Array) -> None:
    """quotient = x / scale; shifted = |quotient| + magic, whose last bits count subnormals."""
    for i in range(x.size):
        q = np.float32(x[i] / scale[i])
        quotient[i] = q
        shifted[i] = np.float32(np.abs(q) + magic)


@compiled
def magnitudes(
    quotient: Array, shifted: Array, grid: Array, magnitude: Array, decoded: Array, clipped: Array
) -> None:
    """Codes without sign of the quotients, and what reconstruct() needs of their values.

    quotient, shifted: results of quotients(), as int32 bits. A normal number keeps the leading
    bits of its quotient; a subnormal one is the count of smallest values in the last bits of
    shifted. decoded: bits of the value, or of the value + magic for subnormals.
    """
    shift, normal, magic, rebias, top = grid[0], grid[1], grid[2], grid[3], grid[4]
    half = np.int32(np.int32(np.int32(1) << np.int32(shift - 1)) - 1)
    low, high = np.int32(0), np.int32(0)
    for i in range(quotient.size):
        b = np.int32(quotient[i])
        a = np.int32(b & np.int32(0x7FFFFFFF))
        odd = np.int32(np.int32(a >> shift) & np.int32(1))
        leading = np.int32(np.int32(a + np.int32(half + odd)) >> shift)
        is_normal = a >= normal
        code = np.int32(leading - rebias) if is_normal else np.int32(shifted[i] - magic)
        over = np.int32(code > top) & np.int32(a <= np.int32(0x7F800000))
        negative = np.int32(np.int32(b >> np.int32(31)) & np.int32(1))
        low = np.int32(low + np.int32(over & negative))
        high = np.int32(high + np.int32(over & np.int32(negative ^ np.int32(1))))
        code = code if code < top else top
        magnitude[i] = code
        value = np.int32(np.int32(code + rebias) << shift)
        decoded[i] = value if is_normal else np.int32(code + magic)
    clipped[0] += low
    clipped[1] += high


@compiled
def reconstruct(
    quotient: Array,
    decoded: Array,
    scale: Array,
    normal: np.float32,
    magic: np.float32,
    x_hat: Array,
) -> None:
    """x_hat = the signed value * scale; NaN for NaN. quotient, decoded: as float32."""
    for i in range(quotient.size):
        q = quotient[i]
        value = decoded[i] - (np.float32(0) if np.abs(q) >= normal else magic)
        value = value if q >= 0 else -value
        x_hat[i] = np.float32(value if q == q else q) * scale[i]


@compiled
def signed(quotient: Array, grid: Array, magnitude: Array, wide: Array) -> None:
    """Codes from magnitudes: the sign, and NaN."""
    sign, negative_zero, nan = grid[5], grid[6], grid[7]
    for i in range(quotient.size):
        b = np.int32(quotient[i])
        code = magnitude[i]
        negative = np.int32(np.int32(b >> np.int32(31)) & np.int32(1))
        negative = negative if np.int32(code | negative_zero) else np.int32(0)
        code = np.int32(code | np.int32(negative << sign))
        wide[i] = nan if np.int32(b & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else code

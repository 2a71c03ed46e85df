"""Codes and reconstructions of float32 elements, each with its own scale and zero point.

The same numbers as ops.rounded, ops.saturate_cast and ops.scaled give with float32 precision.
Elements begin to end, counted from number `at` of x, number 0 of scale, zero and x_hat, and number
`codes_at` of codes, which get the bits of mask. step: as a constant, 1, or 0 where one scale and
zero are for all.
measured: whether x_hat is wanted, and clipped, which counts low and high.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer, inlined

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(-0x80000000)
_INF = np.int32(0x7F800000)


@inlined
def integers(
    x: Pointer,
    at: int,
    begin: int,
    end: int,
    scale: Pointer,
    zero: Pointer,
    step: int,
    limits: Pointer,
    zero_first: bool,
    codes: Pointer,
    codes_at: int,
    mask: int,
    x_hat: Pointer,
    clipped: Pointer,
    measured: bool,
) -> None:
    """codes = saturate(round(x / scale) + zero); x_hat = (codes - zero) * scale.

    The sum is exact in float32 wherever it is not clipped. zero_first: oneDNN's order,
    round(x / scale + zero). limits: qmin, qmax.
    """
    qmin, qmax = np.float32(limits[0]), np.float32(limits[1])
    low, high = np.int32(0), np.int32(0)
    for i in range(begin, end):
        z, s = zero[i * step], scale[i * step]
        q = np.float32(x[at + i] / s)
        v = np.rint(np.float32(q + z)) if zero_first else np.float32(np.rint(q) + z)
        code = v if v >= qmin else qmin
        code = code if code <= qmax else qmax
        code = code if v == v else (z if z >= qmin else qmin)
        codes[codes_at + i] = np.int32(np.int32(code) & np.int32(mask))
        if measured:
            low = np.int32(low + np.int32(v < qmin))
            high = np.int32(high + np.int32(v > qmax))
            x_hat[i] = np.float32(code - z) * s
    clipped[0] += low
    clipped[1] += high


@inlined
def floats(
    x: Pointer,
    at: int,
    begin: int,
    end: int,
    scale: Pointer,
    step: int,
    limits: Pointer,
    grid: Pointer,
    shift: int,
    has_negative_zero: bool,
    codes: Pointer,
    codes_at: int,
    x_hat: Pointer,
    clipped: Pointer,
    measured: bool,
) -> None:
    """Codes of a float type and x_hat = value * scale; grid, limits: see tensor.grid().

    shift: mantissa bits of float32 that are dropped, as a constant, or else shifts do not
    vectorize; has_negative_zero: a constant, too. A normal number keeps the leading bits of its
    quotient; a subnormal one is the count of smallest values in the last bits of
    |quotient| + magic.
    """
    normal, rebias, top, sign, nan = grid[0], grid[1], grid[2], grid[3], grid[4]
    magic = np.float32(limits[0])
    magic_bits = np.float32(magic).view(np.int32)
    half = np.int32(np.int32((1 << (shift - 1)) - 1) - np.int32(rebias << np.int32(shift)))
    over, over_negative = np.int32(0), np.int32(0)
    for i in range(begin, end):
        s = scale[i * step]
        q = np.float32(x[at + i] / s)
        b = np.float32(q).view(np.int32)
        a = np.int32(b & _MAGNITUDE)
        odd = np.int32(np.int32(a >> np.int32(shift)) & np.int32(1))
        leading = np.int32(np.int32(a + np.int32(half + odd)) >> np.int32(shift))
        small = np.int32(np.float32(np.abs(q) + magic).view(np.int32) - magic_bits)
        rounded = leading if a >= normal else small
        code = rounded if rounded < top else top
        negative = np.int32(b >> np.int32(31))
        signed = np.int32(code | np.int32(negative & sign))
        if not has_negative_zero:
            signed = signed if code else np.int32(0)
        codes[codes_at + i] = nan if a > _INF else signed
        if measured:
            is_over = np.int32(rounded > top) & np.int32(a <= _INF)
            over = np.int32(over + is_over)
            over_negative = np.int32(over_negative + np.int32(is_over & negative))
            large = np.int32(np.int32(code + rebias) << np.int32(shift)).view(np.float32)
            tiny = np.float32(np.int32(code + magic_bits).view(np.float32) - magic)
            value = np.float32(large if a >= normal else tiny).view(np.int32)
            value = np.int32(value | np.int32(b & _SIGN))
            x_hat[i] = np.int32(b if a > _INF else value).view(np.float32) * s
    clipped[0] += over_negative
    clipped[1] += np.int32(over - over_negative)

"""Codes and reconstructions of float32 elements, each with its own scale and zero point.

The same numbers as ops.rounded, ops.saturate_cast and ops.scaled give with float32 precision.
x, scale, zero: from their beginning on, n elements; codes: one each in wide; clipped: counts low
and high.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer, inlined

_INF = np.int32(0x7F800000)


@inlined
def integers(
    x: Pointer,
    at: int,
    n: int,
    scale: Pointer,
    zero: Pointer,
    limits: Pointer,
    zero_first: bool,
    codes: Pointer,
    x_hat: Pointer,
    clipped: Pointer,
) -> None:
    """codes = saturate(round(x / scale) + zero); x_hat = (codes - zero) * scale.

    The sum is exact in float32 wherever it is not clipped. zero_first: oneDNN's order,
    round(x / scale + zero). limits: qmin, qmax.
    """
    qmin, qmax = np.float32(limits[0]), np.float32(limits[1])
    low, high = np.int32(0), np.int32(0)
    for i in range(n):
        z, s = zero[i], scale[i]
        q = np.float32(x[at + i] / s)
        v = np.rint(np.float32(q + z)) if zero_first else np.float32(np.rint(q) + z)
        low = np.int32(low + np.int32(v < qmin))
        high = np.int32(high + np.int32(v > qmax))
        code = v if v >= qmin else qmin
        code = code if code <= qmax else qmax
        code = code if v == v else z
        codes[i] = np.int32(code)
        x_hat[i] = np.float32(code - z) * s
    clipped[0] += low
    clipped[1] += high


@inlined
def floats(
    x: Pointer,
    at: int,
    n: int,
    scale: Pointer,
    limits: Pointer,
    grid: Pointer,
    codes: Pointer,
    x_hat: Pointer,
    clipped: Pointer,
) -> None:
    """Codes of a float type and x_hat = value * scale; grid, limits: see tensor.grid().

    Adding a power of two whose last bit counts what the quotient's last digit on the type's grid
    does, and subtracting it again, rounds half to even; exponents stop at those of the smallest
    normal and of the largest value. A normal value's code is its leading bits; a subnormal one's
    is its number of smallest values, the last bits of value + magic.
    """
    shift, normal, highest, rebias = grid[0], grid[1], grid[2], grid[3]
    sign, negative_zero, nan = grid[4], grid[5], grid[6]
    largest, magic = np.float32(limits[0]), np.float32(limits[1])
    magic_bits = np.float32(magic).view(np.int32)
    raised = np.int32(shift << np.int32(23))
    over, over_negative = np.int32(0), np.int32(0)
    for i in range(n):
        s = scale[i]
        q = np.float32(x[at + i] / s)
        b = np.float32(q).view(np.int32)
        negative = np.int32(np.int32(b >> np.int32(31)) & np.int32(1))
        power = np.int32(b & _INF)
        power = power if power > normal else normal
        power = power if power < highest else highest
        unit = np.int32(power + raised).view(np.float32)
        value = np.float32(np.float32(np.abs(q) + unit) - unit)
        is_over = np.int32(value > largest)
        over = np.int32(over + is_over)
        over_negative = np.int32(over_negative + np.int32(is_over & negative))
        value = largest if value > largest else value
        v = np.float32(value).view(np.int32)
        x_hat[i] = np.int32(v | np.int32(negative << np.int32(31))).view(np.float32) * s
        small = np.int32(np.float32(value + magic).view(np.int32) - magic_bits)
        code = np.int32(np.int32(v >> shift) - rebias) if v >= normal else small
        signed = np.int32(code | np.int32(negative << sign))
        signed = signed if np.int32(code | negative_zero) else code
        codes[i] = nan if v > _INF else signed
    clipped[0] += over_negative
    clipped[1] += np.int32(over - over_negative)

"""Codes -> floats: the same numbers as ops.scaled gives in float32."""

from __future__ import annotations

import numpy as np

from qtool.kernels import PART
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.layout import expand
from qtool.kernels.pack import unpack


@inlined
def decode(
    codes: Pointer,
    n: int,
    size: int,
    signed: int,
    table: Pointer,
    has_table: int,
    scale: Pointer,
    zero: Pointer,
    out: Pointer,
    at: int,
) -> None:
    """out[at : at + n] = (value - zero) * scale.

    The value is the code of `size` bits as a signed or unsigned integer, or what the table says.
    """
    if has_table:
        for i in range(n):
            out[at + i] = np.float32(table[codes[i]] - zero[i]) * scale[i]
        return
    unused = np.int32(32 - size) if signed else np.int32(0)
    for i in range(n):
        code = np.int32(np.int32(np.int32(codes[i]) << unused) >> unused)
        out[at + i] = np.float32(np.float32(code) - zero[i]) * scale[i]


def dequantize(
    packed: Pointer,
    codes16: Pointer,
    width: int,
    size: int,
    n: int,
    signed: int,
    table: Pointer,
    has_table: int,
    scales: Pointer,
    zeros: Pointer,
    has_zeros: int,
    layout: Pointer,
    start: int,
    out: Pointer,
    scale: Pointer,
    zero: Pointer,
    codes: Pointer,
) -> None:
    """out = (value of code - zero) * scale of the elements.

    packed, codes16: the stored codes, of `width` bits, the lowest `size` of which count, as bytes
    and as uint16. signed, table, has_table: see decode(). scales, zeros: of all groups. zero:
    zeros, where there are none of the groups. scale, zero, codes: room for PART.
    """
    for at in range(0, n, PART):
        count = min(PART, n - at)
        expand(scales, layout, start + at, 0, scale, count)
        if has_zeros:
            expand(zeros, layout, start + at, 0, zero, count)
        if width == 16:
            for i in range(count):
                codes[i] = codes16[at + i]
        else:
            unpack(packed, at * width // 8, count, width, size, codes)
        decode(codes, count, size, signed, table, has_table, scale, zero, out, at)

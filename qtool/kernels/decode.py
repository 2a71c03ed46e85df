"""Codes -> floats: the same numbers as ops.scaled gives in float32."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer, inlined


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

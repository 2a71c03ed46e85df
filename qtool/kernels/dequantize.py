"""Codes -> floats: the same numbers as ops.scaled gives in float32."""

from __future__ import annotations

import numpy as np

from qtool.dtypes import DType
from qtool.kernels import CHUNK
from qtool.kernels.compiled import Array, compiled
from qtool.kernels.layout import expand


def decoder(dtype: DType) -> Array:
    """The value of every code, as float32."""
    if dtype.bits > 8:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy).astype(np.float32)
    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    return codes.view(dtype.numpy).astype(np.float32)


@compiled
def dequantize(
    codes: Array,
    table: Array,
    scales: Array,
    zeros: Array,
    layout: Array,
    start: int,
    out: Array,
) -> None:
    """out = (table[codes] - zero) * scale of the elements from number start on.

    codes: uint8 or uint16, the bits above each code 0. scales, zeros: float32 of all groups; no
    zeros at all mean 0.
    """
    scale, zero = np.empty(CHUNK, np.float32), np.zeros(CHUNK, np.float32)
    for begin in range(0, codes.size, CHUNK):
        part = codes[begin : begin + CHUNK]
        expand(scales, layout, start + begin, 0, scale[: part.size])
        if zeros.size:
            expand(zeros, layout, start + begin, 0, zero[: part.size])
        _decode(part, table, scale, zero, out[begin : begin + part.size])


@compiled
def _decode(codes: Array, table: Array, scale: Array, zero: Array, out: Array) -> None:
    for i in range(codes.size):
        out[i] = np.float32(table[codes[i]] - zero[i]) * scale[i]

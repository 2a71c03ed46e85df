"""Codes as int32 -> bytes as packing.pack() lays them out, and back."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled


@compiled
def narrow(wide: Array, out: Array) -> None:
    """The low bits of codes: out is uint8 or uint16."""
    for i in range(wide.size):
        out[i] = wide[i]


@compiled
def pack(codes: Array, bits: int, out: Array) -> None:
    """uint8 codes of 2, 4 or 6 bits as one little-endian bit stream.

    out.size = ceil(codes.size * bits / 8).
    """
    whole = codes.size // 4
    if bits == 4:
        for i in range(codes.size // 2):
            low, high = codes[2 * i] & np.uint8(15), codes[2 * i + 1] & np.uint8(15)
            out[i] = np.uint8(low | np.uint8(high << np.uint8(4)))
        if codes.size % 2:
            out[codes.size // 2] = codes[codes.size - 1] & np.uint8(15)
        return
    mask = np.uint32((1 << bits) - 1)
    for g in range(whole):
        word = np.uint32(0)
        for j in range(4):
            word |= np.uint32(np.uint32(codes[4 * g + j]) & mask) << np.uint32(bits * j)
        for j in range(bits // 2):
            out[g * (bits // 2) + j] = np.uint8(word >> np.uint32(8 * j))
    word = np.uint32(0)
    for j in range(codes.size - 4 * whole):
        word |= np.uint32(np.uint32(codes[4 * whole + j]) & mask) << np.uint32(bits * j)
    for j in range(out.size - whole * (bits // 2)):
        out[whole * (bits // 2) + j] = np.uint8(word >> np.uint32(8 * j))

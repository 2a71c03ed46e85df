"""Codes of less than 8 bits <-> bytes, as packing.py lays them out."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled


@compiled
def narrow(wide: Array, out: Array) -> None:
    """The low bits of int32 codes, in uint8 or uint16."""
    for i in range(wide.size):
        out[i] = wide[i]


@compiled
def pack(codes: Array, bits: int, out: Array) -> None:
    """uint8 codes of 2, 4 or 6 bits as one little-endian bit stream, the last byte filled with 0.

    out: ceil(codes.size * bits / 8) bytes.
    """
    if bits == 4:
        _pack_pairs(codes, out)
    else:
        _pack_fours(codes, np.uint32(bits), out)


@compiled
def _pack_pairs(codes: Array, out: Array) -> None:
    pairs = codes.size // 2
    for i in range(pairs):
        high = np.uint8(codes[2 * i + 1] << np.uint8(4))
        out[i] = np.uint8(np.uint8(codes[2 * i] & np.uint8(15)) | high)
    if codes.size % 2:
        out[pairs] = np.uint8(codes[codes.size - 1] & np.uint8(15))


@compiled
def _pack_fours(codes: Array, bits: np.uint32, out: Array) -> None:
    mask = np.uint32(np.uint32(1 << bits) - np.uint32(1))
    at = 0
    for i in range(0, codes.size, 4):
        word = np.uint32(0)
        for j in range(min(4, codes.size - i)):
            code = np.uint32(np.uint32(codes[i + j]) & mask)
            word = np.uint32(word | np.uint32(code << np.uint32(bits * np.uint32(j))))
        for _ in range(min(int(bits) // 2, out.size - at)):
            out[at] = np.uint8(word & np.uint32(255))
            word = np.uint32(word >> np.uint32(8))
            at += 1


@compiled
def unpack(packed: Array, bits: int, out: Array) -> None:
    """The codes of pack(), the bits above each code 0."""
    mask = np.uint32(np.uint32(1 << bits) - np.uint32(1))
    per_word = 2 if bits == 4 else 4
    per_step = per_word * bits // 8
    for i in range(0, out.size, per_word):
        word, at = np.uint32(0), i // per_word * per_step
        for j in range(min(per_step, packed.size - at)):
            byte = np.uint32(packed[at + j])
            word = np.uint32(word | np.uint32(byte << np.uint32(8 * j)))
        for j in range(min(per_word, out.size - i)):
            out[i + j] = np.uint8(word & mask)
            word = np.uint32(word >> np.uint32(bits))

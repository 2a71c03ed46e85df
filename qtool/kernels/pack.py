"""Codes, one each in 16 bits, <-> bytes, as packing.py lays them out."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer, inlined


@inlined
def pack(
    codes: Pointer,
    pairs: Pointer,
    fours: Pointer,
    n: int,
    bits: int,
    mask: int,
    out: Pointer,
    at: int,
) -> None:
    """Codes of 2, 4, 6 or 8 bits as one little-endian bit stream from byte `at` of out on.

    codes, pairs, fours: the same memory as uint16, uint32 and uint64; what follows the n codes,
    up to a multiple of four, is overwritten with 0 to fill the last byte. mask: bits to keep of
    codes in whole bytes.
    """
    if bits == 8:
        for i in range(n):
            out[at + i] = np.uint8(codes[i] & np.uint16(mask))
        return
    for i in range(n, (n + 3) // 4 * 4):
        codes[i] = np.uint16(0)
    if bits == 4:
        for i in range((n + 1) // 2):
            w = np.uint32(pairs[i])
            low = np.uint32(w & np.uint32(0x0F))
            out[at + i] = np.uint8(low | np.uint32(np.uint32(w >> np.uint32(12)) & np.uint32(0xF0)))
    elif bits == 2:
        for i in range((n + 3) // 4):
            out[at + i] = np.uint8(_gathered(fours[i], np.uint64(2)))
    else:
        nbytes = (n * 6 + 7) // 8
        for i in range(n // 4):
            word = _gathered(fours[i], np.uint64(6))
            out[at + 3 * i] = np.uint8(word)
            out[at + 3 * i + 1] = np.uint8(word >> np.uint64(8))
            out[at + 3 * i + 2] = np.uint8(word >> np.uint64(16))
        if n % 4:
            word = _gathered(fours[n // 4], np.uint64(6))
            for i in range(n // 4 * 3, nbytes):
                out[at + i] = np.uint8(word)
                word = np.uint64(word >> np.uint64(8))


@inlined
def _gathered(word: np.uint64, bits: np.uint64) -> np.uint64:
    """The lowest bits of four codes side by side."""
    mask = np.uint64((np.uint64(1) << bits) - np.uint64(1))
    gathered = np.uint64(word & mask)
    gathered |= np.uint64(np.uint64(word >> np.uint64(16)) & mask) << bits
    gathered |= np.uint64(np.uint64(word >> np.uint64(32)) & mask) << np.uint64(2) * bits
    gathered |= np.uint64(np.uint64(word >> np.uint64(48)) & mask) << np.uint64(3) * bits
    return np.uint64(gathered)


@inlined
def unpack(packed: Pointer, at: int, n: int, bits: int, size: int, codes: Pointer) -> None:
    """The n codes of `size` bits that begin at byte `at`, the bits above each code 0; `bits` of the
    memory for each."""
    if bits == 8:
        mask = np.uint16((1 << size) - 1)
        for i in range(n):
            codes[i] = np.uint16(np.uint16(packed[at + i]) & mask)
    elif bits == 4:
        for i in range(n // 2):
            byte = np.uint16(packed[at + i])
            codes[2 * i] = np.uint16(byte & np.uint16(15))
            codes[2 * i + 1] = np.uint16(byte >> np.uint16(4))
        if n % 2:
            codes[n - 1] = np.uint16(np.uint16(packed[at + n // 2]) & np.uint16(15))
    elif bits == 2:
        for i in range(n):
            four = np.uint32(packed[at + i // 4])
            codes[i] = np.uint16(np.uint32(four >> np.uint32(2 * (i % 4))) & np.uint32(3))
    else:
        _unpack_sixes(packed, at, n, codes)


@inlined
def _unpack_sixes(packed: Pointer, at: int, n: int, codes: Pointer) -> None:
    for i in range(n // 4):
        word = np.uint32(packed[at + 3 * i])
        word |= np.uint32(np.uint32(packed[at + 3 * i + 1]) << np.uint32(8))
        word |= np.uint32(np.uint32(packed[at + 3 * i + 2]) << np.uint32(16))
        for j in range(4):
            codes[4 * i + j] = np.uint16(np.uint32(word >> np.uint32(6 * j)) & np.uint32(63))
    for i in range(n // 4 * 4, n):
        bit = 6 * i
        word = np.uint32(packed[at + bit // 8])
        if bit % 8 > 2:
            word |= np.uint32(np.uint32(packed[at + bit // 8 + 1]) << np.uint32(8))
        codes[i] = np.uint16(np.uint32(word >> np.uint32(bit % 8)) & np.uint32(63))

"""Source elements to float32, by their bits where NumPy has no fast way."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled


@compiled
def bfloat16_to_float32(source: Array, bits: Array) -> None:
    """source: uint16 bits of bfloat16; bits: uint32 bits of the same values in float32."""
    for i in range(source.size):
        bits[i] = np.uint32(np.uint32(source[i]) << np.uint32(16))


@compiled
def float16_to_float32(source: Array, bits: Array, values: Array) -> None:
    """source: uint16 bits of float16; bits and values: the result's memory as uint32 and float32.

    A half's exponent and mantissa, moved into place, are its magnitude times 2^-112; that is exact
    for subnormals too.
    """
    for i in range(source.size):
        bits[i] = np.uint32(np.uint32(source[i] & np.uint16(0x7FFF)) << np.uint32(13))
    for i in range(source.size):
        values[i] *= np.float32(2.0**112)
    for i in range(source.size):
        magnitude = np.uint32(source[i] & np.uint16(0x7FFF))
        sign = np.uint32(np.uint32(source[i] & np.uint16(0x8000)) << np.uint32(16))
        special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00) else np.uint32(0)
        bits[i] = np.uint32(bits[i] | np.uint32(sign | special))

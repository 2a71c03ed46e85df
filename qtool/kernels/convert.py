"""Source elements to float32, by their bits."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Pointer, inlined


@inlined
def to_float32(bits: Pointer, at: int, n: int, is_float16: bool, out: Pointer) -> None:
    """out[:n] = elements of bfloat16 or float16 from number `at` on.

    A half's exponent and mantissa, moved into place, are its magnitude times 2^-112; that is exact
    for subnormals too.
    """
    if not is_float16:
        for i in range(n):
            word = np.uint32(np.uint32(bits[at + i]) << np.uint32(16))
            out[i] = np.uint32(word).view(np.float32)
        return
    for i in range(n):
        out[i] = float16(bits[at + i])


@inlined
def float16(bits: int) -> np.float32:
    """The float32 of a float16's bits."""
    half = np.uint32(bits)
    magnitude = np.uint32(half & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    moved = np.uint32(magnitude << np.uint32(13)).view(np.float32)
    value = np.float32(np.float32(moved) * np.float32(2.0**112)).view(np.uint32)
    special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00) else np.uint32(0)
    return np.float32(np.uint32(np.uint32(value | sign) | special).view(np.float32))

"""Largest magnitude and range of every group, on the bits of float32.

Magnitudes, and after order() signed values too, compare as integers, which vectorizes where float
comparisons with NaN do not. A NaN compares above Inf.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled

_MAGNITUDE = np.int32(0x7FFFFFFF)
INF = np.int32(0x7F800000)


@compiled
def absmax(bits: Array, layout: Array, start: int, first: int, finite: bool, out: Array) -> None:
    """out[g - first] = max(out[g - first], bits of |x|) over the elements of group g.

    bits: int32 bits of the elements from number start on. finite: leave NaN and Inf out.
    """
    size, inner, block, outer_stride, block_stride, inner_stride = layout
    limit = INF if finite else np.int32(_MAGNITUDE)
    k, n = 0, bits.size
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = row // size * outer_stride + d // block * block_stride - first
        if inner_stride:
            count = min(inner - c, n - k)
            for i in range(count):
                v = np.int32(bits[k + i] & _MAGNITUDE)
                v = v if v < limit else np.int32(0)
                out[base + c + i] = v if v > out[base + c + i] else out[base + c + i]
            row += 1
        else:
            rows = min(block - d % block, size - d)
            count = min(rows * inner - c, n - k)
            out[base] = max(out[base], _run_absmax(bits[k : k + count], limit))
            row += rows
        k += count
        c = 0


@compiled
def _run_absmax(bits: Array, limit: np.int32) -> np.int32:
    largest = np.int32(0)
    for i in range(bits.size):
        v = np.int32(bits[i] & _MAGNITUDE)
        v = v if v < limit else np.int32(0)
        largest = v if v > largest else largest
    return largest


@compiled
def order(bits: Array, finite: bool, out: Array) -> None:
    """Bits as integers that are ordered like the floats; with finite, NaN and Inf as 0.

    The map is its own inverse.
    """
    limit = INF if finite else np.int32(_MAGNITUDE)
    for i in range(bits.size):
        b = np.int32(bits[i])
        b = b if np.int32(b & _MAGNITUDE) < limit else np.int32(0)
        out[i] = np.int32(b ^ np.int32(np.int32(b >> np.int32(31)) & _MAGNITUDE))

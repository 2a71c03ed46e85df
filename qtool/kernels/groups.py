"""Range and largest magnitude of every group, on the bits of float32.

As integers, magnitudes compare like the floats they are bits of, and so do signed values once
their lower bits are flipped where the sign is set. Comparisons of floats, which must heed NaN, do
not vectorize. NaN and Inf count as 0.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)


@compiled
def has_nonfinite(bits: Array) -> bool:
    """Whether there is a NaN or Inf among the values."""
    largest = np.int32(0)
    for i in range(bits.size):
        v = np.int32(bits[i] & _MAGNITUDE)
        largest = v if v > largest else largest
    return bool(largest >= _INF)


@compiled
def absmax(bits: Array, layout: Array, start: int, first: int, out: Array) -> None:
    """out[g - first] = max(out[g - first], bits of |x|) over the elements of group g.

    bits: int32 bits of the elements from number start on.
    """
    size, inner, block, outer_stride, block_stride, inner_stride = layout
    k, n = 0, bits.size
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = row // size * outer_stride + d // block * block_stride - first
        if inner_stride:
            rows, count = 1, min(inner - c, n - k)
            _row_absmax(bits[k : k + count], out[base + c : base + c + count])
        else:
            rows = min(block - d % block, size - d)
            count = min(rows * inner - c, n - k)
            out[base] = max(out[base], _run_absmax(bits[k : k + count]))
        row += rows
        k += count
        c = 0


@compiled
def _run_absmax(bits: Array) -> np.int32:
    largest = np.int32(0)
    for i in range(bits.size):
        v = np.int32(bits[i] & _MAGNITUDE)
        v = v if v < _INF else np.int32(0)
        largest = v if v > largest else largest
    return largest


@compiled
def _row_absmax(bits: Array, out: Array) -> None:
    for i in range(bits.size):
        v = np.int32(bits[i] & _MAGNITUDE)
        v = v if v < _INF else np.int32(0)
        out[i] = v if v > out[i] else out[i]


@compiled
def minmax(bits: Array, layout: Array, start: int, first: int, low: Array, high: Array) -> None:
    """absmax() for the smallest and largest value of each group, as ordered()."""
    size, inner, block, outer_stride, block_stride, inner_stride = layout
    k, n = 0, bits.size
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = row // size * outer_stride + d // block * block_stride - first
        if inner_stride:
            rows, count = 1, min(inner - c, n - k)
            _row_minmax(bits[k : k + count], low[base + c :], high[base + c :])
        else:
            rows = min(block - d % block, size - d)
            count = min(rows * inner - c, n - k)
            smallest, largest = _run_minmax(bits[k : k + count])
            low[base], high[base] = min(low[base], smallest), max(high[base], largest)
        row += rows
        k += count
        c = 0


@compiled
def _run_minmax(bits: Array) -> tuple[np.int32, np.int32]:
    low, high = _MAGNITUDE, np.int32(-0x80000000)
    for i in range(bits.size):
        v = np.int32(bits[i])
        v = v if np.int32(v & _MAGNITUDE) < _INF else np.int32(0)
        v = np.int32(v ^ np.int32(np.int32(v >> np.int32(31)) & _MAGNITUDE))
        low = v if v < low else low
        high = v if v > high else high
    return low, high


@compiled
def _row_minmax(bits: Array, low: Array, high: Array) -> None:
    for i in range(bits.size):
        v = np.int32(bits[i])
        v = v if np.int32(v & _MAGNITUDE) < _INF else np.int32(0)
        v = np.int32(v ^ np.int32(np.int32(v >> np.int32(31)) & _MAGNITUDE))
        low[i] = v if v < low[i] else low[i]
        high[i] = v if v > high[i] else high[i]


def ordered(bits: Array) -> Array:
    """float32 bits (int32) to integers in the order of the floats, and back."""
    return np.asarray(bits ^ (bits >> 31) & _MAGNITUDE)

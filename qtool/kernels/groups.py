"""Range and largest magnitude of every group, on the bits of float32.

As integers, magnitudes compare like the floats they are bits of, and so do signed values once
their lower bits are flipped where the sign is set. Comparisons of floats, which must heed NaN, do
not vectorize. Magnitudes above `limit` count as 0: with LARGEST_FINITE, NaN and Inf are left out;
UNLIMITED, they show in the result.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import PART
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.convert import to_float32
from qtool.kernels.layout import outer_group

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LOWEST = np.int32(-0x80000000)

LARGEST_FINITE = np.int32(0x7F7FFFFF)
UNLIMITED = np.int32(0x7FFFFFFF)


@inlined
def absmax(
    x: Pointer, n: int, layout: Pointer, start: int, first: int, limit: np.int32, out: Pointer
) -> None:
    """out[g - first] = max(out[g - first], bits of |x|) over the elements of group g.

    x: the n elements from number `start` on.
    """
    size, inner, block = layout[0], layout[1], layout[2]
    outer_stride, block_stride, inner_stride = layout[3], layout[4], layout[5]
    is_flat = layout[6] == 1
    k = 0
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = outer_group(layout, row // size) * outer_stride + d // block * block_stride - first
        left = min(block - d % block, size - d)
        if inner_stride:
            rows, count = 1, min(inner - c, n - k)
            _row_absmax(x, k, count, limit, out, base + c)
        elif inner == 1 and left == block and size % block == 0 and n - k >= block and is_flat:
            groups = min((size - d) // block, (n - k) // block)
            _runs_absmax(x, k, groups, block, limit, out, base)
            rows, count = groups * block, groups * block
        else:
            count = min(left * inner - c, n - k)
            rows = left
            largest = _run_absmax(x, k, count, limit)
            out[base] = max(out[base], largest)
        row += rows
        k += count
        c = 0


@inlined
def _run_absmax(x: Pointer, at: int, n: int, limit: np.int32) -> np.int32:
    largest = np.int32(0)
    for i in range(n):
        v = np.int32(np.float32(x[at + i]).view(np.int32) & _MAGNITUDE)
        v = v if v <= limit else np.int32(0)
        largest = v if v > largest else largest
    return largest


@inlined
def _runs_absmax(
    x: Pointer, at: int, groups: int, block: int, limit: np.int32, out: Pointer, first: int
) -> None:
    """_run_absmax() of short runs one after another."""
    for g in range(groups):
        out[first + g] = _run_absmax(x, at + g * block, block, limit)


@inlined
def _row_absmax(x: Pointer, at: int, n: int, limit: np.int32, out: Pointer, first: int) -> None:
    for i in range(n):
        v = np.int32(np.float32(x[at + i]).view(np.int32) & _MAGNITUDE)
        v = v if v <= limit else np.int32(0)
        old = np.int32(out[first + i])
        out[first + i] = v if v > old else old


@inlined
def minmax(
    x: Pointer,
    n: int,
    layout: Pointer,
    start: int,
    first: int,
    limit: np.int32,
    low: Pointer,
    high: Pointer,
) -> None:
    """absmax() for the smallest and largest value of each group, as ordered integers."""
    size, inner, block = layout[0], layout[1], layout[2]
    outer_stride, block_stride, inner_stride = layout[3], layout[4], layout[5]
    k = 0
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = outer_group(layout, row // size) * outer_stride + d // block * block_stride - first
        if inner_stride:
            rows, count = 1, min(inner - c, n - k)
            _row_minmax(x, k, count, limit, low, high, base + c)
        else:
            rows = min(block - d % block, size - d)
            count = min(rows * inner - c, n - k)
            smallest, largest = _run_minmax(x, k, count, limit)
            low[base], high[base] = min(low[base], smallest), max(high[base], largest)
        row += rows
        k += count
        c = 0


@inlined
def ordered(value: np.float32, limit: np.int32) -> np.int32:
    """The integer that stands for a float32 among others."""
    v = np.float32(value).view(np.int32)
    v = v if np.int32(v & _MAGNITUDE) <= limit else np.int32(0)
    return np.int32(v ^ np.int32(np.int32(v >> np.int32(31)) & _MAGNITUDE))


@inlined
def _run_minmax(x: Pointer, at: int, n: int, limit: np.int32) -> tuple[np.int32, np.int32]:
    low, high = _MAGNITUDE, _LOWEST
    for i in range(n):
        v = ordered(x[at + i], limit)
        low = v if v < low else low
        high = v if v > high else high
    return low, high


@inlined
def _row_minmax(
    x: Pointer, at: int, n: int, limit: np.int32, low: Pointer, high: Pointer, first: int
) -> None:
    for i in range(n):
        v = ordered(x[at + i], limit)
        smallest, largest = np.int32(low[first + i]), np.int32(high[first + i])
        low[first + i] = v if v < smallest else smallest
        high[first + i] = v if v > largest else largest


def find_absmax(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    layout: Pointer,
    start: int,
    first: int,
    masked: int,
    out: Pointer,
    values: Pointer,
) -> None:
    """groups.absmax() of the elements, without NaN and Inf where masked is set."""
    if form == 0 and masked:
        absmax(x, n, layout, start, first, LARGEST_FINITE, out)
    elif form == 0:
        absmax(x, n, layout, start, first, UNLIMITED, out)
    else:
        limit = LARGEST_FINITE if masked else UNLIMITED
        for at in range(0, n, PART):
            count = min(PART, n - at)
            to_float32(bits, at, count, form == 2, values)
            absmax(values, count, layout, start + at, first, limit, out)


def find_minmax(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    layout: Pointer,
    start: int,
    first: int,
    masked: int,
    low: Pointer,
    high: Pointer,
    values: Pointer,
) -> None:
    """groups.minmax() of the elements, without NaN and Inf where masked is set."""
    if form == 0 and masked:
        minmax(x, n, layout, start, first, LARGEST_FINITE, low, high)
    elif form == 0:
        minmax(x, n, layout, start, first, UNLIMITED, low, high)
    else:
        limit = LARGEST_FINITE if masked else UNLIMITED
        for at in range(0, n, PART):
            count = min(PART, n - at)
            to_float32(bits, at, count, form == 2, values)
            minmax(values, count, layout, start + at, first, limit, low, high)

"""Which scale belongs to which element of a window."""

from __future__ import annotations

import numpy as np

from qtool.kernels.compiled import Array, compiled
from qtool.spec import Blocked, Granularity, PerAxis, Shape


def layout(shape: Shape, granularity: Granularity) -> Array:
    """The tensor as (outer, size, inner) and its scale's strides, for expand().

    (size, inner, block, outer stride, block stride, inner stride): element (a, d, c) has the scale
    number a * outer stride + d // block * block stride + c * inner stride.
    """
    size = int(np.prod(shape, dtype=object))
    if isinstance(granularity, Blocked):
        axis = granularity.axis
        along, inner = shape[axis], int(np.prod(shape[axis + 1 :], dtype=object))
        blocks = -(-along // granularity.block_size)
        return np.array((along, inner, granularity.block_size, blocks * inner, inner, inner > 1))
    if isinstance(granularity, PerAxis):
        axis = granularity.axis
        along, inner = shape[axis], int(np.prod(shape[axis + 1 :], dtype=object))
        if inner == 1:  # neighbours have different scales: a row of them
            return np.array((1, along, 1, 0, 0, 1))
        return np.array((along, inner, 1, 0, 1, 0))
    return np.array((1, max(size, 1), 1, 0, 0, 0))


@compiled
def expand(values: Array, layout: Array, start: int, first: int, out: Array) -> None:
    """out[k] = the value of element start + k; values begin with that of group number first."""
    size, inner, block, outer_stride, block_stride, inner_stride = layout
    row, c = start // inner, start % inner
    d = row % size
    base = row // size * outer_stride + d // block * block_stride - first
    left = min(block - d % block, size - d)  # rows of this block from row d on
    k, n = 0, out.size
    while k < n:
        if inner_stride:
            count, rows = min(inner - c, n - k), 1
            _copy(values[base + c : base + c + count], out[k : k + count])
        elif left == block and inner == 1 and n - k >= block:
            blocks = min((size - d) // block, (n - k) // block)
            _fill_blocks(values[base : base + blocks], out[k : k + blocks * block])
            base += blocks - 1
            d += (blocks - 1) * block
            count, rows = blocks * block, left
        else:
            count, rows = min(left * inner - c, n - k), left
            _fill(values[base], out[k : k + count])
        k += count
        c = 0
        d += rows
        left -= rows
        if left == 0:
            base += block_stride
            if d == size:
                base += outer_stride - -(-size // block) * block_stride
                d = 0
            left = min(block, size - d)


@compiled
def _copy(values: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = values[i]


@compiled
def _fill(value: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] = value


@compiled
def _fill_blocks(values: Array, out: Array) -> None:
    block = out.size // values.size
    rows = out.reshape(values.size, block)
    for g in range(values.size):
        value = values[g]
        row = rows[g]
        for i in range(block):
            row[i] = value

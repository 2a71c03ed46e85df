"""Where the groups of a tensor lie: what the kernels are told of its shape and granularity."""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels.machine import Array
from qtool.spec import Blocked, Granularity, PerAxis, Shape, Tiled


def layout(shape: Shape, granularity: Granularity) -> Array:
    """The tensor as (outer, size, inner) and its scale's strides, as int64.

    (size, inner, block, outer stride, block stride, inner stride, rows, band): element (a, d, c)
    has the scale number r * outer stride + d // block * block stride + c * inner stride, where
    r is a for rows 1; else, of bands of at most that many of `band` rows, the number of a's.
    """
    size = math.prod(shape)
    if isinstance(granularity, Tiled):
        height, along = shape[-2:]
        blocks = -(-along // granularity.columns)
        return np.array((along, 1, granularity.columns, blocks, 1, 0, granularity.rows, height))
    if isinstance(granularity, Blocked):
        axis = granularity.axis
        along, inner = shape[axis], math.prod(shape[axis + 1 :])
        blocks = -(-along // granularity.block_size)
        return np.array(
            (along, inner, granularity.block_size, blocks * inner, inner, inner > 1, 1, 1)
        )
    if isinstance(granularity, PerAxis):
        axis = granularity.axis
        along, inner = shape[axis], math.prod(shape[axis + 1 :])
        if inner == 1:  # neighbours have different scales: a row of them
            return np.array((1, along, 1, 0, 0, 1, 1, 1))
        return np.array((along, inner, 1, 0, 1, 0, 1, 1))
    return np.array((1, max(size, 1), 1, 0, 0, 0, 1, 1))


def group_span(shape: Shape, granularity: Granularity) -> tuple[int, int] | None:
    """Elements of the shortest run, from the tensor's start, that holds whole groups, and their
    number; None where only the whole tensor does."""
    if isinstance(granularity, Tiled):
        height, along = shape[-2:]
        blocks = -(-along // granularity.columns)
        if height % granularity.rows == 0 or len(shape) == 2:
            return min(granularity.rows, height) * along, blocks
        return height * along, -(-height // granularity.rows) * blocks
    if isinstance(granularity, PerAxis) and granularity.axis == 0:
        return math.prod(shape[1:]), 1
    if not isinstance(granularity, Blocked):
        return None
    size, inner = shape[granularity.axis], math.prod(shape[granularity.axis + 1 :])
    if size % granularity.block_size == 0 or size * inner == math.prod(shape):
        return granularity.block_size * inner, inner  # the last run may be shorter
    return size * inner, -(-size // granularity.block_size) * inner

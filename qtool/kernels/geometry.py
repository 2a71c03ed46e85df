"""Where the groups of a tensor lie: what the kernels are told of its shape and granularity."""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels.machine import Array
from qtool.spec import Blocked, Granularity, PerAxis, Shape


def layout(shape: Shape, granularity: Granularity) -> Array:
    """The tensor as (outer, size, inner) and its scale's strides, as int64.

    (size, inner, block, outer stride, block stride, inner stride): element (a, d, c) has the scale
    number a * outer stride + d // block * block stride + c * inner stride.
    """
    size = math.prod(shape)
    if isinstance(granularity, Blocked):
        axis = granularity.axis
        along, inner = shape[axis], math.prod(shape[axis + 1 :])
        blocks = -(-along // granularity.block_size)
        return np.array((along, inner, granularity.block_size, blocks * inner, inner, inner > 1))
    if isinstance(granularity, PerAxis):
        axis = granularity.axis
        along, inner = shape[axis], math.prod(shape[axis + 1 :])
        if inner == 1:  # neighbours have different scales: a row of them
            return np.array((1, along, 1, 0, 0, 1))
        return np.array((along, inner, 1, 0, 1, 0))
    return np.array((1, max(size, 1), 1, 0, 0, 0))


def group_span(shape: Shape, granularity: Granularity) -> tuple[int, int] | None:
    """Elements of the shortest run, from the tensor's start, that holds whole groups, and their
    number; None where only the whole tensor does."""
    if isinstance(granularity, PerAxis) and granularity.axis == 0:
        return math.prod(shape[1:]), 1
    if not isinstance(granularity, Blocked):
        return None
    size, inner = shape[granularity.axis], math.prod(shape[granularity.axis + 1 :])
    if size % granularity.block_size == 0:
        return granularity.block_size * inner, inner
    return size * inner, -(-size // granularity.block_size) * inner

"""Where the groups of a tensor lie: what the kernels are told of its shape and granularity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.kernels import CHUNK
from qtool.spec import Blocked, Granularity, PerAxis, Shape, Tiled, folded

Array = NDArray[Any]


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


def places(
    shape: Shape, granularity: Granularity, first: int, count: int
) -> tuple[Array, Array, Array, int]:
    """Where count whole groups from number first on lie: starts, heights, widths and stride.

    A group has heights[g] runs of widths[g] elements, the first at starts[g], each `stride` after
    the last.
    """
    outer, size, inner = folded(shape, granularity)
    number = np.arange(first, first + count)
    if isinstance(granularity, Tiled):
        height, blocks = shape[-2], -(-size // granularity.columns)
        bands = -(-height // granularity.rows)
        above = number // blocks % bands * granularity.rows
        beside = number % blocks * granularity.columns
        starts = (number // (blocks * bands) * height + above) * size + beside
        heights = np.minimum(granularity.rows, height - above)
        return starts, heights, np.minimum(granularity.columns, size - beside), size
    if isinstance(granularity, Blocked):
        ones = np.ones(count, np.int64)
        if inner == 1 and size % granularity.block_size == 0:  # sooner than the general case
            length = np.full(count, granularity.block_size)
            return number * granularity.block_size, ones, length, 0
        blocks = -(-size // granularity.block_size)
        before = number // inner % blocks * granularity.block_size
        starts = (number // (inner * blocks) * size + before) * inner + number % inner
        lengths = np.minimum(granularity.block_size, size - before)
        return (starts, ones, lengths, 0) if inner == 1 else (starts, lengths, ones, inner)
    return (number * inner, np.full(count, outer), np.full(count, inner), size * inner)


def pieces(layout: Array, start: int, stop: int) -> tuple[Array, Array, Array, int, Array]:
    """The elements from number start to stop as pieces of groups, as places() has whole ones, with
    places counted from start, and the number of the group that each piece is of.

    Where neighbours are of different groups, whole rows of them are expected, or less than one.
    """
    size, inner, block, outer_stride, block_stride, inner_stride, rows, band = layout.tolist()

    def group(element: Array) -> Array:
        a, d = element // (size * inner), element // inner % size
        above = a if rows == 1 else a // band * -(-band // rows) + a % band // rows
        return np.asarray(above * outer_stride + d // block * block_stride)

    if inner_stride:
        lines = np.arange(start // inner, -(-stop // inner))
        begins = np.flatnonzero(np.diff(group(lines * inner), prepend=-1))
        heights = np.diff(begins, append=lines.size)
        columns = np.arange(start % inner, min(inner, start % inner + stop - start))
        starts = (begins[:, None] * inner + columns - start % inner).reshape(-1)
        groups = (group(lines[begins] * inner)[:, None] + columns).reshape(-1)
        ones = np.ones(starts.size, np.int64)
        return starts, heights.repeat(columns.size), ones, inner, groups
    line = size * inner
    within = np.arange(0, line, block * inner)
    first = np.arange(start // line, -(-stop // line)) * line
    bounds = (first[:, None] + within).reshape(-1)
    bounds = np.union1d(bounds[(bounds > start) & (bounds < stop)], np.arange(start, stop, CHUNK))
    widths = np.diff(bounds, append=stop)
    return bounds - start, np.ones(bounds.size, np.int64), widths, 0, group(bounds)

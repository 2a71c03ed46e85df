"""Codes in pieces of bounded size that are dequantized one by one, in the order of C."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.packing import unpack
from qtool.pool import in_order
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Reader, Shape, Writer
from qtool.tensor import dequantize

Array = NDArray[Any]
_Box = tuple[slice, slice, slice]

TILE = 1 << 17  # elements: their float32 temporaries stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of dtype, the stored bytes of which read gives, their scale and zero point.

    shape: of the codes. granularity: of the scale, its axis counted from the front.
    """

    read: Reader
    dtype: DType
    shape: Shape
    scale: Array
    zero_point: Array | None
    granularity: Granularity

    def write(self, write: Writer, output: DType, jobs: int) -> None:
        """Store the dequantized values, as output, over that many threads."""
        shape = _folded(self.shape, self.granularity)
        _, size, inner = shape

        def work(box: _Box) -> None:
            outer, along, within = box
            start = (outer.start * size + along.start) * inner + within.start
            values = self._tile(shape, box, start, output)
            write(start * values.itemsize, values.reshape(-1).view(np.uint8))

        block = self.granularity.block_size if isinstance(self.granularity, Blocked) else 1
        for _ in in_order(work, _boxes(shape, block), jobs):
            pass

    def _tile(self, shape: Shape, box: _Box, start: int, output: DType) -> Array:
        """The values of a box of the folded shape, whose first element has the number start."""
        extent = tuple(part.stop - part.start for part in box)
        codes = self._codes(start, math.prod(extent)).reshape(extent)
        scale = self._groups(self.scale, shape, box)
        zero = None if self.zero_point is None else self._groups(self.zero_point, shape, box)
        computed = DTYPES["float32"] if output.name == "float64" else output
        values = dequantize(codes, scale, zero, _along(self.granularity), computed)
        return values.astype(output.numpy, copy=False)

    def _codes(self, start: int, count: int) -> Array:
        bits, begin = self.dtype.bits, start - start % 8  # eight codes are whole bytes
        stored = np.empty(self.dtype.nbytes(start + count - begin), np.uint8)
        self.read(begin * bits // 8, stored)
        return unpack(stored, self.dtype, (start + count - begin,))[start - begin :]

    def _groups(self, values: Array, shape: Shape, box: _Box) -> Array:
        """The scale or zero point of the groups that a box lies in."""
        outer, along, within = box
        if isinstance(self.granularity, PerTensor):
            return values.reshape(())
        if isinstance(self.granularity, PerAxis):
            return values.reshape(-1)[along]
        block = self.granularity.block_size
        blocks = slice(along.start // block, -(-along.stop // block))
        return values.reshape(shape[0], -1, shape[2])[outer, blocks, within]


def _along(granularity: Granularity) -> Granularity:
    """The granularity of a folded shape, whose axis is the middle one."""
    if isinstance(granularity, PerTensor):
        return granularity
    return PerAxis(1) if isinstance(granularity, PerAxis) else Blocked(1, granularity.block_size)


def _folded(shape: Shape, granularity: Granularity) -> Shape:
    """The shape as (before, along, after) the axis of the granularity."""
    if isinstance(granularity, PerTensor):
        return (1, 1, math.prod(shape))
    axis = granularity.axis
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def _boxes(shape: Shape, block: int) -> Iterator[_Box]:
    """The shape in contiguous pieces of about TILE elements, in C order, none of which has only
    parts of several blocks along the middle axis."""
    outer, size, inner = shape
    if 0 in shape:
        return
    if size * inner <= TILE:
        for rows in _runs(0, outer, TILE // (size * inner)):
            yield rows, slice(0, size), slice(0, inner)
        return
    for row in _runs(0, outer, 1):
        for along in _alongs(size, block, max(TILE // inner, 1)):
            for within in _runs(0, inner, TILE):
                yield row, along, within


def _alongs(size: int, block: int, most: int) -> Iterator[slice]:
    """Runs of at most that many elements: whole blocks, or within one."""
    if most >= block:
        yield from _runs(0, size, most - most % block)
        return
    for run in _runs(0, size, block):
        yield from _runs(run.start, run.stop, most)


def _runs(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))

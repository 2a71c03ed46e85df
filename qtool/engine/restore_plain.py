"""Dequantizes a tensor with the operator itself, in pieces of bounded size, in C order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.packing import unpack
from qtool.pool import in_order
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape, Tiled, Writer, folded
from qtool.tensor import Codes, dequantize, operator_scale

Array = NDArray[Any]
_Box = tuple[slice, slice, slice]

TILE = 1 << 17  # elements: their float32 temporaries stay in the L2 cache


def restore(codes: Codes, write: Writer, output: DType, jobs: int) -> None:
    """Store (code - zero_point) * scale of every element, as output, over that many threads."""
    codes = _plain(codes)
    shape = folded(codes.shape, codes.granularity)

    def work(box: _Box) -> None:
        start = _start(shape, box)
        values = _tile(codes, shape, box, start, output)
        write(start * values.itemsize, values.reshape(-1).view(np.uint8))

    in_order(work, _boxes(shape, _block(codes)), jobs, lambda _: None)


def values(codes: Codes, output: DType) -> Iterator[Array]:
    """(code - zero_point) * scale of every element, as output, in pieces in C order."""
    codes = _plain(codes)
    shape = folded(codes.shape, codes.granularity)
    for box in _boxes(shape, _block(codes)):
        yield _tile(codes, shape, box, _start(shape, box), output).reshape(-1)


def _start(shape: Shape, box: _Box) -> int:
    outer, along, within = (part.start for part in box)
    return int((outer * shape[1] + along) * shape[2] + within)


def _block(codes: Codes) -> int:
    return codes.granularity.block_size if isinstance(codes.granularity, Blocked) else 1


def _plain(codes: Codes) -> Codes:
    """The same with blocks for tiles, and without a global scale."""
    scale, zero = operator_scale(codes.scale, codes.global_scale), codes.zero_point
    granularity = codes.granularity
    if isinstance(granularity, Tiled):
        if zero is not None:
            zero = granularity.by_rows(zero, codes.shape)[0]
        scale, granularity = granularity.by_rows(scale, codes.shape)
    return replace(codes, scale=scale, zero_point=zero, granularity=granularity, global_scale=None)


def _tile(codes: Codes, shape: Shape, box: _Box, start: int, output: DType) -> Array:
    """The values of a box of the folded shape, whose first element has the number start."""
    extent = tuple(part.stop - part.start for part in box)
    y = read_codes(codes, start, math.prod(extent)).reshape(extent)
    scale = _groups(codes, codes.scale, shape, box)
    zero = None if codes.zero_point is None else _groups(codes, codes.zero_point, shape, box)
    computed = DTYPES["float32"] if output.name == "float64" else output
    bias = None if codes.bias is None else _groups(codes, codes.bias, shape, box)
    values = dequantize(y, scale, zero, _along(codes.granularity), computed, bias)
    return values.astype(output.numpy, copy=False)


def read_codes(codes: Codes, start: int, count: int) -> Array:
    """The codes of so many elements from number start on."""
    if not codes.is_packed:
        y = np.empty(count, codes.dtype.numpy)
        codes.read(start * y.itemsize, y.view(np.uint8))
        return y
    begin = start - start % 8  # eight codes are whole bytes
    stored = np.empty(codes.dtype.nbytes(start + count - begin), np.uint8)
    codes.read(begin * codes.dtype.bits // 8, stored)
    return unpack(stored, codes.dtype, (start + count - begin,))[start - begin :]


def _groups(codes: Codes, values: Array, shape: Shape, box: _Box) -> Array:
    """The scale or zero point of the groups that a box lies in."""
    outer, along, within = box
    if isinstance(codes.granularity, PerTensor):
        return values.reshape(())
    if isinstance(codes.granularity, PerAxis):
        return values.reshape(-1)[along]
    assert isinstance(codes.granularity, Blocked)
    block = codes.granularity.block_size
    blocks = slice(along.start // block, -(-along.stop // block))
    return values.reshape(shape[0], -1, shape[2])[outer, blocks, within]


def _along(granularity: Granularity) -> Granularity:
    """The granularity of a folded shape, whose axis is the middle one."""
    if isinstance(granularity, PerTensor):
        return granularity
    return Blocked(1, granularity.block_size) if isinstance(granularity, Blocked) else PerAxis(1)


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

"""Arrays of one name in several files, one after another: a tensor that no memory need hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import engine, formats, ops
from qtool.dtypes import DType
from qtool.errors import SpecError, TensorError
from qtool.spec import Granularity, PerAxis, PerTensor, Reader, Shape

Array = NDArray[Any]

_PIECE = 1 << 16  # elements of a piece: what is made of them stays in the L2 cache
_OPEN = 2  # files of a Reader that are open at once


@dataclass(frozen=True, slots=True)
class Batch:
    """An array in a file, by its name there."""

    path: Path
    name: str
    shape: Shape
    dtype: DType
    source_dtype: DType | None

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A Reader of it."""
        with (
            closing(formats.open(self.path, source_dtype=self.source_dtype)) as source,
            source.reading(self.name) as read,
        ):
            yield read


class Batches:
    """Arrays of one name as a tensor of shape (rows, groups, more).

    axis: that of the scales, in every array; None: one group. The axes before it, and the arrays,
    are the rows, the axes behind it are more. dtype: of the arrays where they have one that the
    kernels read, else float32. refuses: whether NaN and Inf are errors.

    Raises SpecError where the arrays do not fit together.
    """

    def __init__(
        self, name: str, arrays: Sequence[Batch], axis: int | None, *, refuses: bool
    ) -> None:
        self.name = name
        self._refuses = refuses
        self._arrays = arrays
        self._folded = [_folded(array, axis, name) for array in arrays]
        self.groups, more = self._folded[0][1:]
        if axis is None:
            more = 1
        elif any(shape[1:] != (self.groups, more) for shape in self._folded):
            shapes = " and ".join(sorted({str(array.shape) for array in arrays})[:2])
            rule = f"batches of shapes {shapes} differ along axis {axis} or behind it"
            raise SpecError(f"tensor {name}", rule, "leave --axis out, or make them alike")
        self.size = sum(math.prod(array.shape) for array in arrays)
        if not self.size:
            raise SpecError(f"tensor {name}", "has no values", "leave it out with --exclude")
        self.shape = (self.size // (self.groups * more), self.groups, more)
        self.nbytes = sum(array.dtype.nbytes(math.prod(array.shape)) for array in arrays)
        types = {array.dtype for array in arrays}
        dtype = arrays[0].dtype
        self.dtype = dtype if len(types) == 1 and dtype.name in engine.SOURCES else ops.FLOAT32
        self.granularity: Granularity = PerTensor() if axis is None else PerAxis(1)

    @property
    def count(self) -> int:
        """How many arrays there are."""
        return len(self._arrays)

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """All values as float32 (rows, groups, more), in pieces of bounded size, each with the
        number of its first group."""
        for array, (rows, groups, more) in zip(self._arrays, self._folded, strict=True):
            with array.reading() as read:
                for first, values in _pieces(read, array.dtype, rows, groups, more):
                    self._check(values, array)
                    yield first, values

    def read(self) -> Array:
        """All of it."""
        found = np.empty(self.size, self.dtype.numpy)
        with self.reading() as read:
            read(0, found)
        return found.reshape(self.shape)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A Reader of all of it; few files are open at once."""
        ends = np.cumsum([math.prod(shape) for shape in self._folded])
        lock = Lock()
        opened: dict[int, tuple[AbstractContextManager[Reader], Reader]] = {}

        def reader(number: int) -> Reader:
            if number not in opened:
                while len(opened) >= _OPEN:
                    opened.pop(next(iter(opened)))[0].__exit__(None, None, None)
                context = self._arrays[number].reading()
                opened[number] = (context, context.__enter__())
            return opened[number][1]

        def read(start: int, out: Array) -> None:
            done = 0
            number = int(np.searchsorted(ends, start, side="right"))
            with lock:
                while done < out.size:
                    size = min(int(ends[number]) - start - done, out.size - done)
                    begin = start + done - (int(ends[number - 1]) if number else 0)
                    part = out[done : done + size]
                    self._fill(reader(number), self._arrays[number], begin, part)
                    done += size
                    number += 1

        try:
            yield read
        finally:
            for context, _ in opened.values():
                context.__exit__(None, None, None)

    def _fill(self, read: Reader, array: Batch, begin: int, out: Array) -> None:
        if array.dtype == self.dtype:
            read(begin, out)
        else:
            values = np.empty(out.size, array.dtype.numpy)
            read(begin, values)
            out[:] = ops.cast(values, self.dtype)
        self._check(out, array)

    def _check(self, values: Array, array: Batch) -> None:
        if self._refuses and not np.isfinite(ops.cast(values, ops.FLOAT32)).all():
            rule = f"{array.path} holds values that are not finite in float32"
            remedy = "mend them, or use --nonfinite allow"
            raise TensorError(f"tensor {self.name}", rule, remedy)


def _folded(array: Batch, axis: int | None, name: str) -> Shape:
    """(rows, groups, more) of one array."""
    if axis is None:
        return (1, 1, math.prod(array.shape))
    try:
        axis = PerAxis(axis).resolve(array.shape).axis
    except SpecError as error:
        raise SpecError(f"tensor {name}", str(error)) from error
    shape = array.shape
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def _pieces(
    read: Reader, dtype: DType, rows: int, groups: int, more: int
) -> Iterator[tuple[int, Array]]:
    """Several rows at once, or some groups of one, or a part of one group."""

    def piece(start: int, *shape: int) -> Array:
        values = np.empty(math.prod(shape), dtype.numpy)
        read(start, values)
        return ops.cast(values, ops.FLOAT32).reshape(shape)

    row = groups * more
    if 0 < row <= _PIECE:
        for first in range(0, rows, _PIECE // row):
            yield 0, piece(first * row, min(_PIECE // row, rows - first), groups, more)
        return
    together = max(_PIECE // max(more, 1), 1)
    for start in range(0, rows * row, row or 1):
        for first in range(0, groups, together):
            many = min(together, groups - first)
            for part in range(0, more, _PIECE):
                size = min(_PIECE, more - part)
                yield first, piece(start + first * more + part, 1, many, size)

"""Matrices on their way to a file that wants their rows padded, or in columns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qtool.formats import write_at
from qtool.spec import Writer

Array = NDArray[Any]

# Bytes of a matrix that are transposed in memory; what is larger is put together from stripes.
_STRIPE = 32 << 20
# Bytes of a stripe's part of a stored row from which on it may go to its place alone.
_PIECE = 4096
# Bytes of a stored row that one step fills, and bytes of rows that a step takes at most.
_LINE, _STEP = 64, 1 << 22
# Elements that are transposed at once: they stay in the L2 cache.
_TILE = 1 << 18


class Memory:
    """Memory that is used again: the first touch of fresh memory can cost more than the work.

    folder: where room on disk is taken, in files without names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[Array]] = {}
        self._held = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Array:
        """That many bytes, of any content."""
        with self._lock:
            if self._free.get(nbytes):
                self._held -= nbytes
                return self._free[nbytes].pop()
        return np.empty(nbytes, np.uint8)

    def give(self, memory: Array) -> None:
        """Nobody reads it any more."""
        with self._lock:
            if self._held + memory.size > _STRIPE:
                self._free, self._held = {}, 0
            self._free.setdefault(memory.size, []).append(memory)
            self._held += memory.size

    def file(self) -> BinaryIO:
        """An empty file, gone when it is closed."""
        return TemporaryFile(dir=self._folder, buffering=0)


class Rows:
    """Rows of bytes, put together from pieces that come in any order and from any thread.

    count, width: of the rows, in bytes. step: how many are handed on together, the last ones
    fewer. take: gets the number of the first one and the rows, in the thread that completed them;
    what it gets is valid until it returns.
    """

    def __init__(
        self,
        count: int,
        width: int,
        step: int,
        take: Callable[[int, Array], None],
        memory: Memory,
    ) -> None:
        self._size, self._width, self._step = count * width, width, step
        self._take, self._memory = take, memory
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[Array, list[int]]] = {}  # memory, lengths of what is in it

    def write(self, offset: int, data: Array) -> None:
        """A Writer of the rows."""
        pieces = data.reshape(-1).view(np.uint8)
        largest = self._step * self._width
        at = 0
        while at < pieces.size:
            part, begin = divmod(offset + at, largest)
            length = min(largest, self._size - part * largest)
            piece = pieces[at : at + length - begin]
            at += piece.size
            if piece.size == length:
                self._hand_on(part, piece)
            else:
                self._collect(part, begin, length, piece)

    def _collect(self, part: int, begin: int, length: int, piece: Array) -> None:
        with self._lock:
            if part not in self._parts:
                self._parts[part] = (self._memory.take(length), [])
            whole, stored = self._parts[part]
        whole[begin : begin + piece.size] = piece
        with self._lock:
            stored.append(piece.size)
            if sum(stored) < length:
                return
            del self._parts[part]
        self._hand_on(part, whole)
        self._memory.give(whole)

    def _hand_on(self, part: int, rows: Array) -> None:
        self._take(part * self._step, rows.reshape(-1, self._width))


class Transposed:
    """A matrix of (rows, columns), which arrives row by row and is stored column by column.

    element: type of what is stored. write: takes it. pack, per: what makes one stored row of
    every `per` rows that arrive, whose elements are bytes then; a last one of fewer.
    kept: how many columns are stored, the first ones; None: all.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        element: np.dtype[Any],
        write: Writer,
        memory: Memory,
        *,
        pack: Callable[[Array], Array] | None = None,
        per: int = 1,
        kept: int | None = None,
    ) -> None:
        rows, columns = shape
        self._columns = columns if kept is None else kept
        self._element, self._store, self._memory = element, write, memory
        self._pack, self._per = pack, per
        self._height = -(-rows // per)
        width = columns * (element.itemsize if pack is None else 1)
        step = max(min(_LINE // element.itemsize, _STEP // max(width * per, 1)), 1)
        stripe = _STRIPE // max(self._columns * element.itemsize, 1)
        self._stripe = max(min(stripe, self._height) // step, 1) * step
        if self._height <= stripe:
            self._stripe = self._height
        is_small = self._stripe * element.itemsize < min(_PIECE, self._height * element.itemsize)
        self._scratch = memory.file() if is_small else None
        self._kept = 0  # stored rows that are in it
        self._lock = threading.Lock()
        self._stripes: dict[int, tuple[Array, list[int]]] = {}  # memory, elements that are in it
        self._rows = Rows(rows, width, step * per, self._take, memory)
        self.write: Writer = self._rows.write

    def _take(self, first: int, rows: Array) -> None:
        if self._pack is None:
            rows = rows.view(self._element)
        # rows a power of two of bytes apart would share few places in the caches
        width = _TILE // len(rows) + _LINE
        for begin in range(0, self._columns, width):
            values = rows[:, begin : min(begin + width, self._columns)]
            self._place(
                first // self._per, begin, values if self._pack is None else self._pack(values)
            )

    def _place(self, row: int, column: int, values: Array) -> None:
        """Put a part of the matrix, from that stored row and that column on, into its stripes."""
        while len(values):
            number, begin = divmod(row, self._stripe)
            height = min(self._stripe, self._height - number * self._stripe)
            part = values[: height - begin]
            self._fill(number, height, begin, column, part)
            values, row = values[len(part) :], row + len(part)

    def _fill(self, number: int, height: int, row: int, column: int, values: Array) -> None:
        """Put values into a stripe of that height; store it when it is full."""
        with self._lock:
            if number not in self._stripes:
                nbytes = height * self._columns * self._element.itemsize
                self._stripes[number] = (self._memory.take(nbytes), [0])
            memory, filled = self._stripes[number]
        stripe = memory.view(self._element).reshape(self._columns, height)
        stripe[column : column + values.shape[1], row : row + len(values)] = values.T
        with self._lock:
            filled[0] += values.size
            if filled[0] < stripe.size:
                return
            del self._stripes[number]
        self._stripe_done(number, height, stripe)
        self._memory.give(memory)

    def _stripe_done(self, number: int, height: int, stripe: Array) -> None:
        """Store a stripe, [columns, height], or keep it until all are there."""
        size, row = self._element.itemsize, number * self._stripe
        if height == self._height:
            self._store(0, stripe.reshape(-1))
        elif self._scratch is None:
            for column, part in enumerate(stripe):
                self._store((column * self._height + row) * size, part)
        else:
            place = row * self._columns * size
            write_at(self._scratch.fileno(), place, stripe.reshape(-1).view(np.uint8).data)
            with self._lock:
                self._kept += height
                if self._kept < self._height:
                    return
            self._assemble(self._scratch)

    def _assemble(self, scratch: BinaryIO) -> None:
        """Store what was kept, some columns at a time."""
        size = self._element.itemsize
        step = max(_STRIPE // (self._height * size), 1)
        for column in range(0, self._columns, step):
            count = min(step, self._columns - column)
            memory = self._memory.take(count * self._height * size)
            whole = memory.view(self._element).reshape(count, self._height)
            for row in range(0, self._height, self._stripe):
                part = whole[:, row : row + self._stripe]
                place = (row * self._columns + column * part.shape[1]) * size
                stored = os.pread(scratch.fileno(), part.nbytes, place)
                part[:] = np.frombuffer(stored, self._element).reshape(part.shape)
            self._store(column * self._height * size, memory)
            self._memory.give(memory)
        scratch.close()


def unpadded(columns: int, kept: int, element: np.dtype[Any], write: Writer) -> Writer:
    """A Writer of the rows of a matrix that stores the first elements of each alone."""
    size = element.itemsize

    def store(offset: int, data: Array) -> None:
        values = data.view(element)
        row, column = np.divmod(np.arange(offset // size, offset // size + values.size), columns)
        is_kept = column < kept
        if is_kept.any():
            first = int(np.argmax(is_kept))
            write(int(row[first] * kept + column[first]) * size, values[is_kept])

    return store

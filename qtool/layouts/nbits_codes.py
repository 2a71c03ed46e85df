"""Codes, scales and zero points on their way into what nbits.py describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.layouts.nbits import Form, Storage
from qtool.layouts.reordered import Memory, Rows, Transposed
from qtool.layouts.stored import flipped, unchanged
from qtool.packing import pack, unpack
from qtool.spec import Writer
from qtool.tensor import Target

Array = NDArray[Any]

# Bytes of rows of codes that are padded and packed at once.
_STEP = 1 << 20


@contextmanager
def target(
    storages: Sequence[Storage], writers: Sequence[Sequence[Writer]], memory: Memory
) -> Iterator[Target]:
    """Where the parts of a quantized tensor go, to be stored in every one of several ways.

    writers: of each storage's parts.
    """
    is_packed = not any(s.form is Form.COLUMNS or s.has_gaps for s in storages)
    with ExitStack() as stack:
        targets = [
            stack.enter_context(_target(storage, parts, memory, is_packed=is_packed))
            for storage, parts in zip(storages, writers, strict=True)
        ]
        zero_points = [t.zero_point for t in targets if t.zero_point is not None]
        yield Target(
            _each([t.codes for t in targets]),
            _each([t.scale for t in targets]),
            _each(zero_points) if zero_points else None,
            is_packed=is_packed,
        )


def _each(writers: Sequence[Writer]) -> Writer:
    def write(offset: int, data: Array) -> None:
        for one in writers:
            one(offset, data)

    return writers[0] if len(writers) == 1 else write


@contextmanager
def _target(
    storage: Storage, writers: Sequence[Writer], memory: Memory, *, is_packed: bool
) -> Iterator[Target]:
    """One storage's. Codes behind the end of a row are written last, when its zero point is
    known."""
    codes, scale, *stored = writers
    zeros = _ZeroPoints(storage, stored[0] if stored else None, is_packed=is_packed)
    write_zeros = zeros.write if storage.zero_point is None else None
    if storage.form is Form.COLUMNS:
        columns = _columns(storage, codes, memory)
        element = np.dtype(f"u{storage.parts[1].dtype.numpy.itemsize}")
        scales = Transposed((storage.blocks, storage.count), element, scale, memory)
        yield Target(columns.write, scales.write, write_zeros, is_packed=False)
        for row in range(storage.depth, storage.blocks * storage.block_size):
            columns.write(row * storage.count, zeros.last ^ np.uint8(storage.flip))
    elif storage.has_gaps:
        rows = _PaddedRows(storage, codes, memory)
        yield Target(rows.write, scale, write_zeros, is_packed=False)
        rows.finish(zeros.last)
    else:
        yield Target(_straight(storage, codes, is_packed=is_packed), scale, write_zeros, is_packed)


class _ZeroPoints:
    """Takes the zero points of a weight.

    last: those of the last block of every row, as stored.
    """

    def __init__(self, storage: Storage, write: Writer | None, *, is_packed: bool) -> None:
        self._storage, self._write, self._is_packed = storage, write, is_packed
        self.last = np.full(storage.count, storage.zero_point or 0, np.uint8)
        if write is not None and storage.zero_point is not None:
            shape = (storage.count, storage.blocks)
            self._store(np.full(shape, storage.zero_point, np.uint8))

    def write(self, offset: int, data: Array) -> None:
        """A Writer of all of them at once."""
        storage = self._storage
        shape = (storage.count, storage.blocks)
        if self._is_packed:
            data = unpack(data, storage.dtype, shape)
        codes = data.view(np.uint8) & np.uint8((1 << storage.dtype.bits) - 1)
        if storage.form is Form.COLUMNS:
            codes = np.ascontiguousarray(codes.reshape(shape[::-1]).T)
        codes = codes.reshape(shape) ^ np.uint8(storage.flip)
        self.last = codes[:, -1]
        self._store(codes)

    def _store(self, codes: Array) -> None:
        assert self._write is not None
        if self._storage.is_typed:
            self._write(0, pack(codes, self._storage.dtype))
        else:
            self._write(0, _pack_rows(codes, self._storage.dtype.bits).reshape(-1))


def _straight(storage: Storage, write: Writer, *, is_packed: bool) -> Writer:
    """A Writer of codes that are stored in the order in which they come."""
    bits = storage.dtype.bits
    recode = flipped(bits) if storage.flip else unchanged

    def write_codes(offset: int, data: Array) -> None:
        if not is_packed:
            offset, data = offset * bits // 8, pack(data, _unsigned(bits))
        write(offset, recode(data))

    return write_codes


def _columns(storage: Storage, write: Writer, memory: Memory) -> Transposed:
    """Takes codes of [K, N], one per byte, and then those behind K."""
    bits = storage.dtype.bits
    return Transposed(
        (storage.blocks * storage.block_size, storage.count), np.dtype(np.uint8), write, memory,
        pack=partial(_pack_columns, bits=bits, flips=storage.flip > 0), per=8 // bits,
    )  # fmt: skip


class _PaddedRows:
    """Takes codes of [N, K], one per byte; rows are stored padded to whole blocks.

    Where zero points differ, the last block of every row waits for them.
    """

    def __init__(self, storage: Storage, write: Writer, memory: Memory) -> None:
        self._storage, self._store = storage, write
        bits, depth = storage.dtype.bits, storage.blocks * storage.block_size
        self._whole = depth - storage.block_size  # codes of a row before its last block
        self._width = depth * bits // 8
        shape = (storage.count, storage.block_size)
        self._last = np.zeros(shape, np.uint8) if storage.zero_point is None else None
        step = max(_STEP // depth, 1)
        self.write = Rows(storage.count, storage.depth, step, self._take, memory).write

    def _take(self, first: int, rows: Array) -> None:
        storage, flip = self._storage, np.uint8(self._storage.flip)
        codes = (rows & np.uint8((1 << storage.dtype.bits) - 1)) ^ flip
        if self._last is None:
            missing = self._whole + storage.block_size - storage.depth
            codes = np.pad(codes, ((0, 0), (0, missing)), constant_values=storage.zero_point or 0)
            self._store(first * self._width, _pack_rows(codes, storage.dtype.bits).reshape(-1))
            return
        self._last[first : first + len(codes), : storage.depth - self._whole] = (
            codes[:, self._whole :]
        )  # fmt: skip
        packed = _pack_rows(codes[:, : self._whole], storage.dtype.bits)
        for row, stored in enumerate(packed, first):
            self._store(row * self._width, stored)

    def finish(self, zero_points: Array) -> None:
        """Store what waits for the zero points of the last blocks."""
        if self._last is None:
            return
        self._last[:, self._storage.depth - self._whole :] = zero_points[:, None]
        packed = _pack_rows(self._last, self._storage.dtype.bits)
        for row, stored in enumerate(packed):
            self._store((row + 1) * self._width - stored.size, stored)


def _pack_columns(rows: Array, *, bits: int, flips: bool) -> Array:
    """[r, n] codes -> [r * bits / 8, n] bytes, the first row in the lowest bits; see flipped()."""
    per, mask = 8 // bits, np.uint8((1 << bits) - 1)
    lanes = rows.reshape(-1, per, rows.shape[1])
    packed = lanes[:, 0] & mask
    for lane in range(1, per):
        packed |= (lanes[:, lane] & mask) << np.uint8(lane * bits)
    return flipped(bits)(packed) if flips else packed


def _pack_rows(codes: Array, bits: int) -> Array:
    """[r, k] codes -> [r, ceil(k * bits / 8)] bytes, the first one in the lowest bits."""
    missing = -codes.shape[1] % (8 // bits)
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else codes
    return pack(padded, _unsigned(bits)).reshape(len(codes), -1)


def _unsigned(bits: int) -> DType:
    return DTYPES[f"uint{bits}"]

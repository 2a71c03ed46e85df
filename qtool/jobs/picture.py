"""What can be drawn of one quantized tensor: its values, the grid, and where the error lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import QtoolError
from qtool.spec import Blocked, Reader, Shape, Writer
from qtool.tensor import Codes, dequantize, operator_scale

Array = NDArray[Any]
# Stores the float32 values that the codes stand for, piece by piece, and returns the codes.
Restored = Callable[[Writer], Codes]

BINS = 80
CELLS = 128  # rows, and columns, of a heat map at most
_PIECE = 1 << 18
_LINES = 64  # values of a grid that are told one by one


def picture(
    read: Reader, dtype: DType, record: dict[str, Any], restored: Restored | None
) -> dict[str, Any]:
    """The histogram of a tensor, and with its codes the grid and the heat map too, as plain data.

    read, dtype: of the tensor before quantization. record: its entry in the report. Read twice, in
    pieces.
    """
    shape = tuple(record["shape"])
    values = _Values(read, dtype, math.prod(shape))
    low, high = values.limits()
    histogram = np.zeros(BINS, np.int64)
    found: dict[str, Any] = {"name": record["name"], "grid": None, "heat": None}
    if restored is None:
        for _, x in values.pieces():
            histogram += counts(x, low, high)
    else:
        heat = _Heat(shape, record)

        def compare(offset: int, data: Array) -> None:
            x_hat = data.view(np.float32)
            first = offset // x_hat.itemsize
            for at in range(0, x_hat.size, _PIECE):
                piece = x_hat[at : at + _PIECE]
                x = values.read(first + at, piece.size)
                histogram[:] += counts(x, low, high)
                heat.add(first + at, x, piece)

        codes = restored(compare)
        heat.check(record)
        found |= {"grid": _grid(codes, low, high), "heat": heat.to_json()}
    return found | {"histogram": {"low": low, "high": high, "counts": histogram.tolist()}}


class _Values:
    """A tensor before quantization, as float32, which is what is quantized of float64 too."""

    def __init__(self, read: Reader, dtype: DType, size: int) -> None:
        self._read, self._dtype, self._size = read, dtype, size

    def read(self, start: int, count: int) -> Array:
        x = np.empty(count, self._dtype.numpy)
        self._read(start, x)
        with np.errstate(over="ignore"):
            return x.astype(np.float32)

    def pieces(self) -> Iterator[tuple[int, Array]]:
        for start in range(0, self._size, _PIECE):
            yield start, self.read(start, min(_PIECE, self._size - start))

    def limits(self) -> tuple[float, float]:
        """Least and largest finite value, apart where there is one alone."""
        low, high = math.inf, -math.inf
        for _, x in self.pieces():
            finite = np.isfinite(x)
            low = min(low, float(x.min(where=finite, initial=math.inf)))
            high = max(high, float(x.max(where=finite, initial=-math.inf)))
        if low > high:
            return -1.0, 1.0
        if low == high:
            return low - (abs(low) or 1.0), high + (abs(high) or 1.0)
        return low, high


def counts(x: Array, low: float, high: float) -> NDArray[np.int64]:
    """How many finite values lie in each of BINS equal bins from low to high; none outside."""
    x = x[np.isfinite(x)].astype(np.float64)
    x = x[(x >= low) & (x <= high)]
    place = ((x - low) * (BINS / (high - low))).astype(np.int64)
    return np.bincount(np.minimum(place, BINS - 1), minlength=BINS)


def _grid(codes: Codes, low: float, high: float) -> dict[str, Any] | None:
    """What the codes stand for in the group whose scale is the (lower) median by magnitude.

    values: one by one, where there are no more than 64; density: of all of them per bin.
    """
    scale = operator_scale(codes.scale, codes.global_scale).reshape(-1)
    if not scale.size:
        return None
    order = np.argsort(np.abs(scale.astype(np.float64)), kind="stable")
    at = int(order[(scale.size - 1) // 2])
    one = slice(at, at + 1)
    zero = None if codes.zero_point is None else codes.zero_point.reshape(-1)[one]
    bias = None if codes.bias is None else codes.bias.reshape(-1)[one]
    every = _every_code(codes.dtype)
    group = Blocked(0, every.size)
    values = np.unique(dequantize(every, scale[one], zero, group, "float32", bias))
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    return {
        "scale": float(scale[at]),
        "levels": int(values.size),
        "low": float(values[0]),
        "high": float(values[-1]),
        "values": values.tolist() if values.size <= _LINES else None,
        "density": counts(values, low, high).tolist(),
    }


def _every_code(dtype: DType) -> Array:
    if dtype.is_integer:
        bits = min(dtype.bits, 16)  # nothing wider is a type of weights
        first = -(1 << bits - 1) if dtype.kind == "int" else 0
        return np.arange(first, first + (1 << bits)).astype(dtype.numpy)
    return np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)


class _Heat:
    """Root mean squares of the errors in at most CELLS x CELLS cells of whole blocks.

    The tensor is seen as a matrix, divided where the axis of the scales begins (behind the first
    axis for those along it).
    """

    def __init__(self, shape: Shape, record: dict[str, Any]) -> None:
        axis, block = record.get("axis"), record.get("block_size") or 1
        split = axis if axis else 1
        tile = record.get("tile")
        if tile:
            split = len(shape) - 1
        self._columns = math.prod(shape[split:])
        self._rows = math.prod(shape[:split])
        inside = math.prod(shape[axis + 1 :]) if axis else 1
        down, across = tile or ((block, 1) if axis == 0 else (1, block * inside))
        self._height = _cell(self._rows, down)
        self._width = _cell(self._columns, min(across, self._columns))
        self._shape = (-(-self._rows // self._height), -(-self._columns // self._width))
        self._squares = np.zeros(math.prod(self._shape))
        self._counts = np.zeros(math.prod(self._shape), np.int64)

    def add(self, start: int, x: Array, x_hat: Array) -> None:
        """Errors of the elements from that number on; those that are not finite are left out."""
        at = np.arange(start, start + x.size)
        rows, columns = np.divmod(at, self._columns)
        cells = rows // self._height * self._shape[1] + columns // self._width
        with np.errstate(invalid="ignore"):
            errors = x.astype(np.float64) - x_hat
        finite = np.isfinite(errors)
        cells, errors = cells[finite], errors[finite]
        size = self._squares.size
        self._squares += np.bincount(cells, weights=np.square(errors), minlength=size)
        self._counts += np.bincount(cells, minlength=size)

    def check(self, record: dict[str, Any]) -> None:
        """Raise QtoolError where the report tells another error: it is on other values."""
        told, count = record.get("mse"), self._counts.sum()
        if isinstance(told, (int, float)) and count:
            found = float(self._squares.sum() / count)
            if not math.isclose(found, told, rel_tol=0.01):
                raise QtoolError(
                    f"No pictures of {record['name']}",
                    f"its mean squared error is {found:.4g} in the files, {told:.4g} in the report",
                )

    def to_json(self) -> dict[str, Any]:
        """cells: root mean square of the errors, row by row; null where there are none."""
        mean = self._squares / np.maximum(self._counts, 1)
        cells: Sequence[float | None] = [
            math.sqrt(m) if n else None for m, n in zip(mean, self._counts, strict=True)
        ]
        rows, columns = self._shape
        return {
            "rows": self._rows,
            "columns": self._columns,
            "cell": [self._height, self._width],
            "cells": [cells[columns * i : columns * (i + 1)] for i in range(rows)],
        }


def _cell(size: int, unit: int) -> int:
    """A multiple of unit of which CELLS are enough for size."""
    return max(1, unit * -(-size // (unit * CELLS)))


FLOAT32 = DTYPES["float32"]

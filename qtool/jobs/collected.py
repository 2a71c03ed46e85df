"""What is kept of the rows that a model's weights are multiplied with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qtool.formats import files, write_at
from qtool.rounding import hessian

if TYPE_CHECKING:
    from qtool.formats.onnx.operands import Operand

Array = NDArray[Any]

_PIECE = 8 << 20
_ROWS = 1 << 20  # elements whose products are summed at once


class Spool:
    """The rows themselves, in a file without a name in a folder, which goes when it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = 0
        self._places: dict[Operand, list[tuple[int, int]]] = {}  # begins and sizes, in bytes

    def __enter__(self) -> Spool:
        with files.explained(self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".qtool-")
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def add(self, operand: Operand, rows: Array) -> None:
        """Keep further rows."""
        with files.explained(self._folder):
            write_at(self._file.fileno(), self._end, rows.reshape(-1).view(np.uint8).data)
        self._places.setdefault(operand, []).append((self._end, rows.nbytes))
        self._end += rows.nbytes

    def rows(self, operands: Sequence[Operand]) -> int:
        """How many rows there are of all of them."""
        nbytes = sum(size for operand in operands for _, size in self._places.get(operand, []))
        return nbytes // (4 * operands[0].features)

    def pieces(self, operands: Sequence[Operand]) -> Iterator[bytes]:
        """All of their rows."""
        for operand in operands:
            for begin, size in self._places.get(operand, []):
                for start in range(begin, begin + size, _PIECE):
                    count = min(_PIECE, begin + size - start)
                    yield os.pread(self._file.fileno(), count, start)


class Moments:
    """Sums over the rows x, in float64: of x x^T, less than zero, or of x^2 alone."""

    def __init__(self, operands: Iterable[Operand], jobs: int, *, is_diagonal: bool) -> None:
        self._is_diagonal = is_diagonal
        self._jobs = jobs
        self._sums = {o: np.zeros((o.features,) * (1 if is_diagonal else 2)) for o in operands}
        self._rows = dict.fromkeys(self._sums, 0)

    def add(self, operand: Operand, rows: Array) -> None:
        """Add further rows."""
        self._rows[operand] += len(rows)
        step = max(_ROWS // operand.features, operand.features)
        for start in range(0, len(rows), step):
            x = rows[start : start + step]
            if self._is_diagonal:
                self._sums[operand] += np.square(x.astype(np.float64)).sum(axis=0)
            else:
                hessian.subtract_products(self._sums[operand], x, self._jobs)

    def rows(self, operands: Sequence[Operand]) -> int:
        """How many rows there are of all of them."""
        return sum(self._rows[operand] for operand in operands)

    def mean(self, operands: Sequence[Operand]) -> Array:
        """The sum over the rows of all of them, divided by their number, as float32."""
        rows = self.rows(operands)
        total = sum((self._sums[operand] for operand in operands), np.zeros(()))
        found = total / max(rows, 1) if self._is_diagonal else hessian.mean(total, rows)
        return np.asarray(found, np.float32)

"""The data file of an ONNX model: written in any order at known places, hashed meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from qtool.formats import writing_file
from qtool.spec import Writer

# Readers map the data file into memory: tensors begin at pages.
_ALIGNMENT = 4096
_PIECE = 1 << 20
HASH_DIGITS = 16


def data_stem(model: Path) -> str:
    """What names of a model's data files begin with: the model's, as far as it is text, which is
    all that a location in a model can be."""
    return os.fsencode(model.stem).decode("utf-8", "replace").replace("\ufffd", "_")


def data_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of that many bytes begin, in the order in which they lie, and where they end."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end + -end % _ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end


class DataFile:
    """External data being written to path, in place; the same parts give the same bytes.

    sizes: bytes of the parts, above 0, in the order in which they lie.
    offsets: where they begin.

    The content is hashed as it is written; what was written behind a gap is read back for that.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self.offsets, _ = data_offsets(sizes)
        self._path = path
        self._sizes = sizes
        self._digest = xxhash.xxh3_64()
        self._buffer = bytearray(_PIECE)
        self._lock = threading.Lock()
        self._written: dict[int, int] = {}  # begin -> end of what lies behind a gap
        self._padding: dict[int, int] = {}  # begin -> end of the zeros before parts
        self._frontier = 0  # the end of what lies before all gaps, and is hashed
        end = 0
        for offset, size in zip(self.offsets, sizes, strict=True):
            self._padding |= {end: offset} if offset > end else {}
            end = offset + size

    def __enter__(self) -> DataFile:
        self._file = self._path.open("r+b", buffering=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @contextmanager
    def writing(self, index: int) -> Iterator[Writer]:
        """A Writer of one part; errors as formats.writing_file()."""
        begin, size = self.offsets[index], self._sizes[index]
        with writing_file(self._file.fileno(), begin, size, str(self._path)) as write:

            def write_part(offset: int, data: NDArray[Any]) -> None:
                write(offset, data)
                self._advance(begin + offset, data)

            yield write_part

    def content_hash(self) -> str:
        """The hash of the content, as 16 hexadecimal digits, once all parts are written."""
        return self._digest.hexdigest()

    def _advance(self, begin: int, data: NDArray[Any]) -> None:
        """Take note of bytes that have been written."""
        with self._lock:
            if begin != self._frontier:
                self._written |= {begin: begin + data.nbytes} if data.nbytes else {}
                return
            self._digest.update(data.view(np.uint8).data)
            self._frontier += data.nbytes
            while self._frontier in self._written or self._frontier in self._padding:
                start = self._frontier
                if start in self._padding:
                    self._frontier = self._padding.pop(start)
                    self._digest.update(bytes(self._frontier - start))
                else:
                    self._frontier = self._written.pop(start)
                    self._hash(start, self._frontier)

    def _hash(self, start: int, end: int) -> None:
        """Hash what has been written between two places."""
        while start < end:
            view = memoryview(self._buffer)[: end - start]
            count = os.preadv(self._file.fileno(), [view], start)
            if not count:
                raise OSError(f"the data file {self._path} was cut short at {start}")
            self._digest.update(view[:count])
            start += count

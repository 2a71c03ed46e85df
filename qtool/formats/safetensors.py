"""safetensors files: a reader with the reference implementation's checks, and a streaming writer.

A file is the length of its header (u64, little-endian), the header (JSON, padded with spaces, see
safetensors_header.py) and the tensors' bytes (little-endian, C order) one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, OutputError, QtoolError
from qtool.formats import Entry, steady, write_at, writing_file
from qtool.formats.safetensors_header import MAX_HEADER, layout, parse
from qtool.packing import pack, unpack
from qtool.spec import Reader, TensorInfo, Writer, reader_of

_PIECE = 8 << 20


class SafetensorsSource:
    """A safetensors file, open for reading; safe to read from several threads.

    watch: told of all bytes that are read, and of their position in the file.
    Raises FormatError where the file cannot be opened or its header breaks a rule.
    """

    container = "safetensors"

    def __init__(self, path: Path, watch: Callable[[memoryview, int], None] | None = None) -> None:
        self.path = path
        self._watch = watch
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
        try:
            self._state = steady.state_of(self._file.fileno())
            self.nbytes = self._state[2]
            header = self._header()
            self._data = 8 + len(header)
            metadata, self._tensors = parse(header, self.nbytes - self._data, str(path))
            self.metadata: Mapping[str, str] = metadata
        except BaseException:
            self.close()
            raise

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor, in the order of the header."""
        return [info for info, _ in self._tensors.values()]

    def read(self, name: str) -> NDArray[Any]:
        """One tensor, one value per element; F4 and F6 are unpacked.

        Raises FormatError where the file was changed since it was opened, or the shape is beyond
        NumPy's limits.
        """
        info, begin = self._find(name)
        raw = np.empty(info.nbytes, np.uint8)
        self._read_into(raw.data, self._data + begin)
        try:
            return unpack(raw, info.dtype, info.shape)
        except ValueError as error:
            raise FormatError(
                f"{self.path}: tensor {name!r}",
                f"shape {info.shape}: {error}",
                "NumPy cannot hold this shape",
            ) from error

    def chunks(self, name: str) -> Iterator[bytes]:
        """The stored bytes of one tensor in pieces of at most 8 MiB; errors as read()."""
        info, begin = self._find(name)
        position = self._data + begin
        end = position + info.nbytes
        while position < end:
            count = min(_PIECE, end - position)
            yield self._bytes(count, position)
            position += count

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """A Reader of one tensor; errors as read()."""
        info, begin = self._find(name)
        if info.dtype.bits < 8:
            yield reader_of(self.read(name))
            return

        def read_at(start: int, out: NDArray[Any]) -> None:
            position = self._data + begin + start * info.dtype.numpy.itemsize
            self._read_into(out.view(np.uint8).data, position)

        yield read_at

    def close(self) -> None:
        self._file.close()

    def _header(self) -> bytes:
        if self.nbytes < 8:
            raise FormatError(
                str(self.path),
                f"{self.nbytes} bytes are no safetensors file",
                "it begins with 8 bytes that hold the length of its header",
            )
        length = int.from_bytes(self._bytes(8, 0), "little")
        if length > min(MAX_HEADER, self.nbytes - 8):
            raise FormatError(
                str(self.path),
                f"a header of {length} bytes in a file of {self.nbytes}",
                f"it must lie within the file and take at most {MAX_HEADER} bytes",
            )
        return self._bytes(length, 8)

    def _find(self, name: str) -> tuple[TensorInfo, int]:
        if name not in self._tensors:
            raise QtoolError(str(self.path), f"has no tensor {name!r}")
        return self._tensors[name]

    def _bytes(self, count: int, position: int) -> bytes:
        buffer = bytearray(count)
        self._read_into(memoryview(buffer), position)
        return bytes(buffer)

    def _read_into(self, view: memoryview, position: int) -> None:
        """Fill view with the file's bytes from position on."""
        steady.read_into(self._file.fileno(), view, position, self.path, self._state)
        if self._watch is not None:
            self._watch(view, position)


class SafetensorsSink:
    """A safetensors file being written, as the reference implementation would write it.

    The header follows from the entries alone, so that their bytes may come in any order; the
    same entries and metadata give the same file. Metadata keys are sorted.

    path: written in place; whoever needs the file whole or not at all gives a temporary one.

    Raises OutputError before anything is written for a name that is taken or that the format
    cannot hold, a type that it lacks, a tensor of F4 or F6 that does not end on a byte boundary
    and a header beyond 100 MB; on leaving, for entries that were not written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._header, self._places = layout(entries, metadata, str(path))
        self._missing = set(self._places)
        self.nbytes = len(self._header) + sum(entry.nbytes for entry in entries)

    def __enter__(self) -> SafetensorsSink:
        self._file = self.path.open("wb", buffering=0)
        return self

    def write(self, name: str, data: NDArray[Any] | Iterator[bytes]) -> None:
        """The values of one entry: an array of its type and shape in any memory order, its
        packed bytes as a uint8 vector, or the pieces of a Source.chunks().

        Raises OutputError where they are not exactly the entry's, or it was written before.
        """
        if name not in self._missing:
            raise OutputError(str(self.path), f"{name!r} is no entry of it or already written")
        entry, begin = self._places[name]
        position, end = begin, begin + entry.nbytes
        for piece in [_raw(entry, data)] if isinstance(data, np.ndarray) else data:
            position += len(piece)
            if position > end:
                break
            write_at(self._file.fileno(), position - len(piece), memoryview(piece))
        if position != end:
            raise OutputError(
                f"{self.path}: tensor {name!r}", f"{position - begin} bytes of {end - begin}"
            )
        self._missing.remove(name)

    @contextmanager
    def writing(self, name: str) -> Iterator[Writer]:
        """A Writer of one entry; errors as write()."""
        if name not in self._missing:
            raise OutputError(str(self.path), f"{name!r} is no entry of it or already written")
        entry, begin = self._places[name]
        thing = f"{self.path}: tensor {name!r}"
        with writing_file(self._file.fileno(), begin, entry.nbytes, thing) as write:
            yield write
        self._missing.remove(name)

    def __exit__(self, kind: object, *exc: object) -> None:
        with self._file:
            if kind is not None:
                return
            if self._missing:
                raise OutputError(str(self.path), f"not written: {sorted(self._missing)}")
            write_at(self._file.fileno(), 0, memoryview(self._header))


def _raw(entry: Entry, data: NDArray[Any]) -> memoryview:
    """The little-endian bytes of an array that is the entry's, or holds its packed bytes."""
    if data.dtype.newbyteorder("=") == entry.dtype.numpy and data.shape == entry.shape:
        data = pack(data.astype(entry.dtype.numpy, copy=False), entry.dtype)
    elif data.dtype != np.uint8 or data.ndim != 1:
        raise OutputError(
            f"tensor {entry.name!r}",
            f"{data.dtype} of shape {data.shape}",
            f"{entry.dtype} of shape {entry.shape} is expected",
        )
    return np.ascontiguousarray(data).data

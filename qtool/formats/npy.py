"""NumPy's .npy container: one array."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.errors import FormatError, OutputError, QtoolError
from qtool.formats import Entry, steady, writing_file
from qtool.formats.npy_header import ArrayHeader, header_bytes, read_header
from qtool.spec import Reader, TensorInfo, Writer, reader_of

_CHUNK = 1 << 20


def read_pieces(stream: IO[bytes], nbytes: int, thing: str) -> Iterator[bytes]:
    """The next nbytes of a stream, up to 1 MiB at a time. FormatError where it ends earlier."""
    for start in range(0, nbytes, _CHUNK):
        length = min(_CHUNK, nbytes - start)
        piece = stream.read(length)
        if len(piece) != length:
            raise FormatError(thing, f"cut short: {start + len(piece)} of {nbytes} bytes of data")
        yield piece


def read_array(stream: IO[bytes], header: ArrayHeader, thing: str) -> NDArray[Any]:
    """The array at the stream's position, in C order and native byte order."""
    raw = np.empty(header.nbytes, np.uint8)
    start = 0
    for piece in read_pieces(stream, header.nbytes, thing):
        raw[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        start += len(piece)
    if header.big_endian:
        itemsize = header.dtype.numpy.itemsize
        word = itemsize // 2 if header.dtype.kind == "complex" else itemsize
        raw.view(f"u{word}").byteswap(inplace=True)
    values = raw.view(header.dtype.numpy)
    if header.fortran_order:
        return np.ascontiguousarray(values.reshape(header.shape[::-1]).T).reshape(header.shape)
    return values.reshape(header.shape)


def array_chunks(stream: IO[bytes], header: ArrayHeader, thing: str) -> Iterator[bytes]:
    """The little-endian C-order bytes of the array at the stream's position, in pieces.

    Memory is bounded where the file holds just these bytes; otherwise the array is read first.
    """
    if not (header.fortran_order or header.big_endian):
        yield from read_pieces(stream, header.nbytes, thing)
        return
    raw = read_array(stream, header, thing).reshape(-1).view(np.uint8)
    for start in range(0, raw.size, _CHUNK):
        yield raw[start : start + _CHUNK].tobytes()


def entry_nbytes(entry: Entry) -> int:
    """Bytes of an entry's data, one value per element."""
    return math.prod(entry.shape) * entry.dtype.numpy.itemsize


def array_pieces(entry: Entry, data: NDArray[Any] | Iterator[bytes]) -> Iterator[Any]:
    """The little-endian C-order bytes of an entry's data, one value per element.

    Raises OutputError where they are more or fewer than the entry's shape says.
    """
    expected = entry_nbytes(entry)
    given = 0
    for piece in _raw(data) if isinstance(data, np.ndarray) else data:
        given += len(piece)
        if given > expected:
            break
        yield piece
    if given != expected:
        raise OutputError(
            entry.name,
            f"shape {entry.shape} of {entry.dtype} takes {expected} "
            f"bytes, {'more' if given > expected else given} were given",
        )


def _raw(array: NDArray[Any]) -> Iterator[Any]:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _reinterpret(header: ArrayHeader, dtype: DType | None, thing: str) -> ArrayHeader:
    if dtype is None or dtype == header.dtype:
        return header
    if not header.dtype.is_integer or header.dtype.numpy.itemsize != dtype.numpy.itemsize:
        raise FormatError(
            thing,
            f"holds {header.dtype}, which cannot be read as {dtype}",
            "leave --source-dtype out",
        )
    return replace(header, dtype=dtype)


class NpySource:
    """A .npy file as a source of one tensor, called `name`.

    source_dtype: what raw void elements are. It may also reinterpret integers of its size, as in
        uint16 -> bfloat16; other elements must be of that type already.
    Raises FormatError for anything but one array of numbers.
    """

    container = "npy"

    def __init__(self, path: Path, *, name: str, source_dtype: DType | None = None) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        self._name = name
        with path.open("rb") as stream:
            self._state = steady.state_of(stream.fileno())
            self.nbytes = self._state[2]
            header = read_header(stream, self.nbytes, str(path), source_dtype)
        self._header = _reinterpret(header, source_dtype, str(path))

    def infos(self) -> Sequence[TensorInfo]:
        return [self._header.info(self._name)]

    def read(self, name: str) -> NDArray[Any]:
        with self._open(name) as stream:
            return read_array(stream, self._header, str(self.path))

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._open(name) as stream:
            yield from array_chunks(stream, self._header, str(self.path))

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """A Reader of the array; errors as read()."""
        header = self._header
        if header.fortran_order or header.big_endian:
            yield reader_of(self.read(name))
            return
        with self._open(name) as stream:

            def read_at(start: int, out: NDArray[Any]) -> None:
                position = header.data_offset + start * header.dtype.numpy.itemsize
                view = out.view(np.uint8).data
                steady.read_into(stream.fileno(), view, position, self.path, self._state)

            yield read_at

    def close(self) -> None:
        """Nothing is held open between reads."""

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        """The file, at the data; FormatError on leaving where it was changed."""
        if name != self._name:
            raise QtoolError(str(self.path), f"has no tensor {name!r}")
        with self.path.open("rb") as stream:
            stream.seek(self._header.data_offset)
            yield stream
            steady.check(stream.fileno(), self.path, self._state)


def _only(entries: Sequence[Entry], path: Path) -> Entry:
    """The one entry that a .npy file has room for."""
    if len(entries) != 1:
        raise OutputError(
            str(path),
            f"a .npy file holds one array, not {len(entries)}",
            "write .npz or .safetensors",
        )
    return entries[0]


class NpySink:
    """A .npy file of one entry, byte for byte what np.save writes of the C-order array.

    metadata has no place in the container and is left out.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._entry = _only(entries, path)
        self._is_written = False
        self._file = path.open("wb")

    @staticmethod
    def file_nbytes(path: Path, entries: Sequence[Entry]) -> int:
        """Bytes of the whole file."""
        entry = _only(entries, path)
        return len(header_bytes(entry.dtype, entry.shape)) + entry_nbytes(entry)

    def write(self, name: str, data: NDArray[Any] | Iterator[bytes]) -> None:
        if name != self._entry.name or self._is_written:
            raise OutputError(name, "is not an entry that is still to be written")
        self._file.write(header_bytes(self._entry.dtype, self._entry.shape))
        for piece in array_pieces(self._entry, data):
            self._file.write(piece)
        self._is_written = True

    @contextmanager
    def writing(self, name: str) -> Iterator[Writer]:
        """A Writer of the entry; errors as write()."""
        if name != self._entry.name or self._is_written:
            raise OutputError(name, "is not an entry that is still to be written")
        header = header_bytes(self._entry.dtype, self._entry.shape)
        self._file.write(header)
        self._file.flush()
        size = entry_nbytes(self._entry)
        with writing_file(self._file.fileno(), len(header), size, name) as write:
            yield write
        self._is_written = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None and not self._is_written:
            raise OutputError(self._entry.name, "was never written")

"""NumPy's .npz container: a zip archive of .npy files."""

from __future__ import annotations

import errno
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError, OutputError, QtoolError, unreadable
from qtool.formats import Entry, steady
from qtool.formats.npy import array_chunks, array_pieces, entry_nbytes, read_array
from qtool.formats.npy_header import ArrayHeader, header_bytes, read_header
from qtool.spec import Reader, TensorInfo, Writer, reader_of

METADATA_KEY = "qtool"
METADATA_NAME = "__qtool__"

_SUFFIX = ".npy"
_METADATA_LIMIT = 100_000_000
_METADATA_LEAST = 1 << 20
# No deflate stream expands further: RFC 1951 spends a bit or more on a length code, 258 bytes.
_DEFLATE_RATIO = 1032
_UINT8 = DTYPES["uint8"]


@contextmanager
def _zip_errors(thing: str) -> Iterator[None]:
    """Turns every way in which zipfile fails on damaged archives into FormatError."""
    try:
        yield
    except FormatError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EIO:  # which zipfile hides
            raise FormatError(thing, f"cannot be read: {cause.strerror}") from error
        raise FormatError(thing, "damaged zip archive", "write or fetch the file anew") from error


class NpzSource:
    """A .npz file: tensors in the order of the archive, stored or deflated.

    source_dtype: what members of raw void elements are. Where the file holds qtool's own
        metadata, that says it for the members it names.
    Raises FormatError for archives with anything but arrays of numbers in them.
    """

    container = "npz"

    def __init__(self, path: Path, *, source_dtype: DType | None = None) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        self._file = path.open("rb")
        self._state = steady.state_of(self._file.fileno())
        self.nbytes = self._state[2]
        try:
            with _zip_errors(str(path)):
                self._archive = zipfile.ZipFile(self._file)
                self._members = self._check_members()
            self._headers = self._read_headers(source_dtype)
        except FormatError:
            self._file.close()
            raise

    def infos(self) -> Sequence[TensorInfo]:
        return [header.info(name) for name, header in self._headers.items()]

    def read(self, name: str) -> NDArray[Any]:
        header = self._find(name)
        with _zip_errors(self._thing(name)), self._open(name, header) as stream:
            return read_array(stream, header, self._thing(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        header = self._find(name)
        with _zip_errors(self._thing(name)), self._open(name, header) as stream:
            yield from array_chunks(stream, header, self._thing(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """A Reader of one tensor, which is in memory: members cannot be read from their middle."""
        yield reader_of(self.read(name))

    def close(self) -> None:
        self._archive.close()
        self._file.close()

    def _find(self, name: str) -> ArrayHeader:
        if name not in self._headers:
            raise QtoolError(str(self.path), f"has no tensor {name!r}")
        return self._headers[name]

    def _thing(self, name: str) -> str:
        return f"{self.path}, {name}{_SUFFIX}"

    @contextmanager
    def _open(self, name: str, header: ArrayHeader) -> Iterator[IO[bytes]]:
        """A member, at its data; FormatError on leaving where the archive was changed."""
        with self._archive.open(self._members[name]) as stream:
            stream.read(header.data_offset)
            yield stream
        steady.check(self._file.fileno(), self.path, self._state)

    def _check_members(self) -> dict[str, zipfile.ZipInfo]:
        """The members by tensor name, once the archive's directory has been checked."""
        members: dict[str, zipfile.ZipInfo] = {}
        for info in self._archive.infolist():
            thing = f"{self.path}, {info.filename}"
            if not info.filename.endswith(_SUFFIX):
                raise FormatError(
                    thing, "is not a .npy member", "an .npz archive holds arrays alone"
                )
            name = info.filename.removesuffix(_SUFFIX)
            if name in members:
                raise FormatError(thing, "stands twice in the archive")
            _check_member(info, thing)
            members[name] = info
        packed = sum(info.compress_size for info in members.values())
        if packed > self.nbytes:
            raise FormatError(
                str(self.path),
                f"damaged zip archive: its members take {packed} bytes, the file has {self.nbytes}",
            )
        return members

    def _read_headers(self, source_dtype: DType | None) -> dict[str, ArrayHeader]:
        stored: dict[str, DType] = {}
        names = list(self._members)
        if METADATA_NAME in self._members:
            names.remove(METADATA_NAME)
            text = self._read_metadata()
            stored = _stored_types(text, self._thing(METADATA_NAME))
            self.metadata = {METADATA_KEY: text}
        return {name: self._read_header(name, stored.get(name), source_dtype) for name in names}

    def _read_header(
        self, name: str, stored: DType | None, source_dtype: DType | None
    ) -> ArrayHeader:
        info = self._members[name]
        with _zip_errors(self._thing(name)), self._archive.open(info) as stream:
            return read_header(stream, info.file_size, self._thing(name), stored or source_dtype)

    def _read_metadata(self) -> str:
        thing = self._thing(METADATA_NAME)
        header = self._read_header(METADATA_NAME, None, None)
        # The tensors that it describes take more than their entries, however well they deflate.
        limit = min(_METADATA_LIMIT, max(_METADATA_LEAST, self.nbytes))
        if header.dtype != _UINT8 or len(header.shape) != 1 or header.nbytes > limit:
            raise FormatError(
                thing,
                f"is {header.dtype} of shape {header.shape}",
                f"a uint8 vector of at most {limit} bytes is needed",
            )
        with _zip_errors(thing), self._open(METADATA_NAME, header) as stream:
            data = read_array(stream, header, thing).tobytes()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise FormatError(thing, unreadable(error)) from error


def _check_member(info: zipfile.ZipInfo, thing: str) -> None:
    if info.flag_bits & 1:
        raise FormatError(thing, "is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(
            thing,
            f"has zip compression method {info.compress_type}",
            "store or deflate it, as np.savez and np.savez_compressed do",
        )
    ratio = _DEFLATE_RATIO if info.compress_type == zipfile.ZIP_DEFLATED else 1
    if info.file_size > info.compress_size * ratio:
        raise FormatError(
            thing, f"{info.compress_size} bytes in the archive cannot expand to {info.file_size}"
        )


def _stored_types(text: str, thing: str) -> dict[str, DType]:
    """The entry "stored" of qtool's metadata: the types of members saved as raw elements."""
    try:
        layout = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(thing, f"is not JSON: {unreadable(error)}") from error
    stored = layout.get("stored", {}) if isinstance(layout, dict) else None
    if not isinstance(stored, dict):
        raise FormatError(thing, "malformed metadata", '"stored" must map members to types')
    for name, value in stored.items():
        if not isinstance(value, str) or value not in DTYPES:
            raise FormatError(thing, f"stored type of {name} is {value!r}, which is unknown")
    return {name: DTYPES[value] for name, value in stored.items()}


class NpzSink:
    """A .npz file: members stored in the order in which they are written, without dates.

    Of the metadata the entry "qtool" is kept, as the UTF-8 bytes of the array `__qtool__`; the
    container has no place for others.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._pending = _by_name(entries)
        self._metadata = metadata

    @staticmethod
    def file_nbytes(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
        """Bytes of the whole archive, of members and a directory of less than 4 GiB."""
        found = [*_by_name(entries).values()]
        if METADATA_KEY in metadata:
            found.append(Entry(METADATA_NAME, _UINT8, (len(metadata[METADATA_KEY].encode()),)))
        total = 22  # the end of the directory
        for entry in found:
            stored = len(header_bytes(entry.dtype, entry.shape)) + entry_nbytes(entry)
            name = len((entry.name + _SUFFIX).encode())
            wide = 20 if stored * 1.05 > zipfile.ZIP64_LIMIT else 0  # zipfile's own rule
            total += 30 + name + wide + stored + 46 + name
        return total

    def write(self, name: str, data: NDArray[Any] | Iterator[bytes]) -> None:
        if name not in self._pending:
            raise OutputError(name, "is not an entry that is still to be written")
        self._write(self._pending[name], data)
        del self._pending[name]

    @contextmanager
    def writing(self, name: str) -> Iterator[Writer]:
        """A Writer of one entry, in memory until it is left: members are written in one go."""
        if name not in self._pending:
            raise OutputError(name, "is not an entry that is still to be written")
        data = np.zeros(entry_nbytes(self._pending[name]), np.uint8)

        def write(offset: int, piece: NDArray[Any]) -> None:
            data[offset : offset + piece.nbytes] = piece.view(np.uint8)

        yield write
        self.write(name, iter([data.tobytes()]))

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b")
        self._archive = zipfile.ZipFile(self._file, "w")
        if METADATA_KEY in self._metadata:
            text = np.frombuffer(self._metadata[METADATA_KEY].encode(), np.uint8)
            with self._dropped_after_errors():
                self._write(Entry(METADATA_NAME, _UINT8, text.shape), text)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._drop()
            return
        with self._dropped_after_errors():
            self._archive.close()
            self._file.close()
        if self._pending:
            raise OutputError(", ".join(self._pending), "was never written")

    @contextmanager
    def _dropped_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Close the file as it is: nothing more is written, no member need be complete."""
        self._archive.fp = None
        with suppress(OSError):
            self._file.close()

    def _write(self, entry: Entry, data: NDArray[Any] | Iterator[bytes]) -> None:
        header = header_bytes(entry.dtype, entry.shape)
        member = _member(entry.name)
        # zipfile chooses zip64 by the size that it is told beforehand.
        member.file_size = len(header) + entry_nbytes(entry)
        with self._archive.open(member, "w") as stream:
            stream.write(header)
            for piece in array_pieces(entry, data):
                stream.write(piece)


def _by_name(entries: Sequence[Entry]) -> dict[str, Entry]:
    """The entries; raises OutputError for names that the container cannot hold."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in found:
            raise OutputError(entry.name, "is the name of two entries")
        if not _is_name(entry.name):
            raise OutputError(
                entry.name,
                "cannot be the name of an array in .npz",
                "rename the tensor or write .safetensors",
            )
        found[entry.name] = entry
    return found


def _is_name(name: str) -> bool:
    """Whether a member can have it: reserved ones, NUL and what is too long for zip are out."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return False
    return name != METADATA_NAME and "\0" not in name and length + len(_SUFFIX) < 1 << 16


def _member(name: str) -> zipfile.ZipInfo:
    """A member whose bytes depend on nothing but its name and data."""
    member = zipfile.ZipInfo(name + _SUFFIX, date_time=(1980, 1, 1, 0, 0, 0))
    member.create_system = 3  # Unix, also on Windows
    return member

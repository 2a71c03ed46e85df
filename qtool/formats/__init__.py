"""How bytes are stored: one file per container, each with a Source and most with a Sink."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.errors import FormatError, OutputError
from qtool.spec import Reader, Shape, TensorInfo, Writer


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file that is to be written: its name, stored type and shape."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values, stored densely."""
        return self.dtype.nbytes(math.prod(self.shape))


class Source(Protocol):
    """A file of tensors, open for reading. Its header is checked when it is opened."""

    path: Path
    container: str
    nbytes: int
    metadata: Mapping[str, str]

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor, in the order of the file, from the header alone."""
        ...

    def read(self, name: str) -> NDArray[Any]:
        """One tensor: C order, native byte order, one value per element.

        Raises FormatError where the file does not hold what its header says.
        """
        ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """The stored little-endian C-order bytes of one tensor, in pieces of bounded size."""
        ...

    def reading(self, name: str) -> AbstractContextManager[Reader]:
        """A Reader of one tensor, in memory of bounded size where the file allows that."""
        ...

    def close(self) -> None: ...


class Sink(Protocol):
    """A file of tensors being written. Leaving it completes the file."""

    def write(self, name: str, data: NDArray[Any] | Iterator[bytes]) -> None:
        """The bytes of one entry, in any order of entries: an array of the entry's type and
        shape (or packed bytes of the same length), or the pieces of a Source.chunks()."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Writer]:
        """A Writer of one entry, all of whose bytes have been stored when it is left."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@contextmanager
def writing_file(descriptor: int, begin: int, size: int, thing: str) -> Iterator[Writer]:
    """A Writer of size bytes of an open file, from byte number begin on.

    Raises OutputError on leaving where they have not all been stored.
    """
    stored: list[int] = []

    def write(offset: int, data: NDArray[Any]) -> None:
        write_at(descriptor, begin + offset, data.view(np.uint8).data)
        stored.append(data.nbytes)

    yield write
    if sum(stored) != size:
        raise OutputError(thing, f"{sum(stored)} bytes of {size} were written")


def write_at(descriptor: int, position: int, view: memoryview) -> None:
    """All bytes of view to an open file, from a position on."""
    while view:
        count = os.pwrite(descriptor, view, position)
        view = view[count:]
        position += count


CONTAINERS = ("npy", "npz", "safetensors", "onnx")


def open(path: str | Path, *, source_dtype: DType | None = None) -> Source:
    """Open a file of tensors; its content says what it is, and its name must agree. A folder is a
    checkpoint.

    A .npy array is called by the stem of its file's name. source_dtype: element type of arrays
    that NumPy saved as raw bytes.
    Raises FormatError where the file is none of CONTAINERS, or it or the folder is damaged.
    """
    path = Path(path)
    container = _container(path)
    if source_dtype is not None and container not in ("npy", "npz"):
        raise FormatError(
            str(path),
            f"source_dtype is for .npy and .npz, this is {container}",
            "leave --source-dtype out",
        )
    if container == "npy":
        from qtool.formats.files import text_of
        from qtool.formats.npy import NpySource

        return NpySource(path, name=text_of(path.stem), source_dtype=source_dtype)
    if container == "npz":
        from qtool.formats.npz import NpzSource

        return NpzSource(path, source_dtype=source_dtype)
    if container == "safetensors":
        from qtool.formats.safetensors import SafetensorsSource

        return SafetensorsSource(path)
    if container == "checkpoint":
        from qtool.formats.checkpoint import CheckpointSource

        return CheckpointSource(path)
    from qtool.formats.onnx import OnnxSource

    return OnnxSource(path)


def sink(container: str, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Sink:
    """A new safetensors, npz or npy file at path."""
    if container == "npy":
        from qtool.formats.npy import NpySink

        return NpySink(path, entries, metadata)
    if container == "npz":
        from qtool.formats.npz import NpzSink

        return NpzSink(path, entries, metadata)
    from qtool.formats.safetensors import SafetensorsSink

    return SafetensorsSink(path, entries, metadata)


def file_nbytes(
    container: str, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]
) -> int:
    """Bytes of the file that sink() makes; errors as there."""
    if container == "npy":
        from qtool.formats.npy import NpySink

        return NpySink.file_nbytes(path, entries)
    if container == "npz":
        from qtool.formats.npz import NpzSink

        return NpzSink.file_nbytes(entries, metadata)
    from qtool.formats.safetensors import SafetensorsSink

    return SafetensorsSink(path, entries, metadata).nbytes


def _container(path: Path) -> str:
    """The container that the content shows; the name decides where it shows none."""
    if os.path.isdir(path):
        return "checkpoint"
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except (OSError, ValueError) as error:  # a name with NUL in it, out of a recipe
        reason = getattr(error, "strerror", None) or error
        raise FormatError(str(path), f"cannot be read: {reason}") from error
    named = path.suffix[1:].lower() if path.suffix[1:].lower() in CONTAINERS else None
    found = None
    if head.startswith(b"\x93NUMPY"):
        found = "npy"
    elif head.startswith(b"PK"):
        found = "npz"
    elif head[5:] == b"\0\0\0{":  # a header of less than 1 TB, in JSON
        found = "safetensors"
    elif head.startswith(b"\x08"):  # ModelProto.ir_version
        found = "onnx"
    if found is None and named in ("safetensors", "onnx"):
        return named  # its reader says what is wrong
    if found is None:
        raise FormatError(
            str(path),
            "holds no .npy, .npz, .safetensors or ONNX data",
            "nothing else is read, and nothing is unpickled",
        )
    if named not in (None, found):
        raise FormatError(str(path), f"holds {found} data", f"name it .{found}")
    return found

"""How bytes are stored: one file per container, each with a Source and most with a Sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.spec import Shape, TensorInfo


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file that is to be written: its name, stored type and shape."""

    name: str
    dtype: DType
    shape: Shape


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

    def close(self) -> None: ...


class Sink(Protocol):
    """A file of tensors being written. Leaving it completes the file."""

    def write(self, name: str, data: NDArray[Any] | Iterator[bytes]) -> None:
        """The bytes of one entry, in any order of entries: an array of the entry's type and
        shape (or packed bytes of the same length), or the pieces of a Source.chunks()."""
        ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *exc: object) -> None: ...

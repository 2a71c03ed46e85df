"""SHA-256 of files, computed beside the work on them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qtool.errors import FormatError
from qtool.pool import started

_PIECE = 1 << 20

# What a report says of a file: "name", "bytes", "sha256".
Entry = dict[str, Any]


@dataclass(frozen=True)
class _Begun:
    """A file that is hashed. state: when it was begun with."""

    path: Path
    state: os.stat_result
    digest: Future[str]


class Sums:
    """The hashes of files, by a thread of its own; leaving it ends that thread.

    wanted: else there are none, and nothing is read.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._begun: dict[str, _Begun] = {}
        self._done: dict[str, Entry] = {}
        self._stop = threading.Event()
        self._pool = started(1, "hashing") if wanted else None

    def add(self, files: Mapping[str, Path]) -> None:
        """Begin with files, given by the names that the user calls them.

        Raises FormatError where one is not there.
        """
        if self._pool is None:
            return
        for name, path in files.items():
            self._begun[name] = _Begun(path, _state(name, path), self._pool.submit(self._of, path))

    def entries(self) -> list[Entry] | None:
        """What a report says of them, sorted by name, once all are hashed.

        Raises FormatError where one cannot be read, or has been changed since it was begun with.
        """
        if self._pool is None:
            return None
        while self._begun:
            name, begun = self._begun.popitem()
            self._done[name] = self._entry(name, begun)
        return [entry for _, entry in sorted(self._done.items())]

    def _entry(self, name: str, begun: _Begun) -> Entry:
        try:
            digest = begun.digest.result()
        except OSError as error:
            raise FormatError(name, f"cannot be read: {error.strerror}") from error
        if _identity(_state(name, begun.path)) != _identity(begun.state):
            raise FormatError(name, "was changed while it was read", "begin anew")
        return {"name": name, "bytes": begun.state.st_size, "sha256": digest}

    def _of(self, path: Path) -> str:
        """The digest of a file; of no use once the thread is to end."""
        total, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(piece)) and not self._stop.is_set():
                total.update(piece[:count])
        return total.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _state(name: str, path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise FormatError(name, f"cannot be read: {error.strerror}") from error


def _identity(state: os.stat_result) -> tuple[int, ...]:
    """What differs between two files, and where one was written to."""
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def of_files(files: Mapping[str, Path], *, wanted: bool) -> list[Entry] | None:
    """What a report says of files that are complete."""
    with Sums(wanted=wanted) as sums:
        sums.add(files)
        return sums.entries()

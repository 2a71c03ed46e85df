"""SHA-256 of files, computed beside the work on them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
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
            digest = self._pool.submit(_sha256, path, self._stop)
            self._begun[name] = _Begun(path, _state(name, path), digest)

    def entries(self) -> list[Entry] | None:
        """What a report says of them, sorted by name, once all are hashed.

        Raises FormatError where one cannot be read, or has been changed since it was begun with.
        """
        if self._pool is None:
            return None
        while self._begun:
            name, begun = self._begun.popitem()
            self._done[name] = _entry(name, begun.path, begun.state, begun.digest.result)
        return [entry for _, entry in sorted(self._done.items())]

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
    """What a report says of files that are complete, sorted by name; FormatError as of Sums.

    It takes no thread, for which there may be no memory any more.
    """
    if not wanted:
        return None
    return [
        _entry(name, path, _state(name, path), partial(_sha256, path))
        for name, path in sorted(files.items())
    ]


def _entry(name: str, path: Path, state: os.stat_result, digest: Callable[[], str]) -> Entry:
    """state: when the file was begun with."""
    try:
        found = digest()
    except OSError as error:
        raise FormatError(name, f"cannot be read: {error.strerror}") from error
    if _identity(_state(name, path)) != _identity(state):
        raise FormatError(name, "was changed while it was read", "begin anew")
    return {"name": name, "bytes": state.st_size, "sha256": found}


def _sha256(path: Path, stop: threading.Event | None = None) -> str:
    """The digest of a file; of no use once it is to stop."""
    total, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(piece)) and not (stop and stop.is_set()):
            total.update(piece[:count])
    return total.hexdigest()

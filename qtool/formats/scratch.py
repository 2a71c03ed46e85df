"""Temporary folders, which the next run removes where a process was killed in one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"\.qtool-[0-9a-f]{16}")


@contextmanager
def folder() -> Iterator[Path]:
    """A folder in one that is locked, where the system has temporary files; both go afterwards."""
    place = Path(tempfile.gettempdir())
    _remove_leftovers(place)
    made, descriptor = _create(place)
    try:
        inner = made / "files"  # which is free for locks of its own
        inner.mkdir()
        yield inner
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(descriptor)


def _create(place: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        made = place / f".qtool-{os.urandom(8).hex()}"
        made.mkdir(0o700)
        with suppress(FileNotFoundError):  # taken for a leftover before it was locked
            descriptor = os.open(made, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks: nobody takes it for one
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return made, descriptor
            os.close(descriptor)


def _remove_leftovers(place: Path) -> None:
    """Remove this user's folders whose owner is gone, which their lock shows."""
    with suppress(OSError):
        for entry in list(os.scandir(place)):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)

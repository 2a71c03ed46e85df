"""Files that must stay as they are while they are read, as far as their size and date tell."""

from __future__ import annotations

import os
from pathlib import Path

from qtool.errors import FormatError

# Which file it is, its size, and when it was written to.
State = tuple[int, int, int, int]


def state_of(file: int | Path) -> State:
    """The state of an open file, or of that at a path. Raises FormatError where there is none."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise FormatError(str(file), f"cannot be read: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check(descriptor: int, path: Path, state: State) -> None:
    """Raise FormatError where an open file is not in the state that it was in."""
    if state_of(descriptor) != state:
        raise FormatError(str(path), "was changed while it was read", "begin anew")


def read_into(descriptor: int, view: memoryview, position: int, path: Path, state: State) -> None:
    """Fill view with the bytes of an open file from a position on.

    Raises FormatError where they cannot be read, it ends earlier, or it was changed since it was in
    that state.
    """
    while view:
        try:
            count = os.preadv(descriptor, [view], position)
        except OSError as error:
            raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
        if not count:
            rule = f"ends at byte {position}"
            raise FormatError(str(path), rule, f"it had {state[2]} bytes when it was opened")
        view = view[count:]
        position += count
    check(descriptor, path, state)

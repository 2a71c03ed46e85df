"""The memory that the system would still give."""

from __future__ import annotations

import mmap

NUMPY, LIBRARIES = 128 << 20, 256 << 20  # bytes that loading NumPy takes; any other at most

MESSAGE = "out of memory: use a machine with more, or smaller tensors"


def is_short(nbytes: int = LIBRARIES) -> bool:
    """Whether the system would refuse that many bytes."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


def check(nbytes: int) -> None:
    """Raise MemoryError where the system would refuse that many bytes."""
    if is_short(nbytes):
        raise MemoryError


def caused(error: Exception) -> bool:
    """Whether it comes of too little memory, for want of which an import ends with any error."""
    return isinstance(error, MemoryError) or (getattr(error, "errno", None) is None and is_short())

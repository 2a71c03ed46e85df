"""What may come of any input: an error of qtool's or none, in bounded time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Protocol, cast

from qtool.errors import QtoolError

_SECONDS = 10.0  # of processor time, which a busy machine does not use up
_ALLOWED = 32 << 20  # bytes for an input of none: buffers of fixed size, and modules


class Target(Protocol):
    """A parser under test. JUSTIFIED: bytes in memory that a byte of the input may cost."""

    JUSTIFIED: int

    def seeds(self) -> Iterator[bytes]: ...

    def mutate(self, data: bytes, rng: Random) -> bytes: ...

    def run(self, data: bytes, folder: Path) -> None: ...


def target(name: str) -> Target:
    """The target of that name."""
    return cast(Target, import_module(f"fuzz.{name}"))


@contextmanager
def tracing() -> Iterator[None]:
    """Count what is allocated meanwhile."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def check(tested: Target, data: bytes, folder: Path) -> None:
    """Run a target on an input, in an empty folder.

    Raises AssertionError where it took too much time or, while tracing(), memory.
    """
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    started = time.process_time()
    with suppress(QtoolError):
        tested.run(data, folder)
    seconds = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1] - before
    assert seconds < _SECONDS, f"took {seconds:.1f} s"
    assert peak < _ALLOWED + tested.JUSTIFIED * len(data), f"took {peak} bytes for {len(data)}"

"""How the work on a folder is divided: over time, processes and machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qtool.errors import UsageError


@dataclass(frozen=True)
class Division:
    """How the work on a folder is divided over time, processes and machines.

    resume: go on with what an earlier run has left. slice: (K, N), only shards number K, K + N,
    ... of the folder, counted from 1. scheduler: address of a Dask scheduler, or an executor.
    """

    resume: bool = False
    slice: tuple[int, int] | None = None
    scheduler: str | Executor | None = None

    @classmethod
    def of(cls, *, resume: bool, shards: str | None, scheduler: str | Executor | None) -> Division:
        """From the options of the command line. Raises UsageError."""
        if shards is None:
            return cls(resume, None, scheduler)
        match = re.fullmatch(r"0*([1-9]\d{0,8})/0*([1-9]\d{0,8})", shards)
        if match is None or int(match[1]) > int(match[2]):
            raise UsageError("--shards", f"{shards!r} is no slice K/N", "use for example 3/16")
        if scheduler is not None:
            raise UsageError("--shards", "divides the work itself", "leave --scheduler out")
        return cls(resume, (int(match[1]), int(match[2])))

    def check_unused(self, src: str | Path) -> None:
        """Refuse it for a single file."""
        for option, value in (("--resume", self.resume), ("--shards", self.slice),
                              ("--scheduler", self.scheduler)):  # fmt: skip
            if value:
                raise UsageError(option, f"{src} is no folder", "it is for checkpoint folders")

    def of_names(self, names: Sequence[str]) -> Sequence[str]:
        """The shards to be done."""
        return names if self.slice is None else names[self.slice[0] - 1 :: self.slice[1]]

    @contextmanager
    def executor(self) -> Iterator[Executor | None]:
        """Where shards are done; None: here, one after another, each over all threads."""
        if not isinstance(self.scheduler, str):
            yield self.scheduler
            return
        from qtool.jobs import cluster

        with cluster.connected(self.scheduler) as executor:
            yield executor

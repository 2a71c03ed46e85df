"""Progress of a job as a bar on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from qtool.render.text import stream


class _Bar:
    """Progress of a job on a rich progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tensors = 0
        self._total = 0
        self._task: TaskID | None = None

    def begin(self, tensors: int, nbytes: int) -> None:
        self._total = tensors
        self._task = self._progress.add_task("", total=nbytes, done=self._done())

    def advance(self, name: str, nbytes: int) -> None:
        if self._task is not None:
            self._tensors += 1
            self._progress.update(self._task, advance=nbytes, done=self._done())

    def _done(self) -> str:
        return f"{self._tensors}/{self._total} tensors"


@contextmanager
def progress(*, quiet: bool) -> Iterator[_Bar | None]:
    """A progress bar on standard error while a job runs; None where nobody would see it."""
    console = stream(err=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.fields[done]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)

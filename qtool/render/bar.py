"""Progress of a job as a bar on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
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


class Notes:
    """Progress where no bar can be drawn: what takes long is said once, in a line."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, tensors: int, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish(self, name: str) -> None: ...

    def note(self, text: str) -> None:
        """Print the line."""
        self._console.print(text, soft_wrap=True)


class Bar(Notes):
    """Progress of a job on a rich progress bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.console)
        self._progress = progress
        self._tensors = 0
        self._total = 0
        self._task: TaskID | None = None

    def begin(self, tensors: int, nbytes: int) -> None:
        if self._task is not None:  # of an earlier part of the work
            self._progress.remove_task(self._task)
        self._tensors, self._total = 0, tensors
        self._task = self._progress.add_task("", total=nbytes, done=self._done())

    def advance(self, nbytes: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=nbytes)

    def finish(self, name: str) -> None:
        self._tensors += 1
        if self._task is not None:
            self._progress.update(self._task, done=self._done())

    def _done(self) -> str:
        return f"{self._tensors}/{self._total} tensors"


@contextmanager
def progress() -> Iterator[Notes]:
    """Progress on standard error while a job runs: a bar on a terminal, notes elsewhere."""
    console = stream(err=True)
    if not console.is_terminal:
        yield Notes(console)
        return
    columns = (
        TextColumn("{task.fields[done]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield Bar(bar)

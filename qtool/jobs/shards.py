"""One shard of a folder as a task of its own, and running many of them in any process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from qtool import __version__, engine
from qtool.errors import FormatError, OutputError, QtoolError
from qtool.formats import Source, files
from qtool.formats.safetensors import SafetensorsSource
from qtool.jobs import fingerprint, hashing
from qtool.jobs.fingerprint import Fingerprint, Pieces
from qtool.jobs.hashing import Sums
from qtool.jobs.progress import Part, Progress, Silent


class Work(Protocol):
    """What is done with one shard. It goes to other processes, and so do its findings."""

    @property
    def size(self) -> tuple[int, int]:
        """Tensors and bytes that progress counts."""
        ...

    def write(self, source: Source, target: Path, jobs: int, progress: Progress) -> dict[str, Any]:
        """Make target of source, whole or not at all. What is to be said of it, as plain data:
        "tensors", each with its "name", and more."""
        ...


@dataclass(frozen=True)
class Place:
    """One shard: its files, and what decides the result besides the source's content.

    key: differs wherever the result would. version: of the qtool that asks.
    """

    source: Path
    target: Path
    record: Path
    key: str
    version: str


@dataclass(frozen=True)
class Task:
    """One shard and what is done with it. jobs: threads; None: the cores that the process may
    use. hashes: the record has those of its files."""

    place: Place
    work: Work
    jobs: int | None
    hashes: bool = False


@dataclass(frozen=True)
class Record:
    """A finished shard: what it was made of, by which qtool, and what came out. files: what a
    report says of both, where that was asked for."""

    version: str
    key: str
    source: Fingerprint
    output: Fingerprint
    findings: dict[str, Any]
    files: dict[str, hashing.Entry] | None = None

    def save(self, path: Path) -> None:
        with files.replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """None where there is none that can be read."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        return None


# A process does one shard at a time, in bounded memory, whatever threads its executor has.
_working = threading.Lock()


def run(task: Task, progress: Progress | None = None) -> Record:
    """Do a task in this process."""
    place = task.place
    if place.version != __version__:
        raise QtoolError("worker", f"has qtool {__version__}", f"install {place.version} there")
    jobs = task.jobs or engine.default_jobs()
    with _working:
        pieces = Pieces()
        with Sums(wanted=task.hashes) as sums:
            sums.add({str(place.source): place.source})
            with closing(SafetensorsSource(place.source, pieces.saw)) as opened:
                findings = task.work.write(opened, place.target, jobs, progress or Silent())
            sums.add({str(place.target): place.target})
            source = pieces.of_file(place.source, jobs)
            output = fingerprint.of_file(place.target, jobs)
            files = _files(place, sums)
        record = Record(place.version, place.key, source, output, findings, files)
        record.save(place.record)
    return record


def _files(place: Place, sums: Sums) -> dict[str, hashing.Entry] | None:
    """What a report says of a shard's files, by their names in the folder."""
    entries = sums.entries()
    if entries is None:
        return None
    found = {entry["name"]: entry | {"name": place.target.name} for entry in entries}
    return {"source": found[str(place.source)], "output": found[str(place.target)]}


def proven(place: Place, jobs: int, *, hashes: bool = False) -> Record | None:
    """The record of a finished shard, where its source, key, version and result are as recorded.

    hashes: it has those of its files; where it was made without them, they are found now.
    """
    record = Record.load(place.record)
    if record is None or (record.version, record.key) != (place.version, place.key):
        return None
    with suppress(FormatError), Sums(wanted=hashes and record.files is None) as sums:
        sums.add({str(path): path for path in (place.source, place.target)})
        if record.output != fingerprint.of_file(place.target, jobs):
            return None
        if record.source != fingerprint.of_file(place.source, jobs):
            return None
        return replace(record, files=_files(place, sums) or record.files)
    return None  # a file is not there


def run_all(
    tasks: Sequence[Task], executor: Executor | None, progress: Progress
) -> Iterator[tuple[Task, Record]]:
    """Do every task, over an executor or one after another here, and give each when it is done.

    After an error no task is begun any more.
    """
    progress.begin(*(sum(task.work.size[i] for task in tasks) for i in (0, 1)))
    if executor is None:
        for task in tasks:
            yield task, run(task, Part(progress))
        return
    futures: dict[Future[Record], Task] = {}
    try:
        for task in tasks:
            futures[executor.submit(run, task)] = task
        for future in as_completed(futures):
            task, record = futures[future], future.result()
            if not task.place.target.exists():
                rule = f"has written {task.place.target}, which is not there"
                raise OutputError("worker", rule, "give all workers the same file system")
            progress.advance(task.work.size[1])
            for tensor in record.findings["tensors"]:
                progress.finish(tensor["name"])
            yield task, record
    except BrokenExecutor as error:
        raise QtoolError("worker", "died", "look for the cause; --resume goes on") from error
    finally:
        for future in futures:
            future.cancel()

"""A folder built shard by shard, to be gone on with after an interruption or by other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtool import engine
from qtool.errors import FormatError, GateError, OutputError, UsageError
from qtool.formats import files, folders
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, INDEX, CheckpointSource, shard_of
from qtool.formats.folders import Partial
from qtool.jobs import folder_files, shards, streams, terms
from qtool.jobs.division import Division
from qtool.jobs.hashing import Sums
from qtool.jobs.progress import Progress
from qtool.jobs.shards import Place, Record, Task, Work
from qtool.jobs.streams import ReportFile
from qtool.layouts import Layout
from qtool.layouts.stored import Stored


@dataclass(frozen=True)
class Run:
    """What a folder is built from, as plain data, so that another process can finish it.

    source: as the user calls it. path: the same, absolute. settings, recipe: for the report. keys:
    of each shard, see Place. documents: by name, what JSON files are to say besides; None: nothing
    at all (a whole file, or one entry of config.json). hashes: the report has those of all files.
    """

    command: str
    version: str
    source: str
    path: str
    settings: dict[str, Any]
    recipe: str
    keys: dict[str, str]
    warnings: list[str]
    documents: dict[str, dict[str, Any] | None]
    hashes: bool = False

    def save(self, path: Path) -> None:
        with files.replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Run:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(str(path), "is damaged", f"remove {path.parent}") from error

    def gives_the_same_as(self, other: Run) -> bool:
        """Whether the result is the same, as long as the source is."""
        return replace(self, source="", warnings=[]) == replace(other, source="", warnings=[])

    def places(self, partial: Partial) -> dict[str, Place]:
        """The files of every shard; absolute, for workers that stand elsewhere."""
        return {
            name: Place(
                Path(self.path, name),
                partial.folder / name,
                partial.records / f"{name}.json",
                key,
                self.version,
            )
            for name, key in self.keys.items()
        }


# Makes the result of a command from the folders as a report calls them, and the records of shards.
Result = Callable[[Run, dict[str, Any], dict[str, Any], Sequence[Record]], dict[str, Any]]


def target(src: str | Path, dst: str | Path | None, tag: str) -> str:
    """The name of the output: dst, or the source's with the tag, in dst where that ends in /."""
    if dst is None or str(dst).endswith("/"):
        path = Path(src)
        path = path.resolve() if path.name in ("", "..") else path
        return streams.placed_in(dst, f"{path}-{tag}")
    if str(dst) == streams.STANDARD:
        raise UsageError("-o -", "standard output cannot carry a folder", "name a folder with -o")
    return str(dst)


def report_path(report: str | Path | None, partial: Partial) -> Path:
    """Where the report goes: as asked, or as DST.report.json beside DST or in a folder, whose name
    ends in /."""
    name = f"{partial.dst}.report.json"
    if str(report or "").endswith("/"):
        return Path(streams.placed_in(report, name))
    if report is not None and Path(report).is_dir():
        return Path(report)  # which is refused: it may be the source
    return streams.report_path(report, "-") or Path(name)


def without(layout: Layout, tensors: Mapping[str, Stored]) -> dict[str, dict[str, Any] | None]:
    """A Run's documents that take away what a layout says of tensors that were quantized."""
    found = layout.documents(tensors, [])
    own = dict.fromkeys(found.pop(CONFIG, {}))
    return dict.fromkeys(found) | ({CONFIG: own} if own else {})


def check(partial: Partial, sources: Sequence[Path], division: Division, *, force: bool) -> None:
    """Refuse a DST that must not be written; see folders.check_target()."""
    if not (division.resume and partial.is_published):
        for source in sources:
            folders.check_target(partial.dst, source, force=force)


@contextmanager
def building(partial: Partial, run: Run, division: Division) -> Iterator[None]:
    """Hold DST.partial while shards are made; it is kept after an error if any of them is done,
    but not where the result fails, unless the run may be resumed.

    Raises OutputError where another process is at work, or an earlier run has left something that
    this one is not to go on with.
    """
    with partial.held(shared=division.slice is not None):
        if partial.is_started:
            _check_left(partial, run, division)
        if not partial.is_published:
            partial.start()
            run.save(partial.run)
        try:
            yield
        except BaseException as error:
            failed = isinstance(error, GateError) and not division.resume
            if division.slice is None and (failed or not partial.has_shards):
                partial.discard()
            raise


def _check_left(partial: Partial, run: Run, division: Division) -> None:
    """Refuse what an earlier run has left, where it is not to be gone on with."""
    same = Run.load(partial.run).gives_the_same_as(run)
    if division.slice is not None and not same:
        rule = "is of a run with another source or other settings"
        raise OutputError(partial.name, rule, "finish that one, or remove the folder")
    if division.slice is None and not division.resume:
        rule = "is left by an earlier run"
        raise OutputError(partial.name, rule, "go on with it by --resume, or remove it")
    if partial.is_published and not same:
        raise OutputError(partial.name, "is left by a run that has ended", "remove it")


def build(
    run: Run,
    works: Mapping[str, Work],
    partial: Partial,
    division: Division,
    jobs: int | None,
    progress: Progress,
) -> list[Record]:
    """Make the shards that are not proven complete; the records of all that were asked for."""
    places = run.places(partial)
    names = division.of_names(list(places))
    threads = jobs or engine.default_jobs()
    hashes = run.hashes
    found = {name: shards.proven(places[name], threads, hashes=hashes) for name in names}
    done = {name: record for name, record in found.items() if record is not None}
    tasks = [Task(places[name], works[name], jobs, hashes) for name in names if name not in done]
    if tasks and partial.is_published:
        rule = "is left by a run whose result has been changed since"
        raise OutputError(partial.name, rule, "remove it")
    with division.executor() as executor:
        for task, record in shards.run_all(tasks, executor, progress):
            done[task.place.target.name] = record
    return [done[name] for name in names]


def conclude(
    run: Run,
    source: CheckpointSource,
    partial: Partial,
    records: Sequence[Record],
    result: Result,
    report: ReportFile,
    sums: Sums,
    *,
    force: bool,
) -> dict[str, Any]:
    """Complete the folder, let it appear, with force in place of another, and write the report.
    sums: of the source's files that are no shards.

    Raises GateError where the result fails; the shards are kept then, the report is written.
    """
    made = described(run, partial.dst, records, result)
    if run.hashes:
        more = sums.entries() or []
        made["source"]["files"] = folder_files.of_source(records, more, run.source)
    terms.check(made, report)
    if not partial.is_published:
        _complete(run, source, partial.folder)
    if run.hashes:
        made["output"]["files"] = folder_files.of_output(records, partial)
    if not partial.is_published:
        partial.publish(force=force)
    report.write(made)
    partial.discard()
    return made


def described(run: Run, output: Path, records: Sequence[Record], result: Result) -> dict[str, Any]:
    """The result of the command on these shards, which are in a folder that is called output."""
    before, after = (
        sum(int(getattr(record, side)["bytes"]) for record in records)
        for side in ("source", "output")
    )
    return result(
        run,
        {"name": run.source, "container": "checkpoint", "bytes": before},
        {"name": str(output), "container": "checkpoint", "bytes": after,
         "external_data": None},
        records,
    )  # fmt: skip


def _complete(run: Run, source: CheckpointSource, folder: Path) -> None:
    """All that a folder holds besides its shards, and nothing else."""
    carried = [*others(source.path, source.shards).carried, CONFIG]
    for path in set(carried) - set(run.documents):
        folders.put(source.path / path, folder / path)
    for path, document in run.documents.items():
        if document is not None:
            _write_json(folder / path, _updated(source, path, document))
    gone = {path for path, document in run.documents.items() if document is None}
    made = {name: shard_of(folder, name) for name in source.shards}
    wanted = ({*carried, *run.documents} - gone) | set(made)
    if source.index is not None:
        placed = {info.name: name for name, shard in made.items() for info in shard.infos}
        total = sum(info.nbytes for shard in made.values() for info in shard.infos)
        metadata = source.index.get("metadata", {}) | {"total_size": total}
        index = source.index | {"metadata": metadata, "weight_map": placed}
        _write_json(folder / INDEX, index, sort_keys=True)
        wanted.add(INDEX)
    for path in folders.paths(folder) - wanted:
        _remove(folder, path)


def _updated(source: CheckpointSource, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document; of config.json, what it says already, with what the document says of it."""
    said = {**(source.config if path == CONFIG else {}), **document}
    return {k: v for k, v in said.items() if v is not None or k not in document}


def _write_json(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    with files.replacing(path) as temporary:
        text = json.dumps(document, indent=2, sort_keys=sort_keys) + "\n"
        temporary.write_text(text, encoding="utf-8")


def _remove(folder: Path, path: str) -> None:
    """Remove what a killed run, or one of another source, has left."""
    (folder / path).unlink()
    with suppress(OSError):
        os.removedirs((folder / path).parent)

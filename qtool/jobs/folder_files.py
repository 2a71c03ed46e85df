"""What a report says of every file of a folder, where hashes are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qtool.formats import folders
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, INDEX, CheckpointSource
from qtool.formats.folders import Partial
from qtool.jobs import hashing
from qtool.jobs.hashing import Entry, Sums
from qtool.jobs.shards import Record


def beside(source: CheckpointSource, *, wanted: bool) -> Sums:
    """The hashes of the files of a source that are no shards, by their names in the folder."""
    sums = Sums(wanted=wanted)
    if wanted:
        names = [CONFIG, *([] if source.index is None else [INDEX])]
        names += others(source.path, source.shards).carried
        sums.add({name: source.path / name for name in names})
    return sums


def of_source(records: Sequence[Record], more: Sequence[Entry], name: str) -> list[Entry]:
    """The files of the shards and more, of a folder that the user calls name."""
    return _named([record.files["source"] for record in records if record.files], more, name)


def of_output(records: Sequence[Record], partial: Partial) -> list[Entry]:
    """The files of a folder that is complete."""
    made = [record.files["output"] for record in records if record.files]
    names = folders.paths(partial.folder) - {entry["name"] for entry in made}
    more = hashing.of_files({name: partial.folder / name for name in names}, wanted=True)
    return _named(made, more or [], str(partial.dst))


def _named(shards: Sequence[Entry], more: Sequence[Entry], folder: str) -> list[Entry]:
    named = [entry | {"name": str(Path(folder, entry["name"]))} for entry in (*shards, *more)]
    return sorted(named, key=lambda entry: str(entry["name"]))

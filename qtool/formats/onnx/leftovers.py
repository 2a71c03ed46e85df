"""Data files of ONNX models that are of no use any more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

import xxhash

from qtool.errors import FormatError
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.data import data_stem
from qtool.formats.onnx.wire import parse


def own_data_files(path: Path) -> set[Path]:
    """The data files that the model now at path names and that have the name of one of ours."""
    try:
        locations = _locations(path)
    except FormatError:
        return set()
    return {file for file in _data_files(path) if file.name in locations}


def unused_data_files(path: Path, old: Set[Path]) -> Iterator[Path]:
    """The data files of the model at path that no model beside it names any more; none
    where one cannot be read.

    old: those that are known to be ours. Others, left behind by a run that was killed between its
    data and its model, bear the hash of their content.
    """
    found = _data_files(path)
    if not found:
        return
    named: set[str] = set()
    for other in path.parent.iterdir():
        if other.suffix.lower() == ".onnx" and other.is_file():
            try:
                named |= _locations(other)
            except FormatError as error:
                if isinstance(error.__cause__, OSError):  # it may name any of them
                    return
    for file in found:
        if file.name not in named and (file in old or _bears_hash(file)):
            yield file


def _data_files(path: Path) -> set[Path]:
    """The files with names of data files of the model at path."""
    pattern = re.compile(re.escape(data_stem(path)) + r"\.[0-9a-f]{16}\.data")
    with suppress(PermissionError):  # a folder may be writable and not readable
        return {f for f in path.parent.iterdir() if pattern.fullmatch(f.name) and f.is_file()}
    return set()


def _bears_hash(path: Path) -> bool:
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError:
        return False
    return path.name.endswith(f".{digest.hexdigest()}.data")


def _locations(path: Path) -> set[str]:
    """What the tensors of a model at path say of external data."""
    return {entry.value for t in onnx_graph.tensors(parse(path)) for entry in t.external_data}

"""The values behind a report: pictures of its worst tensors, from the files that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import formats
from qtool.engine import restore_plain
from qtool.errors import QtoolError
from qtool.formats import Source
from qtool.jobs.picture import FLOAT32, Restored, picture
from qtool.jobs.progress import Progress
from qtool.layouts.dequantized import DequantizedSource
from qtool.recipe import SOURCE_FLOATS
from qtool.report import Report
from qtool.spec import Blocked, Shape, Writer
from qtool.tensor import Codes

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.layouts.onnx_dequantize import OnnxDequantized

WORST = 4  # tensors that are drawn


class _AbsentError(Exception):
    """A file or tensor that cannot be drawn from, in words."""


def pictures(
    report: Report,
    folder: Path,
    original: str | Path | None,
    quantized: str | Path | None,
    progress: Progress,
) -> dict[str, Any]:
    """Pictures of the worst tensors, and notes on what is missing for them and why.

    folder: the report's own, where its files are looked for too. original, quantized: the files,
    where they are not those that the report names. A plan has nothing to draw. Raises QtoolError
    where one of these is none.
    """
    if report.get("dry_run"):
        return {"tensors": [], "notes": []}
    notes: list[str] = []
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        before = _opened(report, "source", folder, original, notes, stack)
        after = _opened(report, "output", folder, quantized, notes, stack)
        records = worst(report) if before else []
        progress.begin(len(records), sum(4 * math.prod(r["shape"]) for r in records))
        values = _restorable(after, folder, notes, given=quantized is not None)
        for record in records:
            try:
                found.append(_picture(record, cast(Source, before), values, notes))
            except (_AbsentError, QtoolError) as error:
                notes.append(str(error))
            progress.advance(4 * math.prod(record["shape"]))
            progress.finish(record["name"])
    return {"tensors": found, "notes": notes}


def worst(report: Report) -> list[dict[str, Any]]:
    """The tensors with the lowest SQNR; those with an error that is not finite before them."""
    rows = [r for r in report["tensors"] if r.get("mse") != 0 and _is_drawable(r)]
    return sorted(rows, key=_sqnr)[:WORST]


def _is_drawable(record: Mapping[str, Any]) -> bool:
    shape = record.get("shape")
    whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    axis, block, tile = (record.get(key) for key in ("axis", "block_size", "tile"))
    return (
        whole
        and (axis is None or (type(axis) is int and 0 <= axis < len(shape or ())))
        and (block is None or (type(block) is int and block > 0))
        and (not tile or (isinstance(tile, list) and len(tile) == 2 and all(tile)))
    )


def _sqnr(record: Mapping[str, Any]) -> float:
    found = record.get("sqnr_db")
    return float(found) if isinstance(found, (int, float)) else -math.inf


def _opened(
    report: Report,
    key: str,
    folder: Path,
    given: str | Path | None,
    notes: list[str],
    stack: ExitStack,
) -> Source | None:
    """One of the two files, or a note of why it cannot be used."""
    if given is not None:
        return stack.enter_context(closing(formats.open(given)))
    option = {"source": "--original", "output": "--quantized"}[key]
    needed = {"source": "histograms", "output": "grids and heat maps"}[key]
    entry = report.get(key)
    named = entry if isinstance(entry, dict) else {}
    try:
        source = formats.open(_located(named.get("name"), folder, named.get("bytes")))
        stack.enter_context(closing(source))
        if source.container != "checkpoint" and named.get("bytes", source.nbytes) != source.nbytes:
            raise _AbsentError(
                f"{named['name']} is not the file of the report any more: "
                f"it has {source.nbytes} bytes, not {named['bytes']}"
            )
    except (_AbsentError, QtoolError) as error:
        notes.append(f"No {needed}: {error}. Name the file with {option}.")
        return None
    return source


def _located(name: object, folder: Path, nbytes: object) -> Path:
    """Where a file that the report names is: from here, or from the report; the one that has as
    many bytes, where there is one."""
    if not isinstance(name, str) or "\0" in name:
        raise _AbsentError("the report names no file")
    if name == "-":
        raise _AbsentError("the file went through a pipe")
    found = [path for path in (Path(name), folder / name) if path.is_file() or path.is_dir()]
    if not found:
        raise _AbsentError(f"{name} is not there")
    return next((path for path in found if path.stat().st_size == nbytes), found[0])


class _Restorable:
    """The quantized tensors of a file, whose values can be had one after the other."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.source, self._folder = source, folder
        self.shapes: dict[str, Shape]
        self._columns: set[str] = set()
        self._model: OnnxDequantized | DequantizedSource
        if source.container == "onnx":
            from qtool.layouts.onnx_dequantize import OnnxDequantized

            self._model = OnnxDequantized(cast("OnnxSource", source), FLOAT32)
            self.shapes = {folded.name: folded.shape for folded in self._model.folded}
            blocked = [f for f in self._model.folded if isinstance(f.granularity, Blocked)]
            self._columns = {f.name for f in blocked if f.granularity.attributes["axis"] == 0}
        else:
            self._model = DequantizedSource(source, FLOAT32)
            self.shapes = {name: stored.shape for name, stored in self._model.tensors.items()}

    def of(self, record: Mapping[str, Any]) -> Restored:
        """The values of one tensor. Raises _AbsentError where the file does not hold it."""
        name, shape = record["name"], tuple(record["shape"])
        # MatMulNBits multiplies by [K, N], whatever the operator that it stands for had
        by_rows = name in self._columns and record.get("axis") == 1
        found = self.shapes.get(name)
        _check(name, shape, found[::-1] if found and by_rows else found, self.source)

        def restored(write: Writer) -> Codes:
            seen: list[Codes] = []

            def restore(codes: Codes, write: Writer, _: str) -> None:
                seen.append(codes)
                restore_plain.restore(codes, write, FLOAT32, 1)

            if isinstance(self._model, DequantizedSource):
                with self._model.codes(name) as codes:
                    restore(codes, write, name)
            else:
                self._model.restore(name, write, restore, self._folder, by_rows=by_rows)
            return seen[0]

        return restored


def _restorable(
    source: Source | None, folder: Path, notes: list[str], *, given: bool
) -> _Restorable | None:
    """The quantized tensors, or a note of why a file that the report names has none to read."""
    if source is None:
        return None
    try:
        return _Restorable(source, folder)
    except QtoolError as error:
        if given:
            raise
        notes.append(f"No grids and heat maps: {error}.")
        return None


def _picture(
    record: dict[str, Any], before: Source, after: _Restorable | None, notes: list[str]
) -> dict[str, Any]:
    name, shape = record["name"], tuple(record["shape"])
    info = next((info for info in before.infos() if info.name == name), None)
    _check(name, shape, None if info is None else info.shape, before)
    assert info is not None
    if info.dtype not in SOURCE_FLOATS:
        raise _AbsentError(f"No pictures of {name}: {before.path} has it as {info.dtype}")
    restored = None
    if after is not None:
        try:
            restored = after.of(record)
        except _AbsentError as error:
            notes.append(str(error))
    with before.reading(name) as read:
        return picture(read, info.dtype, record, restored)


def _check(name: str, shape: Shape, found: Shape | None, source: Source) -> None:
    """Raise _AbsentError where a file has no such tensor."""
    if found is None:
        raise _AbsentError(f"{name} cannot be drawn in full: {source.path} does not hold it so")
    if found != shape:
        raise _AbsentError(
            f"{name} cannot be drawn in full: it is {list(found)} in {source.path} and "
            f"{list(shape)} in the report"
        )

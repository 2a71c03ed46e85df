"""The report of a quantization, beside the files that it is about."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qtool.dtypes import DTYPES
from qtool.errors import FormatError, UsageError
from qtool.formats import CONTAINERS, Source
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, INDEX, CheckpointSource
from qtool.jobs import hashing, streams
from qtool.jobs.verify_side import Side
from qtool.jobs.verify_tensors import Comparison
from qtool.layouts.provenance import Provenance
from qtool.report.document import read_report
from qtool.stats import Stats

# What is not computed from the files.
_ALWAYS_LEFT_OUT = {
    "precision", "mx_rule", "importance", "rounding", "output_error", "output_error_nearest",
    "weighted_mse", "weighted_relative_error", "weighted_sqnr_db",
}  # fmt: skip
_CLIPPED = {"clipped", "clipped_low", "clipped_high", "clipped_fraction"}
_TOTALS = ("tensors", *Stats().figures(), "bytes_before", "bytes_after", "bits_per_weight")

Problem = tuple[str | None, str]


@dataclass(frozen=True)
class Reference:
    """A report that files must agree with."""

    path: Path
    report: Mapping[str, Any]

    @property
    def recipe(self) -> str | None:
        """The recipe of the run."""
        return self.report.get("recipe")

    def differences(
        self,
        comparison: Comparison,
        original: Side,
        quantized: Side,
        provenance: Provenance | None,
        totals: Mapping[str, Any],
    ) -> list[Problem]:
        """What the files hold in another way than the report says. totals: those of the files."""
        found: list[Problem] = [*self._sizes(original, quantized)]
        found += self._provenance(provenance)
        tensors = list(self._tensors(comparison, quantized))
        if not tensors and not comparison.problems:
            tensors = list(self._totals(comparison, totals))
        return found + tensors

    def _totals(self, comparison: Comparison, found: Mapping[str, Any]) -> Iterator[Problem]:
        """Figures of all tensors together, where those of each agree."""
        left_out = set(_ALWAYS_LEFT_OUT)
        records = [*self.report["tensors"], *(record for record, _ in comparison.records)]
        if any(r.get("rounding") is not None or r["clipped"] is None for r in records):
            left_out |= _CLIPPED
        said = self.report["totals"]
        for key in (key for key in _TOTALS if key not in left_out):
            if found[key] != said.get(key):
                yield None, f"its total {key} is {_said(found[key], said.get(key))}"
                return

    def _sizes(self, original: Side, quantized: Side) -> Iterator[Problem]:
        for side, key, name in (
            (original, "source", "ORIGINAL"),
            (quantized, "output", "QUANTIZED"),
        ):
            said, source = self.report[key], side.source
            if key == "output" and said["container"] != source.container:
                yield None, f"is {source.container}, the report is of {said['container']}"
            if said["container"] == source.container and said["bytes"] != source.nbytes:
                yield None, f"{name} has {source.nbytes} bytes, the report says {said['bytes']}"

    def _provenance(self, found: Provenance | None) -> Iterator[Problem]:
        """Tool, version and recipe of the file's metadata."""
        if (self.recipe is None and found is None) or not self.report["tensors"]:
            return
        tool = self.report["tool"]
        if found is None:
            yield None, "its metadata does not say what it was made by, the report does"
            return
        said = {"tool": tool["name"], "version": tool["version"], "recipe": self.recipe}
        has = {"tool": found.name, "version": found.version, "recipe": found.recipe}
        for key, value in said.items():
            if has[key] != value:
                yield None, f"its metadata says {has[key]!r} of the {key}, the report {value!r}"

    def changed(self, original: Source, quantized: Source) -> list[Problem]:
        """The files that the report has hashes of, which differ from those that are there."""
        return [
            (None, problem)
            for key, source in (("source", original), ("output", quantized))
            if self.report[key].get("files") is not None
            for problem in _changed(self.report[key], source)
        ]

    def _tensors(self, comparison: Comparison, quantized: Side) -> Iterator[Problem]:
        """Types and figures."""
        said = {record["name"]: record for record in self.report["tensors"]}
        found = {record["name"]: record for record, _ in comparison.records}
        wrong = {name for name, _ in comparison.problems}
        for name in said.keys() - found.keys() - wrong:
            yield name, "is not quantized, the report says that it is"
        is_onnx = quantized.source.container == "onnx"
        for name, record in found.items():
            if name in wrong:
                continue
            if name not in said and record["granularity"] is not None:
                yield name, "is quantized, the report says nothing of that"
            elif name in said:
                difference = _difference(record, said[name], is_onnx=is_onnx)
                if difference is not None:
                    yield name, difference


def _difference(found: Mapping[str, Any], said: Mapping[str, Any], *, is_onnx: bool) -> str | None:
    """What a record has in another way than the report.

    is_onnx: codes may be stored with a number added, and their zero points be taken for granted;
    one scale per axis of one index is one per tensor.
    """
    left_out = _ALWAYS_LEFT_OUT | {"name"}
    if said.get("rounding") is not None or found["clipped"] is None:
        left_out = left_out | _CLIPPED
    if is_onnx and _integers(found["dtype"], said.get("dtype")):
        left_out = left_out | {"dtype", "zero_point"}
    if is_onnx and found["num_scales"] == said.get("num_scales") == 1:  # a scale of shape (1,)
        left_out = left_out | {"granularity", "axis"}
    differing = [key for key in found if key not in left_out and found[key] != said.get(key)]
    if not differing:
        return None
    first = next((key for key in ("dtype", "granularity", "sqnr_db") if key in differing), None)
    key = first or differing[0]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"its {key} is {_said(found[key], said.get(key))}{more}"


def _said(*values: object) -> str:
    return ", the report says ".join("null" if v is None else str(v) for v in values)


def _changed(said: Mapping[str, Any], source: Source) -> Iterator[str]:
    """How the files of a source differ from a report's: its "source" or "output"."""
    if said["container"] != source.container or said["name"] == streams.STANDARD:
        return
    wanted = {_relative(entry["name"], said): entry for entry in said["files"]}
    found = _files(source)
    for name in sorted(found.keys() - wanted.keys()):
        yield f"{found[name]} is not among the files of the report"
    for name in sorted(wanted.keys() - found.keys()):
        yield f"{source.path}: {name or 'the file'} is missing"
    both = {name: path for name, path in found.items() if name in wanted}
    for entry in hashing.of_files(both, wanted=True) or []:
        if entry["sha256"] != wanted[entry["name"]]["sha256"]:
            yield f"{both[entry['name']]} has another SHA-256 than in the report"


def _relative(name: str, said: Mapping[str, Any]) -> str:
    """What a file of a report is called beside the model's file, itself "", or in the folder."""
    if name == said["name"]:
        return ""
    folder = said["name"] if said["container"] == "checkpoint" else os.path.dirname(said["name"])
    return os.path.relpath(name, folder or ".")


def _files(source: Source) -> dict[str, Path]:
    """The files of a source by such names."""
    if source.container == "checkpoint":
        checkpoint = cast(CheckpointSource, source)
        names = [CONFIG, *([] if checkpoint.index is None else [INDEX]), *checkpoint.shards]
        names += others(source.path, checkpoint.shards).carried
        return {name: source.path / name for name in names}
    found = {"": source.path}
    if source.container == "onnx":
        from qtool.formats.onnx import OnnxSource

        folder = os.path.realpath(source.path.parent)
        for path in cast(OnnxSource, source).external_files:
            found[os.path.relpath(path, folder)] = path
    return found


def _integers(one: str, other: Any) -> bool:
    """Whether both are integers of as many bits."""
    a, b = DTYPES[one], DTYPES.get(str(other))
    return b is not None and a.is_integer and b.is_integer and a.bits == b.bits


def _is_of_another(report: Mapping[str, Any], quantized: str | Path) -> bool:
    """Whether a report is of a file of that stem in another container."""
    output = report.get("output")
    name = output.get("name") if isinstance(output, dict) else None
    suffixes = {Path(str(file)).suffix for file in (name, quantized)}
    return len(suffixes) == 2 and suffixes <= {f".{container}" for container in CONTAINERS}


def reference(against: str | Path | None, quantized: str | Path) -> Reference | None:
    """The report that is named, or else the one beside the file; None: there is none.

    Raises FormatError for a file that is no report of quantize or dynamic, or is a plan.
    """
    if str(against) == streams.STANDARD:
        raise UsageError("--against", "- is no file", "name the report")
    path = streams.report_path(against, str(quantized))
    if path is None or (against is None and not path.is_file()):
        return None
    try:
        report = read_report(path)
        if against is None and _is_of_another(report, quantized):
            return None
    except FormatError as error:
        remedy = "name the report of this file, or give --alone"
        raise FormatError(error.thing, error.rule, remedy) from None
    command = report.get("command")
    what = f"the report of {command}"
    if command in ("quantize", "dynamic") and not report.get("dry_run"):
        if _is_whole(report):
            return Reference(path, report)
        what = "a report that lacks what files are compared with"
    elif report.get("dry_run"):
        what = "a plan, which has no figures"
    raise FormatError(str(path), f"is {what}", "name one of quantize or dynamic, or give --alone")


def _is_whole(report: Mapping[str, Any]) -> bool:
    """Whether a report says of both files and of the tool what is compared."""
    for key in ("source", "output"):
        side = report.get(key)
        if not isinstance(side, dict) or not {"container", "bytes"} <= side.keys():
            return False
        files = [] if side.get("files") is None else side["files"]
        if not isinstance(files, list):
            return False
        entries = [side, *files]
        if not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries):
            return False
        if not all(isinstance(e.get("sha256"), str) for e in entries[1:]):
            return False
    texts = report["tool"].get("version"), report.get("recipe", "")
    return all(isinstance(text, str) for text in texts)

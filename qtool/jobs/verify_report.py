"""The report of a quantization, beside the files that it is about."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qtool.dtypes import DTYPES
from qtool.errors import FormatError
from qtool.formats import Source
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, INDEX, CheckpointSource
from qtool.jobs import hashing, streams
from qtool.jobs.verify_side import Side
from qtool.jobs.verify_tensors import Comparison
from qtool.layouts.provenance import Provenance
from qtool.report import is_report

# What is not computed from the files.
_ALWAYS_LEFT_OUT = {
    "precision", "mx_rule", "importance", "rounding", "output_error", "output_error_nearest",
    "weighted_mse", "weighted_relative_error", "weighted_sqnr_db",
}  # fmt: skip
_CLIPPED = {"clipped", "clipped_low", "clipped_high", "clipped_fraction"}

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
    ) -> list[Problem]:
        """What the files hold in another way than the report says."""
        found: list[Problem] = [*self._sizes(original, quantized)]
        found += self._provenance(provenance)
        found += self._tensors(comparison, quantized)
        return found

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
        if self.recipe is None or not self.report["tensors"]:
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
    if is_onnx and _integers(found["dtype"], said["dtype"]):
        left_out = left_out | {"dtype", "zero_point"}
    if is_onnx and found["num_scales"] == said["num_scales"] == 1:  # a scale of shape (1,)
        left_out = left_out | {"granularity", "axis"}
    differing = [
        key for key in said if key in found and key not in left_out and found[key] != said[key]
    ]
    if not differing:
        return None
    first = next((key for key in ("dtype", "granularity", "sqnr_db") if key in differing), None)
    key = first or differing[0]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"its {key} is {found[key]}, the report says {said[key]}{more}"


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


def _integers(one: str, other: str) -> bool:
    """Whether both are integers of as many bits."""
    a, b = DTYPES[one], DTYPES[other]
    return a.is_integer and b.is_integer and a.bits == b.bits


def reference(against: str | Path | None, quantized: str | Path) -> Reference | None:
    """The report that is named, or else the one beside the file; None: there is none.

    Raises FormatError for a file that is no report of quantize or dynamic.
    """
    path = streams.report_path(against, str(quantized))
    if path is None or (against is None and not path.exists()):
        return None
    if not is_report(path):
        raise FormatError(str(path), "is no qtool report", "name the one of this file, or --alone")
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["command"] not in ("quantize", "dynamic"):
        raise FormatError(
            str(path), f"is the report of {report['command']}", "name one of quantize or dynamic"
        )
    return Reference(path, report)

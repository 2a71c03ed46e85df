"""Makes the Report of one run; ../report.schema.json is its JSON Schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qtool import __version__
from qtool.spec import TensorInfo
from qtool.stats import Stats, exceeds, unravel

VERSION = 1
# Totals of what models put out; only verify runs them.
OUTPUTS = (
    "outputs_relative_error",
    "outputs_max_abs_error",
    "outputs_cosine_similarity",
    "outputs_argmax_agreement",
)
LIBRARIES = ("numpy", "ml_dtypes", "onnx")


def tensor_record(
    info: TensorInfo,
    how: Mapping[str, Any],
    stats: Stats,
    bytes_after: int,
    importance: str | None = None,
) -> dict[str, Any]:
    """One entry of "tensors". how: what QuantizedTensor.describe() says. importance: what weights
    of errors are of."""
    return {
        "name": info.name,
        "shape": list(info.shape),
        "source_dtype": info.dtype.name,
        "rounded_to": "float32" if info.dtype.name == "float64" else None,
        **how,
        "importance": importance,
        **stats.figures(),
        "max_abs_error_index": unravel(stats.max_abs_error_at, info.shape),
        **_sizes(info.size, info.nbytes, bytes_after),
    }


def planned_record(info: TensorInfo, how: Mapping[str, Any], bytes_after: int) -> dict[str, Any]:
    """One entry of "tensors" of a plan. how: what Stored.described() says."""
    return {
        "name": info.name,
        "shape": list(info.shape),
        "source_dtype": info.dtype.name,
        **how,
        "elements": info.size,
        **_sizes(info.size, info.nbytes, bytes_after),
    }


def build_planned(
    command: str,
    source: Mapping[str, Any],
    output: Mapping[str, Any],
    settings: Mapping[str, Any],
    recipe: str,
    tensors: Sequence[dict[str, Any]],
    skipped: Sequence[dict[str, Any]],
    warnings: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The plan of a run, like its report but for what is not known before.

    ../plan.schema.json is its JSON Schema. tensors: of planned_record(), in source order."""
    sums = [sum(r[key] for r in tensors) for key in ("elements", "bytes_before", "bytes_after")]
    return {
        "report_version": VERSION,
        "tool": tool(),
        "dry_run": True,
        "command": command,
        "source": dict(source),
        "output": dict(output),
        "settings": dict(settings),
        "recipe": recipe,
        "tensors": list(tensors),
        "skipped": list(skipped),
        "totals": {
            "tensors": len(tensors),
            "skipped": len(skipped),
            "elements": sums[0],
            **_sizes(*sums),
            "file_bytes_before": source["bytes"],
            "file_bytes_after": output["bytes"],
        },
        "warnings": list(warnings),
        "gates": [],
        "strict": None,
        "seconds": round(seconds, 6),
    }


def tool() -> dict[str, Any]:
    """What made a report."""
    return {"name": "qtool", "version": __version__, "libraries": _versions()}


def build(
    command: str,
    source: Mapping[str, Any],
    output: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    recipe: str | None,
    tensors: Sequence[tuple[dict[str, Any], Stats]],
    skipped: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The Report of one run. recipe: as TOML; tensors: records with their Stats, in source order;
    skipped: names and reasons."""
    return {
        "report_version": VERSION,
        "tool": tool(),
        "command": command,
        "source": dict(source),
        "output": dict(output),
        "settings": None if settings is None else dict(settings),
        "recipe": recipe,
        "tensors": [record for record, _ in tensors],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped],
        "totals": {
            **totals(tensors, len(skipped)),
            **dict.fromkeys(OUTPUTS),
            "file_bytes_before": source["bytes"],
            "file_bytes_after": output["bytes"],
        },
        "warnings": list(warnings),
        "gates": [],
        "strict": None,
        "problems": [],
        "checks": None,
        "outputs": [],
        "seconds": round(seconds, 6),
    }


def totals(tensors: Sequence[tuple[dict[str, Any], Stats]], skipped: int) -> dict[str, Any]:
    """The figures of all quantized tensors together; skipped: how many others there are."""
    total = Stats()
    largest = None
    for record, stats in tensors:
        if exceeds(stats.max_abs_error, total.max_abs_error):
            largest = record["name"]
        total.merge(stats)
    records = [record for record, _ in tensors]
    before, after = (sum(r[key] for r in records) for key in ("bytes_before", "bytes_after"))
    return {
        "tensors": len(records),
        "skipped": skipped,
        **total.figures(),
        "max_abs_error_tensor": largest,
        **_output_errors(records),
        **_sizes(total.elements, before, after),
    }


def _sizes(elements: int, before: int, after: int) -> dict[str, Any]:
    return {
        "bytes_before": before,
        "bytes_after": after,
        "bits_per_weight_before": 8 * before / elements if elements else None,
        "bits_per_weight": 8 * after / elements if elements else None,
    }


def _output_errors(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many tensors are rounded to second order, and the root mean squares of their errors."""
    found: dict[str, Any] = {"second_order": sum(r["rounding"] is not None for r in records)}
    for name in ("output_error", "output_error_nearest"):
        errors = [r[name] for r in records if r[name] is not None]
        squares = math.fsum(error**2 for error in errors)
        found[name] = math.sqrt(squares / len(errors)) if errors else None
    return found


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found

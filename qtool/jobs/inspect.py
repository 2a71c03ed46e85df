"""qtool inspect: what a file holds, and how it is quantized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool.dtypes import DTYPES, DType, DTypeLike
from qtool.errors import UsageError
from qtool.formats import Source
from qtool.jobs import faults, foreign_rows, streams
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.value_stats import BINS, figures_of
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.foreign import ForeignWeight
from qtool.layouts.metadata import KEY, Description, read_metadata
from qtool.recipe.patterns import Patterns, unmatched
from qtool.spec import TensorInfo

if TYPE_CHECKING:
    from qtool.formats.checkpoint import CheckpointSource
    from qtool.formats.onnx import OnnxSource
    from qtool.layouts.onnx_stored import StoredWeight


def inspect_file(
    src: str | Path,
    *,
    stats: bool = False,
    bins: int = BINS,
    include: Sequence[str] = (),
    source_dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The container, the tensors and the quantization of a file, as plain data.

    stats: read every tensor, for its range, zeros, outlier ratio and histogram (of quantized
        tensors: of the values that the codes stand for). Without it headers alone are read.
    bins: of these histograms. include: patterns of the names of the tensors that are wanted; none:
        all of them.
    Raises QtoolError where the file cannot be read, UsageError where a pattern matches nothing.
    """
    with streams.opened(src, source_dtype) as source:
        described = read_metadata(source)
        readable = DequantizedSource(source, DTYPES["float32"]) if described.tensors else source
        uses = _uses(source)
        found = [] if described.tensors or uses else foreign_rows.find(source)
        rows, weights = _chosen(*_rows(source, readable, described, found), include)
        stored = _add_operators(source, rows, uses)
        if stats:
            _add_stats(source, readable, rows, weights, described, progress or Silent(), bins)
            _add_scale_faults(source, rows, stored)
        result = {
            "command": "inspect",
            "name": str(src),
            "container": source.container,
            "bytes": source.nbytes,
            "metadata": {k: v for k, v in source.metadata.items() if k != KEY},
            "quantized_by": _tools(described, uses, found),
            "provenance": described.provenance and described.provenance.to_json(),
            "tensors": rows,
            "totals": {
                "tensors": len(rows),
                "elements": sum(math.prod(row["shape"]) for row in rows),
                "bytes": sum(row["bytes"] for row in rows),
            },
        }
        return result | _special(source, uses)


def _chosen(
    rows: list[dict[str, Any]],
    weights: list[ForeignWeight | None],
    include: Sequence[str],
) -> tuple[list[dict[str, Any]], list[ForeignWeight | None]]:
    """Those whose names match."""
    names = [row["name"] for row in rows]
    for pattern in unmatched(include, names):
        raise UsageError("--include", f"{pattern!r} matches no tensor", "see qtool inspect")
    patterns = Patterns(include)
    kept = [i for i, name in enumerate(names) if not include or patterns.match(name)]
    return [rows[i] for i in kept], [weights[i] for i in kept]


def _add_operators(
    source: Source, rows: list[dict[str, Any]], uses: dict[str, dict[str, Any]]
) -> dict[str, StoredWeight]:
    """Say of an ONNX model's tensors what operators make of them; the weights among them."""
    if source.container != "onnx":
        return {}
    from qtool.layouts.onnx_stored import StoredWeights

    stored = StoredWeights(cast("OnnxSource", source)).found
    for row in rows:
        row["quantization"] = uses.get(row["name"])
        if (weight := stored.get(row["name"])) is not None:
            row["shape"], row["dtype"] = list(weight.shape), weight.dtype.name
            row["quantization"] = _how(weight, row["quantization"] or {})
    return stored


def _how(weight: StoredWeight, use: dict[str, Any]) -> dict[str, Any]:
    """How a weight of an ONNX model is quantized; use: what its operator alone tells."""
    how = weight.to_json()
    if use.get("global_scale"):
        how["equation"] = how["equation"].replace("scale", "(scale * global_scale)")
    return use | {key: value for key, value in how.items() if value is not None or key not in use}


def _add_scale_faults(
    source: Source, rows: list[dict[str, Any]], stored: dict[str, StoredWeight]
) -> None:
    """What is wrong with the scales and codes that an ONNX model's operators read."""
    infos = {info.name: info for info in source.infos()}
    for row in rows:
        weight = stored.get(row["name"])
        if weight is None:
            continue
        how = row["quantization"]
        if weight.scale and weight.scale_dtype is not None:
            scale = source.read(weight.scale)
            how["scales"] = faults.scale_figures(scale, weight.scale_dtype)
            how["problems"] += faults.scale_faults(how["scales"], scale.size)
        if weight.dtype.bits <= 8:  # a bias in int32 may well be zero
            label, info = weight.label, infos[weight.label]
            how["problems"] += faults.code_faults(source, label, info.dtype, info.size)


def _special(source: Source, uses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What one container alone has."""
    if source.container == "onnx":
        return _model(source, uses)
    if source.container == "checkpoint":
        shards = cast("CheckpointSource", source).shards
        rows = [(name, shard.nbytes, len(shard.infos)) for name, shard in shards.items()]
        return {"shards": [dict(zip(("name", "bytes", "tensors"), r, strict=True)) for r in rows]}
    return {}


def _rows(
    source: Source, readable: Source, described: Description, found: Sequence[ForeignWeight]
) -> tuple[list[dict[str, Any]], list[ForeignWeight | None]]:
    """A row for each tensor, and one for all the tensors of a quantized weight; beside each row
    the weight of another tool that it is of."""
    infos = {info.name: info for info in source.infos()}
    by_codes = {weight.codes.name: weight for weight in found}
    hidden = {part.name for weight in found for part in weight.parts} - by_codes.keys()
    shown = [info for info in readable.infos() if info.name not in hidden]
    weights = [by_codes.get(info.name) for info in shown]
    rows = [
        _row(info, infos, described) if weight is None else foreign_rows.row(weight, source)
        for info, weight in zip(shown, weights, strict=True)
    ]
    return rows, weights


def _row(info: TensorInfo, infos: dict[str, TensorInfo], described: Description) -> dict[str, Any]:
    """One tensor; a quantized one with its scale and zero point."""
    stored = described.tensors.get(info.name)
    row: dict[str, Any] = {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype.name,
        "bytes": info.nbytes,
        "quantization": None,
    }
    if stored is not None:
        parts = described.layout.parts(info.name, stored)
        row["dtype"] = stored.dtype.name
        row["bytes"] = sum(infos[part.entry.name].nbytes for part in parts)
        how = {"layout": described.layout.name} | stored.to_json()
        row["quantization"] = how | {"problems": []}
    return row


def _uses(source: Source) -> dict[str, dict[str, Any]]:
    """The operators of an ONNX model that work on codes, by the tensor they read first."""
    if source.container != "onnx":
        return {}
    from qtool.formats.onnx.uses import uses

    rows = {}
    for use in uses(cast("OnnxSource", source).model):
        row = {field.name: getattr(use, field.name) for field in fields(use)}
        name = row.pop("tensor")
        rows[name] = {k: v.name if isinstance(v, DType) else v for k, v in row.items()}
    return rows


def _tools(
    described: Description, uses: dict[str, dict[str, Any]], found: Sequence[ForeignWeight]
) -> list[str]:
    """The tools or operators that the file is quantized with."""
    if described.tensors:
        return ["qtool"]
    return sorted({use["operator"] for use in uses.values()} or {w.layout.tool for w in found})


def _model(source: Source, uses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is special to ONNX: versions, and the operators that work on codes."""
    model = cast("OnnxSource", source).model
    return {
        "ir_version": model.ir_version,
        "opset_import": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "nodes": len(model.graph.node),
        "quantized_operators": [{"tensor": name} | use for name, use in uses.items()],
    }


def _add_stats(
    source: Source,
    readable: Source,
    rows: list[dict[str, Any]],
    weights: Sequence[ForeignWeight | None],
    described: Description,
    progress: Progress,
    bins: int,
) -> None:
    """Read every tensor; what weights of other tools stand for is not computed."""
    progress.begin(len(rows), sum(row["bytes"] for row in rows))
    infos = {info.name: info for info in readable.infos()}
    for row, weight in zip(rows, weights, strict=True):
        if weight is not None:
            row["stats"] = None
            foreign_rows.add_faults(weight, row, source)
        else:
            info = infos[row["name"]]
            row["stats"] = (
                None if info.dtype.kind == "complex" else figures_of(readable, info, bins)
            )
        if row["name"] in described.tensors:
            _add_faults(row, cast("DequantizedSource", readable))
        progress.advance(row["bytes"])
        progress.finish(row["name"])


def _add_faults(row: dict[str, Any], source: DequantizedSource) -> None:
    """What is wrong with the scales and codes that qtool's metadata describes."""
    name, how = row["name"], row["quantization"]
    scale, _, _ = source.parameters(name)
    how["scales"] = faults.scale_figures(scale, source.tensors[name].scale_dtype)
    how["problems"] += faults.scale_faults(how["scales"], scale.size)
    codes = source.parts(name)[0]
    size = math.prod(codes.shape)
    how["problems"] += faults.code_faults(source.original, codes.name, codes.dtype, size)

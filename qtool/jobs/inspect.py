"""qtool inspect: what a file holds, and how it is quantized."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType, DTypeLike
from qtool.formats import Source
from qtool.jobs import streams
from qtool.jobs.progress import Progress, Silent
from qtool.layouts import foreign
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import KEY, Description, read_metadata
from qtool.spec import TensorInfo

if TYPE_CHECKING:
    from qtool.formats.checkpoint import CheckpointSource
    from qtool.formats.onnx import OnnxSource

BINS = 16
_PIECE = 1 << 20


def inspect_file(
    src: str | Path,
    *,
    stats: bool = False,
    source_dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The container, the tensors and the quantization of a file, as plain data.

    stats: read every tensor, for its range, zeros, outlier ratio and histogram (of quantized
        tensors: of the values that the codes stand for). Without it headers alone are read.
    Raises QtoolError where the file cannot be read.
    """
    with streams.opened(src, source_dtype) as source:
        described = read_metadata(source)
        readable = DequantizedSource(source, DTYPES["float32"]) if described.tensors else source
        infos = {info.name: info for info in source.infos()}
        uses = _uses(source)
        rows = [_row(info, infos, described) for info in readable.infos()]
        for row in rows:
            row["quantization"] = row["quantization"] or uses.get(row["name"])
        if stats:
            _add_stats(readable, rows, progress or Silent())
        result = {
            "command": "inspect",
            "name": str(src),
            "container": source.container,
            "bytes": source.nbytes,
            "metadata": {k: v for k, v in source.metadata.items() if k != KEY},
            "quantized_by": _tools(source, described, uses),
            "tensors": rows,
            "totals": {
                "tensors": len(rows),
                "elements": sum(math.prod(row["shape"]) for row in rows),
                "bytes": sum(row["bytes"] for row in rows),
            },
        }
        return result | _special(source, uses)


def _special(source: Source, uses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What one container alone has."""
    if source.container == "onnx":
        return _model(source, uses)
    if source.container == "checkpoint":
        shards = cast("CheckpointSource", source).shards
        rows = [(name, shard.nbytes, len(shard.infos)) for name, shard in shards.items()]
        return {"shards": [dict(zip(("name", "bytes", "tensors"), r, strict=True)) for r in rows]}
    return {}


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
        row["quantization"] = {"layout": described.layout.name} | stored.to_json()
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


def _tools(source: Source, described: Description, uses: dict[str, dict[str, Any]]) -> list[str]:
    """The tools or operators that the file is quantized with."""
    if described.tensors:
        return ["qtool"]
    if uses:
        return sorted({use["operator"] for use in uses.values()})
    return sorted(set(foreign.recognise(source.infos()).values()))


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


def _add_stats(source: Source, rows: list[dict[str, Any]], progress: Progress) -> None:
    progress.begin(len(rows), sum(row["bytes"] for row in rows))
    for row in rows:
        values = source.read(row["name"])
        row["stats"] = None if values.dtype.kind == "c" else _stats(values.reshape(-1))
        progress.advance(row["bytes"])
        progress.finish(row["name"])


def _stats(values: NDArray[Any]) -> dict[str, Any]:
    """Figures of the finite values; histogram: counts in BINS equal bins from min to max."""
    pieces = [slice(start, start + _PIECE) for start in range(0, values.size, _PIECE)]
    nan = inf = zeros = 0
    low, high = math.inf, -math.inf
    for piece in pieces:
        x = values[piece].astype(np.float64)
        finite = np.isfinite(x)
        nan += int(np.isnan(x).sum())
        inf += int(np.isinf(x).sum())
        zeros += int(np.count_nonzero(x == 0))
        low = min(low, float(x.min(where=finite, initial=math.inf)))
        high = max(high, float(x.max(where=finite, initial=-math.inf)))
    count = values.size - nan - inf
    figures: dict[str, Any] = {"nan_count": nan, "inf_count": inf, "zero_count": zeros}
    if not count:
        return figures | dict.fromkeys(("min", "max", "rms", "outlier_ratio", "histogram"))
    absmax = max(-low, high)
    squares = 0.0
    histogram = np.zeros(BINS, np.int64)
    for piece in pieces:
        x = values[piece].astype(np.float64)
        x = x[np.isfinite(x)] / (absmax or 1.0)  # scaled, so that squares cannot overflow
        squares += float(np.square(x).sum())
        histogram += _histogram(x, low / (absmax or 1.0), high / (absmax or 1.0))
    rms = math.sqrt(squares / count)
    return figures | {
        "min": low,
        "max": high,
        "rms": rms * absmax,
        "outlier_ratio": 1 / rms if rms else None,
        "histogram": histogram.tolist(),
    }


def _histogram(x: NDArray[Any], low: float, high: float) -> NDArray[np.int64]:
    """Counts of x in BINS equal bins; np.histogram refuses ranges of a few units in the last
    place."""
    place = (x - low) * (BINS / (high - low)) if high > low else np.full(x.shape, BINS / 2)
    return np.bincount(np.clip(place.astype(np.int64), 0, BINS - 1), minlength=BINS)

"""What the callers of two ONNX models see of them, without running them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from qtool.formats import Source

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


def differences(original: Source, quantized: Source) -> Iterator[str]:
    """Inputs and outputs that are missing, extra, or of another type or shape; none where one of
    the two is no model. Inputs that initializers give are left out: weights get fixed."""
    if original.container != "onnx" or quantized.container != "onnx":
        return
    for kind in ("input", "output"):
        before, after = (_values(cast("OnnxSource", s), kind) for s in (original, quantized))
        for name, value in before.items():
            if name not in after:
                yield f"{kind} {name} is missing"
            elif after[name] != value:
                yield f"{kind} {name} has another type or shape"
        for name in after.keys() - before.keys():
            yield f"{kind} {name} is none of ORIGINAL"


def _values(source: OnnxSource, kind: str) -> dict[str, Any]:
    graph = source.model.graph
    held = {tensor.name for tensor in graph.initializer}
    held |= {tensor.values.name for tensor in graph.sparse_initializer}
    return {v.name: v.type for v in getattr(graph, kind) if kind == "output" or v.name not in held}

"""Small ONNX models, and running them with onnxruntime as they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]


def initializer(name: str, values: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def constant(name: str, values: Any, dtype: Any = np.float32) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=initializer("", values, dtype))


def model(
    nodes: Sequence[NodeProto],
    initializers: Sequence[TensorProto] = (),
    *,
    inputs: Mapping[str, Sequence[int]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
    ir_version: int = 10,
    dtype: int = TensorProto.FLOAT,
    **fields: Any,
) -> ModelProto:
    """A model of these nodes; inputs maps names to shapes, outputs have no shape."""
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info(n, dtype, s) for n, s in (inputs or {}).items()],
        [helper.make_tensor_value_info(n, dtype, None) for n in outputs],
        initializers,
    )
    imports = [helper.make_opsetid("", opset), *fields.pop("imports", ())]
    made = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, **fields)
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    return made


def run(made: ModelProto | Path, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs, without onnxruntime's rewriting of the graph, which computes in int8."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    content = str(made) if isinstance(made, Path) else made.SerializeToString()
    outputs: list[Array] = onnxruntime.InferenceSession(content, options).run(None, dict(feeds))
    return outputs


def save(made: ModelProto, path: Path) -> Path:
    path.write_bytes(made.SerializeToString())
    return path


def check(path: Path) -> ModelProto:
    """The model at path, after the checker's full check."""
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.load_model(str(path), load_external_data=False)

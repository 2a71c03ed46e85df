"""Small ONNX models, quantizing them, and running them with onnxruntime as they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import (
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from qtool import ops
from qtool.dtypes import DTYPES
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.layouts.onnx_qdq import OnnxQdq
from qtool.layouts.onnx_weight import Weight
from qtool.spec import QuantSpec

Array = NDArray[Any]


def initializer(name: str, values: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def constant(name: str, values: Any, dtype: Any = np.float32) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=initializer("", values, dtype))


def model(
    nodes: Sequence[NodeProto],
    initializers: Sequence[TensorProto] = (),
    *,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
    ir_version: int = 10,
    dtype: int = TensorProto.FLOAT,
    imports: Sequence[OperatorSetIdProto] = (),
    **fields: Any,
) -> ModelProto:
    """A model of these nodes. inputs: name to shape, all of dtype; outputs: as onnx infers them,
    else rank 2 of dtype."""
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(n, dtype, s) for n, s in (inputs or {}).items()],
            [ValueInfoProto(name=name) for name in outputs],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", opset), *imports],
        ir_version=ir_version,
        **fields,
    )
    inferred = onnx.shape_inference.infer_shapes(made).graph.output
    for output, known in zip(made.graph.output, inferred, strict=True):
        output.CopyFrom(helper.make_tensor_value_info(output.name, dtype, [None, None]))
        if known.type.tensor_type.HasField("shape"):
            output.CopyFrom(known)
    return made


def run(made: ModelProto | Path, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs, without onnxruntime's rewriting of the graph, which computes in int8."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Stored weights would be laid out otherwise than computed ones, and summed in another order.
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
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


def quantized(x: Array, spec: QuantSpec, scale_dtype: str, zero_point: int | None) -> Any:
    """A quantized tensor with a scale of 0.25 everywhere."""
    shape = spec.granularity.scale_shape(x.shape)
    scale = np.full(shape, 0.25).astype(DTYPES[scale_dtype].numpy)
    zero = None if zero_point is None else np.full(shape, zero_point).astype(spec.dtype.numpy)
    attributes: dict[str, Any] = spec.granularity.attributes
    y = ops.quantize_linear(
        x, scale, zero, output_dtype=spec.dtype, precision="float32", **attributes
    )
    return SimpleNamespace(y=y, scale=scale, zero_point=zero, spec=spec, global_scale=None)


def quantize(
    made: ModelProto,
    path: Path,
    specs: dict[str, QuantSpec],
    *,
    scale_dtype: str = "float32",
    zero_point: int | None = None,
    external_data: bool = False,
) -> ModelProto:
    """Quantize the named weights of a model; the checked result, which is at path."""
    source = OnnxSource(save(made, path.with_suffix(".source.onnx")))
    weights = {
        name: Weight(spec, DTYPES[scale_dtype], zero_point is not None)
        for name, spec in specs.items()
    }
    with OnnxQdq(source, weights, path, external_data=external_data) as writer:
        for name, spec in specs.items():
            writer.add(name, quantized(source.read(name), spec, scale_dtype, zero_point))
    return check(path)


def replaced(made: ModelProto, **weights: Array) -> ModelProto:
    """The model with other values in its initializers and constants."""
    copy = ModelProto()
    copy.CopyFrom(made)
    for tensor in copy.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    for node in copy.graph.node:
        value = onnx_graph.constant_value(node)
        if value is not None and node.output[0] in weights:
            value.CopyFrom(numpy_helper.from_array(weights[node.output[0]]))
    return copy


def same(found: ModelProto | Path, expected: ModelProto, **feeds: Array) -> bool:
    """Whether both give the same outputs, bit for bit."""
    outputs = zip(run(found, feeds), run(expected, feeds), strict=True)
    return all(new.tobytes() == old.tobytes() for new, old in outputs)

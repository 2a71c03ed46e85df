"""Whole commands on small ONNX models, and an oracle for what comes out.

The oracle: the original model, its weights replaced by the values that the written codes and
scales stand for, as onnx reads them. Both run in the same runtime, so that outputs have equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)
from onnx.reference import ReferenceEvaluator
from onnx_models import check, initializer, model, run, save

import qtool

Array = NDArray[Any]
RNG = np.random.default_rng(41)
START = RNG.bit_generator.state


def reseed() -> None:
    """Start the random values anew, so that a test's do not depend on the tests before it."""
    RNG.bit_generator.state = START


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def job(made: ModelProto, folder: Path, **options: Any) -> tuple[ModelProto, dict[str, Any]]:
    """The model quantized: the result, checked in full, and the report."""
    source = save(made, folder / "model.onnx")
    report = qtool.quantize_file(source, folder / "out.onnx", **options)
    return check(folder / "out.onnx"), report


def unsigned(made: ModelProto) -> ModelProto:
    """The model without what says who made it."""
    kept = [entry for entry in made.metadata_props if entry.key != "qtool"]
    assert len(kept) == len(made.metadata_props) - 1
    del made.metadata_props[:]
    made.metadata_props.extend(kept)
    return made


def bodies(made: ModelProto) -> Iterator[GraphProto | FunctionProto]:
    """The graph of a model and its functions, each followed by the graphs nested in it."""
    for body in (made.graph, *made.functions):
        yield from _nested(body)


def _nested(body: GraphProto | FunctionProto) -> Iterator[GraphProto | FunctionProto]:
    yield body
    for node in body.node:
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nested(graph)


def stored(body: GraphProto | FunctionProto) -> dict[str, TensorProto]:
    """The tensors that a graph or function holds."""
    found = {t.name: t for t in body.initializer} if isinstance(body, GraphProto) else {}
    constants = [node for node in body.node if node.op_type == "Constant"]
    return found | {
        node.output[0]: a.t for node in constants for a in node.attribute if a.name == "value"
    }


def weights(made: ModelProto, folder: Path = Path()) -> dict[Any, Array]:
    """What its DequantizeLinear nodes of stored tensors give, in the order of the nodes.

    By name; of nested graphs and functions by (number among bodies(), name). Names of stored
    tensors must not be used twice.
    """
    loaded = ModelProto()
    loaded.CopyFrom(made)
    onnx.load_external_data_for_model(loaded, str(folder))
    tensors = {n: numpy_helper.to_array(t) for b in bodies(loaded) for n, t in stored(b).items()
               if t.data_type != TensorProto.STRING}  # fmt: skip
    found: dict[Any, Array] = {}
    scales: set[str] = set()
    for number, body in enumerate(bodies(loaded)):
        for node in body.node:
            if node.op_type == "DequantizeLinear":
                value = dequantized(node, *(tensors[name] for name in node.input))
                name, scale = node.output[0], node.input[1]
                found[(number, name) if number else name] = value
                tensors |= {name: value} if name not in tensors else {}
                scales.add(scale)
    return {k: v for k, v in found.items() if (k if isinstance(k, str) else k[1]) not in scales}


def attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def dequantized(node: NodeProto, codes: Array, scale: Array, zero: Array | None = None) -> Array:
    """(codes - zero) * scale in the scale's type, rounded to output_dtype."""
    given = attributes(node)
    output = given.pop("output_dtype", 0)
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        scale = scale.astype(np.float32)
    difference = codes.astype(scale.dtype)
    if zero is not None:
        difference = difference - spread(zero, codes.shape, **given).astype(scale.dtype)
    product = difference * spread(scale, codes.shape, **given)
    return product.astype(helper.tensor_dtype_to_np_dtype(output)) if output else product


def spread(values: Array, shape: Sequence[int], axis: int = 1, block_size: int = 0) -> Array:
    """The value of the group of every element."""
    if block_size:
        return np.repeat(values, block_size, axis).take(range(shape[axis]), axis)
    if values.ndim == 0:
        return values
    return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def replaced(made: ModelProto, values: Mapping[Any, Array]) -> ModelProto:
    """A copy with other values in its initializers and Constant nodes, by weights()' keys."""
    copy = ModelProto()
    copy.CopyFrom(made)
    tensors = [stored(body) for body in bodies(copy)]
    for key, value in values.items():
        number, name = (0, key) if isinstance(key, str) else key
        tensors[number][name].CopyFrom(numpy_helper.from_array(value, name))
    return copy


def check_runs(made: ModelProto, result: ModelProto | Path, feeds: Mapping[str, Array]) -> None:
    """Equal outputs of the result and of the original with its weights replaced."""
    written = result if isinstance(result, ModelProto) else onnx.load(result)
    values = weights(written)
    assert values
    same(run(result, feeds), run(replaced(made, values), feeds))


def sound(path: Path) -> ModelProto:
    """The model at path, which the checker and strict shape inference accept."""
    made = check(path)
    onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True, data_prop=True)
    return made


def reference(made: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs that onnx's own evaluator gives."""
    outputs: Any = ReferenceEvaluator(made).run(None, dict(feeds))
    return list(outputs)


def same(actual: Sequence[Array], expected: Sequence[Array]) -> None:
    for new, old in zip(actual, expected, strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.tobytes() == old.tobytes()


def network(opset: int) -> ModelProto:
    """A classifier whose every operator exists since opset 7."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "one", "b", "b", "one"], ["n"], epsilon=0.01),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "bias"], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["y"], axis=1),
    ]
    stored = [
        initializer("k", normal(8, 6, 3, 3)), initializer("one", np.full(8, 1.5)),
        initializer("b", normal(8)), initializer("w", normal(5, 72)),
        initializer("bias", normal(5)),
    ]  # fmt: skip
    return model(nodes, stored, inputs={"x": (2, 6, 6, 6)}, opset=opset, ir_version=4)

"""Weight-only quantization of an ONNX model: codes, scale and zero point -> DequantizeLinear.

Each weight becomes initializers of codes, scales and zero points, and a DequantizeLinear node whose
output has the weight's name: consumers, graph outputs and nested graphs that use the name stay as
they are.
Source: ONNX DequantizeLinear, versions 10 to 28; IR.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from onnx import ModelProto, NodeProto, TensorProto, helper

from qtool.dtypes import DTYPES, DType, names, resolve
from qtool.errors import SpecError
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.packing import pack
from qtool.spec import QuantSpec, Shape
from qtool.tensor import QuantizedTensor, Target

# The first opset whose DequantizeLinear has the granularity, and its attribute output_dtype.
_GRANULARITIES = {"per_tensor": 10, "per_axis": 13, "blocked": 21}
_OUTPUT_DTYPE = 23
_FLOAT32, _FLOAT64 = DTYPES["float32"], DTYPES["float64"]


@dataclass(frozen=True, slots=True)
class Weight:
    """What a weight is quantized to; scale_dtype: the type in which its scales are stored."""

    spec: QuantSpec
    scale_dtype: DType
    has_zero_point: bool

    def parts(self, shape: Shape) -> Iterator[tuple[str, DType, Shape]]:
        """(suffix of the name, type, shape) of the codes, the scale and the zero point."""
        scale_shape = self.spec.granularity.scale_shape(shape)
        yield "quantized", self.spec.dtype, shape
        yield "scale", self.scale_dtype, scale_shape
        if self.has_zero_point:
            yield "zero_point", self.spec.dtype, scale_shape


class OnnxQdq:
    """The quantized copy of a model at path: planned from headers, filled weight by weight.

    weights: what those named so in source.infos() are quantized to. external_data: see
    ModelWriter. Leaving it completes the file.

    Raises SpecError for a scale type that DequantizeLinear does not take, FormatError where the
    model cannot be converted to the opset that the types need, OutputError as ModelWriter.
    """

    def __init__(
        self,
        source: OnnxSource,
        weights: Mapping[str, Weight],
        path: Path,
        *,
        external_data: bool,
    ) -> None:
        self._source = source
        self._names = Names(source.model)
        self._model = ModelProto()
        self._model.CopyFrom(source.model)
        if weights:
            needed = max(
                required_opset(weight.spec, weight.scale_dtype, self._dtype(name))
                for name, weight in weights.items()
            )
            raise_opset(self._model, needed, self._names, str(source.path))
        self._parts: dict[str, list[str]] = {}
        made = self._replace(weights)
        self._writer = ModelWriter(
            path, self._model, made, source=source, external_data=external_data
        )

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Store the codes, scale and zero point of a weight."""
        arrays = [tensor.y, tensor.scale]
        if tensor.zero_point is not None:
            arrays.append(tensor.zero_point)
        for part, values in zip(self._parts[name], arrays, strict=True):
            with self._writer.writing(part) as write:
                write(0, pack(values, resolve(values.dtype)))

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a weight go that is quantized tile by tile."""
        with ExitStack() as stack:
            writers = [stack.enter_context(self._writer.writing(p)) for p in self._parts[name]]
            codes, scale, *zero_point = writers
            yield Target(codes, scale, zero_point[0] if zero_point else None, is_packed=True)

    def _replace(self, weights: Mapping[str, Weight]) -> list[TensorProto]:
        """Put parts that hold no values yet, and nodes, in the place of the weights."""
        graph = self._model.graph
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name in weights:
                del graph.initializer[index]
        first = len(graph.initializer)
        made = {
            name: self._nodes(name, weights[name]) for name in self._source.tensors
            if name in weights
        }  # fmt: skip
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if onnx_graph.constant_value(node) is not None and node.output[0] in made:
                del graph.node[index]
                for new in reversed(made.pop(node.output[0])):
                    graph.node.insert(index, new)
        for nodes in reversed(made.values()):
            for new in reversed(nodes):
                graph.node.insert(0, new)
        return list(graph.initializer[first:])

    def _nodes(self, name: str, weight: Weight) -> list[NodeProto]:
        """Add the initializers of a weight to the graph; the nodes that compute it from them."""
        shape = tuple(self._source.tensors[name].dims)
        inputs: list[str] = []
        for suffix, stored, part_shape in weight.parts(shape):
            inputs.append(self._names.fresh(f"{name}_{suffix}"))
            proto = onnx_tensor.tensor_proto(inputs[-1], stored, part_shape)
            self._model.graph.initializer.append(proto)
        self._parts[name] = inputs
        dtype = self._dtype(name)
        result = _result(dtype)
        output = name if result == dtype else self._names.fresh(f"{name}_{result}")
        attributes: dict[str, Any] = weight.spec.granularity.resolve(shape).attributes
        if weight.scale_dtype != result and result.code is not None:
            attributes["output_dtype"] = result.code
        node_name = self._names.fresh(f"{name}_DequantizeLinear")
        nodes = [helper.make_node("DequantizeLinear", inputs, [output], node_name, **attributes)]
        if output != name:
            node_name = self._names.fresh(f"{name}_Cast")
            nodes.append(helper.make_node("Cast", [output], [name], node_name, to=dtype.code))
        return nodes

    def _dtype(self, name: str) -> DType:
        return onnx_tensor.dtype_of(self._source.tensors[name], self._source.thing(name))


def required_opset(spec: QuantSpec, scale: DType, weight: DType) -> int:
    """The first opset whose DequantizeLinear takes such codes and scales, and gives the weight.

    Raises SpecError where none does.
    """
    if spec.dtype.opset is None or scale.scale_opset is None:
        allowed = [d for d in DTYPES.values() if d.scale_opset and d.kind == "float"]
        raise SpecError(
            "scale_dtype", f"DequantizeLinear takes no {scale} scales", "use " + names(allowed)
        )
    needed = [spec.dtype.opset, scale.scale_opset, _GRANULARITIES[spec.granularity.name]]
    if scale != _result(weight):
        needed.append(_OUTPUT_DTYPE)
    return max(needed)


def _result(weight: DType) -> DType:
    """What DequantizeLinear gives for a weight; it has no float64."""
    return _FLOAT32 if weight == _FLOAT64 else weight

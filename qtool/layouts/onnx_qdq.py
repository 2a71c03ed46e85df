"""Weight-only quantization of an ONNX model: codes, scale and zero point -> DequantizeLinear.

Each weight becomes initializers of codes, scales and zero points, and a DequantizeLinear node whose
output has the weight's name, in the graph that the weight is in: consumers, graph outputs and
nested graphs that use the name stay as they are. Functions have Constant nodes for initializers.
Source: ONNX DequantizeLinear, versions 10 to 28; IR.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs, helper

from qtool.dtypes import DTYPES, DType, names, resolve
from qtool.errors import SpecError
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, bodies
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
        for name, weight in weights.items():
            if source.bodies[source.places[name].body].is_in_function:
                _check_function(name, weight.spec)
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

    def _replace(self, weights: Mapping[str, Weight]) -> dict[str, TensorProto]:
        """Put parts that hold no values yet, and nodes, in the place of the weights.

        Returns the parts by name.
        """
        found = bodies(self._model)
        labels: dict[int, dict[str, str]] = {}
        for label, place in self._source.places.items():
            if label in weights:
                labels.setdefault(place.body, {})[place.name] = label
        made: dict[str, TensorProto] = {}
        for number, inside in labels.items():
            body = found[number]
            self._replace_in(body, {n: (label, weights[label]) for n, label in inside.items()})
            parts = {part for label in inside.values() for part in self._parts[label]}
            made |= {name: t for name, t in onnx_graph.stored(body.proto) if name in parts}
        return made

    def _replace_in(self, body: Body, weights: Mapping[str, tuple[str, Weight]]) -> None:
        """Replace the weights of one body, given by their names there."""
        graph = body.proto
        if isinstance(graph, GraphProto):
            # A weight that callers may set is fixed from now on.
            onnx_graph.remove(graph.initializer, weights)
            onnx_graph.remove(graph.input, weights)
        made = {name: self._nodes(name, body, *weights[name]) for name in weights}
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if onnx_graph.constant_value(node) is not None and node.output[0] in made:
                del graph.node[index]
                for new in reversed(made.pop(node.output[0])):
                    graph.node.insert(index, new)
        for nodes in reversed(made.values()):
            for new in reversed(nodes):
                graph.node.insert(0, new)

    def _nodes(self, name: str, body: Body, label: str, weight: Weight) -> list[NodeProto]:
        """The nodes that compute a weight from its parts, which the body is given."""
        shape = tuple(self._source.tensors[label].dims)
        parts: list[TensorProto] = []
        for suffix, stored, part_shape in weight.parts(shape):
            part = self._names.fresh(f"{name}_{suffix}")
            parts.append(onnx_tensor.tensor_proto(part, stored, part_shape))
        self._parts[label] = [part.name for part in parts]
        dtype = self._dtype(label)
        result = _result(dtype)
        output = name if result == dtype else self._names.fresh(f"{name}_{result}")
        attributes: dict[str, Any] = weight.spec.granularity.resolve(shape).attributes
        if weight.scale_dtype != result and result.code is not None:
            attributes["output_dtype"] = result.code
        node_name = self._names.fresh(f"{name}_DequantizeLinear")
        nodes = self._store(parts, body)
        inputs = self._parts[label]
        nodes.append(
            helper.make_node("DequantizeLinear", inputs, [output], node_name, **attributes)
        )
        if output != name:
            node_name = self._names.fresh(f"{name}_Cast")
            nodes.append(helper.make_node("Cast", [output], [name], node_name, to=dtype.code))
        return nodes

    def _store(self, parts: Sequence[TensorProto], body: Body) -> list[NodeProto]:
        """Make the parts initializers of the body, or Constant nodes where it has none."""
        if isinstance(body.proto, GraphProto) and not body.is_in_function:
            body.proto.initializer.extend(parts)
            return []
        return [helper.make_node("Constant", [], [part.name], value=part) for part in parts]

    def _dtype(self, name: str) -> DType:
        return onnx_tensor.dtype_of(self._source.tensors[name], self._source.thing(name))


def _check_function(name: str, spec: QuantSpec) -> None:
    """Raise SpecError where a Constant node cannot hold the codes of a weight of a function."""
    allowed = defs.get_schema("Constant").type_constraints[0].allowed_type_strs
    if f"tensor({spec.dtype})" not in allowed:
        raise SpecError(
            f"tensor {name}",
            f"is in a function, whose weights are Constant nodes, which hold no {spec.dtype}",
            "exclude it, or choose another type",
        )


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

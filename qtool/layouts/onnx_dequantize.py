"""Floats again from a quantized ONNX model: DequantizeLinear nodes with stored inputs are folded.

Source: ONNX DequantizeLinear, versions 10 to 28.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from qtool.dtypes import DType
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Labels, Place, bodies
from qtool.formats.onnx.consumers import Consumers
from qtool.formats.onnx.graph import STANDARD, Names
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape, Writer
from qtool.tensor import Codes

# The first opset whose Cast takes bfloat16.
_CAST_BFLOAT16 = 13


@dataclass(frozen=True, slots=True)
class Folded:
    """A DequantizeLinear node that becomes a stored tensor.

    name: the label of the tensor that consumers read. dtype, shape: of the codes.
    granularity: of the scale.
    """

    name: str
    dtype: DType
    shape: Shape
    granularity: Granularity


@dataclass(frozen=True, slots=True)
class _Dequantize:
    """A DequantizeLinear node of a body whose inputs are stored: their labels, "" for none."""

    node: NodeProto
    body: Body
    inputs: Sequence[str]


class OnnxDequantized:
    """A model whose weights are floats of dtype again, written once.

    Every DequantizeLinear node whose inputs are all stored, in its own graph or one around,
    becomes an initializer (in functions: a Constant node) that holds
    dequantize_linear(..., output_dtype=dtype), under the name of the node's output; where that has
    another float type, a Cast gives it. A Cast to dtype beside it that alone reads the node goes
    with it. Codes, scales and zero points that nothing reads any more go away.
    float64 holds the float32 values.

    folded: what becomes of the nodes, in their order. Values are read by write() alone.
    """

    def __init__(self, source: OnnxSource, dtype: DType) -> None:
        self._source = source
        self._dtype = dtype
        self._names = Names(source.model)
        self._model = ModelProto()
        self._model.CopyFrom(source.model)
        if dtype.name == "bfloat16":
            raise_opset(self._model, _CAST_BFLOAT16, self._names, str(source.path))
        self._bodies = bodies(self._model)
        self._consumers = Consumers(self._bodies)
        self._labels = Labels(self._bodies)
        self._stored = {place: label for label, place in source.places.items()}
        self._training = onnx_graph.training_reads(self._model)
        self._made: dict[str, tuple[TensorProto, _Dequantize, Granularity]] = {}
        self.folded: list[Folded] = []
        nodes = [found for body in self._bodies for found in self._nodes(body)]
        for found in nodes:
            self._fold(found)
        self._remove_unused({self._source.places[i] for found in nodes for i in found.inputs if i})

    def write(
        self, path: Path, *, external_data: bool, restore: Callable[[Codes, Writer, str], None]
    ) -> None:
        """Write the model, once; see ModelWriter for external_data and errors.

        restore: stores the values of the codes of a tensor, given its name.
        """
        made = {name: tensor for name, (tensor, _, _) in self._made.items()}
        with ModelWriter(
            path, self._model, made, source=self._source, external_data=external_data
        ) as writer:
            for name, (_, found, granularity) in self._made.items():
                with self._codes(found, granularity) as codes, writer.writing(name) as write:
                    restore(codes, write, name)

    def _nodes(self, body: Body) -> Iterator[_Dequantize]:
        """The nodes of a body that can be folded."""
        for node in body.proto.node:
            if node.op_type != "DequantizeLinear" or node.domain not in STANDARD:
                continue
            places = [body.place(name) for name in node.input]
            inputs = [self._stored.get(place, "") if place else "" for place in places]
            given = [label for name, label in zip(node.input, inputs, strict=True) if name]
            is_stored = all(given) and self._source.overridable.isdisjoint(given)
            if (
                len(inputs) > 1
                and all((*inputs[:2], *node.output[:1]))
                and node.output
                and is_stored
            ):
                yield _Dequantize(node, body, inputs)

    def _fold(self, found: _Dequantize) -> None:
        """Put a stored tensor, and a Cast where needed, in the place of a node."""
        node, body, source, read = found.node, found.body, self._source, found.node.output[0]
        nodes = body.proto.node
        codes, scale = (source.tensors[label] for label in found.inputs[:2])
        shape = tuple(codes.dims)
        granularity = _granularity(node, shape, tuple(scale.dims))
        label = self._labels.of(Place(body.number, read))
        index = _index(nodes, node)
        del nodes[index]
        result = onnx_graph.attribute(node, "output_dtype", 0) or scale.data_type
        stored = read
        if result != self._dtype.code and (merged := self._cast_of(read, body)):
            stored = merged.output[0]
            label = self._labels.of(Place(body.number, stored))
            del nodes[_index(nodes, merged)]
        elif result != self._dtype.code:
            stored = self._names.fresh(f"{read}_{self._dtype}")
            name = self._names.fresh(f"{read}_Cast")
            nodes.insert(index, helper.make_node("Cast", [stored], [read], name, to=result))
        tensor = self._store(onnx_tensor.tensor_proto(stored, self._dtype, shape), body, index)
        self._made[label] = (tensor, found, granularity)
        dtype = onnx_tensor.dtype_of(codes, source.thing(found.inputs[0]))
        self.folded.append(Folded(label, dtype, shape, granularity))

    def _store(self, tensor: TensorProto, body: Body, index: int) -> TensorProto:
        """Put a tensor into a body, as a Constant node at that index where it is a function."""
        if isinstance(body.proto, GraphProto) and not body.is_in_function:
            body.proto.initializer.append(tensor)
            stored: TensorProto = body.proto.initializer[-1]
        else:
            node = helper.make_node("Constant", [], [tensor.name], value=tensor)
            body.proto.node.insert(index, node)
            stored = body.proto.node[index].attribute[0].t
        return stored

    def _cast_of(self, name: str, body: Body) -> NodeProto | None:
        """The Cast to the wanted type, in the same body, that is all that reads a tensor."""
        place = Place(body.number, name)
        uses = self._consumers.of(place)
        is_given = name in body.outputs or (body.number == 0 and name in self._training)
        if len(uses) != 1 or is_given or uses[0].node.op_type != "Cast" or uses[0].body != body:
            return None
        wanted = onnx_graph.attribute(uses[0].node, "to", 0) == self._dtype.code
        return uses[0].node if wanted else None

    @contextmanager
    def _codes(self, found: _Dequantize, granularity: Granularity) -> Iterator[Codes]:
        """What a node dequantizes."""
        source = self._source
        name, scale_name, *rest = found.inputs
        codes = source.tensors[name]
        dtype = onnx_tensor.dtype_of(codes, source.thing(name))
        zero_point = source.read(rest[0]) if any(rest) else None
        if dtype.name == "int32" and zero_point is not None and not zero_point.any():
            zero_point = None  # int32 has none, but some exporters write zeros
        scale = source.read(scale_name)
        with source.stored(name).reading() as read:
            yield Codes(read, dtype, tuple(codes.dims), scale, zero_point, granularity)

    def _remove_unused(self, places: Set[Place]) -> None:
        """Drop the stored tensors at places that nothing reads any more."""
        consumers = Consumers(bodies(self._model))
        for body in self._bodies:
            unused = {p.name for p in places if p.body == body.number and not consumers.is_read(p)}
            unused -= self._training if body.number == 0 else set()
            graph = body.proto
            if isinstance(graph, GraphProto):
                for values in (graph.initializer, graph.input, graph.value_info):
                    onnx_graph.remove(values, unused)
            for index in reversed(range(len(graph.node))):
                node = graph.node[index]
                if onnx_graph.constant_value(node) is not None and node.output[0] in unused:
                    del graph.node[index]


def _index(nodes: Sequence[NodeProto], node: NodeProto) -> int:
    return next(index for index, other in enumerate(nodes) if other is node)


def _granularity(node: NodeProto, shape: Shape, scale: Shape) -> Granularity:
    axis = onnx_graph.attribute(node, "axis", 1)
    block_size = onnx_graph.attribute(node, "block_size", 0)
    if block_size:
        return Blocked(axis, block_size).resolve(shape)
    return PerTensor() if scale in ((), (1,)) else PerAxis(axis).resolve(shape)

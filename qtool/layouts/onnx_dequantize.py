"""Floats again from a quantized ONNX model: DequantizeLinear nodes with stored inputs are folded.

Products of stored codes become products of floats before that: see onnx_integer_back.py.
Source: ONNX DequantizeLinear, versions 10 to 28.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from qtool.dtypes import DType
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.consumers import Consumers
from qtool.formats.onnx.graph import STANDARD, Names
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.layouts.onnx_integer_back import FloatProducts
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape, Writer
from qtool.tensor import Codes

# The first opset whose Cast takes bfloat16.
_CAST_BFLOAT16 = 13


@dataclass(frozen=True, slots=True)
class Folded:
    """A DequantizeLinear node that becomes a stored tensor.

    name: the tensor that consumers read. dtype, shape: of the codes. granularity: of the scale.
    """

    name: str
    dtype: DType
    shape: Shape
    granularity: Granularity


class OnnxDequantized:
    """A model whose weights are floats of dtype again, written once.

    Every DequantizeLinear node of the top-level graph whose inputs are all stored becomes an
    initializer that holds dequantize_linear(..., output_dtype=dtype), under the name of the node's
    output; where that has another float type, a Cast gives it. A Cast to dtype that alone reads
    the node goes with it. Codes, scales and zero points that nothing reads any more go away.
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
        stored = source.tensors.keys() - source.overridable
        FloatProducts(self._model, {name: source.tensors[name] for name in stored}, self._names)
        self._consumers = Consumers(self._model.graph)
        self._outputs = onnx_graph.training_reads(self._model)
        self._outputs.update(value.name for value in self._model.graph.output)
        self._made: dict[str, tuple[TensorProto, NodeProto, Granularity]] = {}
        self.folded: list[Folded] = []
        nodes = [
            node
            for node in self._model.graph.node
            if node.op_type == "DequantizeLinear"
            and node.domain in STANDARD
            and len(node.input) > 1
            and all((*node.input[:2], *node.output[:1]))
            and node.output
            and stored.issuperset(name for name in node.input if name)
        ]
        for node in nodes:
            self._fold(node)
        self._remove_unused({name for node in nodes for name in node.input if name})

    def write(
        self, path: Path, *, external_data: bool, restore: Callable[[Codes, Writer, str], None]
    ) -> None:
        """Write the model, once; see ModelWriter for external_data and errors.

        restore: stores the values of the codes of a tensor, given its name.
        """
        made = [tensor for tensor, _, _ in self._made.values()]
        with ModelWriter(
            path, self._model, made, source=self._source, external_data=external_data
        ) as writer:
            for name, (_, node, granularity) in self._made.items():
                with self._codes(node, granularity) as codes, writer.writing(name) as write:
                    restore(codes, write, name)

    def _fold(self, node: NodeProto) -> None:
        """Put an initializer, and a Cast where needed, in the place of a node."""
        graph, source, read = self._model.graph, self._source, node.output[0]
        codes, scale = (source.tensors[name] for name in node.input[:2])
        shape = tuple(codes.dims)
        granularity = _granularity(node, shape, tuple(scale.dims))
        index = self._index(node)
        del graph.node[index]
        result = onnx_graph.attribute(node, "output_dtype", 0) or scale.data_type
        stored = read
        if result != self._dtype.code and (merged := self._cast_of(read)):
            stored = read = merged.output[0]
            del graph.node[self._index(merged)]
        elif result != self._dtype.code:
            stored = self._names.fresh(f"{read}_{self._dtype}")
            label = self._names.fresh(f"{read}_Cast")
            graph.node.insert(index, helper.make_node("Cast", [stored], [read], label, to=result))
        graph.initializer.append(onnx_tensor.tensor_proto(stored, self._dtype, shape))
        self._made[stored] = (graph.initializer[-1], node, granularity)
        dtype = onnx_tensor.dtype_of(codes, source.thing(node.input[0]))
        self.folded.append(Folded(read, dtype, shape, granularity))

    def _index(self, node: NodeProto) -> int:
        return next(i for i, other in enumerate(self._model.graph.node) if other is node)

    def _cast_of(self, name: str) -> NodeProto | None:
        """The top-level Cast to the wanted type that is all that reads a tensor."""
        readers = [node for node, _ in self._consumers.of(name)]
        if len(readers) != 1 or name in self._outputs or readers[0].op_type != "Cast":
            return None
        wanted = onnx_graph.attribute(readers[0], "to", 0) == self._dtype.code
        top_level = any(node is readers[0] for node in self._model.graph.node)
        return readers[0] if wanted and top_level else None

    @contextmanager
    def _codes(self, node: NodeProto, granularity: Granularity) -> Iterator[Codes]:
        """What a node dequantizes."""
        source = self._source
        codes = source.tensors[node.input[0]]
        dtype = onnx_tensor.dtype_of(codes, source.thing(node.input[0]))
        scale = source.read(node.input[1])
        zero_point = source.read(node.input[2]) if any(node.input[2:]) else None
        if dtype.name == "int32" and zero_point is not None and not zero_point.any():
            zero_point = None  # int32 has none, but some exporters write zeros
        if isinstance(granularity, PerAxis):  # products may need other shapes: see FloatProducts
            scale = scale.reshape(-1)
            if zero_point is not None and zero_point.size == 1:
                zero_point = np.broadcast_to(zero_point.reshape(()), scale.shape)
        with source.stored(node.input[0]).reading() as read:
            yield Codes(read, dtype, tuple(codes.dims), scale, zero_point, granularity)

    def _remove_unused(self, names: Set[str]) -> None:
        """Drop the stored tensors among names that nothing reads any more."""
        graph = self._model.graph
        consumers = Consumers(graph)
        unused = {name for name in names if not consumers.of(name)} - self._outputs
        for values in (graph.initializer, graph.input, graph.value_info):
            for index in reversed(range(len(values))):
                if values[index].name in unused:
                    del values[index]
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if onnx_graph.constant_value(node) is not None and node.output[0] in unused:
                del graph.node[index]


def _granularity(node: NodeProto, shape: Shape, scale: Shape) -> Granularity:
    axis = onnx_graph.attribute(node, "axis", 1)
    block_size = onnx_graph.attribute(node, "block_size", 0)
    if block_size:
        return Blocked(axis, block_size).resolve(shape)
    return PerTensor() if scale in ((), (1,)) else PerAxis(axis).resolve(shape)

"""Float products again from integer ones: the chain of onnx_dynamic.py, whoever wrote it.

    Cast(MatMulInteger(x_q, w_q, x_z, w_z)) * (x_s * w_s), x_q, x_s, x_z = DynamicQuantizeLinear(x)

becomes MatMul(x, w), w = DequantizeLinear(w_q, w_s, w_z); ConvInteger likewise becomes Conv. The
weights are what they were; activations are no longer rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.graph import STANDARD, Names
from qtool.spec import Shape

_FLOAT = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}

_Stored = Mapping[str, TensorProto]
_Makers = Mapping[str, NodeProto]


@dataclass(frozen=True, slots=True)
class _Chain:
    """An integer product: what it computes, and the nodes that compute it but for the last one.

    x: the tensor that is quantized. transpose: the node that transposes its codes, or None.
    weight: names of the codes, the scale and the zero point, "" for none.
    """

    x: str
    transpose: NodeProto | None
    integer: NodeProto
    weight: tuple[str, str, str]
    nodes: tuple[NodeProto, ...]


class FloatProducts:
    """Puts float products in the place of the integer ones of a model that read stored codes.

    stored: the tensors of its top-level graph whose values are fixed. DequantizeLinear nodes for
    them come first in the graph; their scales may have the shape that the product needed, and
    their zero points be single ones.
    """

    def __init__(self, model: ModelProto, stored: _Stored, names: Names) -> None:
        self._names = names
        self._weights: dict[tuple[str, str, str], NodeProto] = {}
        self._unused: list[NodeProto] = []
        self._replace(model.graph, stored, {})
        for node in reversed(self._weights.values()):
            model.graph.node.insert(0, node)
        while self._unused and self._remove_unused(model):
            pass

    def _replace(self, graph: GraphProto, stored: _Stored, outer: _Makers) -> None:
        makers = {**outer, **{name: node for node in graph.node for name in node.output}}
        index = 0
        for node in list(graph.node):
            for nested in onnx_graph.subgraphs(node):
                own = onnx_graph.defined(nested)
                self._replace(nested, _without(stored, own), _without(makers, own))
            chain = _chain(node, makers, stored)
            if chain is None:
                index += 1
                continue
            self._unused += chain.nodes
            del graph.node[index]
            for new in self._floats(chain, node.output[0], stored):
                graph.node.insert(index, new)
                index += 1

    def _floats(self, chain: _Chain, output: str, stored: _Stored) -> Iterator[NodeProto]:
        """The nodes of the float product."""
        x = chain.x
        if chain.transpose is not None:
            name = self._names.fresh(f"{x}_Transpose")
            yield helper.make_node("Transpose", [x], [name], name, perm=[1, 0])
            x = name
        operator = _FLOAT[chain.integer.op_type]
        node = helper.make_node(
            operator,
            [x, self._weight(chain, stored)],
            [output],
            self._names.fresh(f"{output}_{operator}"),
        )
        node.attribute.extend(chain.integer.attribute)
        yield node

    def _weight(self, chain: _Chain, stored: _Stored) -> str:
        """The name of the dequantized weight."""
        if chain.weight not in self._weights:
            codes = chain.weight[0]
            name = self._names.fresh(codes.removesuffix("_quantized"))
            is_matrix = chain.integer.op_type == "MatMulInteger"
            axis = len(stored[codes].dims) - 1 if is_matrix else 0
            inputs = [part for part in chain.weight if part]
            self._weights[chain.weight] = helper.make_node(
                "DequantizeLinear", inputs, [name], self._names.fresh(f"{name}_DequantizeLinear"),
                axis=axis,
            )  # fmt: skip
        return str(self._weights[chain.weight].output[0])

    def _remove_unused(self, model: ModelProto) -> bool:
        """Remove the nodes of chains that nothing reads any more; whether there were any."""
        read = onnx_graph.read_names(model)
        unused = {id(node): node for node in self._unused if read.isdisjoint(node.output)}
        self._unused = [node for node in self._unused if id(node) not in unused]
        for graph in onnx_graph.graphs(model.graph):
            for index in reversed(range(len(graph.node))):
                if id(graph.node[index]) in unused:  # identities hold while unused holds the nodes
                    del graph.node[index]
        return bool(unused)


def _chain(node: NodeProto, makers: _Makers, stored: _Stored) -> _Chain | None:
    """The integer product that a node completes, if there is one."""
    if not _is(node, "Mul"):
        return None
    for product, scale in (node.input, reversed(node.input)):
        cast, scales = makers.get(product), makers.get(scale)
        if not (_is(cast, "Cast") and _is(scales, "Mul")):
            continue
        integer = makers.get(cast.input[0])
        if _is(integer, *_FLOAT) and onnx_graph.attribute(cast, "to", 0) == TensorProto.FLOAT:
            return _product(integer, (cast, integer, scales), makers, stored)
    return None


def _product(
    integer: NodeProto, nodes: tuple[NodeProto, ...], makers: _Makers, stored: _Stored
) -> _Chain | None:
    """The chain that ends in those nodes, if it begins with DynamicQuantizeLinear."""
    codes, weight, zero_point, weight_zero_point = (*integer.input, "", "")[:4]
    transpose = makers.get(codes)
    if _is(transpose, "Transpose"):
        codes, nodes = transpose.input[0], (*nodes, transpose)
    else:
        transpose = None
    dynamic = makers.get(codes)
    scales = list(nodes[2].input)
    if not _is(dynamic, "DynamicQuantizeLinear") or dynamic.output[1] not in scales:
        return None
    scales.remove(dynamic.output[1])
    parts = (weight, scales[0], weight_zero_point)
    if [codes, zero_point] != [dynamic.output[0], dynamic.output[2]] or not _fits(
        integer, *(stored.get(part) if part else None for part in parts)
    ):
        return None
    return _Chain(dynamic.input[0], transpose, integer, parts, (*nodes, dynamic))


def _fits(
    integer: NodeProto,
    codes: TensorProto | None,
    scale: TensorProto | None,
    zero_point: TensorProto | None,
) -> bool:
    """Whether a weight in such parts is what DequantizeLinear gives along one axis."""
    if codes is None or scale is None or scale.data_type != TensorProto.FLOAT:
        return False
    if len(integer.input) > 3 and integer.input[3] and zero_point is None:
        return False
    rank = len(codes.dims)
    if rank < 2:
        return False
    singles: list[Shape] = [(), (1,)]
    if integer.op_type == "MatMulInteger":
        channels: Shape = (codes.dims[-1],)
    else:
        channels = (codes.dims[0], *(1 for _ in codes.dims[2:]))
    shape = tuple(scale.dims)
    if zero_point is not None and tuple(zero_point.dims) not in [*singles, shape]:
        return False
    return shape in [*singles, channels]


def _is(node: NodeProto | None, *operators: str) -> TypeGuard[NodeProto]:
    return node is not None and node.op_type in operators and node.domain in STANDARD


def _without(values: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}

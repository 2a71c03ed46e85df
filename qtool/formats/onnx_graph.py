"""Walking an ONNX model: nested graphs, tensors, names, and who reads a tensor how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

STANDARD = ("", "ai.onnx")

# Operators that work on codes, in any domain, and beginnings of the names of others.
_QUANTIZED = frozenset(
    (
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "MatMulIntegerToFloat",
        "ConvIntegerToFloat",
        "MatMulNBits",
        "MatMulBnb4",
        "MatMulFpQ4",
        "GatherBlockQuantized",
        "QAttention",
        "QGemm",
        "QMoE",
        "QEmbedLayerNormalization",
        "QuantizeBFP",
        "DequantizeBFP",
    )
)
_QUANTIZED_PREFIXES = ("QLinear", "QOrdered")

# How many nodes in a row axes() looks through; a bound, because a broken graph may have cycles.
_LOOK_THROUGH = 4

Axes = tuple[int, int]


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph nested in it."""
    yield graph
    for node in graph.node:
        for nested in subgraphs(node):
            yield from graphs(nested)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and every node of their nested graphs."""
    for node in nodes:
        yield node
        for nested in subgraphs(node):
            yield from all_nodes(nested.node)


def top_level_graphs(model: ModelProto) -> list[GraphProto]:
    """The model's graph and those of its training."""
    training = [(info.initialization, info.algorithm) for info in model.training_info]
    return [model.graph, *chain.from_iterable(training)]


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the model: of nested graphs, attributes, functions and training too."""
    roots = top_level_graphs(model)
    for graph in roots:
        yield from _initializers(graph)
    functions = [function.node for function in model.functions]
    for node in all_nodes(chain(*(graph.node for graph in roots), *functions)):
        for nested in subgraphs(node):
            yield from _initializers(nested)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
            sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for tensor in (*sparse, *attribute.sparse_tensors):
                yield from (tensor.values, tensor.indices)


def _initializers(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def read_names(model: ModelProto) -> set[str]:
    """The names of tensors that a node reads, or that a graph or function gives, anywhere."""
    roots = top_level_graphs(model)
    found = {name for function in model.functions for name in function.output}
    found.update(value.name for root in roots for value in root.output)
    functions = [function.node for function in model.functions]
    for node in all_nodes(chain(*(graph.node for graph in roots), *functions)):
        found.update(node.input)
        found.update(value.name for nested in subgraphs(node) for value in nested.output)
    return found


def names_of(model: ModelProto) -> Iterator[str]:
    """Every name, type of operator and domain of the model."""
    for entry in model.opset_import:
        yield entry.domain
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from _node_names(function.node)
    for root in top_level_graphs(model):
        yield from _node_names(root.node)
        for graph in graphs(root):
            yield graph.name
            for values in (graph.input, graph.output, graph.value_info, graph.initializer):
                yield from (value.name for value in values)
            yield from (sparse.values.name for sparse in graph.sparse_initializer)


def _node_names(nodes: Iterable[NodeProto]) -> Iterator[str]:
    for node in all_nodes(nodes):
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def constant_value(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node that holds one in its attribute `value`."""
    if node.op_type == "Constant" and node.domain in STANDARD:
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                value: TensorProto = attribute.t
                return value
    return None


def is_quantized(node: NodeProto) -> bool:
    """Whether the operator works on codes."""
    return node.op_type in _QUANTIZED or node.op_type.startswith(_QUANTIZED_PREFIXES)


def attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node."""
    for candidate in node.attribute:
        if candidate.name == name:
            return int(candidate.i)
    return default


class Names:
    """The names in use anywhere in a model; fresh() never returns one of them."""

    def __init__(self, model: ModelProto) -> None:
        self._used = set(names_of(model))

    def fresh(self, wanted: str) -> str:
        """wanted, or wanted_1, wanted_2, ...: the first that is free; it is taken from now on."""
        name = wanted
        numbers = count(1)
        while name in self._used:
            name = f"{wanted}_{next(numbers)}"
        self._used.add(name)
        return name


class Consumers:
    """Which nodes read each tensor of the top-level graph, nested graphs included."""

    def __init__(self, graph: GraphProto) -> None:
        self._readers: dict[str, list[tuple[NodeProto, int]]] = {}
        self._collect(graph, frozenset())

    def of(self, name: str) -> list[tuple[NodeProto, int]]:
        """(node, index of the input) for every use of the tensor."""
        return self._readers.get(name, [])

    def axes(self, name: str, rank: int) -> Axes | None:
        """(output axis, reduced axis) on which most of the consumers that know agree.

        Where no two agree, the first one decides. Transpose, Identity and Cast are looked through.
        """
        return self._elect(name, rank, _LOOK_THROUGH)

    def _elect(self, name: str, rank: int, depth: int) -> Axes | None:
        votes = [
            axes for node, index in self.of(name) if (axes := self._vote(node, index, rank, depth))
        ]
        return max(votes, key=votes.count) if votes else None

    def _collect(self, graph: GraphProto, hidden: frozenset[str]) -> None:
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name and name not in hidden:
                    self._readers.setdefault(name, []).append((node, index))
            for nested in subgraphs(node):
                own = {value.name for value in (*nested.input, *nested.initializer)}
                own.update(name for inner in nested.node for name in inner.output)
                self._collect(nested, hidden | own)

    def _vote(self, node: NodeProto, index: int, rank: int, depth: int) -> Axes | None:
        if node.op_type not in ("Identity", "Cast", "Transpose"):
            return _axes(node, index, rank)
        axes = self._elect(node.output[0], rank, depth - 1) if depth and node.output else None
        if axes is None or node.op_type != "Transpose":
            return axes
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        order = list(range(rank))[::-1] if order is None else order
        return (order[axes[0]], order[axes[1]]) if sorted(order) == list(range(rank)) else None


def _axes(node: NodeProto, index: int, rank: int) -> Axes | None:
    """(output axis, reduced axis) of a weight of that rank at that input of the node."""
    if rank < 2:
        return None
    operator = (node.op_type, index)
    if operator in (("MatMul", 1), ("FusedMatMul", 1), ("Gemm", 1)):
        transposed = attribute(node, "transB", 0)
        return (rank - 2, rank - 1) if transposed else (rank - 1, rank - 2)
    if operator in (("MatMul", 0), ("FusedMatMul", 0), ("Gemm", 0)):
        transposed = attribute(node, "transA", 0)
        return (rank - 1, rank - 2) if transposed else (rank - 2, rank - 1)
    if operator in (("Conv", 1), ("FusedConv", 1)):
        return (0, 1)
    if operator == ("ConvTranspose", 1):
        return (1, 0)
    if operator == ("Gather", 0) and attribute(node, "axis", 0) in (0, -rank):
        return (0, rank - 1)
    if node.op_type in ("LSTM", "GRU", "RNN") and index in (1, 2):
        return (1, 2)
    return None


def opset(imports: Sequence[onnx.OperatorSetIdProto]) -> onnx.OperatorSetIdProto | None:
    """The import of the standard's operators; where there are several the last one counts."""
    return next((entry for entry in reversed(imports) if entry.domain in STANDARD), None)

"""Walking an ONNX model: nested graphs, tensors and names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
)

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


def named_subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The graphs in a node's attributes, with the attribute's name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    return (graph for _, graph in named_subgraphs(node))


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
            yield from attribute_tensors(attribute)
    for function in model.functions:
        for attribute in function.attribute_proto:
            yield from attribute_tensors(attribute)


def homes(model: ModelProto) -> Iterator[TensorProto]:
    """The tensors of which onnx looks for external data."""
    for graph in graphs(model.graph):
        yield from graph.initializer
    functions = (function.node for function in model.functions)
    for node in all_nodes(chain(model.graph.node, *functions)):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t


def attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    """The tensors in one attribute; of sparse ones the values and indices."""
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


def training_reads(model: ModelProto) -> set[str]:
    """The names that training reads, gives or updates."""
    found: set[str] = set()
    for info in model.training_info:
        for graph in (info.initialization, info.algorithm):
            found.update(name for node in all_nodes(graph.node) for name in node.input)
            found.update(value.name for nested in graphs(graph) for value in nested.output)
        for binding in (*info.initialization_binding, *info.update_binding):
            found.update((binding.key, binding.value))
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
    """The tensor that a Constant node gives out of its attribute `value`."""
    if node.op_type == "Constant" and node.domain in STANDARD and node.output:
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                value: TensorProto = attribute.t
                return value
    return None


def stored(body: GraphProto | FunctionProto) -> Iterator[tuple[str, TensorProto]]:
    """(name, tensor) of the initializers of one graph, then of its Constant nodes."""
    if isinstance(body, GraphProto):
        for tensor in body.initializer:
            yield tensor.name, tensor
    for node in body.node:
        value = constant_value(node)
        if value is not None:
            yield node.output[0], value


def sparse(body: GraphProto | FunctionProto) -> Sequence[SparseTensorProto]:
    """The sparse initializers of one graph."""
    return body.sparse_initializer if isinstance(body, GraphProto) else ()


def is_quantized(node: NodeProto) -> bool:
    """Whether the operator works on codes."""
    return node.op_type in _QUANTIZED or node.op_type.startswith(_QUANTIZED_PREFIXES)


def attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node."""
    for candidate in node.attribute:
        if candidate.name == name:
            return int(candidate.i)
    return default


def integers(node: NodeProto, name: str) -> list[int] | None:
    """An attribute of integers of a node; None where it has none."""
    return next((list(found.ints) for found in node.attribute if found.name == name), None)


class Names:
    """Names in use; fresh() never returns one of them."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used = set(used)
        self._numbers: Counter[str] = Counter()

    @classmethod
    def of(cls, model: ModelProto) -> Names:
        """Those in use anywhere in a model."""
        return cls(names_of(model))

    def fresh(self, wanted: str) -> str:
        """wanted, or wanted_1, wanted_2, ...: the first that is free, which is in use from now."""
        name = wanted
        while name in self._used:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._used.add(name)
        return name


def opset(imports: Sequence[onnx.OperatorSetIdProto]) -> onnx.OperatorSetIdProto | None:
    """The import of the standard's operators; where there are several the last one counts."""
    return next((entry for entry in reversed(imports) if entry.domain in STANDARD), None)

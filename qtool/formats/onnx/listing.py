"""The tensors that an ONNX model stores, wherever they are, under names that are all different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto, TensorProto

from qtool.errors import FormatError
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Labels, Place, bodies


@dataclass(frozen=True, slots=True)
class Listing:
    """What a model stores.

    tensors: those that nodes can read, by label: initializers, then Constant nodes, body by body.
    places: where each of them is. hidden: the others, with what keeps them from being read.
    """

    bodies: list[Body]
    tensors: dict[str, TensorProto]
    places: dict[str, Place]
    hidden: dict[str, tuple[TensorProto, str]]


def listing(model: ModelProto, path: Path) -> Listing:
    """The tensors of a model at that path. Raises FormatError where a body has two of one name."""
    found = bodies(model)
    labels = Labels(found)
    places: dict[str, Place] = {}
    tensors: dict[str, TensorProto] = {}
    for body in found:
        names = Counter(name for name, _ in onnx_graph.stored(body.proto) if name)
        if names.total() != len(names):
            thing = f"{path}, tensor {names.most_common(1)[0][0]!r}"
            raise FormatError(thing, "is defined twice", "names must be unique")
        for name, tensor in body.stored.items():
            place = Place(body.number, name)
            label = labels.of(place)
            places[label], tensors[label] = place, tensor
    hidden = {}
    for wanted, tensor, obstacle in _hidden(model, found):
        if onnx_tensor.is_float(tensor):
            label = labels.of(wanted) if isinstance(wanted, Place) else labels.fresh(wanted)
            hidden[label] = (tensor, obstacle)
    return Listing(found, tensors, places, hidden)


def _hidden(model: ModelProto, found: list[Body]) -> Iterator[tuple[str | Place, TensorProto, str]]:
    """(wanted name, or place; tensor; why no node can read it as a plain one).

    Of sparse tensors: the values that are not zero. Single values in attributes do not count.
    """
    for body in found:
        for name, tensor in onnx_graph.stored(body.proto):
            if not name:
                yield body.path, tensor, "has no name"
        for sparse in onnx_graph.sparse(body.proto):
            name = sparse.values.name
            yield Place(body.number, name) if name else body.path, sparse.values, "is sparse"
        for node in body.proto.node:
            constant = onnx_graph.constant_value(node)
            for attribute in node.attribute:
                name = f"{body.path}{node.name or node.op_type}.{attribute.name}"
                why = f"is in the attribute {attribute.name} of {node.op_type}"
                for tensor in onnx_graph.attribute_tensors(attribute):
                    if tensor is not constant and list(tensor.dims) not in ([], [1]):
                        yield name, tensor, why
    for training in onnx_graph.top_level_graphs(model)[1:]:
        for graph in onnx_graph.graphs(training):
            for name, tensor in onnx_graph.stored(graph):
                yield f"training/{name}", tensor, "is a tensor of training"

"""Changing what the bodies of an ONNX model store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body


def copied(model: ModelProto, key: str, text: str | None) -> ModelProto:
    """A copy of a model whose metadata says text under a key; None: nothing at all."""
    copy = ModelProto()
    copy.CopyFrom(model)
    kept = [entry for entry in model.metadata_props if entry.key != key]
    del copy.metadata_props[:]
    copy.metadata_props.extend(kept)
    if text is not None:
        copy.metadata_props.add(key=key, value=text)
    return copy


def store(body: Body, tensors: Collection[TensorProto]) -> list[NodeProto]:
    """Make tensors initializers of a body; in functions, which have none, Constant nodes that are
    to be put into it."""
    if isinstance(body.proto, GraphProto) and not body.is_in_function:
        body.proto.initializer.extend(tensors)
        return []
    return [helper.make_node("Constant", [], [t.name], value=t) for t in tensors]


def held(found: Iterable[Body], names: Collection[str]) -> dict[str, TensorProto]:
    """The tensors of those names, each of which one of the bodies stores."""
    return {
        name: tensor
        for body in found
        for name, tensor in onnx_graph.stored(body.proto)
        if name in names
    }


def replace(body: Body, nodes: Mapping[str, Sequence[NodeProto]]) -> None:
    """Put nodes in the place of stored tensors, given by name; in that of initializers, which may
    be inputs too, before all other nodes."""
    graph = body.proto
    if isinstance(graph, GraphProto):
        _drop(graph.initializer, nodes)
        _drop(graph.input, nodes)
    rest = dict(nodes)
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if onnx_graph.constant_value(node) is not None and node.output[0] in rest:
            del graph.node[index]
            _insert(graph.node, index, rest.pop(node.output[0]))
    for made in reversed(rest.values()):
        _insert(graph.node, 0, made)


def exchange(body: Body, nodes: Mapping[int, Sequence[NodeProto]]) -> None:
    """Put nodes in the place of others, which are given by id(), all of them at once."""
    graph = body.proto
    before = list(graph.node)  # they keep their identities
    graph.node.extend(made for node in before for made in nodes.get(id(node), ()))
    new = iter(list(graph.node[len(before) :]))
    after: list[NodeProto] = []
    for node in before:
        made = nodes.get(id(node))
        after += [node] if made is None else islice(new, len(made))
    gone = [node for node in before if id(node) in nodes]
    places = {id(node): place for place, node in enumerate([*after, *gone])}
    graph.node.sort(key=lambda node: places[id(node)])  # in place: nothing is copied
    del graph.node[len(after) :]


def remove(body: Body, names: Collection[str]) -> None:
    """Drop tensors, what is declared of them, and the nodes that give them."""
    graph = body.proto
    if isinstance(graph, GraphProto):
        for values in (graph.initializer, graph.input, graph.value_info):
            _drop(values, names)
    for index in reversed(range(len(graph.node))):
        if graph.node[index].output and graph.node[index].output[0] in names:
            del graph.node[index]


def _insert(nodes: Any, index: int, made: Sequence[NodeProto]) -> None:
    for node in reversed(made):
        nodes.insert(index, node)


def _drop(values: Any, names: Collection[str]) -> None:
    for index in reversed(range(len(values))):
        if values[index].name in names:
            del values[index]

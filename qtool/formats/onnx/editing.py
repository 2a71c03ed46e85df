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
    rest, places = dict(nodes), {}
    found = list(graph.node)
    for node in reversed(found):
        if onnx_graph.constant_value(node) is not None and node.output[0] in rest:
            places[id(node)] = rest.pop(node.output[0])
    exchange(body, places, first=[node for made in rest.values() for node in made])


def exchange(
    body: Body, nodes: Mapping[int, Sequence[NodeProto]], first: Sequence[NodeProto] = ()
) -> None:
    """Put nodes in the place of others, which are given by id(), and first ones before all: all at
    once, as one by one takes time that grows with the square of their number."""
    graph = body.proto
    before = list(graph.node)  # they keep their identities
    graph.node.extend(first)
    graph.node.extend(made for node in before for made in nodes.get(id(node), ()))
    new = iter(list(graph.node[len(before) :]))
    after = list(islice(new, len(first)))
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
    found = list(graph.node)
    exchange(body, {id(node): () for node in found if node.output and node.output[0] in names})


def _drop(values: Any, names: Collection[str]) -> None:
    kept = sum(value.name not in names for value in values)
    if kept < len(values):
        values.sort(key=lambda value: value.name in names)
        del values[kept:]

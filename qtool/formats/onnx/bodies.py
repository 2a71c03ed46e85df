"""The graphs and functions of an ONNX model, and which tensor a name means in each of them.

Source: ONNX IR.md, Names Within a Graph; Graphs; Functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from qtool.formats.onnx import graph as onnx_graph


class Place(NamedTuple):
    """Where a tensor is: the number of its body, and its name there."""

    body: int
    name: str


class Body:
    """Nodes, and the tensors that they see: their own and those of the bodies around.

    number: place among bodies(). proto: the graph or function. path: how it is named from the
    model's graph on, "" for that one. node, outer: the node that holds a nested graph, and the body
    of that node. What is computed holds as long as proto is not changed.
    """

    def __init__(
        self,
        number: int,
        proto: GraphProto | FunctionProto,
        path: str,
        outer: Body | None = None,
        node: NodeProto | None = None,
    ) -> None:
        self.number = number
        self.proto = proto
        self.path = path
        self.outer = outer
        self.node = node

    @property
    def root(self) -> Body:
        """The model's graph or the function that it is in."""
        return self if self.outer is None else self.outer.root

    @property
    def is_in_function(self) -> bool:
        """Whether it is a function or a graph nested in one.

        Initializers there have no place for external data that onnx would look at.
        """
        return isinstance(self.root.proto, FunctionProto)

    @property
    def inputs(self) -> list[str]:
        return _names(self.proto.input)

    @property
    def outputs(self) -> list[str]:
        return _names(self.proto.output)

    @cached_property
    def stored(self) -> dict[str, TensorProto]:
        """The initializers, then the tensors of Constant nodes, by name."""
        return {name: tensor for name, tensor in onnx_graph.stored(self.proto) if name}

    @cached_property
    def defined(self) -> frozenset[str]:
        """The names of the tensors that it has itself."""
        made = (name for node in self.proto.node for name in node.output)
        sparse = (tensor.values.name for tensor in onnx_graph.sparse(self.proto))
        return frozenset((*self.inputs, *self.stored, *sparse, *made)) - {""}

    def place(self, name: str) -> Place | None:
        """The tensor that a name means here: the innermost one. None where there is none."""
        if name in self.defined:
            return Place(self.number, name)
        return None if self.outer is None else self.outer.place(name)


def bodies(model: ModelProto) -> list[Body]:
    """The model's graph, the graphs nested in it, then functions with theirs; training aside.

    The order follows the nodes that hold the graphs: other nodes may come and go.
    """
    found: list[Body] = []
    _collect(found, model.graph, "")
    names = [".".join(filter(None, (f.domain, f.name))) for f in model.functions]
    for function, label in zip(model.functions, _told_apart(names), strict=True):
        _collect(found, function, f"{label}/")
    return found


def _collect(
    found: list[Body],
    proto: GraphProto | FunctionProto,
    path: str,
    outer: Body | None = None,
    node: NodeProto | None = None,
) -> None:
    """Append a body and those nested in it."""
    body = Body(len(found), proto, path, outer, node)
    found.append(body)
    nodes = [n for n in proto.node if next(onnx_graph.subgraphs(n), None) is not None]
    labels = _told_apart([node.name or node.op_type for node in nodes])
    for inner, label in zip(nodes, labels, strict=True):
        for attribute, graph in onnx_graph.named_subgraphs(inner):
            _collect(found, graph, f"{path}{label}.{attribute}/", body, inner)


def _told_apart(labels: Sequence[str]) -> list[str]:
    """The labels, numbered where several are alike."""
    counts, numbers = Counter(labels), Counter[str]()
    found = []
    for label in labels:
        found.append(f"{label}#{numbers[label]}" if counts[label] > 1 else label)
        numbers[label] += 1
    return found


class Labels:
    """Names for tensors of all bodies, of which no two are alike.

    Tensors of the model's graph go by their own names, and so do those of other bodies where no
    other body has a tensor of that name. Else the body's path comes first:
    NODE.ATTRIBUTE/NAME for a nested graph, DOMAIN.FUNCTION/NAME for a function. A name that is
    taken nevertheless gets a number.
    """

    def __init__(self, found: Sequence[Body]) -> None:
        self._bodies = found
        self._counts = Counter(name for body in found for name in body.defined)
        self._names = onnx_graph.Names(found[0].defined)
        self._given: dict[Place, str] = {}

    def of(self, place: Place) -> str:
        """The name of a tensor, the same whenever it is asked for."""
        if place.body == 0:
            return place.name
        if place not in self._given:
            is_alone = self._counts[place.name] == 1
            path = "" if is_alone else self._bodies[place.body].path
            self._given[place] = self.fresh(path + place.name)
        return self._given[place]

    def fresh(self, wanted: str) -> str:
        """wanted, or with a number where that is taken; it is taken from now on."""
        return self._names.fresh(wanted)


def _names(values: Iterable[object]) -> list[str]:
    """Of a graph's values, or of a function's, which are names alone."""
    return [value if isinstance(value, str) else value.name for value in values]  # type: ignore[attr-defined]

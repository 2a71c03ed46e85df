"""Adding to what a node gives, for operators that have no input for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import NodeProto, helper

from qtool.formats.onnx.bodies import Body
from qtool.formats.onnx.graph import Names


def add_behind(node: NodeProto, addend: str, names: Names) -> NodeProto:
    """Rename the first output of a node; the Add that gives it with addend under its own name."""
    result = node.output[0]
    node.output[0] = names.fresh(f"{result}_without_bias")
    label = names.fresh(f"{node.name or result}_Add")
    return helper.make_node("Add", [node.output[0], addend], [result], label)


def insert_behind(found: Iterable[Body], added: Mapping[int, NodeProto]) -> None:
    """Put nodes behind others of the bodies, given by their identity."""
    for body in found:
        nodes = body.proto.node
        for index in reversed(range(len(nodes))):
            if (new := added.get(id(nodes[index]))) is not None:
                nodes.insert(index + 1, new)

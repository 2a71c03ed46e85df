"""Who reads a tensor of an ONNX model, and along which axes."""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from qtool.formats.onnx.graph import attribute, defined, subgraphs

# How many nodes in a row axes() looks through; a bound, because a broken graph may have cycles.
_LOOK_THROUGH = 4

Axes = tuple[int, int]


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
                self._collect(nested, hidden | defined(nested))

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

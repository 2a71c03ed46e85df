"""The integer products of an ONNX model that onnx_dynamic.py writes, whoever wrote them.

    Cast(MatMulInteger(x_q, w_q, x_z, w_z)) * (x_s * w_s), x_q, x_s, x_z = DynamicQuantizeLinear(x)

with w_q, w_s and w_z stored; ConvInteger likewise. The factors stand in any order, and a Transpose
may stand behind x_q.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

from onnx import NodeProto, TensorProto

from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body, Place
from qtool.formats.onnx.graph import STANDARD
from qtool.spec import Shape

OPERATORS = ("MatMulInteger", "ConvInteger")

Weight = tuple[Place, Place, Place | None]


@dataclass(frozen=True, slots=True)
class Chain:
    """An integer product: what it computes, and the nodes that compute it but for the last one.

    x: the tensor that is quantized. transpose: the node that transposes its codes, or None.
    weight: the codes, the scale and the zero point, None for none.
    """

    x: str
    transpose: NodeProto | None
    integer: NodeProto
    weight: Weight
    nodes: tuple[NodeProto, ...]


class Chains:
    """Finds the integer products in bodies; fixed: the stored tensors that callers may not set."""

    def __init__(self, found: Sequence[Body], fixed: Set[Place]) -> None:
        self._bodies = found
        self._fixed = fixed
        self._makers: dict[Place | None, NodeProto] = {
            Place(body.number, name): node
            for body in found
            for node in body.proto.node
            for name in node.output
        }

    def tensor(self, place: Place) -> TensorProto:
        """A stored tensor."""
        return self._bodies[place.body].stored[place.name]

    def _maker(self, name: str, body: Body) -> NodeProto | None:
        return self._makers.get(body.place(name))

    def of(self, node: NodeProto, body: Body) -> Chain | None:
        """The integer product that a node completes, if there is one."""
        if not _is(node, "Mul"):
            return None
        for product, scale in (node.input, reversed(node.input)):
            cast, scales = self._maker(product, body), self._maker(scale, body)
            if not (_is(cast, "Cast") and _is(scales, "Mul")):
                continue
            integer = self._maker(cast.input[0], body)
            result = onnx_graph.attribute(cast, "to", 0)
            if _is(integer, *OPERATORS) and result == TensorProto.FLOAT:
                return self._product(integer, (cast, integer, scales), body)
        return None

    def _product(
        self, integer: NodeProto, nodes: tuple[NodeProto, ...], body: Body
    ) -> Chain | None:
        """The chain that ends in those nodes, if it begins with DynamicQuantizeLinear."""
        codes, weight, zero_point, weight_zero_point = (*integer.input, "", "")[:4]
        transpose = self._maker(codes, body)
        if _is(transpose, "Transpose"):
            codes, nodes = transpose.input[0], (*nodes, transpose)
        else:
            transpose = None
        dynamic = self._maker(codes, body)
        scales = list(nodes[2].input)
        if not _is(dynamic, "DynamicQuantizeLinear") or dynamic.output[1] not in scales:
            return None
        scales.remove(dynamic.output[1])
        places = [body.place(name) for name in (weight, scales[0], weight_zero_point)]
        stored, scale, zero = (place if place in self._fixed else None for place in places)
        if stored is None or scale is None:
            return None
        tensors = self.tensor(stored), self.tensor(scale), self.tensor(zero) if zero else None
        is_dynamic = [codes, zero_point] == [dynamic.output[0], dynamic.output[2]]
        if not is_dynamic or not _fits(integer, *tensors):
            return None
        weight = (stored, scale, zero)
        return Chain(dynamic.input[0], transpose, integer, weight, (*nodes, dynamic))


def _fits(
    integer: NodeProto,
    codes: TensorProto,
    scale: TensorProto,
    zero_point: TensorProto | None,
) -> bool:
    """Whether a weight in such parts is what DequantizeLinear gives along one axis."""
    if scale.data_type != TensorProto.FLOAT:
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

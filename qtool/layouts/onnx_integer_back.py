"""Float products again from integer ones: the chain of onnx_dynamic.py, whoever wrote it.

    Cast(MatMulInteger(x_q, w_q, x_z, w_z)) * (x_s * w_s), x_q, x_s, x_z = DynamicQuantizeLinear(x)

becomes MatMul(x, w), w = DequantizeLinear(w_q, w_s, w_z); ConvInteger likewise becomes Conv. The
weights are what they were; activations are no longer rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

from onnx import ModelProto, NodeProto, TensorProto, helper

from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body, Place, bodies
from qtool.formats.onnx.graph import STANDARD, Names
from qtool.spec import Shape

_FLOAT = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}

_Weight = tuple[Place, Place, Place | None]


@dataclass(frozen=True, slots=True)
class _Chain:
    """An integer product: what it computes, and the nodes that compute it but for the last one.

    x: the tensor that is quantized. transpose: the node that transposes its codes, or None.
    weight: the codes, the scale and the zero point, None for none.
    """

    x: str
    transpose: NodeProto | None
    integer: NodeProto
    weight: _Weight
    nodes: tuple[NodeProto, ...]


class FloatProducts:
    """Puts float products in the place of the integer ones of a model that read stored codes.

    fixed: the stored tensors that callers may not set. A DequantizeLinear node for each weight
    comes first in the innermost of the bodies that hold its parts; their scales may have the shape
    that the product needed, and their zero points be single ones.
    """

    def __init__(self, model: ModelProto, fixed: Set[Place], names: Names) -> None:
        self._names = names
        self._bodies = bodies(model)
        self._fixed = fixed
        self._makers: dict[Place | None, NodeProto] = {
            Place(body.number, name): node
            for body in self._bodies
            for node in body.proto.node
            for name in node.output
        }
        self._weights: dict[_Weight, NodeProto] = {}
        self._unused: list[NodeProto] = []
        found = [
            (body, [(node, self._chain(node, body)) for node in body.proto.node])
            for body in self._bodies
        ]
        for body, chains in found:
            self._replace(body, chains)
        for weight, node in reversed(self._weights.items()):
            self._bodies[_innermost(weight)].proto.node.insert(0, node)
        while self._unused and self._remove_unused(model):
            pass

    def _replace(self, body: Body, chains: Sequence[tuple[NodeProto, _Chain | None]]) -> None:
        nodes, index = body.proto.node, 0
        for node, chain in chains:
            if chain is None:
                index += 1
                continue
            self._unused += chain.nodes
            del nodes[index]
            for new in self._floats(chain, node.output[0]):
                nodes.insert(index, new)
                index += 1

    def _floats(self, chain: _Chain, output: str) -> Iterator[NodeProto]:
        """The nodes of the float product."""
        x = chain.x
        if chain.transpose is not None:
            name = self._names.fresh(f"{x}_Transpose")
            yield helper.make_node("Transpose", [x], [name], name, perm=[1, 0])
            x = name
        operator = _FLOAT[chain.integer.op_type]
        node = helper.make_node(
            operator,
            [x, self._weight(chain)],
            [output],
            self._names.fresh(f"{output}_{operator}"),
        )
        node.attribute.extend(chain.integer.attribute)
        yield node

    def _weight(self, chain: _Chain) -> str:
        """The name of the dequantized weight."""
        if chain.weight not in self._weights:
            codes = chain.weight[0]
            name = self._names.fresh(codes.name.removesuffix("_quantized"))
            is_matrix = chain.integer.op_type == "MatMulInteger"
            axis = len(self._tensor(codes).dims) - 1 if is_matrix else 0
            inputs = [part.name for part in chain.weight if part]
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
        for body in self._bodies:
            nodes = body.proto.node
            for index in reversed(range(len(nodes))):
                if id(nodes[index]) in unused:  # identities hold while unused holds the nodes
                    del nodes[index]
        return bool(unused)

    def _tensor(self, place: Place) -> TensorProto:
        return self._bodies[place.body].stored[place.name]

    def _maker(self, name: str, body: Body) -> NodeProto | None:
        return self._makers.get(body.place(name))

    def _chain(self, node: NodeProto, body: Body) -> _Chain | None:
        """The integer product that a node completes, if there is one."""
        if not _is(node, "Mul"):
            return None
        for product, scale in (node.input, reversed(node.input)):
            cast, scales = self._maker(product, body), self._maker(scale, body)
            if not (_is(cast, "Cast") and _is(scales, "Mul")):
                continue
            integer = self._maker(cast.input[0], body)
            if _is(integer, *_FLOAT) and onnx_graph.attribute(cast, "to", 0) == TensorProto.FLOAT:
                return self._product(integer, (cast, integer, scales), body)
        return None

    def _product(
        self, integer: NodeProto, nodes: tuple[NodeProto, ...], body: Body
    ) -> _Chain | None:
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
        tensors = self._tensor(stored), self._tensor(scale), self._tensor(zero) if zero else None
        is_dynamic = [codes, zero_point] == [dynamic.output[0], dynamic.output[2]]
        if not is_dynamic or not _fits(integer, *tensors):
            return None
        weight = (stored, scale, zero)
        return _Chain(dynamic.input[0], transpose, integer, weight, (*nodes, dynamic))


def _innermost(weight: _Weight) -> int:
    """The number of the body that sees all parts of a weight."""
    return max(part.body for part in weight if part)


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

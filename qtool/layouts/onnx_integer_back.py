"""Float products again from integer ones, see onnx_chains.py: MatMul(x, w) with
w = DequantizeLinear(w_q, w_s, w_z), or Conv. The weights are what they were; activations are no
longer rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from onnx import ModelProto, NodeProto, helper

from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body, Place, bodies
from qtool.formats.onnx.graph import Names
from qtool.layouts.onnx_chains import Chain, Chains, Weight

_FLOAT = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


class FloatProducts:
    """Puts float products in the place of the integer ones of a model that read stored codes.

    fixed: the stored tensors that callers may not set. A DequantizeLinear node for each weight
    comes first in the innermost of the bodies that hold its parts; their scales may have the shape
    that the product needed, and their zero points be single ones. matrices: the names of those that
    matrices are multiplied with.
    """

    def __init__(self, model: ModelProto, fixed: Set[Place], names: Names) -> None:
        self._names = names
        self._bodies = bodies(model)
        self._chains = Chains(self._bodies, fixed)
        self._weights: dict[Weight, NodeProto] = {}
        self._unused: list[NodeProto] = []
        self.matrices: set[str] = set()
        found = [
            (body, [(node, self._chains.of(node, body)) for node in body.proto.node])
            for body in self._bodies
        ]
        for body, chains in found:
            self._replace(body, chains)
        for weight, node in reversed(self._weights.items()):
            self._bodies[_innermost(weight)].proto.node.insert(0, node)
        while self._unused and self._remove_unused(model):
            pass

    def _replace(self, body: Body, chains: Sequence[tuple[NodeProto, Chain | None]]) -> None:
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

    def _floats(self, chain: Chain, output: str) -> Iterator[NodeProto]:
        """The nodes of the float product."""
        x = chain.x
        if chain.transpose is not None:
            name = self._names.fresh(f"{x}_Transpose")
            yield helper.make_node("Transpose", [x], [name], name, perm=[1, 0])
            x = name
        operator = _FLOAT[chain.integer.op_type]
        weight = self._weight(chain)
        if operator == "MatMul":
            self.matrices.add(weight)
        node = helper.make_node(
            operator,
            [x, weight],
            [output],
            self._names.fresh(f"{output}_{operator}"),
        )
        node.attribute.extend(chain.integer.attribute)
        yield node

    def _weight(self, chain: Chain) -> str:
        """The name of the dequantized weight."""
        if chain.weight not in self._weights:
            codes = chain.weight[0]
            name = self._names.fresh(codes.name.removesuffix("_quantized"))
            is_matrix = chain.integer.op_type == "MatMulInteger"
            axis = len(self._chains.tensor(codes).dims) - 1 if is_matrix else 0
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


def _innermost(weight: Weight) -> int:
    """The number of the body that sees all parts of a weight."""
    return max(part.body for part in weight if part)

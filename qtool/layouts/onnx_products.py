"""The weights of an ONNX model that MatMul, Gemm and Conv multiply by, and how they read them.

Source: ONNX MatMul, Gemm, Conv, MatMulInteger 10, ConvInteger 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.consumers import Consumers, Use
from qtool.formats.onnx.graph import STANDARD
from qtool.spec import Shape

_INTEGER = {"MatMul": "MatMulInteger", "Gemm": "MatMulInteger", "Conv": "ConvInteger"}


@dataclass(frozen=True, slots=True)
class Product:
    """How the operators that multiply by a weight read it; shape: of the weight as it is stored.

    operator: "MatMulInteger" or "ConvInteger", which multiplies by its codes. output_axis: of the
    output channels. is_transposed: whether the operator takes the codes transposed.
    """

    shape: Shape
    operator: str
    output_axis: int
    is_transposed: bool

    @property
    def takes_zero_points(self) -> bool:
        """Whether onnxruntime takes one zero point per output channel.

        ConvInteger, and MatMulInteger of stacked matrices, take a single one there.
        """
        return self.operator == "MatMulInteger" and len(self.shape) == 2

    @property
    def codes_shape(self) -> Shape:
        """The shape of the codes as the operator takes them."""
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def channels_shape(self) -> Shape:
        """The shape of one scale per output channel, which broadcasts to the operator's result."""
        channels = self.shape[self.output_axis]
        if self.operator == "MatMulInteger":
            return (channels,)
        return (channels, *(1 for _ in self.shape[2:]))


def is_product(node: NodeProto) -> bool:
    """Whether the node is a MatMul, Gemm or Conv of the standard."""
    return (
        node.op_type in _INTEGER
        and node.domain in STANDARD
        and len(node.input) > 1
        and len(node.output) == 1
    )


def products(source: OnnxSource) -> dict[str, Product | str]:
    """How each stored tensor is multiplied by, or why its codes cannot take its place."""
    consumers = Consumers(source.bodies)
    training = onnx_graph.training_reads(source.model)
    found: dict[str, Product | str] = {}
    for label, place in source.places.items():
        shape = tuple(source.tensors[label].dims)
        uses = consumers.of(place)
        kinds = {product(use.node, shape) for use in uses if _multiplies(use)}
        others = sorted({use.node.op_type for use in uses if not _multiplies(use)})
        is_given = consumers.is_given(place) or (place.body == 0 and place.name in training)
        if not kinds:
            found[label] = "is the weight of no MatMul, Gemm or Conv"
        elif is_given:
            found[label] = "is an output too, which needs floats"
        elif others:
            found[label] = f"is read by {others[0]} too, which needs floats"
        elif len(kinds) > 1:
            found[label] = "is read along different axes"
        else:
            found[label] = kinds.pop()
    return found


def product(node: NodeProto, shape: Shape) -> Product:
    """How a node reads its weight of that shape."""
    operator, rank = _INTEGER[node.op_type], len(shape)
    is_transposed = node.op_type == "Gemm" and bool(onnx_graph.attribute(node, "transB", 0))
    if operator == "ConvInteger":
        output_axis = 0
    else:
        output_axis = max(rank - 2, 0) if is_transposed else rank - 1
    return Product(shape, operator, output_axis, is_transposed)


def _multiplies(use: Use) -> bool:
    """Whether the node multiplies by what it reads there."""
    return is_product(use.node) and use.index == 1

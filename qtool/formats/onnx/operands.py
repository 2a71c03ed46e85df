"""What the weights of an ONNX model are multiplied with.

Source: ONNX MatMul, Gemm, Conv, ConvTranspose; com.microsoft FusedMatMul, FusedConv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import axes as onnx_axes
from qtool.formats.onnx.bodies import Place
from qtool.formats.onnx.consumers import Consumers, Use
from qtool.formats.onnx.graph import attribute, integers
from qtool.spec import Shape

_MATRIX = ("MatMul", "FusedMatMul", "Gemm")


@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution moves over its input: one number per spatial axis each.

    kernel: sizes. pads: zeros before and after every axis; None: as auto_pad says. groups: the
    parts of the input channels, each of which meets other kernels.
    """

    kernel: Shape
    strides: Shape
    dilations: Shape
    pads: tuple[tuple[int, int], ...] | None
    auto_pad: str
    groups: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the model's graph that a weight is multiplied with.

    axis: of the tensor, the one that is summed over; with a window, that of the input channels.
    features: how many products are summed: of a convolution, channels of a group times kernel.
    """

    tensor: str
    axis: int
    features: int
    window: Window | None = None


class Operands:
    """Finds what the stored tensors of a model are multiplied with."""

    def __init__(self, source: OnnxSource) -> None:
        self._source = source
        self._consumers = Consumers(source.bodies)
        self._stored = set(source.places.values())

    def of(self, label: str) -> list[Operand] | str:
        """The operands of all nodes that multiply by a stored tensor, or why they are not known.

        Identity, Cast, Transpose, Reshape and the like between the two are looked through.
        """
        whole = tuple(self._source.tensors[label].dims)
        products: dict[tuple[Operand, Shape], None] = {}
        for use, shape, origins in self._uses(self._source.places[label], whole):
            found = self._product(use, whole, shape, origins)
            if isinstance(found, str):
                return found
            if found is not None:
                products[found] = None
        if not products:
            return "is multiplied by no MatMul, Gemm or Conv"
        if len({axes for _, axes in products}) > 1:
            return "is read along different axes"
        return [operand for operand, _ in products]

    def _uses(
        self, place: Place, whole: Shape
    ) -> Iterator[tuple[Use, Shape, tuple[int | None, ...]]]:
        """The nodes that read a weight, laid out anew or not: with the shape in which they see it
        and, for each axis of that, the axis of the weight that it was."""
        unmoved: tuple[int | None, ...] = tuple(range(len(whole)))
        first = (place, whole, unmoved)
        waiting, seen = [first], {first}
        while waiting:
            place, shape, origins = waiting.pop()
            for use in self._consumers.of(place):
                moved = None
                if use.index == 0 and use.node.output:
                    moved = onnx_axes.moved(use.node, shape, self._consumers.integers_in(use.body))
                if moved is None:
                    yield use, shape, origins
                    continue
                new, back = moved
                was = tuple(None if axis is None else origins[axis] for axis in back)
                result = (Place(use.body.number, use.node.output[0]), new, was)
                if result not in seen:
                    seen.add(result)
                    waiting.append(result)

    def _product(
        self, use: Use, whole: Shape, shape: Shape, origins: Sequence[int | None]
    ) -> tuple[Operand, Shape] | str | None:
        """The other operand of a node that multiplies, with the weight's axes that are summed over,
        or why it is not known; None for a node that does not multiply."""
        node = use.node
        axes = onnx_axes.operator_axes(node, use.index, shape)
        if axes is None or node.op_type == "Gather":
            return None
        if use.body.number != 0:
            return f"is read by {node.op_type} in a nested graph or a function"
        found = _operand(node, use.index, shape)
        if isinstance(found, str):
            return found
        if use.body.place(found.tensor) in self._stored:
            return "is multiplied with a stored tensor"
        reduced = axes[1]
        if found.window is not None and shape == whole and origins == tuple(range(len(whole))):
            return found, tuple(range(1, len(whole)))
        origin = None if reduced is None else origins[reduced]
        if found.window is not None or origin is None or whole[origin] != found.features:
            return f"is laid out anew before {node.op_type} reads it"
        return found, (origin,)


def _operand(node: NodeProto, index: int, shape: Shape) -> Operand | str:
    """What a node multiplies its input of that index with, which has that shape."""
    if node.op_type in _MATRIX and not any(
        attribute(node, name, 0) for name in ("transBatchA", "transBatchB")
    ):
        is_transposed = attribute(node, "transA" if index else "transB", 0)
        axis = -1 if bool(index) != bool(is_transposed) else -2
        own = attribute(node, "transB" if index else "transA", 0)
        features = shape[-2] if bool(index) != bool(own) else shape[-1]
        return Operand(node.input[1 - index], axis, features)
    groups = attribute(node, "group", 1)
    if node.op_type in ("Conv", "FusedConv"):
        return Operand(node.input[0], 1, math.prod(shape[1:]), _window(node, shape, groups))
    if node.op_type == "ConvTranspose" and groups == 1:
        return Operand(node.input[0], 1, shape[0])
    return f"is read by {node.op_type}, whose inputs are not captured"


def _window(node: NodeProto, shape: Shape, groups: int) -> Window:
    kernel = shape[2:]
    ones = [1] * len(kernel)
    pads = integers(node, "pads") or [0] * 2 * len(kernel)
    auto = next((a.s.decode() for a in node.attribute if a.name == "auto_pad"), "NOTSET")
    return Window(
        kernel,
        tuple(integers(node, "strides") or ones),
        tuple(integers(node, "dilations") or ones),
        tuple(zip(pads[: len(kernel)], pads[len(kernel) :], strict=True))
        if auto == "NOTSET"
        else None,
        auto,
        groups,
    )

"""Who reads a tensor of an ONNX model, and along which axes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from onnx import FunctionProto, NodeProto, TensorProto, numpy_helper

from qtool.formats.onnx import axes as onnx_axes
from qtool.formats.onnx.axes import Axes
from qtool.formats.onnx.bodies import Body, Place
from qtool.spec import Shape

# How many nodes in a row axes() looks through.
_LOOK_THROUGH = 32
# Tensors of more elements are no shapes.
_LARGE = 64

# What has been found for a tensor of that shape; None where the search is still under way, as in
# the circles of a broken graph.
_Known = dict[tuple[Place, Shape], Axes | None]


@dataclass(frozen=True, slots=True)
class Use:
    """A node of a body that reads a tensor, as its input of that index."""

    node: NodeProto
    index: int
    body: Body


class Consumers:
    """Which nodes read each tensor of the bodies."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self._bodies = bodies
        self._uses: dict[Place, list[Use]] = {}
        # Of the outputs of bodies: the places of the same values outside.
        self._given: dict[Place, list[Place]] = {}
        self._functions = {
            (body.proto.domain, body.proto.name, body.proto.overload): body
            for body in bodies
            if isinstance(body.proto, FunctionProto)
        }
        for body in bodies:
            self._collect(body)

    def of(self, place: Place) -> list[Use]:
        """Every use of a tensor, by nodes of nested graphs too."""
        return self._uses.get(place, [])

    def is_given(self, place: Place) -> bool:
        """Whether the tensor is an output of its body."""
        return place in self._given

    def is_read(self, place: Place) -> bool:
        """Whether a node reads the tensor, or it is an output."""
        return place in self._uses or self.is_given(place)

    def axes(self, place: Place, shape: Shape) -> Axes | None:
        """(output axis, reduced axis) on which most of the consumers that know agree.

        Where no two agree, the first one decides. Nodes that lay the tensor out anew are looked
        through, as are the calls of functions and the branches that give it.
        """
        return self._elect(place, shape, _LOOK_THROUGH, {})

    def _elect(self, place: Place, shape: Shape, depth: int, known: _Known) -> Axes | None:
        if depth < 0 or (place, shape) in known:
            return known.get((place, shape))
        known[place, shape] = None
        votes = [self._vote(use, shape, depth, known) for use in self.of(place)]
        votes += [self._elect(p, shape, depth - 1, known) for p in self._given.get(place, [])]
        valid = [axes for axes in votes if axes is not None]
        known[place, shape] = Counter(valid).most_common(1)[0][0] if valid else None
        return known[place, shape]

    def _vote(self, use: Use, shape: Shape, depth: int, known: _Known) -> Axes | None:
        node, index, body = use.node, use.index, use.body
        function = self._functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            inside = [Place(function.number, name) for name in function.inputs[index : index + 1]]
            return self._elect(inside[0], shape, depth - 1, known) if inside else None
        moved = onnx_axes.moved(node, shape, self.integers_in(body))
        if moved is None or index:
            return onnx_axes.operator_axes(node, index, shape)
        if not node.output:
            return None
        new, origins = moved
        result = Place(body.number, node.output[0])
        return onnx_axes.before(self._elect(result, new, depth - 1, known), origins)

    def integers_in(self, body: Body) -> onnx_axes.Integers:
        """What finds the values of small stored tensors that nodes of a body see."""
        return lambda name: self._integers(name, body)

    def _collect(self, body: Body) -> None:
        for node in body.proto.node:
            for index, name in enumerate(node.input):
                place = body.place(name)
                if place is not None:
                    self._uses.setdefault(place, []).append(Use(node, index, body))
        for index, name in enumerate(body.outputs):
            place = body.place(name)
            if place is not None:
                self._given.setdefault(place, []).extend(_outside(body, index))

    def _integers(self, name: str, body: Body) -> list[int] | None:
        place = body.place(name)
        tensor = None if place is None else self._bodies[place.body].stored.get(place.name)
        if tensor is None or tensor.data_type != TensorProto.INT64:
            return None
        if math.prod(tensor.dims) > _LARGE or tensor.data_location == TensorProto.EXTERNAL:
            return None
        with suppress(ValueError, TypeError):  # of a tensor that is not what it says
            return [int(value) for value in numpy_helper.to_array(tensor).reshape(-1)]
        return None


def _outside(body: Body, index: int) -> Iterator[Place]:
    """The output of an If for that of one of its branches; of other nodes the shapes differ."""
    node, outer = body.node, body.outer
    if node is not None and outer is not None and node.op_type == "If" and index < len(node.output):
        yield Place(outer.number, node.output[index])

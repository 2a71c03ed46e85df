"""The DequantizeLinear nodes of an ONNX model that dequantize stored codes.

Source: ONNX DequantizeLinear, versions 10 to 28.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from qtool.dtypes import DType, resolve
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Place
from qtool.formats.onnx.graph import STANDARD
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape
from qtool.tensor import Codes, dequantize

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Dequantizer:
    """A DequantizeLinear node of a body whose codes and zero point the source stores.

    inputs: their labels, and that of the scale; "" for none. scale: the node that gives the scale,
    where that is quantized itself; the label is "" then.
    """

    source: OnnxSource
    node: NodeProto
    body: Body
    inputs: Sequence[str]
    scale: Dequantizer | None = None

    @property
    def place(self) -> Place:
        """Where the result is."""
        return Place(self.body.number, self.node.output[0])

    @property
    def dtype(self) -> DType:
        """The type of the codes."""
        label = self.inputs[0]
        return onnx_tensor.dtype_of(self.source.tensors[label], self.source.thing(label))

    @property
    def shape(self) -> Shape:
        return tuple(self.source.tensors[self.inputs[0]].dims)

    @property
    def granularity(self) -> Granularity:
        """Of the scale. Raises SpecError for an axis that the codes do not have."""
        axis = onnx_graph.attribute(self.node, "axis", 1)
        block_size = onnx_graph.attribute(self.node, "block_size", 0)
        if block_size:
            return Blocked(axis, block_size).resolve(self.shape)
        stored = self.source.tensors
        scale = self.scale.shape if self.scale else tuple(stored[self.inputs[1]].dims)
        return PerTensor() if scale in ((), (1,)) else PerAxis(axis).resolve(self.shape)

    @property
    def result(self) -> int:
        """The element type of the result, as ONNX numbers it."""
        given = onnx_graph.attribute(self.node, "output_dtype", 0)
        scale = self.scale.result if self.scale else self.source.tensors[self.inputs[1]].data_type
        return given or scale

    @contextmanager
    def codes(self) -> Iterator[Codes]:
        """What the node dequantizes."""
        scale = self.scale.values() if self.scale else self.source.read(self.inputs[1])
        zero_point, granularity = self._zero_point(), self.granularity
        if isinstance(granularity, PerAxis):  # products may need other shapes: see FloatProducts
            scale = scale.reshape(-1)
            if zero_point is not None and zero_point.size == 1:
                zero_point = np.broadcast_to(zero_point.reshape(()), scale.shape)
        with self.source.stored(self.inputs[0]).reading() as read:
            yield Codes(read, self.dtype, self.shape, scale, zero_point, granularity)

    def values(self) -> Array:
        """The result, in memory."""
        codes, scale = (self.source.read(label) for label in self.inputs[:2])
        return dequantize(codes, scale, self._zero_point(), self.granularity, resolve(self.result))

    def _zero_point(self) -> Array | None:
        rest = self.inputs[2:]
        zero_point = self.source.read(rest[0]) if any(rest) else None
        if self.dtype.name == "int32" and zero_point is not None and not zero_point.any():
            return None  # int32 has none, but some exporters write zeros
        return zero_point


def dequantizers(found: Sequence[Body], source: OnnxSource) -> list[Dequantizer]:
    """Those in the bodies of the source's model, or of a copy, in the order of the nodes.

    Each reads what is stored in its own body or one around, except for a scale that another of
    them gives, which is stored altogether.
    """
    labels = {place: label for label, place in source.places.items()}
    candidates: list[Dequantizer] = []
    for body in found:
        for node in body.proto.node:
            if node.op_type == "DequantizeLinear" and node.domain in STANDARD:
                places = [body.place(name) for name in node.input]
                inputs = [labels.get(place, "") if place else "" for place in places]
                if _is_complete(node) and source.overridable.isdisjoint(inputs):
                    candidates.append(Dequantizer(source, node, body, inputs))
    stored = {c.place: c for c in candidates if not _missing(c)}
    made = []
    for candidate in candidates:
        node, body = candidate.node, candidate.body
        scale = body.place(node.input[1])
        if not _missing(candidate):
            made.append(candidate)
        elif _missing(candidate) == [1] and scale in stored:
            made.append(Dequantizer(source, node, body, candidate.inputs, stored[scale]))
    return made


def _is_complete(node: NodeProto) -> bool:
    """Whether codes, scale and result have names."""
    return len(node.input) > 1 and len(node.output) > 0 and all((*node.input[:2], *node.output[:1]))


def _missing(candidate: Dequantizer) -> list[int]:
    """Which of the inputs that the node names are not stored."""
    named = enumerate(zip(candidate.node.input, candidate.inputs, strict=True))
    return [index for index, (name, label) in named if name and not label]

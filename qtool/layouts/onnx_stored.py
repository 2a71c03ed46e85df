"""The weights that an ONNX model stores in codes: what its operators make of them.

Source: ONNX DequantizeLinear 25, MatMulInteger 10, ConvInteger 10; onnxruntime's
docs/ContribOperators.md; what onnxruntime 1.32 refuses, by running it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from qtool.dtypes import DTYPES, DType
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Place
from qtool.formats.onnx.graph import STANDARD
from qtool.layouts.onnx_chains import OPERATORS, Chains
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape, describe

# Operator: its domains, and which inputs are the codes, the scale (-1: it is found behind the
# operator) and the zero point.
_INPUTS: Mapping[str, tuple[tuple[str, ...], int, int, int]] = {
    "DequantizeLinear": (STANDARD, 0, 1, 2),
    "MatMulNBits": (("com.microsoft",), 1, 2, 3),
    "GatherBlockQuantized": (("com.microsoft",), 0, 2, 3),
    "MatMulInteger": (STANDARD, 1, -1, 3),
    "ConvInteger": (STANDARD, 1, -1, 3),
}
_PLAIN, _SHIFTED = "code * scale", "(code - zero_point) * scale"


@dataclass(frozen=True)
class StoredWeight:
    """Codes that a model stores, by their label, and what the operator that reads them says.

    dtype: of a code. shape: of the weight as the operator multiplies, gathers or gives it.
    scale: its label, "" where it is not stored as it is.
    """

    label: str
    operator: str
    dtype: DType
    shape: Shape
    granularity: Granularity | None
    scale: str
    scale_dtype: DType | None
    zero_point: bool
    equation: str
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """How it is quantized, as plain data."""
        granularity = describe(self.granularity or PerTensor())
        return {
            "operator": self.operator,
            "layout": self.operator,
            "dtype": self.dtype.name,
            **(granularity if self.granularity else dict.fromkeys(granularity)),
            "scale_dtype": self.scale_dtype.name if self.scale_dtype else None,
            "zero_point": self.zero_point,
            "equation": self.equation,
            "problems": list(self.problems),
        }


class StoredWeights:
    """Finds the weights that a model stores in codes; each counts once, where it is read first."""

    def __init__(self, source: OnnxSource) -> None:
        self._source = source
        self._labels = {place: label for label, place in source.places.items()}
        fixed = {p for label, p in source.places.items() if label not in source.overridable}
        chains = Chains(source.bodies, fixed)
        products = (chains.of(n, body) for body in source.bodies for n in body.proto.node)
        self._scales = {chain.weight[0]: chain.weight[1] for chain in products if chain}
        self.found: dict[str, StoredWeight] = {}
        for body in source.bodies:
            for node in body.proto.node:
                weight = self._weight(node, body)
                if weight is not None:
                    self.found.setdefault(weight.label, weight)

    def _weight(self, node: NodeProto, body: Body) -> StoredWeight | None:
        domains, codes, scale, zero = _INPUTS.get(node.op_type, ((), 0, 0, 0))
        if node.domain not in domains:
            return None
        names = [*node.input, "", "", ""]
        place = body.place(names[codes])
        behind = self._scales.get(place) if place is not None else None
        labels = [
            self._label(place),
            self._label(behind if scale < 0 else body.place(names[scale])),
            self._label(body.place(names[zero])),
        ]
        if not labels[0]:
            return None
        parts = _Parts(self._source, node, *labels)
        granularity, has_zero_point = parts.granularity(), bool(names[zero])
        return StoredWeight(
            labels[0], node.op_type, parts.dtype, parts.shape(), granularity, parts.scale,
            parts.scale_dtype, has_zero_point, parts.equation(has_zero_point=has_zero_point),
            tuple(_problems(node, parts, granularity)),
        )  # fmt: skip

    def _label(self, place: Place | None) -> str:
        return self._labels.get(place, "") if place is not None else ""


class _Parts:
    """The tensors of a weight, by their labels ("" for none), and the node that reads them."""

    def __init__(
        self, source: OnnxSource, node: NodeProto, codes: str, scale: str, zero_point: str
    ) -> None:
        self._source, self._node = source, node
        self._codes, self.scale, self._zero_point = codes, scale, zero_point
        self._bits = onnx_graph.attribute(node, "bits", 4)
        self._block_size = onnx_graph.attribute(node, "block_size", 0)
        self._stored = self._dtype_of(codes)
        self._is_packed = (
            node.op_type in ("MatMulNBits", "GatherBlockQuantized")
            and self._stored.name == "uint8"
            and 1 <= self._bits <= 8
        )

    @property
    def dtype(self) -> DType:
        return DTYPES.get(f"uint{self._bits}", self._stored) if self._is_packed else self._stored

    @property
    def scale_dtype(self) -> DType | None:
        return self._dtype_of(self.scale) if self.scale else None

    def shape(self) -> Shape:
        """Of the weight."""
        stored = self._shape_of(self._codes)
        if self._node.op_type == "MatMulNBits":
            return tuple(max(onnx_graph.attribute(self._node, n, 0), 0) for n in ("K", "N"))
        if self._is_packed and stored:
            return (*stored[:-1], stored[-1] * 8 // self._bits)
        return stored

    def granularity(self) -> Granularity | None:
        """Of the scale; None where that is not stored, or fits in no way."""
        rank, operator = len(self.shape()), self._node.op_type
        if operator == "MatMulNBits":
            return Blocked(0, self._block_size) if self._block_size > 0 else None
        axis = onnx_graph.attribute(self._node, "axis", 1)
        if operator == "GatherBlockQuantized":
            axis = onnx_graph.attribute(self._node, "quantize_axis", 1)
        elif operator == "MatMulInteger":
            axis = rank - 1
        elif operator == "ConvInteger":
            axis = 0
        axis = axis + rank if axis < 0 else axis
        if self._block_size > 0:
            return Blocked(axis, self._block_size)
        if not self.scale:
            return None
        return PerTensor() if self._shape_of(self.scale) in ((), (1,)) else PerAxis(axis)

    def equation(self, *, has_zero_point: bool) -> str:
        """What a code stands for."""
        if has_zero_point:
            return _SHIFTED
        return f"(code - {1 << (self._bits - 1)}) * scale" if self._is_packed else _PLAIN

    def has_channel_zero_points(self) -> bool:
        """Whether there are several zero points."""
        return bool(self._zero_point) and math.prod(self._shape_of(self._zero_point)) > 1

    def _dtype_of(self, label: str) -> DType:
        return onnx_tensor.dtype_of(self._source.tensors[label], self._source.thing(label))

    def _shape_of(self, label: str) -> Shape:
        return tuple(self._source.tensors[label].dims)


def _problems(node: NodeProto, parts: _Parts, granularity: Granularity | None) -> Iterator[str]:
    """What onnxruntime is known to refuse."""
    operator, dtype, scale = node.op_type, parts.dtype, parts.scale_dtype
    if operator == "DequantizeLinear":
        small = dtype.kind == "float" and dtype.bits < 8
        if small or (scale is not None and scale.name == "float8e8m0"):
            what = f"{dtype} codes" if small else f"{scale} scales"
            yield f"onnxruntime has no CPU kernel for {operator} with {what}"
    elif operator in OPERATORS:
        one = operator == "ConvInteger" or len(parts.shape()) > 2
        if one and parts.has_channel_zero_points():
            yield f"several zero points, but onnxruntime takes one in such a {operator}"
    else:
        yield from _block_problems(node, granularity)


def _block_problems(node: NodeProto, granularity: Granularity | None) -> Iterator[str]:
    """What onnxruntime's own operators do not take."""
    operator, bits = node.op_type, onnx_graph.attribute(node, "bits", 4)
    if bits not in (2, 4, 8):
        yield f"codes of {bits} bits, but onnxruntime takes 2, 4 and 8 in {operator}"
    if not isinstance(granularity, Blocked):
        return
    size = granularity.block_size
    if size < 16 or size & (size - 1):
        yield f"blocks of {size}, but onnxruntime takes powers of two from 16 on in {operator}"
    elif operator == "MatMulNBits" and bits == 2 and size > 256:
        yield f"blocks of {size}, but onnxruntime takes 256 at most for 2 bits in {operator}"

"""What the MatMulNBits and GatherBlockQuantized nodes of a model read; see nbits.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Place
from qtool.formats.onnx.consumers import Consumers, Use
from qtool.formats.onnx.graph import attribute
from qtool.layouts.nbits import BITS, DOMAIN, GATHER, MATMUL
from qtool.layouts.stored import flipped
from qtool.packing import unpack
from qtool.spec import Blocked, Reader, Shape
from qtool.tensor import Codes


@dataclass(frozen=True, slots=True)
class NBitsWeight:
    """A weight as it is stored.

    operator: that reads it. codes, scales, zero_points: their labels; no zero points: "".
    dtype: of the codes; is_typed: they are stored in that type, not in uint8.
    stored, granularity: shape of the codes and their blocks. shape: of the weight; of MatMulNBits
    [K, N], whose codes are [N, K] with K padded to whole blocks.
    """

    operator: str
    codes: str
    scales: str
    zero_points: str
    dtype: DType
    is_typed: bool
    stored: Shape
    granularity: Blocked
    shape: Shape

    @property
    def blocks(self) -> Blocked:
        """The blocks of the weight."""
        axis = 0 if self.operator == MATMUL else self.granularity.axis
        return Blocked(axis, self.granularity.block_size)

    @contextmanager
    def reading(self, source: OnnxSource) -> Iterator[Codes]:
        """The codes and their parameters."""
        shape = self.granularity.scale_shape(self.stored)
        zero_point = None
        if self.zero_points:
            zero_point = source.read(self.zero_points)
            if not self.is_typed:
                rows = zero_point.reshape(math.prod(shape[:-1]), -1)
                bits = self.dtype.bits
                codes = unpack(rows.reshape(-1), self.dtype, (len(rows), rows.shape[1] * 8 // bits))
                zero_point = np.ascontiguousarray(codes[:, : shape[-1]]).reshape(shape)
        scale = source.read(self.scales).reshape(shape)
        with source.stored(self.codes).reading() as read:
            dtype = self.dtype
            if not self.is_typed and zero_point is None:
                read, dtype = _less_middle(read, dtype.bits), DTYPES[f"int{dtype.bits}"]
            yield Codes(read, dtype, self.stored, scale, zero_point, self.granularity)


def weights(source: OnnxSource, found: Sequence[Body]) -> Iterator[tuple[Use, NBitsWeight]]:
    """Every use of a weight that a model stores; found: its bodies, or those of a copy.

    What qtool does not know is left out: g_idx, prepacked weights, zero points in floats, and
    codes of other types.
    Raises FormatError where the tensors of a weight do not fit its operator.
    """
    labels = {
        place: label for label, place in source.places.items() if label not in source.overridable
    }
    consumers = Consumers(found)
    for place, label in labels.items():
        for use in consumers.of(place):
            read = _READERS.get((use.node.domain, use.node.op_type, use.index))
            if read is None:
                continue
            scales, zeros = [*use.node.input[2:4], "", ""][:2]
            parts = (label, _label(scales, use, labels), _label(zeros, use, labels))
            is_stored = bool(parts[1]) and bool(parts[2]) == bool(zeros)
            if is_stored and (weight := read(use.node, parts, source)) is not None:
                yield use, weight


def _label(name: str, use: Use, labels: Mapping[Place, str]) -> str:
    """Of the tensor that a name means to a node; "" where the model does not store it."""
    place = use.body.place(name)
    return "" if place is None else labels.get(place, "")


_Parts = tuple[str, str, str]


def _matmul(node: NodeProto, parts: _Parts, source: OnnxSource) -> NBitsWeight | None:
    bits, block_size = attribute(node, "bits", 4), attribute(node, "block_size", 0)
    depth, count = attribute(node, "K", 0), attribute(node, "N", 0)
    is_known = bits in BITS and block_size > 0 and depth >= 0 and count >= 0
    if not is_known or any(node.input[4:5]) or attribute(node, "weight_prepacked", 0):
        return None
    stored = (count, -(-depth // block_size) * block_size)
    return _checked(
        NBitsWeight(
            MATMUL, *parts, DTYPES[f"uint{bits}"], False, stored, Blocked(1, block_size),
            (depth, count),
        ), source,
    )  # fmt: skip


def _gather(node: NodeProto, parts: _Parts, source: OnnxSource) -> NBitsWeight | None:
    dtype, shape = _dtype(parts[0], source), tuple(source.tensors[parts[0]].dims)
    axis, block_size = attribute(node, "quantize_axis", 1), attribute(node, "block_size", 128)
    if block_size < 1 or not -len(shape) <= axis < len(shape):
        return None
    is_typed = dtype.name != "uint8"
    if not is_typed:
        bits = attribute(node, "bits", 4)
        if bits not in BITS or axis % len(shape) != len(shape) - 1:
            return None
        dtype, shape = DTYPES[f"uint{bits}"], (*shape[:-1], shape[-1] * 8 // bits)
    granularity = Blocked(axis % len(shape), block_size)
    return _checked(
        NBitsWeight(GATHER, *parts, dtype, is_typed, shape, granularity, shape), source
    )  # fmt: skip


_READERS = {(DOMAIN, MATMUL, 1): _matmul, (DOMAIN, GATHER, 0): _gather}


def _checked(weight: NBitsWeight, source: OnnxSource) -> NBitsWeight | None:
    """The weight, or None where its tensors are of types that qtool does not know."""
    groups = weight.granularity.scale_shape(weight.stored)
    stored = weight.dtype if weight.is_typed else DTYPES["uint8"]
    found = [_dtype(name, source) for name in (weight.codes, weight.zero_points) if name]
    if weight.dtype.name not in ("int4", "uint4") and weight.is_typed:
        return None
    if any(dtype != stored for dtype in found) or _dtype(weight.scales, source).bits < 16:
        return None
    sizes = {weight.codes: math.prod(weight.stored), weight.scales: math.prod(groups)}
    if weight.zero_points:
        sizes[weight.zero_points] = math.prod(groups)
    if not weight.is_typed:
        bits = weight.dtype.bits
        sizes[weight.codes] = math.prod(weight.stored) * bits // 8
        if weight.zero_points:
            sizes[weight.zero_points] = math.prod(groups[:-1]) * -(-groups[-1] * bits // 8)
    for name, needed in sizes.items():
        size = math.prod(source.tensors[name].dims)
        if size != needed:
            raise FormatError(
                source.thing(name), f"holds {size} elements, its {weight.operator} needs {needed}"
            )
    return weight


def _less_middle(read: Reader, bits: int) -> Reader:
    """A Reader of codes less 2^(bits-1), which are signed."""

    def read_signed(start: int, out: NDArray[Any]) -> None:
        read(start, out)
        out[:] = flipped(bits)(out)

    return read_signed


def _dtype(name: str, source: OnnxSource) -> DType:
    return onnx_tensor.dtype_of(source.tensors[name], source.thing(name))

"""The operators of an ONNX model that work on codes, and what is known of their quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import onnx

from qtool.dtypes import DTYPES, DType, resolve
from qtool.errors import QtoolError
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body, Labels, Place, bodies
from qtool.formats.onnx.graph import STANDARD, is_quantized
from qtool.spec import Shape

# What is known of a tensor.
_Known = tuple[DType | None, Shape | None]
_UNKNOWN: _Known = (None, None)
# Operators whose second input is the weight.
_SECOND = dict.fromkeys(("MatMulNBits", "MatMulBnb4", "MatMulFpQ4"), slice(1, 2))
# Bits of codes in uint8 where a node does not say them.
_BITS = {"MatMulNBits": 4, "GatherBlockQuantized": 4}


@dataclass(frozen=True, slots=True)
class QuantizedUse:
    """An operator that works on codes, and what is known of how it is quantized.

    tensor: the label of the operator's first input, or of the second where that has the codes.
    granularity: "per_tensor", "per_axis" or "blocked". scale_dtype: of the scale as it is stored;
    global_scale: whether it is dequantized itself.
    """

    tensor: str
    operator: str
    dtype: DType | None
    granularity: str | None
    axis: int | None
    block_size: int | None
    scale_dtype: DType | None
    global_scale: bool = False


def uses(model: onnx.ModelProto) -> list[QuantizedUse]:
    """Every operator that works on codes, in nested graphs and functions too."""
    return [use for use, _ in _uses(model)]


def uses_of_stored_codes(model: onnx.ModelProto) -> list[QuantizedUse]:
    """Those that read codes which the model stores: weights, and not activations alone.

    The inputs of functions count as stored.
    """
    return [use for use, reads_codes in _uses(model) if reads_codes]


def _uses(model: onnx.ModelProto) -> Iterator[tuple[QuantizedUse, bool]]:
    """Every operator that works on codes, and whether these are stored."""
    found = bodies(model)
    labels, known, codes, levels = Labels(found), _types(found), _codes(found), _levels(found)
    for body in found:
        for node in body.proto.node:
            if not is_quantized(node):
                continue
            places = {name: place for name in node.input if (place := body.place(name))}
            named = "".join(node.input[_SECOND.get(node.op_type, slice(1))])
            place = places.get(named)
            tensor = labels.of(place) if place else named
            inputs = [known.get(places.get(name), _UNKNOWN) for name in node.input]
            scale = levels.get(places.get(node.input[1])) if len(inputs) > 1 else None
            inputs[1:2] = [known.get(scale, _UNKNOWN)] if scale else inputs[1:2]
            reads_codes = any(places.get(name) in codes for name in _data(node))
            use = _use(node, tensor, inputs)
            yield replace(use, global_scale=True) if scale else use, reads_codes


def _levels(found: Sequence[Body]) -> dict[Place | None, Place]:
    """The codes, by what a DequantizeLinear node makes of them."""
    return {
        Place(body.number, node.output[0]): place
        for body in found
        for node in body.proto.node
        if node.op_type == "DequantizeLinear" and node.input and node.output
        if (place := body.place(node.input[0])) is not None
    }


def _codes(found: Sequence[Body]) -> set[Place]:
    """The tensors that may be codes of weights."""
    codes: set[Place] = set()
    for body in found:
        named = {name for name, tensor in body.stored.items() if _may_be_codes(tensor)}
        if isinstance(body.proto, onnx.FunctionProto):
            named.update(body.inputs)
        codes.update(Place(body.number, name) for name in named)
    return codes


def _data(node: onnx.NodeProto) -> Set[str]:
    """The inputs that may be codes of weights."""
    if node.op_type == "DequantizeLinear":
        return set(node.input[:1])  # its zero point is of their type
    return set() if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") else set(node.input)


def _may_be_codes(tensor: onnx.TensorProto) -> bool:
    """Whether the values are no floats of 16 bits or more, and no lone zero point."""
    dtype = _dtype(tensor.data_type)
    is_plain = dtype is None or (dtype.kind == "float" and dtype.bits > 8)
    return not is_plain and math.prod(tensor.dims) > 1


def _types(found: Sequence[Body]) -> dict[Place | None, _Known]:
    known: dict[Place | None, _Known] = {}
    for body in found:
        graph = body.proto
        if isinstance(graph, onnx.GraphProto):
            for value in (*graph.input, *graph.value_info, *graph.output):
                dtype = _dtype(value.type.tensor_type.elem_type)
                known[Place(body.number, value.name)] = (dtype, None)
        for name, tensor in body.stored.items():
            known[Place(body.number, name)] = (_dtype(tensor.data_type), tuple(tensor.dims))
    return known


def _dtype(code: int) -> DType | None:
    try:
        return resolve(code) if code else None
    except QtoolError:
        return None


def _use(node: onnx.NodeProto, tensor: str, inputs: Sequence[_Known]) -> QuantizedUse:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain not in STANDARD:
        block_size = onnx_graph.attribute(node, "block_size", 0) or None
        bits = onnx_graph.attribute(node, "bits", _BITS.get(node.op_type, 0))
        dtype = DTYPES.get(f"uint{bits}") if bits else None
        return QuantizedUse(
            tensor,
            node.op_type,
            dtype,
            "blocked" if block_size else None,
            None,
            block_size,
            None,
        )
    (stored, _), (scale_dtype, scale_shape), (zero_dtype, _) = (*inputs, *[_UNKNOWN] * 3)[:3]
    if node.op_type == "QuantizeLinear":
        output = onnx_graph.attribute(node, "output_dtype", DTYPES["uint8"].code or 0)
        stored = zero_dtype or _dtype(output)
    block_size = onnx_graph.attribute(node, "block_size", 0) or None
    granularity = _granularity(scale_shape, block_size)
    axis = onnx_graph.attribute(node, "axis", 1)
    return QuantizedUse(
        tensor,
        node.op_type,
        stored or zero_dtype,
        granularity,
        axis if granularity in ("per_axis", "blocked") else None,
        block_size,
        scale_dtype,
    )


def _granularity(scale: Shape | None, block_size: int | None) -> str | None:
    if block_size:
        return "blocked"
    if scale is None:
        return None
    return "per_tensor" if scale in ((), (1,)) else "per_axis"

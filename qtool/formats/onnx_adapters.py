"""Nodes rewritten for a later opset: one function per operator version that changed its meaning.

ADAPTERS[op_type, version] takes a node of the version before and gives nodes of that version that
compute the same. Operators that are not listed either did not change, or only gained types,
optional inputs, and attributes whose defaults are the old behaviour.
Source: ONNX Changelog.md, opsets 8 to 28.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtool.formats.onnx_graph import Names

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class CannotAdaptError(Exception):
    """Why a node has no equivalent in the later version."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an adapter may ask for.

    types: (element type, rank) of tensors where known, each None where not.
    """

    names: Names
    types: Callable[[], Mapping[str, tuple[int | None, int | None]]]

    def constant(self, values: Any, dtype: Any, beside: str) -> NodeProto:
        """A Constant node; its name is made from the tensor's that it serves."""
        name = self.names.fresh(f"{beside}_constant")
        value = numpy_helper.from_array(np.asarray(values, dtype), name)
        return helper.make_node("Constant", [], [name], name=self.names.fresh(name), value=value)

    def like(self, value: float, tensor: str) -> NodeProto:
        """A scalar Constant node of the tensor's own type."""
        code = self.types().get(tensor, (None, None))[0]
        if code not in _FLOATS:
            raise CannotAdaptError(f"the type of its input {tensor!r} is not known")
        return self.constant(value, helper.tensor_dtype_to_np_dtype(code), tensor)


Adapter = Callable[[NodeProto, Context], list[NodeProto]]


def _pop(node: NodeProto, name: str) -> Any:
    """Remove an attribute and give its value, or None where the node has none."""
    for index, attribute in enumerate(node.attribute):
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            del node.attribute[index]
            return value
    return None


def _set(node: NodeProto, name: str, value: Any) -> None:
    _pop(node, name)
    node.attribute.append(helper.make_attribute(name, value))


def _set_input(node: NodeProto, index: int, name: str) -> None:
    while len(node.input) <= index:
        node.input.append("")
    node.input[index] = name


def _to_input(name: str, index: int, *, dtype: Any = np.int64, default: Any = None) -> Adapter:
    """The attribute becomes the input at that index."""

    def adapt(node: NodeProto, context: Context) -> list[NodeProto]:
        value = _pop(node, name)
        value = default if value is None else value
        if value is None:
            return [node]
        constant = context.constant(value, dtype, node.output[0])
        _set_input(node, index, constant.output[0])
        return [constant, node]

    return adapt


def _softmax(node: NodeProto, context: Context) -> list[NodeProto]:
    """Up to opset 12 all dimensions from axis on are one; from 13 on axis is a single one."""
    axis = _pop(node, "axis")
    axis = 1 if axis is None else axis
    rank = context.types().get(node.input[0], (None, None))[1]
    if axis == -1 or axis + 1 == rank:
        _set(node, "axis", -1)
        return [node]
    source, target = node.input[0], node.output[0]
    shape, flat, result = (context.names.fresh(f"{target}_{n}") for n in ("shape", "flat", "soft"))
    node.input[0], node.output[0] = flat, result
    _set(node, "axis", -1)
    return [
        helper.make_node("Shape", [source], [shape], name=context.names.fresh(shape)),
        helper.make_node("Flatten", [source], [flat], name=context.names.fresh(flat), axis=axis),
        node,
        helper.make_node("Reshape", [result, shape], [target], name=context.names.fresh(result)),
    ]


def _top_k(node: NodeProto, context: Context) -> list[NodeProto]:
    constant = context.constant([_pop(node, "k")], np.int64, node.output[0])
    _set_input(node, 1, constant.output[0])
    return [constant, node]


def _clip(node: NodeProto, context: Context) -> list[NodeProto]:
    nodes = [node]
    for index, name in ((1, "min"), (2, "max")):
        value = _pop(node, name)
        if value is not None:
            constant = context.like(value, node.input[0])
            _set_input(node, index, constant.output[0])
            nodes.insert(0, constant)
    return nodes


def _pad(node: NodeProto, context: Context) -> list[NodeProto]:
    value = _pop(node, "value") or 0.0
    nodes = _to_input("pads", 1)(node, context)
    if value:
        constant = context.like(value, node.input[0])
        _set_input(node, 2, constant.output[0])
        nodes.insert(0, constant)
    return nodes


def _slice(node: NodeProto, context: Context) -> list[NodeProto]:
    nodes = [node]
    for index, name in enumerate(("starts", "ends", "axes"), 1):
        nodes = _to_input(name, index)(node, context)[:-1] + nodes
    return nodes


def _dropout_10(node: NodeProto, context: Context) -> list[NodeProto]:
    if any(node.output[1:]):
        raise CannotAdaptError("its mask became boolean")
    return [node]


def _dropout_12(node: NodeProto, context: Context) -> list[NodeProto]:
    # Without its input training_mode the ratio is ignored, as it was in inference before.
    _pop(node, "ratio")
    return [node]


def _batch_normalization_9(node: NodeProto, context: Context) -> list[NodeProto]:
    if _pop(node, "spatial") == 0:
        raise CannotAdaptError("its attribute spatial=0 is gone")
    return [node]


def _batch_normalization_14(node: NodeProto, context: Context) -> list[NodeProto]:
    if any(node.output[1:]):
        raise CannotAdaptError("its training outputs changed")
    return [node]


def _split(node: NodeProto, context: Context) -> list[NodeProto]:
    if len(node.input) < 2 or not node.input[1]:
        _set(node, "num_outputs", len(node.output))
    return [node]


def _rename(op_type: str) -> Adapter:
    def adapt(node: NodeProto, context: Context) -> list[NodeProto]:
        node.op_type = op_type
        return [node]

    return adapt


def _resize_11(node: NodeProto, context: Context) -> list[NodeProto]:
    """Resize 10 knows one way to place pixels: x / scale, rounded down."""
    data, scales = node.input[:2]
    del node.input[:]
    node.input.extend((data, "", scales))
    _set(node, "coordinate_transformation_mode", "asymmetric")
    _set(node, "nearest_mode", "floor")
    return [node]


def _resize_13(node: NodeProto, context: Context) -> list[NodeProto]:
    for attribute in node.attribute:
        if attribute.s == b"tf_half_pixel_for_nn":
            raise CannotAdaptError("its mode tf_half_pixel_for_nn is gone")
    return [node]


def _grid_sample(node: NodeProto, context: Context) -> list[NodeProto]:
    mode = _pop(node, "mode") or b"bilinear"
    _set(node, "mode", {b"bilinear": b"linear", b"bicubic": b"cubic"}.get(mode, mode))
    return [node]


def _roi_align(node: NodeProto, context: Context) -> list[NodeProto]:
    _set(node, "coordinate_transformation_mode", "output_half_pixel")
    return [node]


def _group_normalization(node: NodeProto, context: Context) -> list[NodeProto]:
    raise CannotAdaptError("its scale and bias were one per group and are now one per channel")


def _scan(node: NodeProto, context: Context) -> list[NodeProto]:
    raise CannotAdaptError("its batch axis is gone")


_AXES = _to_input("axes", 1)
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

ADAPTERS: dict[tuple[str, int], Adapter] = {
    ("Scan", 9): _scan,
    ("BatchNormalization", 9): _batch_normalization_9,
    ("Upsample", 9): _to_input("scales", 1, dtype=np.float32),
    ("Upsample", 10): _rename("Resize"),
    ("Slice", 10): _slice,
    ("TopK", 10): _top_k,
    ("Dropout", 10): _dropout_10,
    ("Clip", 11): _clip,
    ("Pad", 11): _pad,
    ("Resize", 11): _resize_11,
    ("Scatter", 11): _rename("ScatterElements"),
    ("Dropout", 12): _dropout_12,
    ("Softmax", 13): _softmax,
    ("LogSoftmax", 13): _softmax,
    ("Hardmax", 13): _softmax,
    ("Resize", 13): _resize_13,
    ("Split", 13): _to_input("split", 1),
    **{(name, 13): _AXES for name in ("ReduceSum", "Squeeze", "Unsqueeze")},
    ("BatchNormalization", 14): _batch_normalization_14,
    ("RoiAlign", 16): _roi_align,
    **{(f"Reduce{name}", 18): _AXES for name in _REDUCTIONS},
    ("Split", 18): _split,
    ("DFT", 20): _to_input("axis", 2, default=1),
    ("GridSample", 20): _grid_sample,
    ("GroupNormalization", 21): _group_normalization,
}

"""Nodes rewritten for a later opset: one function per operator version that changed its meaning.

ADAPTERS[op_type, version] takes a node of the version before and gives nodes of that version that
compute the same. Operators that are not listed either did not change, or only gained types,
optional inputs, and attributes whose defaults are the old behaviour.
Source: ONNX Changelog.md, opsets 8 to 28; for the ones before see onnx_adapters_early.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import NodeProto, helper

from qtool.formats.onnx.adapters_early import EARLY
from qtool.formats.onnx.rewriting import (
    Adapter,
    CannotAdaptError,
    Context,
    get,
    pop,
    put,
    put_input,
    refuse,
    rename,
    to_input,
)


def _softmax(node: NodeProto, context: Context) -> list[NodeProto]:
    """Up to opset 12 all dimensions from axis on are one; from 13 on axis is a single one."""
    axis = pop(node, "axis")
    axis = 1 if axis is None else axis
    rank = context.scope.type_of(node.input[0])[1]
    if axis == -1 or axis + 1 == rank:
        put(node, "axis", -1)
        return [node]
    source, target = node.input[0], node.output[0]
    # Without allowzero, which opset 13 lacks, a size of 0 in the shape copies one of flat's.
    zeros: dict[str, Any] = {"allowzero": 1} if context.opset >= 14 else {}
    shape, flat, result = (context.names.fresh(f"{target}_{n}") for n in ("shape", "flat", "soft"))
    node.input[0], node.output[0] = flat, result
    put(node, "axis", -1)
    return [
        helper.make_node("Shape", [source], [shape], name=context.names.fresh(shape)),
        helper.make_node("Flatten", [source], [flat], name=context.names.fresh(flat), axis=axis),
        node,
        helper.make_node(
            "Reshape", [result, shape], [target], context.names.fresh(result), **zeros
        ),
    ]


def _top_k(node: NodeProto, context: Context) -> list[NodeProto]:
    constant = context.constant([pop(node, "k")], np.int64, node.output[0])
    put_input(node, 1, constant.output[0])
    return [constant, node]


def _clip(node: NodeProto, context: Context) -> list[NodeProto]:
    nodes = [node]
    for index, name in ((1, "min"), (2, "max")):
        value = pop(node, name)
        if value is not None:
            constant = context.like(value, node.input[0])
            put_input(node, index, constant.output[0])
            nodes.insert(0, constant)
    return nodes


def _pad(node: NodeProto, context: Context) -> list[NodeProto]:
    value = pop(node, "value") or 0.0
    nodes = to_input("pads", 1)(node, context)
    if value:
        constant = context.like(value, node.input[0])
        put_input(node, 2, constant.output[0])
        nodes.insert(0, constant)
    return nodes


def _slice(node: NodeProto, context: Context) -> list[NodeProto]:
    nodes = [node]
    for index, name in enumerate(("starts", "ends", "axes"), 1):
        nodes = to_input(name, index)(node, context)[:-1] + nodes
    return nodes


def _squeeze(node: NodeProto, context: Context) -> list[NodeProto]:
    """No axes are all of size 1, as runtimes read an empty list too."""
    if not get(node, "axes"):
        pop(node, "axes")
    return _AXES(node, context)


def _dropout_10(node: NodeProto, context: Context) -> list[NodeProto]:
    return _without_mask(node, context, "its mask became boolean")


def _dropout_12(node: NodeProto, context: Context) -> list[NodeProto]:
    # Without its input training_mode the ratio is ignored, as it was in inference before.
    pop(node, "ratio")
    return _without_mask(node, context, "its mask became true where nothing is dropped")


def _without_mask(node: NodeProto, context: Context, reason: str) -> list[NodeProto]:
    if any(name in context.read for name in node.output[1:]):
        raise CannotAdaptError(reason)
    del node.output[1:]
    return [node]


def _batch_normalization_9(node: NodeProto, context: Context) -> list[NodeProto]:
    if pop(node, "spatial") == 0:
        raise CannotAdaptError("its attribute spatial=0 is gone")
    return [node]


def _batch_normalization_14(node: NodeProto, context: Context) -> list[NodeProto]:
    if any(node.output[1:]):
        raise CannotAdaptError("its training outputs changed")
    return [node]


def _split(node: NodeProto, context: Context) -> list[NodeProto]:
    if len(node.input) < 2 or not node.input[1]:
        put(node, "num_outputs", len(node.output))
    return [node]


def _upsample(node: NodeProto, context: Context) -> list[NodeProto]:
    node.op_type = "Resize"
    context.growing.add(node.output[0])
    return [node]


def _resize_11(node: NodeProto, context: Context) -> list[NodeProto]:
    """Resize 10 knows one way to place pixels: x / scale."""
    data, scales = node.input[:2]
    if get(node, "mode") in (None, b"nearest"):
        put(node, "nearest_mode", _nearest_mode(node, scales, context))
    del node.input[:]
    node.input.extend((data, "", scales))
    put(node, "coordinate_transformation_mode", "asymmetric")
    return [node]


def _nearest_mode(node: NodeProto, scales: str, context: Context) -> str:
    """How Resize 10 rounds x / scale: down along axes that grow, and up along those that shrink.

    Its text leaves that open; this is what onnxruntime does.
    """
    if node.output[0] in context.growing:
        return "floor"
    values = context.scope.stored(scales)
    if values is None:
        raise CannotAdaptError("what is nearest depends on its scales, which are not stored")
    shrinking = values[values < 1]
    if not (values > 1).any() and shrinking.size:
        return "ceil"
    if (np.frexp(shrinking)[0] == 0.5).all():  # x / scale is an integer: nothing to round
        return "floor"
    raise CannotAdaptError("what is nearest differs between axes that grow and axes that shrink")


def _resize_13(node: NodeProto, context: Context) -> list[NodeProto]:
    if get(node, "coordinate_transformation_mode") == b"tf_half_pixel_for_nn":
        raise CannotAdaptError("its mode tf_half_pixel_for_nn is gone")
    return [node]


def _grid_sample(node: NodeProto, context: Context) -> list[NodeProto]:
    mode = pop(node, "mode") or b"bilinear"
    put(node, "mode", {b"bilinear": b"linear", b"bicubic": b"cubic"}.get(mode, mode))
    return [node]


def _roi_align(node: NodeProto, context: Context) -> list[NodeProto]:
    put(node, "coordinate_transformation_mode", "output_half_pixel")
    return [node]


_AXES = to_input("axes", 1)
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

# Not here: OneHot, which from opset 11 on counts negative indices from the end. At 9 they were not
# allowed, and runtimes count them from the end there too.
ADAPTERS: dict[tuple[str, int], Adapter] = {
    **EARLY,
    ("Scan", 9): refuse("its batch axis is gone"),
    ("BatchNormalization", 9): _batch_normalization_9,
    ("Upsample", 9): to_input("scales", 1, dtype=np.float32),
    ("Upsample", 10): _upsample,
    ("Slice", 10): _slice,
    ("TopK", 10): _top_k,
    ("Dropout", 10): _dropout_10,
    ("Clip", 11): _clip,
    ("Pad", 11): _pad,
    ("Resize", 11): _resize_11,
    ("Scatter", 11): rename("ScatterElements"),
    ("Dropout", 12): _dropout_12,
    ("Softmax", 13): _softmax,
    ("LogSoftmax", 13): _softmax,
    ("Hardmax", 13): _softmax,
    ("Resize", 13): _resize_13,
    ("Split", 13): to_input("split", 1),
    **{(name, 13): _AXES for name in ("ReduceSum", "Unsqueeze")},
    ("Squeeze", 13): _squeeze,
    ("BatchNormalization", 14): _batch_normalization_14,
    ("RoiAlign", 16): _roi_align,
    **{(f"Reduce{name}", 18): _AXES for name in _REDUCTIONS},
    ("Split", 18): _split,
    ("DFT", 20): to_input("axis", 2, default=1),
    ("GridSample", 20): _grid_sample,
    ("GroupNormalization", 21): refuse(
        "its scale and bias were one per group and are now one per channel"
    ),
}

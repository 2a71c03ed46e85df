"""Nodes rewritten for the opsets 2 to 7, which did away with the conventions of Caffe2.

See onnx_adapters. Attributes that are gone, as consumed_inputs, are refused unless listed here.
Source: ONNX Changelog.md, opsets 1 to 7.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto, helper

from qtool.formats.onnx.rewriting import Adapter, CannotAdaptError, Context, get, pop, put


def _lp_pool(node: NodeProto, context: Context) -> list[NodeProto]:
    """The exponent was a float."""
    if node.op_type == "LpPool" and get(node, "kernel_shape") is None:
        raise CannotAdaptError("its attribute kernel_shape became required")
    p = pop(node, "p")
    if p is not None and not p.is_integer():
        raise CannotAdaptError(f"its attribute p={p} is no integer")
    put(node, "p", 2 if p is None else int(p))
    return [node]


def _cast(node: NodeProto, context: Context) -> list[NodeProto]:
    """The type was a name."""
    name = (pop(node, "to") or b"").decode(errors="replace")
    if name not in TensorProto.DataType.keys():  # noqa: SIM118  (no mapping)
        raise CannotAdaptError(f"its attribute to={name!r} is no type")
    put(node, "to", TensorProto.DataType.Value(name))
    return [node]


def _inference(node: NodeProto, context: Context) -> list[NodeProto]:
    """Training was the default; without it the operators are the same."""
    if not pop(node, "is_test"):
        raise CannotAdaptError("it trains unless is_test=1, and from opset 7 on it does not")
    return [node]


def _unsqueezed(node: NodeProto, count: int, context: Context) -> list[NodeProto]:
    """The second input gets so many axes of size 1 at its end."""
    if count == 0:
        return [node]
    tensor = node.input[1]
    rank = context.rank(tensor)
    made = context.names.fresh(f"{tensor}_unsqueezed")
    node.input[1] = made
    label = context.names.fresh(made)
    axes = list(range(rank, rank + count))
    return [helper.make_node("Unsqueeze", [tensor], [made], label, axes=axes), node]


def _p_relu(node: NodeProto, context: Context) -> list[NodeProto]:
    """A slope of one axis was one per channel; now it would be one per element of the last axis."""
    rank = context.rank(node.input[1])
    if rank > 1:
        raise CannotAdaptError("its slope has more than one axis")
    count = max(context.rank(node.input[0]) - 2, 0) if rank else 0
    return _unsqueezed(node, count, context)


def _broadcast(node: NodeProto, context: Context) -> list[NodeProto]:
    """The attribute axis said where the second input's axes begin; else they are the last ones."""
    axis, broadcast = pop(node, "axis"), pop(node, "broadcast")
    if not broadcast or axis is None:
        return [node]
    count = context.rank(node.input[0]) - axis - context.rank(node.input[1])
    if axis < 0 or count < 0:
        raise CannotAdaptError(f"its attribute axis={axis} is out of range")
    return _unsqueezed(node, count, context)


def _gemm(node: NodeProto, context: Context) -> list[NodeProto]:
    """The addend was broadcast on demand."""
    pop(node, "broadcast")
    return [node]


_BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less")

EARLY: dict[tuple[str, int], Adapter] = {
    ("LpPool", 2): _lp_pool,
    ("GlobalLpPool", 2): _lp_pool,
    ("Cast", 6): _cast,
    ("Dropout", 7): _inference,
    ("BatchNormalization", 7): _inference,
    ("PRelu", 7): _p_relu,
    ("Gemm", 7): _gemm,
    **{(name, 7): _broadcast for name in _BINARY},
}

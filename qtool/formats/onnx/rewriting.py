"""What rewriting a node for a later opset takes: attributes, inputs, constants, facts."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.scope import Scope

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class CannotAdaptError(Exception):
    """Why a node has no equivalent in the later version."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an adapter may ask for, and leave for those that come after it.

    scope: of the node's graph. opset: the one that the model gets in the end. read: the names of
    tensors that something reads, anywhere in the model. growing: outputs of nodes that by their
    operator cannot shrink any axis.
    """

    names: Names
    scope: Scope
    opset: int
    read: Set[str]
    growing: set[str] = field(default_factory=set)

    def constant(self, values: Any, dtype: Any, beside: str) -> NodeProto:
        """A Constant node; its name is made from the tensor's that it serves."""
        name = self.names.fresh(f"{beside}_constant")
        value = numpy_helper.from_array(np.asarray(values, dtype), name)
        return helper.make_node("Constant", [], [name], name=self.names.fresh(name), value=value)

    def like(self, value: float, tensor: str) -> NodeProto:
        """A scalar Constant node of the tensor's own type."""
        code = self.scope.type_of(tensor)[0]
        if code not in _FLOATS:
            raise CannotAdaptError(f"the type of its input {tensor!r} is not known")
        with np.errstate(over="ignore"):  # float16 has infinity for bounds beyond all its values
            return self.constant(value, helper.tensor_dtype_to_np_dtype(code), tensor)

    def rank(self, tensor: str) -> int:
        """The rank of a tensor. Raises CannotAdaptError where it is not known."""
        rank = self.scope.type_of(tensor)[1]
        if rank is None:
            raise CannotAdaptError(f"the rank of its input {tensor!r} is not known")
        return rank


Adapter = Callable[[NodeProto, Context], list[NodeProto]]


def get(node: NodeProto, name: str) -> Any:
    """The value of an attribute, or None where the node has none of that name.

    Raises CannotAdaptError where the callers of a function set it.
    """
    for attribute in node.attribute:
        if attribute.name == name:
            if attribute.ref_attr_name:
                raise CannotAdaptError(
                    f"each call of the function around it sets its attribute {name}"
                )
            return helper.get_attribute_value(attribute)
    return None


def pop(node: NodeProto, name: str) -> Any:
    """Remove an attribute and give what get() does."""
    value = get(node, name)
    for index, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[index]
            break
    return value


def put(node: NodeProto, name: str, value: Any) -> None:
    """Set an attribute, in place of one that the node has."""
    pop(node, name)
    node.attribute.append(helper.make_attribute(name, value))


def put_input(node: NodeProto, index: int, name: str) -> None:
    """Set an input; those before it that the node does not have are left out by name."""
    while len(node.input) <= index:
        node.input.append("")
    node.input[index] = name


def to_input(name: str, index: int, *, dtype: Any = np.int64, default: Any = None) -> Adapter:
    """The attribute becomes the input at that index."""

    def adapt(node: NodeProto, context: Context) -> list[NodeProto]:
        value = pop(node, name)
        value = default if value is None else value
        if value is None:
            return [node]
        constant = context.constant(value, dtype, node.output[0])
        put_input(node, index, constant.output[0])
        return [constant, node]

    return adapt


def rename(op_type: str) -> Adapter:
    """The operator gets another name."""

    def adapt(node: NodeProto, context: Context) -> list[NodeProto]:
        node.op_type = op_type
        return [node]

    return adapt


def refuse(reason: str) -> Adapter:
    """The operator has no equivalent."""

    def adapt(node: NodeProto, context: Context) -> list[NodeProto]:
        raise CannotAdaptError(reason)

    return adapt

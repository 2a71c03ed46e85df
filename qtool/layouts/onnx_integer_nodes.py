"""The nodes that take the place of a MatMul, Gemm or Conv: see onnx_dynamic.py for the equation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtool.formats.onnx.graph import Names, attribute
from qtool.layouts.onnx_products import Product


@dataclass(frozen=True, slots=True)
class Parts:
    """What a weight has become.

    codes, scale, zero_point: their names; "" for no zero point. dtype: the element type that the
    weight had, and its operators' other tensors have.
    """

    product: Product
    codes: str
    scale: str
    zero_point: str
    dtype: int

    @property
    def names(self) -> list[str]:
        """The names of the parts that there are."""
        return [name for name in (self.codes, self.scale, self.zero_point) if name]


class IntegerNodes:
    """Makes the nodes of one graph, in the order of the graph; those that read the same tensor
    share its codes."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._activations: dict[str, list[str]] = {}
        self._bias_shapes: dict[int, str] = {}
        self._made: list[NodeProto] = []

    def replacing(self, node: NodeProto, weight: Parts) -> list[NodeProto]:
        """Nodes that give what the node gives, the weight being in those parts."""
        self._made, output = [], node.output[0]
        codes, scale, zero_point = self._quantized(node.input[0], weight.dtype)
        if node.op_type == "Gemm" and attribute(node, "transA", 0):
            codes = self._add("Transpose", [codes], output, perm=[1, 0])
        inputs = [codes, weight.codes, zero_point, weight.zero_point]
        inputs = inputs if weight.zero_point else inputs[:3]
        product = self._add(weight.product.operator, inputs, output)
        if node.op_type == "Conv":
            self._made[-1].attribute.extend(node.attribute)
        product = self._add("Cast", [product], output, to=TensorProto.FLOAT)
        scale = self._add("Mul", [scale, weight.scale], output)
        result = self._add("Mul", [product, scale], output)
        result = self._times(result, node, "alpha", TensorProto.FLOAT)
        if weight.dtype != TensorProto.FLOAT:
            result = self._add("Cast", [result], output, to=weight.dtype)
        if any(node.input[2:]):
            result = self._add("Add", [result, self._bias(node, weight)], output)
        self._made[-1].output[0] = output
        return self._made

    def _quantized(self, name: str, dtype: int) -> list[str]:
        """The codes, scale and zero point of a tensor that operators multiply."""
        if name not in self._activations:
            x = name
            if dtype != TensorProto.FLOAT:
                x = self._add("Cast", [x], name, to=TensorProto.FLOAT)
            parts = [self._names.fresh(f"{name}_{part}") for part in _PARTS]
            label = self._names.fresh(f"{name}_DynamicQuantizeLinear")
            self._made.append(helper.make_node("DynamicQuantizeLinear", [x], parts, label))
            self._activations[name] = parts
        return self._activations[name]

    def _bias(self, node: NodeProto, weight: Parts) -> str:
        """The bias as it is added to the product."""
        bias, output = node.input[2], node.output[0]
        if node.op_type == "Gemm":
            return self._times(bias, node, "beta", weight.dtype)
        rank = len(weight.product.shape)
        if rank not in self._bias_shapes:
            shape = np.array([1, -1] + [1] * (rank - 2), np.int64)
            self._bias_shapes[rank] = self._constant(shape, output)
        return self._add("Reshape", [bias, self._bias_shapes[rank]], output)

    def _times(self, name: str, node: NodeProto, factor: str, dtype: int) -> str:
        """A tensor times a float attribute of Gemm's, whose default is 1."""
        value = next((a.f for a in node.attribute if a.name == factor), 1.0)
        if node.op_type != "Gemm" or value == 1:
            return name
        constant = np.array(value, helper.tensor_dtype_to_np_dtype(dtype))
        return self._add("Mul", [name, self._constant(constant, node.output[0])], node.output[0])

    def _constant(self, value: Any, beside: str) -> str:
        return self._add("Constant", [], beside, value=numpy_helper.from_array(value))

    def _add(self, operator: str, inputs: list[str], beside: str, **attributes: Any) -> str:
        """Add a node, named like what it gives after the tensor that it helps to make."""
        name = self._names.fresh(f"{beside}_{operator}")
        self._made.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name


_PARTS = ("quantized", "scale", "zero_point")

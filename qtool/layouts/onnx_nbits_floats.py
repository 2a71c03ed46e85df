"""Floats again from the weights of MatMulNBits and GatherBlockQuantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from qtool.dtypes import DType
from qtool.formats.onnx import OnnxSource, editing
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body
from qtool.formats.onnx.graph import Names, attribute
from qtool.layouts.nbits import DOMAIN, GATHER, MATMUL
from qtool.layouts.onnx_bias import add_behind, insert_behind
from qtool.layouts.onnx_nbits_read import NBitsWeight, weights
from qtool.layouts.reordered import Memory, Transposed, unpadded
from qtool.spec import Writer

# What quantizers put behind the name of a weight.
_SUFFIX = re.compile(r"_Q[248](_[0-9]+)?$")


class NBitsFolding:
    """The operators become MatMul, with an Add for a bias, and Gather.

    model: a copy of the source's, changed in place; found: its bodies. dtype: of the floats.
    tensors: those that are to hold floats, without values yet, by name. weights: what these are
    made of. read_as: the names under which nodes read them. replaced: the labels of what the
    operators read.
    """

    def __init__(
        self,
        source: OnnxSource,
        model: ModelProto,
        found: Sequence[Body],
        dtype: DType,
        names: Names,
    ) -> None:
        self._source, self._dtype, self._names = source, dtype, names
        self.weights: dict[str, NBitsWeight] = {}
        self.read_as: dict[str, str] = {}
        self.replaced: set[str] = set()
        uses = list(weights(source, found))
        floats = {
            weight: self._add(weight, found[source.places[weight.codes].body])
            for weight in dict.fromkeys(weight for _, weight in uses)
        }
        self.tensors = editing.held(found, self.weights)
        biases: dict[int, NodeProto] = {}  # by the identity of the node in front of it
        for use, weight in uses:
            if (bias := self._rewrite(use.node, floats[weight])) is not None:
                biases[id(use.node)] = bias
        insert_behind(found, biases)
        if uses:
            _forget_domain(model)

    def through(self, name: str, write: Writer, memory: Memory, *, by_rows: bool = False) -> Writer:
        """A Writer of a weight's restored codes, which stores the floats of that name.

        by_rows: those of MatMulNBits as [N, K].
        """
        weight = self.weights[name]
        if weight.operator == GATHER:
            return write
        rows, columns = weight.stored
        element = np.dtype(f"u{self._dtype.numpy.itemsize}")
        kept = weight.shape[0]
        if by_rows:
            return unpadded(columns, kept, element, write)
        return Transposed((rows, columns), element, write, memory, kept=kept).write

    def _add(self, weight: NBitsWeight, body: Body) -> str:
        """Store floats in a body, without values yet; the name under which nodes read them, in the
        type of the scales."""
        name = self._source.places[weight.codes].name
        read = stored = self._names.fresh(_SUFFIX.sub("", name))
        result, nodes = self._source.tensors[weight.scales].data_type, body.proto.node
        if result != self._dtype.code:
            stored = self._names.fresh(f"{read}_{self._dtype}")
            label = self._names.fresh(f"{read}_Cast")
            nodes.insert(0, helper.make_node("Cast", [stored], [read], label, to=result))
        tensor = onnx_tensor.tensor_proto(stored, self._dtype, weight.shape)
        for constant in editing.store(body, [tensor]):
            nodes.insert(0, constant)
        self.weights[stored], self.read_as[stored] = weight, read
        parts = (weight.codes, weight.scales, weight.zero_points)
        self.replaced.update(part for part in parts if part)
        return read

    def _rewrite(self, node: NodeProto, floats: str) -> NodeProto | None:
        """Let a node read floats; the node that must come behind it, if any."""
        bias, attributes = None, {}
        if node.op_type == MATMUL:
            inputs = [node.input[0], floats]
            if any(node.input[5:]):
                bias = add_behind(node, node.input[5], self._names)
            node.op_type = "MatMul"
        else:
            attributes = {"axis": attribute(node, "gather_axis", 0)}
            inputs = [floats, node.input[1]]
            node.op_type = "Gather"
        node.domain = ""
        del node.input[:], node.attribute[:]
        node.input.extend(inputs)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
        return bias


def _forget_domain(model: ModelProto) -> None:
    """Leave out the imports of a domain of whose operators no node is any more."""
    graphs: list[tuple[Any, Iterable[NodeProto]]] = [(model, model.graph.node)]
    graphs += [(function, function.node) for function in model.functions]
    used = [any(n.domain == DOMAIN for n in onnx_graph.all_nodes(nodes)) for _, nodes in graphs]
    used[0] = any(used)
    for (proto, _), is_used in zip(graphs, used, strict=True):
        imports = proto.opset_import
        for index in reversed(range(len(imports))):
            if imports[index].domain == DOMAIN and not is_used:
                del imports[index]

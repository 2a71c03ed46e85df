"""Raising the opset of an ONNX model with its meaning kept.

Only nodes whose operator changed between the two opsets are touched; custom domains, names,
metadata and everything else stay as they are. (onnx.version_converter rebuilds the whole model,
which loses what its own representation lacks, and passes over nested graphs.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, defs, helper

from qtool.errors import FormatError
from qtool.formats import onnx_graph
from qtool.formats.onnx_adapters import ADAPTERS, CannotAdaptError, Context
from qtool.formats.onnx_graph import STANDARD, Names

# The IR version that was released with an opset, from the first opset that needs it.
_IR_VERSIONS = (
    (1, 3),
    (9, 4),
    (10, 5),
    (11, 6),
    (12, 7),
    (15, 8),
    (19, 9),
    (21, 10),
    (23, 11),
    (24, 12),
    (25, 13),
    (28, 14),
)
# Constants of more elements are not values that shape inference looks at.
_LARGE = 1024

Types = Mapping[str, tuple[int | None, int | None]]


def ir_version(opset: int) -> int:
    """The IR version that was released with an opset."""
    return max(ir for first, ir in _IR_VERSIONS if first <= opset)


def opset_of(model: ModelProto) -> int:
    """The opset of the standard's operators that a model imports; 1 where it says nothing."""
    entry = onnx_graph.opset(model.opset_import)
    return 1 if entry is None else entry.version


def raise_opset(model: ModelProto, opset: int, names: Names, thing: str) -> None:
    """Convert model, in place, to at least that opset of the standard's operators.

    names: what is in use; new tensors and nodes get fresh ones. thing: the file, for messages.

    Raises FormatError naming the operator that stands in the way.
    """
    untouched = _skeleton(model)
    converter = _Converter(opset, Context(names, cache(lambda: _types(untouched))), thing)
    for graph in onnx_graph.top_level_graphs(model):
        converter.convert(graph.node, opset_of(model))
    for function in model.functions:
        entry = onnx_graph.opset(function.opset_import)
        if entry is not None:
            converter.convert(function.node, entry.version)
            entry.version = max(entry.version, opset)
    entry = onnx_graph.opset(model.opset_import) or model.opset_import.add(domain="", version=1)
    entry.version = max(entry.version, opset)


class _Converter:
    """Converts nodes to one opset."""

    def __init__(self, opset: int, context: Context, thing: str) -> None:
        self._opset = opset
        self._context = context
        self._thing = thing

    def convert(self, nodes: Any, version: int) -> None:
        """Convert a graph's list of nodes in place, nested graphs included."""
        if version >= self._opset:
            return
        index = 0
        for node in list(nodes):
            for nested in onnx_graph.subgraphs(node):
                self.convert(nested.node, version)
            made = list(self._node(node, version)) if node.domain in STANDARD else [node]
            for place, new in enumerate(made, index):
                if new is not node:
                    nodes.insert(place, new)
            index += len(made)

    def _node(self, node: NodeProto, version: int) -> Iterator[NodeProto]:
        operator = node.op_type
        steps = [v for op, v in ADAPTERS if op == operator and version < v <= self._opset]
        try:
            if not steps:
                _check(node, version, self._opset)
                yield node
                return
            _check_valid(node, version)
            step = min(steps)
            for made in ADAPTERS[operator, step](node, self._context):
                yield from self._node(made, step)
        except CannotAdaptError as error:
            raise FormatError(
                self._thing,
                f"opset {self._opset} is needed, but {operator!r} (node "
                f"{node.name or list(node.output)!r}, opset {version}) cannot be converted: "
                f"{error}",
                "choose a type that needs a lower opset",
            ) from error


def _check(node: NodeProto, version: int, opset: int) -> None:
    """Raise CannotAdaptError unless the node means the same in both opsets as it stands."""
    old, new = _schema(node, version), _schema(node, opset)
    if old.since_version == new.since_version:
        return
    given = {attribute.name for attribute in node.attribute}
    if new.deprecated:
        raise CannotAdaptError("it was removed")
    if gone := given - set(new.attributes):
        raise CannotAdaptError(f"its attribute {min(gone)!r} is gone")
    for name, attribute in new.attributes.items():
        if name in given:
            continue
        if attribute.required:
            raise CannotAdaptError(f"its attribute {name} became required")
        if name in old.attributes and _default(old, name) != _default(new, name):
            raise CannotAdaptError(f"the default of its attribute {name} changed")
    if len(node.input) > new.max_input or len(node.output) > new.max_output:
        raise CannotAdaptError("its inputs or outputs changed")


def _check_valid(node: NodeProto, version: int) -> None:
    """Raise CannotAdaptError unless the node has what its own version's schema asks for."""
    schema = _schema(node, version)
    # onnx's stubs do not say that the type is an enum with the values of AttributeProto.type.
    kinds = {name: a.type.value for name, a in schema.attributes.items()}  # type: ignore[attr-defined]
    valid = all(kinds.get(attribute.name) == attribute.type for attribute in node.attribute)
    if len(node.input) < schema.min_input or len(node.output) < max(schema.min_output, 1):
        valid = False
    if not valid:
        raise CannotAdaptError("it is malformed")


def _schema(node: NodeProto, version: int) -> defs.OpSchema:
    try:
        return defs.get_schema(node.op_type, version, "")
    except defs.SchemaError as error:
        raise CannotAdaptError(f"opset {version} has no such operator") from error


def _default(schema: defs.OpSchema, name: str) -> bytes:
    return bytes(schema.attributes[name].default_value.SerializeToString(deterministic=True))


def _skeleton(model: ModelProto) -> ModelProto:
    """A copy for shape inference: large initializers and constants are inputs."""
    graph = GraphProto(
        name=model.graph.name,
        input=model.graph.input,
        output=model.graph.output,
        value_info=model.graph.value_info,
    )
    inputs = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _LARGE and tensor.data_location != TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(_value_info(tensor.name, tensor))
    for node in model.graph.node:
        constant = onnx_graph.constant_value(node)
        if constant is None or math.prod(constant.dims) <= _LARGE:
            graph.node.append(node)
        else:
            graph.input.append(_value_info(node.output[0], constant))
    return ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        graph=graph,
        functions=model.functions,
    )


def _value_info(name: str, tensor: TensorProto) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def _types(model: ModelProto) -> Types:
    """(element type, rank) of tensors by name; (None, None) where graphs disagree."""
    # Where it fails, what the model itself declares is still of use.
    with suppress(onnx.shape_inference.InferenceError, ValueError, TypeError):
        model = onnx.shape_inference.infer_shapes(model)
    found: dict[str, tuple[int | None, int | None]] = {}
    for graph in onnx_graph.graphs(model.graph):
        for name, known in _declared(graph):
            found[name] = known if found.get(name, known) == known else (None, None)
    return found


def _declared(graph: GraphProto) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    values: Iterable[ValueInfoProto] = (*graph.input, *graph.value_info, *graph.output)
    for value in values:
        tensor = value.type.tensor_type
        rank = len(tensor.shape.dim) if tensor.HasField("shape") else None
        yield value.name, (tensor.elem_type or None, rank)
    for initializer in graph.initializer:
        yield initializer.name, (initializer.data_type, len(initializer.dims))

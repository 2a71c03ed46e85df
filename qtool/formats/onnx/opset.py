"""Raising the opset of an ONNX model with its meaning kept.

Only nodes whose operator changed between the two opsets are touched; custom domains, names,
metadata and everything else stay as they are. (onnx.version_converter rebuilds the whole model,
which loses what its own representation lacks, and passes over nested graphs.)
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import count
from typing import Any

from onnx import ModelProto, NodeProto, defs

from qtool.errors import FormatError
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import scope as onnx_scope
from qtool.formats.onnx.adapters import ADAPTERS
from qtool.formats.onnx.graph import STANDARD, Names
from qtool.formats.onnx.rewriting import CannotAdaptError, Context
from qtool.formats.onnx.scope import Scope

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


def ir_version(opset: int) -> int:
    """The IR version that was released with an opset."""
    return max(ir for first, ir in _IR_VERSIONS if first <= opset)


def opset_of(model: ModelProto) -> int:
    """The opset of the standard's operators that a model imports; 1 where it says nothing."""
    entry = onnx_graph.opset(model.opset_import)
    return 1 if entry is None else entry.version


def raise_opset(model: ModelProto, opset: int, names: Names, thing: str) -> None:
    """Convert model, in place, to at least that opset and the IR version that goes with it.

    The model, and each function that imports the standard's operators, imports them once then.
    names: what is in use; new tensors and nodes get fresh ones. thing: the file, for messages.

    Raises FormatError naming the operator that stands in the way.
    """
    converter = _Converter(opset, names, onnx_graph.read_names(model), thing)
    main = onnx_scope.of_model(model)
    version = opset_of(model)
    converter.convert(model.graph.node, version, main)
    for graph in onnx_graph.top_level_graphs(model)[1:]:
        converter.convert(graph.node, version, onnx_scope.of_training(graph, main))
    _set_opset(model.opset_import, max(version, opset))
    for function in model.functions:
        entry = onnx_graph.opset(function.opset_import)
        if entry is not None:
            version = entry.version
            converter.convert(function.node, version, onnx_scope.of_function(function))
            _set_opset(function.opset_import, max(version, opset))
    raise_ir_version(model, ir_version(opset))


def _set_opset(imports: Any, version: int) -> None:
    """Import the standard's operators of that version, once."""
    found = [index for index, entry in enumerate(imports) if entry.domain in STANDARD]
    for index in reversed(found[1:]):
        del imports[index]
    entry = imports[found[0]] if found else imports.add(domain="")
    entry.version = version


def raise_ir_version(model: ModelProto, version: int) -> None:
    """Let a model, in place, have at least that IR version."""
    if model.ir_version < 4 <= version:
        # Initializers had to be graph inputs too; from IR version 4 on that would make them
        # inputs that callers may set.
        stored = {tensor.name for tensor in model.graph.initializer}
        for index in reversed(range(len(model.graph.input))):
            if model.graph.input[index].name in stored:
                del model.graph.input[index]
    model.ir_version = max(model.ir_version, version)


class _Converter:
    """Converts nodes to one opset."""

    def __init__(self, opset: int, names: Names, read: Set[str], thing: str) -> None:
        self._opset = opset
        self._names = names
        self._read = read
        self._thing = thing

    def convert(self, nodes: Any, version: int, scope: Scope) -> None:
        """Convert a graph's list of nodes in place, nested graphs included."""
        if version >= self._opset:
            return
        context = Context(self._names, scope, self._opset, self._read)
        index, nested = 0, count()
        for node in list(nodes):
            for graph in onnx_graph.subgraphs(node):
                self.convert(graph.node, version, scope.nested(next(nested)))
            standard = node.domain in STANDARD
            made = list(self._node(node, version, context)) if standard else [node]
            for place, new in enumerate(made, index):
                if new is not node:
                    nodes.insert(place, new)
            index += len(made)

    def _node(self, node: NodeProto, version: int, context: Context) -> Iterator[NodeProto]:
        operator = node.op_type
        steps = [v for op, v in ADAPTERS if op == operator and version < v <= self._opset]
        try:
            if not steps:
                _check(node, version, self._opset)
                yield node
                return
            _check_valid(node, version)
            step = min(steps)
            _check(node, version, step - 1)
            for made in ADAPTERS[operator, step](node, context):
                yield from self._node(made, step, context)
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
        if name in old.attributes and attribute.type != old.attributes[name].type:
            raise CannotAdaptError(f"the type of its attribute {name} changed")
        if name in given:
            continue
        if attribute.required:
            raise CannotAdaptError(f"its attribute {name} became required")
        if name in old.attributes and _default(old, name) != _default(new, name):
            raise CannotAdaptError(f"the default of its attribute {name} changed")
    if not new.min_input <= len(node.input) <= new.max_input or (len(node.output) > new.max_output):
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
    except (defs.SchemaError, TypeError) as error:  # TypeError: a version beyond 32 bits
        raise CannotAdaptError(f"opset {version} has no such operator") from error


def _default(schema: defs.OpSchema, name: str) -> bytes:
    return bytes(schema.attributes[name].default_value.SerializeToString(deterministic=True))

"""What is known of the tensors that a graph sees, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from qtool.formats.onnx import graph as onnx_graph

# Constants of more elements are not values that shape inference looks at.
_LARGE = 1024

# How shape inference fails on models that are not sound.
_FAILURES = (
    onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError, TypeError,
)  # fmt: skip
# A few functions that call each other twice come to billions of calls.
_MOST_CALLS = 10_000

# Element type and rank, each None where not known.
Type = tuple[int | None, int | None]
_UNKNOWN: Type = (None, None)


class Scope:
    """The tensors that a graph defines and, for the others that it reads, the graph around it.

    A name means the innermost tensor, even where nothing is known of that one: graphs that do not
    see each other, as the branches of an If or the bodies of functions, may use the same names.

    load: gives the graph, when it is needed first.
    """

    def __init__(self, load: Callable[[], GraphProto], outer: Scope | None = None) -> None:
        self._load = load
        self._outer = outer

    def nested(self, index: int) -> Scope:
        """The scope of a graph nested in this one, counted in the order of the nodes."""
        return Scope(lambda: self._nested[index], self)

    def type_of(self, name: str) -> Type:
        """(element type, rank) of a tensor."""
        if name in self._types or self._outer is None:
            return self._types.get(name, _UNKNOWN)
        return self._outer.type_of(name)

    def stored(self, name: str) -> NDArray[Any] | None:
        """The values of a small tensor that the model fixes; None for any other."""
        if name in self._types or self._outer is None:
            tensor = self._stored.get(name)
            with suppress(ValueError, TypeError):  # of a tensor that is not what it says
                return None if tensor is None else numpy_helper.to_array(tensor)
            return None
        return self._outer.stored(name)

    @cached_property
    def _graph(self) -> GraphProto:
        return self._load()

    @cached_property
    def _nested(self) -> list[GraphProto]:
        return [nested for node in self._graph.node for nested in onnx_graph.subgraphs(node)]

    @cached_property
    def _types(self) -> dict[str, Type]:
        found: dict[str, Type] = {}
        for name, known in _declared(self._graph):
            found[name] = known if found.get(name, known) == known else _UNKNOWN
        made = (name for node in self._graph.node for name in node.output)
        return {**dict.fromkeys(made, _UNKNOWN), **found}

    @cached_property
    def _stored(self) -> dict[str, TensorProto]:
        inputs = {value.name for value in self._graph.input}
        found = {t.name: t for t in self._graph.initializer if t.name not in inputs}
        for node in self._graph.node:
            if (constant := onnx_graph.constant_value(node)) is not None:
                found[node.output[0]] = constant
        return {name: tensor for name, tensor in found.items() if _is_small(tensor)}


def of_model(model: ModelProto) -> Scope:
    """The scope of the model's graph as it is now, whatever is changed later."""
    skeleton = _skeleton(model)

    def load() -> GraphProto:
        # Where inference fails, what the model itself declares is still of use.
        with suppress(*_FAILURES):
            return onnx.shape_inference.infer_shapes(skeleton).graph
        return skeleton.graph

    return Scope(load)


def of_function(function: FunctionProto) -> Scope:
    """The scope of a function; of its inputs nothing is known, as each call may differ."""
    return Scope(lambda: GraphProto(node=function.node))


def of_training(graph: GraphProto, main: Scope) -> Scope:
    """The scope of a training graph, which runs as one with the model's and sees its tensors."""
    return Scope(lambda: graph, main)


def _skeleton(model: ModelProto) -> ModelProto:
    """A copy for shape inference: large initializers and constants are inputs."""
    stored = {tensor.name for tensor in model.graph.initializer}
    # Before IR version 4 initializers are inputs by form alone.
    formal = stored if model.ir_version < 4 else set()
    graph = GraphProto(
        name=model.graph.name,
        input=[value for value in model.graph.input if value.name not in formal],
        output=model.graph.output,
        value_info=model.graph.value_info,
    )
    inputs = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if _is_small(tensor):
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
        ir_version=max(model.ir_version, 4),
        opset_import=model.opset_import,
        graph=graph,
        functions=model.functions if _calls(model) <= _MOST_CALLS else (),
    )


def _calls(model: ModelProto) -> float:
    """How many calls of functions there are once every call is replaced by the function's nodes,
    which is what inference does; infinitely many where one calls itself."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}

    def called(nodes: Iterable[NodeProto]) -> list[tuple[str, str, str]]:
        names = ((n.domain, n.op_type, n.overload) for n in onnx_graph.all_nodes(nodes))
        return [name for name in names if name in functions]

    inside = {name: called(function.node) for name, function in functions.items()}
    counts: dict[tuple[str, str, str], float] = {}
    try:
        for name in TopologicalSorter(inside).static_order():
            counts[name] = sum(1 + counts[other] for other in inside[name])
    except CycleError:
        return math.inf
    return sum(1 + counts[name] for name in called(model.graph.node))


def _is_small(tensor: TensorProto) -> bool:
    inside = tensor.data_location != TensorProto.EXTERNAL
    return inside and math.prod(tensor.dims) <= _LARGE


def _value_info(name: str, tensor: TensorProto) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def _declared(graph: GraphProto) -> Iterator[tuple[str, Type]]:
    values: Iterable[ValueInfoProto] = (*graph.input, *graph.value_info, *graph.output)
    for value in values:
        tensor = value.type.tensor_type
        rank = len(tensor.shape.dim) if tensor.HasField("shape") else None
        yield value.name, (tensor.elem_type or None, rank)
    for initializer in graph.initializer:
        yield initializer.name, (initializer.data_type, len(initializer.dims))

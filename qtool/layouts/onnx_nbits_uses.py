"""Which weights of an ONNX model MatMulNBits and GatherBlockQuantized can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onnx import FunctionProto, ModelProto, NodeProto

from qtool.dtypes import DType
from qtool.formats import Entry
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.bodies import Body, Place
from qtool.formats.onnx.consumers import Consumers, Use
from qtool.formats.onnx.graph import STANDARD, attribute
from qtool.formats.onnx.opset import opset_of
from qtool.formats.onnx.rewriting import get
from qtool.layouts.nbits import NAME, Form, Storage
from qtool.layouts.stored import Part, Stored
from qtool.spec import QuantSpec, TensorInfo

# The first opset whose Gemm and Add broadcast as today's do.
_BROADCASTING = 7
# How many nodes in a row are looked through; a bound, because a broken graph may have cycles.
_LOOK_THROUGH = 4
# The form in which a weight is read when its transpose is read in one.
_TRANSPOSED: dict[Form, Form | str] = {
    Form.COLUMNS: Form.ROWS,
    Form.ROWS: Form.COLUMNS,
    Form.GATHER: "is read by Gather along its columns",
}


class Reading(NamedTuple):
    """How a node reads a weight: in a form, or why in none. passed: the uses by nodes between the
    two, which transpose the weight or do nothing to it."""

    use: Use
    form: Form | str
    passed: tuple[Use, ...]


class NBitsUses:
    """How the nodes of a model read its weights; found: its bodies."""

    def __init__(self, model: ModelProto, found: Sequence[Body]) -> None:
        self._consumers = Consumers(found)
        self._training = onnx_graph.training_reads(model)
        self._opset = opset_of(model)

    def readings(self, place: Place, rank: int) -> list[Reading]:
        """Every reading of a weight."""
        return list(self._readings(place, rank, (), is_transposed=False))

    def forms(self, place: Place, rank: int) -> list[Form]:
        """The forms in which a weight that has no obstacle is read."""
        found = {reading.form for reading in self.readings(place, rank)}
        return [form for form in Form if form in found]

    def obstacle(self, place: Place, rank: int, axis: int) -> str | None:
        """Why a weight with blocks along that axis must stay a tensor of floats."""
        if self._is_given(place):
            return "is an output of a graph, or read in training"
        readings = self.readings(place, rank)
        for reading in readings:
            if isinstance(reading.form, str):
                return reading.form
            if axis != (0 if reading.form is Form.COLUMNS else rank - 1):
                return "is read along different axes"
        return None if readings else "is read by no node"

    def _is_given(self, place: Place) -> bool:
        is_trained = place.body == 0 and place.name in self._training
        return is_trained or self._consumers.is_given(place)

    def _readings(
        self, place: Place, rank: int, passed: tuple[Use, ...], *, is_transposed: bool
    ) -> Iterator[Reading]:
        for use in self._consumers.of(place):
            turns = _turns(use.node, rank) if len(passed) < _LOOK_THROUGH else None
            if turns is not None:
                result = Place(use.body.number, use.node.output[0])
                found = self._readings(
                    result, rank, (*passed, use), is_transposed=is_transposed != turns
                )
                behind = [] if self._is_given(result) else list(found)
                if behind:
                    yield from behind
                    continue
            form = _form(use, rank, self._opset_of(use.body))
            if is_transposed and isinstance(form, Form):
                form = _TRANSPOSED[form]
            yield Reading(use, form, passed)

    def _opset_of(self, body: Body) -> int:
        """Of the standard's operators."""
        root = body.root.proto
        if not isinstance(root, FunctionProto):
            return self._opset
        entry = onnx_graph.opset(root.opset_import)
        return 1 if entry is None else entry.version


def _turns(node: NodeProto, rank: int) -> bool | None:
    """Whether a node that only transposes a matrix, or passes it on, transposes it."""
    if node.domain not in STANDARD or not node.output or _is_parametric(node):
        return None
    if node.op_type == "Transpose" and rank == 2:
        return (onnx_graph.integers(node, "perm") or [1, 0]) == [1, 0]
    return False if node.op_type == "Identity" else None


def _is_parametric(node: NodeProto) -> bool:
    """Whether the callers of a function set attributes of the node."""
    return any(attribute.ref_attr_name for attribute in node.attribute)


class NBitsLayout:
    """The layout of an ONNX model's weights; see layouts.Layout.

    spec_of: of the weight of that name, its granularity aside.
    """

    name = NAME
    left_alone: Sequence[str] = ()
    fuses, mixes = False, True

    def __init__(self, source: OnnxSource, spec_of: Callable[[str], QuantSpec]) -> None:
        self._source, self._spec_of = source, spec_of
        self._uses = NBitsUses(source.model, source.bodies)

    def adapted(self, spec: QuantSpec, storage: DType) -> QuantSpec:
        """The spec as it is."""
        return spec

    def obstacle(self, info: TensorInfo, stored: Stored) -> str | None:
        """Why a tensor cannot be stored so, or None."""
        if info.dtype.bits == 64:
            return f"is {info.dtype}, which MatMulNBits does not take"
        if stored.scale_dtype != info.dtype:
            return f"has {stored.scale_dtype} scales, MatMulNBits needs {info.dtype}"
        rank, width, bits = len(info.shape), info.shape[-1], stored.dtype.bits
        place = self._source.places[info.name]
        obstacle = self._uses.obstacle(place, rank, stored.granularity.attributes["axis"])
        if obstacle is not None or Form.GATHER not in self._uses.forms(place, rank):
            return obstacle
        if bits == 4 and self._source.bodies[place.body].is_in_function:
            return f"is gathered in a function, which may hold no {stored.dtype}"
        if bits != 4 and width * bits % 8:
            return f"has rows of {width} {stored.dtype} codes, which are no whole bytes"
        return None

    def parts(self, tensor: str, stored: Stored) -> list[Part]:
        """What a quantized tensor is made of, for each form in which it is read."""
        spec = self._spec_of(tensor).at(stored.granularity)
        roles = ("codes", "scale", "zero_point")
        return [
            Part(Entry(tensor + part.suffix, part.dtype, part.shape), role)
            for form in self._uses.forms(self._source.places[tensor], len(stored.shape))
            for role, part in zip(
                roles,
                Storage(form, stored.shape, spec, stored.scale_dtype,
                        has_zero_point=stored.zero_point).parts,
                strict=False,
            )
        ]  # fmt: skip

    def reserved(self, tensor: str) -> list[str]:
        """No names: parts get fresh ones."""
        return []

    def documents(
        self, tensors: Mapping[str, Stored], others: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Nothing: models have no such files."""
        return {}


def _form(use: Use, rank: int, opset: int) -> Form | str:
    """The form in which a node reads a weight of that rank, or why in none."""
    node = use.node
    operator = (node.op_type, use.index) if node.domain in STANDARD else ("", 0)
    if _is_parametric(node):
        return f"is read by {node.op_type}, whose attributes the callers of a function set"
    if operator == ("MatMul", 1):
        return Form.COLUMNS if rank == 2 else "is multiplied as more than one matrix"
    if operator == ("Gemm", 1):
        return _gemm_form(node, opset)
    if operator == ("Gather", 0) and attribute(node, "axis", 0) in (0, -rank):
        return Form.GATHER
    if operator == ("MatMul", 0):
        return "is the left factor of MatMul, MatMulNBits has the right one"
    return f"is read by {node.op_type}, which has no counterpart with blocks of codes"


def _gemm_form(node: NodeProto, opset: int) -> Form | str:
    if opset < _BROADCASTING:
        return f"is read by Gemm of opset {opset}, qtool knows it from {_BROADCASTING} on"
    has_factor = get(node, "alpha") not in (None, 1)
    if any(node.input[2:]) and get(node, "beta") not in (None, 1):
        has_factor = True
    if attribute(node, "transA", 0) or has_factor:
        return "is read by Gemm with transA, alpha or beta, which MatMulNBits has not"
    return Form.ROWS if attribute(node, "transB", 0) else Form.COLUMNS

"""ONNX models: a reader of the tensors that the top-level graph stores.

The model is parsed once and checked whole; external data stays where it is until it is read.
Source: ONNX IR.md, onnx.proto, ExternalData.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType, resolve
from qtool.errors import FormatError, QtoolError
from qtool.formats import onnx_graph, onnx_tensor, onnx_wire
from qtool.formats.onnx_graph import STANDARD, Consumers, is_quantized
from qtool.formats.onnx_tensor import Payload
from qtool.spec import Reader, Shape, TensorInfo, reader_of

# Before this IR version every initializer had to be a graph input too, and was a constant.
_OVERRIDABLE = 4


@dataclass(frozen=True, slots=True)
class QuantizedUse:
    """An operator that works on codes, and what is known of how it is quantized.

    tensor: the operator's first input. granularity: "per_tensor", "per_axis" or "blocked".
    """

    tensor: str
    operator: str
    dtype: DType | None
    granularity: str | None
    axis: int | None
    block_size: int | None
    scale_dtype: DType | None


class OnnxSource:
    """An ONNX model, open for reading; safe to read from several threads.

    model: the parsed file, neither external data nor large raw_data loaded (see onnx_wire.py).
    tensors: the stored tensors of the top-level graph by name: its initializers, then its Constant
    nodes. overridable: the graph's inputs, which callers may set, whatever initializers they have.
    external_files: every file of external data that the model names, links resolved.

    Raises FormatError where the file is not a model, or a tensor of it breaks a rule.
    """

    container = "onnx"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = onnx_wire.parse(path)
        self.metadata: Mapping[str, str] = {e.key: e.value for e in self.model.metadata_props}
        self.tensors = self._stored()
        self.overridable = {value.name for value in self.model.graph.input}
        if self.model.ir_version < _OVERRIDABLE:
            self.overridable -= self.tensors.keys()
        regions = [
            onnx_tensor.check(tensor, self.path, self.thing(tensor.name))
            for tensor in onnx_graph.tensors(self.model)
        ]
        self.external_files = {region.path for region in regions if region and not region.is_own}
        self.nbytes = sum(file.stat().st_size for file in (path, *self.external_files))

    def infos(self) -> Sequence[TensorInfo]:
        """The stored tensors of the top-level graph, strings aside, in the order of the file.

        The axes come from the nodes that read the tensor.
        """
        consumers = Consumers(self.model.graph)
        return [
            self._info(name, tensor, consumers)
            for name, tensor in self.tensors.items()
            if tensor.data_type != onnx.TensorProto.STRING
        ]

    def read(self, name: str) -> NDArray[Any]:
        """One tensor: C order, one value per element. Raises FormatError where data is missing."""
        return onnx_tensor.array(self.tensors[name], self.path, self.thing(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The stored bytes of one tensor, in pieces of bounded size."""
        return (piece.tobytes() for piece in self.stored(name).pieces())

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """A Reader of one tensor; errors as read()."""
        dtype = onnx_tensor.dtype_of(self.tensors[name], self.thing(name))
        if dtype.bits < 8:
            yield reader_of(self.read(name))
            return
        with self.stored(name).reading() as read:

            def read_at(start: int, out: NDArray[Any]) -> None:
                read(start * out.itemsize, out.view(np.uint8))

            yield read_at

    def stored(self, name: str) -> Payload:
        """The stored bytes of one tensor. Raises FormatError where data is missing."""
        return onnx_tensor.payload(self.tensors[name], self.path, self.thing(name))

    def close(self) -> None:
        """Nothing is held open."""

    def thing(self, name: str) -> str:
        """How messages name a tensor."""
        return f"{self.path}, tensor {name!r}"

    def quantized(self) -> list[QuantizedUse]:
        """Every operator that works on codes, in nested graphs and functions too."""
        known = self._types()
        functions = (node for function in self.model.functions for node in function.node)
        nodes = onnx_graph.all_nodes((*self.model.graph.node, *functions))
        return [_use(node, known) for node in nodes if is_quantized(node)]

    def _stored(self) -> dict[str, onnx.TensorProto]:
        graph = self.model.graph
        found = [(tensor.name, tensor) for tensor in graph.initializer]
        for node in graph.node:
            value = onnx_graph.constant_value(node)
            if value is not None and node.output:
                found.append((node.output[0], value))
        stored = dict(found)
        if len(stored) != len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(self.thing(twice), "is defined twice", "names must be unique")
        return stored

    def _info(self, name: str, tensor: onnx.TensorProto, consumers: Consumers) -> TensorInfo:
        dtype = onnx_tensor.dtype_of(tensor, self.thing(name))
        shape = tuple(tensor.dims)
        output_axis, reduced_axis = consumers.axes(name, len(shape)) or (None, None)
        return TensorInfo(
            name,
            shape,
            dtype,
            dtype.nbytes(math.prod(shape)),
            output_axis,
            reduced_axis,
            self._obstacle(name, consumers),
        )

    def _obstacle(self, name: str, consumers: Consumers) -> str | None:
        """Why the tensor cannot become the output of a DequantizeLinear node."""
        if name in self.overridable:
            return "is a graph input that callers may set, with this as its default"
        for training in self.model.training_info:
            bindings = (*training.update_binding, *training.initialization_binding)
            if any(binding.key == name for binding in bindings):
                return "is updated in training"
        for node, _ in consumers.of(name):
            if is_quantized(node):
                return f"is read by {node.op_type}, so it is part of something quantized already"
        return None

    def _types(self) -> dict[str, tuple[DType | None, Shape | None]]:
        known: dict[str, tuple[DType | None, Shape | None]] = {}
        for graph in onnx_graph.graphs(self.model.graph):
            for value in (*graph.input, *graph.value_info, *graph.output):
                known[value.name] = (_dtype(value.type.tensor_type.elem_type), None)
            for tensor in graph.initializer:
                known[tensor.name] = (_dtype(tensor.data_type), tuple(tensor.dims))
            for node in graph.node:
                constant = onnx_graph.constant_value(node)
                if constant is not None and node.output:
                    known[node.output[0]] = (_dtype(constant.data_type), tuple(constant.dims))
        return known


def _dtype(code: int) -> DType | None:
    try:
        return resolve(code) if code else None
    except QtoolError:
        return None


def _use(
    node: onnx.NodeProto, known: Mapping[str, tuple[DType | None, Shape | None]]
) -> QuantizedUse:
    unknown = (None, None)
    inputs = [known.get(name, unknown) for name in node.input] + [unknown] * 3
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.domain not in STANDARD:
        block_size = onnx_graph.attribute(node, "block_size", 0) or None
        bits = onnx_graph.attribute(node, "bits", 0)
        dtype = DTYPES.get(f"uint{bits}") if bits else None
        return QuantizedUse(
            node.input[0] if node.input else "",
            node.op_type,
            dtype,
            "blocked" if block_size else None,
            None,
            block_size,
            None,
        )
    (stored, _), (scale_dtype, scale_shape), (zero_dtype, _) = inputs[:3]
    if node.op_type == "QuantizeLinear":
        output = onnx_graph.attribute(node, "output_dtype", DTYPES["uint8"].code or 0)
        stored = zero_dtype or _dtype(output)
    block_size = onnx_graph.attribute(node, "block_size", 0) or None
    granularity = _granularity(scale_shape, block_size)
    axis = onnx_graph.attribute(node, "axis", 1)
    return QuantizedUse(
        node.input[0] if node.input else "",
        node.op_type,
        stored or zero_dtype,
        granularity,
        axis if granularity in ("per_axis", "blocked") else None,
        block_size,
        scale_dtype,
    )


def _granularity(scale: Shape | None, block_size: int | None) -> str | None:
    if block_size:
        return "blocked"
    if scale is None:
        return None
    return "per_tensor" if scale in ((), (1,)) else "per_axis"

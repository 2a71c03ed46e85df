"""ONNX models: a reader of the tensors that a model stores.

The model is parsed once and checked whole; external data stays where it is until it is read.
Source: ONNX IR.md, onnx.proto, ExternalData.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats import steady
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx import wire as onnx_wire
from qtool.formats.onnx.axes import RECURRENT
from qtool.formats.onnx.bodies import Place
from qtool.formats.onnx.consumers import Consumers, Use
from qtool.formats.onnx.graph import is_quantized
from qtool.formats.onnx.listing import listing
from qtool.formats.onnx.tensor import Payload
from qtool.packing import unpack
from qtool.spec import Reader, TensorInfo, reader_of

# Before this IR version every initializer had to be a graph input too, and was a constant.
_OVERRIDABLE = 4
# The standard's operators whose attributes are graphs.
_NESTING = ("FlexAttention", "If", "Loop", "Scan", "SequenceMap")


class OnnxSource:
    """An ONNX model, open for reading; safe to read from several threads.

    model: the parsed file, neither external data nor large raw_data loaded (see onnx_wire.py).
    tensors: the stored tensors by label (see Labels): initializers and Constant nodes, of the
    model's graph, then of nested ones and functions. places: where they are among bodies.
    overridable: those that are inputs too, which callers may set.
    hidden: float tensors that are no such tensors, with what keeps them from being ones, by label.
    external_files: every file of external data that the model names, links resolved.

    Raises FormatError where the file is not a model, or a tensor of it breaks a rule.
    """

    container = "onnx"

    def __init__(self, path: Path) -> None:
        self.path = path
        state = steady.state_of(path)
        self.model = onnx_wire.parse(path)
        self.metadata: Mapping[str, str] = {e.key: e.value for e in self.model.metadata_props}
        found = listing(self.model, path)
        self.bodies, self.tensors, self.places = found.bodies, found.tensors, found.places
        self.hidden = found.hidden
        self._check_nesting()
        inputs = {Place(body.number, name) for body in self.bodies for name in body.inputs}
        if self.model.ir_version < _OVERRIDABLE:
            inputs = {place for place in inputs if place.body}
        self.overridable = {label for label, place in self.places.items() if place in inputs}
        regions = [
            onnx_tensor.check(tensor, self.path, self.thing(tensor.name))
            for tensor in onnx_graph.tensors(self.model)
        ]
        self.external_files = {region.path for region in regions if region and not region.is_own}
        self._states = {region.path: region.state for region in regions if region} | {path: state}
        self.nbytes = sum(file.stat().st_size for file in (path, *self.external_files))

    def infos(self) -> Sequence[TensorInfo]:
        """The stored tensors, strings aside, in their order, then the hidden ones.

        The axes come from the nodes that read the tensor.
        """
        consumers = Consumers(self.bodies)
        found = [
            self._info(name, tensor, consumers)
            for name, tensor in self.tensors.items()
            if tensor.data_type != onnx.TensorProto.STRING
        ]
        for name, (tensor, obstacle) in self.hidden.items():
            dtype = onnx_tensor.dtype_of(tensor, self.thing(name))
            shape = tuple(tensor.dims)
            nbytes = dtype.nbytes(math.prod(shape))
            found.append(TensorInfo(name, shape, dtype, nbytes, obstacle=obstacle))
        return found

    def read(self, name: str) -> NDArray[Any]:
        """One tensor: C order, one value per element. Raises FormatError where data is missing."""
        tensor = self._tensor(name)
        dtype = onnx_tensor.dtype_of(tensor, self.thing(name))
        return unpack(self.payload(tensor).array(), dtype, tuple(tensor.dims))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The stored bytes of one tensor, in pieces of bounded size."""
        return (piece.tobytes() for piece in self.stored(name).pieces())

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """A Reader of one tensor; errors as read()."""
        dtype = onnx_tensor.dtype_of(self._tensor(name), self.thing(name))
        if dtype.bits < 8:
            yield reader_of(self.read(name))
            return
        with self.stored(name).reading() as read:

            def read_at(start: int, out: NDArray[Any]) -> None:
                read(start * out.itemsize, out.view(np.uint8))

            yield read_at

    def stored(self, name: str) -> Payload:
        """The stored bytes of one tensor. Raises FormatError where data is missing."""
        return self.payload(self._tensor(name))

    def payload(self, tensor: onnx.TensorProto) -> Payload:
        """The stored bytes of a tensor of the model, or of one like it that names the same data."""
        thing = self.thing(tensor.name)
        return onnx_tensor.payload(tensor, self.path, thing, self._states)

    def close(self) -> None:
        """Nothing is held open."""

    def thing(self, name: str) -> str:
        """How messages name a tensor."""
        return f"{self.path}, tensor {name!r}"

    def _check_nesting(self) -> None:
        """Refuse graphs in nodes that have none: what takes such a node's place would lose them."""
        for node in (body.node for body in self.bodies if body.node is not None):
            is_standard = node.domain in onnx_graph.STANDARD and node.op_type not in _NESTING
            if is_standard or is_quantized(node):
                rule = f"{node.op_type} has no graph in it"
                raise FormatError(f"{self.path}, node {node.name!r}", rule, "the model is damaged")

    def _tensor(self, name: str) -> onnx.TensorProto:
        return self.tensors[name] if name in self.tensors else self.hidden[name][0]

    def _info(self, name: str, tensor: onnx.TensorProto, consumers: Consumers) -> TensorInfo:
        dtype = onnx_tensor.dtype_of(tensor, self.thing(name))
        shape = tuple(tensor.dims)
        axes = consumers.axes(self.places[name], shape)
        obstacle = self._obstacle(name, consumers)
        is_vector = dtype.kind == "float" and len(shape) > 1 and sum(n > 1 for n in shape) < 2
        if obstacle is None and axes is None and name in self.overridable:
            obstacle = "is a graph input that callers may set, read by no matrix operator"
        if obstacle is None and axes is None and is_vector:
            obstacle = "a vector in its shape, read by no matrix operator"
        return TensorInfo(
            name, shape, dtype, dtype.nbytes(math.prod(shape)), *(axes or (None, None)), obstacle
        )

    def _obstacle(self, name: str, consumers: Consumers) -> str | None:
        """Why the tensor cannot become the output of a DequantizeLinear node, or should not."""
        place = self.places[name]
        if name in self.overridable and place.body:
            return "is an input of the nested graph that it is in"
        for training in self.model.training_info:
            bindings = (*training.update_binding, *training.initialization_binding)
            if not place.body and any(binding.key == name for binding in bindings):
                return "is updated in training"
        uses = consumers.of(place)
        for operator in (use.node.op_type for use in uses if is_quantized(use.node)):
            return f"is read by {operator}, so it is part of something quantized already"
        if uses and all(map(_is_no_weight, uses)):
            return f"is a bias or a state of {uses[0].node.op_type}"
        return None


def _is_no_weight(use: Use) -> bool:
    """Whether a recurrent operator reads a tensor as something else than W or R."""
    return use.node.op_type in RECURRENT and use.index > 2

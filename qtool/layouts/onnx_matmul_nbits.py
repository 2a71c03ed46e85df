"""Weight-only quantization of an ONNX model with onnxruntime's operators.

MatMul and Gemm become MatMulNBits, Gather becomes GatherBlockQuantized; see nbits.py. A Gemm's
third input is added by an Add behind it, as not every execution provider has a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from qtool.formats.onnx import OnnxSource, editing
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, bodies
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_ir_version
from qtool.formats.onnx.writer import ModelWriter
from qtool.layouts import nbits_codes
from qtool.layouts.metadata import KEY
from qtool.layouts.nbits import DOMAIN, GATHER, MATMUL, Form, Storage
from qtool.layouts.onnx_bias import add_behind, insert_behind
from qtool.layouts.onnx_nbits_uses import NBitsUses, Reading
from qtool.layouts.onnx_weight import Weight
from qtool.layouts.provenance import Provenance
from qtool.layouts.reordered import Memory
from qtool.layouts.wrapper import Wrapper
from qtool.packing import pack
from qtool.tensor import QuantizedTensor, Target

# From this IR version on initializers are no inputs; and the first that has int4 and uint4.
_CONSTANTS, _TYPED = 4, 10


class OnnxMatMulNBits(Wrapper[ModelWriter]):
    """The quantized copy of a model at path; used as OnnxQdq.

    weights: those without obstacle, by NBitsLayout, in blocks along the axis that is summed over.
    """

    def __init__(
        self,
        source: OnnxSource,
        weights: Mapping[str, Weight],
        path: Path,
        *,
        external_data: bool,
        force: bool = True,
        provenance: Provenance | None = None,
    ) -> None:
        self._source = source
        self._names = Names.of(source.model)
        text = None if provenance is None else provenance.to_text()
        self._model = editing.copied(source.model, KEY, text)
        self._memory = Memory(path.resolve().parent)
        self._storages: dict[str, list[Storage]] = {}
        self._parts: dict[str, dict[Form, list[str]]] = {}  # of each storage
        made = self._replace(weights) if weights else {}
        self._file = ModelWriter(
            path, self._model, made, source=source, external_data=external_data, force=force
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the model and its data when they are complete."""
        return self._file.nbytes

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Store the codes, scale and zero point of a weight."""
        with self.target(name) as target:
            dtype = tensor.spec.dtype
            parts = [(target.codes, tensor.y), (target.zero_point, tensor.zero_point)]
            for write, codes in parts:
                if write is not None and codes is not None:
                    write(0, pack(codes, dtype) if target.is_packed else codes.view(np.uint8))
            target.scale(0, tensor.scale)

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a weight go that is quantized tile by tile."""
        with ExitStack() as stack:
            writers = [
                [stack.enter_context(self._file.writing(part)) for part in parts]
                for parts in self._parts[name].values()
            ]
            storages = self._storages[name]
            yield stack.enter_context(nbits_codes.target(storages, writers, self._memory))

    def _replace(self, weights: Mapping[str, Weight]) -> dict[str, TensorProto]:
        """Put parts that hold no values yet, and the operators, in the place of the weights.

        Returns the parts by name.
        """
        found, tensors, places = bodies(self._model), self._source.tensors, self._source.places
        uses = NBitsUses(self._model, found)
        readings = {
            label: uses.readings(places[label], len(tensor.dims))
            for label, tensor in tensors.items()
            if label in weights
        }
        for label, known in readings.items():
            self._plan(label, known, weights[label])
        self._import(found, readings)
        added: dict[int, NodeProto] = {}  # by the identity of the node in front of it
        for label, known in readings.items():
            for reading in known:
                if (bias := self._rewrite(label, reading)) is not None:
                    added[id(reading.use.node)] = bias
        insert_behind(found, added)
        self._remove(found, readings)
        parts: set[str] = set()
        for label in readings:
            parts.update(self._store(label, found[places[label].body]))
        return editing.held(found, parts)

    def _plan(self, label: str, readings: Sequence[Reading], weight: Weight) -> None:
        """Choose how a weight is stored: once for each form in which it is read."""
        shape = tuple(self._source.tensors[label].dims)
        read = {reading.form for reading in readings}
        storages = [
            Storage(form, shape, weight.spec, weight.scale_dtype,
                    has_zero_point=weight.has_zero_point)
            for form in Form if form in read
        ]  # fmt: skip
        name = self._source.places[label].name
        self._storages[label] = storages
        self._parts[label] = {
            storage.form: [self._names.fresh(name + part.suffix) for part in storage.parts]
            for storage in storages
        }

    def _import(self, found: Sequence[Body], readings: Mapping[str, Sequence[Reading]]) -> None:
        """Let the model and its functions import the operators, and the model have initializers of
        the types needed."""
        is_typed = any(one.is_typed for storages in self._storages.values() for one in storages)
        raise_ir_version(self._model, _TYPED if is_typed else _CONSTANTS)
        protos: list[ModelProto | FunctionProto] = [self._model]
        for known in readings.values():
            roots = (reading.use.body.root.proto for reading in known)
            protos += [proto for proto in roots if isinstance(proto, FunctionProto)]
        for proto in protos:
            if all(entry.domain != DOMAIN for entry in proto.opset_import):
                proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))

    def _store(self, label: str, body: Body) -> Iterator[str]:
        """Add the parts of a weight to the body that has it; their names."""
        for storage in self._storages[label]:
            names = self._parts[label][storage.form]
            made = [
                onnx_tensor.tensor_proto(name, part.dtype, part.shape)
                for name, part in zip(names, storage.parts, strict=True)
            ]
            for constant in reversed(editing.store(body, made)):
                body.proto.node.insert(0, constant)
            yield from names

    def _rewrite(self, label: str, reading: Reading) -> NodeProto | None:
        """Let a node read the parts of a weight; the node that must come behind it, if any."""
        node, form = reading.use.node, reading.form
        assert isinstance(form, Form)
        storage = next(one for one in self._storages[label] if one.form is form)
        parts = self._parts[label][form]
        attributes: dict[str, Any] = {"block_size": storage.block_size}
        bias = None
        if form is Form.GATHER:
            attributes |= {"gather_axis": 0, "quantize_axis": len(storage.shape) - 1}
            if not storage.is_typed:
                attributes["bits"] = storage.dtype.bits
            node.op_type, inputs = GATHER, [parts[0], node.input[1], *parts[1:]]
        else:
            attributes |= {"K": storage.depth, "N": storage.count, "bits": storage.dtype.bits}
            if any(node.input[2:]):
                bias = add_behind(node, node.input[2], self._names)
            node.op_type, inputs = MATMUL, [node.input[0], *parts]
        node.domain = DOMAIN
        del node.input[:], node.attribute[:]
        node.input.extend(inputs)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
        return bias

    def _remove(self, found: Sequence[Body], readings: Mapping[str, Sequence[Reading]]) -> None:
        """Remove the weights, and the nodes that passed them on."""
        gone: list[set[str]] = [set() for _ in found]
        for label, known in readings.items():
            place = self._source.places[label]
            gone[place.body].add(place.name)
            for reading in known:
                for use in reading.passed:
                    gone[use.body.number].update(use.node.output)
        for body, names in zip(found, gone, strict=True):
            editing.remove(body, names)

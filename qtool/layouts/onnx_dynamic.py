"""Dynamic quantization of an ONNX model: 8-bit activations and weights, integer products.

y = MatMul(x, w) becomes, with codes w_q, scale w_s and zero point w_z of the weight,

    x_q, x_s, x_z = DynamicQuantizeLinear(x)
    y = Cast(MatMulInteger(x_q, w_q, x_z, w_z)) * (x_s * w_s)

in float32; Conv likewise with ConvInteger. What Gemm and Conv have besides follows: alpha, and the
bias, times beta. DynamicQuantizeLinear takes float32 alone: for other floats a Cast stands before
it and behind the product. The operators stand in the order that onnxruntime fuses.
Source: ONNX DynamicQuantizeLinear 11, MatMulInteger 10, ConvInteger 10, Gemm 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from qtool.dtypes import DTYPES, DType
from qtool.formats.onnx import OnnxSource, editing
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, Place, bodies
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.layouts.metadata import KEY
from qtool.layouts.onnx_integer_nodes import IntegerNodes, Parts
from qtool.layouts.onnx_products import Product, is_product
from qtool.layouts.provenance import Provenance
from qtool.layouts.wrapper import Wrapper
from qtool.packing import pack
from qtool.spec import PerAxis, PerTensor, QuantSpec, Shape, Writer
from qtool.tensor import QuantizedTensor, Target

SCALE = DTYPES["float32"]
# The first opset with DynamicQuantizeLinear.
_OPSET = 11
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """How a weight is multiplied by, and what it is quantized to, with float32 scales."""

    product: Product
    spec: QuantSpec

    @property
    def parts(self) -> dict[str, tuple[DType, Shape]]:
        """Type and shape of the codes, the scale and the zero point that are stored.

        A zero point that is the same for all channels is stored once.
        """
        per_tensor = self.spec.granularity == PerTensor()
        channels = () if per_tensor else self.product.channels_shape
        found = {
            "quantized": (self.spec.dtype, self.product.codes_shape),
            "scale": (SCALE, channels),
        }
        if self.spec.has_zero_point:
            found["zero_point"] = (self.spec.dtype, () if self.spec.symmetric else channels)
        return found


def integer_weight(product: Product, dtype: DType, *, per_tensor: bool) -> IntegerWeight:
    """A weight with codes of dtype, int8 or uint8, as onnxruntime multiplies by them.

    int8: zero point 0. uint8: a zero point per scale, or 128 where there can be but one.
    """
    granularity = PerTensor() if per_tensor else PerAxis(product.output_axis)
    symmetric = None if per_tensor or product.takes_zero_points else True
    spec = QuantSpec(dtype, granularity, symmetric=symmetric, scale_dtype=SCALE)
    return IntegerWeight(product, spec)


class OnnxDynamic(Wrapper[ModelWriter]):
    """The dynamically quantized copy of a model at path: planned from headers, filled weight by
    weight.

    weights: what those named so are quantized to. external_data: see ModelWriter. provenance: for
    the model's metadata. Leaving it completes the file.

    Raises FormatError where the model cannot be converted to opset 11, OutputError as ModelWriter.
    """

    def __init__(
        self,
        source: OnnxSource,
        weights: Mapping[str, IntegerWeight],
        path: Path,
        *,
        external_data: bool,
        force: bool = True,
        provenance: Provenance | None = None,
    ) -> None:
        self._source = source
        self._weights = weights
        self._names = Names.of(source.model)
        text = None if provenance is None else provenance.to_text()
        self._model = editing.copied(source.model, KEY, text)
        if weights:
            raise_opset(self._model, _OPSET, self._names, str(source.path))
        found = bodies(self._model)
        labels = {source.places[label]: label for label in weights}
        reading = [_reading(body, labels) for body in found]
        self._parts = {label: self._name_parts(label) for label in weights}
        for body in found:
            self._store(body, {p.name: labels[p] for p in labels if p.body == body.number})
        for body, inside in zip(found, reading, strict=True):
            self._replace_nodes(body, inside)
        names = {name for parts in self._parts.values() for name in parts.names}
        made = editing.held(found, names)
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
            target.codes(0, pack(tensor.y, tensor.spec.dtype))
            target.scale(0, pack(tensor.scale, SCALE))
            if target.zero_point is not None and tensor.zero_point is not None:
                target.zero_point(0, pack(tensor.zero_point, tensor.spec.dtype))

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a weight go that is quantized tile by tile.

        The codes of one that is stored transposed are in memory until all of them are known.
        """
        parts, weight = self._parts[name], self._weights[name]
        with ExitStack() as stack:
            codes = stack.enter_context(self._file.writing(parts.codes))
            scale = stack.enter_context(self._file.writing(parts.scale))
            zero_point = None
            if parts.zero_point:
                zero_point = stack.enter_context(self._file.writing(parts.zero_point))
                zero_point = _first_alone(zero_point) if weight.spec.symmetric else zero_point
            if weight.product.is_transposed:
                codes = stack.enter_context(_transposing(codes, weight.product.shape))
            yield Target(codes, scale, zero_point, is_packed=True)

    def _name_parts(self, label: str) -> Parts:
        weight, names = self._weights[label], {"zero_point": ""}
        for suffix in weight.parts:
            names[suffix] = self._names.fresh(f"{self._source.places[label].name}_{suffix}")
        return Parts(
            weight.product,
            names["quantized"],
            names["scale"],
            names["zero_point"],
            self._source.tensors[label].data_type,
        )

    def _store(self, body: Body, labels: Mapping[str, str]) -> None:
        """Put parts that hold no values yet in the place of the weights of a body, by name."""
        nodes = {}
        for name, label in labels.items():
            stored = self._weights[label].parts.values()
            protos = [
                onnx_tensor.tensor_proto(part, dtype, shape)
                for part, (dtype, shape) in zip(self._parts[label].names, stored, strict=True)
            ]
            nodes[name] = editing.store(body, protos)
        editing.replace(body, nodes)
        editing.remove(body, labels)

    def _replace_nodes(self, body: Body, reading: Sequence[tuple[NodeProto, str]]) -> None:
        """Put integer products in the place of the nodes of a body that read the weights."""
        maker, nodes = IntegerNodes(self._names), body.proto.node
        made = {id(node): maker.replacing(node, self._parts[label]) for node, label in reading}
        for index in reversed(range(len(nodes))):
            if (found := made.get(id(nodes[index]))) is not None:
                del nodes[index]
                for new in reversed(found):
                    nodes.insert(index, new)


def _reading(body: Body, labels: Mapping[Place, str]) -> list[tuple[NodeProto, str]]:
    """The nodes of a body that multiply by a weight, and its label."""
    products = [node for node in body.proto.node if is_product(node)]
    places = [(node, body.place(node.input[1])) for node in products]
    return [(node, labels[place]) for node, place in places if place and place in labels]


def _first_alone(write: Writer) -> Writer:
    """Stores the first element of what it is given, which are all the same."""

    def write_first(offset: int, data: NDArray[Any]) -> None:
        if offset == 0:
            write(0, data.reshape(-1)[:1])

    return write_first


@contextmanager
def _transposing(write: Writer, shape: Shape) -> Iterator[Writer]:
    """A Writer of the bytes of a matrix, which are stored transposed when it is left."""
    matrix = np.empty(shape, np.uint8)
    flat = matrix.reshape(-1)

    def write_rows(offset: int, data: NDArray[Any]) -> None:
        flat[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    yield write_rows
    rows, columns = shape
    step = max(1, _PIECE // rows)
    for start in range(0, columns, step):
        write(start * rows, np.ascontiguousarray(matrix[:, start : start + step].T).reshape(-1))

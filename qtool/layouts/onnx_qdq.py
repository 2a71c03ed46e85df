"""Weight-only quantization of an ONNX model: codes, scale and zero point -> DequantizeLinear.

Each weight becomes initializers of codes, scales and zero points, and a DequantizeLinear node whose
output has the weight's name: consumers, graph outputs and nested graphs that use the name stay as
they are.
Source: ONNX DequantizeLinear, versions 10 to 28; IR.md.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from qtool.dtypes import DTYPES, DType, names, resolve
from qtool.errors import SpecError
from qtool.formats import onnx_graph, onnx_tensor
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx_graph import Names
from qtool.formats.onnx_opset import ir_version, raise_opset
from qtool.formats.onnx_tensor import Payload
from qtool.formats.onnx_writer import INLINE_LIMIT, Values, write_model
from qtool.packing import pack
from qtool.spec import QuantSpec, Shape
from qtool.tensor import QuantizedTensor

# The first opset whose DequantizeLinear has the granularity, and its attribute output_dtype.
_GRANULARITIES = {"per_tensor": 10, "per_axis": 13, "blocked": 21}
_OUTPUT_DTYPE = 23
_FLOAT32, _FLOAT64 = DTYPES["float32"], DTYPES["float64"]
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """Codes, scale or zero point of a weight."""

    dtype: DType
    shape: Shape
    payload: Payload


class OnnxQdq:
    """The quantized copy of a model: planned from headers, filled weight by weight, written once.

    specs: what the weights, named as in source.infos(), are quantized to. scale_dtypes: the
    storage types of their scales.

    Raises SpecError for a scale type that DequantizeLinear does not take, FormatError where the
    model cannot be converted to the opset that the types need.
    """

    def __init__(
        self,
        source: OnnxSource,
        specs: Mapping[str, QuantSpec],
        scale_dtypes: Mapping[str, DType],
    ) -> None:
        needed = max(
            (
                required_opset(spec, scale_dtypes[name], self._dtype(source, name))
                for name, spec in specs.items()
            ),
            default=0,
        )
        self._source = source
        self._parts: dict[str, tuple[list[_Part], dict[str, int]]] = {}
        self._names = Names(source.model)
        self._model = ModelProto()
        self._model.CopyFrom(source.model)
        if needed:
            raise_opset(self._model, needed, self._names, str(source.path))
            self._raise_ir_version(ir_version(needed))
        # Beyond the limit, where the result gets a data file, the values wait on the disk.
        self._spool = tempfile.SpooledTemporaryFile(INLINE_LIMIT)  # noqa: SIM115
        weakref.finalize(self, self._spool.close)

    def add(self, name: str, tensor: QuantizedTensor) -> int:
        """Store a quantized weight. Gives the bytes of its codes, scale and zero point."""
        arrays = [tensor.y, tensor.scale]
        if tensor.zero_point is not None:
            arrays.append(tensor.zero_point)
        parts = [self._keep(values) for values in arrays]
        self._parts[name] = (parts, tensor.spec.granularity.attributes)
        return sum(part.payload.nbytes for part in parts)

    def write(self, path: Path, *, external_data: bool) -> None:
        """Write the model, once; see write_model() for external_data and errors."""
        graph = self._model.graph
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name in self._parts:
                del graph.initializer[index]
        values: list[Values] = []
        made = {
            name: self._nodes(name, values) for name in self._source.tensors if name in self._parts
        }
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if onnx_graph.constant_value(node) is not None and node.output[0] in made:
                del graph.node[index]
                for new in reversed(made.pop(node.output[0])):
                    graph.node.insert(index, new)
        for nodes in reversed(made.values()):
            for new in reversed(nodes):
                graph.node.insert(0, new)
        write_model(path, self._model, values, source=self._source, external_data=external_data)

    def _keep(self, array: NDArray[Any]) -> _Part:
        dtype = resolve(array.dtype)
        packed = pack(array, dtype)
        start = self._spool.seek(0, 2)
        self._spool.write(packed.data)
        payload = Payload(packed.nbytes, lambda: self._kept(start, packed.nbytes))
        return _Part(dtype, array.shape, payload)

    def _kept(self, start: int, nbytes: int) -> Iterator[bytes]:
        for at in range(start, start + nbytes, _PIECE):
            self._spool.seek(at)
            yield self._spool.read(min(_PIECE, start + nbytes - at))

    def _nodes(self, name: str, values: list[Values]) -> list[NodeProto]:
        """Add the initializers of a weight to the graph; the nodes that compute it from them."""
        parts, granularity = self._parts[name]
        inputs = []
        for part, suffix in zip(parts, ("quantized", "scale", "zero_point"), strict=False):
            inputs.append(self._names.fresh(f"{name}_{suffix}"))
            proto = onnx_tensor.tensor_proto(inputs[-1], part.dtype, part.shape)
            self._model.graph.initializer.append(proto)
            values.append((self._model.graph.initializer[-1], part.payload))
        dtype = self._dtype(self._source, name)
        result = _result(dtype)
        output = name if result == dtype else self._names.fresh(f"{name}_{result}")
        attributes: dict[str, Any] = dict(granularity)
        if parts[1].dtype != result and result.code is not None:
            attributes["output_dtype"] = result.code
        node_name = self._names.fresh(f"{name}_DequantizeLinear")
        nodes = [helper.make_node("DequantizeLinear", inputs, [output], node_name, **attributes)]
        if output != name:
            node_name = self._names.fresh(f"{name}_Cast")
            nodes.append(helper.make_node("Cast", [output], [name], node_name, to=dtype.code))
        return nodes

    def _raise_ir_version(self, version: int) -> None:
        model = self._model
        if model.ir_version < 4 <= version:
            # Initializers had to be graph inputs too; from IR version 4 on that would make them
            # inputs that callers may set.
            for index in reversed(range(len(model.graph.input))):
                if model.graph.input[index].name in self._source.tensors:
                    del model.graph.input[index]
        model.ir_version = max(model.ir_version, version)

    @staticmethod
    def _dtype(source: OnnxSource, name: str) -> DType:
        return onnx_tensor.dtype_of(source.tensors[name], source.thing(name))


def required_opset(spec: QuantSpec, scale: DType, weight: DType) -> int:
    """The first opset whose DequantizeLinear takes such codes and scales, and gives the weight.

    Raises SpecError where none does.
    """
    if spec.dtype.opset is None or scale.scale_opset is None:
        allowed = [d for d in DTYPES.values() if d.scale_opset and d.kind == "float"]
        raise SpecError(
            "scale_dtype", f"DequantizeLinear takes no {scale} scales", "use " + names(allowed)
        )
    needed = [spec.dtype.opset, scale.scale_opset, _GRANULARITIES[spec.granularity.name]]
    if scale != _result(weight):
        needed.append(_OUTPUT_DTYPE)
    return max(needed)


def _result(weight: DType) -> DType:
    """What DequantizeLinear gives for a weight; it has no float64."""
    return _FLOAT32 if weight == _FLOAT64 else weight

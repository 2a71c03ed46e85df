"""Weight-only quantization of an ONNX model: codes, scale and zero point -> DequantizeLinear.

Each weight becomes initializers of codes, scales and zero points, and a DequantizeLinear node whose
output has the weight's name, in the graph that the weight is in: consumers, graph outputs and
nested graphs that use the name stay as they are. Functions have Constant nodes for initializers.
Source: ONNX DequantizeLinear, versions 10 to 28; IR.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from qtool.dtypes import DType, resolve
from qtool.formats.onnx import OnnxSource, editing
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Body, bodies
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.layouts.metadata import KEY
from qtool.layouts.onnx_weight import Weight, result_dtype
from qtool.layouts.provenance import Provenance
from qtool.layouts.wrapper import Wrapper
from qtool.packing import pack
from qtool.tensor import QuantizedTensor, Target


class OnnxQdq(Wrapper[ModelWriter]):
    """The quantized copy of a model at path: planned from headers, filled weight by weight.

    weights: what those named so in source.infos() are quantized to. external_data, force:
    see ModelWriter. provenance: for the model's metadata. Leaving it completes the file.

    Raises SpecError for a scale type that DequantizeLinear does not take, FormatError where the
    model cannot be converted to the opset that the types need, OutputError as ModelWriter.
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
        for name, weight in weights.items():
            if source.bodies[source.places[name].body].is_in_function:
                weight.check_function(name)
        if weights:
            needed = max(w.required_opset(self._dtype(name)) for name, w in weights.items())
            raise_opset(self._model, needed, self._names, str(source.path))
        self._parts: dict[str, dict[str, str]] = {}  # by label, then role
        made = self._replace(weights)
        self._file = ModelWriter(
            path, self._model, made, source=source, external_data=external_data, force=force
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the model and its data when they are complete."""
        return self._file.nbytes

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Store the parts of a weight."""
        arrays = {
            "codes": tensor.y,
            "scale": tensor.scale,
            "zero_point": tensor.zero_point,
            "global_scale": np.float32(tensor.global_scale or 1),
        }
        for role, part in self._parts[name].items():
            values = np.asarray(arrays[role])
            with self._file.writing(part) as write:
                write(0, pack(values, resolve(values.dtype)))

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a weight go that is quantized tile by tile."""
        with ExitStack() as stack:
            writers = {
                role: stack.enter_context(self._file.writing(part))
                for role, part in self._parts[name].items()
            }
            yield Target(
                writers["codes"], writers["scale"], writers.get("zero_point"), is_packed=True,
                global_scale=writers.get("global_scale"),
            )  # fmt: skip

    def _replace(self, weights: Mapping[str, Weight]) -> dict[str, TensorProto]:
        """Put parts that hold no values yet, and nodes, in the place of the weights.

        Returns the parts by name.
        """
        found = bodies(self._model)
        for body in found:
            nodes = {
                place.name: self._nodes(place.name, body, label, weights[label])
                for label, place in self._source.places.items()
                if label in weights and place.body == body.number
            }
            editing.replace(body, nodes)  # a weight that callers may set is fixed from now on
        return editing.held(
            found, {part for parts in self._parts.values() for part in parts.values()}
        )

    def _nodes(self, name: str, body: Body, label: str, weight: Weight) -> list[NodeProto]:
        """The nodes that compute a weight from its parts, which the body is given."""
        shape = tuple(self._source.tensors[label].dims)
        protos: dict[str, TensorProto] = {}
        for part in weight.parts(shape):
            part_name = self._names.fresh(f"{name}_{part.suffix}")
            protos[part.role] = onnx_tensor.tensor_proto(part_name, part.dtype, part.shape)
        inputs = {role: proto.name for role, proto in protos.items()}
        self._parts[label] = dict(inputs)
        if weight.has_two_levels and not weight.spec.global_scale:
            protos["global_scale"].raw_data = np.float32(1).tobytes()
            del self._parts[label]["global_scale"]
        nodes = editing.store(body, protos.values())
        if weight.has_two_levels:
            levels = [inputs["scale"], inputs.pop("global_scale")]
            inputs["scale"] = self._names.fresh(f"{name}_scale")
            nodes.append(self._dequantize(levels, inputs["scale"]))
        dtype = self._dtype(label)
        result = result_dtype(dtype)
        output = name if result == dtype else self._names.fresh(f"{name}_{result}")
        attributes: dict[str, Any] = weight.spec.granularity.resolve(shape).attributes
        if weight.operand_dtype != result and result.code is not None:
            attributes["output_dtype"] = result.code
        nodes.append(self._dequantize(inputs.values(), output, **attributes))
        if output != name:
            node_name = self._names.fresh(f"{name}_Cast")
            nodes.append(helper.make_node("Cast", [output], [name], node_name, to=dtype.code))
        return nodes

    def _dequantize(self, inputs: Iterable[str], output: str, **attributes: Any) -> NodeProto:
        name = self._names.fresh(f"{output}_DequantizeLinear")
        return helper.make_node("DequantizeLinear", [*inputs], [output], name, **attributes)

    def _dtype(self, name: str) -> DType:
        return onnx_tensor.dtype_of(self._source.tensors[name], self._source.thing(name))

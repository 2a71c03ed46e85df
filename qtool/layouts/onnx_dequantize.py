"""Floats again from a quantized ONNX model: DequantizeLinear nodes with stored inputs are folded.

Products of stored codes become products of floats before that: see onnx_integer_back.py; for blocks
of codes that onnxruntime's operators read see onnx_nbits_floats.py.
Source: ONNX DequantizeLinear, versions 10 to 28.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from onnx import NodeProto, TensorProto, helper

from qtool.dtypes import DType
from qtool.formats.onnx import OnnxSource, editing
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx.bodies import Labels, Place, bodies
from qtool.formats.onnx.consumers import Consumers
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.listing import listing
from qtool.formats.onnx.opset import raise_opset
from qtool.formats.onnx.writer import ModelWriter
from qtool.layouts.metadata import KEY
from qtool.layouts.nbits import MATMUL
from qtool.layouts.onnx_dequantizers import Dequantizer, dequantizers
from qtool.layouts.onnx_integer_back import FloatProducts
from qtool.layouts.onnx_nbits_floats import NBitsFolding
from qtool.layouts.onnx_nbits_read import NBitsWeight
from qtool.layouts.reordered import Memory
from qtool.spec import Granularity, Shape, Writer
from qtool.tensor import Codes

# Stores the values of the codes of a tensor, given its name.
Restore = Callable[[Codes, Writer, str], None]

# The first opset whose Cast takes bfloat16.
_CAST_BFLOAT16 = 13


@dataclass(frozen=True, slots=True)
class Folded:
    """A DequantizeLinear node that becomes a stored tensor.

    name: the label of the stored tensor; read: of the one that consumers read. dtype, shape: of the
    codes. granularity: of the scale. weight: where the codes are, and their parameters.
    is_factor: whether it is the matrix of a product of codes, in the shape that the product needs.
    """

    name: str
    read: str
    dtype: DType
    shape: Shape
    granularity: Granularity
    weight: Dequantizer | NBitsWeight
    is_factor: bool = False


class OnnxDequantized:
    """A model whose weights are floats of dtype again, written once.

    Every DequantizeLinear node of stored codes (see dequantizers) becomes an initializer (in
    functions: a Constant node) that holds dequantize_linear(..., output_dtype=dtype), under the
    name of the node's output; where that has another float type, a Cast gives it. A Cast to dtype
    beside it that alone reads the node goes with it. Codes, scales and zero points that nothing
    reads any more go away, as do nodes that give other nodes' scales alone.
    float64 holds the float32 values.

    folded: what becomes of the nodes, DequantizeLinear first; rest: the labels of the tensors of
    the source that stay. Values are read by write() alone.
    """

    def __init__(self, source: OnnxSource, dtype: DType) -> None:
        self._source = source
        self._dtype = dtype
        self._names = Names.of(source.model)
        self._model = editing.copied(source.model, KEY, None)
        if dtype.name == "bfloat16":
            raise_opset(self._model, _CAST_BFLOAT16, self._names, str(source.path))
        fixed = source.tensors.keys() - source.overridable
        products = FloatProducts(
            self._model, {source.places[label] for label in fixed}, self._names
        )
        self._factors = products.matrices
        self._bodies = bodies(self._model)
        self._consumers = Consumers(self._bodies)
        self._labels = Labels(self._bodies)
        self._training = onnx_graph.training_reads(self._model)
        self.folded: list[Folded] = []
        found = dequantizers(self._bodies, source)
        readers: dict[int, set[int]] = {}  # by the identity of the node that gives their scales
        for one in found:
            if one.scale:
                readers.setdefault(id(one.scale), set()).add(id(one.node))
        inner = [one for one in found if self._gives_scales(one, readers.get(id(one), set()))]
        gone = {id(one) for one in inner}
        self._made = self._fold_all([one for one in found if id(one) not in gone])
        self._nbits = NBitsFolding(source, self._model, self._bodies, dtype, self._names)
        for name, weight in self._nbits.weights.items():
            read = self._nbits.read_as[name]
            is_factor = weight.operator == MATMUL
            shape, blocks = weight.shape, weight.blocks
            self.folded.append(Folded(read, read, weight.dtype, shape, blocks, weight, is_factor))
        labels = {label for one in found for label in one.inputs if label} | self._nbits.replaced
        self._remove_unused(labels, {dequantizer.place for dequantizer in inner})
        made = self._made.keys() | self._nbits.tensors.keys()
        self.rest = listing(self._model, source.path).tensors.keys() - made

    def write(
        self, path: Path, *, external_data: bool, restore: Restore, force: bool = True
    ) -> None:
        """Write the model, once; see ModelWriter for external_data, force and errors.

        restore: stores the values of the codes of a tensor, given its name.
        """
        made = {name: tensor for name, (tensor, _) in self._made.items()} | self._nbits.tensors
        with ModelWriter(
            path, self._model, made, source=self._source, external_data=external_data, force=force
        ) as writer:
            memory = Memory(path.resolve().parent)
            for name in made:
                with writer.writing(name) as write:
                    if name in self._made:
                        self._restore(name, write, restore)
                    else:
                        self._restore(name, self._nbits.through(name, write, memory), restore)

    def restore(
        self, name: str, write: Writer, restore: Restore, folder: Path, *, by_rows: bool = False
    ) -> None:
        """Store the values of one of the folded alone.

        folder: see Memory. by_rows: those of MatMulNBits as [N, K].
        """
        key = next((key for key, read in self._nbits.read_as.items() if read == name), name)
        if key not in self._made:
            write = self._nbits.through(key, write, Memory(folder), by_rows=by_rows)
        self._restore(key, write, restore)

    def _restore(self, name: str, write: Writer, restore: Restore) -> None:
        reading = (
            self._made[name][1].codes()
            if name in self._made
            else self._nbits.weights[name].reading(self._source)
        )
        with reading as codes:
            restore(codes, write, name)

    def _gives_scales(self, inner: Dequantizer, readers: Set[int]) -> bool:
        """Whether a node's result is read as the scale of nodes that are folded, by id(), alone."""
        uses = self._consumers.of(inner.place)
        is_scale = all(use.index == 1 and id(use.node) in readers for use in uses)
        return bool(readers) and is_scale and not self._is_given(inner.place)

    def _is_given(self, place: Place) -> bool:
        """Whether a tensor is an output of its graph, or training reads it."""
        is_output = place.name in self._bodies[place.body].outputs
        return is_output or (place.body == 0 and place.name in self._training)

    def _fold_all(self, found: Sequence[Dequantizer]) -> dict[str, tuple[TensorProto, Dequantizer]]:
        """Put stored tensors in the places of nodes: together, as one by one takes time that grows
        with the square of their number. Returns what is stored, by label."""
        names: list[dict[str, tuple[str, Dequantizer]]] = [{} for _ in self._bodies]
        nodes: list[dict[int, list[NodeProto]]] = [{} for _ in self._bodies]
        for one in found:
            label, stored = self._fold(one, nodes[one.body.number])
            names[one.body.number][stored] = label, one
        tensors = {}
        for body in self._bodies:
            editing.exchange(body, nodes[body.number])
            for stored, tensor in editing.held([body], names[body.number]).items():
                tensors[names[body.number][stored][0]] = tensor
        made = {label: one for by_name in names for label, one in by_name.values()}
        return {label: (tensors[label], one) for label, one in made.items()}

    def _fold(self, found: Dequantizer, nodes: dict[int, list[NodeProto]]) -> tuple[str, str]:
        """Store a tensor, whose label and name are returned; nodes: what comes in the places of
        others, by id(), with a Cast where needed."""
        body, read, granularity = found.body, found.place.name, found.granularity
        label = read_label = self._labels.of(found.place)
        stored, casts = read, []
        if found.result != self._dtype.code and (merged := self._cast_of(found.place)):
            stored = merged.output[0]
            label = self._labels.of(Place(body.number, stored))
            nodes[id(merged)] = []
        elif found.result != self._dtype.code:
            stored = self._names.fresh(f"{read}_{self._dtype}")
            name = self._names.fresh(f"{read}_Cast")
            casts = [helper.make_node("Cast", [stored], [read], name, to=found.result)]
        tensor = onnx_tensor.tensor_proto(stored, self._dtype, found.shape)
        nodes[id(found.node)] = [*editing.store(body, [tensor]), *casts]
        is_factor = found.node.output[0] in self._factors
        shape, parts = found.shape, (granularity, found, is_factor)
        self.folded.append(Folded(label, read_label, found.dtype, shape, *parts))
        return label, stored

    def _cast_of(self, place: Place) -> NodeProto | None:
        """The Cast to the wanted type, in the same body, that is all that reads a tensor."""
        uses = self._consumers.of(place)
        if len(uses) != 1 or self._is_given(place):
            return None
        node, body = uses[0].node, uses[0].body
        is_beside = node.op_type == "Cast" and body.number == place.body
        wanted = onnx_graph.attribute(node, "to", 0) == self._dtype.code
        return node if is_beside and wanted else None

    def _remove_unused(self, labels: Set[str], inner: Set[Place]) -> None:
        """Drop the nodes whose results are at inner, and those of the stored tensors that nothing
        reads any more."""
        for place in inner:
            editing.remove(self._bodies[place.body], {place.name})
        consumers = Consumers(bodies(self._model))
        places = {self._source.places[label] for label in labels}
        for body in self._bodies:
            unused = {p.name for p in places if p.body == body.number and not consumers.is_read(p)}
            editing.remove(body, unused - (self._training if body.number == 0 else set()))

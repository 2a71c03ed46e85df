"""An ONNX model that gives what it computes on the way, too.

Source: Protocol Buffers, Encoding: parts of a message one after another are one message, repeated
fields appended to each other. ONNX Cast.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, TensorProto, helper

from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx.graph import Names


def with_outputs(source: OnnxSource, tensors: Iterable[str]) -> tuple[bytes, dict[str, str]]:
    """The model with tensors of its graph as further outputs, cast to float32; their names there.

    Its external data stays where it is.
    """
    names, graph = Names.of(source.model), GraphProto()
    given = {tensor: names.fresh(f"{tensor}_captured") for tensor in dict.fromkeys(tensors)}
    for tensor, output in given.items():
        graph.node.append(helper.make_node("Cast", [tensor], [output], to=TensorProto.FLOAT))
        graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    added = ModelProto(graph=graph).SerializeToString(deterministic=True)
    return source.path.read_bytes() + added, given

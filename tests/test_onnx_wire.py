"""Model files whose large values are left where they are, and written where they belong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper
from onnx_models import Array, constant, model

from qtool.errors import FormatError
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.layouts.onnx_qdq import OnnxQdq

WEIGHT = np.random.default_rng(31).normal(size=(128, 129)).astype(np.float32)  # more than 64 KiB
NAME, RAW_DATA, DATA_TYPE = 0x42, 0x4A, 0x10  # tags of a TensorProto's fields


def a_model() -> ModelProto:
    """Large and small initializers, some of them with fields after their values."""
    nodes = [
        constant("c", WEIGHT + 1),
        helper.make_node("MatMul", ["v", "w"], ["h"]),
        helper.make_node("Sum", ["h", "c", "s"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array(values, name)
        for name, values in {"v": WEIGHT.T[:128, :128] * 2, "w": WEIGHT, "s": WEIGHT[:1]}.items()
    ]
    made = model(nodes, tensors)
    for tensor in made.graph.initializer[1:]:
        tensor.doc_string = "weights"
        tensor.metadata_props.add(key="from", value="here")
        unknown = b"\xa2\x06\x03abc"  # field 100, of three bytes
        tensor.MergeFromString(unknown)
    made.graph.doc_string = "after the initializers"
    return made


def copied(content: bytes, folder: Path) -> bytes:
    """What writing a model as it is gives."""
    (folder / "m.onnx").write_bytes(content)
    with OnnxQdq(OnnxSource(folder / "m.onnx"), {}, folder / "q.onnx", external_data=False):
        pass
    return (folder / "q.onnx").read_bytes()


def test_large_values_stay_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(a_model().SerializeToString())
    source = OnnxSource(tmp_path / "m.onnx")
    assert source.model.ByteSize() < WEIGHT.nbytes
    assert source.read("w").tobytes() == WEIGHT.tobytes()
    assert source.read("s").tobytes() == WEIGHT[:1].tobytes()
    assert source.external_files == set()
    assert source.nbytes == a_model().ByteSize()


def test_a_model_that_is_only_copied_keeps_every_byte(tmp_path: Path) -> None:
    content = a_model().SerializeToString(deterministic=True)
    assert copied(content, tmp_path) == content


def tensors_everywhere() -> ModelProto:
    """Large tensors in every field that holds one."""
    numbers = iter(range(100))

    def large(name: str) -> TensorProto:
        return numpy_helper.from_array(WEIGHT + next(numbers), name)

    def sparse(name: str) -> SparseTensorProto:
        indices = numpy_helper.from_array(np.arange(WEIGHT.size), f"{name}_indices")
        values = numpy_helper.from_array(WEIGHT.reshape(-1), name)
        return SparseTensorProto(values=values, indices=indices, dims=[WEIGHT.size])

    make = helper.make_node
    body = helper.make_graph([make("Constant", [], ["k"], value=large("k"))], "b", [], [],
                             [large("n")])  # fmt: skip
    many = helper.make_attribute("many", [large("m"), large("o")])
    own = make("Own", [], ["p"], domain="own", one=large("a"), rare=sparse("r"))
    own.attribute.append(many)
    nodes = [make("If", ["c"], ["q"], then_branch=body, else_branch=body), own]
    function = helper.make_function(
        "own", "F", [], ["f"], [make("Constant", [], ["f"], value=large("f")), nodes[0]],
        [helper.make_opsetid("", 21)], attribute_protos=[many],
    )  # fmt: skip
    made = helper.make_model(
        helper.make_graph(nodes, "g", [], [], [large("w")]), functions=[function]
    )
    made.graph.sparse_initializer.append(sparse("s"))
    made.training_info.add().algorithm.initializer.append(large("t"))
    return made


def test_large_values_stay_in_the_file_wherever_they_are(tmp_path: Path) -> None:
    made = tensors_everywhere()
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    source = OnnxSource(tmp_path / "m.onnx")
    assert source.model.ByteSize() < 10_000
    assert source.read("If.then_branch/k").tobytes() == (WEIGHT + 0).tobytes()
    content = made.SerializeToString(deterministic=True)
    assert copied(content, tmp_path) == content


def test_a_data_file_takes_what_onnx_would_look_for_in_it(tmp_path: Path) -> None:
    """Not the tensors of training, sparse ones and initializers inside functions."""
    made = tensors_everywhere()
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with OnnxQdq(OnnxSource(tmp_path / "m.onnx"), {}, tmp_path / "q.onnx", external_data=True):
        pass
    written = onnx.load(tmp_path / "q.onnx", load_external_data=False)
    inside = [t.name for t in onnx_graph.tensors(written) if not t.external_data]
    assert sorted(inside) == [
        "m", "m", "n", "n", "o", "o", "r", "r_indices", "s", "s_indices", "t"]  # fmt: skip
    loaded = onnx.load(tmp_path / "q.onnx")
    pairs = zip(onnx_graph.tensors(loaded), onnx_graph.tensors(made), strict=True)
    for new, old in pairs:
        assert new.name == old.name
        assert numpy_helper.to_array(new).tobytes() == numpy_helper.to_array(old).tobytes()


def field(tag: int, content: bytes) -> bytes:
    """A field of bytes."""
    length = len(content)
    assert 1 << 7 <= length < 1 << 21 or length < 1 << 7
    encoded = bytes([length]) if length < 128 else b""
    if length >= 128:
        encoded = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14])
    return bytes([tag]) + encoded + content


TYPE = bytes([DATA_TYPE, TensorProto.FLOAT])
DIMS = b"\x08\x80\x01\x08\x81\x01"
RAW = field(RAW_DATA, WEIGHT.tobytes())
OTHER = field(RAW_DATA, (-WEIGHT).tobytes())
NAMED = field(NAME, b"w")
DEFAULT = b"\x70\x00"  # data_location

UNUSUAL: dict[str, tuple[bytes, Array]] = {
    "values-first": (RAW + NAMED + TYPE + DIMS, WEIGHT),
    "values-twice": (OTHER + NAMED + RAW + TYPE + DIMS, WEIGHT),
    "location-given": (NAMED + DEFAULT + RAW + TYPE + DIMS, WEIGHT),
    "long-varints": (NAMED + b"\x90\x00\x81\x80\x00" + RAW + DIMS, WEIGHT),
}


@pytest.mark.parametrize("tensor", UNUSUAL, ids=str)
def test_unusual_encodings_mean_what_protobuf_says(tensor: str, tmp_path: Path) -> None:
    encoded, expected = UNUSUAL[tensor]
    graph = field(0x2A, encoded) + field(0x12, b"g")
    content = b"\x08\x08" + field(0x3A, graph)
    (tmp_path / "m.onnx").write_bytes(content)
    assert OnnxSource(tmp_path / "m.onnx").read("w").tobytes() == expected.tobytes()
    parsed = ModelProto.FromString(content).SerializeToString(deterministic=True)
    assert copied(content, tmp_path) == parsed


def test_a_graph_in_two_parts_is_one(tmp_path: Path) -> None:
    first = field(0x3A, field(0x2A, NAMED + TYPE + DIMS + RAW))
    second = field(0x3A, field(0x2A, field(NAME, b"v") + TYPE + DIMS + OTHER))
    content = b"\x08\x08" + first + second
    (tmp_path / "m.onnx").write_bytes(content)
    source = OnnxSource(tmp_path / "m.onnx")
    assert [source.read(name)[0, 0] for name in "wv"] == [WEIGHT[0, 0], -WEIGHT[0, 0]]


def test_a_constant_in_two_parts_is_what_protobuf_makes_of_it(tmp_path: Path) -> None:
    value = helper.make_attribute("value", TensorProto())
    parts = [field(0x2A, NAMED + TYPE + DIMS + RAW), field(0x2A, field(RAW_DATA, b"late"))]
    for order in (parts, parts[::-1]):
        attribute = value.SerializeToString() + b"".join(order)
        node = field(0x22, b"Constant") + field(0x12, b"w") + field(0x2A, attribute)
        content = b"\x08\x08" + field(0x3A, field(0x0A, node))
        (tmp_path / "m.onnx").write_bytes(content)
        merged = ModelProto.FromString(content).graph.node[0].attribute[0].t.raw_data
        if merged == b"late":
            with pytest.raises(FormatError, match="holds 4 bytes"):
                OnnxSource(tmp_path / "m.onnx")
        else:
            assert OnnxSource(tmp_path / "m.onnx").read("w").tobytes() == merged


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the values": lambda content: content[: len(content) // 2],
    "cut by one": lambda content: content[:-1],
    "cut in the head": lambda content: content[:9],
    "a group": lambda content: content + b"\x1b",
    "an endless number": lambda content: content + b"\xff" * 11,
    "no field": lambda content: content + b"\x0f",
    "a field beyond the end": lambda content: content + b"\x12\x7f",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    content = DAMAGES[damage](a_model().SerializeToString())
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(FormatError, match="is not an ONNX model, or is cut short"):
        OnnxSource(tmp_path / "m.onnx")


def test_large_values_that_do_not_fit_the_shape_are_refused(tmp_path: Path) -> None:
    made = a_model()
    made.graph.initializer[1].dims[0] += 1
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    rule = r"tensor 'w': holds 66048 bytes, shape \(129, 129\) needs 66564"
    with pytest.raises(FormatError, match=rule):
        OnnxSource(tmp_path / "m.onnx")

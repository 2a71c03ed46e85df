"""Reading ONNX models: what their tensors are, and which files are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import (
    ModelProto,
    NodeProto,
    SparseTensorProto,
    StringStringEntryProto,
    TensorProto,
    helper,
    numpy_helper,
)
from onnx_models import Array, constant, initializer, model, save

from qtool.dtypes import DTYPES
from qtool.errors import FormatError
from qtool.formats.onnx import OnnxSource

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
CODES = [d for d in DTYPES.values() if d.code is not None and d.kind != "complex"]


def opened(tmp_path: Path, *nodes: NodeProto, tensors: Any = (), **fields: Any) -> OnnxSource:
    return OnnxSource(save(model(nodes, tensors, **fields), tmp_path / "model.onnx"))


def one(tmp_path: Path, tensor: TensorProto) -> OnnxSource:
    return opened(tmp_path, helper.make_node("Identity", [tensor.name], ["y"]), tensors=[tensor])


def external(tmp_path: Path, location: str = "w.bin", *, dims: Any = (2,), **entries: Any) -> Path:
    """A model whose float32 tensor W is in a file; tmp_path / "m" / "w.bin" holds 20 bytes."""
    folder = tmp_path / "m"
    folder.mkdir(exist_ok=True)
    (folder / "w.bin").write_bytes(np.array([7, 8, 1, 2, 3], "<f4").tobytes())
    (tmp_path / "secret.bin").write_bytes(np.array([42, 43], "<f4").tobytes())
    tensor = TensorProto(
        name="W", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    graph = helper.make_graph([helper.make_node("Identity", ["W"], ["y"])], "g", [], [], [tensor])
    return save(helper.make_model(graph), folder / "model.onnx")


def test_infos_list_initializers_then_constants_and_leave_strings_out(tmp_path: Path) -> None:
    source = opened(
        tmp_path,
        constant("c", [1, 2], np.int64),
        helper.make_node("Add", ["a", "b"], ["y"]),
        tensors=[
            initializer("b", WEIGHT),
            helper.make_tensor("s", TensorProto.STRING, [1], [b"x"]),
            initializer("a", WEIGHT, np.float16),
        ],
    )
    found = [(i.name, i.shape, i.dtype.name, i.nbytes) for i in source.infos()]
    assert found == [
        ("b", (2, 3), "float32", 24),
        ("a", (2, 3), "float16", 12),
        ("c", (2,), "int64", 16),
    ]
    assert (source.container, source.nbytes) == ("onnx", source.path.stat().st_size)


def test_metadata_is_that_of_the_model(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], inputs={"x": (1,)})
    helper.set_model_props(made, {"author": "héllo"})
    assert OnnxSource(save(made, tmp_path / "m.onnx")).metadata == {"author": "héllo"}


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "field"])
def test_every_type_is_read_as_onnx_reads_it(tmp_path: Path, dtype: Any, raw: bool) -> None:
    bits = np.arange(7, dtype=np.uint8) % 2 ** min(dtype.bits, 7)
    values: Array = bits.view(dtype.numpy) if dtype.bits <= 8 else bits.astype(dtype.numpy)
    tensor = numpy_helper.from_array(values.reshape(7, 1), "w")
    if not raw:
        tensor = helper.make_tensor("w", dtype.code, [7, 1], values.tolist())
    source = one(tmp_path, tensor)
    read, expected = source.read("w"), numpy_helper.to_array(tensor)
    assert (read.dtype, read.shape) == (dtype.numpy, (7, 1))
    assert read.tobytes() == expected.tobytes()
    assert b"".join(source.chunks("w")) == numpy_helper.from_array(expected).raw_data


def test_float16_and_bfloat16_fields_hold_bit_patterns(tmp_path: Path) -> None:
    tensor = TensorProto(
        name="w", data_type=TensorProto.BFLOAT16, dims=[2], int32_data=[0x3FC0, 0xC000]
    )
    assert one(tmp_path, tensor).read("w").tolist() == [1.5, -2]
    assert one(tmp_path, tensor).read("w").dtype == ml_dtypes.bfloat16


def test_external_data_is_read_at_its_offset(tmp_path: Path) -> None:
    source = OnnxSource(external(tmp_path, offset=4, length=8))
    assert source.read("W").tolist() == [8, 1]
    assert source.nbytes == source.path.stat().st_size + 20
    assert source.external_files == {(tmp_path / "m" / "w.bin").resolve()}


def test_a_link_within_the_folder_may_hold_external_data(tmp_path: Path) -> None:
    path = external(tmp_path, "link.bin")
    (tmp_path / "m" / "link.bin").symlink_to("w.bin")
    assert OnnxSource(path).read("W").tolist() == [7, 8]


BAD_LOCATIONS = [
    "../secret.bin",
    "/etc/hostname",
    "..\\secret.bin",
    "",
    "sub/../../secret.bin",
    "sub/../w.bin",
    "C:/w.bin",
    "link.bin",
    "missing.bin",
    "folder",
    "pipe",
]


@pytest.mark.parametrize("location", BAD_LOCATIONS)
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    path = external(tmp_path, location)
    (tmp_path / "m" / "link.bin").symlink_to("../secret.bin")
    (tmp_path / "m" / "folder").mkdir()
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(FormatError, match="tensor 'W': external data"):
        OnnxSource(path)


BAD_PLACES = [
    pytest.param({"offset": 100, "length": 8}, id="offset-past-the-end"),
    pytest.param({"offset": -4, "length": 8}, id="negative-offset"),
    pytest.param({"offset": 16, "length": 8}, id="length-past-the-end"),
    pytest.param({"offset": 0, "length": 4}, id="length-too-short"),
    pytest.param({"offset": 0, "length": 16}, id="length-too-long"),
    pytest.param({"offset": 2**64 - 4, "length": 8}, id="offset-that-wraps"),
    pytest.param({"offset": "abc", "length": 8}, id="not-a-number"),
    pytest.param({"offset": "٤"}, id="not-ascii"),
    pytest.param({"dims": (2**33,), "length": 20}, id="huge"),
    pytest.param({"dims": (2**33,)}, id="huge-without-length"),
    pytest.param({"dims": (-2,)}, id="negative-size"),
]


@pytest.mark.parametrize("entries", BAD_PLACES)
def test_external_data_must_be_there_and_fit(tmp_path: Path, entries: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="tensor 'W'"):
        OnnxSource(external(tmp_path, **entries))


# An entry of external_data: key and value, with their tags and lengths.
NOT_UTF_8 = {
    "key": b"\x0a\x08loc\xfftion\x12\x05w.bin",
    "location": b"\x0a\x08location\x12\x05w.\xffin",
    "offset": b"\x0a\x06offset\x12\x01\xff",
    "length": b"\x0a\x06length\x12\x01\xff",
}


@pytest.mark.parametrize("entry", NOT_UTF_8.values(), ids=NOT_UTF_8)
def test_external_data_that_is_described_by_no_text_is_refused(
    tmp_path: Path, entry: bytes
) -> None:
    path = external(tmp_path)
    made = ModelProto.FromString(path.read_bytes())
    made.graph.initializer[0].external_data.append(StringStringEntryProto.FromString(entry))
    with pytest.raises(FormatError, match=r"tensor 'W'.* that is not UTF-8"):
        OnnxSource(save(made, path))


def test_data_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    source = OnnxSource(external(tmp_path, offset=8))
    (tmp_path / "m" / "w.bin").write_bytes(bytes(12))
    with pytest.raises(FormatError, match=r"w\.bin"):
        source.read("W")


FLOAT = TensorProto.FLOAT
BAD_TENSORS = [
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[2], raw_data=bytes(7)),
        "holds 7 bytes, shape (2,) needs 8",
        id="raw-too-short",
    ),
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[2], float_data=[1, 2, 3]),
        "holds 3 values, shape (2,) needs 2",
        id="field-too-long",
    ),
    pytest.param(
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[3], raw_data=bytes(3)),
        "holds 3 bytes, shape (3,) needs 2",
        id="int4-not-packed",
    ),
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[2**40], raw_data=bytes(8)),
        "holds 8 bytes, shape (1099511627776,) needs 4398046511104",
        id="huge",
    ),
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[2**40, 2**40, 0], raw_data=b""),
        "is beyond what an array can have",
        id="huge-but-empty",
    ),
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[1] * 65, raw_data=bytes(4)),
        "is beyond what an array can have",
        id="rank-65",
    ),
    pytest.param(
        TensorProto(name="w", data_type=FLOAT, dims=[-1], raw_data=b""),
        "shape (-1,) has a negative size",
        id="negative",
    ),
    pytest.param(
        TensorProto(name="w", data_type=99, dims=[1], raw_data=b"x"),
        "element type 99",
        id="unknown-type",
    ),
    pytest.param(TensorProto(name="w", data_type=FLOAT, dims=[1]), "holds 0 values", id="no-data"),
]


@pytest.mark.parametrize(("tensor", "reason"), BAD_TENSORS)
def test_data_must_fit_type_and_shape(tmp_path: Path, tensor: TensorProto, reason: str) -> None:
    graph = helper.make_graph([], "g", [], [], [tensor])
    with pytest.raises(FormatError, match=f"tensor 'w': .*{re.escape(reason)}"):
        OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx"))


def test_a_bad_tensor_in_a_nested_graph_is_found(tmp_path: Path) -> None:
    bad = TensorProto(name="w", data_type=FLOAT, dims=[2], raw_data=bytes(7))
    body = helper.make_graph([], "b", [], [], [bad])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    with pytest.raises(FormatError, match="holds 7 bytes"):
        OnnxSource(
            save(helper.make_model(helper.make_graph([node], "g", [], [])), tmp_path / "m.onnx")
        )


WHOLE = model(
    [helper.make_node("Relu", ["x"], ["y"])], [initializer("w", WEIGHT)], inputs={"x": (1,)}
).SerializeToString()
NOT_MODELS = [
    pytest.param(b"", id="empty"),
    pytest.param(WHOLE[:-3], id="cut-short"),
    pytest.param(b"\x93NUMPY" + bytes(100), id="npy"),
    pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
    pytest.param(b'{"a": 1}', id="json"),
    pytest.param(b"\x08\x0a", id="no-graph"),
    pytest.param(WHOLE.replace(b"Relu", b"Rel\xff"), id="not-utf-8"),
]


@pytest.mark.parametrize("content", NOT_MODELS)
def test_what_is_not_a_model_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"^\S*m\.onnx: is not an ONNX model[^\n]*$"):
        OnnxSource(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"m\.onnx: cannot be read: No such file"):
        OnnxSource(tmp_path / "m.onnx")


def test_a_name_that_is_defined_twice_is_refused(tmp_path: Path) -> None:
    tensor = initializer("w", WEIGHT)
    graph = helper.make_graph([constant("w", [1])], "g", [], [], [tensor])
    with pytest.raises(FormatError, match="'w': is defined twice"):
        OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx"))


def test_nested_graphs_are_listed_after_the_model_and_sparse_tensors_last(tmp_path: Path) -> None:
    def body(value: float) -> Any:
        inner = [constant("c", [value]), helper.make_node("Add", ["w", "c"], ["z"])]
        stored = [initializer("w", WEIGHT * value), initializer("n", [1], np.int64)]
        return helper.make_graph(inner, "b", [], [], stored)

    sparse = SparseTensorProto(
        values=initializer("s", [5, 6]), indices=initializer("", [0, 2], np.int64), dims=[4]
    )
    node = helper.make_node("If", ["x"], ["y"], then_branch=body(1), else_branch=body(2))
    made = helper.make_model(helper.make_graph([node], "g", [], [], [initializer("w", WEIGHT)]))
    made.graph.sparse_initializer.append(sparse)
    source = OnnxSource(save(made, tmp_path / "m.onnx"))
    assert [(i.name, i.shape, i.nbytes, i.obstacle) for i in source.infos()] == [
        ("w", (2, 3), 24, None),
        # helper.make_node sorts its attributes: the else branch comes first.
        ("If.else_branch/w", (2, 3), 24, None),
        ("If.else_branch/n", (1,), 8, None),
        ("If.else_branch/c", (1,), 4, None),
        ("If.then_branch/w", (2, 3), 24, None),
        ("If.then_branch/n", (1,), 8, None),
        ("If.then_branch/c", (1,), 4, None),
        ("s", (2,), 8, "is sparse"),
    ]
    assert source.read("If.else_branch/w").tolist() == (WEIGHT * 2).tolist()
    assert b"".join(source.chunks("If.then_branch/w")) == WEIGHT.tobytes()
    assert source.read("s").tolist() == [5, 6]


def test_labels_tell_tensors_of_one_name_apart(tmp_path: Path) -> None:
    """By the names of the nodes, their operators, and numbers where these are alike."""

    def body(*names: str) -> Any:
        return helper.make_graph([], "b", [], [], [initializer(name, WEIGHT) for name in names])

    def node(name: str | None, *names: str) -> NodeProto:
        made = helper.make_node("If", ["c"], ["y"], name, then_branch=body(*names))
        del made.output[:]
        return made

    nodes = [node("a/b", "w", "alone"), node(None, "w"), node("twice", "w"), node("twice", "w")]
    functions = [
        helper.make_function(domain, "F", [], [], [constant("w", WEIGHT), node(None, "v")],
                             [helper.make_opsetid("", 21)])
        for domain in ("d", "e")
    ]  # fmt: skip
    top = [initializer("If.then_branch/w", WEIGHT)]
    made = helper.make_model(helper.make_graph(nodes, "g", [], [], top), functions=functions)
    source = OnnxSource(save(made, tmp_path / "m.onnx"))
    assert list(source.tensors) == [
        "If.then_branch/w", "a/b.then_branch/w", "alone", "If.then_branch/w_1",
        "twice#0.then_branch/w", "twice#1.then_branch/w", "d.F/w", "d.F/If.then_branch/v",
        "e.F/w", "e.F/If.then_branch/v",
    ]  # fmt: skip


def test_tensors_that_no_node_can_read_are_listed_with_what_keeps_them(tmp_path: Path) -> None:
    sparse = SparseTensorProto(
        values=initializer("", [5, 6]), indices=initializer("", [0, 2], np.int64), dims=[4]
    )
    nodes = [
        helper.make_node("Own", [], ["y"], "node", domain="own", table=initializer("t", WEIGHT)),
        helper.make_node("Constant", [], ["z"], sparse_value=sparse),
    ]
    made = helper.make_model(helper.make_graph(nodes, "g", [], []))
    made.training_info.add().algorithm.initializer.append(initializer("rate", [0.5]))
    source = OnnxSource(save(made, tmp_path / "m.onnx"))
    assert [(info.name, info.shape, info.obstacle) for info in source.infos()] == [
        ("node.table", (2, 3), "is in the attribute table of Own"),
        ("Constant.sparse_value", (2,), "is in the attribute sparse_value of Constant"),
        ("training/rate", (1,), "is a tensor of training"),
    ]


def test_what_has_no_name_is_left_alone(tmp_path: Path) -> None:
    source = opened(
        tmp_path,
        constant("", WEIGHT),
        helper.make_node("Identity", ["w"], ["y"]),
        tensors=[initializer("", WEIGHT), initializer("w", WEIGHT)],
    )
    found = [(info.name, info.obstacle) for info in source.infos()]
    assert found == [("w", None), ("", "has no name"), ("_1", "has no name")]

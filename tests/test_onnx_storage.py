"""ONNX models on the disk: external data, files replaced whole, and floats again."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_models import Array, check, constant, initializer, model, quantize, run, save

from qtool.dtypes import DTYPES
from qtool.engine import restore_plain
from qtool.errors import OutputError, SpecError
from qtool.formats import files
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import writer as onnx_writer
from qtool.layouts.onnx_dequantize import OnnxDequantized
from qtool.layouts.onnx_qdq import OnnxQdq
from qtool.spec import Blocked, PerAxis, PerTensor, QuantSpec, Writer
from qtool.tensor import Codes

WEIGHT = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
X = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32)
INT8 = QuantSpec("int8", PerAxis(1))


def two_weights() -> ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    return model(
        nodes, [initializer("v", WEIGHT), initializer("w", WEIGHT)], inputs={"x": (None, 64)}
    )


def move_out(path: Path, name: str = "weights.bin") -> Path:
    """Move the initializers of a model into a data file of another tool's making."""
    made = ModelProto.FromString(path.read_bytes())
    data = b""
    for tensor in made.graph.initializer:
        raw, start = tensor.raw_data, len(data)
        data += raw
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", start), ("length", len(raw))):
            tensor.external_data.add(key=key, value=str(value))
    (path.parent / name).write_bytes(data)
    return save(made, path)


def copy(source: OnnxSource, path: Path, *, external_data: bool) -> None:
    with OnnxQdq(source, {}, path, external_data=external_data):
        pass


def data_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".data")


def places(made: ModelProto) -> dict[str, dict[str, str]]:
    return {
        t.name: {e.key: e.value for e in t.external_data}
        for t in made.graph.initializer
        if t.external_data
    }


def test_external_data_is_one_file_named_after_its_content(tmp_path: Path) -> None:
    made = quantize(two_weights(), tmp_path / "q.onnx", {"w": INT8}, external_data=True)
    (name,) = data_files(tmp_path)
    assert re.fullmatch(r"q\.[0-9a-f]{16}\.data", name)
    # The quantized weight first, then what was there; the 256 bytes of scales stay inside.
    assert places(made) == {
        "v": {"location": name, "offset": "4096", "length": "16384"},
        "w_quantized": {"location": name, "offset": "0", "length": "4096"},
    }
    content = (tmp_path / name).read_bytes()
    assert content[4096:] == WEIGHT.tobytes()
    assert content[:4096] == np.rint(WEIGHT * 4).astype(np.int8).tobytes()


def test_the_same_command_twice_leaves_the_same_files(tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        quantize(two_weights(), tmp_path / "q.onnx", {"v": INT8, "w": INT8}, external_data=True)
        contents.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert contents[0] == contents[1]
    (name,) = data_files(tmp_path)
    assert len(contents[1][name]) == 8192


def test_the_data_of_the_model_that_is_replaced_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {"w": INT8}, external_data=True)
    strangers = ["q.0123456789abcdef.data", "other.0123456789abcdef.data"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"kept")
    quantize(two_weights(), path, {"v": INT8}, external_data=True)
    (current,) = set(data_files(tmp_path)) - set(strangers)
    assert places(check(path))["w"]["location"] == current
    quantize(two_weights(), path, {"v": INT8})
    assert data_files(tmp_path) == sorted(strangers)


def test_data_beside_a_target_that_is_described_by_no_text_is_left_alone(tmp_path: Path) -> None:
    path = move_out(save(two_weights(), tmp_path / "q.onnx"))
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights.\xffin"))
    quantize(two_weights(), path, {"w": INT8}, external_data=True)
    assert len(data_files(tmp_path)) == 1
    assert (tmp_path / "weights.bin").exists()


def test_data_lands_with_the_model_that_a_link_points_to(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    link = tmp_path / "link.onnx"
    link.symlink_to("there/q.onnx")
    source = OnnxSource(save(two_weights(), tmp_path / "m.onnx"))
    quantize(two_weights(), folder / "q.onnx", {"w": INT8}, external_data=True)
    old = data_files(folder)
    copy(source, link, external_data=True)
    assert link.is_symlink()
    assert data_files(tmp_path) == []
    (name,) = data_files(folder)
    assert [name] != old
    assert name.startswith("q.")
    assert places(check(folder / "q.onnx"))["w"]["location"] == name


def orphan(folder: Path) -> Path:
    """A data file as a run leaves it that is killed before its model lands."""
    content = b"codes"
    path = folder / f"q.{xxhash.xxh3_64(content).hexdigest()}.data"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("external_data", [True, False], ids=["data", "inline"])
def test_the_data_of_a_run_that_was_killed_goes_away(tmp_path: Path, external_data: bool) -> None:
    left = orphan(tmp_path)
    copy(
        OnnxSource(save(two_weights(), tmp_path / "m.onnx")),
        tmp_path / "q.onnx",
        external_data=external_data,
    )
    assert not left.exists()
    assert len(data_files(tmp_path)) == external_data


def test_data_that_another_model_names_stays(tmp_path: Path) -> None:
    quantize(two_weights(), tmp_path / "q.onnx", {"w": INT8}, external_data=True)
    (name,) = data_files(tmp_path)
    (tmp_path / "q.onnx").rename(tmp_path / "renamed.onnx")
    quantize(two_weights(), tmp_path / "q.onnx", {"v": INT8, "w": INT8}, external_data=True)
    assert name in data_files(tmp_path)
    assert len(data_files(tmp_path)) == 2


def test_a_run_waits_while_another_lets_data_and_model_land(tmp_path: Path) -> None:
    source = OnnxSource(save(two_weights(), tmp_path / "m.onnx"))
    with files.locked(tmp_path):
        left = orphan(tmp_path)
        thread = Thread(
            target=copy, args=(source, tmp_path / "q.onnx"), kwargs={"external_data": True}
        )
        thread.start()
        thread.join(0.3)
        assert (thread.is_alive(), data_files(tmp_path)) == (True, [left.name])
    thread.join()
    assert not left.exists()
    assert places(check(tmp_path / "q.onnx"))["w"]["location"] == data_files(tmp_path)[0]


def test_external_data_of_the_source_is_carried_over_and_left_alone(tmp_path: Path) -> None:
    source = OnnxSource(move_out(save(two_weights(), tmp_path / "m.onnx")))
    before = (tmp_path / "weights.bin").read_bytes()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    outputs = []
    for external_data in (False, True):
        copy(source, folder / "q.onnx", external_data=external_data)
        assert bool(places(check(folder / "q.onnx"))) == external_data
        outputs.append(run(folder / "q.onnx", {"x": X})[0].tobytes())
    assert outputs == [run(tmp_path / "m.onnx", {"x": X})[0].tobytes()] * 2
    assert (tmp_path / "weights.bin").read_bytes() == before


def test_the_data_file_of_the_source_is_not_removed_with_the_model_that_shares_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {}, external_data=True)
    (shared,) = data_files(tmp_path)
    source = OnnxSource(save(check(path), tmp_path / "copy.onnx"))
    copy(source, path, external_data=False)
    assert data_files(tmp_path) == [shared]
    with pytest.raises(OutputError, match="is the source's data"):
        copy(source, path, external_data=True)


def test_a_large_model_gets_a_data_file_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_writer, "INLINE_LIMIT", 20_000)
    quantize(two_weights(), tmp_path / "q.onnx", {"w": INT8})
    assert len(data_files(tmp_path)) == 1
    quantize(two_weights(), tmp_path / "q.onnx", {"v": INT8, "w": INT8})
    assert data_files(tmp_path) == []


def test_a_failing_write_leaves_the_old_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {"w": INT8}, external_data=True)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    renamed: list[str] = []

    def replace(source: Any, target: Any) -> None:
        renamed.append(Path(target).name)
        if renamed[-1] == "q.onnx":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OutputError, match="No space left"):
        quantize(two_weights(), path, {"v": INT8}, external_data=True)
    assert renamed[-1] == "q.onnx"
    assert renamed[0].endswith(".data")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def restoring(dtype: str) -> Callable[[Codes, Writer, str], None]:
    return lambda codes, write, _: restore_plain.restore(codes, write, DTYPES[dtype], 1)


def dequantized(path: Path, dtype: str = "float32", **options: Any) -> ModelProto:
    target = path.with_name("back.onnx")
    settings = {"external_data": False, "restore": restoring(dtype)} | options
    OnnxDequantized(OnnxSource(path), DTYPES[dtype]).write(target, **settings)
    return check(target)


def values(made: ModelProto, folder: Path) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t, str(folder)) for t in made.graph.initializer}


ROUNDED = np.rint(WEIGHT * 4) / np.float32(4) + 0


@pytest.mark.parametrize(
    "spec",
    [
        INT8,
        QuantSpec("int16", PerTensor()),
        QuantSpec("int8", Blocked(0, 24)),
        QuantSpec("float8e4m3fn", Blocked(1, 64)),
        QuantSpec("float6e2m3", PerAxis(0)),
        QuantSpec("float4e2m1", PerTensor()),
    ],
    ids=lambda spec: f"{spec.dtype}-{spec.granularity.name}",
)
@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
def test_dequantize_gives_the_floats_in_the_place_of_the_weight(
    tmp_path: Path, spec: QuantSpec, external_data: bool
) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {"w": spec}, external_data=external_data)
    made = dequantized(path, external_data=external_data)
    codes = OnnxSource(path).read("w_quantized").astype(np.float32)
    assert [node.op_type for node in made.graph.node] == ["MatMul", "MatMul"]
    found = values(made, tmp_path)
    assert list(found) == ["v", "w"]
    assert found["v"].tobytes() == WEIGHT.tobytes()
    assert found["w"].tobytes() == (codes * np.float32(0.25)).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_another_float_type_is_cast_for_its_consumers(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {"w": QuantSpec("int8", PerTensor())})
    made = dequantized(path, dtype)
    cast = made.graph.node[0]
    assert (cast.op_type, *cast.input, *cast.output) == ("Cast", f"w_{dtype}", "w")
    stored = values(made, tmp_path)[f"w_{dtype}"]
    assert stored.dtype == DTYPES[dtype].numpy
    assert stored.tobytes() == ROUNDED.astype(DTYPES[dtype].numpy).tobytes()
    assert run(made, {"x": X})[0].shape == (3, 64)


def test_bfloat16_weights_raise_the_opset_for_their_cast(tmp_path: Path) -> None:
    old = two_weights()
    old.opset_import[0].version = 11
    quantize(old, tmp_path / "q.onnx", {"w": QuantSpec("int8", PerTensor())})
    made = dequantized(tmp_path / "q.onnx", "bfloat16")
    assert made.opset_import[0].version == 13
    assert values(made, tmp_path)["w_bfloat16"].dtype == ml_dtypes.bfloat16


def test_a_float64_weight_comes_back_under_its_own_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = model(
        nodes,
        [initializer("w", WEIGHT, np.float64)],
        inputs={"x": (None, 64)},
        dtype=TensorProto.DOUBLE,
    )
    quantize(made, tmp_path / "q.onnx", {"w": INT8})
    back = dequantized(tmp_path / "q.onnx", "float64")
    assert [node.op_type for node in back.graph.node] == ["MatMul"]
    assert values(back, tmp_path)["w"].tobytes() == ROUNDED.astype(np.float64).tobytes()


def test_folded_lists_what_becomes_of_each_node(tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    quantize(two_weights(), path, {"v": INT8, "w": QuantSpec("int4", Blocked(0, 32))})
    folded = OnnxDequantized(OnnxSource(path), DTYPES["float32"]).folded
    assert [(f.name, f.dtype.name, f.shape, f.granularity) for f in folded] == [
        ("v", "int8", (64, 64), PerAxis(1)),
        ("w", "int4", (64, 64), Blocked(0, 32)),
    ]


def test_only_nodes_whose_inputs_are_stored_are_folded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s"], ["xd"]),
        constant("bias_q", [4, -8], np.int32),
        constant("zero", 0, np.int32),
        helper.make_node("DequantizeLinear", ["bias_q", "s", "zero"], ["bias"]),
        helper.make_node("Add", ["xd", "bias"], ["y"]),
    ]
    made = model(nodes, [initializer("s", 0.5)], inputs={"x": (1, 2)}, opset=13, ir_version=7)
    back = dequantized(save(made, tmp_path / "q.onnx"))
    operators = [node.op_type for node in back.graph.node]
    assert operators == ["QuantizeLinear", "DequantizeLinear", "Add"]
    assert {n: v.tolist() for n, v in values(back, tmp_path).items()} == {"s": 0.5, "bias": [2, -4]}


def test_an_axis_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], axis=5)
    graph = helper.make_graph(
        [node], "g", [], [], [initializer("q", [[1, 2]], np.int8), initializer("s", [1, 2])]
    )
    path = save(helper.make_model(graph), tmp_path / "q.onnx")
    with pytest.raises(SpecError, match="5 is out of range"):
        OnnxDequantized(OnnxSource(path), DTYPES["float32"])


def test_what_training_alone_reads_stays(tmp_path: Path) -> None:
    made = quantize(two_weights(), tmp_path / "q.onnx", {"v": INT8, "w": INT8})
    training = made.training_info.add()
    training.algorithm.node.append(helper.make_node("Cast", ["w_scale"], ["t"], to=10))
    training.update_binding.add(key="w_quantized", value="t")
    save(made, tmp_path / "q.onnx")
    with pytest.MonkeyPatch.context() as patch:  # the checker knows no training
        patch.setattr("onnx.checker.check_model", lambda *_, **__: None)
        back = dequantized(tmp_path / "q.onnx")
    assert sorted(t.name for t in back.graph.initializer) == ["v", "w", "w_quantized", "w_scale"]


def test_dequantize_leaves_what_has_no_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", ""], ["w"]),
        helper.make_node("DequantizeLinear", ["", "s"], ["v"]),
        helper.make_node("Identity", ["w"], ["y"]),
    ]
    tensors = [
        initializer("q", [[1, 2]], np.int8), initializer("s", 2), initializer("", [3]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [], [], tensors)
    source = OnnxSource(save(helper.make_model(graph), tmp_path / "q.onnx"))
    OnnxDequantized(source, DTYPES["float32"]).write(
        tmp_path / "b.onnx", external_data=False, restore=restoring("float32")
    )
    stored = ModelProto.FromString((tmp_path / "b.onnx").read_bytes()).graph.initializer
    assert [tensor.name for tensor in stored] == ["s", "", "w"]

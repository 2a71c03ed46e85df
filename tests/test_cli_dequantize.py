"""qtool dequantize: codes of every container become floats again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_models
import pytest
from command import Array, float32, int8, metadata, ok, refused, stored, uint8
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

WEIGHT = float32([[127, -1.5, 2.5], [254, 127, -254]])
BACK = [[127, -2, 2], [254, 128, -254]]
SHIFTED = float32([[-1, 0, 254], [0, 255, 51]])


def save(path: Path, **tensors: Array) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **tensors)  # type: ignore[arg-type]
    else:
        save_file(tensors, path)
    return path


def read(path: Path) -> dict[str, Array]:
    return dict(np.load(path)) if path.suffix == ".npz" else stored(path)


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["int8"], BACK, id="int8"),
        pytest.param(["int8", "--axis", "1"], [[128, -2, 2], [254, 127, -254]], id="axis-1"),
        pytest.param(
            ["uint8", "--scale", "2", "--zero-point", "127"],
            [[128, -2, 2], [254, 128, -254]],
            id="uint8",
        ),
        pytest.param(["int16", "--scale", "0.5"], WEIGHT.tolist(), id="exact"),
        pytest.param(
            ["float8e4m3fn", "--scale", "1"], [[128, -1.5, 2.5], [256, 128, -256]], id="float8"
        ),
        pytest.param(
            ["int4", "--scale", "32", "--block-size", "2"],
            [[128, 0, 0], [224, 128, -256]],
            id="int4-blocks",
        ),
        pytest.param(
            ["uint4", "--scale", "32", "--zero-point", "8"],
            [[128, 0, 0], [224, 128, -256]],
            id="uint4-zero-points",
        ),
        pytest.param(["float4e2m1", "--scale", "64"], [[128, 0, 0], [256, 128, -256]], id="float4"),
    ],
)
def test_codes_become_the_values_that_they_stand_for(
    options: list[str], expected: Any, container: str, tmp_path: Path
) -> None:
    source = save(tmp_path / f"m.{container}", w=WEIGHT, bias=float32([1, 2]))
    ok("quantize", source, "-o", tmp_path / f"q.{container}", "--dtype", *options)
    ok("dequantize", tmp_path / f"q.{container}")
    found = read(tmp_path / f"q.float32.{container}")
    assert set(found) == {"w", "bias"}
    assert found["w"].dtype == np.float32
    assert found["w"].tolist() == expected
    assert found["bias"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16),
        ("float64", np.float64),
    ],
)  # fmt: skip
def test_dtype_is_the_type_of_the_result(name: str, dtype: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", w=WEIGHT)
    ok("quantize", source, "--dtype", "int8", "-o", tmp_path / "q.safetensors")
    ok("dequantize", tmp_path / "q.safetensors", "--dtype", name)
    found = stored(tmp_path / f"q.{name}.safetensors")["w"]
    assert found.dtype == dtype
    assert found.astype(np.float64).tolist() == BACK


def test_metadata_of_others_is_kept_and_that_of_qtool_goes(tmp_path: Path) -> None:
    save_file({"w": WEIGHT}, tmp_path / "m.safetensors", metadata={"note": "héllo"})
    ok("quantize", tmp_path / "m.safetensors", "--dtype", "int8")
    ok("dequantize", tmp_path / "m.int8.safetensors", "-o", tmp_path / "y.safetensors")
    assert metadata(tmp_path / "y.safetensors") == {"note": "héllo"}


NPY = [
    pytest.param(int8([[1, -2], [3, 4]]), ["--scale", "0.5"], [[0.5, -1], [1.5, 2]], id="scalar"),
    pytest.param(uint8([[1, 2], [3, 4]]), ["--scale", "2", "--zero-point", "3"],
                 [[-4, -2], [0, 2]], id="zero-point"),
    pytest.param(int8([[1, 2], [3, 4]]), ["--scale", "s.npy", "--axis", "0"], [[1, 2], [30, 40]],
                 id="axis-0"),
    pytest.param(int8([[1, 2], [3, 4]]), ["--scale", "s.npy", "--axis", "-1"], [[1, 20], [3, 40]],
                 id="axis-minus-1"),
    pytest.param(int8([[1, 2, 3]]), ["--scale", "row.npy", "--block-size", "2"], [[1, 2, 30]],
                 id="blocks"),
    pytest.param(int8([[1], [2], [3]]),
                 ["--scale", "column.npy", "--block-size", "2", "--axis", "0"],
                 [[1], [2], [30]], id="blocks-down"),
    pytest.param(int8([[1, 2, 3]]), ["--scale", "2", "--block-size", "2"], [[2, 4, 6]],
                 id="one-scale-for-all-blocks"),
    pytest.param(int8([[1, 2], [3, 4]]), ["--scale", "2", "--zero-point", "1", "--axis", "0"],
                 [[0, 2], [4, 6]], id="one-scale-for-all-rows"),
    pytest.param(np.array([1, 448], ml_dtypes.float8_e4m3fn).view("V1"),
                 ["--scale", "2", "--source-dtype", "float8e4m3fn"], [2, 896], id="float8"),
    pytest.param(np.array([7, -8], ml_dtypes.int4).view("V1"),
                 ["--scale", "2", "--source-dtype", "int4"], [14, -16], id="int4"),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "options", "expected"), NPY)
def test_an_array_of_codes_takes_its_scale_from_the_command_line(
    codes: Array, options: list[str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("c.npy", codes)
    np.save("s.npy", float32([1, 10]))
    np.save("row.npy", float32([[1, 10]]))
    np.save("column.npy", float32([[1], [10]]))
    ok("dequantize", "c.npy", *options)
    assert np.load("c.float32.npy").tolist() == expected


def test_what_quantize_writes_to_npy_comes_back_with_its_scale(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([-4, 3, 1.5]))
    ok("quantize", tmp_path / "x.npy", "--dtype", "int4", "--scale", "0.5", "--to", "npy")
    done = ok("dequantize", tmp_path / "x.int4.npy", "--scale", "0.5", "--source-dtype", "int4")
    assert "dequantized 1 tensor to float32" in done.err
    assert np.load(tmp_path / "x.int4.float32.npy").tolist() == [-4, 3, 1.5]


def weights(path: Path) -> dict[str, Array]:
    onnx.checker.check_model(str(path), full_check=True)
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("options", [[], ["--external-data"]], ids=["inline", "external"])
def test_a_model_gets_its_weights_back(options: list[str], tmp_path: Path) -> None:
    weight = np.tile(WEIGHT, (32, 8))
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_models.model([node], [onnx_models.initializer("w", weight)], inputs={"x": [1, 64]})
    source = onnx_models.save(model, tmp_path / "m.onnx")
    ok("quantize", source, "--dtype", "int8", "--axis", "0")
    ok("dequantize", tmp_path / "m.int8.onnx", "-o", tmp_path / "y.onnx", *options)
    assert weights(tmp_path / "y.onnx")["w"].tolist() == np.tile(BACK, (32, 8)).tolist()
    assert [n.op_type for n in onnx.load(tmp_path / "y.onnx").graph.node] == ["MatMul"]
    assert len(list(tmp_path.glob("*.data"))) == len(options)
    x = {"x": np.ones((1, 64), np.float32)}
    assert onnx_models.same(tmp_path / "y.onnx", onnx.load(tmp_path / "m.int8.onnx"), **x)


def test_a_model_that_another_tool_quantized_is_folded_too(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    tensors = [
        onnx_models.initializer("q", [[1, 2], [3, 4]], np.uint8),
        onnx_models.initializer("s", [0.5, 2]),
        onnx_models.initializer("z", [1, 4], np.uint8),
    ]
    model = onnx_models.model(nodes, tensors, inputs={"x": [1, 2]})
    source = onnx_models.save(model, tmp_path / "m.onnx")
    ok("dequantize", source, "--dtype", "float16")
    target = tmp_path / "m.float16.onnx"
    [weight] = weights(target).values()
    assert (weight.dtype.name, weight.tolist()) == ("float16", [[0, -4], [1, 0]])
    [y] = onnx_models.run(target, {"x": float32([[1, 1]])})
    assert y.tolist() == [[1, -4]]
    assert onnx.load(target).graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT


def test_json_says_what_was_done(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", w=WEIGHT)
    ok("quantize", source, "--dtype", "int4")
    done = ok("dequantize", tmp_path / "m.int4.safetensors", "--json", "-q").json
    assert done["command"] == "dequantize"
    assert done["tensors"] == [
        {"name": "w", "shape": [2, 3], "source_dtype": "int4", "dtype": "float32"}
    ]
    target = tmp_path / "m.int4.float32.safetensors"
    assert done["output"] == {"name": str(target), "container": "safetensors",
                              "bytes": target.stat().st_size, "external_data": None}  # fmt: skip


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", w=WEIGHT, v=SHIFTED)
    ok("quantize", source, "--dtype", "uint4", "-o", tmp_path / "q.safetensors")
    for name in ("1", "2"):
        ok("dequantize", tmp_path / "q.safetensors", "-o", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


REFUSED = [
    pytest.param("m.safetensors", 1, "holds nothing that qtool quantized", id="floats"),
    pytest.param("m.onnx", 1, "has no node that qtool knows to dequantize or multiply stored "
                 "codes", id="float-model"),
    pytest.param("x.npy", 2, "--scale: a .npy file holds codes alone", id="no-scale"),
    pytest.param("x.npy --scale 1", 1, "holds float32, which are no codes", id="float-array"),
    pytest.param("c.npy --scale s.npy", 1, "--scale: shape (3,), but the granularity needs ()",
                 id="scale-shape"),
    pytest.param("c.npy --scale s.npy --axis 0", 1,
                 "scale: shape (3,), but the granularity needs (2,)", id="scale-shape-of-axis"),
    pytest.param("c.npy --scale 1 --zero-point 300", 1, "a value that int8 cannot hold", id="zero"),
    pytest.param("c.npy --scale 1 --block-size 0", 1, "must be at least 1, got 0", id="block-0"),
    pytest.param("c.npy --scale 1 --axis 7", 1, "7 is out of range for rank 1", id="axis"),
    pytest.param("q.safetensors --scale 1", 2, "hold their own scales", id="scale-of-native"),
    pytest.param("q.safetensors --axis 1", 2, "--axis, --block-size and --tile out",
                 id="axis-of-native"),
    pytest.param("m.onnx --block-size 2", 2, "hold their own scales", id="block-of-model"),
    pytest.param("q.safetensors --dtype int8", 2, "--dtype: int8 is not a float type",
                 id="to-int8"),
    pytest.param("q.safetensors -o y.npz", 2, "end its name in .safetensors", id="container"),
    pytest.param("q.safetensors -o m.safetensors", 1, "exists already", id="exists"),
    pytest.param("q.safetensors --external-data", 2, "--external-data: safetensors has none",
                 id="external-data"),
    pytest.param("damaged.safetensors", 1, "is no JSON: expecting", id="damaged-metadata"),
    pytest.param("missing.safetensors", 1, "tensor w.scale: is missing", id="scale-gone"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_dequantize_refuses_in_one_line(
    arguments: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", WEIGHT)
    np.save("c.npy", int8([1, 2]))
    np.save("s.npy", float32([1, 2, 3]))
    save(Path("m.safetensors"), w=WEIGHT)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_models.model([node], [onnx_models.initializer("w", WEIGHT)], inputs={"x": [1, 2]})
    onnx_models.save(model, Path("m.onnx"))
    ok("quantize", "m.safetensors", "--dtype", "int8", "-o", "q.safetensors")
    tensors, layout = stored(Path("q.safetensors")), metadata(Path("q.safetensors"))
    save_file(tensors, "damaged.safetensors", metadata={"qtool": "{"})
    save_file({"w": tensors["w"]}, "missing.safetensors", metadata=layout)
    before = {p.name for p in Path().iterdir()}
    assert message in refused("dequantize", *arguments.split(), code=code)
    assert {p.name for p in Path().iterdir()} == before

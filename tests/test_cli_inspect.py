"""qtool inspect and qtool dtypes: what a file holds, and what can be written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_models
import pytest
from command import Array, float32, ok, refused
from onnx import TensorProto, helper
from safetensors.numpy import save_file

WEIGHT = float32([[127, -1.5, 2.5], [254, 127, -254]])


def save(path: Path, **tensors: Array) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **tensors)  # type: ignore[arg-type]
    else:
        save_file(tensors, path, metadata={"note": "héllo"})
    return path


def save_model(path: Path) -> Path:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_models.model([node], [onnx_models.initializer("w", WEIGHT)], inputs={"x": [1, 2]})
    return onnx_models.save(model, path)


@pytest.mark.parametrize("container", ["npy", "npz", "safetensors", "onnx"])
def test_json_has_container_tensors_and_totals(container: str, tmp_path: Path) -> None:
    path = tmp_path / f"w.{container}"
    if container == "npy":
        np.save(path, WEIGHT)
    elif container == "onnx":
        save_model(path)
    else:
        save(path, w=WEIGHT)
    found = ok("inspect", path, "--json").json
    assert found["command"] == "inspect"
    assert (found["name"], found["container"]) == (str(path), container)
    assert found["bytes"] == path.stat().st_size
    assert found["tensors"] == [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "bytes": 24, "quantization": None}
    ]
    assert found["totals"] == {"tensors": 1, "elements": 6, "bytes": 24}
    assert found["quantized_by"] == []
    assert found["metadata"] == ({"note": "héllo"} if container == "safetensors" else {})
    by_content = ok("inspect", "-", "--json", stdin=path.read_bytes()).json
    assert (by_content["container"], by_content["totals"]) == (container, found["totals"])


def test_a_model_tells_its_versions_and_nodes(tmp_path: Path) -> None:
    found = ok("inspect", save_model(tmp_path / "m.onnx"), "--json").json
    assert (found["ir_version"], found["opset_import"], found["nodes"]) == (10, {"ai.onnx": 21}, 1)
    assert found["quantized_operators"] == []
    assert "onnx, " in ok("inspect", tmp_path / "m.onnx").out.decode()
    assert ", opset 21, 1 node, not quantized" in ok("inspect", tmp_path / "m.onnx").out.decode()


def test_the_table_shows_type_shape_and_size(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.safetensors", w=WEIGHT, bias=np.zeros(3, np.float16), count=np.array(3)
    )
    lines = [line.split() for line in ok("inspect", path).out.decode().splitlines()]
    assert lines[0][1:] == f"safetensors, {path.stat().st_size} B, 3 tensors, not quantized".split()
    assert lines[1:] == [
        ["tensor", "type", "shape", "size"],
        ["count", "int64", "scalar", "8", "B"],
        ["w", "float32", "2x3", "24", "B"],
        ["bias", "float16", "3", "6", "B"],
    ]


def test_headers_alone_are_read(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[250000000000],"data_offsets":[0,1000000000000]}}'
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**12)
    assert "w       float32  250000000000  1.0 TB" in ok("inspect", path).out.decode()


STATS: list[Any] = [
    pytest.param(float32([1, -3, 0, 0]), {"min": -3, "max": 1, "zero_count": 2, "nan_count": 0,
                 "rms": math.sqrt(2.5), "outlier_ratio": 3 / math.sqrt(2.5)}, id="float32"),
    pytest.param(float32([np.nan, np.inf, -np.inf, 2]), {"min": 2, "max": 2, "nan_count": 1,
                 "inf_count": 2, "outlier_ratio": 1}, id="non-finite"),
    pytest.param(float32([np.nan]), {"min": None, "histogram": None}, id="nothing-finite"),
    pytest.param(float32([]), {"min": None, "max": None, "outlier_ratio": None}, id="empty"),
    pytest.param(float32([0, 0]), {"min": 0, "rms": 0, "outlier_ratio": None}, id="zeros"),
    pytest.param(np.array([1e300, -1e300]), {"max": 1e300, "outlier_ratio": 1}, id="large"),
    pytest.param(np.array([True, False]), {"min": 0, "max": 1, "zero_count": 1}, id="bool"),
    pytest.param(np.arange(16), {"histogram": [1] * 16}, id="histogram"),
    pytest.param(np.array([2**62]), {"max": 2**62}, id="int64"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), STATS)
def test_stats_are_those_of_the_finite_values(
    values: Array, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = save(tmp_path / "m.npz", w=values)
    [row] = ok("inspect", path, "--stats", "--json").json["tensors"]
    for name, value in expected.items():
        close = pytest.approx(value, rel=1e-15) if isinstance(value, float) else value
        assert row["stats"][name] == close, name
    assert ok("inspect", path, "--stats").out.decode().splitlines()[1].split()[-5:] == [
        "min", "max", "zeros", "peak/rms", "histogram",
    ]  # fmt: skip


def test_stats_of_quantized_tensors_are_of_the_values_behind_the_codes(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", w=WEIGHT)
    ok("quantize", path, "--dtype", "int8")
    [row] = ok("inspect", tmp_path / "m.int8.safetensors", "--stats", "--json").json["tensors"]
    assert (row["stats"]["min"], row["stats"]["max"]) == (-254, 254)


QUANTIZATIONS = [
    pytest.param(["int8"], {"dtype": "int8", "granularity": "per_axis", "axis": 0,
                            "block_size": None, "scale_dtype": "float32", "zero_point": False},
                 14, "int8 axis 0", id="int8"),
    pytest.param(["uint4", "--block-size", "2", "--scale-dtype", "float16"],
                 {"dtype": "uint4", "granularity": "blocked", "axis": 1, "block_size": 2,
                  "scale_dtype": "float16", "zero_point": True}, 13, "uint4 /2", id="uint4"),
]  # fmt: skip


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize(("options", "expected", "nbytes", "shown"), QUANTIZATIONS)
def test_files_of_qtool_tell_how_they_are_quantized(
    options: list[str], expected: dict[str, Any], nbytes: int, shown: str, container: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = save(tmp_path / f"m.{container}", w=WEIGHT)
    target = tmp_path / f"y.{container}"
    ok("quantize", path, "--dtype", *options, "-o", target)
    found = ok("inspect", target, "--json").json
    assert found["quantized_by"] == ["qtool"]
    [row] = found["tensors"]
    assert (row["name"], row["shape"], row["bytes"]) == ("w", [2, 3], nbytes)
    assert {n: row["quantization"][n] for n in expected} == expected
    table = ok("inspect", target).out.decode()
    assert shown in table
    assert "quantized with qtool" in table


@pytest.mark.parametrize(
    ("tensors", "tool"),
    [
        pytest.param({"a.qweight": np.ones((1, 8), np.int32), "a.scales": np.ones((1, 8))},
                     "GPTQ or AWQ", id="gptq"),
        pytest.param({"a.weight_packed": np.ones((8, 1), np.int32), "a.weight_scale": np.ones(8)},
                     "compressed-tensors", id="compressed-tensors"),
        pytest.param({"a.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
                      "a.weight_scale_inv": np.ones((1, 1))}, "block float8", id="float8"),
    ],
)  # fmt: skip
def test_files_of_other_tools_are_recognised(
    tensors: dict[str, Array], tool: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "m.safetensors", **tensors)
    assert ok("inspect", path, "--json").json["quantized_by"] == [tool]
    assert f"quantized with {tool}" in ok("inspect", path).out.decode()


def test_operators_on_codes_in_a_model_are_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.INT8),
        helper.make_node("DequantizeLinear", ["q", "s"], ["f"]),
        helper.make_node("DequantizeLinear", ["c", "t"], ["w"], axis=0, block_size=2),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    tensors = [
        onnx_models.initializer("s", 0.5),
        onnx_models.initializer("c", [[1, 2], [3, 4]], np.int8),
        onnx_models.initializer("t", [[1, 2]]),
    ]
    path = onnx_models.save(
        onnx_models.model(nodes, tensors, inputs={"x": [1, 2]}), tmp_path / "m.onnx"
    )
    found = ok("inspect", path, "--json").json
    assert found["quantized_by"] == ["DequantizeLinear", "QuantizeLinear"]
    uses = {use["tensor"]: use for use in found["quantized_operators"]}
    assert uses["c"]["dtype"] == "int8"
    assert (uses["c"]["granularity"], uses["c"]["block_size"]) == ("blocked", 2)
    lines = ok("inspect", path).out.decode().splitlines()
    assert "1 DequantizeLinear: int8 /2" in lines


def test_raw_arrays_are_read_as_source_dtype_says(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1.5, -2], ml_dtypes.bfloat16).view("V2"))
    options = ["--source-dtype", "bfloat16", "--stats", "--json"]
    [row] = ok("inspect", tmp_path / "x.npy", *options).json["tensors"]
    assert (row["dtype"], row["stats"]["min"], row["stats"]["max"]) == ("bfloat16", -2, 1.5)


def test_hostile_names_are_shown_without_their_controls(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", **{"a\x1b[2J\x07b\n": WEIGHT})
    text = ok("inspect", path).out.decode()
    assert "a?[2J?b?" in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "0 bytes are no safetensors file", id="empty"),
        pytest.param(b"\xff" * 8 + b"{}", "m.safetensors: ", id="header-length"),
        pytest.param(b"\x02\0\0\0\0\0\0\0{}rest", "m.safetensors: ", id="trailing-bytes"),
        pytest.param(b"\x03\0\0\0\0\0\0\0{,}", "m.safetensors: ", id="no-json"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "dequantize"])
def test_a_damaged_header_is_one_line(
    command: str, data: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    assert message in refused(command, path)


TYPES = [  # name, bits, lowest, highest, ONNX code, first opset
    ("int2", 2, -2, 1, 26, 25), ("uint2", 2, 0, 3, 25, 25), ("int4", 4, -8, 7, 22, 21),
    ("uint4", 4, 0, 15, 21, 21), ("int8", 8, -128, 127, 3, 10), ("uint8", 8, 0, 255, 2, 10),
    ("int16", 16, -32768, 32767, 5, 21), ("uint16", 16, 0, 65535, 4, 21),
    ("float4e2m1", 4, -6, 6, 23, 23), ("float6e2m3", 6, -7.5, 7.5, 27, 28),
    ("float6e3m2", 6, -28, 28, 28, 28), ("float8e4m3fn", 8, -448, 448, 17, 19),
    ("float8e4m3fnuz", 8, -240, 240, 18, 19), ("float8e5m2", 8, -57344, 57344, 19, 19),
    ("float8e5m2fnuz", 8, -57344, 57344, 20, 19),
]  # fmt: skip


def test_dtypes_lists_every_target_type() -> None:
    rows = [[f"{cell:g}" if isinstance(cell, int | float) else cell for cell in row]
            for row in TYPES]  # fmt: skip
    assert [line.split() for line in ok("dtypes").out.decode().splitlines()[1:]] == rows
    keys = ("name", "bits", "qmin", "qmax", "code", "opset")
    assert ok("dtypes", "--json").json["dtypes"] == [
        dict(zip(keys, row, strict=True)) for row in TYPES
    ]

"""qtool quantize: every option does its work in the file that it writes."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_models
import pytest
from command import (
    Array,
    described,
    float16,
    float32,
    initializers,
    int8,
    metadata,
    ok,
    qtool,
    report,
    stored,
    uint8,
    unpacked,
)
from onnx import helper
from safetensors.numpy import save_file

from qtool import engine
from qtool.jobs.quantize import quantize_file

# Rows and columns have largest magnitudes of 127 and 254: scales of 1 and 2.
WEIGHT = np.array([[127, -1.5, 2.5], [254, 127, -254]], np.float32)
ROWS = [[127, -2, 2], [127, 64, -127]]
COLUMNS = [[64, -2, 1], [127, 127, -127]]
# Rows span 255: scales of 1, zero points of 1 and 0.
SHIFTED = np.array([[-1, 0, 254], [0, 255, 51]], np.float32)


def save_safetensors(path: Path, **tensors: Array) -> Path:
    save_file(tensors, path)
    return path


def save_npz(path: Path, **tensors: Array) -> Path:
    np.savez(path, **tensors)  # type: ignore[arg-type]
    return path


def save_onnx(path: Path, **tensors: Array) -> Path:
    """A model in which each tensor is the weight of a MatMul."""
    nodes = [helper.make_node("MatMul", [f"x_{n}", n], [f"y_{n}"]) for n in tensors]
    model = onnx_models.model(
        nodes,
        [onnx_models.initializer(n, t, t.dtype) for n, t in tensors.items()],
        inputs={f"x_{n}": [1, t.shape[0]] for n, t in tensors.items()},
        outputs=[f"y_{n}" for n in tensors],
    )
    return onnx_models.save(model, path)


def save_npy(path: Path, array: Array) -> Path:
    np.save(path, array)
    return path


def quantized(folder: Path, array: Array, *options: str | Path) -> dict[str, Array]:
    """What `qtool quantize x.npy` stores, by part: "" for the codes, ".scale", ".zero_point"."""
    source = save_npy(folder / "x.npy", array)
    ok("quantize", source, "-o", folder / "y.safetensors", *options)
    return {name.removeprefix("x"): t for name, t in stored(folder / "y.safetensors").items()}


SAVERS = [
    pytest.param(save_safetensors, "safetensors", id="safetensors"),
    pytest.param(save_npz, "npz", id="npz"),
    pytest.param(save_onnx, "onnx", id="onnx"),
]
Saver = Callable[..., Path]


def parts(path: Path, name: str) -> tuple[Array, Array, Array | None]:
    """The codes, scale and zero point of a tensor, as the container's own library reads them."""
    if path.suffix == ".onnx":
        found = initializers(path)
        return (found[f"{name}_quantized"], found[f"{name}_scale"], found.get(f"{name}_zero_point"))
    tensors = dict(np.load(path)) if path.suffix == ".npz" else stored(path)
    return tensors[name], tensors[f"{name}.scale"], tensors.get(f"{name}.zero_point")


GRANULARITIES = [
    pytest.param(["--axis", "0"], ROWS, [1, 2], id="axis-0"),
    pytest.param(["--axis", "1"], COLUMNS, [2, 1, 2], id="axis-1"),
    pytest.param(["--axis", "-1"], COLUMNS, [2, 1, 2], id="axis-minus-1"),
    pytest.param(["--axis=-2"], ROWS, [1, 2], id="axis-minus-2"),
    pytest.param(["--block-size", "2", "--axis", "0"], COLUMNS, [[2, 1, 2]], id="blocks-down"),
    pytest.param(["--block-size", "9", "--axis", "1"], ROWS, [[1], [2]], id="block-too-large"),
    pytest.param(
        ["--block-size", "1", "--axis", "0", "--scale-dtype", "float16"],
        [[127, -127, 127], [127, 127, -127]], [[1, 1.5 / 127, 2.5 / 127], [2, 1, 2]],
        id="block-of-one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("save", "container"), SAVERS)
@pytest.mark.parametrize(("options", "codes", "scales"), GRANULARITIES)
def test_axis_and_block_size_place_the_scales(
    options: list[str], codes: Any, scales: Any, save: Saver, container: str, tmp_path: Path
) -> None:
    source = save(tmp_path / f"m.{container}", w=WEIGHT)
    ok("quantize", source, "--dtype", "int8", *options, "--to", container)
    y, scale, zero_point = parts(tmp_path / f"m.int8.{container}", "w")
    assert (y.dtype.name, y.tolist()) == ("int8", codes)
    assert scale.tolist() == np.asarray(scales, scale.dtype).tolist()
    assert zero_point is None


@pytest.mark.parametrize(
    ("options", "attributes"),
    [
        pytest.param(["--axis", "0"], {"axis": 0}, id="axis"),
        pytest.param(["--axis", "-1"], {"axis": 1}, id="negative-axis"),
        pytest.param(["--block-size", "2"], {"axis": 0, "block_size": 2}, id="block"),
        pytest.param([], {"axis": 1}, id="default"),
    ],
)
def test_an_onnx_model_gets_one_dequantize_linear_with_that_axis(
    options: list[str], attributes: dict[str, int], tmp_path: Path
) -> None:
    source = save_onnx(tmp_path / "m.onnx", w=WEIGHT)
    ok("quantize", source, "--dtype", "int8", *options)
    nodes = onnx.load(tmp_path / "m.int8.onnx").graph.node
    assert [node.op_type for node in nodes] == ["DequantizeLinear", "MatMul"]
    assert {a.name: a.i for a in nodes[0].attribute} == attributes
    assert list(nodes[0].output) == ["w"]


DEFAULTS = [  # container, shape, options, shape of the scales
    pytest.param(save_safetensors, "safetensors", (4, 6), [], (4,), id="rows"),
    pytest.param(save_npz, "npz", (4, 6), [], (4,), id="npz-rows"),
    pytest.param(save_onnx, "onnx", (4, 6), [], (6,), id="matmul-columns"),
    pytest.param(
        save_safetensors,
        "safetensors",
        (4, 6),
        ["--block-size", "4"],
        (4, 2),
        id="blocks-along-the-input-axis",
    ),
    pytest.param(save_onnx, "onnx", (4, 6), ["--block-size", "2"], (2, 6), id="matmul-blocks"),
    pytest.param(
        save_safetensors,
        "safetensors",
        (4, 6, 3, 3),
        ["--block-size", "3"],
        (4, 2, 3, 3),
        id="blocks-of-input-channels",
    ),
    pytest.param(save_safetensors, "safetensors", (4, 6, 8), [], (4,), id="rank-3"),
]


@pytest.mark.parametrize(("save", "container", "shape", "options", "expected"), DEFAULTS)
def test_without_an_axis_scales_follow_the_output_channels_and_blocks_the_inputs(
    save: Saver, container: str, shape: tuple[int, ...], options: list[str],
    expected: tuple[int, ...], tmp_path: Path,
) -> None:  # fmt: skip
    source = save(tmp_path / f"m.{container}", w=np.ones(shape, np.float32))
    ok("quantize", source, "--dtype", "int4", *options, "-o", tmp_path / f"y.{container}")
    assert parts(tmp_path / f"y.{container}", "w")[1].shape == expected


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        pytest.param([], (), id="per-tensor"),
        pytest.param(["--block-size", "3"], (4, 2, 1, 1), id="blocks"),
    ],
)
def test_a_bare_array_is_quantized_per_tensor_or_in_blocks_along_axis_minus_1(
    options: list[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    array = np.ones((4, 2, 1, 3), np.float32)
    assert quantized(tmp_path, array, "--dtype", "int8", *options)[".scale"].shape == shape


RANGES = [  # array, options, codes, scales, zero points
    pytest.param(SHIFTED, ["--dtype", "uint8"], [[0, 1, 255], [0, 255, 51]], [1, 1], [1, 0],
                 id="unsigned-is-asymmetric"),
    pytest.param(SHIFTED, ["--dtype", "uint8", "--asymmetric"], [[0, 1, 255], [0, 255, 51]],
                 [1, 1], [1, 0], id="asymmetric"),
    pytest.param(SHIFTED, ["--dtype", "int8", "--asymmetric"],
                 [[-128, -127, 127], [-128, 127, -77]], [1, 1], [-127, -128],
                 id="signed-asymmetric"),
    pytest.param(SHIFTED, ["--dtype", "int8", "--method", "minmax"],
                 [[-128, -127, 127], [-128, 127, -77]], [1, 1], [-127, -128], id="minmax"),
    pytest.param(float32([[-1, 0, 253], [0, 254, 51]]),
                 ["--dtype", "int8", "--asymmetric", "--narrow-range"],
                 [[-127, -126, 127], [-127, 127, -76]], [1, 1], [-126, -127],
                 id="narrow-asymmetric"),
    pytest.param(WEIGHT, ["--dtype", "uint8", "--symmetric"], [[255, 126, 130], [255, 192, 1]],
                 [1, 2], [128, 128], id="unsigned-symmetric"),
    pytest.param(WEIGHT, ["--dtype", "uint8", "--method", "absmax"],
                 [[255, 126, 130], [255, 192, 1]], [1, 2], [128, 128], id="absmax"),
    pytest.param(WEIGHT, ["--dtype", "int8", "--method", "percentile:100"], ROWS, [1, 2], None,
                 id="percentile-100"),
    pytest.param(WEIGHT, ["--dtype", "int8", "--method", "percentile:50"],
                 [[127, -76, 127], [127, 64, -127]], [2.5 / 127, 2], None, id="percentile-50"),
    pytest.param(float32([[0, 4, 48, 264]]), ["--dtype", "uint8", "--method", "percentile:75"],
                 [[0, 10, 120, 255]], [0.4], [0], id="percentile-75"),
]  # fmt: skip


@pytest.mark.parametrize(("array", "options", "codes", "scales", "zero_points"), RANGES)
def test_method_and_symmetry_choose_the_range(
    array: Array, options: list[str], codes: Any, scales: Any, zero_points: Any, tmp_path: Path
) -> None:
    found = quantized(tmp_path, array, "--axis", "0", *options)
    assert found[""].tolist() == codes
    assert found[".scale"].tolist() == float32(scales).tolist()
    zeros = found.get(".zero_point")
    assert (None if zeros is None else zeros.tolist()) == zero_points


@pytest.mark.parametrize(
    ("name", "stored_as", "scales", "codes"),
    [
        # 130 / 127 is 1.0236
        pytest.param("float32", np.float32, [130 / 127, 2], [127, -64], id="float32"),
        pytest.param("float16", np.float16, [1.0234375, 2], [127, -64], id="float16"),
        pytest.param("bfloat16", ml_dtypes.bfloat16, [1.0234375, 2], [127, -64], id="bfloat16"),
        pytest.param("float8e8m0", ml_dtypes.float8_e8m0fnu, [2, 2], [65, -32], id="e8m0-up"),
        pytest.param("float8e4m3fn", ml_dtypes.float8_e4m3fn, [1, 2], [127, -65], id="e4m3-down"),
    ],
)
def test_scale_dtype_is_the_type_of_the_stored_scale_that_the_codes_come_from(
    name: str, stored_as: Any, scales: list[float], codes: list[int], tmp_path: Path
) -> None:
    array = np.array([[130, -65], [254, 2]], np.float32)
    found = quantized(tmp_path, array, "--dtype", "int8", "--axis", "0", "--scale-dtype", name)
    assert found[".scale"].dtype == stored_as
    assert found[".scale"].astype(np.float32).tolist() == float32(scales).tolist()
    assert found[""].tolist() == [codes, [127, 1]]
    assert described(tmp_path / "y.safetensors")["x"]["scale_dtype"] == name


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8e8m0"])
def test_scale_dtype_holds_in_onnx_and_the_weight_keeps_its_type(name: str, tmp_path: Path) -> None:
    source = save_onnx(tmp_path / "m.onnx", w=WEIGHT)
    ok("quantize", source, "--dtype", "int8", "--axis", "0", "--scale-dtype", name)
    scale = initializers(tmp_path / "m.int8.onnx")["w_scale"]
    assert name.removesuffix("fnu").replace("float8e8m0", "float8_e8m0") in str(scale.dtype)
    assert scale.astype(np.float32).tolist() == [1, 2]
    model = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "m.int8.onnx"), strict_mode=True)
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


TENTHS = [0.25, 0.45, 0.55, 0.65, 0.85, 1.35, 2.95]
BY_FLOAT16 = [2, 4, 6, 6, 8, 14, 30]
BY_FLOAT32 = [3, 5, 5, 7, 9, 13, 29]


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        pytest.param([], BY_FLOAT16, id="given-float16-scale"),
        pytest.param(["--precision", "float32"], BY_FLOAT32, id="float32"),
        pytest.param(["--precision", "float16"], BY_FLOAT16, id="float16"),
    ],
)
def test_precision_is_the_type_of_the_division(
    options: list[str], codes: list[int], tmp_path: Path
) -> None:
    scale = save_npy(tmp_path / "s.npy", float16(0.1))
    array = np.array(TENTHS, np.float16)
    found = quantized(tmp_path, array, "--dtype", "int8", "--scale", scale, *options)
    assert found[""].tolist() == codes
    assert found[".scale"].dtype == np.float16


def test_a_chosen_float16_scale_divides_in_float32_unless_precision_says_otherwise(
    tmp_path: Path,
) -> None:
    array = np.array([*TENTHS, 12.695], np.float16)  # 12.695 / 127 is 0.1
    assert quantized(tmp_path, array, "--dtype", "int8")[""].tolist() == [*BY_FLOAT32, 127]
    found = quantized(tmp_path, array, "--dtype", "int8", "--precision", "float16", "--force")
    assert found[""].tolist() == [*BY_FLOAT16, 127]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([], "7e7e7efe", id="default"),
        pytest.param(["--saturate"], "7e7e7efe", id="saturate"),
        pytest.param(["--no-saturate"], "7e7f7f7f", id="no-saturate"),
    ],
)
def test_saturate_decides_what_float8_makes_of_large_values(
    options: list[str], expected: str, tmp_path: Path
) -> None:
    array = np.array([448, 480, 1e9, -1e9], np.float32)
    found = quantized(tmp_path, array, "--dtype", "float8e4m3fn", "--scale", "1", *options)
    assert found[""].tobytes().hex() == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        pytest.param("int8", "00 7f 80 01", id="integer"),
        pytest.param("float8e4m3fn", "7f 7e fe 38", id="with-nan"),
        pytest.param("float4e2m1", "70 2f", id="without-nan"),
    ],
)
def test_nonfinite_allow_saturates_inf_and_counts(
    dtype: str, expected: str, tmp_path: Path
) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    found = quantized(tmp_path, array, "--dtype", dtype, "--scale", "1", "--nonfinite", "allow")
    assert found[""].tobytes().hex(" ") == expected
    [record] = report(tmp_path / "y.safetensors")["tensors"]
    assert (record["nan_count"], record["inf_count"]) == (1, 2)


@pytest.mark.parametrize(
    ("semantics", "codes"),
    [
        pytest.param("onnx", [1, 3, 3, 1], id="onnx"),
        pytest.param("onednn", [2, 2, 4, 0], id="onednn"),
    ],
)
def test_semantics_decides_when_the_zero_point_is_added(
    semantics: str, codes: list[int], tmp_path: Path
) -> None:
    found = quantized(
        tmp_path, np.array([0.5, 1.5, 2.5, -0.5], np.float32), "--dtype", "uint8", "--scale", "1",
        "--zero-point", "1", "--semantics", semantics,
    )  # fmt: skip
    assert found[""].tolist() == codes


def test_narrow_range_leaves_the_lowest_code_unused(tmp_path: Path) -> None:
    array = np.array([-200, -127.4, 200], np.float32)
    options = ["--dtype", "int8", "--scale", "1", "--narrow-range"]
    assert quantized(tmp_path, array, *options)[""].tolist() == [-127, -127, 127]


def test_negative_scales_are_accepted_when_asked_for(tmp_path: Path) -> None:
    options = ["--dtype", "int8", "--scale=-2", "--negative-scale"]
    assert quantized(tmp_path, float32([4, -6]), *options)[""].tolist() == [-2, 3]


TARGETS = [  # codes of 0, 1, -1, 3, 100 with scale 1
    ("int2", [0, 1, -1, 1, 1]),
    ("uint2", [0, 1, 0, 3, 3]),
    ("int4", [0, 1, -1, 3, 7]),
    ("uint4", [0, 1, 0, 3, 15]),
    ("float4e2m1", [0, 1, -1, 3, 6]),
    ("float6e2m3", [0, 1, -1, 3, 7.5]),
    ("float6e3m2", [0, 1, -1, 3, 28]),
    ("int8", "00 01 ff 03 64"),
    ("uint8", "00 01 00 03 64"),
    ("int16", "0000 0100 ffff 0300 6400"),
    ("uint16", "0000 0100 0000 0300 6400"),
    ("float8e4m3fn", "00 38 b8 44 6c"),
    ("float8e4m3fnuz", "00 40 c0 4c 74"),
    ("float8e5m2", "00 3c bc 42 56"),
    ("float8e5m2fnuz", "00 40 c0 46 5a"),
]


@pytest.mark.parametrize(("dtype", "expected"), TARGETS, ids=[name for name, _ in TARGETS])
def test_every_target_type_stores_its_codes(dtype: str, expected: Any, tmp_path: Path) -> None:
    found = quantized(tmp_path, float32([0, 1, -1, 3, 100]), "--dtype", dtype, "--scale", "1")
    if isinstance(expected, str):
        assert found[""].tobytes() == bytes.fromhex(expected)
    else:
        assert unpacked(found[""], dtype, 5) == expected


def test_int4_codes_are_packed_flat_with_the_first_in_the_low_bits(tmp_path: Path) -> None:
    array = float32([[1, -1, 2], [-2, 3, -3], [4, -4, 7]])
    found = quantized(tmp_path, array, "--dtype", "int4", "--scale", "1")
    assert found[""].tobytes().hex() == "f1e2d3c407"
    assert described(tmp_path / "y.safetensors")["x"]["shape"] == [3, 3]


SOURCES = [  # what lies in the .npy file, options, codes of int8 with scale 1
    pytest.param(
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        [],
        [[0, 1, 2], [3, 4, 5]],
        id="fortran-order",
    ),
    pytest.param(np.array([1.5, -2, 0.25], ">f4"), [], [2, -2, 0], id="big-endian"),
    pytest.param(
        np.asfortranarray(np.array([[1, 2], [3, 4]], ">f2")),
        [],
        [[1, 2], [3, 4]],
        id="big-endian-fortran",
    ),
    pytest.param(np.array([1, -2, 300], ">i4"), [], [1, -2, 127], id="big-endian-int32"),
    pytest.param(np.array([1, -2, 300], np.int32), [], [1, -2, 127], id="int32"),
    pytest.param(np.array(2.5, np.float64), [], 2, id="rank-0"),
    pytest.param(np.zeros((0, 3), np.float32), [], [], id="empty"),
    pytest.param(np.zeros((3, 0), np.float16), [], [[], [], []], id="empty-rows"),
    pytest.param(
        np.array([1.5, -2.5], ml_dtypes.bfloat16).view("V2"),
        ["--source-dtype", "bfloat16"],
        [2, -2],
        id="raw-bfloat16",
    ),
]


@pytest.mark.parametrize(("array", "options", "codes"), SOURCES)
def test_every_kind_of_array_is_read(
    array: Array, options: list[str], codes: Any, tmp_path: Path
) -> None:
    found = quantized(tmp_path, array, "--dtype", "int8", "--scale", "1", *options)
    assert (found[""].dtype.name, found[""].shape) == ("int8", array.shape)
    assert found[""].tolist() == codes
    assert found[""].tobytes() == np.array(codes, np.int8).tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("options", [[], ["--axis", "0"], ["--block-size", "2"]], ids=str)
def test_an_empty_array_gets_usable_scales_and_null_figures(
    options: list[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    found = quantized(tmp_path, np.zeros(shape, np.float32), "--dtype", "int8", *options)
    assert (found[""].shape, found[""].dtype.name) == (shape, "int8")
    assert (found[".scale"] == 1).all()
    [record] = report(tmp_path / "y.safetensors")["tensors"]
    assert (record["mse"], record["sqnr_db"], record["min"]) == (None, None, None)


def test_groups_of_zeros_get_scale_1(tmp_path: Path) -> None:
    array = float32([[0, 0], [1, -1], [-0.0, 0]])
    found = quantized(tmp_path, array, "--dtype", "int8", "--axis", "0")
    assert found[".scale"].tolist() == float32([1, 1 / 127, 1]).tolist()
    assert found[""].tolist() == [[0, 0], [127, -127], [0, 0]]


def test_a_float16_scale_that_underflows_becomes_the_smallest_one(tmp_path: Path) -> None:
    found = quantized(tmp_path, float16([3e-6, -3e-6, 1e-6, 0]), "--dtype", "int8")
    assert (found[".scale"].dtype.name, float(found[".scale"])) == ("float16", 2**-24)
    assert found[""].tolist() == [50, -50, 17, 0]


def test_a_float64_npz_is_rounded_once_and_says_so(tmp_path: Path) -> None:
    source = save_npz(tmp_path / "m.npz", w=WEIGHT.astype(np.float64))
    done = ok("quantize", source, "--dtype", "int8")
    assert "warning: 1 tensor rounded from float64 to float32 before quantizing\n" in done.err
    found = stored(tmp_path / "m.int8.safetensors")
    assert found["w"].tolist() == ROWS
    assert found["w.scale"].dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("save", "container"), SAVERS[::2])
def test_scales_have_the_type_of_the_weight(
    save: Saver, container: str, dtype: Any, tmp_path: Path
) -> None:
    if container == "onnx":  # its MatMul has one type
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model = onnx_models.model(
            [node], [onnx_models.initializer("w", WEIGHT, dtype)], inputs={"x": [1, 2]}, dtype=code
        )
        source = onnx_models.save(model, tmp_path / "m.onnx")
    else:
        source = save(tmp_path / f"m.{container}", w=WEIGHT.astype(dtype))
    ok("quantize", source, "--dtype", "int8", "--axis", "0")
    y, scale, _ = parts(tmp_path / f"m.int8.{container}", "w")
    assert (y.tolist(), scale.dtype, scale.astype(int).tolist()) == (ROWS, dtype, [1, 2])


@pytest.mark.parametrize(("save", "container"), SAVERS)
@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        pytest.param([], {"a.w", "b.w", "B.W"}, id="all"),
        pytest.param(["--include", "b.*"], {"b.w"}, id="glob"),
        pytest.param(["--include", "*.w"], {"a.w", "b.w"}, id="case-matters"),
        pytest.param(["--include", ".w"], set(), id="glob-is-anchored"),
        pytest.param(["--include", "re:w$"], {"a.w", "b.w"}, id="expression-is-searched-for"),
        pytest.param(["--include", "a.w", "--include", "[bB].?"], {"a.w", "b.w", "B.W"}, id="two"),
        pytest.param(["--exclude", "b.w"], {"a.w", "B.W"}, id="exclude"),
        pytest.param(["--include", "*.w", "--exclude", "re:^b"], {"a.w"}, id="exclude-wins"),
    ],
)
def test_include_and_exclude_select_by_name(
    options: list[str], chosen: set[str], save: Saver, container: str, tmp_path: Path
) -> None:
    source = save(tmp_path / f"m.{container}", **dict.fromkeys(["a.w", "b.w", "B.W"], WEIGHT))
    target = tmp_path / f"y.{container}"
    ok("quantize", source, "--dtype", "int8", "-o", target, "--allow-empty", *options)
    if container == "onnx":
        names = [n.removesuffix("_scale") for n in initializers(target) if n.endswith("_scale")]
    else:
        tensors = dict(np.load(target)) if container == "npz" else stored(target)
        names = [n for n, t in tensors.items() if t.dtype == np.int8]
    assert set(names) == chosen
    assert {r["name"] for r in report(target)["tensors"]} == chosen
    reasons = {r["name"]: r["reason"] for r in report(target)["skipped"]}
    assert set(reasons) == {"a.w", "b.w", "B.W"} - chosen
    assert set(reasons.values()) <= {"not included", "excluded"}


def test_a_pattern_that_matches_nothing_is_a_warning(tmp_path: Path) -> None:
    source = save_safetensors(tmp_path / "m.safetensors", w=WEIGHT)
    done = ok("quantize", source, "--dtype", "int8", "--exclude", "lm_head*", "--include", "w")
    assert "warning: pattern 'lm_head*' matches no tensor\n" in done.err
    assert report(tmp_path / "m.int8.safetensors")["warnings"] == [
        "pattern 'lm_head*' matches no tensor"
    ]


def test_what_is_left_alone_is_carried_over_and_explained(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    others = {
        "bias": float32([1, 2, 3]),
        "ids": np.arange(4).reshape(2, 2),
        "f8": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
        "tiny": float16([[1], [2]]),
    }
    save_file({"w": WEIGHT, **others}, source, metadata={"format": "pt", "note": "héllo"})
    ok("quantize", source, "--dtype", "int8")
    target = tmp_path / "m.int8.safetensors"
    found = stored(target)
    assert set(found) == {"w", "w.scale", *others}
    for name, array in others.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    kept = metadata(target)
    assert (kept["format"], kept["note"], set(kept)) == ("pt", "héllo", {"format", "note", "qtool"})
    assert {r["name"]: r["reason"] for r in report(target)["skipped"]} == {
        "bias": "rank below 2",
        "ids": "int64 is no source type",
        "f8": "float8e4m3fn is no source type",
        "tiny": "would not get smaller as int8",
    }


def test_a_file_without_tensors_stays_one(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({}, source, metadata={"k": "v"})
    ok("quantize", source, "--dtype", "int8")
    assert stored(tmp_path / "m.int8.safetensors") == {}
    kept = metadata(tmp_path / "m.int8.safetensors")
    assert json.loads(kept.pop("qtool"))["tensors"] == {}
    assert kept == {"k": "v"}


NAMES = [
    "BaNaNa", "Infinity", "größe.重み", "n" * 10_000, "a\x1b[31mred\r\n", "layer: 0", "__metadata",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:12])
def test_names_of_all_kinds_survive_and_never_reach_the_terminal_raw(
    name: str, tmp_path: Path
) -> None:
    source = tmp_path / "m.safetensors"
    save_file({name: WEIGHT}, source)
    done = ok("quantize", source, "--dtype", "int8")
    target = tmp_path / "m.int8.safetensors"
    assert set(stored(target)) == {name, f"{name}.scale"}
    assert report(target)["tensors"][0]["name"] == name
    shown = done.err + ok("inspect", target).out.decode()
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert set(ok("inspect", target, "--json").json["tensors"][0]) >= {"name", "quantization"}
    ok("dequantize", target)
    back = stored(tmp_path / "m.int8.float32.safetensors")
    assert {n: t.tolist() for n, t in back.items()} == {name: [[127, -2, 2], [254, 128, -254]]}


def test_non_finite_values_are_null_in_the_report_and_names_keep_their_nan(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    array = float32([[1, np.nan, np.inf]] * 4)
    save_file({"BaNaNa": array, "Infinity": array}, source)
    ok("quantize", source, "--dtype", "int8", "--nonfinite", "allow")
    records = report(tmp_path / "m.int8.safetensors")["tensors"]
    assert [r["name"] for r in records] == ["BaNaNa", "Infinity"]
    assert {(r["nan_count"], r["inf_count"], r["max"]) for r in records} == {(4, 4, 1.0)}


def test_exact_and_zero_tensors_have_no_sqnr(tmp_path: Path) -> None:
    source = save_safetensors(
        tmp_path / "m.safetensors",
        exact=float32([[1, -2]] * 9),
        half=float32([[1.25, -2]] * 9),
        zero=np.zeros((9, 2), np.float32),
    )
    ok("quantize", source, "--dtype", "int8", "--scale", "1")
    figures = {r["name"]: r for r in report(tmp_path / "m.int8.safetensors")["tensors"]}
    assert [figures[n]["sqnr_db"] for n in ("exact", "zero")] == [None, None]
    assert [figures[n]["mse"] for n in ("exact", "half", "zero")] == [0, 0.03125, 0]
    assert figures["half"]["sqnr_db"] == pytest.approx(19.49390006644913, rel=1e-12)


TARGET_NAMES = [  # source, options, output, report
    pytest.param("m.npy", [], "m.int4.safetensors", "m.int4.report.json", id="npy"),
    pytest.param("m.npz", [], "m.int4.safetensors", "m.int4.report.json", id="npz"),
    pytest.param("m.safetensors", [], "m.int4.safetensors", "m.int4.report.json", id="safetensors"),
    pytest.param("m.v1.safetensors", [], "m.v1.int4.safetensors", "m.v1.int4.report.json",
                 id="name-with-dots"),
    pytest.param("m.onnx", [], "m.int4.onnx", "m.int4.report.json", id="onnx"),
    pytest.param("m.safetensors", ["--to", "npz"], "m.int4.npz", "m.int4.report.json", id="to-npz"),
    pytest.param("m.npy", ["--to", "npy"], "m.int4.npy", "m.int4.report.json", id="to-npy"),
    pytest.param("m.npz", ["-o", "{}/b.npz"], "b.npz", "b.report.json", id="by-suffix"),
    pytest.param("m.npz", ["-o", "{}/B.SAFETENSORS"], "B.SAFETENSORS", "B.report.json", id="case"),
    pytest.param("m.npz", ["-o", "{}/weights", "--to", "npz"], "weights", "weights.report.json",
                 id="no-suffix"),
    pytest.param("m.npz", ["--report", "{}/r"], "m.int4.safetensors", "r", id="report"),
]  # fmt: skip
SAVE = {"npz": save_npz, "safetensors": save_safetensors, "onnx": save_onnx}


@pytest.mark.parametrize(("source", "options", "output", "report_name"), TARGET_NAMES)
def test_output_and_report_go_where_the_options_say(
    source: str, options: list[str], output: str, report_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    path = folder / source
    if path.suffix == ".npy":
        save_npy(path, WEIGHT)
    else:
        SAVE[path.suffix[1:]](path, w=WEIGHT)
    ok("quantize", path, "--dtype", "int4", *(o.format(folder) for o in options))
    assert {p.name for p in folder.iterdir()} == {source, output, report_name}
    written = json.loads((folder / report_name).read_text())["output"]
    assert written["name"] == str(folder / output)
    assert written["bytes"] == (folder / output).stat().st_size


def test_npz_holds_the_native_layout(tmp_path: Path) -> None:
    source = save_safetensors(tmp_path / "m.safetensors", w=SHIFTED, bias=float32([1, 2]))
    ok("quantize", source, "--dtype", "uint4", "--to", "npz", "--scale", "85", "--zero-point", "1")
    found = dict(np.load(tmp_path / "m.uint4.npz"))
    assert set(found) == {"w", "w.scale", "w.zero_point", "bias", "__qtool__"}
    assert found["w"].tobytes().hex() == "111424"
    assert (found["w.scale"].tolist(), found["bias"].tolist()) == ([85, 85], [1, 2])
    assert unpacked(found["w.zero_point"], "uint4", 2) == [1, 1]
    layout = json.loads(found["__qtool__"].tobytes())
    assert layout["tensors"]["w"]["dtype"] == "uint4"


def test_npy_holds_the_codes_alone(tmp_path: Path) -> None:
    source = save_npy(tmp_path / "m.npy", WEIGHT)
    done = ok("quantize", source, "--dtype", "int8", "--axis", "0", "--to", "npy")
    assert np.load(tmp_path / "m.int8.npy").tolist() == ROWS
    assert "warning: a .npy file holds the codes alone" in done.err


def test_scale_and_zero_point_are_taken_from_npy_files(tmp_path: Path) -> None:
    scale = save_npy(tmp_path / "s.npy", float32([1, 2]))
    zero = save_npy(tmp_path / "z.npy", uint8([3, 128]))
    options = ["--dtype", "uint8", "--axis", "0", "--scale", str(scale), "--zero-point", str(zero)]
    found = quantized(tmp_path, WEIGHT, *options)
    assert found[""].tolist() == [[130, 1, 5], [255, 192, 1]]
    assert found[".scale"].tolist() == [1, 2]
    assert found[".zero_point"].dtype == np.uint8
    assert found[".zero_point"].tolist() == [3, 128]


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param("int8", [], id="int8"),
        pytest.param("uint8", [], id="uint8"),
        pytest.param("int4", ["--asymmetric", "--block-size", "2"], id="int4-zero-points"),
        pytest.param("uint4", ["--block-size", "2"], id="uint4-zero-points"),
        pytest.param("uint2", [], id="uint2-zero-points"),
        pytest.param("float8e4m3fn", ["--scale-dtype", "float8e8m0"], id="e8m0"),
    ],
)
def test_the_scales_of_one_run_quantize_the_same_file_to_the_same_codes(
    dtype: str, options: list[str], container: str, tmp_path: Path
) -> None:
    source = save_safetensors(tmp_path / "m.safetensors", v=SHIFTED, w=WEIGHT)
    first, second = tmp_path / f"1.{container}", tmp_path / "2.safetensors"
    granularity = [o for o in options if o in ("--block-size", "2")]
    ok("quantize", source, "-o", first, "--dtype", dtype, *options)
    ok("quantize", source, "-o", second, "--dtype", dtype, *granularity, "--scale", first)
    expected = stored(first) if container == "safetensors" else dict(np.load(first))
    expected.pop("__qtool__", None)
    found = stored(second)
    assert set(found) == set(expected)
    assert {n: t.tobytes() for n, t in found.items()} == {
        n: t.tobytes() for n, t in expected.items()
    }


def test_the_scales_of_one_file_quantize_another(tmp_path: Path) -> None:
    first = save_safetensors(tmp_path / "a.safetensors", w=WEIGHT)
    ok("quantize", first, "--dtype", "int8")
    second = save_safetensors(tmp_path / "b.safetensors", w=WEIGHT * 3, v=WEIGHT)
    ok("quantize", second, "--dtype", "int8", "--scale", tmp_path / "a.int8.safetensors")
    found = stored(tmp_path / "b.int8.safetensors")
    assert found["w"].tolist() == [[127, -4, 8], [127, 127, -128]]
    assert found["w.scale"].tolist() == [1, 2]
    assert found["v"].dtype == np.float32
    [skipped] = report(tmp_path / "b.int8.safetensors")["skipped"]
    assert skipped == {"name": "v", "reason": "no scale is given for it"}


def test_scales_that_another_tool_named_so_are_taken_too(tmp_path: Path) -> None:
    source = save_safetensors(tmp_path / "m.safetensors", w=WEIGHT)
    scales = {"w.scale": float32([1, 2]), "w.zero_point": int8([0, 1])}
    scale = save_safetensors(tmp_path / "s.safetensors", **scales)
    ok("quantize", source, "--dtype", "int8", "--scale", scale)
    assert stored(tmp_path / "m.int8.safetensors")["w"].tolist() == [[127, -2, 2], [127, 65, -126]]


def test_external_data_puts_weights_beside_the_model(tmp_path: Path) -> None:
    weight = np.tile(WEIGHT, (64, 16))
    source = save_onnx(tmp_path / "m.onnx", w=weight)
    ok("quantize", source, "--dtype", "int8", "--axis", "0", "--external-data")
    [data] = tmp_path.glob("*.data")
    model = onnx.load(tmp_path / "m.int8.onnx", load_external_data=False)
    places = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
    assert places["w_quantized"]["location"] == data.name
    assert report(tmp_path / "m.int8.onnx")["output"]["external_data"] == data.name
    assert initializers(tmp_path / "m.int8.onnx")["w_quantized"].tolist() == np.tile(
        ROWS, (64, 16)).tolist()  # fmt: skip
    before = data.stat().st_size
    ok("quantize", source, "--dtype", "int8", "--axis", "0", "--external-data", "--force")
    assert [p.stat().st_size for p in tmp_path.glob("*.data")] == [before]


def test_requantize_starts_from_the_dequantized_values_of_qtools_files(tmp_path: Path) -> None:
    source = save_safetensors(tmp_path / "m.safetensors", w=WEIGHT)
    ok("quantize", source, "--dtype", "int8")
    ok("quantize", tmp_path / "m.int8.safetensors", "-o", tmp_path / "y.safetensors",
       "--dtype", "int8", "--axis", "1", "--requantize")  # fmt: skip
    found = stored(tmp_path / "y.safetensors")  # from [[127, -2, 2], [254, 128, -254]]
    assert set(found) == {"w", "w.scale"}
    assert found["w.scale"].tolist() == float32([2, 128 / 127, 2]).tolist()
    assert found["w"].tolist() == [[64, -2, 1], [127, 127, -127]]


FOREIGN: dict[str, dict[str, Array]] = {
    "compressed-tensors": {
        "a.weight": np.ones((4, 4), np.int8), "a.weight_scale": np.ones((4, 1), np.float32),
    },
    "GPTQ": {
        "a.qweight": np.ones((4, 4), np.int32), "a.qzeros": np.ones((4, 4), np.int32),
        "a.scales": np.ones((4, 4), np.float16), "a.g_idx": np.zeros(32, np.int32),
    },
    "float8": {
        "a.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_inv": np.ones((4, 4), np.float32),
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", FOREIGN)
def test_requantize_keeps_other_tools_tensors_byte_for_byte(tool: str, tmp_path: Path) -> None:
    foreign = FOREIGN[tool]
    source = save_safetensors(tmp_path / "m.safetensors", w=WEIGHT, **foreign)
    ok("quantize", source, "--dtype", "int8", "--requantize")
    found = stored(tmp_path / "m.int8.safetensors")
    assert set(found) == {"w", "w.scale", *foreign}
    assert all(found[name].tobytes() == t.tobytes() for name, t in foreign.items())
    assert all(found[name].dtype == t.dtype for name, t in foreign.items())


def test_force_replaces_an_old_output(tmp_path: Path) -> None:
    source = save_npy(tmp_path / "x.npy", float32([127, 1]))
    target = tmp_path / "x.int8.safetensors"
    target.write_bytes(b"old")
    ok("quantize", source, "--dtype", "int8", "--force")
    assert stored(target)["x"].tolist() == [127, 1]


def without_seconds(data: bytes) -> Any:
    content = json.loads(data)
    content.pop("seconds")
    return content


@pytest.mark.parametrize(("save", "container"), SAVERS)
def test_the_same_command_gives_the_same_bytes(save: Saver, container: str, tmp_path: Path) -> None:
    source = save(tmp_path / f"m.{container}", w=WEIGHT, v=SHIFTED)
    runs: list[Sequence[Any]] = []
    for _ in range(2):
        ok("quantize", source, "--dtype", "int4", "-o", tmp_path / f"y.{container}", "--force")
        runs.append(
            [
                (tmp_path / f"y.{container}").read_bytes(),
                without_seconds((tmp_path / "y.report.json").read_bytes()),
            ]
        )
    assert runs[0] == runs[1]


def test_json_is_the_report_that_is_saved(tmp_path: Path) -> None:
    source = save_npy(tmp_path / "x.npy", WEIGHT)
    done = ok("quantize", source, "--dtype", "int8", "--json", "--report", tmp_path / "r.json")
    assert done.json == json.loads((tmp_path / "r.json").read_text())


OPTIONS_OF_JOBS = [
    pytest.param(["quantize", "--dtype", "int8"], id="int8"),
    pytest.param(["quantize", "--dtype", "uint4", "--block-size", "32"], id="uint4-blocks"),
    pytest.param(["quantize", "--dtype", "float8e4m3fn"], id="float8"),
    pytest.param(["dynamic"], id="dynamic"),
]


def test_quiet_says_nothing_but_warnings(tmp_path: Path) -> None:
    source = save_npy(tmp_path / "x.npy", WEIGHT)
    assert ok("quantize", source, "--dtype", "int8", "-q") == (0, b"", "")
    done = ok("quantize", source, "--dtype", "int8", "-q", "--force", "--exclude", "lm_head*")
    assert done == (0, b"", "warning: pattern 'lm_head*' matches no tensor\n")


@pytest.mark.parametrize("options", OPTIONS_OF_JOBS)
def test_threads_change_no_byte(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: True)
    monkeypatch.setattr(engine, "TILES_PAY", 0)
    x = np.random.default_rng(3).normal(size=(70, 4099)).astype(np.float32)
    source = save_safetensors(tmp_path / "m.safetensors", w=x, v=x[:5, :7].copy())
    written = []
    for jobs in ("1", "3"):
        target, back = tmp_path / f"{jobs}.safetensors", tmp_path / f"back{jobs}.safetensors"
        ok(*options[:1], source, "-o", target, "--jobs", jobs, *options[1:])
        ok("dequantize", target, "-o", back, "--jobs", jobs)
        written.append((target.read_bytes(), back.read_bytes()))
    assert written[0] == written[1]


def test_jobs_are_counted_from_one(tmp_path: Path) -> None:
    source = save_npy(tmp_path / "x.npy", WEIGHT)
    assert qtool("quantize", source, "--dtype", "int8", "--jobs", "0").code == 2
    assert not (tmp_path / "x.int8.safetensors").exists()


def test_an_npz_is_the_same_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(300 * 400, dtype=np.float32).reshape(300, 400))
    written = []
    for kernels in (False, True):
        monkeypatch.setattr(engine, "kernels_pay", lambda elements, pays=kernels: pays)
        target = tmp_path / f"{kernels}.npz"
        quantize_file(tmp_path / "x.npy", target, dtype="uint8", axis=0)
        written.append(target.read_bytes())
        with zipfile.ZipFile(target) as archive:
            names = [name for name in archive.namelist() if name.startswith("x")]
        assert names == ["x.npy", "x.scale.npy", "x.zero_point.npy"]
    assert written[0] == written[1]

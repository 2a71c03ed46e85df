"""Scales of tiles, and global scales over them, in files: there, back, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from command import (
    described,
    initializers,
    metadata,
    ok,
    refused,
    report,
    stored,
    unpacked,
    unsigned,
)
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, save_model
from safetensors.numpy import save_file

import qtool
from qtool import engine
from qtool.engine import quantize, restore_plain, stream, tiling
from qtool.spec import QuantSpec, Tiled

Array = NDArray[Any]

RANDOM = np.random.default_rng(41)
SHAPES = {"ragged": (150, 70), "deep": (3, 40, 33), "row": (1, 300), "column": (300, 1)}
WEIGHTS = {
    name: (RANDOM.standard_normal(shape) * np.exp(RANDOM.standard_normal(shape))).astype(np.float32)
    for name, shape in SHAPES.items()
}
OUTPUTS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
           "float64": np.float64}  # fmt: skip
OPTIONS = [
    ("int8",), ("uint8",), ("int4", "--asymmetric"), ("float8e4m3fn",),
    ("float4e2m1", "--scale-dtype", "float8e4m3fn", "--global-scale"),
    ("int8", "--scale-dtype", "float8e4m3fn", "--global-scale"),
    ("float6e3m2", "--scale-dtype", "float8e8m0"), ("int16", "--scale-dtype", "bfloat16"),
]  # fmt: skip


def save(path: Path, weights: dict[str, Array]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **weights)
    else:
        save_file(weights, path, metadata={"format": "pt"})
    return path


def spread(values: Array, shape: tuple[int, ...], tile: tuple[int, int]) -> Array:
    """The value of every element's tile."""
    wide = values.repeat(tile[0], axis=-2).repeat(tile[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def parts(path: Path, name: str, dtype: str) -> tuple[Array, Array, Array]:
    """Codes, scales times the global one, and zero points, all as float32."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            held = {k: file[k] for k in file.files}
            kept = json.loads(held.pop("__qtool__").tobytes())["stored"]
        held |= {k: held[k].view(TYPES[named]) for k, named in kept.items()}
    else:
        held = stored(path)
    shape = SHAPES[name]
    scale = held[f"{name}.scale"].astype(np.float32)
    if f"{name}.global_scale" in held:
        scale = scale * held[f"{name}.global_scale"]

    def codes(key: str, shape: tuple[int, ...]) -> Array:
        if held[key].ndim == 1 and held[key].dtype == np.uint8:
            return np.array(unpacked(held[key], dtype, *shape), np.float32)
        return held[key].astype(np.float32)

    zero = np.zeros_like(scale)
    if f"{name}.zero_point" in held:
        zero = codes(f"{name}.zero_point", scale.shape)
    return codes(name, shape), scale, zero


TYPES = {"float8e4m3fn": ml_dtypes.float8_e4m3fn, "float8e8m0": ml_dtypes.float8_e8m0fnu,
         "bfloat16": ml_dtypes.bfloat16}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("tile", [(128, 128), (16, 8), (7, 3), (1, 64)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_values_come_back_as_code_times_the_scale_of_the_tile(
    container: str, options: tuple[str, ...], tile: tuple[int, int], streamed: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: streamed)
    monkeypatch.setattr(engine, "TILES_PAY", 1)
    monkeypatch.setattr(restore_plain, "TILE", 500)
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    monkeypatch.setattr(stream, "_LONGEST_SPAN", 2000)
    source = save(tmp_path / f"m.{container}", WEIGHTS)
    target = tmp_path / f"q.{container}"
    ok("quantize", source, "-o", target, "--tile", f"{tile[0]}x{tile[1]}", "--dtype", *options,
       "--include", "*")  # fmt: skip
    told = {row["name"]: row for row in report(target)["tensors"]}
    left = {row["name"] for row in report(target)["skipped"]}
    assert set(told) | left == set(SHAPES)
    for output, dtype in OUTPUTS.items():
        back = tmp_path / f"{output}.{container}"
        ok("dequantize", target, "-o", back, "--dtype", output)
        if container == "npz":
            with np.load(back) as file:
                found = {name: file[name] for name in SHAPES}
            if output == "bfloat16":
                found = {
                    n: v.view(ml_dtypes.bfloat16) if n in told else v for n, v in found.items()
                }
        else:
            found = stored(back)
        for name in told:
            codes, scale, zero = parts(target, name, options[0])
            shape = SHAPES[name]
            assert scale.shape == (*shape[:-2], -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1]))
            wide = np.float32 if output == "float64" or options[0] == "int16" else dtype
            difference = (codes - spread(zero, shape, tile)).astype(wide)
            wanted = (difference * spread(scale, shape, tile).astype(wide)).astype(dtype)
            assert found[name].dtype == dtype
            assert found[name].tobytes() == wanted.tobytes()
            if output == "float32":
                error = np.abs(wanted.astype(np.float64) - WEIGHTS[name])
                assert told[name]["max_abs_error"] == float(error.max())
                assert told[name]["num_scales"] == scale.size
                assert told[name]["scale_max"] == float(scale.max())
                assert (told[name]["tile"], told[name]["axis"]) == (list(tile), None)


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["int4", "uint8", "float4e2m1"])
def test_a_tensor_in_memory_equals_exact_arithmetic(target: str, output: str) -> None:
    x = WEIGHTS["deep"][:2, :7, :11]
    q = quantize(x, QuantSpec(target, Tiled((3, 4))))
    values = q.dequantize(output)
    assert (values.shape, values.dtype) == (x.shape, OUTPUTS[output])
    for index in np.ndindex(x.shape):
        where = (index[0], index[1] // 3, index[2] // 4)
        zero = None if q.zero_point is None else float(q.zero_point[where])
        wanted = oracle.dequantize(float(q.y[index]), float(q.scale[where]), zero, output)
        assert float(values[index]).hex() == wanted.hex()


def test_the_metadata_says_tile_and_global_scale(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"w": WEIGHTS["ragged"]})
    ok("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "q.safetensors", "--dtype", "int8",
       "--tile", "128x64", "--scale-dtype", "float8e4m3fn", "--global-scale")  # fmt: skip
    assert described(tmp_path / "q.safetensors") == {
        "w": {
            "dtype": "int8", "shape": [150, 70], "granularity": "tiled", "axis": None,
            "block_size": None, "tile": [128, 64], "scale_dtype": "float8e4m3fn",
            "source_dtype": "float32", "zero_point": False, "global_scale": True,
        }
    }  # fmt: skip
    assert '"layout"' not in metadata(tmp_path / "q.safetensors")["qtool"]
    shapes = {
        name: (a.dtype.name, a.shape) for name, a in stored(tmp_path / "q.safetensors").items()
    }
    assert shapes == {
        "w": ("int8", (150, 70)), "w.scale": ("float8_e4m3fn", (2, 2)),
        "w.global_scale": ("float32", ()),
    }  # fmt: skip
    (row,) = qtool.inspect_file(tmp_path / "q.safetensors")["tensors"]
    assert (row["quantization"]["tile"], row["quantization"]["global_scale"]) == ([128, 64], True)


def test_scales_of_tiles_can_be_given(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", {"w": WEIGHTS["ragged"]})
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ok("quantize", source, "-o", first, "--dtype", "uint4", "--tile", "16x16")
    ok("quantize", source, "-o", second, "--dtype", "uint4", "--tile", "16x16", "--scale", first)
    assert unsigned(first) == unsigned(second)
    message = refused("quantize", source, "-o", tmp_path / "c.safetensors", "--dtype", "uint4",
                      "--tile", "16x8", "--scale", first)  # fmt: skip
    assert message == (
        "scale of w: shape (10, 5), but the granularity needs (10, 9); give one value or that "
        "shape, or another --axis or --block-size"
    )


def test_scales_under_a_global_one_are_given_as_their_product(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", {"w": WEIGHTS["ragged"]})
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ok("quantize", source, "-o", first, "--preset", "nvfp4")
    ok("quantize", source, "-o", second, "--dtype", "float4e2m1", "--block-size", "16",
       "--scale", first)  # fmt: skip
    held, again = stored(first), stored(second)
    assert held["w"].tobytes() == again["w"].tobytes()
    product = held["w.scale"].astype(np.float32) * held["w.global_scale"]
    assert again["w.scale"].tobytes() == product.tobytes()
    message = refused("quantize", source, "-o", tmp_path / "c.safetensors", "--preset", "nvfp4",
                      "--scale", first)  # fmt: skip
    assert message == "scale of w: a global scale needs chosen scales; leave one out"


def test_a_quantized_file_can_be_quantized_in_tiles(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", {"w": WEIGHTS["ragged"]})
    first, second, direct = (tmp_path / f"{n}.safetensors" for n in "abc")
    ok("quantize", source, "-o", first, "--dtype", "int16", "--tile", "5x9")
    ok("quantize", first, "-o", second, "--dtype", "int4", "--tile", "16x16", "--requantize")
    ok("dequantize", first, "-o", tmp_path / "back.safetensors")
    ok(
        "quantize",
        tmp_path / "back.safetensors",
        "-o",
        direct,
        "--dtype",
        "int4",
        "--tile",
        "16x16",
    )
    assert unsigned(second) == unsigned(direct)


# ---------------------------------------------------------------- refusals


def test_a_vector_has_no_tiles(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones(9, np.float32))
    message = refused("quantize", tmp_path / "v.npy", "--dtype", "int8", "--tile", "2x2")
    assert message == "tensor v: tile: a tensor of rank 1 has none; use --block-size"
    assert [path.name for path in tmp_path.iterdir()] == ["v.npy"]


@pytest.mark.parametrize("others", [["--block-size", "4"], ["--axis", "0"],
                                    ["--axis", "0", "--block-size", "4"]])  # fmt: skip
def test_tiles_replace_axis_and_block_size(others: list[str], tmp_path: Path) -> None:
    message = refused("quantize", tmp_path / "absent.npy", "--dtype", "int8", "--tile", "2x2",
                      *others, code=2)  # fmt: skip
    assert message == "--tile: replaces --axis and --block-size; leave one of them out"


@pytest.mark.parametrize("text", ["128", "x", "4x", "x4", "4x4x4", "axb", "-1x4", "4.0x4", ""])
def test_tiles_are_rows_and_columns(text: str, tmp_path: Path) -> None:
    message = refused("quantize", tmp_path / "absent.npy", "--dtype", "int8", f"--tile={text}",
                      code=2)  # fmt: skip
    assert message == f"--tile: {text!r} is not ROWSxCOLUMNS; use for example 128x128"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x4", "--tile: must be at least 1, got 0"), ("4x0", "--tile: must be at least 1, got 0"),
        (f"{2**63}x1", f"--tile: {2**63} does not fit 64 bits; use less"),
    ],
)  # fmt: skip
def test_tiles_have_a_size(text: str, message: str, tmp_path: Path) -> None:
    arguments = ("quantize", tmp_path / "absent.npy", "--dtype", "int8", "--tile", text)
    assert refused(*arguments, code=2) == message


def test_tiles_are_for_onnx_semantics(tmp_path: Path) -> None:
    message = refused("quantize", tmp_path / "absent.npy", "--dtype", "int8", "--tile", "2x2",
                      "--semantics", "onednn", code=2)  # fmt: skip
    assert message == (
        "--semantics: oneDNN Quantize has no blocks; quantize per tensor or per axis"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An ONNX model of one product."""
    weight = numpy_helper.from_array(WEIGHTS["ragged"], "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", 150), ("y", 70))
    )
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    save_model(made, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


NO_TILES = "--tile: ONNX has no word for tiles; use --block-size"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype int8 --tile 2x2", NO_TILES), ("--preset fp8-block", NO_TILES),
        ("--dtype int8 --dynamic-activations",
         "--dynamic-activations: ONNX says it by operators in the graph; "
         "use `qtool dynamic --graph`"),
        ("--dtype int8 --layout mlx",
         "--layout: mlx cannot be written to ONNX; use qdq or matmul-nbits"),
    ],
)  # fmt: skip
def test_onnx_has_no_word_for_tiles(options: str, message: str, model: Path) -> None:
    assert refused("quantize", model, *options.split(), code=2) == message
    assert [path.name for path in model.parent.iterdir()] == ["m.onnx"]


def test_a_preset_of_onnx_is_about_the_weights(model: Path, tmp_path: Path) -> None:
    for name, options in (("a", "--preset int8"), ("b", "--dtype int8")):
        ok("quantize", model, "-o", tmp_path / f"{name}.onnx", *options.split())
    assert unsigned(tmp_path / "a.onnx") == unsigned(tmp_path / "b.onnx")
    assert np.dtype(np.int8) in {a.dtype for a in initializers(tmp_path / "a.onnx").values()}


def test_bare_codes_come_back_by_tiles(tmp_path: Path) -> None:
    codes, scale = (
        np.arange(24, dtype=np.int8).reshape(4, 6),
        np.array([[1, 2], [4, 8]], np.float32),
    )
    np.save(tmp_path / "q.npy", codes)
    np.save(tmp_path / "s.npy", scale)
    given = (
        "dequantize",
        tmp_path / "q.npy",
        "-o",
        tmp_path / "x.npy",
        "--scale",
        tmp_path / "s.npy",
    )
    ok(*given, "--tile", "3x4")
    spread = np.repeat(np.repeat(scale, 3, axis=0)[:4], 4, axis=1)[:, :6]
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), codes * spread)
    message = refused(*given, "--tile", "3x4", "--axis", "0", "--force", code=2)
    assert message == "--tile: replaces --axis and --block-size; leave one of them out"

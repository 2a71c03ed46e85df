"""nvfp4 and the mx formats in ONNX: scales that are codes themselves, and scales of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_constructs import CONSTRUCTS, Construct
from onnx_jobs import (
    Array,
    attributes,
    normal,
    reference,
    replaced,
    reseed,
    same,
    sound,
    stored,
    weights,
)
from onnx_models import constant, initializer, model, run, save

import qtool
from qtool.formats.onnx.uses import uses
from qtool.jobs.inspect import inspect_file

make = helper.make_node
# onnxruntime has no float4e2m1 and no float6; the reference knows both.
MX = {
    "mxfp4": 24, "mxfp8": 24, "mxfp6-e2m3": 28, "mxfp6-e3m2": 28, "nvfp4": 23,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    reseed()


def matmul(values: Array) -> ModelProto:
    dtype = helper.np_dtype_to_tensor_dtype(values.dtype)
    return model([make("MatMul", ["x", "w"], ["y"])], [initializer("w", values, values.dtype)],
                 inputs={"x": (3, len(values))}, dtype=dtype)  # fmt: skip


def quantized(made: ModelProto, folder: Path, **options: Any) -> tuple[ModelProto, dict[str, Any]]:
    source = save(made, folder / "m.onnx")
    report = qtool.quantize_file(source, folder / "q.onnx", **options)
    return sound(folder / "q.onnx"), report


def test_nvfp4_is_two_dequantize_linear_nodes(tmp_path: Path) -> None:
    """Blocks of 16 along the axis that is summed over, their scales under one global scale."""
    # Largest magnitudes of the blocks: 2688 = 6 * 448 and 84 = 6 * 14, so the global scale is 1.
    column = [2688, -448, 224, 672, *[0] * 12, 84, 7, -14, 28, 42, 56, *[0] * 10]
    made = matmul(np.array(column, np.float32)[:, None])
    result, report = quantized(made, tmp_path, preset="nvfp4", method="absmax")
    assert [(n.op_type, list(n.input), list(n.output)) for n in result.graph.node] == [
        ("DequantizeLinear", ["w_scale_quantized", "w_global_scale"], ["w_scale"]),
        ("DequantizeLinear", ["w_quantized", "w_scale"], ["w"]),
        ("MatMul", ["x", "w"], ["y"]),
    ]
    first, second = (attributes(node) for node in result.graph.node[:2])
    assert (first, second) == ({}, {"axis": 0, "block_size": 16})
    held = {t.name: (t.data_type, list(t.dims), t.raw_data) for t in result.graph.initializer}
    assert held == {
        # 6 -1 0.5 1.5 are the codes 7, 10, 1 and 3; 6 0.5 -1 2 3 4 are 7, 1, 10, 4, 5 and 6
        "w_quantized": (TensorProto.FLOAT4E2M1, [32, 1],
                        bytes([0xA7, 0x31, *[0] * 6, 0x17, 0x4A, 0x65, *[0] * 5])),
        "w_scale_quantized": (TensorProto.FLOAT8E4M3FN, [2, 1],
                              np.array([448, 14], ml_dtypes.float8_e4m3fn).tobytes()),
        "w_global_scale": (TensorProto.FLOAT, [], np.float32(1).tobytes()),
    }  # fmt: skip
    assert result.opset_import[0].version == 23
    (row,) = report["tensors"]
    assert (row["global_scale"], row["scale_dtype"], row["max_abs_error"]) == (
        1.0, "float8e4m3fn", 0.0)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("preset", MX)
def test_the_reference_computes_with_codes_times_scales(
    preset: str, dtype: str, tmp_path: Path
) -> None:
    source = normal(40, 24).astype(np.dtype(dtype))
    source[:, 3] *= 1e-3
    made = matmul(source)
    result, report = quantized(made, tmp_path, preset=preset)
    assert result.opset_import[0].version == MX[preset]
    held = {name: numpy_helper.to_array(t) for name, t in stored(result.graph).items()}
    size = 16 if preset == "nvfp4" else 32
    scale = held["w_scale_quantized" if preset == "nvfp4" else "w_scale"].astype(np.float32)
    if preset == "nvfp4":
        over = held["w_global_scale"]
        assert over == report["tensors"][0]["global_scale"]
        scale = scale * over
    values = held["w_quantized"].astype(np.float32) * np.repeat(scale, size, 0)[:40]
    error = np.linalg.norm(values - source) / np.linalg.norm(source.astype(np.float64))
    assert error == pytest.approx(report["tensors"][0]["relative_error"], rel=1e-5)
    assert error < (0.04 if preset in ("mxfp8", "mxfp6-e2m3") else 0.16)
    x = {"x": normal(3, 40).astype(source.dtype)}
    same(reference(result, x), reference(replaced(made, {"w": values.astype(source.dtype)}), x))


@pytest.mark.parametrize("dtype", ["int4", "int8", "float8e4m3fn"])
@pytest.mark.parametrize("over", [False, True], ids=["scale-alone", "global-scale"])
def test_scales_of_float8_serve_every_type_and_run(dtype: str, over: bool, tmp_path: Path) -> None:
    made = matmul(normal(40, 24))
    result, _ = quantized(
        made, tmp_path, dtype=dtype, block_size=16, scale_dtype="float8e4m3fn", global_scale=over
    )
    held = {name: numpy_helper.to_array(t) for name, t in stored(result.graph).items()}
    assert held["w_scale_quantized"].dtype == ml_dtypes.float8_e4m3fn
    assert over or held["w_global_scale"] == 1
    scale = held["w_scale_quantized"].astype(np.float32) * held["w_global_scale"]
    values = held["w_quantized"].astype(np.float32) * np.repeat(scale, 16, 0)[:40]
    x = {"x": normal(3, 40)}
    same(run(result, x), run(replaced(made, {"w": values}), x))


@pytest.mark.parametrize("external", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_dequantize_reads_both_levels(
    preset: str, dtype: str, external: bool, tmp_path: Path
) -> None:
    made = matmul(normal(64, 48))
    # absmax: products with a global scale that is a power of two are exact in 16 bits too
    result, _ = quantized(made, tmp_path, preset=preset, external_data=external, method="absmax")
    done = qtool.dequantize_file(tmp_path / "q.onnx", tmp_path / "b.onnx", dtype=dtype)
    assert done["tensors"] == [
        {"name": "w", "shape": [64, 48], "source_dtype": "float4e2m1", "dtype": dtype}
    ]
    back = sound(tmp_path / "b.onnx")
    assert [n.op_type for n in back.graph.node if n.op_type != "Cast"] == ["MatMul"]
    ((name, tensor),) = stored(back.graph).items()
    assert name == ("w" if dtype == "float32" else f"w_{dtype}")
    (values,) = weights(result, tmp_path).values()
    same([numpy_helper.to_array(tensor)], [values.astype(np.dtype(dtype))])


def test_scales_that_something_else_reads_stay(tmp_path: Path) -> None:
    nodes = [
        make("DequantizeLinear", ["s_q", "g"], ["s"]),
        make("DequantizeLinear", ["q", "s"], ["w"], axis=0),
        make("MatMul", ["x", "w"], ["h"]),
        make("Mul", ["h", "s"], ["y"]),
    ]
    stored_values = [
        initializer("s_q", [1, 2, 4], ml_dtypes.float8_e4m3fn), initializer("g", 0.5),
        initializer("q", [[1, -2, 3]] * 3, np.int8),
    ]  # fmt: skip
    made = model(nodes, stored_values, inputs={"x": (1, 3)})
    save(made, tmp_path / "q.onnx")
    done = qtool.dequantize_file(tmp_path / "q.onnx", tmp_path / "b.onnx")
    assert [row["name"] for row in done["tensors"]] == ["s", "w"]
    back = sound(tmp_path / "b.onnx")
    held = {name: numpy_helper.to_array(t).tolist() for name, t in stored(back.graph).items()}
    assert held == {"s": [0.5, 1, 2], "w": [[0.5, -1, 1.5], [1, -2, 3], [2, -4, 6]]}
    x = {"x": normal(1, 3)}
    same(run(back, x), run(made, x))


def test_inspect_tells_both_levels(tmp_path: Path) -> None:
    quantized(matmul(normal(64, 48)), tmp_path, preset="nvfp4")
    rows = {row["name"]: row for row in inspect_file(tmp_path / "q.onnx")["tensors"]}
    assert rows["w_quantized"]["quantization"].items() >= {
        "operator": "DequantizeLinear", "dtype": "float4e2m1", "granularity": "blocked",
        "axis": 0, "block_size": 16, "scale_dtype": "float8e4m3fn", "global_scale": True,
        "equation": "code * (scale * global_scale)",
    }.items()  # fmt: skip
    scale = rows["w_scale_quantized"]["quantization"]
    assert (scale["granularity"], scale["global_scale"]) == ("per_tensor", False)
    assert [use.tensor for use in uses(sound(tmp_path / "q.onnx"))] == [
        "w_scale_quantized", "w_quantized"]  # fmt: skip


# What the reference cannot run: bidirectional operators, and the group of a ConvTranspose.
UNKNOWN = ("recurrent", "operators")


@pytest.mark.parametrize("construct", CONSTRUCTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_every_construct_holds_them(construct: Any, preset: str, tmp_path: Path) -> None:
    built: Construct = construct()
    result, report = quantized(built.made, tmp_path, preset=preset, block_size=8)
    assert {row["name"] for row in report["tensors"]} == built.axes.keys()
    values = weights(result)
    qtool.dequantize_file(tmp_path / "q.onnx", tmp_path / "b.onnx")
    expected = replaced(built.made, values)
    for feeds in built.feeds:
        if not built.restored:
            same(run(sound(tmp_path / "b.onnx"), feeds), run(expected, feeds))
        if construct.__name__ not in UNKNOWN:
            same(reference(result, feeds), reference(expected, feeds))


def test_a_type_that_no_constant_node_holds_is_refused_in_functions(tmp_path: Path) -> None:
    nodes = [constant("w", normal(16, 8)), make("MatMul", ["a", "w"], ["b"])]
    imports = [helper.make_opsetid("", 21)]
    layer = helper.make_function("local", "Layer", ["a"], ["b"], nodes, imports)
    made = model([make("Layer", ["x"], ["y"], domain="local")], inputs={"x": (2, 16)},
                 imports=[helper.make_opsetid("local", 1)], functions=[layer])  # fmt: skip
    rule = "tensor w: is in a function, and Constant nodes hold no float6e2m3; exclude it"
    with pytest.raises(qtool.QtoolError, match=rule):
        quantized(made, tmp_path, preset="mxfp6-e2m3")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]

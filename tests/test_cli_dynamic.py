"""qtool dynamic: DynamicQuantizeLinear of arrays and files."""

from __future__ import annotations

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
    ok,
    refused,
    report,
    stored,
)
from onnx import helper
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import save_file


def dynamic(folder: Path, array: Array, *options: str) -> tuple[list[int], float, int]:
    """Codes, scale and zero point that `qtool dynamic x.npy` stores."""
    np.save(folder / "x.npy", array)
    ok("dynamic", folder / "x.npy", *options)
    found = stored(folder / "x.dynamic.safetensors")
    assert set(found) == {"x", "x.scale", "x.zero_point"}
    assert (found["x.scale"].dtype, found["x.scale"].shape) == (np.dtype(np.float32), ())
    assert found["x.zero_point"].dtype == found["x"].dtype
    return found["x"].tolist(), found["x.scale"].item(), found["x.zero_point"].item()


VALUES = [  # x, codes, scale, zero point
    pytest.param([0, 2, -3, -2.5, 1.34, 0.5], [153, 255, 0, 26, 221, 179], 5 / 255, 153,
                 id="mixed"),
    pytest.param([-253, 257], [0, 254], 2, 126, id="zero-point-tie"),
    pytest.param([-127, 128, 0.5], [0, 255, 127], 1, 127, id="tie"),
    pytest.param([1, 2, 3], [85, 170, 255], 3 / 255, 0, id="positive"),
    pytest.param([-1, -2, -3], [170, 85, 0], 3 / 255, 255, id="negative"),
    pytest.param([5, 5], [255, 255], 5 / 255, 0, id="constant"),
    pytest.param([0, 0, -0.0], [0, 0, 0], 1, 0, id="zeros"),
    pytest.param([], [], 1, 0, id="empty"),
    pytest.param(-4, 0, 4 / 255, 255, id="scalar"),
    pytest.param([[0, 255], [1, 254]], [[0, 255], [1, 254]], 1, 0, id="matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("x", "codes", "scale", "zero_point"), VALUES)
def test_an_array_gets_the_codes_of_the_standard(
    x: Any, codes: Any, scale: float, zero_point: int, tmp_path: Path
) -> None:
    expected = (codes, float32(scale).item(), zero_point)
    assert dynamic(tmp_path, float32(x)) == expected


def test_the_reference_implementation_agrees(tmp_path: Path) -> None:
    x = np.random.default_rng(5).normal(1, 3, (40, 30)).astype(np.float32)
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero_point"])
    y, scale, zero_point = map(np.asarray, ReferenceEvaluator(node).run(None, {"x": x}))
    assert dynamic(tmp_path, x) == (y.tolist(), scale.item(), zero_point.item())


@pytest.mark.parametrize(
    ("x", "codes", "scale", "zero_point"),
    [
        pytest.param([-127, 127], [-127, 127], 1, 0, id="whole-range"),
        pytest.param([0, 254], [-127, 127], 1, -127, id="positive"),
        pytest.param([-254, 0], [-127, 127], 1, 127, id="negative"),
        pytest.param([-253, 1, 0.5], [-127, 127, 126], 1, 126, id="tie-to-even"),
    ],
)
def test_int8_uses_the_codes_from_minus_127(
    x: Any, codes: list[int], scale: float, zero_point: int, tmp_path: Path
) -> None:
    assert dynamic(tmp_path, float32(x), "--dtype", "int8") == (codes, scale, zero_point)


SOURCES = [
    pytest.param(float16([0, 255]), [], id="float16"),
    pytest.param(np.array([0, 255], ">f8"), [], id="big-endian-float64"),
    pytest.param(np.array([0, 255], ml_dtypes.bfloat16).view("V2"), ["--source-dtype", "bfloat16"],
                 id="raw-bfloat16"),
    pytest.param(np.array([0, 255], np.int32), [], id="int32"),
]  # fmt: skip


@pytest.mark.parametrize(("array", "options"), SOURCES)
def test_other_types_are_read_as_float32(array: Array, options: list[str], tmp_path: Path) -> None:
    assert dynamic(tmp_path, array, *options) == ([0, 255], 1, 0)


@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_every_float_tensor_of_a_file_is_quantized_whatever_its_rank(
    container: str, tmp_path: Path
) -> None:
    tensors = {
        "bias": float32([0, 255]), "scalar": float32(-4), "w": float32([[1, 2, 3]]),
        "ids": np.array([1, 2]),
    }  # fmt: skip
    source = tmp_path / f"m.{container}"
    if container == "npz":
        np.savez(source, **tensors)  # type: ignore[arg-type]
    else:
        save_file(tensors, source)
    ok("dynamic", source, "--to", container, "-o", tmp_path / f"y.{container}")
    target = tmp_path / f"y.{container}"
    found = dict(np.load(target)) if container == "npz" else stored(target)
    assert found["bias"].tolist() == [0, 255]
    assert (found["scalar"].tolist(), found["scalar.zero_point"].tolist()) == (0, 255)
    assert found["w"].tolist() == [[85, 170, 255]]
    assert found["ids"].tolist() == [1, 2]
    written = report(target)
    assert written["command"] == "dynamic"
    assert written["skipped"] == [{"name": "ids", "reason": "int64 is no source type"}]


def test_weights_of_a_model_get_one_dequantize_linear_each(tmp_path: Path) -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"])
    tensors = [onnx_models.initializer("w", [[1, 2, 3]]), onnx_models.initializer("b", [0, 0, 255])]
    source = onnx_models.save(
        onnx_models.model([node], tensors, inputs={"x": [1, 1]}), tmp_path / "m.onnx"
    )
    ok("dynamic", source)
    target = tmp_path / "m.dynamic.onnx"
    found = initializers(target)
    assert found["w_quantized"].tolist() == [[85, 170, 255]]
    assert found["b_quantized"].tolist() == [0, 0, 255]
    model = onnx.load(target)
    assert [n.op_type for n in model.graph.node].count("DequantizeLinear") == 2
    [y] = onnx_models.run(target, {"x": float32([[1]])})
    assert y.tolist() == (float32([[85, 170, 255]]) * float32(3 / 255) + [0, 0, 255]).tolist()


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        pytest.param(["--include", "w*"], {"w1", "w2"}, id="include"),
        pytest.param(["--exclude", "re:[1b]$"], {"w2"}, id="exclude"),
    ],
)
def test_patterns_select(options: list[str], chosen: set[str], tmp_path: Path) -> None:
    save_file({n: float32([0, 255]) for n in ("w1", "w2", "b")}, tmp_path / "m.safetensors")
    ok("dynamic", tmp_path / "m.safetensors", *options)
    assert set(described(tmp_path / "m.dynamic.safetensors")) == chosen


def test_output_options_do_as_in_quantize(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([0, 255]))
    ok("dynamic", tmp_path / "x.npy", "--to", "npy", "--report", tmp_path / "r.json", "-q")
    assert np.load(tmp_path / "x.dynamic.npy").tolist() == [0, 255]
    assert {p.name for p in tmp_path.iterdir()} == {"x.npy", "x.dynamic.npy", "r.json"}
    assert "exists already" in refused("dynamic", tmp_path / "x.npy", "--to", "npy")
    ok("dynamic", tmp_path / "x.npy", "--to", "npy", "--force")
    done = ok("dynamic", "-", "-o", "-", "-q", stdin=(tmp_path / "x.npy").read_bytes())
    assert (stored(done.out)["array"].tolist(), done.err) == ([0, 255], "")


REFUSED = [
    pytest.param([1, np.nan], [], "tensor x: nan at [1]", id="nan"),
    pytest.param([-np.inf, 1], [], "tensor x: -inf at [0]", id="infinity"),
    pytest.param([-3e38, 3e38], [], "tensor x", id="range-overflows"),
    pytest.param([1, 2], ["--dtype", "int4"], "--dtype: DynamicQuantizeLinear gives uint8 or "
                 "int8; use `qtool quantize` for int4", id="int4"),
    pytest.param([1, 2], ["--dtype", "int9"], "'int9' is not an element type", id="unknown-type"),
]  # fmt: skip


@pytest.mark.parametrize(("x", "options", "message"), REFUSED)
def test_what_the_formula_cannot_do_is_refused(
    x: Any, options: list[str], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", float32(x))
    code = 2 if options else 1
    assert message in refused("dynamic", tmp_path / "x.npy", *options, code=code)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_allow_empty_copies_a_file_without_floats(tmp_path: Path) -> None:
    save_file({"ids": np.array([1, 2])}, tmp_path / "m.safetensors")
    assert "nothing to quantize" in refused("dynamic", tmp_path / "m.safetensors")
    ok("dynamic", tmp_path / "m.safetensors", "--allow-empty")
    assert stored(tmp_path / "m.dynamic.safetensors")["ids"].tolist() == [1, 2]

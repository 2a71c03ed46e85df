"""qtool.verify_file: the fate of every tensor, figures from the files alone, and planted faults."""

from __future__ import annotations

import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import checkpoints
import ml_dtypes
import numpy as np
import onnx
import pytest
from command import described, metadata, stored, unpacked
from jsonschema import Draft202012Validator
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import qtool
from qtool import engine
from qtool.dtypes import TARGETS
from qtool.engine import measuring
from qtool.errors import FormatError, GateError, UsageError

Array = NDArray[Any]

RNG = np.random.default_rng(31)
SCHEMA = json.loads(resources.files("qtool").joinpath("report.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
EXAMPLES = Path(__file__).parent.parent / "examples"
# What files alone do not say.
UNKNOWN = {
    "mx_rule", "importance", "weighted_mse", "weighted_relative_error", "weighted_sqnr_db",
    "rounding", "output_error", "output_error_nearest",
}  # fmt: skip


def weights() -> dict[str, Array]:
    """Tensors of all source types, with outliers, zeros and a subnormal."""
    wide = RNG.standard_normal((32, 128)).astype(np.float32)
    wide[3, 5], wide[4], wide[5, 0] = 37, 0, 1e-40
    return {
        "layer.0.weight": wide,
        "layer.1.weight": RNG.standard_normal((64, 256)).astype(ml_dtypes.bfloat16),
        "half.weight": RNG.standard_normal((16, 64)).astype(np.float16),
        "double": RNG.standard_normal((9, 50)),
        "conv": RNG.standard_normal((8, 24, 3, 3)).astype(np.float32),
        "bias": RNG.standard_normal(7).astype(np.float32),
        "ids": np.arange(12).reshape(3, 4),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "source.safetensors"
    save_file(weights(), path)
    return path


def verified(original: Path, quantized: Path, **options: Any) -> dict[str, Any]:
    """The report of two files that agree."""
    report = qtool.verify_file(original, quantized, **options)
    VALIDATOR.validate(report)
    assert report["problems"] == []
    return report


def problems(original: Path, quantized: Path, **options: Any) -> list[tuple[str | None, str]]:
    """What is wrong with two files; the error says the same."""
    with pytest.raises(GateError) as caught:
        qtool.verify_file(original, quantized, **options)
    VALIDATOR.validate(caught.value.report)
    found = [(p["tensor"], p["problem"]) for p in caught.value.report["problems"]]
    said = [str(caught.value), *caught.value.others]
    assert said == [f"{tensor or quantized}: {problem}" for tensor, problem in found]
    return found


def check_same_figures(found: dict[str, Any], said: dict[str, Any], but: set[str]) -> None:
    """The records of verify are those of quantize, to the last bit."""
    records = {record["name"]: record for record in found["tensors"]}
    assert set(records) == {record["name"] for record in said["tensors"]}
    for record in said["tensors"]:
        assert records[record["name"]].keys() == record.keys()
        for key in record.keys() - but:
            assert records[record["name"]][key] == record[key], (record["name"], key)
    if "clipped" not in but:
        differing = {k for k, v in said["totals"].items() if found["totals"][k] != v}
        assert differing <= {*but, *UNKNOWN, "second_order"}
    assert {s["name"] for s in found["skipped"]} == {s["name"] for s in said["skipped"]}
    assert {s["reason"] for s in found["skipped"]} <= {"kept"}


GRANULARITIES: dict[str, dict[str, Any]] = {
    "rows": {}, "columns": {"axis": 1}, "blocks": {"block_size": 32}, "ragged": {"block_size": 20},
    "other": {"axis": 0, "block_size": 3}, "tiles": {"tile": (5, 48)},
}  # fmt: skip


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [dtype.name for dtype in TARGETS])
def test_figures_are_those_of_the_report_for_every_type(
    dtype: str, granularity: str, source: Path, tmp_path: Path
) -> None:
    said = qtool.quantize_file(
        source, tmp_path / "q.safetensors", dtype=dtype, **GRANULARITIES[granularity]
    )
    found = verified(source, tmp_path / "q.safetensors", jobs=1 + len(dtype) % 3)
    assert found["checks"]["report"] == str(tmp_path / "q.report.json")
    check_same_figures(found, said, UNKNOWN)


OPTIONS: dict[str, dict[str, Any]] = {
    "asymmetric": {"dtype": "int8", "symmetric": False},
    "one-scale": {"dtype": "int8", "scale": 0.01},
    "narrow": {"dtype": "int8", "narrow_range": True, "method": "percentile:99"},
    "oneDNN": {"dtype": "uint8", "semantics": "onednn", "method": "percentile:90"},
    "negative": {"dtype": "int4", "block_size": 32, "negative_scale": True},
    "float16-scales": {"dtype": "int4", "block_size": 32, "scale_dtype": "float16"},
    "clipping": {"dtype": "uint8", "method": "percentile:90"},
    "optimal": {"dtype": "uint4", "block_size": 16, "method": "optimal"},
    "nvfp4": {"preset": "nvfp4"},
    "mxfp6": {"preset": "mxfp6-e3m2"},
    "fp8-block": {"preset": "fp8-block"},
    "rules": {"rules": ["layer*: dtype=int4, block_size=32", "conv: dtype=float8e5m2"]},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_figures_are_those_of_the_report_for_every_option(
    container: str, options: str, source: Path, tmp_path: Path
) -> None:
    quantized = tmp_path / f"q.{container}"
    said = qtool.quantize_file(source, quantized, **OPTIONS[options])
    check_same_figures(verified(source, quantized), said, UNKNOWN)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_figures_are_those_of_the_report_of_dynamic(
    container: str, dtype: str, source: Path, tmp_path: Path
) -> None:
    quantized = tmp_path / f"q.{container}"
    said = qtool.dynamic_file(source, quantized, dtype=dtype)
    assert said["totals"]["tensors"]
    check_same_figures(verified(source, quantized), said, UNKNOWN)
    found = verified(source, quantized, alone=True)
    check_same_figures(found, said, UNKNOWN)


LAYOUTS = [
    ("compressed-tensors", {"preset": name})
    for name in ("int8", "w8a16", "w4a16", "w4a16-asym", "fp8", "fp8-block", "nvfp4", "mxfp4")
] + [
    ("modelopt", {"preset": "nvfp4"}), ("modelopt", {"preset": "fp8"}),
    ("mlx", {"dtype": "uint4", "block_size": 64}), ("mlx", {"dtype": "int8", "block_size": 32}),
    ("mlx", {"dtype": "int2", "block_size": 32}), ("mlx", {"preset": "mxfp4"}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_figures_are_those_of_the_report_in_every_layout(
    layout: str, options: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    quantized = tmp_path / "q.safetensors"
    said = qtool.quantize_file(source, quantized, layout=layout, **options)
    assert said["totals"]["tensors"]
    check_same_figures(verified(source, quantized), said, UNKNOWN)


def test_second_order_codes_have_their_errors_and_what_the_scale_clips(tmp_path: Path) -> None:
    quantized = tmp_path / "q.safetensors"
    original = EXAMPLES / "digits.safetensors"
    inputs = f"fc1.weight={EXAMPLES / 'digits_inputs.npy'}"
    said = qtool.quantize_file(original, quantized, dtype="int4", block_size=32, activations=inputs)
    nearest = qtool.quantize_file(original, tmp_path / "n.safetensors", dtype="int4", block_size=32)
    found = verified(original, quantized)
    clipped = {"clipped", "clipped_low", "clipped_high", "clipped_fraction"}
    check_same_figures(found, said, UNKNOWN | clipped)
    for record, other in zip(found["tensors"], nearest["tensors"], strict=True):
        assert {k: record[k] for k in clipped} == {k: other[k] for k in clipped}


@pytest.mark.parametrize("options", [
    {"dtype": "int8"}, {"dtype": "uint4", "block_size": 48}, {"dtype": "float8e4m3fn", "axis": 1},
    {"preset": "nvfp4"}, {"dtype": "int4", "tile": (128, 96)}, {"preset": "mxfp4"},
], ids=str)  # fmt: skip
def test_kernels_give_the_figures_of_plain_numpy(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LOADING_PAYS", 0)
    monkeypatch.setattr(engine, "COMPILING_PAYS", 0)
    x = RNG.standard_normal((300, 1024)).astype(np.float32)
    x[7, 9], x[8, :3] = 60, 0
    original, quantized = tmp_path / "x.safetensors", tmp_path / "q.safetensors"
    save_file({"x": x, "y": x.astype(ml_dtypes.bfloat16)}, original)
    said = qtool.quantize_file(original, quantized, **options)
    fast = verified(original, quantized, jobs=2)
    check_same_figures(fast, said, UNKNOWN)
    monkeypatch.setattr(measuring, "_requantized", lambda *_: None)
    plain = verified(original, quantized, jobs=3)
    assert fast["tensors"] == plain["tensors"]
    assert fast["totals"] == plain["totals"]


def test_a_code_that_is_not_the_nearest_one_leaves_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LOADING_PAYS", 0)
    monkeypatch.setattr(engine, "COMPILING_PAYS", 0)
    x = RNG.standard_normal((80, 1024)).astype(np.float32)
    original, quantized = tmp_path / "x.npz", tmp_path / "q.npz"
    np.savez(original, x=x)
    qtool.quantize_file(original, quantized, dtype="int8")
    with np.load(quantized) as file:
        parts = dict(file)
    parts["x"][70, 1000] ^= 0x40
    np.savez(quantized, **parts)
    assert dict(problems(original, quantized))["x"].startswith("its sqnr_db is ")
    with pytest.raises(GateError) as caught:
        qtool.verify_file(original, quantized)
    (record,) = caught.value.report["tensors"]
    error = parts["x"].astype(float) * parts["x.scale"].astype(float)[:, None] - x
    assert record["max_abs_error_index"] == [70, 1000]
    assert record["mse"] == pytest.approx(np.mean(error**2), rel=1e-6)


# ---------------------------------------------------------------- figures without qtool


def restored(path: Path, name: str) -> Array:
    """What the codes in a .safetensors file stand for, computed in float64, as float32."""
    fields, parts = described(path)[name], stored(path)
    shape, axis, block = fields["shape"], fields["axis"], fields["block_size"]
    codes = parts[name]
    if fields["dtype"] in ("int4", "uint4", "float4e2m1"):
        codes = np.array(unpacked(codes, fields["dtype"], *shape))
    scale = parts[f"{name}.scale"].astype(float)
    zero: Any = 0.0
    if fields["zero_point"]:
        zero = parts[f"{name}.zero_point"]
        if zero.dtype == np.uint8 and fields["dtype"] == "uint4":
            zero = np.array(unpacked(zero, "uint4", *scale.shape))
        zero = zero.astype(float)
    if block:
        scale, zero = (
            v if np.ndim(v) == 0 else np.repeat(v, block, axis).take(range(shape[axis]), axis)
            for v in (scale, zero)
        )
    else:
        along = [1] * len(shape)
        along[axis] = -1
        scale, zero = (v if np.ndim(v) == 0 else v.reshape(along) for v in (scale, zero))
    return ((codes.astype(float) - zero) * scale).astype(np.float32)


@pytest.mark.parametrize("options", [
    {"dtype": "int8"}, {"dtype": "uint8"}, {"dtype": "int4", "block_size": 32},
    {"dtype": "uint4", "block_size": 20}, {"dtype": "float8e4m3fn", "axis": 1},
    {"dtype": "float4e2m1", "block_size": 16},
], ids=str)  # fmt: skip
def test_figures_are_those_of_numpy(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "q.safetensors"
    qtool.quantize_file(source, quantized, **options)
    original = stored(source)
    report = verified(source, quantized, alone=True)
    assert report["checks"]["report"] is None
    assert len(report["tensors"]) == 5
    for record in report["tensors"]:
        x = original[record["name"]].astype(float)
        y = restored(quantized, record["name"]).astype(float)
        e = y - x
        at = np.unravel_index(np.argmax(np.abs(e)), x.shape)
        assert record["max_abs_error"] == np.abs(e).max()
        assert record["max_abs_error_index"] == [int(i) for i in at]
        assert record["zero_count"] == (x == 0).sum()
        assert record["flushed_to_zero"] == ((y == 0) & (x != 0)).sum()
        assert (record["min"], record["max"]) == (x.min(), x.max())
        close = {
            "mse": np.mean(e * e),
            "mean_error": np.mean(e),
            "sqnr_db": 10 * math.log10((x * x).sum() / (e * e).sum()),
            "relative_error": math.sqrt((e * e).sum() / (x * x).sum()),
            "cosine_similarity": (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()),
        }
        for key, value in close.items():
            assert record[key] == pytest.approx(value, rel=1e-9), key


# ---------------------------------------------------------------- fates of tensors


@pytest.fixture
def pair(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An original and what `quantize` made of it, in blocks of int4."""
    qtool.quantize_file(source, tmp_path / "q.safetensors", dtype="int4", block_size=32)
    return source, tmp_path / "q.safetensors"


def rewritten(path: Path, change: Callable[[dict[str, Array], dict[str, str]], Any]) -> Path:
    """The file with its tensors or metadata changed."""
    tensors = {name: value.copy() for name, value in stored(path).items()}
    said = metadata(path)
    change(tensors, said)
    save_file(tensors, path, said)
    return path


def flip_code(tensors: dict[str, Array], _: Any) -> None:
    tensors["conv"][100] ^= 0x70


def nan_scale(tensors: dict[str, Array], _: Any) -> None:
    tensors["layer.0.weight.scale"][2, 3] = np.nan


def zero_scale(tensors: dict[str, Array], _: Any) -> None:
    tensors["layer.0.weight.scale"][0, 1:3] = 0


def infinite_scale(tensors: dict[str, Array], _: Any) -> None:
    tensors["layer.1.weight.scale"][63, 7] = np.inf


def drop(tensors: dict[str, Array], _: Any) -> None:
    del tensors["bias"]


def drop_scale(tensors: dict[str, Array], _: Any) -> None:
    del tensors["conv.scale"]


def rename(tensors: dict[str, Array], _: Any) -> None:
    tensors["bios"] = tensors.pop("bias")


def reshape(tensors: dict[str, Array], _: Any) -> None:
    tensors["ids"] = tensors["ids"].reshape(4, 3)


def add(tensors: dict[str, Array], _: Any) -> None:
    tensors["more"] = np.zeros(3, np.float32)


def change_bias(tensors: dict[str, Array], _: Any) -> None:
    tensors["bias"][[2, 5]] += 1


def change_type(tensors: dict[str, Array], _: Any) -> None:
    tensors["ids"] = tensors["ids"].astype(np.int32)


def negative_zero(tensors: dict[str, Array], _: Any) -> None:
    tensors["ids"] = tensors["ids"].astype(np.float32)


def other_types(tensors: dict[str, Array], said: dict[str, str]) -> None:
    fields = json.loads(said["qtool"])
    fields["tensors"]["conv"]["dtype"] = "uint4"
    said["qtool"] = json.dumps(fields)


FAULTS: dict[str, tuple[Any, str | None, str]] = {
    "a code": (flip_code, "conv", "its sqnr_db is .*, the report says .* more differ"),
    "NaN in a scale": (nan_scale, "layer.0.weight", r"its scale is nan at \[2, 3\], 1 of 128 are "),
    "zero in a scale": (zero_scale, "layer.0.weight", r"its scale is 0.0 at \[0, 1\], 2 of 128 "),
    "Inf in a scale": (infinite_scale, "layer.1.weight", r"its scale is inf at \[63, 7\], 1 of "),
    "a tensor dropped": (drop, "bias", "is missing"),
    "a scale dropped": (drop_scale, "conv", ".*tensor conv.scale: is missing"),
    "a tensor renamed": (rename, "bios", "is no tensor of ORIGINAL"),
    "another shape": (reshape, "ids", r"its shape is \[4, 3\], it was \[3, 4\]"),
    "a tensor added": (add, "more", "is no tensor of ORIGINAL"),
    "a changed bias": (change_bias, "bias", r"2 of 7 values changed .*: \[2\] was "),
    "another type": (change_type, "ids", "is int32, it was int64"),
    "a float for an integer": (negative_zero, "ids", "is float32, it was int64"),
    "another dtype": (other_types, "conv", "its dtype is uint4, the report says int4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, pair: tuple[Path, Path]) -> None:
    change, tensor, message = FAULTS[fault]
    rewritten(pair[1], change)
    found = dict(problems(*pair))
    assert tensor in found
    assert re.match(message, found[tensor]), found


@pytest.mark.parametrize("fault", [n for n, (_, t, _) in FAULTS.items() if t != "conv"])
def test_a_planted_fault_is_found_without_a_report(fault: str, pair: tuple[Path, Path]) -> None:
    change, tensor, _ = FAULTS[fault]
    rewritten(pair[1], change)
    assert tensor in dict(problems(*pair, alone=True))


def test_nan_in_scales_leaves_nothing_finite_and_nothing_clipped(pair: tuple[Path, Path]) -> None:
    rewritten(pair[1], nan_scale)
    with pytest.raises(GateError) as caught:
        qtool.verify_file(*pair, alone=True)
    report = caught.value.report
    record = next(r for r in report["tensors"] if r["name"] == "layer.0.weight")
    nulls = ("sqnr_db", "mse", "clipped", "clipped_fraction", "scale_min", "scale_max")
    assert [record[key] for key in nulls] == [None] * 6
    assert [p["tensor"] for p in report["problems"]] == ["layer.0.weight"]


def test_another_files_report_is_found_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    qtool.quantize_file(pair[0], other, dtype="int8")
    found = problems(*pair, against=tmp_path / "other.report.json")
    assert (None, f"QUANTIZED has {pair[1].stat().st_size} bytes, the report says "
            f"{other.stat().st_size}") in found  # fmt: skip
    assert ("conv", "its dtype is int4, the report says int8") in [
        (tensor, said.split(" (")[0]) for tensor, said in found
    ]


def test_a_report_of_another_original_is_found_out(pair: tuple[Path, Path]) -> None:
    path = pair[1].with_suffix("").with_suffix(".report.json")
    report = json.loads(path.read_text())
    report["tensors"] = report["tensors"][1:]
    report["tensors"][0]["scale_max"] *= 1 + 2**-52
    report["tensors"].append({**report["tensors"][0], "name": "bias"})
    path.write_text(json.dumps(report))
    found = dict(problems(*pair))
    assert set(found) == {"layer.0.weight", "bias", "conv", "double", "half.weight"} & set(found)
    assert "is quantized, the report says nothing of that" in found.values()
    assert found["bias"] == "is not quantized, the report says that it is"
    assert any(said.startswith("its scale_max is") for said in found.values())
    assert len(found) == 3


def test_floats_of_another_type_are_measured(tmp_path: Path) -> None:
    x = np.array([[1, 1.0001, 3], [1e-9, -2.5, 70000]], np.float32)
    save_file({"x": x}, tmp_path / "a.safetensors")
    half = x.astype(ml_dtypes.bfloat16)
    save_file({"x": half}, tmp_path / "b.safetensors")
    (record,) = verified(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["tensors"]
    error = half.astype(float) - x.astype(float)
    assert (record["dtype"], record["granularity"], record["clipped"]) == ("bfloat16", None, 0)
    assert record["max_abs_error"] == np.abs(error).max()
    assert (record["bytes_before"], record["bytes_after"]) == (24, 12)
    with np.errstate(over="ignore"):
        save_file({"x": x.astype(np.float16)}, tmp_path / "c.safetensors")
    assert problems(tmp_path / "a.safetensors", tmp_path / "c.safetensors") == [
        ("x", "1 of 6 values are not finite any more, first at [1, 2]")
    ]


def test_what_was_not_finite_before_is_no_fault(tmp_path: Path) -> None:
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    x[1, 2], x[3, 4] = np.nan, np.inf
    save_file({"x": x}, tmp_path / "a.safetensors")
    said = qtool.quantize_file(
        tmp_path / "a.safetensors", tmp_path / "q.safetensors", dtype="float8e5m2",
        nonfinite="allow", saturate=False,
    )  # fmt: skip
    report = verified(tmp_path / "a.safetensors", tmp_path / "q.safetensors")
    check_same_figures(report, said, UNKNOWN)
    assert (report["tensors"][0]["nan_count"], report["tensors"][0]["inf_count"]) == (1, 1)
    assert report["warnings"] == said["warnings"]


def test_the_bits_of_nan_and_of_zero_count(tmp_path: Path) -> None:
    x = np.array([0.0, np.nan, 1.0], np.float32)
    np.savez(tmp_path / "a.npz", x=x)
    shutil.copy(tmp_path / "a.npz", tmp_path / "b.npz")
    found = problems(tmp_path / "a.npz", tmp_path / "b.npz")
    assert found == [("x", "holds NaN")]
    np.savez(tmp_path / "b.npz", x=-x)
    ((_, said),) = problems(tmp_path / "a.npz", tmp_path / "b.npz")
    assert said == "3 of 3 values changed though it is not quantized: [0] was 0.0, it is -0.0"


def test_containers_may_differ(tmp_path: Path) -> None:
    tensors = {k: v for k, v in weights().items() if v.dtype != ml_dtypes.bfloat16}
    np.savez(tmp_path / "a.npz", **tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    said = qtool.quantize_file(tmp_path / "a.npz", tmp_path / "q.safetensors", dtype="int8")
    for original in ("a.npz", "a.safetensors"):
        check_same_figures(
            verified(tmp_path / original, tmp_path / "q.safetensors"), said,
            UNKNOWN | {"file_bytes_before"},
        )  # fmt: skip


def test_an_array_goes_by_the_name_of_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", RNG.standard_normal((6, 40)).astype(np.float32))
    said = qtool.quantize_file(tmp_path / "x.npy", tmp_path / "q.safetensors", dtype="int8")
    shutil.copy(tmp_path / "x.npy", tmp_path / "renamed.npy")
    verified(tmp_path / "x.npy", tmp_path / "q.safetensors")
    found = verified(tmp_path / "renamed.npy", tmp_path / "q.safetensors", alone=True)
    assert [found["tensors"][0]["name"], found["tensors"][0]["mse"]] == [
        "renamed", said["tensors"][0]["mse"],
    ]  # fmt: skip
    qtool.quantize_file(tmp_path / "x.npy", tmp_path / "codes.npy", dtype="int8")
    with pytest.raises(FormatError, match=r"holds int8 codes alone.*\.safetensors or \.npz"):
        qtool.verify_file(tmp_path / "x.npy", tmp_path / "codes.npy")


def test_other_tools_layouts_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": np.zeros((8, 64), np.float32)}, tmp_path / "a.safetensors")
    parts = {
        "a.qweight": np.zeros((8, 8), np.int32), "a.qzeros": np.zeros((1, 1), np.int32),
        "a.scales": np.ones((1, 8), np.float16), "a.g_idx": np.zeros(64, np.int32),
    }  # fmt: skip
    save_file(parts, tmp_path / "q.safetensors")
    with pytest.raises(FormatError, match=r"layout of GPTQ.*does not dequantize"):
        qtool.verify_file(tmp_path / "a.safetensors", tmp_path / "q.safetensors")


def test_a_requantized_file_is_measured_against_what_its_codes_stood_for(
    source: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    qtool.quantize_file(source, first, dtype="int8")
    said = qtool.quantize_file(first, second, dtype="int4", block_size=32, requantize=True)
    check_same_figures(verified(first, second), said, UNKNOWN | {"source_dtype", "bytes_before"})


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("options", [
    {"dtype": "int4", "block_size": 32}, {"preset": "w4a16", "layout": "compressed-tensors"},
    {"preset": "nvfp4", "layout": "compressed-tensors"},
], ids=str)  # fmt: skip
def test_folders_of_shards(options: dict[str, Any], tmp_path: Path) -> None:
    layers = [checkpoints.tensors([n], rows=32, columns=128) for n in range(3)]
    folder = checkpoints.save(tmp_path / "model", layers)
    said = qtool.quantize_file(folder, tmp_path / "q", **options)
    found = verified(folder, tmp_path / "q")
    assert found["checks"]["report"] == str(tmp_path / "q.report.json")
    check_same_figures(found, said, UNKNOWN)
    shard = sorted((tmp_path / "q").glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x40
    shard.write_bytes(data)
    assert problems(folder, tmp_path / "q")


# ---------------------------------------------------------------- ONNX


def network(path: Path, *, transposed: bool = True) -> Path:
    """Gemm (with its weight square, and transposed or not), MatMul, Conv and Gather."""
    tensors = {
        "square": RNG.standard_normal((64, 64)), "wide": RNG.standard_normal((64, 40)),
        "table": RNG.standard_normal((50, 64)), "bias": RNG.standard_normal(64),
    }  # fmt: skip
    initializers = [
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Gemm", ["x", "square", "bias"], ["h"], transB=int(transposed)),
        helper.make_node("MatMul", ["h", "wide"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 40])], initializers,
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(made, path)
    return path


FORMS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"}, "blocks": {"dtype": "uint4", "block_size": 16},
    "float8": {"dtype": "float8e4m3fn"}, "nvfp4": {"preset": "nvfp4"}, "mxfp4": {"preset": "mxfp4"},
    "nbits": {"dtype": "int4", "block_size": 32, "layout": "matmul-nbits"},
    "nbits-asymmetric":
        {"dtype": "int8", "symmetric": False, "block_size": 32, "layout": "matmul-nbits"},
    "nbits-unsigned":
        {"dtype": "uint4", "symmetric": True, "block_size": 64, "layout": "matmul-nbits"},
    "nbits-zero-points": {"dtype": "uint2", "block_size": 16, "layout": "matmul-nbits"},
    "nbits-gaps": {"dtype": "uint8", "block_size": 128, "layout": "matmul-nbits"},
}  # fmt: skip
LOOSE = {"nbits-unsigned", "nbits-asymmetric"}  # the codes are stored with another number added


@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
@pytest.mark.parametrize("form", FORMS)
def test_figures_of_onnx_weights(form: str, transposed: bool, tmp_path: Path) -> None:
    original = network(tmp_path / "a.onnx", transposed=transposed)
    said = qtool.quantize_file(original, tmp_path / "q.onnx", **FORMS[form])
    assert said["totals"]["tensors"] == 3
    but = UNKNOWN | ({"dtype", "zero_point"} if form in LOOSE else set())
    check_same_figures(verified(original, tmp_path / "q.onnx"), said, but)


@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
@pytest.mark.parametrize("options", [{}, {"dtype": "uint8"}, {"per_tensor": True}], ids=str)
def test_figures_of_integer_products(
    options: dict[str, Any], transposed: bool, tmp_path: Path
) -> None:
    original = network(tmp_path / "a.onnx", transposed=transposed)
    said = qtool.dynamic_file(original, tmp_path / "q.onnx", graph=True, **options)
    assert said["totals"]["tensors"] == 2
    check_same_figures(verified(original, tmp_path / "q.onnx"), said, UNKNOWN)


def edited(path: Path, change: Callable[[dict[str, TensorProto]], Any]) -> None:
    """The model with an initializer changed."""
    model = onnx.load(path)
    change({tensor.name: tensor for tensor in model.graph.initializer})
    onnx.save(model, path)


def test_faults_in_onnx_models(tmp_path: Path) -> None:
    original = network(tmp_path / "a.onnx")
    quantized = tmp_path / "q.onnx"
    qtool.quantize_file(original, quantized, dtype="int8")

    (node,) = (n for n in onnx.load(quantized).graph.node if n.output[0] == "wide")

    def spoil(tensors: dict[str, TensorProto]) -> None:
        name = node.input[1]
        scale = numpy_helper.to_array(tensors[name]).copy()
        scale[7] = np.nan
        tensors[name].CopyFrom(numpy_helper.from_array(scale, name))
        bias = numpy_helper.to_array(tensors["bias"]) + np.float32(1)
        tensors["bias"].CopyFrom(numpy_helper.from_array(bias, "bias"))

    edited(quantized, spoil)
    found = dict(problems(original, quantized, alone=True))
    assert found["bias"].startswith("64 of 64 values changed though it is not quantized: [0] was ")
    with pytest.raises(GateError) as caught:
        qtool.verify_file(original, quantized, alone=True)
    texts = {p["problem"] for p in caught.value.report["problems"] if p["tensor"] == "wide"}
    assert texts == {"its scale is nan at [7], 1 of 40 are zero or not finite"}
    model = onnx.load(original)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), "f4"), "more"))
    onnx.save(model, tmp_path / "more.onnx")
    assert problems(original, tmp_path / "more.onnx") == [("more", "is no tensor of ORIGINAL")]
    assert problems(tmp_path / "more.onnx", original) == [("more", "is missing")]


# ---------------------------------------------------------------- provenance


def changed_metadata(path: Path, **said: Any) -> None:
    """The file with other entries in qtool's metadata; None: without the entry."""

    def change(_: Any, entries: dict[str, str]) -> None:
        document = json.loads(entries["qtool"]) | said
        entries["qtool"] = json.dumps({k: v for k, v in document.items() if v is not None})

    rewritten(path, change)


def test_the_report_has_what_the_metadata_says(pair: tuple[Path, Path]) -> None:
    made = verified(*pair)["checks"]["provenance"]
    assert made["tool"] == {"name": "qtool", "version": qtool.__version__}
    assert made["recipe"] == 'dtype = "int4"\nblock_size = 32\n'


@pytest.mark.parametrize(("said", "message"), [
    ({"recipe": 'dtype = "int4"\n'}, "its metadata says 'dtype = \"int4\"\\n' of the recipe, the "),
    ({"tool": {"name": "qtool", "version": "9"}}, "its metadata says '9' of the version, "),
    ({"tool": {"name": "other", "version": qtool.__version__}}, "its metadata says 'other' of "),
    ({"tool": None, "recipe": None}, "its metadata does not say what it was made by, the report d"),
    ({"recipe": "dtype = "}, "its recipe cannot be read: "),
], ids=["recipe", "version", "tool", "nothing", "damaged"])  # fmt: skip
def test_changed_metadata_is_found(
    said: dict[str, Any], message: str, pair: tuple[Path, Path]
) -> None:
    changed_metadata(pair[1], **said)
    found = problems(*pair)
    assert any(tensor is None and text.startswith(message) for tensor, text in found), found
    unread = "cannot be read" in message
    if not unread:
        verified(*pair, alone=True)


def test_hashes_of_files_are_checked(source: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "q.safetensors"
    original = Path(shutil.copy(source, tmp_path / "a.safetensors"))
    qtool.quantize_file(original, quantized, dtype="int8", hash=True)
    verified(original, quantized)
    spare = metadata(original) | {"note": "1"}
    save_file(stored(original), original, spare)
    found = [text for _, text in problems(original, quantized)]
    assert f"{original} has another SHA-256 than in the report" in found
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    for path in (source, quantized, tmp_path / "q.report.json"):
        shutil.copy(path, elsewhere)
    verified(elsewhere / "source.safetensors", elsewhere / "q.safetensors")


def test_hashes_of_folders_are_checked(tmp_path: Path) -> None:
    layers = [checkpoints.tensors([n], rows=32, columns=128) for n in range(2)]
    folder = checkpoints.save(tmp_path / "model", layers)
    quantized = tmp_path / "q"
    qtool.quantize_file(folder, quantized, dtype="int8", hash=True)
    verified(folder, quantized)
    (quantized / "LICENSE").write_text("all rights reserved")
    (folder / "tokenizer.json").unlink()
    (quantized / "more.txt").write_text("more")
    assert problems(folder, quantized) == [
        (None, f"{folder}: tokenizer.json is missing"),
        (None, f"{quantized / 'more.txt'} is not among the files of the report"),
        (None, f"{quantized / 'LICENSE'} has another SHA-256 than in the report"),
    ]


def test_hashes_of_external_data_are_checked(tmp_path: Path) -> None:
    original, quantized = network(tmp_path / "a.onnx"), tmp_path / "q.onnx"
    qtool.quantize_file(original, quantized, dtype="int8", external_data=True, hash=True)
    report = verified(original, quantized)
    data = tmp_path / report["output"]["external_data"]
    content = bytearray(data.read_bytes())
    content[8] ^= 1
    data.write_bytes(content)
    found = problems(original, quantized)
    assert (None, f"{data} has another SHA-256 than in the report") in found


# ---------------------------------------------------------------- outputs


def test_outputs_are_compared(tmp_path: Path) -> None:
    import onnxruntime

    original, quantized = network(tmp_path / "a.onnx"), tmp_path / "q.onnx"
    qtool.quantize_file(original, quantized, dtype="int4", block_size=16)
    ids = RNG.integers(0, 50, (12, 1))
    np.savez(tmp_path / "samples.npz", ids=ids)
    report = verified(original, quantized, run=tmp_path / "samples.npz")
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [onnxruntime.InferenceSession(str(p), plain) for p in (original, quantized)]
    a, b = (
        np.concatenate([session.run(None, {"ids": row})[0] for row in ids]).astype(float)
        for session in sessions
    )
    (found,) = report["outputs"]
    assert (found["name"], found["runs"], found["elements"]) == ("y", 12, 480)
    error = np.linalg.norm(b - a) / np.linalg.norm(a)
    assert found["relative_error"] == pytest.approx(error, rel=1e-5)
    assert found["max_abs_error"] == pytest.approx(np.abs(b - a).max(), rel=1e-5)
    cosine = (a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))
    assert found["cosine_similarity"] == pytest.approx(cosine, rel=1e-6)
    assert found["argmax_agreement"] == np.mean(a.argmax(1) == b.argmax(1))
    for key in ("relative_error", "max_abs_error", "cosine_similarity", "argmax_agreement"):
        assert report["totals"][f"outputs_{key}"] == found[key]


def test_random_inputs_are_the_same_every_time(tmp_path: Path) -> None:
    original, quantized = network(tmp_path / "a.onnx"), tmp_path / "q.onnx"
    qtool.quantize_file(original, quantized, dtype="int8")
    first, second = (verified(original, quantized, random=3) for _ in range(2))
    assert first["outputs"] == second["outputs"]
    assert first["outputs"][0]["runs"] == 3
    assert first["warnings"] == ["random inputs have size 1 where the model leaves it open: ids"]


def test_outputs_that_are_not_finite_any_more_are_a_problem(tmp_path: Path) -> None:
    original, quantized = network(tmp_path / "a.onnx"), tmp_path / "q.onnx"
    model = onnx.load(original)
    for tensor in model.graph.initializer:
        if tensor.name == "bias":
            values = np.full(64, np.inf, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, "bias"))
    onnx.save(model, quantized)
    found = problems(original, quantized, random=2)
    assert (None, "output y: 40 of 40 values are not finite any more, first at [0, 0] of run 1"
            ) in found  # fmt: skip


def test_outputs_that_are_all_missing_are_a_problem(tmp_path: Path) -> None:
    original, quantized = network(tmp_path / "a.onnx"), tmp_path / "q.onnx"
    model = onnx.load(original)
    for node in model.graph.node:
        node.output[:] = ["z" if name == "y" else name for name in node.output]
    model.graph.output[0].name = "z"
    onnx.save(model, quantized)
    assert (None, "output y is missing") in problems(original, quantized, random=2)


@pytest.mark.parametrize(("options", "message"), [
    ({"run": "x.npz", "random": 3}, "--run: replaces --random"),
    ({"random": 0}, "--random: 0 is not positive"),
    ({"random": 1}, "--random: .*source.safetensors is no model"),
    ({"alone": True, "against": "r.json"}, "--against: contradicts --alone"),
    ({"baseline": "r.json"}, "--baseline: nothing is compared"),
    ({"against": "-"}, "--against: - is no file"),
], ids=str)  # fmt: skip
def test_contradictions_are_refused(
    options: dict[str, Any], message: str, pair: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match=message):
        qtool.verify_file(*pair, **options)


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read"), ("no report", "is no JSON object"), ("{}", "is no report of qtool's"),
    ('{"tool": {"name": "qtool"}}', "is no report of qtool's"),
])  # fmt: skip
def test_a_named_report_must_be_one(
    content: str | None, message: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "named.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FormatError, match=rf"named\.json: {message}.*or give --alone"):
        qtool.verify_file(*pair, against=path)


@pytest.mark.parametrize(("place", "value"), [
    ("report_version", 2), ("command", None), ("tensors", None), ("totals", None), ("source", None),
    ("output", {}), ("recipe", 7), ("tool", {"name": "qtool"}),
    ("output", {"name": "x", "container": "safetensors", "bytes": 1, "files": 1}),
    ("output", {"name": "x", "container": "safetensors", "bytes": 1, "files": [{"name": "x"}]}),
    ("tensors", [{}]), ("tensors", [{"name": "x"}, {"name": "x"}]),
    ("tensors", [{"name": "x", "mse": "0"}]), ("dry_run", True),
])  # fmt: skip
def test_a_damaged_report_is_refused(place: str, value: Any, pair: tuple[Path, Path]) -> None:
    path = pair[1].with_suffix("").with_suffix(".report.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {place: value}))
    with pytest.raises(FormatError, match="or give --alone"):
        qtool.verify_file(*pair)


def test_a_plan_agrees_with_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    qtool.quantize_file(pair[0], tmp_path / "x.safetensors", dtype="int4", block_size=32,
                        dry_run=True, report=path)  # fmt: skip
    with pytest.raises(FormatError, match=r"plan\.json: is a plan, which has no figures"):
        qtool.verify_file(*pair, against=path)


@pytest.mark.parametrize("figure", ["dtype", "sqnr_db", "clipped", "scale_min", "bits_per_weight"])
def test_a_figure_that_the_report_lacks_differs(figure: str, pair: tuple[Path, Path]) -> None:
    path = pair[1].with_suffix("").with_suffix(".report.json")
    report = json.loads(path.read_text())
    del report["tensors"][0][figure]
    path.write_text(json.dumps(report))
    ((tensor, problem),) = problems(*pair)
    assert tensor == report["tensors"][0]["name"]
    assert problem.startswith(f"its {figure} is ")
    assert problem.endswith(", the report says null")


@pytest.mark.parametrize("figure", ["tensors", "sqnr_db", "clipped", "bytes_after"])
def test_totals_are_compared(figure: str, pair: tuple[Path, Path]) -> None:
    path = pair[1].with_suffix("").with_suffix(".report.json")
    report = json.loads(path.read_text())
    before = report["totals"][figure]
    report["totals"][figure] = 12345
    path.write_text(json.dumps(report))
    said = f"its total {figure} is {before}, the report says 12345"
    assert problems(*pair) == [(None, said)]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Neither file is held: figures need far less than one tensor."""
    x = np.zeros((1 << 11, 1 << 12), np.float32)  # 32 MiB
    x[::7, ::3] = 1.5
    save_file({"x": x}, tmp_path / "a.safetensors")
    del x
    original, quantized = tmp_path / "a.safetensors", tmp_path / "q.safetensors"
    qtool.quantize_file(original, quantized, dtype="int8")
    qtool.verify_file(original, quantized, jobs=1)
    tracemalloc.start()
    try:
        qtool.verify_file(original, quantized, jobs=1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()

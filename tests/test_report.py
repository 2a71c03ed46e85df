"""Every figure of the report, recomputed from the written files; its JSON and its schema."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import onnx
import oracle
import pytest
import safetensors
from jsonschema import Draft202012Validator
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import qtool
from qtool.dtypes import DTYPES, TARGETS
from qtool.report import build, is_report, tensor_record, to_json
from qtool.spec import PerTensor, QuantSpec, TensorInfo

Array = NDArray[Any]

SCHEMA = json.loads(resources.files("qtool").joinpath("report.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
BITS = {dtype.name: dtype.bits for dtype in TARGETS}


# ---------------------------------------------------------------- reading what was written


@dataclass(frozen=True)
class Written:
    """A quantized tensor as a file holds it: bytes of codes, scales and zero points."""

    codes: bytes
    scale: list[float]
    zero_point: bytes | None
    nbytes: int


def code_values(data: bytes, target: str, count: int) -> list[float]:
    """What packed codes stand for, one by one, the first in the lowest bits."""
    bits, stream = BITS[target], int.from_bytes(data, "little")
    codes = [stream >> (bits * i) & (1 << bits) - 1 for i in range(count)]
    if target not in oracle.INTEGERS:
        return [oracle.decode(code, target) for code in codes]
    signed = oracle.INTEGERS[target][0] < 0
    return [float(c - (1 << bits) if signed and c >> (bits - 1) else c) for c in codes]


def scale_values(data: bytes, dtype: str) -> list[float]:
    if dtype == "float32":
        return np.frombuffer(data, "<f4").astype(float).tolist()
    if dtype == "float16":
        return np.frombuffer(data, "<f2").astype(float).tolist()
    if dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(float).tolist()
    if dtype == "float8e8m0":
        return [math.ldexp(1.0, byte - 127) for byte in data]
    return [oracle.decode(byte, dtype) for byte in data]


def written(path: Path, name: str, record: dict[str, Any]) -> Written:
    """The parts of a tensor, read without qtool."""
    if path.suffix == ".safetensors":
        found = dict(safetensors.deserialize(path.read_bytes()))
        parts = {k: bytes(v["data"]) for k, v in found.items()}
    elif path.suffix == ".npz":
        with np.load(path) as file:
            parts = {k: file[k].tobytes() for k in file.files}
    else:
        parts = onnx_parts(path, name)
    scale, zero, over = (f"{name}.{part}" for part in ("scale", "zero_point", "global_scale"))
    nbytes = sum(len(parts[key]) for key in (name, scale, zero, over) if key in parts)
    scales = scale_values(parts[scale], record["scale_dtype"])
    assert (over in parts) == (record["global_scale"] is not None)
    if over in parts:
        (factor,) = scale_values(parts[over], "float32")
        assert factor == record["global_scale"]
        scales = [float(np.float32(value) * np.float32(factor)) for value in scales]
    return Written(parts[name], scales, parts.get(zero), nbytes)


def onnx_parts(path: Path, name: str) -> dict[str, bytes]:
    model = onnx.load(path)
    (node,) = (n for n in model.graph.node if n.output[0] == name)
    stored = {tensor.name: tensor.raw_data for tensor in model.graph.initializer}
    names = [name, f"{name}.scale", f"{name}.zero_point"]
    return {part: stored[key] for part, key in zip(names, node.input, strict=False)}


# ---------------------------------------------------------------- figures once more


def recomputed(x: Array, record: dict[str, Any], kept: Written, lowest: float) -> dict[str, Any]:
    """The figures of a tensor by plain loops over its elements. lowest: the lowest code."""
    target, shape = record["dtype"], x.shape
    codes = code_values(kept.codes, target, x.size)
    groups, spread = groups_of(shape, record)
    zeros = [0.0] * groups
    if kept.zero_point is not None:
        zeros = code_values(kept.zero_point, target, groups)
    counts = dict.fromkeys(("nan_count", "inf_count", "zero_count", "clipped_low", "clipped_high",
                            "flushed_to_zero"), 0)  # fmt: skip
    pairs: list[tuple[float, float, int]] = []
    for i, value in enumerate(float(v) for v in x.reshape(-1)):
        group = spread[i]
        single = float(np.float32(value)) if abs(value) < 1e38 else value
        v = unbounded(single, kept.scale[group], zeros[group], target)
        counts["clipped_low"] += v < lowest
        counts["clipped_high"] += v > highest(target)
        if not math.isfinite(value):
            counts["nan_count" if math.isnan(value) else "inf_count"] += 1
            continue
        difference = np.float32(codes[i] - zeros[group])
        x_hat = float(difference * np.float32(kept.scale[group]))
        counts["zero_count"] += value == 0
        counts["flushed_to_zero"] += value != 0 and x_hat == 0
        pairs.append((value, x_hat, i))
    return counts | {"elements": x.size} | errors(pairs, shape)


def errors(pairs: list[tuple[float, float, int]], shape: tuple[int, ...]) -> dict[str, Any]:
    """Extremes and errors of finite (x, x_hat, index)."""
    n = len(pairs)
    xx, ee, e, xy, yy = (
        math.fsum(f(x, y) for x, y, _ in pairs)
        for f in (lambda x, y: x * x, lambda x, y: (y - x) ** 2, lambda x, y: y - x,
                  lambda x, y: x * y, lambda x, y: y * y)
    )  # fmt: skip
    largest, at = max(((abs(y - x), -i) for x, y, i in pairs), default=(0.0, 0))
    return {
        "min": min((x for x, _, _ in pairs), default=None),
        "max": max((x for x, _, _ in pairs), default=None),
        "absmax": max((abs(x) for x, _, _ in pairs), default=None),
        "mse": ee / n, "rmse": math.sqrt(ee / n), "mean_error": e / n,
        "max_abs_error": largest,
        "max_abs_error_index": [int(k) for k in np.unravel_index(-at, shape)],
        "sqnr_db": 10 * math.log10(xx / ee) if xx and ee else None,
        "cosine_similarity": xy / math.sqrt(xx) / math.sqrt(yy) if xx and yy else None,
        "relative_error": math.sqrt(ee / xx) if xx else None,
    }  # fmt: skip


def groups_of(shape: tuple[int, ...], record: dict[str, Any]) -> tuple[int, list[int]]:
    """How many scales there are, and the number of each element's."""
    if record["granularity"] == "per_tensor":
        return 1, [0] * math.prod(shape)
    if record["granularity"] == "tiled":
        rows, columns = record["tile"]
        tiles = [*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)]
        places = [(*others, r // rows, c // columns) for *others, r, c in np.ndindex(shape)]
        return math.prod(tiles), [int(np.ravel_multi_index(place, tiles)) for place in places]
    axis, size = record["axis"], record["block_size"] or 0
    if size == 0:
        return shape[axis], [index[axis] for index in np.ndindex(shape)]
    blocks = [n if k != axis else -(-n // size) for k, n in enumerate(shape)]
    return math.prod(blocks), [
        int(np.ravel_multi_index(oracle.scale_index(index, shape, axis, size, False), blocks))
        for index in np.ndindex(shape)
    ]


def unbounded(x: float, scale: float, zero: float, target: str) -> float:
    """The rounded value before saturation, the quotient in float32."""
    quotient = oracle.divide(x, scale, oracle.FORMATS["float32"])
    if not math.isfinite(quotient):
        return quotient
    if target in oracle.INTEGERS:
        return float(round(Fraction(quotient)) + zero)
    return float(oracle.nearest(Fraction(quotient), oracle.FORMATS[target]))


def highest(target: str) -> float:
    if target in oracle.INTEGERS:
        return oracle.INTEGERS[target][1]
    return float(oracle.FORMATS[target].largest)


def lowest_code(target: str) -> float:
    return oracle.INTEGERS[target][0] if target in oracle.INTEGERS else -highest(target)


EXACT = (
    "elements", "nan_count", "inf_count", "zero_count", "clipped_low", "clipped_high",
    "flushed_to_zero", "min", "max", "absmax", "max_abs_error", "max_abs_error_index",
)  # fmt: skip


def check_record(
    record: dict[str, Any], x: Array, kept: Written, lowest: float | None = None
) -> None:
    """Compare one entry of "tensors" with its recomputation."""
    low = lowest_code(record["dtype"]) if lowest is None else lowest
    check_figures(record, recomputed(x, record, kept, low))
    assert record["shape"] == list(x.shape)
    assert record["num_scales"] == len(kept.scale) == groups_of(x.shape, record)[0]
    assert (record["scale_min"], record["scale_max"]) == (min(kept.scale), max(kept.scale))
    assert record["zero_point"] == (kept.zero_point is not None)
    assert (record["bytes_before"], record["bytes_after"]) == (x.nbytes, kept.nbytes)
    assert record["bits_per_weight_before"] == 8 * x.nbytes / x.size
    assert record["bits_per_weight"] == 8 * kept.nbytes / x.size


def check_figures(figures: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Counts and extremes exactly, sums to 1e-9."""
    for name, value in wanted.items():
        if name in EXACT:
            assert figures[name] == value, name
        else:
            assert figures[name] == pytest.approx(value, rel=1e-9, abs=0), name
    assert figures["clipped"] == wanted["clipped_low"] + wanted["clipped_high"]
    assert figures["clipped_fraction"] == figures["clipped"] / wanted["elements"]


# ---------------------------------------------------------------- files of every container


def example(dtype: Any = np.float32, seed: int = 8, shape: tuple[int, ...] = (6, 35)) -> Array:
    """Values of several magnitudes, some of them zero, one row all zero."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * 10.0 ** random.uniform(-3, 1, shape)
    x[random.random(shape) < 0.1] = 0
    x[2] = 0
    return np.asarray(x).astype(dtype)


def save_onnx(path: Path, weights: dict[str, Array]) -> None:
    """One MatMul after the other."""
    nodes, last = [], "x"
    for name in weights:
        nodes.append(helper.make_node("MatMul", [last, name], [f"{name}_out"]))
        last = f"{name}_out"
    (rows, _), (_, columns) = (list(weights.values())[k].shape for k in (0, -1))
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])]
        for name, size in (("x", rows), (last, columns))
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    onnx.save_model(model, path)


SAVERS: dict[str, Callable[[Path, dict[str, Array]], None]] = {
    "safetensors": lambda path, weights: save_file(weights, path),
    "npz": lambda path, weights: np.savez(path, **weights),
    "onnx": save_onnx,
}
WEIGHTS = {"a": example(seed=8), "b": example(seed=9, shape=(35, 4))}


def strict(text: str) -> Any:
    def refuse(token: str) -> NoReturn:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


def quantized(tmp_path: Path, container: str, weights: dict[str, Array], **options: Any) -> Any:
    """(report as read from its file, the output's path)."""
    src, dst = tmp_path / f"w.{container}", tmp_path / f"q.{container}"
    SAVERS[container](src, weights)
    returned = qtool.quantize_file(src, dst, **options)
    report = strict((tmp_path / "q.report.json").read_text(encoding="utf-8"))
    assert report == returned
    VALIDATOR.validate(report)
    return report, dst


@pytest.mark.parametrize("container", list(SAVERS))
@pytest.mark.parametrize("options", [
    {"dtype": "int8"}, {"dtype": "int4", "block_size": 16}, {"dtype": "uint4", "block_size": 8},
    {"dtype": "uint8", "axis": 1}, {"dtype": "float8e4m3fn"}, {"dtype": "int8", "symmetric": False},
    {"dtype": "float4e2m1", "block_size": 32}, {"dtype": "int8", "method": "percentile:90"},
    {"dtype": "uint2", "scale_dtype": "float16"},
    {"dtype": "int4", "scale_dtype": "float8e8m0", "block_size": 32},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_figures_equal_those_of_the_written_file(
    tmp_path: Path, container: str, options: dict[str, Any]
) -> None:
    report, dst = quantized(tmp_path, container, WEIGHTS, **options)
    assert [record["name"] for record in report["tensors"]] == ["a", "b"]
    for record in report["tensors"]:
        x = WEIGHTS[record["name"]]
        check_record(record, x, written(dst, record["name"], record))
        assert record["dtype"] == options["dtype"]
        assert (record["source_dtype"], record["rounded_to"]) == ("float32", None)
        assert record["precision"] == "float32"
    check_totals(report, WEIGHTS, dst)


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize("options", [
    {"dtype": "int8", "tile": (4, 16)}, {"dtype": "uint4", "tile": (5, 3)},
    {"dtype": "float8e4m3fn", "tile": (128, 128), "scale_dtype": "float16"},
    {"dtype": "int4", "tile": (2, 8), "method": "percentile:95"},
    {"preset": "nvfp4"}, {"preset": "mxfp4"}, {"preset": "mxfp6-e2m3"},
    {"dtype": "int4", "tile": (3, 8), "scale_dtype": "float8e4m3fn", "global_scale": True},
    {"dtype": "float4e2m1", "block_size": 8, "scale_dtype": "float8e8m0", "mx_rule": "floor"},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_figures_of_tiles_and_of_scales_in_two_levels_equal_those_of_the_file(
    tmp_path: Path, container: str, options: dict[str, Any]
) -> None:
    report, dst = quantized(tmp_path, container, WEIGHTS, **options)
    for record in report["tensors"]:
        check_record(record, WEIGHTS[record["name"]], written(dst, record["name"], record))
        assert record["mx_rule"] == options.get("mx_rule", record["mx_rule"])
        assert record["tile"] == (list(options["tile"]) if "tile" in options else None)
    check_totals(report, {r["name"]: WEIGHTS[r["name"]] for r in report["tensors"]}, dst)


def test_an_onnx_model_may_use_the_names_of_the_native_layout(tmp_path: Path) -> None:
    weights = {"w": example(), "w.scale": example(shape=(35, 4))}
    report, dst = quantized(tmp_path, "onnx", weights, dtype="int8")
    for record in report["tensors"]:
        check_record(record, weights[record["name"]], written(dst, record["name"], record))


def check_totals(report: dict[str, Any], weights: dict[str, Array], dst: Path) -> None:
    """The totals from the files, as one long tensor."""
    pairs: list[tuple[float, float, int]] = []
    counts: dict[str, int] = {}
    sizes = [0, 0]
    largest = (-1.0, "")
    for record in report["tensors"]:
        x, name = weights[record["name"]], record["name"]
        kept = written(dst, name, record)
        again = recomputed(x, record, kept, lowest_code(record["dtype"]))
        for key in ("elements", "zero_count", "clipped_low", "clipped_high", "flushed_to_zero",
                    "nan_count", "inf_count"):  # fmt: skip
            counts[key] = counts.get(key, 0) + again[key]
        sizes = [sizes[0] + x.nbytes, sizes[1] + kept.nbytes]
        if again["max_abs_error"] > largest[0]:
            largest = (again["max_abs_error"], name)
        codes = code_values(kept.codes, record["dtype"], x.size)
        number, spread = groups_of(x.shape, record)
        zeros = [0.0] * number
        if kept.zero_point is not None:
            zeros = code_values(kept.zero_point, record["dtype"], number)
        pairs += [
            (float(v), float(np.float32(c - zeros[g]) * np.float32(kept.scale[g])), len(pairs) + k)
            for k, (v, c, g) in enumerate(zip(x.reshape(-1), codes, spread, strict=True))
        ]
    totals = report["totals"]
    wanted = errors(pairs, (len(pairs),))
    del wanted["max_abs_error_index"]
    check_figures(totals, counts | wanted)
    assert totals["max_abs_error_tensor"] == largest[1]
    assert (totals["tensors"], totals["skipped"]) == (len(report["tensors"]), 0)
    assert [totals["bytes_before"], totals["bytes_after"]] == sizes
    assert totals["bits_per_weight"] == 8 * sizes[1] / len(pairs)
    assert totals["file_bytes_after"] == dst.stat().st_size == report["output"]["bytes"]
    assert totals["file_bytes_before"] == report["source"]["bytes"]


@pytest.mark.parametrize("target", [dtype.name for dtype in TARGETS])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64"])
def test_figures_of_every_target_and_source_type(tmp_path: Path, target: str, source: str) -> None:
    x = example(DTYPES[source].numpy, shape=(6, 40))
    options = {"block_size": 20} if source == "float32" else {"scale_dtype": "float8e4m3fn"}
    report, dst = quantized(
        tmp_path, "safetensors", {"w": x}, dtype=target, allow_empty=True, **options
    )
    if source in ("float16", "bfloat16") and BITS[target] == 16:
        assert report["skipped"] == [{"name": "w", "reason": f"would not get smaller as {target}"}]
        assert report["totals"]["mse"] is None
        return
    (record,) = report["tensors"]
    check_record(record, x, written(dst, "w", record))
    assert record["source_dtype"] == source
    assert record["rounded_to"] == ("float32" if source == "float64" else None)


def test_figures_of_values_that_are_not_finite(tmp_path: Path) -> None:
    x = example()
    x[0, 3], x[1, 4], x[1, 5], x[5, 34] = np.nan, np.inf, -np.inf, np.nan
    for target in ("uint8", "int4", "float8e4m3fn"):
        report, dst = quantized(
            tmp_path, "safetensors", {"w": x}, dtype=target, nonfinite="allow", force=True
        )
        (record,) = report["tensors"]
        check_record(record, x, written(dst, "w", record))
        assert (record["nan_count"], record["inf_count"]) == (2, 2)


def test_figures_of_a_narrow_range_count_from_its_lowest_code(tmp_path: Path) -> None:
    x = example()
    report, dst = quantized(
        tmp_path, "safetensors", {"w": x}, dtype="int8", narrow_range=True, scale=0.02
    )
    (record,) = report["tensors"]
    check_record(record, x, written(dst, "w", record), lowest=-127)
    assert record["clipped"] > 0
    assert report["settings"]["method"] == "given"


def test_figures_of_a_dynamically_quantized_file(tmp_path: Path) -> None:
    for name, x in (("f32", example()), ("f16", example(np.float16))):
        save_file({"w": x}, tmp_path / f"{name}.safetensors")
        report = qtool.dynamic_file(
            tmp_path / f"{name}.safetensors", tmp_path / "q.safetensors", force=True
        )
        VALIDATOR.validate(report)
        (record,) = report["tensors"]
        check_record(record, x, written(tmp_path / "q.safetensors", "w", record))
        assert (report["command"], record["scale_dtype"]) == ("dynamic", "float32")


def test_a_bare_array_of_int32_has_figures_too(tmp_path: Path) -> None:
    x = np.random.default_rng(1).integers(-(2**20), 2**20, (6, 7)).astype(np.int32)
    np.save(tmp_path / "w.npy", x)
    report = qtool.quantize_file(tmp_path / "w.npy", tmp_path / "q.safetensors", dtype="int8")
    VALIDATOR.validate(report)
    (record,) = report["tensors"]
    check_record(record, x, written(tmp_path / "q.safetensors", "w", record))
    assert report["source"]["container"] == "npy"


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": -1}, {"block_size": 2}], ids=str)
def test_an_empty_array_keeps_shape_and_type_and_has_no_figures(
    tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    np.save(tmp_path / "w.npy", np.zeros(shape, np.float32))
    report = qtool.quantize_file(tmp_path / "w.npy", tmp_path / "q.npy", dtype="int8", **options)
    codes = np.load(tmp_path / "q.npy")
    assert (codes.shape, codes.dtype) == (shape, np.int8)
    VALIDATOR.validate(report)
    for figures in (report["tensors"][0], report["totals"]):
        undefined = ["min", "max", "absmax", "mse", "rmse", "mean_error", "max_abs_error",
                     "sqnr_db", "cosine_similarity", "relative_error", "clipped_fraction",
                     "bits_per_weight"]  # fmt: skip
        assert {figures[name] for name in undefined} == {None}
    scales = [report["tensors"][0][name] for name in ("scale_min", "scale_max")]
    assert scales in ([None, None], [1.0, 1.0])
    assert (scales[0] is None) == (report["tensors"][0]["num_scales"] == 0)


def test_names_that_look_like_numbers_stay_as_they_are(tmp_path: Path) -> None:
    x = np.array([[1, np.nan, np.inf]] * 4, np.float32)
    weights = {"BaNaNa": x, "Infinity": x.copy(), "NaN": x.copy()}
    report, _ = quantized(
        tmp_path,
        "safetensors",
        weights,
        dtype="int8",
        nonfinite="allow",
        axis=0,
        scale_dtype="float16",
    )
    assert [r["name"] for r in report["tensors"]] == ["BaNaNa", "Infinity", "NaN"]
    for record in report["tensors"]:
        assert (record["nan_count"], record["inf_count"], record["max"]) == (4, 4, 1.0)


@pytest.mark.parametrize(
    ("x", "figures"),
    [
        ([0, 0], {"mse": 0.0, "max_abs_error": 0.0, "sqnr_db": None, "relative_error": None}),
        (
            [1, -2],
            {
                "mse": 0.0,
                "max_abs_error": 0.0,
                "sqnr_db": None,
                "relative_error": 0.0,
                "cosine_similarity": 1.0,
            },
        ),
        (
            [1.25, -2.0],
            {
                "mse": 0.03125,
                "max_abs_error": 0.25,
                "max_abs_error_index": [0],
                "sqnr_db": 10 * math.log10(89),
            },
        ),  # 19.4939
        ([], {"mse": None, "sqnr_db": None, "max_abs_error_index": None}),
    ],
    ids=["zero", "exact", "a-quarter", "empty"],
)
def test_figures_of_short_signals(tmp_path: Path, x: list[float], figures: dict[str, Any]) -> None:
    np.save(tmp_path / "w.npy", np.array(x, np.float32))
    report = qtool.quantize_file(tmp_path / "w.npy", dtype="int8", scale=1)
    VALIDATOR.validate(report)
    (record,) = report["tensors"]
    assert {name: record[name] for name in figures} == figures


def test_codes_that_are_not_finite_leave_errors_undefined(tmp_path: Path) -> None:
    x = np.array([[1e9, 1.0, -1e9, 2.0] * 3] * 2, np.float32)
    for target in ("float8e5m2", "float8e4m3fn"):
        report, _ = quantized(
            tmp_path,
            "safetensors",
            {"w": x, "v": x + 1, "exact": x * 0},
            dtype=target,
            saturate=False,
            scale=1,
            force=True,
        )
        by_name = {record["name"]: record for record in report["tensors"]}
        for name in ("w", "v"):
            assert by_name[name]["mse"] is by_name[name]["max_abs_error"] is None
            assert by_name[name]["max_abs_error_index"] == [0, 0]
        assert by_name["exact"]["mse"] == 0
        assert report["totals"]["mse"] is report["totals"]["max_abs_error"] is None
        first = next(r["name"] for r in report["tensors"] if r["name"] != "exact")
        assert report["totals"]["max_abs_error_tensor"] == first


def test_the_first_tensor_with_the_largest_error_is_named() -> None:
    parts = []
    for name, values in (("a", [np.nan]), ("b", [0.25, 1.5]), ("c", [2.5]), ("d", [0.5])):
        x = np.array(values, np.float32)
        tensor = qtool.quantize(x, QuantSpec("int8", PerTensor(), nonfinite="allow"), scale=1)
        info = TensorInfo(name, x.shape, DTYPES["float32"], x.nbytes)
        record = tensor_record(info, tensor.outcome.describe(), tensor.stats, 9)
        parts.append((record, tensor.stats))
    files = {"name": "x", "container": "npz", "bytes": 1}
    report = build("quantize", files, files, {}, "", parts, [("e", "excluded")], ["careful"], 0.5)
    assert report["totals"]["max_abs_error_tensor"] == "b"
    assert report["skipped"] == [{"name": "e", "reason": "excluded"}]
    assert (report["warnings"], report["seconds"]) == (["careful"], 0.5)
    nothing = build("quantize", files, files, {}, "", parts[:1], [], [], 0.0)
    assert nothing["totals"]["max_abs_error_tensor"] is None


def test_the_report_says_who_made_it_and_what_was_asked(tmp_path: Path) -> None:
    report, dst = quantized(
        tmp_path, "safetensors", {"w": example(), "bias": np.ones(3, np.float32)}, dtype="uint4",
        block_size=16, axis=-1, exclude=["x*"], scale_dtype="float16", precision="bfloat16",
    )  # fmt: skip
    assert report["tool"]["name"] == "qtool"
    assert report["tool"]["version"] == qtool.__version__
    assert report["tool"]["libraries"] == {
        "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__, "onnx": onnx.__version__,
    }  # fmt: skip
    assert report["settings"] == {
        "dtype": "uint4", "symmetric": False, "method": "minmax", "scale_dtype": "float16",
        "precision": "bfloat16", "saturate": True, "narrow_range": False, "semantics": "onnx",
        "nonfinite": "error", "negative_scale": False, "axis": -1, "block_size": 16,
        "tile": None, "global_scale": False, "mx_rule": None, "preset": None, "layout": None,
        "dynamic_activations": False,
        "include": [], "exclude": ["x*"], "rules": [], "target": None,
        "importance": [], "requantize": False, "graph": None,
        "hessian": [], "activations": [], "damping": None, "act_order": None,
    }  # fmt: skip
    assert report["source"] == {
        "name": str(tmp_path / "w.safetensors"), "container": "safetensors",
        "bytes": (tmp_path / "w.safetensors").stat().st_size, "tensors": 2, "files": None,
    }  # fmt: skip
    assert report["output"]["name"] == str(dst)
    assert report["skipped"] == [{"name": "bias", "reason": "rank below 2"}]
    assert report["tensors"][0]["precision"] == "bfloat16"


# ---------------------------------------------------------------- JSON and schema


def test_json_is_strict() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"Out of range float values are not JSON"):
            to_json({"mse": value})


def test_the_schema_is_a_schema_that_leaves_nothing_open() -> None:
    Draft202012Validator.check_schema(SCHEMA)

    def objects(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [found for item in node for found in objects(item)]
        if not isinstance(node, dict):
            return []
        mine = [node] if "object" in (node.get("type") or ()) else []
        return mine + [found for item in node.values() for found in objects(item)]

    found = [o for o in objects(SCHEMA) if o is not SCHEMA["$defs"]["figures"]]
    closed = [o for o in found if "properties" in o]
    assert (len(found), len(closed)) == (25, 24)  # figures of a gate: under any name
    for node in closed:
        assert False in (node.get("additionalProperties"), node.get("unevaluatedProperties"))
        assert set(node["required"]) == set(node["properties"])


def test_the_schema_names_the_types_that_there_are() -> None:
    assert SCHEMA["$defs"]["target"]["enum"] == [dtype.name for dtype in TARGETS]


def every_change(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Copies of a report, each with one key left out or one added somewhere."""
    places = [[], ["tool"], ["tool", "libraries"], ["source"], ["output"], ["settings"],
              ["tensors", 0], ["totals"], ["skipped", 0]]  # fmt: skip
    changed = []
    for place in places:

        def at(copied: Any, place: list[Any] = place) -> Any:
            for key in place:
                copied = copied[key]
            return copied

        for key in at(report):
            without = copy.deepcopy(report)
            del at(without)[key]
            changed.append((f"{place} without {key}", without))
        more = copy.deepcopy(report)
        at(more)["surplus"] = 1
        changed.append((f"{place} with more", more))
    return changed


def test_the_schema_refuses_a_key_too_many_or_too_few(tmp_path: Path) -> None:
    weights = {"w": example(), "bias": np.ones(3, np.float32)}
    report, _ = quantized(tmp_path, "safetensors", weights, dtype="int8")
    changes = every_change(report)
    assert len(changes) > 90
    assert [what for what, changed in changes if VALIDATOR.is_valid(changed)] == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("report_version", 2), ("command", "inspect"), ("seconds", -1), ("seconds", None),
        ("tensors.0.elements", None), ("tensors.0.elements", -1), ("tensors.0.elements", 1.5),
        ("tensors.0.dtype", "float32"), ("tensors.0.axis", -1), ("tensors.0.block_size", 0),
        ("tensors.0.mse", "NaN"), ("tensors.0.mse", -1), ("tensors.0.clipped_fraction", 2),
        ("tensors.0.shape", None), ("tensors.0.num_scales", None), ("tensors.0.name", None),
        ("tensors.0.bytes_after", None), ("tensors.0.zero_point", None),
        ("totals.file_bytes_after", None), ("totals.nan_count", None), ("source.bytes", "1"),
        ("tensors.0.tile", [0, 4]), ("tensors.0.tile", [4]), ("tensors.0.mx_rule", "best"),
        ("tensors.0.global_scale", 0), ("tensors.0.granularity", "rows"),
        ("settings.mx_rule", "best"), ("settings.tile", 4), ("settings.global_scale", 1),
        ("settings.dynamic_activations", "static"), ("settings.preset", 3), ("settings.layout", 3),
        ("output.container", "gguf"), ("settings.method", "best"), ("settings.dtype", "int3"),
        ("settings.include", None), ("warnings", [""]), ("skipped", [{"name": "w"}]),
        ("tool.name", "other"), ("tool.version", ""),
    ],
)  # fmt: skip
def test_the_schema_refuses_values_that_no_report_has(
    tmp_path: Path, place: str, value: Any
) -> None:
    report, _ = quantized(tmp_path, "npz", {"w": example()}, dtype="int8")
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    node = report
    for key in path:
        node = node[key]
    node[last] = value
    assert not VALIDATOR.is_valid(report)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"tool": {"name": "qtool"}, "report_version": 1}', True),
        (b'{"tool": {"name": "qtool"}, "report_version": 7}', True),
        (b'{"tool": {"name": "qtool"}}', False),
        (b'{"tool": {"name": "other"}, "report_version": 1}', False),
        (b'{"report_version": 1}', False), (b'{"tool": 1, "report_version": 1}', False),
        (b"[]", False), (b"1", False), (b"", False), (b"\xff\xfe", False), (b"[" * 100000, False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_only_a_report_of_qtools_counts_as_one(
    tmp_path: Path, content: bytes, expected: bool
) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert is_report(path) is expected


def test_what_is_no_file_is_no_report(tmp_path: Path) -> None:
    assert not is_report(tmp_path)
    assert not is_report(tmp_path / "absent.json")

"""Layouts of other runtimes: what is stored, read by other means; what is left alone; refusals."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layout_readers
import ml_dtypes
import numpy as np
import pytest
from command import described, metadata, ok, refused, report, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import qtool
from qtool import engine
from qtool.dtypes import DTYPES
from qtool.engine import stream, tiling
from qtool.layouts import compressed_tensors
from qtool.layouts.stored import Stored
from qtool.packing import pack
from qtool.spec import Blocked, PerAxis

Array = NDArray[Any]
# suffix of a part -> its type, and its shape as functions of rows and columns
Parts = dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]]]

BFLOAT16 = ml_dtypes.bfloat16
ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    "model.embed_tokens.weight": (64, 256), f"{ATTENTION}.q_proj.weight": (256, 256),
    f"{ATTENTION}.k_proj.weight": (100, 256), f"{ATTENTION}.v_proj.weight": (100, 256),
    "model.layers.0.mlp.gate_proj.weight": (384, 256),
    "model.layers.0.mlp.up_proj.weight": (384, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 384), "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.odd.weight": (100, 130), "model.layers.0.conv.weight": (8, 4, 32),
    f"{ATTENTION}.q_proj.bias": (256,), "model.layers.0.relative": (16, 256),
    "model.norm.weight": (256,), "lm_head.weight": (64, 256),
}  # fmt: skip
LINEAR = [n for n in SHAPES if "_proj.weight" in n]
ODD, VOCABULARY = "model.layers.0.odd.weight", ["model.embed_tokens.weight", "lm_head.weight"]
CUSTOM = dict.fromkeys(
    [*VOCABULARY, "model.layers.0.mlp.gate.weight"],
    "left alone by custom of the layout; --include '*' takes it too",
)
LOW_RANK = dict.fromkeys([f"{ATTENTION}.q_proj.bias", "model.norm.weight"], "rank below 2")


def weights(dtype: Any) -> dict[str, Array]:
    """Every tensor with a range of its own, every row too; one of them of zeros."""
    random = np.random.default_rng(17)
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        x = random.standard_normal(shape) * np.exp2(number % 5 - 6)
        if len(shape) == 2:
            x *= np.exp(random.standard_normal(shape[0]))[:, None]
            x[3] = 0
        made[name] = x.astype(dtype)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    save_file(weights(BFLOAT16), path, metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class Case:
    """Options of quantize, how the reader calls it, and what a module is made of.

    scales: the type of float scales where the source is bfloat16. group: of a row, of which rows
    must hold whole ones.
    """

    layout: str
    options: tuple[str, ...]
    how: str
    bits: int
    parts: Parts
    group: int = 1

    def __str__(self) -> str:
        return "-".join([self.layout, *(option.lstrip("-") for option in self.options)])

    @property
    def arguments(self) -> list[str]:
        return [*self.options, "--layout", self.layout]

    def decoded(self, held: dict[str, Array], name: str) -> Array:
        """A weight, by the reader of the layout."""
        read = getattr(layout_readers, self.layout.replace("-", "_"))
        values: Array = read(held, name.removesuffix(".weight"), self.how, self.bits)
        return values


def words(bits: int, scale: Callable[[int, int], tuple[int, ...]], asymmetric: int = 0) -> Parts:
    """Parts of pack-quantized; asymmetric: the size of its groups."""
    parts: Parts = {
        "weight_packed": ("int32", lambda r, c: (r, math.ceil(c * bits / 32))),
        "weight_scale": ("bfloat16", scale),
        "weight_shape": ("int64", lambda r, c: (2,)),
    }
    if asymmetric:
        zero = lambda r, c: (math.ceil(r * bits / 32), math.ceil(c / asymmetric))  # noqa: E731
        parts["weight_zero_point"] = ("int32", zero)
    return parts


def whole(dtype: str, scale: str, shape: Callable[[int, int], tuple[int, ...]]) -> Parts:
    """Parts of codes that are stored as they are."""
    return {"weight": (dtype, lambda r, c: (r, c)), "weight_scale": (scale, shape)}


def small(bits: int, scale: str, group: int, *more: str) -> Parts:
    """Parts of packed floats."""
    parts: Parts = {
        "weight_packed": ("uint8", lambda r, c: (r, c * bits // 8)),
        "weight_scale": (scale, lambda r, c: (r, c // group)),
    }
    return parts | {name: ("float32", lambda r, c: (1,)) for name in more}


def affine(bits: int, group: int) -> Parts:
    """Parts of MLX's affine modes."""
    parts: Parts = {"weight": ("uint32", lambda r, c: (r, c * bits // 32))}
    return parts | {n: ("bfloat16", lambda r, c: (r, c // group)) for n in ("scales", "biases")}


def rows(r: int, c: int) -> tuple[int, ...]:
    return (r, 1)


def per(group: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda r, c: (r, c // group)


COMPRESSED, MODELOPT, MLX = "compressed-tensors", "modelopt", "mlx"
INT4 = ("--dtype", "int4")
CASES = [
    Case(COMPRESSED, ("--preset", "w4a16"), "pack-quantized", 4, words(4, per(128)), 128),
    Case(COMPRESSED, ("--preset", "w4a16-asym"), "pack-quantized", 4,
         words(4, per(128), 128), 128),
    Case(COMPRESSED, ("--preset", "w8a16"), "pack-quantized", 8, words(8, per(128)), 128),
    Case(COMPRESSED, ("--preset", "int2"), "pack-quantized", 2, words(2, per(64), 64), 64),
    Case(COMPRESSED, INT4, "pack-quantized", 4, words(4, rows)),
    Case(COMPRESSED, (*INT4, "--asymmetric"), "pack-quantized", 4, words(4, rows, 1 << 40)),
    Case(COMPRESSED, ("--dtype", "int2", "--asymmetric"), "pack-quantized", 2,
         words(2, rows, 1 << 40)),
    Case(COMPRESSED, ("--dtype", "int8", "--asymmetric", "--block-size", "32"), "pack-quantized",
         8, words(8, per(32), 32), 32),
    Case(COMPRESSED, ("--dtype", "int8"), "pack-quantized", 8, words(8, rows)),
    Case(COMPRESSED, ("--preset", "int8"), "int-quantized", 8, whole("int8", "bfloat16", rows)),
    Case(COMPRESSED, ("--preset", "int8", "--asymmetric"), "int-quantized", 8,
         whole("int8", "bfloat16", rows) | {"weight_zero_point": ("int8", rows)}),
    Case(COMPRESSED, ("--preset", "fp8"), "float-quantized", 8,
         whole("float8_e4m3fn", "bfloat16", rows)),
    Case(COMPRESSED, ("--preset", "fp8", "--no-dynamic-activations"), "naive-quantized", 8,
         whole("float8_e4m3fn", "bfloat16", rows)),
    Case(COMPRESSED, ("--preset", "fp8-block"), "float-quantized 128", 8,
         whole("float8_e4m3fn", "bfloat16", lambda r, c: (-(-r // 128), -(-c // 128))), 128),
    Case(COMPRESSED, ("--preset", "fp8-block", "--no-dynamic-activations"),
         "naive-quantized 128", 8,
         whole("float8_e4m3fn", "bfloat16", lambda r, c: (-(-r // 128), -(-c // 128)))),
    Case(COMPRESSED, ("--preset", "nvfp4"), "nvfp4-pack-quantized", 4,
         small(4, "float8_e4m3fn", 16, "weight_global_scale"), 16),
    Case(COMPRESSED, ("--preset", "mxfp4"), "mxfp4-pack-quantized", 4, small(4, "uint8", 32), 32),
    Case(COMPRESSED, ("--preset", "mxfp6-e2m3"), "mxfp6-pack-quantized", 6,
         small(6, "uint8", 32), 32),
    Case(COMPRESSED, ("--preset", "mxfp8"), "mxfp8-quantized", 8,
         whole("float8_e4m3fn", "uint8", per(32)), 32),
    Case(MODELOPT, ("--preset", "nvfp4"), "W4A16_NVFP4", 4,
         {"weight": ("uint8", lambda r, c: (r, c // 2)), "weight_scale": ("float8_e4m3fn", per(16)),
          "weight_scale_2": ("float32", lambda r, c: ())}, 16),
    Case(MODELOPT, ("--preset", "fp8"), "FP8_PER_CHANNEL_PER_TOKEN", 8,
         whole("float8_e4m3fn", "float32", lambda r, c: (r,))),
    Case(MLX, ("--dtype", "uint4", "--block-size", "64"), "affine", 4, affine(4, 64), 64),
    Case(MLX, ("--preset", "w4a16"), "affine", 4, affine(4, 128), 128),
    Case(MLX, ("--preset", "w4a16-asym"), "affine", 4, affine(4, 128), 128),
    Case(MLX, ("--preset", "w8a16"), "affine", 8, affine(8, 128), 128),
    Case(MLX, ("--preset", "int2"), "affine", 2, affine(2, 64), 64),
    Case(MLX, ("--dtype", "uint8", "--block-size", "32"), "affine", 8, affine(8, 32), 32),
    Case(MLX, ("--dtype", "uint2", "--block-size", "32", "--symmetric"), "affine", 2,
         affine(2, 32), 32),
    Case(MLX, ("--preset", "mxfp4"), "mxfp4", 4,
         {"weight": ("uint32", lambda r, c: (r, c // 8)), "scales": ("uint8", per(32))}, 32),
]  # fmt: skip


def quantized(case: Case) -> set[str]:
    """The tensors that are to be quantized."""
    if case.layout == MLX:
        names = [n for n, s in SHAPES.items() if len(s) == 2 and n.endswith(".weight")]
    else:
        names = [*LINEAR, ODD]
    return {name for name in names if SHAPES[name][1] % case.group == 0}


def skipped(case: Case) -> dict[str, str]:
    """Why the others are not."""
    reasons = LOW_RANK | ({} if case.layout == MLX else CUSTOM)
    what = " or embedding" if case.layout == MLX else ""
    no_linear = f"no weight of a linear layer{what}, which {case.layout} is for"
    reasons |= {"model.layers.0.conv.weight": no_linear, "model.layers.0.relative": no_linear}
    if ODD not in quantized(case):
        reasons[ODD] = f"{case.layout} needs rows of whole blocks of {case.group}, not of 130"
    return reasons


@pytest.fixture(scope="module", params=CASES, ids=str)
def written(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, Path]:
    """A case, the file that quantize wrote, and the one that dequantize made of that."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("written")
    ok("quantize", source, "-o", folder / "q.safetensors", *case.arguments)
    ok("dequantize", folder / "q.safetensors", "-o", folder / "back.safetensors")
    return case, folder / "q.safetensors", folder / "back.safetensors"


Written = tuple[Case, Path, Path]


def test_another_reader_finds_the_values_of_dequantize(written: Written) -> None:
    case, path, back = written
    held, values = stored(path), stored(back)
    assert set(values) == set(SHAPES)
    for name in quantized(case):
        expected = values[name]
        found = case.decoded(held, name)
        assert (found.dtype, expected.dtype) == (np.float32, np.float32)
        assert found.tobytes() == expected.tobytes(), name


def test_a_module_is_made_of_the_parts_that_readers_want(written: Written) -> None:
    case, path, _ = written
    held = stored(path)
    original = weights(BFLOAT16)
    expected = {name: (str(original[name].dtype), SHAPES[name]) for name in skipped(case)}
    for name in quantized(case):
        base = name.removesuffix("weight")
        for part, (dtype, shape) in case.parts.items():
            expected[base + part] = (dtype, shape(*SHAPES[name]))
    assert {name: (str(a.dtype), a.shape) for name, a in held.items()} == expected
    assert metadata(path)["format"] == "pt"


def test_what_is_left_alone_is_told_and_is_as_it_was(written: Written) -> None:
    case, path, back = written
    told = {row["name"]: row["reason"] for row in report(path)["skipped"]}
    assert told == skipped(case)
    assert quantized(case) == {row["name"] for row in report(path)["tensors"]}
    original = weights(BFLOAT16)
    for name in told:
        assert stored(path)[name].tobytes() == original[name].tobytes()
        assert stored(back)[name].tobytes() == original[name].tobytes()
    assert metadata(back) == {"format": "pt"}


def test_the_report_counts_the_errors_and_bytes_of_what_was_written(written: Written) -> None:
    case, path, _ = written
    held, original = stored(path), weights(BFLOAT16)
    for row in report(path)["tensors"]:
        name = row["name"]
        x = original[name].astype(np.float64)
        error = case.decoded(held, name) - x
        assert row["mse"] == pytest.approx(float(np.mean(error**2)), rel=1e-9)
        assert row["max_abs_error"] == float(np.abs(error).max())
        base = name.removesuffix("weight")
        assert row["bytes_after"] == sum(held[base + part].nbytes for part in case.parts)
    assert report(path)["settings"]["layout"] == case.layout


def test_inspect_says_how_a_module_is_quantized(written: Written) -> None:
    case, path, _ = written
    found = qtool.inspect_file(path)
    assert found["quantized_by"] == ["qtool"]
    rows = {row["name"]: row for row in found["tensors"]}
    assert set(rows) == set(SHAPES)
    for name in quantized(case):
        assert rows[name]["quantization"]["layout"] == case.layout
        assert rows[name]["shape"] == list(SHAPES[name])
    assert {n for n, row in rows.items() if row["quantization"] is None} == set(skipped(case))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *zip(CASES, itertools.cycle([np.float32, np.float16, np.float64]), strict=False),
        *itertools.product(CASES, [BFLOAT16]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_streaming_gives_the_same_bytes(
    case: Case, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = weights(dtype)
    save_file(source, "model.safetensors")
    made = {}
    for way, pays, jobs in (("plain", False, 1), ("one", True, 1), ("three", True, 3)):
        monkeypatch.setattr(engine, "kernels_pay", lambda elements, pays=pays: pays)
        monkeypatch.setattr(engine, "TILES_PAY", 1)
        for name in ("TILE", "_SMALL_TILE"):
            monkeypatch.setattr(tiling, name, 4096)
        monkeypatch.setattr(stream, "_LONGEST_SPAN", 1 << 14)
        folder = Path(way)
        folder.mkdir()
        done = ok("quantize", "model.safetensors", "-o", "q.safetensors", "--force", "--json",
                  "--jobs", str(jobs), *case.arguments).json  # fmt: skip
        del done["seconds"]
        ok("dequantize", "q.safetensors", "-o", "b.safetensors", "--force", "--jobs", str(jobs))
        made[way] = Path("q.safetensors").read_bytes(), Path("b.safetensors").read_bytes(), done
    assert made["one"] == made["plain"]
    assert made["three"] == made["plain"]
    held, values = stored(made["plain"][0]), stored(made["plain"][1])
    for name in quantized(case):
        assert (case.decoded(held, name) == values[name]).all(), name


@pytest.mark.parametrize("layout", [COMPRESSED, MODELOPT])
def test_custom_is_overridden_by_name(layout: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.safetensors"
    ok("quantize", source, "-o", target, "--preset", "fp8", "--layout", layout,
       "--include", "lm_head*", "--include", "*.q_proj.weight")  # fmt: skip
    assert set(described(target)) == {"lm_head.weight", f"{ATTENTION}.q_proj.weight"}
    excluded = ok("quantize", source, "-o", tmp_path / "x.safetensors", "--preset", "fp8",
                  "--layout", layout, "--exclude", "*.mlp.*", "--json").json  # fmt: skip
    reasons = {row["name"]: row["reason"] for row in excluded["skipped"]}
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "excluded"
    assert (
        reasons["lm_head.weight"]
        == "left alone by custom of the layout; --include '*' takes it too"
    )


@pytest.mark.parametrize(
    ("layout", "part", "of"),
    [("native", ".weight.global_scale", lambda v: v), (MODELOPT, ".weight_scale_2", lambda v: v),
     (COMPRESSED, ".weight_global_scale", lambda v: 1 / v)],
    ids=["native", "modelopt", "compressed-tensors"],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_what_runtimes_fuse_shares_a_global_scale(
    layout: str, part: str, of: Callable[[float], float], streamed: bool, source: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: streamed)
    monkeypatch.setattr(engine, "TILES_PAY", 1)
    target = tmp_path / "q.safetensors"
    ok("quantize", source, "-o", target, "--preset", "nvfp4", "--layout", layout, "--method",
       "absmax")  # fmt: skip
    absmax = {n: float(np.abs(x.astype(np.float32)).max()) for n, x in weights(BFLOAT16).items()}
    fused = [[n for n in LINEAR if ATTENTION in n],
             [n for n in LINEAR if "gate_proj" in n or "up_proj" in n],
             [n for n in LINEAR if "down_proj" in n]]  # fmt: skip
    held = stored(target)
    own = set()
    for names in fused:
        largest = max(absmax[name] for name in names)
        wanted = 2.0 ** math.ceil(math.log2(largest / (6 * 448)))
        for name in names:
            value = held[name.removesuffix(".weight") + part].reshape(()).item()
            assert of(value) == wanted
            own.add(2.0 ** math.ceil(math.log2(absmax[name] / (6 * 448))))
    assert len(own) > 3  # each alone would have had another
    rows = {row["name"]: row["global_scale"] for row in report(target)["tensors"]}
    assert [len({rows[n] for n in names}) for names in fused] == [1, 1, 1]


def test_one_scale_per_tensor_is_a_vector_of_one(tmp_path: Path) -> None:
    x = weights(np.float32)[ODD]
    np.save(tmp_path / "odd.weight.npy", x)
    for options, how, bits in (
        (("--preset", "fp8"), "float-quantized", 8), (INT4, "pack-quantized", 4),
        ((*INT4, "--asymmetric"), "pack-quantized", 4),
    ):  # fmt: skip
        target = tmp_path / "q.safetensors"
        ok("quantize", tmp_path / "odd.weight.npy", "-o", target, "--layout", COMPRESSED, "--force",
           *options)  # fmt: skip
        held = stored(target)
        assert held["odd.weight_scale"].shape == (1,)
        ok("dequantize", target, "-o", tmp_path / "back.safetensors", "--force")
        values = stored(tmp_path / "back.safetensors")["odd.weight"]
        if "--asymmetric" in options:
            zero = held["odd.weight_zero_point"]
            assert (zero.dtype, zero.shape) == (np.int32, (1, 1))
            codes = layout_readers.stream(held["odd.weight_packed"], 4, 130) - (
                int(zero[0, 0]) & 15
            )
            found = codes.astype(np.float32) * held["odd.weight_scale"]
        else:
            found = layout_readers.compressed_tensors(held, "odd", how, bits)
        assert (found == values).all()


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    bits=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([None, 1, 8, 32]),
    zero_point=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300)
def test_words_of_any_shape_hold_the_codes_and_zero_points(
    shape: tuple[int, int], bits: int, group: int | None, zero_point: bool, seed: int
) -> None:
    """Rows that end within a word; zero points packed down the rows."""
    columns = shape[1] * group if group else shape[1]
    shape = (shape[0], columns)
    granularity = Blocked(1, group) if group else PerAxis(0)
    groups = columns // group if group else 1
    dtype, float32 = DTYPES[f"int{bits}"], DTYPES["float32"]
    tensor = Stored(dtype, shape, granularity, float32, float32, zero_point=zero_point)
    random = np.random.default_rng(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = random.integers(low, high, shape).astype(dtype.numpy)
    zeros = random.integers(low, high, (shape[0], groups)).astype(dtype.numpy)
    ones = np.ones(shape[0] * groups, np.float32).view(np.uint8)
    kept = {"codes": pack(codes, dtype), "zero_point": pack(zeros, dtype), "scale": ones}
    held = {}
    for part in compressed_tensors.parts("a.weight", tensor):
        given = [] if part.role == "constant" else [kept[part.role]]
        data = np.ascontiguousarray(part.encode(*given)).reshape(-1)
        held[part.entry.name] = data.view(part.entry.dtype.numpy).reshape(part.entry.shape)
        if given:
            assert part.decode(data).tobytes() == kept[part.role].tobytes()
    found = layout_readers.compressed_tensors(held, "a", "pack-quantized", bits)
    wanted = codes.astype(np.float32)
    if zero_point:
        wanted -= zeros.astype(np.float32).repeat(group or columns, axis=1)
    assert (found == wanted).all()


# ---------------------------------------------------------------- refusals


ADVICE = {
    COMPRESSED: "; use a --preset alone, such as w4a16, w8a16, int8, fp8, nvfp4 or mxfp4",
    MODELOPT: "; use --preset nvfp4 or fp8 alone",
    MLX: "; use --block-size 32, 64 or 128 with integers of 2, 4 or 8 bits, or --preset mxfp4",
}


@pytest.mark.parametrize(
    ("layout", "options", "what"),
    [
        (COMPRESSED, "--dtype uint4 --block-size 128", "uint4 in blocks of"),
        (COMPRESSED, "--dtype int16", "int16 per axis"),
        (COMPRESSED, "--dtype float8e5m2", "float8e5m2 per axis"),
        (COMPRESSED, "--dtype float8e4m3fn --block-size 128", "float8e4m3fn in blocks of"),
        (COMPRESSED, "--dtype float4e2m1 --block-size 16", "float4e2m1 in blocks of"),
        (COMPRESSED, "--dtype float4e2m1 --block-size 16 --scale-dtype float8e4m3fn",
         "float4e2m1 in blocks of"),
        (COMPRESSED, "--preset nvfp4 --block-size 32", "float4e2m1 in blocks of"),
        (COMPRESSED, "--preset mxfp4 --block-size 16", "float4e2m1 in blocks of"),
        (COMPRESSED, "--preset mxfp6-e3m2", "float6e3m2 in blocks of"),
        (COMPRESSED, "--preset w4a16 --axis 0 --block-size 32", "int4 in blocks of"),
        (COMPRESSED, "--dtype int8 --axis 1", "int8 per axis"),
        (COMPRESSED, "--dtype int4 --tile 128x128", "int4 in tiles of"),
        (COMPRESSED, "--preset w4a16 --dynamic-activations", "int4 in blocks of"),
        (COMPRESSED, "--preset nvfp4 --dynamic-activations", "float4e2m1 in blocks of"),
        (COMPRESSED, "--preset w4a16 --scale-dtype float8e8m0", "int4 in blocks of"),
        (MODELOPT, "--preset w4a16", "int4 in blocks of"),
        (MODELOPT, "--preset fp8 --no-dynamic-activations", "float8e4m3fn per axis"),
        (MODELOPT, "--preset fp8 --scale-dtype bfloat16", "float8e4m3fn per axis"),
        (MODELOPT, "--preset fp8-block", "float8e4m3fn in tiles of"),
        (MODELOPT, "--preset mxfp4", "float4e2m1 in blocks of"),
        (MODELOPT, "--preset nvfp4 --block-size 32", "float4e2m1 in blocks of"),
        (COMPRESSED, "--preset fp8 --scale 1 --zero-point 1", "float8e4m3fn per axis"),
        (COMPRESSED, "--preset mxfp4 --scale 1 --zero-point 1", "float4e2m1 in blocks of"),
        (MODELOPT, "--preset fp8 --scale 1 --zero-point 1", "float8e4m3fn per axis"),
        (MLX, "--preset mxfp4 --scale 1 --zero-point 1", "float4e2m1 in blocks of"),
        (MLX, "--dtype int4", "int4 per axis"),
        (MLX, "--dtype int4 --block-size 16", "int4 in blocks of"),
        (MLX, "--dtype int16 --block-size 32", "int16 in blocks of"),
        (MLX, "--preset nvfp4", "float4e2m1 in blocks of"),
        (MLX, "--preset mxfp8", "float8e4m3fn in blocks of"),
        (MLX, "--preset w4a16 --dynamic-activations", "int4 in blocks of"),
        (MLX, "--dtype int4 --axis 0 --block-size 32", "int4 in blocks of"),
        (MLX, "--preset w4a16 --scale-dtype float8e8m0", "int4 in blocks of"),
        (MLX, "--dtype int4 --tile 32x32", "int4 in tiles of"),
    ],
)  # fmt: skip
def test_what_a_layout_has_no_word_for_is_refused(
    layout: str, options: str, what: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q.safetensors"
    message = refused("quantize", source, "-o", target, *options.split(), "--layout", layout,
                      code=2)  # fmt: skip
    assert message.startswith(f"--layout {layout}: it has no ")
    assert f" for {what}" in message
    assert message.endswith(ADVICE[layout])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("q.npz", "--layout mlx --preset w4a16",
         "--layout: mlx is for .safetensors, not npz"),
        ("q.npy", "--layout compressed-tensors --preset fp8",
         "--layout: compressed-tensors is for .safetensors, not npy"),
        ("q.safetensors", "--layout gguf --preset w4a16",
         "--layout: 'gguf' is unknown; use native, compressed-tensors, modelopt, mlx"),
        ("q.safetensors", "--layout qdq --preset w4a16",
         "--layout: qdq is for ONNX models, not safetensors"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(
    target: str, options: str, message: str, source: Path, tmp_path: Path
) -> None:
    assert refused("quantize", source, "-o", tmp_path / target, *options.split(), code=2) == message
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_readers_would_take_for_a_part_is_refused(tmp_path: Path) -> None:
    x = weights(np.float32)[LINEAR[0]]
    for layout, preset, part in (
        (COMPRESSED, "w4a16", "a.weight_zero_point"), (COMPRESSED, "fp8", "a.weight_packed"),
        (COMPRESSED, "mxfp4", "a.weight_global_scale"), (MODELOPT, "fp8", "a.weight_scale_2"),
        (MLX, "mxfp4", "a.biases"),
    ):  # fmt: skip
        save_file({"a.weight": x, part: x[0]}, tmp_path / "m.safetensors")
        message = refused("quantize", tmp_path / "m.safetensors", "--preset", preset, "--layout",
                          layout)  # fmt: skip
        assert message == (
            f"tensor {part}: its name is needed for parameters of a.weight; rename it in the "
            "source, or use --exclude 'a.weight'"
        )


def test_two_layouts_do_not_share_a_file(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "q.safetensors", tmp_path / "r.safetensors"
    ok("quantize", source, "-o", first, "--preset", "w4a16", "--layout", COMPRESSED)
    message = refused("quantize", first, "-o", second, "--preset", "fp8", "--layout", MODELOPT)
    assert (
        message
        == f"{first}: is quantized already (qtool); dequantize it first, or use --requantize"
    )
    again = ("quantize", first, "-o", second, "--requantize", "--include", "*down_proj*")
    message = refused(*again, "--preset", "fp8", "--layout", MODELOPT, code=2)
    assert message == (
        "--layout: model.layers.0.mlp.gate_proj.weight stays quantized in the compressed-tensors "
        "layout; quantize all that is, or dequantize the file first"
    )
    assert not second.exists()
    ok(*again, "--preset", "w8a16", "--layout", COMPRESSED)
    held, before = stored(second), stored(first)
    down = "model.layers.0.mlp.down_proj"
    assert held[f"{down}.weight_packed"].shape == (256, 96)
    assert {n for n in held if n not in before or held[n].tobytes() != before[n].tobytes()} == {
        f"{down}.weight_packed", f"{down}.weight_scale"
    }  # fmt: skip
    assert described(second)[f"{down}.weight"]["dtype"] == "int8"


FIELDS = {
    "dtype": "int4", "shape": [8, 64], "granularity": "blocked", "axis": 1, "block_size": 32,
    "scale_dtype": "float16", "source_dtype": "bfloat16", "zero_point": False,
}  # fmt: skip
FP8 = {"dtype": "float8e4m3fn", "granularity": "per_axis", "axis": 0, "block_size": None,
       "scale_dtype": "float32", "activations": True}  # fmt: skip


def crafted(path: Path, layout: object, fields: dict[str, Any], name: str = "a.weight") -> Path:
    """A file with all that a module could be made of, whose metadata says fields of it."""
    text = {"version": 1, "layout": layout, "tensors": {name: FIELDS | fields}, "stored": {}}
    tensors = {
        "a.weight": np.zeros((8, 8), np.uint32), "a.scales": np.ones((8, 2), np.float16),
        "a.biases": np.ones((8, 2), np.float16), "a.weight_packed": np.zeros((8, 8), np.int32),
        "a.weight_scale": np.ones((8, 2), np.float16), "a.weight_shape": np.array([8, 64]),
        "a.weight_zero_point": np.zeros((1, 2), np.int32),
    }  # fmt: skip
    save_file(tensors, path, metadata={"qtool": json.dumps(text)})
    return path


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (COMPRESSED, {"shape": [8, 8, 8]}), (COMPRESSED, {"shape": [512]}),
        (COMPRESSED, {"block_size": 7}), (COMPRESSED, {"dtype": "uint4"}),
        (COMPRESSED, {"axis": 0}), (COMPRESSED, {"activations": True}),
        (COMPRESSED, {"global_scale": True}), (COMPRESSED, {"zero_point": True, "bias": True}),
        (COMPRESSED, {"granularity": "tiled", "tile": [4, 4]}),
        (COMPRESSED, {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "shape": [8, 33]}),
        (MODELOPT, {}), (MODELOPT, {"shape": [8, 8, 8]}), (MODELOPT, FP8 | {"shape": [2, 2, 2]}),
        (MODELOPT, FP8 | {"zero_point": True}),
        (MLX, {"shape": [8, 8, 8]}), (MLX, {"dtype": "int16"}), (MLX, {"global_scale": True}),
        (MLX, {"activations": True}), (MLX, {"axis": 0}), (MLX, {"shape": [8, 60]}),
        ("native", {"granularity": "tiled"}), ("native", {"granularity": "tiled", "tile": [4]}),
        ("native", {"granularity": "tiled", "tile": [4, "4"]}),
        ("native", {"granularity": "tiled", "tile": [0, 4]}),
        ("native", {"granularity": "tiled", "tile": [4, 4], "shape": [512]}),
        ("native", {"global_scale": 1}), ("native", {"activations": "dynamic"}),
        ("native", {"zero_point": None}), ("native", {"zero_point": True, "bias": True}),
        ("native", {"bias": True, "granularity": "per_tensor"}), ("matmul-nbits", {}),
        ("gguf", {}), (None, {}), (3, {}), ([], {}),
    ],
    ids=str,
)  # fmt: skip
def test_metadata_that_no_layout_writes_is_damaged(
    layout: object, change: dict[str, Any], tmp_path: Path
) -> None:
    path = crafted(tmp_path / "m.safetensors", layout, change)
    for command in (["inspect"], ["dequantize"], ["quantize", "--dtype", "int8", "--requantize"]):
        message = refused(command[0], path, *command[1:])
        known = layout in (COMPRESSED, MODELOPT, MLX, "native")
        thing = "metadata 'qtool'" + (" of tensor 'a.weight'" if known else "")
        assert message == (
            f"{path}: {thing}: is not as qtool writes it; write or fetch the file anew"
        )


@pytest.mark.parametrize("layout", [COMPRESSED, MODELOPT, MLX])
def test_a_name_that_no_layout_gives_to_weights_is_damaged(layout: str, tmp_path: Path) -> None:
    path = crafted(tmp_path / "m.safetensors", layout, FP8 if layout == MODELOPT else {}, "a")
    assert refused("inspect", path) == (
        f"{path}: metadata 'qtool' of tensor 'a': is not as qtool writes it; write or fetch the "
        "file anew"
    )


def test_a_bias_that_mlx_cannot_hold_is_refused(tmp_path: Path) -> None:
    weights = {"l.weight": np.full((32, 64), 65504, np.float16)}
    save_file(weights, tmp_path / "x.safetensors")
    options = ("--dtype", "int4", "--block-size", "32", "--layout", "mlx")
    command = ("quantize", tmp_path / "x.safetensors", "-o", tmp_path / "q.safetensors", *options)
    assert "overflows float16; use --scale-dtype float32" in refused(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    ok(*command, "--scale-dtype", "float32")
    ok("dequantize", tmp_path / "q.safetensors", "-o", tmp_path / "b.safetensors")
    back = load_file(tmp_path / "b.safetensors")["l.weight"]
    step = np.float32(65504 / 7)
    np.testing.assert_allclose(back, np.float32(15 * step) - np.float32(8 * step), rtol=1e-7)

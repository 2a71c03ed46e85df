"""qtool compare: figures against NumPy and against what `qtool quantize` reports."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from checkpoints import save
from command import ok, process, qtool, refused, report, strict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from test_cli_rules import checkpoint, model

import qtool as library
from qtool.jobs.outcomes import front

RNG = np.random.default_rng(5)
FIGURES = (
    "tensors", "skipped", "bits_per_weight", "bytes_after", "sqnr_db", "relative_error", "rmse",
    "max_abs_error", "clipped_fraction", "weighted_sqnr_db", "weighted_relative_error",
    "file_bytes_after",
)  # fmt: skip


def weight(rows: int, size: float, columns: int = 256) -> np.ndarray:
    return (RNG.standard_t(4, (rows, columns)) * size).astype(np.float32)


TENSORS = {"a.weight": weight(64, 1), "b.weight": weight(32, 0.1), "c.weight": weight(48, 3)}
SIZE = sum(t.size for t in TENSORS.values())
SCHEMA = strict((Path(library.__file__).parent / "compare.schema.json").read_text())
SWEEP = ("--dtypes", "int8,int4,float8e4m3fn", "--block-sizes", "axis,32,128",
         "--methods", "absmax,mse")  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with a model in it."""
    monkeypatch.chdir(tmp_path)
    save_file({**TENSORS, "a.bias": TENSORS["a.weight"][0]}, "m.safetensors")


def compared(*args: str, source: str = "m.safetensors") -> dict[str, Any]:
    """The result of a run that has written nothing."""
    before = listing()
    told = ok("compare", source, "--json", *args).json
    assert listing() == before
    jsonschema.validate(told, SCHEMA)
    return told  # type: ignore[no-any-return]


def listing() -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in Path().rglob("*"))


def by_words(told: dict[str, Any]) -> dict[str, Any]:
    return {row["words"]: row for row in told["combinations"]}


def as_options(words: str) -> list[str]:
    """The words of a rule as options of `qtool quantize`."""
    found = []
    for word in words.split(", "):
        name, _, value = word.partition("=")
        found += ["--asymmetric"] if name == "symmetric" else [f"--{name.replace('_', '-')}", value]
    return found


def quantized(source: str, words: str, *options: str) -> Any:
    """The report of `qtool quantize` with a combination's options."""
    folder = Path(source).is_dir()
    target = Path("q" if folder else "q.onnx" if source.endswith(".onnx") else "q.safetensors")
    ok("quantize", source, "-o", target, "--force", *as_options(words), *options)
    return report(target)


def rounded(x: np.ndarray, qmax: float, block: int) -> np.ndarray:
    """Rows in blocks, each over its largest magnitude, to the nearest of 2 qmax + 1 steps."""
    groups = x.reshape(-1, block)
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(qmax)
    return np.asarray((np.rint(groups / scale) * scale).reshape(x.shape))


@pytest.mark.parametrize(
    ("words", "qmax", "block", "bits"),
    [("dtype=int8, method=absmax", 127, 256, 8 + 32 / 256),
     ("dtype=int4, block_size=32, method=absmax", 7, 32, 4 + 32 / 32)],
)  # fmt: skip
def test_figures_are_those_of_numpy(words: str, qmax: float, block: int, bits: float) -> None:
    row = by_words(compared(*SWEEP))[words]
    errors = {n: rounded(t, qmax, block).astype(float) - t for n, t in TENSORS.items()}
    noise = {n: np.square(e).sum() for n, e in errors.items()}
    signal = {n: np.square(t.astype(float)).sum() for n, t in TENSORS.items()}
    assert row["rmse"] == pytest.approx(math.sqrt(sum(noise.values()) / SIZE), rel=1e-12)
    ratio = sum(noise.values()) / sum(signal.values())
    assert row["relative_error"] == pytest.approx(math.sqrt(ratio), rel=1e-12)
    assert row["overall_relative_error"] == pytest.approx(math.sqrt(ratio), rel=1e-12)
    assert row["sqnr_db"] == pytest.approx(-10 * math.log10(ratio), rel=1e-12)
    assert row["max_abs_error"] == max(np.abs(e).max() for e in errors.values())
    assert row["bits_per_weight"] == row["overall_bits_per_weight"] == bits
    assert row["bytes_after"] == bits * SIZE / 8
    name = min(TENSORS, key=lambda n: signal[n] / noise[n])
    worst = 10 * math.log10(signal[name] / noise[name])
    assert row["worst"] == {"name": name, "sqnr_db": pytest.approx(worst, rel=1e-12)}
    assert (row["tensors"], row["skipped"]) == (3, 1)


SOURCES = {
    "m.safetensors": (), "m.npz": (), "m.onnx": (), "m.npy": (), "model": (),
    "nbits": ("--layout", "matmul-nbits"), "ct": ("--layout", "compressed-tensors"),
    "mlx": ("--layout", "mlx"),
}  # fmt: skip


def source(name: str) -> str:
    if name == "m.npz":
        np.savez("m.npz", **TENSORS)
    elif name == "m.npy":
        np.save("m.npy", TENSORS["c.weight"])
    elif name in ("m.onnx", "nbits"):
        return str(model(**{n: weight(256, s) for n, s in (("a", 1), ("b", 0.1))}))
    elif name in ("model", "ct"):
        projections = ("q_proj", "o_proj", "k_proj", "gate_proj", "v_proj", "up_proj")
        return str(checkpoint(**{
            f"l.{n}.weight": weight(32, 0.1 + i) for i, n in enumerate(projections)
        }))  # fmt: skip
    return "m.safetensors" if name == "mlx" else name


@pytest.mark.parametrize("name", SOURCES)
def test_figures_are_those_of_the_report_to_the_last_bit(name: str) -> None:
    options = SOURCES[name]
    src = source(name)
    told = compared(
        "--dtypes", "int4,float8e4m3fn", "--block-sizes", "axis,32", "--methods", "absmax,mse",
        "--presets", "nvfp4,w4a16", *options,
        "--candidates", "dtype=uint4, block_size=64, scale_dtype=bfloat16", source=src,
    )  # fmt: skip
    assert len(told["combinations"]) + len(told["left_out"]) == 2 * 2 * 2 + 2 * 2 + 2
    assert len(told["combinations"]) >= 4
    for row in told["combinations"]:
        totals = quantized(src, row["words"], *options)["totals"]
        assert {k: row[k] for k in FIGURES} == {k: totals[k] for k in FIGURES}, row["words"]


def test_large_tensors_go_through_kernels_and_give_the_same_for_any_threads() -> None:
    save_file({"a": weight(4096, 1), "b": weight(5000, 0.1)}, "m.safetensors")
    sweep = ("--dtypes", "int4", "--block-sizes", "axis,32", "--methods", "mse,minmax")
    told = [compared(*sweep, "--jobs", jobs) for jobs in "12"]
    words = "dtype=int4, block_size=32, method=mse"
    totals = quantized("m.safetensors", words)["totals"]
    assert {k: by_words(told[0])[words][k] for k in FIGURES} == {k: totals[k] for k in FIGURES}
    for row in [*told[0]["combinations"], *told[1]["combinations"]]:
        assert row.pop("seconds") > 0
    assert told[0] == told[1]


def test_figures_of_tensors_are_those_of_the_report() -> None:
    told = by_words(compared(*SWEEP, "--per-tensor"))
    words = "dtype=float8e4m3fn, block_size=32, method=mse"
    records = quantized("m.safetensors", words)["tensors"]
    rows = told[words]["per_tensor"]
    assert [row["name"] for row in rows] == [*TENSORS]
    for row, record in zip(rows, records, strict=True):
        assert (row.pop("method"), row.pop("symmetric")) == ("mse", True)
        assert row == {name: record[name] for name in row}


def test_errors_count_with_their_weights() -> None:
    np.savez("i.npz", **{n: np.abs(t) + 1 for n, t in TENSORS.items() if n != "b.weight"})
    options = ("--importance", "i.npz")
    told = compared("--dtypes", "int4,int8", "--block-sizes", "32,128", *options)
    for row in told["combinations"]:
        totals = quantized("m.safetensors", row["words"], *options)["totals"]
        assert {k: row[k] for k in FIGURES} == {k: totals[k] for k in FIGURES}
    assert told["warnings"] == ["quantized without importance, as none is given: b.weight"]
    rows = compared("--dtypes", "int4,int8", "--include", "a*", *options)["combinations"]
    for row in rows:
        assert row["overall_relative_error"] == row["weighted_relative_error"]


def test_what_a_combination_leaves_alone_has_its_size_and_no_error() -> None:
    save_file({"l.a.weight": weight(64, 1), "l.b.weight": weight(64, 9, 96)}, "m.safetensors")
    told = compared("--dtypes", "int4", "--block-sizes", "32,128", "--layout", "compressed-tensors")
    both, one = (by_words(told)[f"dtype=int4, block_size={n}"] for n in (32, 128))
    assert [row["tensors"] for row in (both, one)] == [2, 1]
    nbytes = 64 * 256 * 4.25 / 8 + 16  # codes and scales, and the shape in two int64
    assert one["bytes_after"] == nbytes
    assert one["overall_bits_per_weight"] == 8 * (nbytes + 4 * 64 * 96) / (64 * 352)
    energy = 10 ** (both["sqnr_db"] / 10) * both["rmse"] ** 2 * 64 * 352
    error = one["rmse"] ** 2 * 64 * 256
    wanted = math.sqrt(error / energy)
    assert one["overall_relative_error"] == pytest.approx(wanted, rel=1e-12)
    assert [row["words"] for row in told["combinations"]] == [both["words"], one["words"]]
    table = ok("compare", "m.safetensors", "--dtypes", "int4", "--block-sizes", "32,128",
               "--layout", "compressed-tensors").out.decode()  # fmt: skip
    assert "what one of them leaves alone has its size and no error" in table


POINTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, 2.0, 2.5, math.inf])))


@given(POINTS)
def test_the_front_is_that_of_a_sweep_from_the_cheapest_on(points: list[tuple[int, float]]) -> None:
    lowest: dict[int, float] = {}
    for size, group in itertools.groupby(sorted(points), key=lambda point: point[0]):
        least = min(error for _, error in group)
        if not lowest or least < min(lowest.values()):
            lowest[size] = least
    assert front(points) == [lowest.get(size) == error for size, error in points]


def test_rows_are_ordered_and_the_front_is_marked() -> None:
    rows = compared(*SWEEP, "--presets", "nvfp4,mxfp4,w4a16,int2")["combinations"]
    points = [(row["overall_bits_per_weight"], row["overall_relative_error"]) for row in rows]
    assert points == sorted(points)
    for row, (bits, error) in zip(rows, points, strict=True):
        better = [p for p in points if p[0] <= bits and p[1] <= error and p != (bits, error)]
        assert row["pareto"] == (not better)
    assert 1 < sum(row["pareto"] for row in rows) < len(rows)


def test_what_makes_no_sense_is_left_out_with_the_reason() -> None:
    told = compared("--dtypes", "int8,float8e4m3fn", "--block-sizes", "32,tensor", "--methods",
                    "absmax,minmax,entropy", "--presets", "nvfp4")  # fmt: skip
    assert {row["words"] for row in told["combinations"]} == {
        "dtype=int8, block_size=32, method=absmax", "dtype=int8, block_size=32, method=minmax",
        "dtype=int8, block_size=32, method=entropy",
        "dtype=float8e4m3fn, block_size=32, method=absmax", "preset=nvfp4, method=absmax",
    }  # fmt: skip
    assert len(told["left_out"]) == 2 * 2 * 3 + 3 - 5
    assert told["left_out"][0] == {
        "words": "dtype=int8, method=absmax", "preset": None, "dtype": "int8",
        "block_size": "tensor", "method": "absmax", "reason": "--block-sizes tensor: "
        "`qtool quantize` has one scale per tensor for a bare array alone",
    }  # fmt: skip
    reasons = {(r["words"], r["block_size"]): r["reason"] for r in told["left_out"]}
    assert reasons["dtype=float8e4m3fn, block_size=32, method=minmax", 32] == (
        "method: float8e4m3fn has no zero point to shift its grid by"
    )
    assert reasons["preset=nvfp4, method=entropy", None] == (
        "method: entropy needs codes in equal steps, float4e2m1 has others"
    )
    table = ok("compare", "m.safetensors", "--dtypes", "int8,float8e4m3fn", "--block-sizes", "32",
               "--methods", "absmax,minmax").out.decode()  # fmt: skip
    assert table.endswith(
        "left out: float8e4m3fn /32 minmax: "
        "method: float8e4m3fn has no zero point to shift its grid by\n"
    )
    options = ("--layout", "matmul-nbits", "--dtypes", "int4", "--block-sizes", "axis,24,32")
    told = compared(*options, source=source("m.onnx"))
    assert [row["reason"] for row in told["left_out"]] == [
        "--layout: MatMulNBits has blocks", "--block-size: 24 is no block size of MatMulNBits",
    ]  # fmt: skip


def test_an_array_may_have_one_scale() -> None:
    x = TENSORS["a.weight"]
    np.save("x.npy", x)
    told = compared("--dtypes", "int8", "--block-sizes", "tensor,axis", source="x.npy")
    one, per_row = by_words(told)["dtype=int8"], by_words(told)["dtype=int8, axis=0"]
    errors = [rounded(x, 127, n).astype(float) - x for n in (x.size, 256)]
    for row, error in zip((one, per_row), errors, strict=True):
        assert row["rmse"] == pytest.approx(math.sqrt(np.square(error).mean()), rel=1e-12)
    assert [row["granularity"] for row in (one, per_row)] == ["per_tensor", "per_axis"]
    line = refused("compare", "x.npy", "--dtypes", "int8", "--block-sizes", "tensor", "--axis", "1",
                   code=2)  # fmt: skip
    assert line == "--axis: means one scale per index along it, not per tensor"


def test_without_options_there_is_something_to_choose_from() -> None:
    told = compared()
    assert {row["words"] for row in told["combinations"]} == {
        f"dtype={d}{b}" for d in ("int8", "int4", "float8e4m3fn")
        for b in ("", ", block_size=32", ", block_size=128")
    }  # fmt: skip
    assert [row["words"] for row in compared("--presets", "w4a16")["combinations"]] == [
        "preset=w4a16"
    ]


def test_the_options_of_quantize_hold_for_all() -> None:
    options = ("--scale-dtype", "float16", "--asymmetric", "--exclude", "c*")
    told = compared("--dtypes", "int4,int8", "--block-sizes", "64", *options)
    for row in told["combinations"]:
        totals = quantized("m.safetensors", row["words"], *options)["totals"]
        assert {k: row[k] for k in FIGURES} == {k: totals[k] for k in FIGURES}
        assert (row["tensors"], row["scale_dtype"], row["symmetric"]) == (2, "float16", False)
    assert told["settings"] == {
        "dtypes": ["int4", "int8"], "block_sizes": ["64"], "methods": [], "presets": [],
        "candidates": [], "axis": None, "symmetric": False, "scale_dtype": "float16",
        "nonfinite": None, "source_dtype": None, "include": [], "exclude": ["c*"],
        "importance": [], "layout": None, "requantize": False,
    }  # fmt: skip
    done = ok("compare", "m.safetensors", "--dtypes", "int8", "--exclude", "nope*")
    assert done.err == "warning: pattern 'nope*' matches no tensor\n"


def test_values_that_are_no_numbers_stop_it_as_they_stop_quantize() -> None:
    x = TENSORS["a.weight"].copy()
    x[3, 5] = np.nan
    save_file({"ok": TENSORS["b.weight"], "bad": x}, "m.safetensors")
    line = refused("compare", "m.safetensors")
    assert line == refused("quantize", "m.safetensors", "--dtype", "int8", "-o", "q.safetensors")
    assert "bad" in line
    told = compared("--dtypes", "int8", "--block-sizes", "32", "--nonfinite", "allow")
    totals = quantized("m.safetensors", "dtype=int8, block_size=32", "--nonfinite", "allow")
    assert {k: told["combinations"][0][k] for k in FIGURES} == {
        k: totals["totals"][k] for k in FIGURES
    }
    assert told["warnings"] == ["quantized 1 NaN in 1 tensor"]


def test_a_quantized_source_needs_the_word() -> None:
    ok("quantize", "m.safetensors", "--dtype", "int8", "-o", "8.safetensors")
    assert refused("compare", "8.safetensors").startswith("8.safetensors: is quantized already")
    told = compared("--requantize", "--dtypes", "int4", source="8.safetensors")
    row = by_words(told)["dtype=int4, block_size=32"]
    totals = quantized("8.safetensors", row["words"], "--requantize")["totals"]
    assert {k: row[k] for k in FIGURES} == {k: totals[k] for k in FIGURES}
    folder = save(Path("f"), [TENSORS])
    (folder / "config.json").write_text('{"quantization_config": {}}')
    assert "says that the weights are quantized already" in refused("compare", "f")


def test_it_reads_pipes_and_odd_names() -> None:
    data = Path("m.safetensors").read_bytes()
    for src, stdin in (("-", data), ("an ödd näme.safetensors", b"")):
        if src != "-":
            Path(src).write_bytes(data)
        told = ok("compare", src, "--json", "--dtypes", "int8", stdin=stdin).json
        assert told["source"] == {
            "name": src, "container": "safetensors", "bytes": len(data), "tensors": 4
        }  # fmt: skip
        rows = compared("--dtypes", "int8")["combinations"]
        timeless = [{**row, "seconds": 0} for row in told["combinations"]]
        assert timeless == [{**row, "seconds": 0} for row in rows]
    table = ok("compare", "-", "--dtypes", "int8", stdin=data).out.decode()
    assert table.startswith("standard input: safetensors, ")
    line = refused("compare", "-", "--dtypes", "int8", stdin=b"no tensors at all")
    assert line.startswith("standard input: ")
    line = refused("compare", "-", "--include", "nope", stdin=data)
    assert line == ("standard input: nothing to quantize: not included (4), pattern 'nope' matches "
                    "no tensor")  # fmt: skip


def test_a_model_without_tensors_has_no_figures() -> None:
    save_file({}, "m.safetensors")
    [row] = compared("--presets", "w4a16")["combinations"]
    assert (row["tensors"], row["bits_per_weight"], row["rmse"], row["worst"]) == (0, None) + (
        None,
    ) * 2
    assert row["pareto"]
    save_file({"zero": np.zeros((64, 64), np.float32)}, "m.safetensors")
    [row] = compared("--presets", "w4a16")["combinations"]
    assert (row["rmse"], row["sqnr_db"], row["overall_relative_error"]) == (0, None, None)
    assert " exact " in ok("compare", "m.safetensors", "--presets", "w4a16").out.decode()


def parsed(text: str) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def test_csv_has_the_same_figures() -> None:
    args = ("m.safetensors", *SWEEP, "--presets", "fp8-block", "--per-tensor")
    told = ok("compare", *args, "--json", "--csv", "c.csv").json
    rows = parsed(Path("c.csv").read_text())
    combos = [row for row in rows if not row["tensor"] and not row["left_out"]]
    for row, wanted in zip(combos, told["combinations"], strict=True):
        for name in (*FIGURES, "seconds", "overall_bits_per_weight"):
            assert row[name] == ("" if wanted[name] is None else repr(wanted[name]))
        assert row["pareto"] == str(wanted["pareto"]).lower()
        assert row["worst"] == wanted["worst"]["name"]
        assert float(row["worst_sqnr_db"]) == wanted["worst"]["sqnr_db"]
    assert {row["tile"] for row in combos} == {"", "128x128"}
    tensors = [row for row in rows if row["tensor"]]
    assert len(tensors) == 3 * len(combos)
    figures = [r for c in told["combinations"] for r in c["per_tensor"]]
    assert [float(row["rmse"]) for row in tensors] == [row["rmse"] for row in figures]
    left_out = [row for row in rows if row["left_out"]]
    assert [row["words"] for row in left_out] == [row["words"] for row in told["left_out"]]
    printed = parsed(ok("compare", *args, "--csv", "-").out.decode())
    assert [{**row, "seconds": ""} for row in printed] == [{**row, "seconds": ""} for row in rows]


def test_no_name_becomes_a_formula() -> None:
    names = (
        "=cmd|' /C calc'!A0",
        "+1",
        "-2",
        "@sum",
        "\t=1",
        "\r=1",
        " =1",
        'a,"b"\nc',
        "ü",
        "a=b",
    )
    save_file({name: weight(32, 1) for name in names}, "m.safetensors")
    out = ok("compare", "m.safetensors", "--presets", "w4a16", "--per-tensor", "--csv", "-").out
    found = {row["tensor"] for row in parsed(out.decode())} - {""}
    shown = [name.translate(str.maketrans("\t\r\n", "???")) for name in names]
    assert found == {f"'{name}" for name in shown[:7]} | set(shown[7:])
    for row in parsed(out.decode()):
        for cell in row.values():
            assert not cell.startswith(("=", "+", "@", "\t", "\r"))
            if cell.startswith("-"):
                float(cell)


def test_a_file_is_not_replaced_unasked() -> None:
    Path("c.csv").write_text("mine")
    line = refused("compare", "m.safetensors", "--csv", "c.csv")
    assert line == "c.csv: exists already; choose another name or --force"
    line = refused("compare", "m.safetensors", "--csv", "m.safetensors", "--force")
    assert line == "m.safetensors: is the source, m.safetensors; choose another name"
    assert refused("compare", "m.safetensors", "--csv", "no/c.csv").startswith("no/c.csv: ")
    assert Path("c.csv").read_text() == "mine"
    table = ok("compare", "m.safetensors", "--csv", "c.csv", "--force").out.decode()
    assert table.startswith("m.safetensors: safetensors, 148.8 kB, 4 tensors\n")
    assert len(parsed(Path("c.csv").read_text())) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtypes itn4,int8", "--dtypes: 'itn4' is unknown; did you mean int4 or uint4?"),
        ("--dtypes int8,,int4", "--dtypes: '' is unknown; use int2, "),
        ("--block-sizes 32,axes", "--block-sizes: 'axes' is unknown; did you mean axis?"),
        ("--block-sizes 0", "--block-sizes: '0' is unknown; use axis, tensor, a whole number such "
         "as 32"),
        ("--methods ms", "--methods: 'ms' is unknown; did you mean mse?"),
        ("--methods percentile:200", "--methods: percentile 200 is outside (0, 100]; "
         "use for example percentile:99.9"),
        ("--presets nvpf4", "--presets: 'nvpf4' is unknown; did you mean nvfp4?"),
        ("--presets w4a16 --block-sizes 32", "--block-sizes: presets and candidates say how long "
         "their blocks are; give --dtypes too, or leave it out"),
        ("--candidates int4:32,in8",
         "candidate 'int4:32,in8': dtype: 'in8' is unknown; did you mean int8 or uint8?"),
        ("--json --csv -", "--csv -: contradicts --json; leave one of them out"),
        ("--per-tensor", "--per-tensor: the table has no room for it; add --json or --csv"),
        ("--layout mlc", "--layout: 'mlc' is unknown; did you mean mlx?"),
        ("--layout matmul-nbits", "--layout: matmul-nbits is for ONNX models, not safetensors"),
        ("--include re:(", "pattern 're:(' is not a regular expression"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_said_with_the_right_one(options: str, message: str) -> None:
    found = refused("compare", "m.safetensors", *options.split(), code=2)
    assert found.replace("'re:(':", "'re:('").startswith(message)


def test_nothing_left_is_an_error_with_the_reasons() -> None:
    line = refused("compare", "m.safetensors", "--dtypes", "float8e4m3fn", "--methods", "minmax",
                   "--presets", "fp8,nvfp4", code=1)  # fmt: skip
    no = "has no zero point to shift its grid by"
    assert line == (
        "m.safetensors: no combination can be quantized: "
        f"dtype=float8e4m3fn, method=minmax: method: float8e4m3fn {no}; "
        f"dtype=float8e4m3fn, block_size=128, method=minmax: method: float8e4m3fn {no}; "
        f"dtype=float8e4m3fn, block_size=32, method=minmax: method: float8e4m3fn {no}; and 2 more"
    )
    line = refused("compare", "m.safetensors", "--dtypes", "float8e4m3fn", "--methods", "minmax",
                   code=2)  # fmt: skip
    assert line == f"--method: float8e4m3fn {no}; quantize float types symmetrically"
    assert refused("compare", "nope.safetensors") == refused("inspect", "nope.safetensors")


def test_the_library_takes_the_same_names() -> None:
    found = library.compare_file(
        Path("m.safetensors"), dtypes=["int8", "int4"], block_sizes=[32, "axis"], methods="mse",
        candidates=["int2:32"],
    )  # fmt: skip
    told = compared("--dtypes", "int8,int4", "--block-sizes", "32,axis", "--methods", "mse",
                    "--candidates", "int2:32")  # fmt: skip
    for result in (found, told):
        for row in result["combinations"]:
            row["seconds"] = 0
    assert found == told
    assert found["tool"]["name"] == "qtool"


def test_the_table_has_80_columns() -> None:
    onnx_file = str(model(**{"w" * 90: weight(256, 1)}))
    assert onnx.load(onnx_file).graph.initializer[0].name == "w" * 90
    environment = {**os.environ, "COLUMNS": "80", "TTY_COMPATIBLE": "1"}
    done = process("compare", onnx_file, *SWEEP, env=environment)
    assert done.returncode == 0, done.stderr
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.decode()).splitlines()
    assert lines[1].split() == ["type", "method", "bits", "SQNR", "worst", "size", "time"]
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.startswith("*") for line in lines) > 3
    assert len(lines) == 3 * 3 * 2 + 3
    wide = ok("compare", onnx_file, *SWEEP).out.decode().splitlines()[1]
    assert wide.endswith("time  max error  worst tensor")


def test_a_closed_pipe_ends_it_quietly() -> None:
    done = process("compare", "m.safetensors", "--csv", "-", stdin=None)
    assert (done.returncode, done.stderr) == (0, b"")
    assert strict(qtool("compare", "m.safetensors", "--json", "-q").out.decode())

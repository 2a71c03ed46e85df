"""qtool quantize --strict: exit code 3 wherever something is not quantized as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import save
from command import Done, ok, qtool, strict
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import qtool as library
from qtool.errors import GateError

RNG = np.random.default_rng(7)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


TENSORS = {
    "a.weight": weight(32, 64),
    "b.weight": weight(32, 64),
    "b.bias": weight(32),
    "ragged.weight": weight(32, 40),
    "tiny.weight": weight(2, 1),
}
OLD = b"what was there before"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with weights in it and an old target."""
    monkeypatch.chdir(tmp_path)
    save_file(TENSORS, "m.safetensors")
    Path("q.safetensors").write_bytes(OLD)


def run(*options: str, source: str = "m.safetensors", target: str = "q.safetensors") -> Done:
    return qtool("quantize", source, "-o", target, "--force", "--strict", "--quiet", *options)


def failures(done: Done) -> list[tuple[str | None, str]]:
    """What a run has failed on, as its report says, which is there; its target is as it was."""
    assert done.code == 3
    assert Path("q.safetensors").read_bytes() == OLD
    assert not [*Path().glob(".*.qtool-*")]
    told = strict(Path("q.report.json").read_text())
    assert told["strict"]["passed"] is False
    found = [(f["tensor"], f["reason"]) for f in told["strict"]["failed"]]
    said = [line for line in done.err.splitlines() if line.startswith("qtool: ")]
    assert said == [f"qtool: {name or 'm.safetensors'}: {why} (--strict)" for name, why in found]
    return found


NO_TINY = ("--exclude", "tiny*")

PASSES = [
    pytest.param(["--dtype", "int8", *NO_TINY], id="what is chosen by default is quantized"),
    pytest.param(["--dtype", "int4", "--block-size", "32", *NO_TINY], id="a shorter last block"),
    pytest.param(["--dtype", "int8", "--include", "b*"], id="a pattern matches a bias too"),
    pytest.param(["--rule", "b*: dtype=int8"], id="a rule matches a bias too"),
    pytest.param(["--dtype", "int8", "--rule", "t*: skip"], id="what is skipped"),
    pytest.param(["--dtype", "int8", *NO_TINY, "--rule", "tiny*: dtype=int4"], id="excluded"),
    pytest.param(["--preset", "w4a16", "--block-size", "32", "--layout", "compressed-tensors",
                  "--include", "?.weight"], id="whole blocks"),
]  # fmt: skip


@pytest.mark.parametrize("options", PASSES)
def test_what_is_as_asked_passes(options: list[str]) -> None:
    done = run(*options)
    assert done.code == 0, done.err
    assert Path("q.safetensors").read_bytes() != OLD
    told = strict(Path("q.report.json").read_text())
    assert told["strict"] == {"passed": True, "failed": []}


NOT_SMALLER = "would not get smaller as int8"
FAILS = [
    pytest.param(["--dtype", "int8"], [("tiny.weight", NOT_SMALLER)], id="not smaller"),
    pytest.param(
        ["--preset", "w4a16", "--block-size", "32", "--layout", "compressed-tensors",
         "--include", "r*"],
        [("ragged.weight",
          "compressed-tensors needs rows of whole blocks of 32, not of 40"),
         (None, "nothing is quantized: not included (4), "
                "compressed-tensors needs rows of whole blocks of 32, not of 40 (1)")],
        id="ragged",
    ),
    pytest.param(["--dtype", "int8", *NO_TINY, "--rule", "c*: dtype=int4"],
                 [(None, "pattern 'c*' matches no tensor")], id="rule matches nothing"),
    pytest.param(["--dtype", "int8", *NO_TINY, "--exclude", "re:^x"],
                 [(None, "pattern 're:^x' matches no tensor")], id="exclude matches nothing"),
    pytest.param(["--dtype", "int8", "--include", "a*", "--include", "c.weight"],
                 [(None, "pattern 'c.weight' matches no tensor")], id="include matches nothing"),
    pytest.param(["--dtype", "int8", "--include", "b.bias", "--include", "b.weight"],
                 [("b.bias", "rank below 2")], id="a bias by its own name"),
    pytest.param(["--dtype", "int8", *NO_TINY, "--rule", "b.bias: dtype=int4"],
                 [("b.bias", "rank below 2")], id="a rule with a bias by its own name"),
    pytest.param(["--include", "?.weight", "--rule", "a*: dtype=int8"],
                 [("b.weight", "no rule gives it a type")], id="no type"),
    pytest.param(["--dtype", "int8", "--include", "none"],
                 [(None, "pattern 'none' matches no tensor"),
                  (None, "nothing is quantized: not included (5)")], id="nothing"),
    pytest.param(["--dtype", "int8", "--exclude", "*", "--allow-empty"],
                 [(None, "nothing is quantized: excluded (5)")], id="nothing, though allowed"),
    pytest.param(["--preset", "w4a16", "--block-size", "32", "--layout", "compressed-tensors",
                  *NO_TINY],
                 [("ragged.weight",
                   "compressed-tensors needs rows of whole blocks of 32, not of 40")],
                 id="one of several is ragged"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), FAILS)
def test_what_is_not_as_asked_fails(
    options: list[str], expected: list[tuple[str | None, str]]
) -> None:
    assert failures(run(*options)) == expected


def test_without_strict_the_same_is_a_warning_at_most() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--force", "--dtype", "int8",
       "--rule", "c*: dtype=int4")  # fmt: skip
    told = strict(Path("q.report.json").read_text())
    assert told["strict"] is None
    assert told["warnings"] == ["pattern 'c*' matches no tensor"]


def test_every_tensor_with_nan_and_inf_is_named() -> None:
    planted = {name: values.copy() for name, values in TENSORS.items()}
    planted["a.weight"][3, 4] = np.nan
    planted["b.weight"][:2, 0] = np.inf, -np.inf
    planted["b.weight"][7, 7] = np.nan
    save_file(planted, "m.safetensors")
    found = failures(run("--dtype", "int4", "--block-size", "32", *NO_TINY))
    assert found == [("a.weight", "holds 1 NaN"), ("b.weight", "holds 1 NaN and 2 Inf")]
    allowed = run("--dtype", "int8", *NO_TINY, "--nonfinite", "allow")
    assert failures(allowed) == found
    kept = failures(run("--dtype", "int8", *NO_TINY, "--include", "ragged*"))
    assert kept == [("a.weight", "holds NaN"), ("b.weight", "holds NaN")]


@pytest.mark.parametrize("dtype", ["float8e4m3fn", "float8e5m2", "float8e4m3fnuz"])
def test_codes_that_are_not_finite_count_where_the_values_are(dtype: str) -> None:
    options = ["--dtype", dtype, "--no-saturate", "--scale", "1", "--include", "a*"]
    run(*options)
    assert Path("q.safetensors").read_bytes() != OLD
    a = TENSORS["a.weight"].copy()
    a[3, 5] = 1e6
    save_file({"a.weight": a}, "m.safetensors")
    Path("q.safetensors").write_bytes(OLD)
    found = failures(run(*options))
    assert found == [("a.weight", "holds codes that are not finite, of values that are")]
    done = ok("quantize", "m.safetensors", "-o", "n.safetensors", *options)
    assert "warning: 1 tensor with finite values that became NaN or Inf" in done.err
    assert qtool("verify", "m.safetensors", "n.safetensors").code == 3


def test_large_tensors_with_nan_are_named_too() -> None:
    """By the kernels."""
    values = weight(1024, 2048)
    values[1000, 2000] = np.nan
    save_file({"w": values, "v": values[:10].copy()}, "m.safetensors")
    assert failures(run("--dtype", "int8")) == [("w", "holds 1 NaN")]


def test_what_the_layout_leaves_alone_by_custom() -> None:
    save_file({"lm_head.weight": weight(32, 64), "a.weight": weight(32, 64)}, "m.safetensors")
    layout = ("--preset", "w4a16", "--block-size", "32", "--layout", "compressed-tensors")
    assert run(*layout).code == 0
    Path("q.safetensors").write_bytes(OLD)
    found = failures(run(*layout, "--rule", "lm_head*: dtype=int4"))
    assert found == [
        ("lm_head.weight", "left alone by custom of the layout; --include '*' takes it too")
    ]


def test_a_scale_that_is_not_given() -> None:
    np.savez("scales.npz", **{"a.weight.scale": np.full(32, 0.1, np.float32)})
    found = failures(run("--dtype", "int8", "--scale", "scales.npz", "--include", "?.weight"))
    assert found == [("b.weight", "no scale is given for it")]


def test_a_plan_fails_before_any_work() -> None:
    done = run("--dtype", "int8", "--dry-run", "--rule", "c*: dtype=int4", *NO_TINY)
    assert done.code == 3
    assert "pattern 'c*' matches no tensor (--strict)" in done.err
    assert run("--dtype", "int8", "--dry-run", *NO_TINY).code == 0


def test_json_says_it_too() -> None:
    done = qtool("quantize", "m.safetensors", "-o", "q.safetensors", "--force", "--strict",
                 "--dtype", "int8", "--json", "-q")  # fmt: skip
    assert done.code == 3
    assert done.json["strict"]["failed"] == [{"tensor": "tiny.weight", "reason": NOT_SMALLER}]


def test_the_table_says_that_nothing_is_written() -> None:
    done = qtool("quantize", "m.safetensors", "-o", "q.safetensors", "--force", "--strict",
                 "--dtype", "int8")  # fmt: skip
    assert done.err.splitlines()[-2].endswith(" times smaller, not written")


def test_from_python() -> None:
    with pytest.raises(GateError) as raised:
        library.quantize_file("m.safetensors", "new.safetensors", dtype="int8", strict=True)
    assert str(raised.value) == f"tiny.weight: {NOT_SMALLER} (--strict)"
    assert raised.value.report["totals"]["tensors"] == 3
    assert not Path("new.safetensors").exists()


def test_standard_output_stays_empty() -> None:
    done = run("--dtype", "int8", target="-")
    assert (done.code, done.out) == (3, b"")


def test_dynamic_is_strict_too() -> None:
    """DynamicQuantizeLinear takes every rank, so that nothing but patterns and values can fail."""
    done = qtool("dynamic", "m.safetensors", "-o", "q.safetensors", "--force", "--strict",
                 "--exclude", "c*", "--quiet", *NO_TINY)  # fmt: skip
    assert failures(done) == [(None, "pattern 'c*' matches no tensor")]


def model() -> None:
    """Two products: by a weight, and by one that an Add reads besides."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Add", ["y", "c"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 64])],
        [numpy_helper.from_array(weight(64, 64), "w"), numpy_helper.from_array(weight(4, 64), "c")],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, "m.onnx")


@pytest.mark.parametrize("more", [[], ["--external-data"]])
def test_a_model_and_its_data_do_not_appear(more: list[str]) -> None:
    model()
    done = run("--dtype", "int8", "--rule", "v: dtype=int4", *more, source="m.onnx",
               target="q.onnx")  # fmt: skip
    assert done.code == 3
    assert "qtool: m.onnx: pattern 'v' matches no tensor (--strict)" in done.err
    assert sorted(path.name for path in Path().glob("q.*")) == ["q.report.json", "q.safetensors"]


def folder(fails: bool) -> Any:
    save(Path("folder"), [{"a.weight": weight(32, 64)}, {"b.weight": weight(32, 64)}])
    rule = ["--rule", "c*: skip"] if fails else []
    return lambda *more: qtool("quantize", "folder", "-o", "out", "--dtype", "int8", "--strict",
                               "--quiet", *rule, *more)  # fmt: skip


def test_a_folder_does_not_appear() -> None:
    done = folder(fails=True)()
    assert done.code == 3
    assert not Path("out").exists()
    assert not Path("out.partial").exists()
    told = strict(Path("out.report.json").read_text())
    assert told["strict"]["failed"] == [
        {"tensor": None, "reason": "pattern 'c*' matches no tensor"}
    ]
    assert done.err.endswith("qtool: folder: pattern 'c*' matches no tensor (--strict)\n")


def test_a_folder_that_is_as_asked_appears() -> None:
    assert folder(fails=False)().code == 0
    assert Path("out", "model.safetensors.index.json").exists()


def test_shards_are_kept_where_the_run_may_be_resumed() -> None:
    run = folder(fails=True)
    assert run("--resume").code == 3
    assert not Path("out").exists()
    assert sorted(path.name for path in Path("out.partial", "shards").iterdir()) == [
        "model-00001-of-00002.safetensors.json", "model-00002-of-00002.safetensors.json",
    ]  # fmt: skip


def test_slices_are_strict() -> None:
    run = folder(fails=True)
    assert run("--shards", "1/2").code == 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_nan_in_what_is_left_alone(dtype: type) -> None:
    bias = weight(32).astype(dtype)
    bias[[3, 5]] = np.inf, -np.inf  # as in masks
    save_file(TENSORS | {"b.bias": bias}, "m.safetensors")
    assert run("--dtype", "int8", *NO_TINY).code == 0
    ok("verify", "m.safetensors", "q.safetensors")
    Path("q.safetensors").write_bytes(OLD)
    bias[31] = np.nan
    save_file(TENSORS | {"b.bias": bias}, "m.safetensors")
    assert failures(run("--dtype", "int8", *NO_TINY)) == [("b.bias", "holds NaN")]
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--force", "--dtype", "int8")
    done = qtool("verify", "m.safetensors", "q.safetensors", "-q")
    assert (done.code, done.err) == (3, "qtool: b.bias: holds NaN\n")


def test_nan_in_what_a_folder_leaves_alone() -> None:
    save(Path("folder"), [{"a.weight": weight(32, 64)}, {"n": np.full(4, np.nan, np.float32)}])
    done = qtool("quantize", "folder", "-o", "out", "--dtype", "int8", "--strict", "-q")
    assert (done.code, done.err) == (3, "qtool: n: holds NaN (--strict)\n")
    assert not Path("out").exists()

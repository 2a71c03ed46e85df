"""--fail-if and --baseline on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save, tensors
from command import Done, float32, leftovers, ok, qtool, refused, report, strict
from safetensors.numpy import save_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x = np.random.default_rng(5).normal(size=(2, 32, 64)).astype(np.float32)
    x[1, 0, 0] = 40  # a bad layer: one scale for a tensor with an outlier
    tensors = {"good.weight": x[0], "bad.weight": x[1], "ones.weight": float32(np.ones((32, 64)))}
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def quantized(model: Path, *options: str | Path) -> tuple[Done, Path]:
    target = model.with_name("y.safetensors")
    return qtool("quantize", model, "-o", target, "--dtype", "int8", *options), target


def test_a_gate_stops_the_release(model: Path) -> None:
    done, target = quantized(model, "--axis", "0", "--fail-if", "max_abs_error > 0.1 on *.weight")
    assert done.code == 3
    assert not target.exists()
    assert leftovers(model.parent) == []
    (entry,) = report(target)["gates"]
    (failed,) = entry["failed"]
    assert (failed["tensor"], failed["limit"]) == ("bad.weight", "max_abs_error > 0.1")
    error = f"{failed['figures']['max_abs_error']:.10g}"
    line = f"qtool: bad.weight: max_abs_error is {error}, fails 'max_abs_error > 0.1'"
    assert done.err.splitlines()[-1] == line
    assert "failed: --fail-if 'max_abs_error > 0.1 on *.weight'" in done.err


def test_gates_that_hold_are_listed(model: Path) -> None:
    gates = ["--fail-if", "sqnr_db < 20", "--fail-if", "total.bits_per_weight > 8.6"]
    done, target = quantized(model, "--axis", "0", *gates)
    assert done.code == 0, done.err
    assert target.exists()
    assert done.err.splitlines()[-3:] == [
        "passed: --fail-if 'sqnr_db < 20'", "  passed as exact: ones.weight",
        "passed: --fail-if 'total.bits_per_weight > 8.6'",
    ]  # fmt: skip
    assert [entry["passed"] for entry in report(target)["gates"]] == [True, True]


def test_an_older_output_stays(model: Path) -> None:
    _, target = quantized(model)
    before = target.read_bytes()
    done, _ = quantized(model, "--force", "--quiet", "--fail-if", "sqnr_db < 99 on good*")
    assert (done.code, target.read_bytes()) == (3, before)
    assert done.err.count("\n") == 1
    assert done.err.startswith("qtool: good.weight: sqnr_db is ")


def test_a_gate_without_a_tensor_fails(model: Path) -> None:
    done, _ = quantized(model, "--quiet", "--fail-if", "sqnr_db < 1 on lm_head*")
    assert done.code == 3
    text = "'sqnr_db < 1 on lm_head*': 'lm_head*' matches no quantized tensor"
    assert done.err == f"qtool: --fail-if: {text}\n"


def test_a_regression_against_a_baseline_fails(model: Path) -> None:
    ok("quantize", model, "--dtype", "int8", "--block-size", "32", "--report", model.parent / "old")
    compare = ["--baseline", model.parent / "old", "--fail-if", "sqnr_db worse by 0.5"]
    done, target = quantized(model, "--axis", "0", "--quiet", *compare)
    assert done.code == 3, done.err
    old = {r["name"]: r for r in json.loads((model.parent / "old").read_text())["tensors"]}
    new = {r["name"]: r for r in report(target)["tensors"]}
    pairs = {name: (new[name]["sqnr_db"], old[name]["sqnr_db"]) for name in old}
    assert pairs.pop("ones.weight") == (None, None)
    assert pairs["bad.weight"][1] - pairs["bad.weight"][0] > 2
    assert {
        f["tensor"]: (f["figures"]["sqnr_db"], f["figures"]["baseline.sqnr_db"])
        for f in report(target)["gates"][0]["failed"]
    } == {name: (now, was) for name, (now, was) in pairs.items() if was - now > 0.5}
    done, _ = quantized(model, "--block-size", "32", "--force", *compare)
    assert done.code == 0, done.err


def test_a_planted_nan_fails(model: Path) -> None:
    save_file({"w": float32(np.full((32, 64), np.nan)), "v": float32(np.ones((32, 64)))}, model)
    gates = ["--nonfinite", "allow", "--fail-if", "sqnr_db < 20", "--quiet"]
    done, target = quantized(model, *gates)
    assert done.code == 3
    assert done.err.splitlines()[-1] == (
        "qtool: w: sqnr_db is undefined (non-finite values), fails 'sqnr_db < 20'"
    )
    assert not target.exists()


def test_wrong_usage(model: Path) -> None:
    start = ["quantize", model, "--dtype", "int8"]
    assert refused(*start, "--fail-if", "sqnr < 20", code=2) == (
        "--fail-if: 'sqnr < 20': there is no figure 'sqnr' at column 1; did you mean sqnr_db?"
    )
    gate = ["--fail-if", "sqnr_db worse by 1"]
    assert "--baseline" in refused(*start, *gate, code=2)
    assert refused(*start, *gate, "--baseline", model) == (
        f"{model}: is no JSON object (it does not begin as one); give a report that qtool has "
        "written"
    )
    plan = ok(*start, "--dry-run", "--json", "--fail-if", "total.file_bytes_after > 1 MB")
    assert plan.json["gates"][0]["passed"]
    assert "measures no mse" in refused(*start, "--dry-run", "--fail-if", "mse > 1", code=2)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_folder_that_fails_does_not_appear(more: list[str], tmp_path: Path) -> None:
    """Its shards are kept where the run may be resumed with other limits."""
    save(tmp_path / "m", [tensors([0, 1]), tensors([2])], others=False)
    words = ["quantize", tmp_path / "m", "-o", tmp_path / "q", "--dtype", "int4", *more]
    done = qtool(*words, "--fail-if", "sqnr_db < 99 on *layers.2*")
    assert done.code == 3
    assert "qtool: model.layers.2.mlp.down_proj.weight: sqnr_db is " in done.err
    left = {path.name for path in tmp_path.iterdir()} - {"m", "q.report.json"}
    assert left == ({"q.partial"} if more else set())
    told = strict((tmp_path / "q.report.json").read_text())
    assert [entry["passed"] for entry in told["gates"]] == [False]
    ok(*words, "--fail-if", "sqnr_db < 9")
    assert (tmp_path / "q" / "model.safetensors.index.json").exists()


def test_slices_are_judged_when_they_are_put_together(tmp_path: Path) -> None:
    save(tmp_path / "m", [tensors([0, 1]), tensors([2])], others=False)
    words = ["quantize", tmp_path / "m", "-o", tmp_path / "q", "--dtype", "int4", "--shards"]
    line = refused(*words, "1/2", "--fail-if", "sqnr_db < 9", code=2)
    assert line == "--fail-if: a slice is not judged; give it to `qtool finish`"
    for number in (1, 2):
        ok(*words, f"{number}/2")
    done = qtool("finish", tmp_path / "q", "--fail-if", "total.sqnr_db < 99", "--json", "-q")
    assert done.code == 3
    [entry] = done.json["gates"]
    assert [failed["tensor"] for failed in entry["failed"]] == [None]
    assert not (tmp_path / "q").exists()
    ok("finish", tmp_path / "q", "--fail-if", "total.sqnr_db < 9")
    assert (tmp_path / "q").is_dir()


def test_a_tensor_without_a_name_is_not_called_totals(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    save_file({"": values}, tmp_path / "m.safetensors")
    more = ["-o", tmp_path / "q.safetensors", "--dtype", "int8", "-q", "--fail-if"]
    done = qtool("quantize", tmp_path / "m.safetensors", *more, "mse > 0")
    assert done.code == 3
    assert done.err.startswith("qtool: '': mse is ")
    done = qtool("quantize", tmp_path / "m.safetensors", *more, "total.mse > 0")
    assert done.err.startswith("qtool: totals: mse is ")


def test_a_limit_is_told_whole_however_long(model: Path) -> None:
    limit = "max_abs_error > 0.1 and total.bits_per_weight > 4.6 and not total.sqnr_db > 90 dB"
    done, _ = quantized(model, "-q", "--axis", "0", "--fail-if", limit)
    assert done.code == 3
    (line,) = done.err.splitlines()
    assert line.startswith("qtool: bad.weight: max_abs_error is ")
    assert line.endswith(f"fails {limit!r}")


def test_many_failures_are_cut_short(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((25, 16, 16)).astype(np.float32)
    save_file({f"w{n:02}": x for n, x in enumerate(values)}, tmp_path / "m.safetensors")
    done = qtool("quantize", tmp_path / "m.safetensors", "--dtype", "int8", "-q", "--fail-if",
                 "mse > 0")  # fmt: skip
    lines = done.err.splitlines()
    assert len(lines) == 21
    assert lines[-2].startswith("qtool: w19: mse is ")
    assert lines[-1] == "qtool: and 5 more failures, which a report lists (--report FILE)"

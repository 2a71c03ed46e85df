"""qtool verify: exit codes, streams, reports, gates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import onnx
import pytest
from command import ok, process, qtool, refused, strict
from safetensors.numpy import save_file

EXAMPLES = Path(__file__).parent.parent / "examples"
DIGITS = EXAMPLES / "digits.safetensors"


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    path = tmp_path / "digits.int4.safetensors"
    ok("quantize", DIGITS, "-o", path, "--dtype", "int4", "--block-size", "32", "-q")
    return path


def spoiled(path: Path, at: int = -1) -> Path:
    """The file with one bit of its last tensor changed."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    return path


def test_the_table_and_the_verdict(quantized: Path) -> None:
    done = ok("verify", DIGITS, quantized)
    assert done.out == b""
    lines = done.err.splitlines()
    assert lines[:6] == [
        "tensor, worst first  type          SQNR  max error  clipped  bits",
        "fc3.weight           int4 /32  20.98 dB     0.0946   0.781%  5.00",
        "fc2.weight           int4 /32  22.13 dB     0.0797   0.842%  5.00",
        "fc1.weight           int4 /32  22.70 dB     0.0748   0.952%  5.00",
        "3 tensors                      22.24 dB     0.0946   0.893%  5.00",
        "unchanged: 3 tensors",
    ]
    report = quantized.with_suffix(".report.json")
    assert lines[6].startswith(f"{quantized}: agrees with {DIGITS} and {report}, ")
    assert len(lines) == 7
    assert ok("verify", DIGITS, quantized, "--quiet").err == ""


def test_tables_fit_80_columns(quantized: Path, tmp_path: Path) -> None:
    model = tmp_path / "digits.onnx"
    ok("quantize", EXAMPLES / "digits.onnx", "-o", model, "--dtype", "int8", "-q")
    inputs = EXAMPLES / "digits_inputs.npy"
    done = ok("verify", EXAMPLES / "digits.onnx", model, "--run", inputs, "--alone")
    table = done.err.splitlines()[:-1]
    assert "output  relative error  max error   cosine  same argmax" in table
    assert max(map(len, table)) <= 80


def test_a_fault_ends_with_3_and_the_report_is_written(quantized: Path, tmp_path: Path) -> None:
    spoiled(quantized)
    saved = tmp_path / "found.json"
    done = qtool("verify", DIGITS, quantized, "--json", "--report", saved)
    assert done.code == 3
    (problem,) = done.json["problems"]
    assert done.json == strict(saved.read_text())
    assert done.err.splitlines()[-1] == f"qtool: {problem['tensor']}: {problem['problem']}"
    assert f"{quantized}: 1 problem" in done.err.splitlines()
    line = refused("verify", DIGITS, quantized, "--quiet", code=3)
    assert line == f"{problem['tensor']}: {problem['problem']}"


def test_json_is_the_report_alone(quantized: Path, tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    done = ok("verify", DIGITS, quantized, "--json", "--report", saved)
    assert done.json == strict(saved.read_text())
    assert (done.json["command"], done.json["problems"]) == ("verify", [])
    assert [entry["reason"] for entry in done.json["skipped"]] == ["kept"] * 3


def test_either_file_may_come_from_a_pipe(quantized: Path) -> None:
    done = ok("verify", DIGITS, "-", stdin=quantized.read_bytes())
    assert done.err.splitlines()[-1].startswith(f"standard input: agrees with {DIGITS}, ")
    done = ok("verify", "-", quantized, stdin=DIGITS.read_bytes())
    assert " agrees with standard input and " in done.err
    line = refused("verify", "-", "-", code=2)
    assert line == "-: standard input is one file; name the other one"


def test_files_that_cannot_be_read_end_with_1(quantized: Path, tmp_path: Path) -> None:
    assert refused("verify", DIGITS, tmp_path / "none.safetensors").endswith(
        "none.safetensors: cannot be read: No such file or directory"
    )
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"junk")
    refused("verify", junk, quantized)
    line = refused("verify", DIGITS, quantized, "--against", junk)
    assert line == (
        f"{junk}: is no JSON object (it does not begin as one); "
        "name the report of this file, or give --alone"
    )


def test_contradictions_end_with_2(quantized: Path) -> None:
    line = refused("verify", DIGITS, quantized, "--alone", "--against", "x.json", code=2)
    assert line == "--against: contradicts --alone; leave one of them out"
    line = refused("verify", DIGITS, quantized, "--random", "2", code=2)
    assert line.startswith(f"--random: {DIGITS} is no model that runs")
    line = refused("verify", DIGITS, quantized, "--fail-if", "sqnr < 20", code=2)
    assert "sqnr_db" in line


def test_a_report_replaces_no_other_file(quantized: Path) -> None:
    line = refused("verify", DIGITS, quantized, "--report", quantized)
    assert line == f"report {quantized}: is also {quantized}; choose another name"
    report = quantized.with_suffix(".report.json")
    assert "is also" in refused("verify", DIGITS, quantized, "--report", report)


GATES: list[tuple[list[str], int, str]] = [
    (["sqnr_db < 20"], 0, ""),
    (["sqnr_db < 21"], 3, "fc3.weight: sqnr_db is 20.98"),
    (["max_abs_error > 0.09 on fc[12]*", "clipped_fraction > 0.5"], 0, ""),
    (["total.bits_per_weight > 4.6"], 3, "bits_per_weight is 5"),
    (["sqnr_db < 1 on fc9*"], 3, "matches no quantized tensor"),
    (["total.outputs_relative_error > 1"], 3, "outputs_relative_error"),
]  # fmt: skip


@pytest.mark.parametrize(("gates", "code", "message"), GATES, ids=lambda value: str(value)[:40])
def test_gates(gates: list[str], code: int, message: str, quantized: Path) -> None:
    options = [word for gate in gates for word in ("--fail-if", gate)]
    done = qtool("verify", DIGITS, quantized, "--json", *options)
    assert done.code == code
    assert message in done.err
    assert [entry["expression"] for entry in done.json["gates"]] == gates
    assert all(entry["passed"] for entry in done.json["gates"]) == (code == 0)


def test_a_gate_on_outputs(tmp_path: Path) -> None:
    model, original = tmp_path / "q.onnx", EXAMPLES / "digits.onnx"
    ok("quantize", original, "-o", model, "--dtype", "int2", "--block-size", "32", "-q")
    run = ["verify", original, model, "--run", EXAMPLES / "digits_inputs.npy", "-q", "--fail-if"]
    ok(*run, "total.outputs_argmax_agreement < 0.5")
    line = refused(*run, "total.outputs_relative_error > 0.01", code=3)
    assert "outputs_relative_error is" in line


def test_a_baseline(quantized: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse.safetensors"
    ok("quantize", DIGITS, "-o", worse, "--dtype", "int2", "--block-size", "32", "-q")
    baseline = ["--baseline", quantized.with_suffix(".report.json")]
    gate = ["--fail-if", "sqnr_db worse by 0.5", *baseline]
    ok("verify", DIGITS, quantized, *gate)
    done = qtool("verify", DIGITS, worse, *gate, "--quiet")
    assert done.code == 3
    assert [line.split(": ")[1] for line in done.err.splitlines()] == [
        "fc1.weight", "fc2.weight", "fc3.weight",
    ]  # fmt: skip


def test_a_verify_report_is_a_baseline_too(quantized: Path, tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    ok("verify", DIGITS, quantized, "--report", saved, "-q")
    gate = ["--fail-if", "sqnr_db worse by 0", "--baseline", saved]
    ok("verify", DIGITS, quantized, *gate, "-q")


NAMES = ["a b/ü.weight", "名前", "x'\"\\", "new\nline", "[red]bold[/]", "..", "tab\t"]


def test_names_with_odd_characters(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {
        name: rng.standard_normal((8, 64)).astype(np.float32) for name in NAMES
    }
    source, out = tmp_path / "mit Leerzeichen ä.safetensors", tmp_path / "ö ut.safetensors"
    save_file(tensors, source)
    ok("quantize", source, "-o", out, "--dtype", "int8", "-q")
    done = ok("verify", source, out, "--json")
    assert {record["name"] for record in done.json["tensors"]} == set(NAMES)
    del tensors["new\nline"]
    save_file(tensors, source)
    line = refused("verify", source, out, "--alone", "-q", code=3)
    assert line == r"new\nline: is no tensor of ORIGINAL"


def test_the_result_does_not_hang_on_threads_or_locale(quantized: Path, tmp_path: Path) -> None:
    reports = []
    for number, environment in enumerate([{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}]):
        saved = tmp_path / f"{number}.json"
        done = process(
            "verify", str(DIGITS), str(quantized), "--jobs", str(number + 1), "--report",
            str(saved), env={"PATH": "/usr/bin:/bin", **environment, **_python_path()},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports.append({k: v for k, v in json.loads(saved.read_text()).items() if k != "seconds"})
    assert reports[0] == reports[1]


def _python_path() -> dict[str, str]:
    return {k: os.environ[k] for k in ("PYTHONPATH", "HOME") if k in os.environ}


def test_a_copy_that_is_not_quantized_fails(tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(DIGITS.read_bytes())
    done = qtool("verify", DIGITS, copy)
    assert done.code == 3
    assert done.err.splitlines()[-1] == f"qtool: {copy}: nothing in it is quantized"
    ok("quantize", DIGITS, "-o", tmp_path / "none.safetensors", "--dtype", "int8", "--exclude", "*",
       "--allow-empty", "-q")  # fmt: skip
    ok("verify", DIGITS, tmp_path / "none.safetensors")
    ok("verify", DIGITS, tmp_path / "none.safetensors", "--alone")


def test_files_the_other_way_round(quantized: Path) -> None:
    line = refused("verify", quantized, DIGITS)
    assert line == f"{quantized}: is quantized, {DIGITS} is not; give the original first"


def test_what_callers_of_a_model_see(tmp_path: Path) -> None:
    original, quantized = EXAMPLES / "digits.onnx", tmp_path / "q.onnx"
    ok("quantize", original, "-o", quantized, "--dtype", "int8", "-q")
    ok("verify", original, quantized, "--alone")
    model = onnx.load(quantized)
    [image], [logits] = model.graph.input, model.graph.output
    image.type.tensor_type.shape.dim[1].dim_value = 65
    logits.name = "scores"
    onnx.save(model, quantized)
    done = qtool("verify", original, quantized, "--alone", "-q")
    assert done.code == 3
    assert done.err.splitlines() == [
        f"qtool: {quantized}: input {image.name} has another type or shape",
        f"qtool: {quantized}: output logits is missing",
        f"qtool: {quantized}: output scores is none of ORIGINAL",
    ]


def test_the_report_of_another_file_of_that_stem_is_not_taken(quantized: Path) -> None:
    ok("quantize", EXAMPLES / "digits.onnx", "-o", quantized.with_suffix(".onnx"), "--dtype",
       "int8", "-q")  # fmt: skip
    checks = ok("verify", DIGITS, quantized, "--json", "-q").json["checks"]
    assert checks["report"] is None


MISTOLD = {
    "bits": ("--preset w4a16 --layout compressed-tensors --block-size 32", "config.json",
             '"num_bits": 4', '"num_bits": 8',
             "quantization_config.config_groups.group_0.weights.num_bits is 8, its tensors need 4"),
    "blocks": ("--preset w4a16 --layout mlx --block-size 32", "config.json",
               '"group_size": 32', '"group_size": 64', "quantization.group_size is 64, its tensors "
               "need 32"),
    "left-out": ("--preset fp8 --layout modelopt", "hf_quant_config.json", '"lm_head"', '"model*"',
                 'quantization.exclude_modules is ["model*"], its tensors need ["lm_head"]'),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTOLD)
def test_what_a_folder_tells_its_readers_is_checked(kind: str, tmp_path: Path) -> None:
    options, file, old, new, message = MISTOLD[kind]
    layers = [checkpoints.tensors([n], rows=32, columns=128) for n in range(2)]
    folder, quantized = checkpoints.save(tmp_path / "model", layers), tmp_path / "q"
    ok("quantize", folder, "-o", quantized, "-q", *options.split())
    ok("verify", folder, quantized, "-q")
    text = (quantized / file).read_text()
    assert old in text
    (quantized / file).write_text(text.replace(old, new))
    done = qtool("verify", folder, quantized, "-q")
    assert done.code == 3
    assert done.err.splitlines()[0] == f"qtool: {quantized}: {file}: {message}"
    (quantized / file).write_text("[]" if file != "config.json" else "{}")
    done = qtool("verify", folder, quantized, "-q", "--alone")
    assert done.code == 3
    assert f"qtool: {quantized}: {file}: quantization" in done.err

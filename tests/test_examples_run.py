"""The Makefile, the CI job and the Python program among the examples do what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from releases import EXAMPLES
from safetensors.numpy import load_file, save_file

PYTHON = Path(sys.executable)
Done = subprocess.CompletedProcess[str]


def run(folder: Path, *command: str | Path, **environment: str) -> Done:
    """A command in a folder, with this Python and its qtool first on PATH."""
    path = os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository as far as the examples need it."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("build"))
    return tmp_path


def plant_nan(model: Path) -> None:
    tensors = load_file(model)
    tensors["fc2.weight"][0, 0] = np.nan
    save_file(tensors, model)


def test_make_makes_what_is_older_than_its_source(checkout: Path) -> None:
    done = run(checkout, "make", "-C", "examples", "-s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = {p.name for p in (checkout / "examples" / "build").iterdir()}
    assert made == {
        f"digits.{kind}{end}" for kind in ("safetensors", "onnx") for end in ("", ".json", ".html")
    }
    assert run(checkout, "make", "-C", "examples", "-q").returncode == 0
    for source in ("recipe.toml", "Makefile"):
        (checkout / "examples" / source).touch()
        assert run(checkout, "make", "-C", "examples", "-q").returncode == 1
        assert run(checkout, "make", "-C", "examples", "-s").returncode == 0


def test_make_stops_where_a_check_fails(checkout: Path) -> None:
    target = "build/digits.safetensors"
    assert run(checkout / "examples", "make", target).returncode == 0
    before = (checkout / "examples" / target).read_bytes()
    plant_nan(checkout / "examples" / "digits.safetensors")
    done = run(checkout / "examples", "make", target)
    assert done.returncode == 2
    assert "qtool: fc2.weight: holds 1 NaN (--strict)\nmake: *** " in done.stderr
    assert "Error 3" in done.stderr
    assert (checkout / "examples" / target).read_bytes() == before


JOB = yaml.safe_load((EXAMPLES / "ci.yml").read_text(encoding="utf-8"))["jobs"]["release"]


def run_job(checkout: Path) -> tuple[int, str, str]:
    """What the job's own commands do, as GitHub runs them: the exit code, standard error, and the
    summary. pip is there in name alone: the qtool of these tests is installed."""
    (checkout / "bin").mkdir()
    (checkout / "bin" / "pip").write_text('#!/bin/sh\n[ "$*" = "install ." ]\n')
    (checkout / "bin" / "pip").chmod(0o755)
    summary = checkout / "summary.md"
    environment = {
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": os.pathsep.join([str(checkout / "bin"), str(PYTHON.parent), os.environ["PATH"]]),
    }
    code, said = 0, ""
    for step in JOB["steps"]:
        if "run" in step and is_due(step, code, checkout):
            done = run(checkout, "bash", "-e", "-c", step["run"], **environment)
            code, said = code or done.returncode, said + done.stderr
    return code, said, summary.read_text(encoding="utf-8")


def is_due(step: dict[str, Any], code: int, checkout: Path) -> bool:
    if "if" not in step:
        return not code
    assert step["if"] == "failure() && hashFiles('release/failed.json')"
    return code != 0 and (checkout / "release" / "failed.json").exists()


def test_the_ci_job_releases(checkout: Path) -> None:
    code, said, summary = run_job(checkout)
    assert code == 0, said
    assert summary == (checkout / "release" / "latest" / "report.md").read_text(encoding="utf-8")
    assert (checkout / "release" / "latest" / "digits.safetensors").exists()


def test_the_ci_job_stops_and_shows_what_is_wrong(checkout: Path) -> None:
    plant_nan(checkout / "examples" / "digits.safetensors")
    code, said, summary = run_job(checkout)
    assert code == 3
    assert "qtool: fc2.weight: holds 1 NaN (--strict)\n" in said
    assert "fc2.weight" in summary
    assert not (checkout / "release" / "latest").exists()


def test_the_ci_job_runs_its_steps_in_order() -> None:
    assert [step.get("uses", step.get("name")) for step in JOB["steps"]] == [
        "actions/checkout@v4", "actions/setup-python@v5", "Install", "actions/cache/restore@v4",
        "Release", "Show what was released", "Show what was wrong", "actions/cache/save@v4",
        "actions/upload-artifact@v4",
    ]  # fmt: skip


def test_the_program_does_what_it_prints(tmp_path: Path) -> None:
    done = run(tmp_path, PYTHON, "-W", "error", EXAMPLES / "api.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "array: int4 (64, 64), scales (64, 2)"
    assert lines[2] == "operators: [ 1  4 21] [-1.   0.5  9. ]"
    assert "gate: stopped by fc1.weight, fc2.weight, fc3.weight; written: False" in lines
    assert "verify: as reported: True" in lines
    assert lines[-1] == "restored: 6 tensors, fc1.bias (128,)"
    assert {p.name for p in tmp_path.iterdir()} == {
        "api.safetensors", "api.report.json", "gated.report.json", "restored.safetensors",
    }  # fmt: skip

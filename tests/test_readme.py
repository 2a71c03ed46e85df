"""The README: its commands run, and its set-up commands are the two that it promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = [
    "pip install . && qtool quantize examples/digits.safetensors --dtype int4 --block-size 32 "
    "-o digits.int4.safetensors",
    "pip install -e '.[test]' && pytest -n auto --dist loadfile",
]


FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What differs from one run to the next.
TIME = re.compile(r"\b[\d.]+ (m?s)\b")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    return [body for kind, body in FENCE.findall(TEXT) if kind == language]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the examples, as a reader of the README has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command that succeeds, with this Python and its qtool first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_it_has_exactly_two_set_up_commands() -> None:
    installing = [line for block in blocks("sh") for line in block.splitlines() if "pip " in line]
    assert installing == SETUP


def test_ci_runs_the_command_that_runs_the_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [pattern] = re.findall(r"grep -m 1 \"(.*)\" README.md", script)
    command = ["grep", "-m", "1", pattern, "README.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == SETUP[1] + "\n"


@pytest.mark.parametrize("page", ["README.md", "examples/guide.md"])
def test_its_shell_commands_run_in_order_and_print_what_it_shows(page: str, checkout: Path) -> None:
    printed = ""
    for language, body in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "text":
            assert plain(printed) == plain(body)
        elif language == "sh" and "pytest" not in body:
            script = "exec 2>&1\n" + body.replace("pip install . && ", "")
            printed = run(["bash", "-euo", "pipefail", "-c", script], checkout).stdout


def plain(shown: str) -> list[list[str]]:
    """The words of each line, but for times, whose digits the width of a column hangs on."""
    return [TIME.sub(r"\1", line).split() for line in shown.splitlines()]


def test_its_table_of_types_is_that_of_the_command(checkout: Path) -> None:
    row = re.compile(r"^\| (\w+) \| (\d+) \| (\S+) to (\S+) \| (\d+) \|", re.MULTILINE)
    [header, *lines] = run(["qtool", "dtypes"], checkout).stdout.splitlines()
    assert " ".join(header.split()) == "type bits lowest highest ONNX code first opset"
    assert row.findall(TEXT) == [tuple(np.delete(line.split(), 4)) for line in lines]


def test_its_python_runs(checkout: Path) -> None:
    [code] = blocks("python")
    printed = run([sys.executable, "-W", "error", "-c", code], checkout).stdout.splitlines()
    assert printed[0].startswith("int4 (64, 8) 21.")
    assert 0.02 < float(printed[1]) < 0.03

"""The README: its commands run, and its set-up commands are the two that it promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = [
    "pip install . && qtool quantize examples/digits.safetensors --dtype int4 --block-size 32 "
    "-o digits.int4.safetensors",
    "pip install -e '.[test]' && pytest -n auto --dist loadfile",
]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the examples, as a reader of the README has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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


def test_its_shell_commands_run_in_order_and_print_what_it_shows(checkout: Path) -> None:
    script = "".join(block for block in blocks("sh") if "pytest" not in block)
    script = script.replace("pip install . && ", "")
    done = run(["bash", "-euo", "pipefail", "-c", script], checkout)
    [shown, accuracy] = blocks("text")
    without_time = shown.rpartition(",")[0]
    assert done.stderr.startswith(without_time)
    assert accuracy == run([sys.executable, "examples/accuracy.py"], checkout).stdout


def test_its_python_runs(checkout: Path) -> None:
    [code] = blocks("python")
    printed = run([sys.executable, "-W", "error", "-c", code], checkout).stdout.splitlines()
    assert printed[0].startswith("int4 (64, 8) 21.")
    assert 0.02 < float(printed[1]) < 0.03

"""--help: every command and option is explained, with its variable; every example runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import PYTHON, ok
from typer.main import get_command

from qtool.cli import app
from qtool.cli.command import Command
from qtool.report.figures import FIGURES

GROUP: Any = get_command(app)
COMMANDS: dict[str, Any] = dict(GROUP.commands)
EXAMPLES = Path(__file__).parents[1] / "examples"


def options(name: str) -> Iterator[Any]:
    return (p for p in COMMANDS[name].params if p.param_type_name == "option" and not p.hidden)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_its_variable_named(name: str) -> None:
    text = flat(ok(name, "--help").out.decode())
    prefix = "QTOOL_QUANTIZE" if name == "recipe" else f"QTOOL_{name.upper()}"
    for option in options(name):
        assert option.help, option.name
        assert option.help.replace(" ", "") in text.replace(" ", "")
        [long] = [o for o in option.opts if o.startswith("--")]
        variable = f"{prefix}_{long[2:].replace('-', '_').upper()}"
        assert option.allow_from_autoenv == (long != "--from")
        if option.allow_from_autoenv:
            assert re.search(rf"\[env var: {variable}[\];]", text), variable
        if option.multiple:
            assert "epeatable" in option.help
    for argument in COMMANDS[name].params:
        assert argument.help or getattr(argument, "hidden", False)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    text = ok(*name.split(), "--help").out.decode()
    assert text.startswith(f"Usage: qtool {name}".rstrip())
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "\\" not in text
    assert "\u00a0" not in text


def test_the_whole_help_names_commands_exit_codes_variables_and_files() -> None:
    text = ok("--help").out.decode()
    assert set(COMMANDS) == set(re.findall(r"^  ([a-z]+)  +[A-Z]", text, re.MULTILINE))
    for word in ("130", "QTOOL_CONFIG", "NO_COLOR", "COLUMNS", "qtool.toml", "[tool.qtool]"):
        assert word in text
    for code in "0123":
        assert re.search(rf"^  {code}   ", text, re.MULTILINE)


def test_the_whole_help_lists_what_gates_can_judge() -> None:
    gates = ok("--help").out.decode().partition("\nGates:\n")[2].partition("\nEnvironment:")[0]
    for label, places in (
        ("both", ("tensors", "totals")), ("tensor", ("tensors",)), ("total.", ("totals",)),
    ):  # fmt: skip
        row = re.search(rf"^  {re.escape(label)} (.*(?:\n {{10}}.*)*)", gates, re.MULTILINE)
        assert row is not None
        known = [name for name, figure in FIGURES.items() if figure.places == places]
        assert re.findall(r"\w+", row[1]) == known


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_where_exit_codes_are(name: str) -> None:
    assert ok(name, "--help").out.endswith(
        b"\nExit codes, gates, variables and files: `qtool --help`.\n"
    )


def test_the_configuration_in_the_help_is_one(tmp_path: Path) -> None:
    text = ok("--help").out.decode()
    shown = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    lines = [line for line in shown if re.match(r"(quiet|\[quantize\]|block-size|include)", line)]
    assert len(lines) == 4
    path = tmp_path / "qtool.toml"
    path.write_text("\n".join(lines))
    said = ok("--config", path, "recipe", "--dtype", "int8").out.decode()
    assert said == 'dtype = "int8"\nblock_size = 32\ninclude = ["*.mlp.*"]\n'


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples name."""
    folder = tmp_path_factory.mktemp("stage")
    for model in ("weights", "m"):
        shutil.copy(EXAMPLES / "digits.safetensors", folder / f"{model}.safetensors")
    shutil.copy(EXAMPLES / "digits.onnx", folder / "model.onnx")
    inputs = np.load(EXAMPLES / "digits_inputs.npy")
    np.savez(folder / "samples.npz", image=inputs[:8])
    for name in ("input", "act0", "act1"):
        np.save(folder / f"{name}.npy", inputs)
    (folder / "model").mkdir()
    shutil.copy(EXAMPLES / "digits.safetensors", folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text("{}")
    for arguments in (
        ["quantize", "weights.safetensors", "--dtype", "int4", "--block-size", "32"],
        ["quantize", "model.onnx", "--dtype", "int8"],
        ["quantize", "model", "--dtype", "int4", "--shards", "1/1"],
    ):
        subprocess.run([*PYTHON, *arguments], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_runs(name: str, stage: Path, tmp_path: Path) -> None:
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    text = ok(name, "--help").out.decode()
    examples = re.findall(rf"^Example: (qtool {name}.*)$", text, re.MULTILINE)
    assert examples
    if name == "quantize":
        for file in tmp_path.glob("weights.int4.*"):
            file.unlink()
    prelude = f'set -euo pipefail; qtool() {{ {shlex.join(PYTHON)} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", prelude + "\n".join(examples)], cwd=tmp_path, env={**os.environ},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_command_is_of_the_class_that_reads_variables_and_configuration() -> None:
    assert {type(command) for command in COMMANDS.values()} == {Command}

"""Names that terminals and spreadsheets would obey: no command prints them as they are."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import PYTHON, ok
from pages import HOSTILE
from safetensors.numpy import save_file
from typer.testing import CliRunner

from qtool.cli import app
from qtool.recipe import toml

WEIGHT = np.arange(512, dtype=np.float32).reshape(16, 32)
# Colours and a title by 7-bit and 8-bit codes, a new line of EBCDIC's, and text from right to left.
ESCAPES = "\x1b[35mred\x9b36m\x1b]0;t\x07\x85\u202e\u2028"
PATTERN = ESCAPES.replace("[", "[[]") + "*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with such names of tensors and metadata, what is made of it, and other files."""
    path = tmp_path_factory.mktemp("escapes")
    tensors = {f"{ESCAPES}{i}.weight": WEIGHT + i for i in range(2)}
    save_file(tensors, path / "a.safetensors", {ESCAPES: ESCAPES})
    np.save(path / "codes.npy", np.ones((2, 2), np.uint8))
    np.save(path / f"{ESCAPES}.npy", WEIGHT)
    ok("quantize", path / "a.safetensors", "--dtype", "int8", "--include", PATTERN,
       "-o", path / "q.safetensors")  # fmt: skip
    (path / "r.toml").write_text('dtype = "int8"\ninclude = ["\\u009b36m*"]\n')
    (path / "c.toml").write_text('[quantize]\nlayout = "\\u001b[35m\\u009b"\n')
    (path / "d.toml").write_text('"\\u001b[35m\\u009b" = 1\n')
    return path


QUANTIZE = ["quantize", "a.safetensors", "--force", "-o", "o.safetensors", "--dtype"]
SPOKEN: list[list[str]] = [
    ["inspect", "a.safetensors"],
    ["inspect", "a.safetensors", "--stats", "--plot"],
    ["inspect", "a.safetensors", "--json"],
    ["inspect", "q.safetensors", "--stats"],
    ["inspect", f"{ESCAPES}.npy"],
    ["inspect", ESCAPES],
    [*QUANTIZE, "int4"],
    [*QUANTIZE, "int4", "--strict", "--fail-if", "mse >= 0"],
    [*QUANTIZE, "int4", "--dry-run"],
    [*QUANTIZE, "int4", "--dry-run", "--json"],
    [*QUANTIZE, "int4", "--dry-run", "--json-lines"],
    [*QUANTIZE, "int8", "--exclude", "*"],
    [*QUANTIZE, "int8", "--include", ESCAPES],
    [*QUANTIZE, "int8", "--axis", "7"],
    [*QUANTIZE, "int4", "--block-size", "7", "--layout", "mlx"],
    [*QUANTIZE, "int8", "--scale", "codes.npy"],
    [*QUANTIZE, "int8", "--hessian", f"{ESCAPES}.npy"],
    [*QUANTIZE, "int8", "--fail-if", f"mse > 0 on {ESCAPES}"],
    [*QUANTIZE, "int8", "--rule", ESCAPES],
    [*QUANTIZE, ESCAPES],
    ["--config", "c.toml", *QUANTIZE, "int8"],
    ["--config", "d.toml", *QUANTIZE, "int8"],
    ["quantize", f"{ESCAPES}.npy", "--dtype", "int8", "--force"],
    ["verify", "a.safetensors", "q.safetensors"],
    ["verify", "a.safetensors", "q.safetensors", "--fail-if", "mse >= 0"],
    ["verify", "a.safetensors", "codes.npy", "--alone"],
    ["compare", "a.safetensors", "--dtypes", "int8,int4"],
    ["compare", "a.safetensors", "--dtypes", "int8", "--csv", "-", "--per-tensor"],
    ["compare", "a.safetensors", "--dtypes", "int8", "--json", "--per-tensor"],
    ["dequantize", "q.safetensors", "-o", "o.safetensors", "--force"],
    ["dynamic", "a.safetensors", "-o", "o.safetensors", "--force"],
    ["calibrate", "a.safetensors", "-o", "s.safetensors", "--dtype", "int8", "--force"],
    ["recipe", "--dtype", "int8", "--include", ESCAPES],
    ["recipe", "--recipe", "r.toml"],
    ["recipe", "--from", "q.safetensors"],
    ["recipe", "--from", "q.report.json"],
    ["report", "q.report.json", "-o", "-", "--to", "md"],
    ["report", "q.report.json", "-o", "-", "--to", "csv"],
    ["report", "q.report.json", "-o", "-", "--to", "html"],
]


@pytest.mark.parametrize("arguments", SPOKEN, ids=lambda a: " ".join(a)[:60].encode().hex()[:8])
def test_no_command_prints_what_a_terminal_obeys(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, arguments, prog_name="qtool", color=True)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    shown = (done.stdout_bytes + done.stderr_bytes).decode().replace("\r\n", "\n")
    shown = re.sub(r"\x1b\[(0|31|32|1)m", "", shown)  # qtool's own
    assert [c for c in shown if not c.isprintable() and c not in "\n\t"] == []


@pytest.mark.parametrize("command", ["quantize", "inspect"])
def test_neither_does_a_progress_bar(command: str, folder: Path) -> None:
    reader, terminal = os.openpty()
    options = {"quantize": ["--dtype", "int4", "--force"], "inspect": ["--stats"]}[command]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        [*PYTHON, command, "a.safetensors", *options], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
    ) as running:  # fmt: skip
        os.close(terminal)
        data = b""
        while True:
            try:
                piece = os.read(reader, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            data += piece
    os.close(reader)
    assert running.returncode == 0, data
    shown = data.decode()
    assert "0.weight" in shown
    for part in ("\x1b[35m", "\x9b", "\x1b]0", "\x07", "\x85", "\u202e", "\u2028"):
        assert part not in shown


@pytest.mark.parametrize("name", ["q.safetensors", "q.report.json"])
def test_a_printed_recipe_means_the_same(name: str, folder: Path) -> None:
    assert toml.parsed(ok("recipe", "--from", folder / name).out, "r").include == (PATTERN,)


FULL_WIDTH = ("\uff1d1", "\uff0b1", "\uff0d1", " \uff201")  # which spreadsheets take for the narrow
FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


@pytest.mark.parametrize("name", [*HOSTILE, "\t=1", " \r=1", "\n=1", *FULL_WIDTH])
def test_no_cell_is_a_formula(name: str, tmp_path: Path) -> None:
    source, made = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    save_file({name: WEIGHT}, source)
    ok("quantize", source, "--dtype", "int8", "-o", made)
    for arguments in (
        ["compare", source, "--dtypes", "int8", "--csv", "-", "--per-tensor"],
        ["report", tmp_path / "q.report.json", "-o", "-", "--to", "csv"],
    ):
        for row in csv.reader(io.StringIO(ok(*arguments).out.decode(), newline="")):
            for cell in row:
                assert cell.isprintable()
                is_number = re.fullmatch(r"-?\d+(\.\d+)?(e[-+]\d+)?", cell) is not None
                assert is_number or not cell.lstrip(" ").startswith(FORMULA), cell

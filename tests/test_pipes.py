"""Streams, locales and odd names of files, in processes of their own."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import PYTHON, ok, process, stored, strict
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

CLEAN = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
WEIGHT = np.asarray([[127, -1.5, 2.5, 1], [254, 127, -254, 0]], np.float32)


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A command of bash in which `qtool` is this one, with exit codes of whole pipes."""
    prelude = f'set -o pipefail; qtool() {{ {shlex.join(PYTHON)} "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", prelude + command], cwd=folder, env=CLEAN | environment,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def save_model(path: Path) -> None:
    """x (1, 64) times a weight of 64 x 64 ones."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", 1, [1, 64])],
        [helper.make_tensor_value_info("y", 1, [1, 64])],
        [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", WEIGHT)
    save_file({"w": WEIGHT}, tmp_path / "m.safetensors")
    save_model(tmp_path / "m.onnx")
    np.savez(tmp_path / "samples.npz", x=np.ones((2, 1, 64), np.float32))
    (tmp_path / "r.toml").write_text('dtype = "int8"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("qtool quantize a.npy --dtype int8 -q -o - | qtool inspect -", b"a       int8"),
        ("cat m.safetensors | qtool quantize - --dtype int8 -q | qtool inspect - --json",
         b'"dtype": "int8"'),
        ("qtool quantize m.onnx --dtype int8 -q -o - | qtool dequantize - -q -o - "
         "| qtool inspect -", b"standard input: onnx"),
        ("cat a.npy | qtool dynamic - -q -o - | qtool inspect -", b"array   uint8"),
        ("cat a.npy | qtool calibrate - --dtype int8 -q -o - | qtool inspect -", b"scale"),
        ("cat m.onnx | qtool capture - samples.npz -q -o - | qtool inspect - --json", b'"w"'),
        ("cat r.toml | qtool recipe --recipe /dev/stdin", b'dtype = "int8"\n'),
        ("cat r.toml | qtool recipe --recipe -", b'dtype = "int8"\n'),
        ("qtool quantize a.npy -q -o - --recipe r.toml | qtool inspect -", b"int8"),
        ("qtool recipe --dtype int8 | qtool quantize m.onnx -q -o - --recipe - | qtool inspect -",
         b"int8"),
        ("cat samples.npz | qtool capture m.onnx - -q -o - | qtool inspect - --json", b'"w"'),
        ("qtool capture m.onnx <(cat samples.npz) -q --hessian -o - | qtool inspect - --json",
         b'"w"'),
        ("cat samples.npz | qtool verify m.onnx q.onnx --run - -q --json", b'"run": "-"'),
        ("qtool verify m.onnx q.onnx --run <(cat samples.npz) -q --json", b'"runs": 2'),
    ],
    ids=["inspect", "json", "onnx", "dynamic", "calibrate", "capture", "recipe", "recipe-again",
         "with-recipe", "made-recipe", "samples", "samples-twice", "run", "run-pipe"],
)  # fmt: skip
def test_commands_read_and_write_pipes(command: str, found: bytes, folder: Path) -> None:
    if "q.onnx" in command:
        ok("quantize", folder / "m.onnx", "--dtype", "int8", "-o", folder / "q.onnx")
    done = shell(command, folder)
    assert (done.returncode, done.stderr) == (0, b"")
    assert found in done.stdout


@pytest.mark.parametrize("piped", ["--recipe - < none.toml", "--recipe <(cat none.toml)"])
def test_a_recipe_out_of_a_pipe_is_that_of_every_source(piped: str, folder: Path) -> None:
    (folder / "none.toml").write_text('exclude = ["*"]\nallow_empty = true\n')
    command = f"qtool quantize a.npy m.safetensors --dtype int8 -o made/ --json-lines -q {piped}"
    done = shell(command, folder)
    assert (done.returncode, done.stderr) == (0, b"")
    skipped = [json.loads(line)["skipped"] for line in done.stdout.splitlines()]
    assert skipped == [[{"name": name, "reason": "excluded"}] for name in ("a", "w")]


@pytest.mark.parametrize(
    "command",
    [
        "qtool quantize - --recipe - -o q.safetensors < r.toml",
        "qtool capture - - -o c.safetensors < m.onnx",
        "qtool verify m.onnx - --run - < m.onnx",
    ],
)
def test_standard_input_is_no_two_files(command: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = shell(command, folder)
    assert done.returncode == 2
    assert b"standard input" in done.stderr
    assert sorted(folder.iterdir()) == before


def test_errors_of_a_piped_recipe_name_what_the_user_does(folder: Path) -> None:
    done = shell("echo dtyp=3 | qtool quantize a.npy --recipe -", folder)
    assert (done.returncode, done.stderr) == (
        2, b"qtool: standard input: 'dtyp' is unknown; did you mean dtype?\n",
    )  # fmt: skip


PRINTING = [
    "qtool --help", "qtool quantize --help", "qtool --version", "qtool dtypes", "qtool presets",
    "qtool dtypes --json", "qtool presets --json", "qtool inspect m.onnx m.safetensors a.npy",
    "qtool inspect m.onnx a.npy --json-lines", "qtool recipe --dtype int8",
    "qtool quantize a.npy --dtype int8 --json --force",
    "qtool quantize a.npy m.onnx --dtype int8 --json-lines --force",
    "qtool dequantize q.npz q.onnx --json-lines --force", "qtool quantize a.npy --dry-run "
    "--dtype int8",
]  # fmt: skip


@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_has_gone_away_ends_every_command_with_0(command: str, folder: Path) -> None:
    if "q.npz" in command:
        ok("quantize", folder / "a.npy", "--dtype", "int8", "-o", folder / "q.npz")
        ok("quantize", folder / "m.onnx", "--dtype", "int8", "-o", folder / "q.onnx")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PYTHON, *command.split()[1:]], cwd=folder, env=CLEAN, stdout=writer,
        stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert b"Error" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "quantize --help"])
def test_help_for_a_stream_that_is_closed_is_one_line(command: str, folder: Path) -> None:
    done = shell(f"qtool {command} >&-", folder)
    assert (done.returncode, done.stderr) == (1, b"qtool: standard output: is closed\n")


def test_a_reader_of_messages_that_has_gone_away_is_none_of_the_result(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PYTHON, "quantize", "a.npy", "--dtype", "int8", "-o", "y.npz"], cwd=folder, env=CLEAN,
        stdout=subprocess.PIPE, stderr=writer, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"")
    assert np.load(folder / "y.npz")["a"].shape == WEIGHT.shape


# ------------------------------------------------------------------------ width, colour, locales


def widest(text: bytes) -> int:
    return max(map(len, text.decode().splitlines()))


def test_columns_hold_in_pipes_too(folder: Path) -> None:
    assert widest(shell("qtool presets | cat", folder).stdout) > 80
    assert widest(shell("qtool presets | cat", folder, COLUMNS="60").stdout) <= 60
    printed = shell("qtool quantize --help | grep -v Example:", folder, COLUMNS="60").stdout
    assert widest(printed) <= 60
    for columns in ("", "0", "x", "-5"):
        done = shell("qtool presets | cat", folder, COLUMNS=columns)
        assert done.stdout == shell("qtool presets | cat", folder).stdout


@pytest.mark.parametrize("command", ["presets", "dtypes", "--help", "quantize --help"])
def test_what_is_printed_has_no_colour_where_none_is_wanted(command: str, folder: Path) -> None:
    assert b"\x1b" not in shell(f"qtool {command}", folder).stdout
    both = shell(f"qtool {command}", folder, NO_COLOR="1", FORCE_COLOR="1").stdout
    assert b"\x1b[3" not in both  # bold is no colour
    master, terminal = pty.openpty()
    subprocess.run(
        [*PYTHON, *command.split()], env=CLEAN | {"NO_COLOR": "1", "TERM": "xterm"},
        stdout=terminal, timeout=60, check=True,
    )  # fmt: skip
    os.close(terminal)
    assert b"\x1b[3" not in os.read(master, 100_000)
    os.close(master)


LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C.UTF-8"},
]
NAMES = [
    b"plain.npy", b"two words.npy", b"new\nline.npy", b"-dash.npy", "übung漢字😀.npy".encode(),
    b"\xff\xfe.npy", b"a'\"$(x)`;.npy", b"tab\there\x1b[31m.npy",
]  # fmt: skip


@pytest.mark.parametrize(
    "locale", LOCALES, ids=lambda env: ",".join(f"{k}={v}" for k, v in env.items())
)
def test_any_name_of_a_file_works_in_any_locale(locale: dict[str, str], tmp_path: Path) -> None:
    for name in NAMES:
        np.save(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), WEIGHT)
    arguments = [b"--dtype", b"int8", b"-q", b"--json-lines", b"--", *NAMES]
    done = process("quantize", *arguments, cwd=tmp_path, env=CLEAN | locale)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.splitlines()
    shown = [name.decode("utf-8", "backslashreplace") for name in NAMES]
    assert [strict(line.decode("ascii"))["source"]["name"] for line in lines] == shown
    for name, text in zip(NAMES, shown, strict=True):
        stem = os.fsencode(tmp_path) + b"/" + name[: -len(".npy")]
        assert stored(Path(os.fsdecode(stem + b".int8.safetensors")))[text[:-4]].dtype == np.int8
        with open(stem + b".int8.report.json", encoding="utf-8") as file:
            assert strict(file.read())["source"]["name"] == text
    outputs = [name[: -len(".npy")] + b".int8.safetensors" for name in NAMES]
    for command in ("inspect", "dequantize"):
        done = process(command, b"--", *outputs, cwd=tmp_path, env=CLEAN | locale)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
    missing = [os.fsencode(tmp_path) + b"/no" + name for name in NAMES]
    done = process("inspect", b"--", *missing, cwd=tmp_path, env=CLEAN | locale)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.count(b"\n") == len(NAMES)


def test_a_model_of_any_name_gets_a_data_file_that_runtimes_find(folder: Path) -> None:
    name = os.fsdecode(b"\xffm.onnx")
    (folder / "m.onnx").rename(folder / name)
    arguments = ["--dtype", "int8", "--external-data", "-q"]
    for _ in range(2):
        done = process("quantize", name, *arguments, "--force", cwd=folder, env=CLEAN)
        assert (done.returncode, done.stderr) == (0, b"")
    [data] = [p.name for p in folder.glob("*.data")]
    assert data.startswith("_m.int8.")
    data_model = onnx.load(folder / os.fsdecode(b"\xffm.int8.onnx"), load_external_data=False)
    locations = {e.value for t in data_model.graph.initializer for e in t.external_data
                 if e.key == "location"}  # fmt: skip
    assert locations == {data}


def test_a_recipe_can_be_kept_that_names_any_file(folder: Path) -> None:
    np.savez(folder / "h.npz", w=np.ones((2, 4), np.float32))
    name = os.fsdecode(b"\xff.npz")
    (folder / "h.npz").rename(folder / name)
    done = process(
        "quantize", "m.safetensors", "--dtype", "int4", "--importance", name, "--save-recipe",
        "kept.toml", "-q", cwd=folder, env=CLEAN,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert r'importance = ["\\xff.npz"]' in (folder / "kept.toml").read_text(encoding="utf-8")


def test_long_names_are_shortened_with_dots_that_the_stream_can_write(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{'very_long_' * 12}weight" for i in range(3)]
    save_file(dict.fromkeys(names, WEIGHT), tmp_path / "m.safetensors")
    environment = CLEAN | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = process("inspect", "m.safetensors", cwd=tmp_path, env=environment)
    assert done.returncode == 0
    assert b"\\u" not in done.stdout
    assert b"~2~" in done.stdout
    assert widest(done.stdout) <= 60

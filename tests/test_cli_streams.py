"""Pipes, exit codes, signals and full disks, in processes of their own."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import pytest
from command import (
    PYTHON,
    Array,
    float32,
    initializers,
    leftovers,
    ok,
    process,
    qtool,
    refused,
    stored,
    strict,
    unmeasured,
)
from onnx import helper
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import qtool as package
from qtool.cli import app
from qtool.jobs.streams import NATIVE
from qtool.spec import PRECISIONS, SCALE_DTYPES

WEIGHT = float32([[127, -1.5, 2.5], [254, 127, -254]])
ROWS = [[127, -2, 2], [127, 64, -127]]
BACK = [[127, -2, 2], [254, 128, -254]]


def save_model(path: Path, weight: Array) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    inputs = {"x": [1, weight.shape[0]]}
    model = onnx_models.model([node], [onnx_models.initializer("w", weight)], inputs=inputs)
    onnx_models.save(model, path)


SAVE: dict[str, Callable[[Path, Array], None]] = {
    "npy": lambda path, weight: np.save(path, weight),
    "npz": lambda path, weight: np.savez(path, w=weight),
    "safetensors": lambda path, weight: save_file({"w": weight}, path),
    "onnx": save_model,
}


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """A command of bash in which `qtool` is this one; the exit codes of its pipe end the output."""
    prelude = f'set -o pipefail; qtool() {{ {shlex.join(PYTHON)} "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", prelude + command], cwd=folder, capture_output=True, timeout=60, check=False
    )


def source(folder: Path, container: str, weight: Array = WEIGHT) -> Path:
    path = folder / f"m.{container}"
    SAVE[container](path, weight)
    return path


# ------------------------------------------------------------------------------------ - and pipes


@pytest.mark.parametrize(
    ("command", "line"),
    [("inspect", "inspect [OPTIONS] SRC..."), ("capture", "capture [OPTIONS] MODEL SAMPLES..."),
     ("calibrate", "calibrate [OPTIONS] ACT..."), ("dtypes", "dtypes [OPTIONS]")],
)  # fmt: skip
def test_usage_names_the_arguments_plainly(command: str, line: str) -> None:
    assert ok(command, "--help").out.decode().split("\n")[0] == f"Usage: qtool {line}"
    refused = qtool(command, "--no-such-option")
    assert refused.code == 2
    assert f"Usage: qtool {line}\n" in refused.err


@pytest.mark.parametrize("container", SAVE)
def test_standard_input_is_recognised_by_its_content(container: str, tmp_path: Path) -> None:
    data = source(tmp_path, container).read_bytes()
    done = ok("quantize", "-", "--dtype", "int8", "--axis", "0", stdin=data)
    name = "array" if container == "npy" else "w"
    if container == "onnx":
        (tmp_path / "y.onnx").write_bytes(done.out)
        assert initializers(tmp_path / "y.onnx")["w_quantized"].tolist() == ROWS
    else:
        assert stored(done.out)[name].tolist() == ROWS
    assert "standard output: " in done.err
    assert [p.name for p in tmp_path.glob("*.report.json")] == []


@pytest.mark.parametrize("container", ["npy", "npz", "safetensors"])
def test_to_names_the_container_of_standard_output(container: str, tmp_path: Path) -> None:
    data = source(tmp_path, "npy").read_bytes()
    done = ok(
        "quantize", "-", "-o", "-", "--dtype", "int8", "--axis", "0", "--to", container, stdin=data
    )
    path = tmp_path / f"y.{container}"
    path.write_bytes(done.out)
    if container == "npy":
        assert np.load(path).tolist() == ROWS
    else:
        found = dict(np.load(path)) if container == "npz" else stored(path)
        assert found["array"].tolist() == ROWS
        assert found["array.scale"].tolist() == [1, 2]


def test_a_file_goes_to_standard_output_and_its_report_where_it_is_told(tmp_path: Path) -> None:
    path = source(tmp_path, "safetensors")
    done = ok("quantize", path, "-o", "-", "--dtype", "int8", "--report", tmp_path / "r.json")
    assert stored(done.out)["w"].tolist() == ROWS
    written = strict((tmp_path / "r.json").read_text())["output"]
    assert (written["name"], written["bytes"]) == ("-", len(done.out))
    assert {p.name for p in tmp_path.iterdir()} == {"m.safetensors", "r.json"}


def test_commands_chain_into_pipes(tmp_path: Path) -> None:
    source(tmp_path, "safetensors")
    done = shell(
        "cat m.safetensors | qtool quantize - -o - --dtype int8 -q "
        "| qtool dequantize - -o - -q > back",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert load_file(tmp_path / "back")["w"].tolist() == BACK
    assert {p.name for p in tmp_path.iterdir()} == {"m.safetensors", "back"}


def test_a_pipe_with_a_name_is_read_like_standard_input(tmp_path: Path) -> None:
    source(tmp_path, "safetensors")
    done = shell("qtool quantize <(cat m.safetensors) -o y.npz --dtype int8", tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "y.npz")["w"].tolist() == ROWS


def test_errors_call_standard_input_by_its_name() -> None:
    message = refused("inspect", "-", stdin=b"nothing of the kind")
    assert message.startswith("standard input: holds no .npy, .npz, .safetensors or ONNX data")


def test_data_files_of_a_model_cannot_go_to_standard_output(tmp_path: Path) -> None:
    path = source(tmp_path, "onnx", np.ones((64, 64), np.float32))
    message = refused("quantize", path, "-o", "-", "--dtype", "int8", "--external-data")
    assert message == (
        "standard output: cannot carry the model's data file too; name a file with -o"
    )


def test_a_terminal_gets_no_binary_data(tmp_path: Path) -> None:
    path = source(tmp_path, "npy")
    master, terminal = os.openpty()
    try:
        done = subprocess.run(
            [*PYTHON, "quantize", path, "-o", "-", "--dtype", "int8"],
            stdout=terminal,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert b"standard output is a terminal; redirect it, or name a file" in done.stderr
    finally:
        os.close(terminal)
        os.close(master)


JSON = [
    pytest.param(["quantize", "m.npy", "--dtype", "int8", "--json"], "tensors", id="quantize"),
    pytest.param(["dynamic", "m.npy", "--json"], "tensors", id="dynamic"),
    pytest.param(["dequantize", "q.safetensors", "--json"], "tensors", id="dequantize"),
    pytest.param(["inspect", "m.npy", "--json"], "tensors", id="inspect"),
    pytest.param(["inspect", "m.npy", "--json", "--stats"], "tensors", id="stats"),
    pytest.param(["dtypes", "--json"], "dtypes", id="dtypes"),
    pytest.param(["presets", "--json"], "presets", id="presets"),
]


@pytest.mark.parametrize(("arguments", "key"), JSON)
def test_json_is_one_document_and_standard_error_plain_text(
    arguments: list[str], key: str, tmp_path: Path
) -> None:
    path = source(tmp_path, "npy")
    ok("quantize", path, "--dtype", "int8", "-o", tmp_path / "q.safetensors")
    done = process(*arguments, cwd=tmp_path, env=os.environ | {"TERM": "xterm-256color"})
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout.decode())[key]
    assert b"\r" not in done.stderr + done.stdout
    assert b"\x1b" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("quantize many.safetensors --dtype int8 -o -", id="quantize"),
        pytest.param("dequantize q.safetensors -o -", id="dequantize"),
        pytest.param("inspect many.safetensors", id="inspect"),
        pytest.param("inspect many.safetensors --json", id="inspect-json"),
        pytest.param("quantize --help", id="help"),
    ],
)
def test_a_reader_that_goes_away_is_no_error(arguments: str, tmp_path: Path) -> None:
    tensors = {f"{i}.weight": np.ones((2, 8), np.float32) for i in range(1500)}
    save_file(tensors, tmp_path / "many.safetensors")
    if "q.safe" in arguments:
        ok("quantize", tmp_path / "many.safetensors", "--dtype", "int8",
           "-o", tmp_path / "q.safetensors")  # fmt: skip
    done = shell(
        f"qtool {arguments} 2> errors | head -c 1 | wc -c; echo ${{PIPESTATUS[0]}}", tmp_path
    )
    assert done.stdout.split() == [b"1", b"0"]
    assert "Traceback" not in (tmp_path / "errors").read_text()
    done = subprocess.run(
        [*PYTHON, *arguments.split()],
        cwd=tmp_path,
        stdout=closed_pipe(),
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def closed_pipe() -> int:
    """The end to write to of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("qtool dtypes >&-", 1, id="no-output"),
        pytest.param("qtool quantize m.npy --dtype int8 2>&-", 0, id="no-errors"),
        pytest.param("qtool inspect - <&-", 1, id="no-input"),
    ],
)
def test_closed_streams_are_no_reason_for_a_traceback(
    command: str, code: int, tmp_path: Path
) -> None:
    source(tmp_path, "npy")
    done = shell(command, tmp_path)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    if ">&-" in command and code:
        assert done.stderr == b"qtool: standard output: is closed; redirect it to a file\n"


def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path) -> None:
    path = source(tmp_path, "npy")
    with open("/dev/full", "wb") as full:
        for arguments in (
            ["quantize", str(path), "-o", "-", "--dtype", "int8"],
            ["inspect", str(path)],
        ):
            done = subprocess.run(
                [*PYTHON, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
            )
            assert done.returncode == 1
            said = b"qtool: standard output: cannot be written: No space left on device; free"
            assert done.stderr.startswith(said)
            assert done.stderr.count(b"\n") == 1


RED = b"\x1b[31m"


@pytest.mark.parametrize(
    ("environment", "colored"),
    [
        pytest.param({}, True, id="terminal"),
        pytest.param({"NO_COLOR": "1"}, False, id="NO_COLOR"),
        pytest.param({"NO_COLOR": ""}, True, id="empty"),
        pytest.param({"TERM": "dumb"}, False, id="dumb"),
        pytest.param({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, id="both"),
    ],
)
def test_errors_are_red_on_a_terminal_unless_the_environment_says_no(
    environment: dict[str, str], colored: bool
) -> None:
    master, terminal = os.openpty()
    clean = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "FORCE_COLOR")}
    try:
        done = subprocess.run(
            [*PYTHON, "inspect", "gone"], stderr=terminal, timeout=60, check=False,
            env=clean | {"TERM": "xterm"} | environment,
        )  # fmt: skip
        assert done.returncode == 1
        assert (RED in os.read(master, 10_000)) == colored
    finally:
        os.close(terminal)
        os.close(master)


def test_force_color_is_for_pipes_too() -> None:
    environment = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "TERM")}
    done = process("inspect", "gone", env=environment | {"FORCE_COLOR": "1"})
    assert RED in done.stderr


# -------------------------------------------------------------------------------- the executable


def test_python_m_qtool_tells_its_version() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"qtool {package.__version__}\n".encode())
    assert done.stderr == b""


COMMANDS = ["quantize", "dynamic", "dequantize", "finish", "inspect", "presets", "dtypes"]


def test_help_names_every_command() -> None:
    text = ok("--help").out.decode()
    for command in COMMANDS:
        assert f" {command} " in text
    assert ok("-h").out.decode() == text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"Example: qtool {command}" in ok(command, "--help").out.decode()


def test_no_command_is_wrong_usage() -> None:
    done = qtool()
    assert done.code == 2
    assert "Usage: qtool" in done.out.decode() + done.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("qtool quan", ["quantize"], id="command"),
        pytest.param("qtool quantize --blo", ["--block-size"], id="option"),
        pytest.param(
            "qtool quantize x --dtype uint", ["uint2", "uint4", "uint8", "uint16"], id="type"
        ),
        pytest.param("qtool quantize x --method m", ["mse", "minmax"], id="method"),
        pytest.param("qtool quantize x --preset mxfp6", ["mxfp6-e2m3", "mxfp6-e3m2"], id="preset"),
        pytest.param("qtool quantize x --mx-rule r", ["rceil", "rceil-7.25"], id="rule"),
        pytest.param(
            "qtool quantize x --layout m", ["modelopt", "mlx", "matmul-nbits"], id="layout"
        ),
        pytest.param(
            "qtool quantize x --scale-dtype ", [d.name for d in SCALE_DTYPES], id="scale-type"
        ),
        pytest.param("qtool quantize x --precision ", [d.name for d in PRECISIONS], id="precision"),
        pytest.param("qtool quantize x --nonfinite ", ["error", "allow"], id="nonfinite"),
        pytest.param("qtool quantize x --semantics ", ["onnx", "onednn"], id="semantics"),
        pytest.param("qtool quantize x --to ", list(NATIVE), id="container"),
        pytest.param("qtool dynamic x --dtype ", ["uint8", "int8"], id="type-of-dynamic"),
        pytest.param(
            "qtool dequantize x --dtype f", ["float32", "float16", "float64"], id="float-type"
        ),
    ],
)
def test_the_shell_completes(words: str, expected: list[str]) -> None:
    environment = {"_QTOOL_COMPLETE": "complete_bash", "COMP_WORDS": words,
                   "COMP_CWORD": str(words.count(" "))}  # fmt: skip
    done = CliRunner().invoke(app, prog_name="qtool", env=environment)
    assert done.output.split() == expected


# -------------------------------------------------------------------- interruptions and full disks

OLD = b"the old output"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources that take a second to quantize."""
    folder = tmp_path_factory.mktemp("large")
    weight = np.ones((2048, 2048), np.float32)
    save_file({f"{i}.weight": weight for i in range(16)}, folder / "m.safetensors")
    return folder


def hear_interrupts() -> None:
    """What a shell in the background lets its commands ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("existing", [OLD, None], ids=["old", "absent"])
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        pytest.param(signal.SIGINT, 130, b"qtool: interrupted\n", id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, b"", id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, b"", id="SIGHUP"),
    ],
)
def test_an_interrupted_command_leaves_the_target_as_it_was(
    number: signal.Signals, code: int, message: bytes, existing: bytes | None, large: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    target = tmp_path / "y.safetensors"
    if existing is not None:
        target.write_bytes(existing)
    command: list[Any] = [
        *PYTHON,
        "quantize",
        large / "m.safetensors",
        "--dtype",
        "int4",
        "--force",
        "--method",
        "percentile:99",
        "-o",
        target,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts
    ) as running:
        deadline = time.monotonic() + 30
        while not any((tmp_path / name).stat().st_size for name in leftovers(tmp_path)):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(number)
        out, errors = running.communicate(timeout=30)
    assert (running.returncode, out, errors) == (code, b"", message)
    assert [p.name for p in tmp_path.iterdir()] == ([] if existing is None else [target.name])
    assert existing is None or target.read_bytes() == existing


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


@pytest.mark.parametrize("container", SAVE)
@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_a_file_that_cannot_grow_keeps_the_old_output(
    command: str, container: str, tmp_path: Path
) -> None:
    path = source(tmp_path, container, np.ones((64, 64), np.float32))
    options = ["--dtype", "int8", "--to", container]
    if command == "dequantize":
        ok("quantize", path, "-o", tmp_path / f"q.{container}", *options)
        path = tmp_path / f"q.{container}"
        options = ["--scale", "1"] if container == "npy" else []
    target = tmp_path / f"y.{container}"
    target.write_bytes(OLD)
    before = {p.name for p in tmp_path.iterdir()}
    arguments = [command, path, "-o", target, "--force", *options]
    done = process(*arguments, preexec_fn=limit_files, env=unmeasured())
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"qtool: {target}: cannot be written: File too large; raise the limit on the size of files "
        "(ulimit -f) or choose another file system\n"
    )
    assert target.read_bytes() == OLD
    assert {p.name for p in tmp_path.iterdir()} == before


def test_leftovers_of_a_killed_command_are_removed_by_the_next(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "y.safetensors"
    command: list[Any] = [
        *PYTHON,
        "quantize",
        large / "m.safetensors",
        "--dtype",
        "int4",
        "-o",
        target,
        "--include",
    ]
    with subprocess.Popen([*command, "*"], stderr=subprocess.PIPE) as running:
        while not leftovers(tmp_path):
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    assert len(leftovers(tmp_path)) == 1
    done = subprocess.run([*command, "0.*"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert leftovers(tmp_path) == []


def test_an_import_that_is_interrupted_is_an_interruption() -> None:
    """Compiled modules raise ImportError where Ctrl-C stops what they import."""
    code = """if True:
        import os, signal, sys
        from qtool.__main__ import main
        class Finder:
            def find_spec(self, name, *rest):
                if name == "qtool.cli":
                    try:
                        os.kill(os.getpid(), signal.SIGINT)
                    except KeyboardInterrupt:
                        raise ImportError from None
        sys.meta_path.insert(0, Finder())
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"qtool: interrupted\n")


def test_ctrl_c_lets_an_import_end(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('whole', flush=True)\n"
    )
    script = """if True:
        import signal, time
        from qtool.__main__ import _interrupt
        signal.signal(signal.SIGINT, _interrupt)
        try:
            import slow
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted")
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert (done.stdout, done.stderr) == (b"whole\ninterrupted\n", b"")

"""Full disks, failing reads, limits, missing permissions: one line, exit code 1, nothing lost."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_models
import pytest
from command import PYTHON
from fault_cases import CASES, Stage
from faults import STEPS, Ended, Files, Warm, files
from onnx import helper
from safetensors.numpy import save_file

from qtool import memory

WRITING = (
    "create",
    "write",
    "pwrite",
    "sendfile",
    "ftruncate",
    "fsync",
    "rename",
    "replace",
    "mkdir",
)
READING = ("read", "pread", "preadv")


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm()
    yield made
    made.close()
    print(f"\ninjected: {dict(made.injected)}")


@pytest.fixture(params=CASES, scope="module")
def stage(request: pytest.FixtureRequest, warm: Warm) -> Iterator[Stage]:
    made = Stage(CASES[request.param], warm)
    yield made
    made.remove()


def check_refused(stage: Stage, before: Files, done: Ended, where: object) -> None:
    """One line, exit code 1, and what was there is there; a folder may be gone on with."""
    assert (done.code, done.out) == (1, ""), (where, done)
    assert done.errors.startswith("qtool: "), (where, done.errors)
    assert done.errors.count("\n") == 1, (where, done.errors)
    found = files(stage.root)
    stage.check_whole(found)
    assert not [name for name in found if ".qtool-" in name], (where, found.keys())


@STEPS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_cannot_be_written_from_some_point_on(
    code: int, step: int, stage: Stage
) -> None:
    for point in range(code % step, 10_000, step):
        stage.reset(stage.old)
        done = stage.warm.run(
            *stage.case.command, root=stage.root, at=point, calls=WRITING, errno=code, lasting=True
        )
        if done.hit is None:
            break
        check_refused(stage, stage.old, done, (point, done.hit))
        assert os.strerror(code) in done.errors, done.errors
    assert point > 3 or step > 1


@STEPS
def test_a_source_that_cannot_be_read_from_some_point_on(step: int, stage: Stage) -> None:
    for point in range(0, 10_000, step):
        stage.reset(stage.old)
        done = stage.warm.run(
            *stage.case.command, root=stage.root, at=point, calls=READING, errno=errno.EIO,
            lasting=True,
        )  # fmt: skip
        if done.hit is None:
            break
        check_refused(stage, stage.old, done, (point, done.hit))
        assert os.strerror(errno.EIO) in done.errors, done.errors
    assert point > 0


CHANGED = {
    "quantize npy": "x.npy",
    "quantize npz": "x.npz",
    "quantize safetensors": "x.safetensors",
    "quantize onnx": "x.onnx",
    "quantize onnx data": "x.bin",
    "quantize folder": "m/model-00001-of-00002.safetensors",
    "dequantize safetensors": "q.safetensors",
    "calibrate": "x.npz",
    "capture": "samples.npy",
}


@STEPS
@pytest.mark.parametrize("how", ["cut", "changed", "replaced"])
@pytest.mark.parametrize("stage", CHANGED, indirect=True)
def test_a_source_that_changes_while_it_is_read_gives_the_one_or_the_other_or_an_error(
    how: str, step: int, stage: Stage
) -> None:
    fault = {"calls": ("open", *READING), "change": (how, CHANGED[stage.case.name])}
    case = stage.case
    allowed = [case.parts(stage.new)]
    for point in range(0, 10_000, step):
        stage.reset(stage.old)
        done = stage.warm.run(*case.command, root=stage.root, at=point, **fault)
        if done.hit is None:
            break
        found = case.parts(files(stage.root))
        if point == 0:  # before anything is read
            allowed += [found] if done.code == 0 else []
        if done.code == 0:
            assert found in allowed, (point, done.hit)
        else:
            assert (done.code, done.errors.count("\n")) == (1, 1), (point, done)
            assert done.errors.startswith("qtool: "), (point, done)
            assert found == case.parts(stage.old), (point, done)
    assert point > 2


def test_a_limit_on_the_size_of_files(stage: Stage) -> None:
    stage.reset(stage.old)
    largest = max(map(len, stage.case.parts(stage.new).values()))
    limits = {"RLIMIT_FSIZE": min(largest - 1, 600)}
    done = stage.warm.run(*stage.case.command, root=stage.root, plain=True, limits=limits)
    check_refused(stage, stage.old, done, limits)
    assert os.strerror(errno.EFBIG) in done.errors
    assert stage.case.parts(files(stage.root)) == stage.case.parts(stage.old)


CLOSED = [(0,), (1,), (2,), (0, 1, 2)]


@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_no_file_gets_the_number_of_a_closed_stream(closed: tuple[int, ...], stage: Stage) -> None:
    stage.reset(stage.sources)
    done = stage.warm.run(*stage.case.command, root=stage.root, plain=True, closed=closed)
    assert (done.code, done.out, done.errors) == (0, "", "")
    assert stage.case.parts(files(stage.root)) == stage.case.parts(stage.new)


EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = "qtool: out of memory: use a machine with more, or smaller tensors\n"
LARGE = np.zeros((2048, 4096), np.float32)
TIGHT: dict[str, list[str]] = {
    "x.npy": ["quantize", "x.npy", "--dtype", "int4", "-o", "y.safetensors"],
    "x.npz": ["dynamic", "x.npz", "-o", "y.npz"],
    "x.safetensors": ["quantize", "x.safetensors", "--dtype", "int8", "-o", "y.safetensors"],
    "x.onnx": ["quantize", "x.onnx", "--dtype", "int8", "-o", "y.onnx"],
}


@pytest.mark.parametrize("name", TIGHT)
def test_too_little_memory_is_one_line(name: str, warm: Warm, tmp_path: Path) -> None:
    if name == "x.npy":
        np.save(tmp_path / name, LARGE)
    elif name == "x.npz":
        np.savez_compressed(tmp_path / name, x=np.tile(LARGE, (4, 1)))
    elif name == "x.safetensors":
        save_file({"x": LARGE}, tmp_path / name)
    else:
        node = helper.make_node("MatMul", ["a", "x"], ["y"])
        tensors = [onnx_models.initializer("x", LARGE)]
        made = onnx_models.model([node], tensors, inputs={"a": (None, 2048)})
        onnx_models.save(made, tmp_path / name)
    ended = []
    for room in (-256, 0, 20, 130, 131, 135, 140, 150, 170, 200, 260, 500, 600, 1024):
        limits = {"RLIMIT_AS": room << 20}
        done = warm.run(*TIGHT[name], "-q", "--force", root=tmp_path, plain=True, limits=limits)
        ended.append(done.code)
        if done.code:
            assert done.errors == SHORT
            assert [path.name for path in tmp_path.iterdir()] == [name]
    assert ended == sorted(ended, reverse=True)
    assert ended[-1] == 0
    assert name != "x.npz" or ended[0] == 1  # members are read whole


def test_memory_that_is_not_there() -> None:
    memory.check(1 << 20)
    with pytest.raises(MemoryError):
        memory.check(1 << 60)
    assert memory.caused(MemoryError())
    assert not memory.caused(ValueError())
    assert not memory.caused(OSError(errno.ENOSPC, "full"))


ALLOWED = range(20_000, 260_000, 16_000)
COMMANDS = [
    ["quantize", "x.npy", "--dtype", "int4", "-o", "y.npz", "--force"],
    ["inspect", "x.npy", "--stats"],
    ["report", "r.json", "-o", "r.html", "--force"],
]


def limited(kilobytes: int, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in that much memory."""
    program = ["sh", "-c", f'ulimit -v {kilobytes}; exec "$@"', "sh", *PYTHON, *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_too_little_memory_to_begin_with(words: list[str], tmp_path: Path) -> None:
    """What fails may be any import, in any words but ours."""
    np.save(tmp_path / "x.npy", np.ones(64, np.float32))
    made = ["dynamic", "x.npy", "-o", "z.npz", "--report", "r.json", "-q"]
    subprocess.run([*PYTHON, *made], cwd=tmp_path, check=True)
    for kilobytes in ALLOWED:
        before = files(tmp_path)
        done = limited(kilobytes, words, tmp_path)
        if done.returncode:
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == SHORT
            assert files(tmp_path) == before


@pytest.mark.parametrize("megabytes", [300, 700, 1000])
def test_too_little_memory_for_the_threads_of_onnxruntime(megabytes: int, tmp_path: Path) -> None:
    """Where it cannot start one it waits for the others without end."""
    words = ["capture", EXAMPLES / "digits.onnx", EXAMPLES / "digits_inputs.npy", "-o", "c.npz"]
    done = limited(megabytes << 10, [*map(str, words), "--jobs", "16"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", SHORT)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("name", ["quantize safetensors", "quantize onnx data", "quantize folder"])
def test_a_file_system_that_is_full(name: str, warm: Warm, tmp_path: Path) -> None:
    """A real one, where the tests run as root."""
    if os.geteuid():
        return
    case = CASES[name]
    small = tmp_path / "small"
    small.mkdir()
    case.sources(tmp_path)
    before = files(tmp_path)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "qtool", small]
    subprocess.run(mount, check=True)
    try:
        command = [f"small/{word}" if word == case.dst else word for word in map(str, case.command)]
        done = warm.run(*command, root=tmp_path, plain=True)
        assert (done.code, done.out) == (1, "")
        full = os.strerror(errno.ENOSPC)
        assert re.fullmatch(f"qtool: .*cannot be written: {full}; free some .*\n", done.errors)
        assert files(small) == {}
    finally:
        subprocess.run(["umount", small], check=True)
    assert files(tmp_path) == before | {"small/": b""}

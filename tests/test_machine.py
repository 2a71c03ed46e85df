"""Compiled kernels are kept on disk, and what is kept may be missing, damaged or unwritable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool.kernels import machine


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders, which are not there yet, for the code to be kept in."""
    paths = [tmp_path / "package" / "__pycache__", tmp_path / "user" / "qtool"]
    monkeypatch.setattr(machine, "_folders", lambda: iter(paths))
    return paths


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no kernels yet."""
    monkeypatch.setattr(machine, "_loaded", {})


def test_code_is_kept_in_the_first_folder_and_read_back(folders: list[Path]) -> None:
    assert machine._stored_code() is None
    machine._store(b"code")
    assert machine._stored_code() == b"code"
    assert [path.name for path in folders[0].iterdir()] == [machine._file_name()]
    assert not folders[1].exists()


def test_a_folder_that_cannot_be_written_gives_way_to_the_users(folders: list[Path]) -> None:
    folders[0].parent.mkdir()
    folders[0].write_text("a file where the folder should be")
    machine._store(b"code")
    assert machine._stored_code() == b"code"
    assert (folders[1] / machine._file_name()).is_file()


def test_nothing_that_can_be_written_is_no_error(folders: list[Path]) -> None:
    for folder in folders:
        folder.parent.mkdir()
        folder.write_text("")
    assert not machine._store(b"code")
    assert machine._stored_code() is None


@pytest.mark.parametrize("damage", ["empty", "short", "changed", "another"])
def test_damaged_code_is_not_taken(folders: list[Path], damage: str) -> None:
    machine._store(b"the code")
    path = folders[0] / machine._file_name()
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "short": content[:-1],
        "changed": content[:-1] + b"E",
        "another": bytes(32) + b"the code",
    }
    path.write_bytes(damaged[damage])
    assert machine._stored_code() is None


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("danger", ["another user's", "for all to write"])
def test_code_that_somebody_else_may_have_written_is_not_taken(
    folders: list[Path], danger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine._store(b"code")
    assert machine.is_kept()
    path = folders[0] / machine._file_name()
    if danger == "for all to write":
        path.chmod(0o666)
    else:  # as it is where the folder is in /tmp
        path.chmod(0o644)
        mine = os.stat
        info = path.stat()
        other = os.stat_result((*info[:4], 12345, *info[5:10]))
        monkeypatch.setattr(os, "stat", lambda p, **k: other if p == path else mine(p, **k))
        monkeypatch.setattr(os, "fstat", lambda _: other)
    assert not machine.is_kept()
    assert machine._stored_code() is None


def test_the_file_is_named_after_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine._file_name()
    monkeypatch.setattr(machine, "_cpu", lambda: ("generic", ""))
    assert machine._file_name() != here


def test_without_a_home_there_is_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert [path.name for path in machine._folders()] == ["__pycache__"]


@pytest.mark.parametrize("place", ["here", "./here"])
def test_a_folder_below_the_current_one_is_no_cache(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert [str(path) for path in machine._folders()][1:] == ["/somewhere/.cache/qtool"]
    monkeypatch.setenv("HOME", place)
    assert len(list(machine._folders())) == 1


def test_no_settings_for_numba_are_taken_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / ".numba_config.yaml").write_text("debug: 1\n")
    script = "from qtool.kernels import machine; machine._compiled_code(None)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("qtool.errors.QtoolError: .numba_config.yaml: ")


@pytest.mark.usefixtures("_fresh")
def test_kernels_are_compiled_once_and_said_to_be(folders: list[Path]) -> None:
    notes: list[str] = []
    assert not machine.is_kept()
    machine.load(notes.append)
    assert notes == ["compiling kernels, once for this machine..."]
    kept = (folders[0] / machine._file_name()).read_bytes()
    machine._loaded.clear()
    assert machine.is_kept()
    machine.load(notes.append)
    assert len(notes) == 1
    assert (folders[0] / machine._file_name()).read_bytes() == kept


SCRIPT = """
import hashlib, json, pathlib, sys
import qtool, qtool.engine
from qtool.kernels import machine

qtool.engine.kernels_pay = lambda elements: True
if sys.argv[1:]:
    machine._folders = lambda: iter([pathlib.Path("/proc/nowhere")])
for dtype, block in (("int8", None), ("int4", 32), ("float8e4m3fn", 128), ("uint8", 16)):
    axis = 0 if block is None else None
    report = qtool.quantize_file(
        "x.npy", "q.safetensors", dtype=dtype, axis=axis, block_size=block, force=True
    )
    qtool.dequantize_file("q.safetensors", "d.safetensors", force=True)
    for name in ("q.safetensors", "d.safetensors"):
        print(hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest())
    print(json.dumps(report["tensors"]))
"""


def test_kernels_for_any_processor_give_the_same_bytes(tmp_path: Path) -> None:
    """Without wide vectors and instructions for rounding, and with nowhere to keep the code."""
    x = np.random.default_rng(0).standard_normal((3000, 1024)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")}
    results = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path, env=environment,
            check=True, capture_output=True, text=True,
        ).stdout
        for arguments, environment in (
            ([], plain), (["nowhere"], plain | {"NUMBA_CPU_NAME": "generic"})
        )
    ]  # fmt: skip
    assert results[0].count("\n") == 12
    assert results[0] == results[1]


def test_numbers_of_another_type_or_order_are_no_arguments() -> None:
    x = np.zeros((3, 4), np.float32)
    assert machine.address(x, "f4") == x.ctypes.data
    for wrong in (x.astype(np.float64), x.T):
        with pytest.raises(TypeError, match=f"{wrong.dtype}, but float32 in C order is expected"):
            machine.address(wrong, "float32")


@pytest.mark.parametrize(
    ("name", "features", "found"),
    [
        ("generic", None, ("generic", "")),
        ("generic", "+avx2", ("generic", "+avx2")),
        ("skylake-avx512", "+avx512f", ("skylake-avx512", "+avx512f,-prefer-256-bit")),
    ],
)
def test_the_processor_is_the_one_that_variables_name(
    name: str, features: str | None, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    if features is not None:
        monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert machine._cpu.__wrapped__() == found

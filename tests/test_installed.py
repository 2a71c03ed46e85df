"""The wheel, installed with what it requires where nothing can be written, as users have it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from confined import confined
from every_command import COMMANDS, make_sources

pytestmark = pytest.mark.network  # packages come from the registry

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("every_command.py")
BUILD = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])"
IMPORT_ALL = """
import importlib, pkgutil, qtool
for module in pkgutil.walk_packages(qtool.__path__, "qtool."):
    if module.name != "qtool.__main__":
        importlib.import_module(module.name)
"""
# What may come in the way of a module that qtool, or what it imports, wants; some that Python
# itself imports before it runs a module stand in the second line.
NAMES = ("json", "numpy", "onnx", "rich", "jinja2", "random", "secrets", "tomllib")
EARLY = ("enum", "qtool", "types", "typing")
SMALL = ("w.safetensors -o q.safetensors", "q8.onnx", "q.html", "q.png")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where qtool and python are in a new virtual environment, which nobody can write to."""
    folder = tmp_path_factory.mktemp("new")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True, timeout=60)
    [wheel] = folder.glob("*.whl")
    place = folder / "venv"
    for command in (
        ["venv", "--python", sys.executable, place],
        ["pip", "install", "--python", place, f"qtool[runtime] @ {wheel.as_uri()}"],
        ["pip", "check", "--python", place],
    ):
        subprocess.run([sys.executable, "-m", "uv", "--quiet", *command], check=True, timeout=300)
    folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    yield place / "bin"
    for path in folders:
        path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an empty home, one for temporary files, and work to do."""
    for name in ("house", "tmp", "work"):
        (tmp_path / name).mkdir()
    make_sources(tmp_path / "work")
    return tmp_path


def run(
    place: Path, *command: str | Path, folder: str = "work", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody of whom the environment knows nothing, without a network."""
    told = {"PATH": os.defpath, "HOME": str(place / "house"), "TMPDIR": str(place / "tmp")}
    return subprocess.run(
        confined(*command), cwd=place / folder, env=told | variables, capture_output=True,
        text=True, timeout=250, check=False,
    )  # fmt: skip


def succeeds(place: Path, *command: str | Path, folder: str = "work", **variables: str) -> str:
    """The lines that a command, which succeeds, has for standard error."""
    done = run(place, *command, folder=folder, **variables)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "Traceback" not in done.stderr
    assert "atplotlib" not in done.stderr
    assert "Warning" not in done.stderr
    assert os.listdir(place / "tmp") == []
    return done.stderr


def test_every_command_runs(programs: Path, place: Path) -> None:
    for line in COMMANDS:
        succeeds(place, programs / "qtool", *shlex.split(line))


@pytest.mark.parametrize(
    "flags",
    [["-I", "-OO"], ["-W", "error", "-X", "utf8=0"], ["-X", "dev"]],
    ids=" ".join,
)
def test_python_may_be_told_much(flags: list[str], programs: Path, place: Path) -> None:
    said = succeeds(place, programs / "python", *flags, SCRIPT, LC_ALL="C")
    assert said.count("\n+ ") + 1 == len(COMMANDS)


def test_every_module_needs_no_more_than_is_required(programs: Path, place: Path) -> None:
    succeeds(place, programs / "python", "-W", "error", "-c", IMPORT_ALL)


@pytest.mark.parametrize("home", ["none", "missing", "locked", "relative"])
def test_no_home_is_needed(home: str, programs: Path, place: Path) -> None:
    (place / "house").chmod(0o555)
    path = {
        "none": "",
        "missing": "/nowhere/at/all",
        "locked": str(place / "house"),
        "relative": ".",
    }
    said = succeeds(place, programs / "python", SCRIPT, *SMALL, HOME=path[home])
    assert said.count("+ report") == 2
    assert not (place / "work" / ".cache" / "qtool").exists()


def large(place: Path) -> list[str]:
    """A command for which kernels are compiled."""
    x = np.lib.format.open_memmap(
        place / "work" / "large.npy", "w+", np.float16, (1 << 12, 1 << 13)
    )
    del x  # all zeros, and a hole in the file
    return ["quantize", "large.npy", "--dtype", "int8", "-o", "large.safetensors"]


def test_kernels_are_kept_in_the_home(programs: Path, place: Path) -> None:
    command = [programs / "qtool", *large(place)]
    assert succeeds(place, *command).startswith("compiling kernels, once for this machine...\n")
    assert "compiling" not in succeeds(place, *command, "--force")
    [kept] = (place / "house" / ".cache" / "qtool").iterdir()
    assert kept.suffix == ".o"


def test_kernels_need_not_be_kept(programs: Path, place: Path) -> None:
    (place / "house").chmod(0o555)
    command = [programs / "qtool", *large(place)]
    assert "every large run compiles them again\n" in succeeds(place, *command)
    assert (place / "work" / "large.safetensors").exists()


def test_the_current_folder_need_not_be_writable(programs: Path, place: Path) -> None:
    (place / "work").chmod(0o555)
    for line in (
        "quantize w.safetensors -o ../house/q.safetensors --dtype int8",
        "inspect ../house/q.safetensors --stats",
        "report ../house/q.report.json -o ../house/q.html",
    ):
        succeeds(place, programs / "qtool", *line.split())
    done = run(place, programs / "qtool", *["quantize", "w.safetensors", "--dtype", "int8"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("qtool: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("start", "names"),
    [("qtool", NAMES + EARLY), ("python -P -m qtool", NAMES + EARLY), ("python -m qtool", NAMES)],
)
def test_files_in_the_current_folder_are_not_imported(
    start: str, names: tuple[str, ...], programs: Path, place: Path
) -> None:
    for name in names:
        (place / "work" / f"{name}.py").write_text("raise SystemExit('taken')")
    program, *words = start.split()
    for line in COMMANDS:
        if any(part in line for part in SMALL):
            succeeds(place, programs / program, *words, *shlex.split(line))

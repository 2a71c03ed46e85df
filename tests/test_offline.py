"""No command uses a network, needs root's rights, or leaves anything but what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from confined import BAD_CALL, confined
from every_command import COMMANDS, make_sources

from qtool.cli import app

SCRIPT = Path(__file__).with_name("every_command.py")
# What says where things are kept, or that they are not.
PLACES = ("MPLCONFIGDIR", "ORT_DISABLE_TELEMETRY", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


def files(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command has run."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir()
    make_sources(folder / "work")
    kept = {name: value for name, value in os.environ.items() if name not in PLACES}
    done = subprocess.run(
        confined(sys.executable, "-O", SCRIPT),
        cwd=folder / "work",
        env=kept | {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stderr.count("\n+ ") + 1 == len(COMMANDS)
    return folder


def test_every_command_is_run() -> None:
    names = {getattr(c.callback, "__name__", "") for c in app.registered_commands}
    assert names <= {line.split()[0] for line in COMMANDS}


def test_they_need_no_network_and_write_their_files(place: Path) -> None:
    named = {line.partition(" -o ")[2].split(" ")[0] for line in COMMANDS} - {""}
    assert {name for name in named if not (place / "work" / name).exists()} == set()


def test_the_users_folder_gets_a_list_of_fonts_alone(place: Path) -> None:
    """No settings, and no number by which a library knows the machine again."""
    assert [name.split("-")[0] for name in files(place / "home")] == [".cache/matplotlib/fontlist"]


def test_nothing_stays_in_the_folder_of_temporary_files(place: Path) -> None:
    assert os.listdir(place / "tmp") == []


@pytest.mark.parametrize(
    ("library", "code"),
    [("socket", "socket.socket()"), ("ctypes", "ctypes.CDLL(None).socket(2,1,0)")],
)
def test_a_socket_would_have_ended_them(library: str, code: str) -> None:
    command = confined(sys.executable, "-c", f"import {library}; {code}")
    assert subprocess.run(command, check=False).returncode == BAD_CALL


def test_others_on_the_same_machine_may_be_asked() -> None:
    code = "import socket; socket.socket(socket.AF_UNIX).close()"
    assert subprocess.run(confined(sys.executable, "-c", code), check=False).returncode == 0

"""Temporary folders: they go with their process, or with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from command import ok

from qtool.formats import scratch

HOLD = """
import sys
from qtool.formats import scratch
with scratch.folder() as folder:
    (folder / "array").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_folder_is_removed_with_what_is_in_it(place: Path) -> None:
    with scratch.folder() as made:
        assert made.parent.parent == place
        assert made.parent.stat().st_mode & 0o777 == 0o700
        (made / "sub").mkdir()
        (made / "sub" / "file").write_bytes(b"x")
    assert os.listdir(place) == []


def test_what_a_killed_process_left_goes_and_what_another_holds_stays(place: Path) -> None:
    (place / "qtool-mine").mkdir()
    (place / ".qtool-0123456789abcdef0").mkdir()
    (place / ".qtool-0123456789abcdef").symlink_to("qtool-mine")
    others = set(os.listdir(place))
    with holder() as killed, holder() as running:
        assert killed.stdout is not None
        assert running.stdout is not None
        left, held = (
            Path(each.stdout.readline().strip()).parent.name for each in (killed, running)
        )
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert set(os.listdir(place)) == others | {left, held}
        with scratch.folder() as made:
            assert set(os.listdir(place)) == others | {held, made.parent.name}
        assert (place / held / "files" / "array").read_bytes() == b"half"
        running.communicate("", timeout=60)
    assert set(os.listdir(place)) == others


def test_pipes_leave_nothing_and_remove_leftovers(place: Path) -> None:
    left = place / ".qtool-0123456789abcdef"
    left.mkdir()
    (left / "array").write_bytes(b"half")
    source = place / "x.npy"
    np.save(source, np.ones((2, 2), np.float32))
    done = ok("quantize", "-", "--dtype", "int8", "-o", "-", stdin=source.read_bytes())
    assert done.out[8:9] == b"{"
    assert os.listdir(place) == ["x.npy"]

"""fetch(): one download, whole or not at all."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import fetch as module
import pytest
from fetch import fetch


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The pip commands that ran; each leaves a wheel with the file a/b.txt."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "p-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a/b.txt", "hello")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_package_is_downloaded_once_without_its_dependencies(
    downloads: list[list[str]],
) -> None:
    assert fetch("p==1", "a/b.txt").read_text() == "hello"
    assert fetch("p==1", "a/b.txt").read_text() == "hello"
    assert len(downloads) == 1
    assert {"download", "--no-deps", "p==1"} <= set(downloads[0])


def test_two_that_ask_at_once_share_one_download(downloads: list[list[str]]) -> None:
    threads = [threading.Thread(target=fetch, args=("p==1", "a/b.txt")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1


def test_a_missing_member_is_named(downloads: list[list[str]]) -> None:
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        fetch("p==1", "no_such_file")


def test_a_failed_download_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "no such version\n")

    monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"pip cannot download p==9: no such version"):
        fetch("p==9", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["p==9.lock"]

"""Runs a command over and over, killed at one point after another, then a second one.

    python killed.py FOLDER FIRST SECOND

FIRST, SECOND: arguments of qtool, as JSON lists; "{}" in them stands for a folder below FOLDER that
is new for every point. Points are the calls that change the file system: the process kills itself
before the first of them, then after it, before the second one, and so on, until FIRST runs to its
end. Prints one JSON list: for every point the call, and the exit code of SECOND.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qtool.jobs.quantize_folder  # so that the forks need not
from qtool.cli import main

CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "pwrite")


class Killer:
    """Kills this process at the point with a number, counted from 0."""

    def __init__(self, point: int) -> None:
        self.left = point
        for name in CALLS:
            setattr(os, name, self.around(getattr(os, name), name))

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step(f"before {name}")
            result = call(*args, **kwargs)
            self.step(f"after {name}")
            return result

        return counted

    def step(self, name: str) -> None:
        if self.left == 0:
            os.write(3, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def child(arguments: list[str], point: int | None, channel: int) -> int:
    """Run a command in a fork; how it ended, as os.waitpid() says it."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    os.dup2(channel, 3)
    if point is not None:
        Killer(point)
    sys.argv = ["qtool", *arguments]
    code = 70
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    os._exit(code)


def points(folder: Path, first: list[str], second: list[str]) -> list[tuple[str, int]]:
    assert qtool.jobs.quantize_folder
    found: list[tuple[str, int]] = []
    while True:
        own = folder / str(len(found))
        own.mkdir()
        reader, writer = os.pipe()
        status = child([a.replace("{}", str(own)) for a in first], len(found), writer)
        os.close(writer)
        name = os.read(reader, 100).decode()
        os.close(reader)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, status
            return found
        status = child([a.replace("{}", str(own)) for a in second], None, 2)
        found.append((name, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    done = points(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(done))

"""Commands in processes of their own in which something goes wrong, see warm.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

Files = dict[str, bytes]

# Tests run at some of the points where something can go wrong, and, marked, at every one.
STEPS = pytest.mark.parametrize(
    "step", [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.faults)]
)


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: its exit code, or minus a signal; 70 after a traceback.

    calls: that touched files below the root: {"call", "paths"}; "create" is an open that may make
    the file. hit: the one that went wrong; None:
    there was no such point.
    """

    code: int
    out: str
    err: str
    calls: list[dict[str, Any]]
    hit: str | None

    @property
    def errors(self) -> str:
        """Standard error without warnings about what was asked for."""
        lines = self.err.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("warning: "))


class Warm:
    """An interpreter that has imported qtool, and runs commands in forks of it.

    injected: how many faults there have been, by their kind.
    """

    def __init__(self) -> None:
        script = Path(__file__).with_name("warm.py")
        self.injected: Counter[str] = Counter()
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *args: str | Path, root: Path, **fault: Any) -> Ended:
        """One command; fault: see warm.Faults and warm.limited()."""
        return self.together([*args], root=root, faults=[fault])[0]

    def together(
        self, *commands: list[str | Path], root: Path, faults: list[Mapping[str, Any]]
    ) -> list[Ended]:
        """Commands of which each is begun when the one before it pauses or has ended; then they go
        on, in the same order."""
        asked = [
            {"args": list(map(str, args)), "root": str(root), **fault}
            for args, fault in zip(commands, faults, strict=True)
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        done = [Ended(**one) for one in json.loads(self._process.stdout.readline())]
        for one, fault in zip(done, faults, strict=True):
            if one.hit is not None:
                self.injected[kind(fault)] += 1
        return done

    def close(self) -> None:
        self._process.__exit__(None, None, None)


def kind(fault: Mapping[str, Any]) -> str:
    if "signal" in fault:
        return f"signal {fault['signal']}"
    if "errno" in fault:
        return os.strerror(fault["errno"])
    if "change" in fault:
        return f"file {fault['change'][0]}"
    return "pause"


def files(folder: Path) -> Files:
    """Every file in a folder and below, and every empty folder, as its name and a slash."""
    found: Files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = b"-> " + os.fsencode(os.readlink(path))
        elif path.is_file():
            found[name] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            found[name + "/"] = b""
    return found


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()

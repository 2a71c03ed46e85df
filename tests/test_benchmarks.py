"""The benchmarks run, on small data, and print every line of their tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


LINES = {"files": 16, "checkpoints": 4, "disk": 1, "memory": 4, "growth": 5, "load": 2, "search": 5}


@pytest.mark.parametrize(("part", "lines"), LINES.items())
def test_every_part_prints_its_lines(part: str, lines: int) -> None:
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "--runs", "1", "--scale", "0.002"]
    run = subprocess.run([*command, part], capture_output=True, text=True, check=True)
    table = run.stdout.split("|---|---|---|---|---|\n")[1].splitlines()
    assert len(table) == lines
    for line in table:
        _, name, figure, *_ = (cell.strip() for cell in line.split("|"))
        assert name
        assert figure[0].isdigit()

"""`qtool inspect --plot` and --include."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ok, process, refused
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.safetensors"


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """64, 16, 4 and 1 values at -1, 0, 1 and 2: columns of 8, 4, 2 and 1 lines."""
    path = tmp_path / "steps.npy"
    np.save(path, np.repeat(np.float32([-1, 0, 1, 2]), [64, 16, 4, 1]))
    return path


def plotted(*args: str | Path, **environment: str) -> str:
    env = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "utf-8", **environment}
    done = process("inspect", "--plot", *args, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode(env["PYTHONIOENCODING"])


DRAWN = """\

steps: float32 85, rms 0.92, peak/rms 2.2
      64 │█
         │█
      36 │█
         │█
      16 │█         █
         │█         █
       4 │█         █         █
         │█         █         █        █
       0 └──────────────────────────────
          -1        0                  2
"""


def test_columns_stand_on_their_values(steps: Path) -> None:
    head, _, rest = plotted(steps).partition("\n")
    assert head.endswith("1 tensor, not quantized; counts on a square-root scale")
    assert rest == DRAWN


def test_other_locales_get_ascii(steps: Path) -> None:
    rest = plotted(steps, PYTHONIOENCODING="ascii").partition("\n")[2]
    assert rest == DRAWN.translate(str.maketrans("█│─└", "#|-+"))


def test_colours_are_not_used_and_the_width_is_that_of_the_terminal(steps: Path) -> None:
    assert plotted(steps, NO_COLOR="1") == plotted(steps)
    for columns, width in (("60", 60), ("400", 120), ("10", 40)):
        lines = plotted(steps, COLUMNS=columns).splitlines()[3:]
        assert max(map(len, lines)) == width
    lines = plotted(steps, COLUMNS="").splitlines()[3:]
    assert max(map(len, lines)) == 80


def test_parts_of_a_line_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "parts.npy"  # 64 lines of eighths: 8 of 64 squared is 1 of 64
    np.save(path, np.repeat(np.float32([0, 1]), [4096, 1]))
    lines = plotted(path).splitlines()
    assert lines[3 + 7] == " " * 9 + "│█" + " " * 28 + "▁"
    ascii_lines = plotted(path, PYTHONIOENCODING="ascii").splitlines()
    assert ascii_lines[3 + 7] == " " * 9 + "|#" + " " * 28 + "."


@pytest.mark.parametrize(
    ("values", "title"),
    [
        (np.full((2, 3), 5, np.int32), "x: int32 2x3, rms 5, peak/rms 1.0"),
        (np.zeros(3, np.float32), "x: float32 3, rms 0, peak/rms -"),
        (
            np.float32([1, np.nan, np.inf]),
            "x: float32 3, rms 1, peak/rms 1.0, 1 nan, 1 inf",
        ),
        (np.float32(2), "x: float32 scalar, rms 2, peak/rms 1.0"),
    ],
)
def test_odd_tensors_are_drawn(values: Any, title: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values)
    lines = plotted(tmp_path / "x.npy").splitlines()
    assert lines[2] == title
    assert len(lines) == 13
    assert lines[3][9:].strip("│ ") == "█"


def test_tensors_without_values_are_not_drawn(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.empty((0, 4), np.float32))
    assert len(plotted(tmp_path / "x.npy").splitlines()) == 1


def test_of_many_tensors_those_with_the_largest_peaks_are_drawn(tmp_path: Path) -> None:
    tensors = {f"t{i:02}": np.float32([1] * 99 + [i]) for i in range(1, 20)}
    save_file(tensors, tmp_path / "many.safetensors")
    text = plotted(tmp_path / "many.safetensors")
    titles = [line.partition(":")[0] for line in text.splitlines() if "peak/rms" in line]
    assert titles == [f"t{i:02}" for i in range(19, 7, -1)]
    assert text.endswith("\nand 7 more tensors with smaller peaks; choose by --include PATTERN\n")
    chosen = plotted(tmp_path / "many.safetensors", "--include", "t0*", "--include", "re:t1[0-5]")
    titles = [line.partition(":")[0] for line in chosen.splitlines() if "peak/rms" in line]
    assert titles == [f"t{i:02}" for i in range(1, 16)]


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[31mb": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    assert "a?[31mb: float32 3" in plotted(tmp_path / "x.safetensors")


def test_what_codes_stand_for_is_drawn(tmp_path: Path) -> None:
    target = tmp_path / "q.safetensors"
    ok("quantize", DIGITS, "-o", target, "--dtype", "int4", "--block-size", "32", "-q")
    text = plotted(target, "--include", "fc1.weight")
    assert text.splitlines()[2].startswith("fc1.weight: int4 /32 128x64, rms 0.2")


def test_tensors_are_chosen_by_name() -> None:
    found = ok("inspect", DIGITS, "--include", "*.bias", "--json").json
    assert [row["name"] for row in found["tensors"]] == ["fc1.bias", "fc2.bias", "fc3.bias"]
    assert found["totals"] == {"tensors": 3, "elements": 202, "bytes": 808}
    line = refused("inspect", DIGITS, "--include", "*.bias", "--include", "fc9*", code=2)
    assert line == "--include: 'fc9*' matches no tensor; see qtool inspect"


def test_a_drawing_is_no_json() -> None:
    line = refused("inspect", DIGITS, "--plot", "--json", code=2)
    assert line == "--plot: draws for people; use --stats --json for the figures"

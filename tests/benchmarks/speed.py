"""Print what commands cost against `cp` of the same bytes, as ratios of medians in one run.

    python tests/benchmarks/speed.py [GIGABYTES [RUNS]]

Data is made in /dev/shm, so that the disk plays no part; 2 GB and 5 runs where nothing is said.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

ROWS, COLUMNS = 4096, 4096
QTOOL = [sys.executable, "-m", "qtool"]
# name, what follows `quantize SRC -o DST`, source: its type
WORK: tuple[tuple[str, str, str], ...] = (
    ("float32 -> int8 per axis", "--dtype int8", "F32"),
    ("float32 -> int4 block 32", "--dtype int4 --block-size 32", "F32"),
    ("float32 -> float8e4m3fn block 128", "--dtype float8e4m3fn --block-size 128", "F32"),
    (
        "float32 -> float4e2m1 block 16, float8e4m3fn scales",
        "--dtype float4e2m1 --block-size 16 --scale-dtype float8e4m3fn",
        "F32",
    ),
    ("bfloat16 -> int4 block 32", "--dtype int4 --block-size 32", "BF16"),
)


def make(path: Path, dtype: str, gigabytes: float) -> None:
    """A .safetensors file of equal normal weights in layers."""
    element = np.float32 if dtype == "F32" else ml_dtypes.bfloat16
    layer = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    data = layer.astype(element).tobytes()
    count = max(1, round(gigabytes * 1e9 / len(data)))
    header = {
        f"layers.{i}.weight": {
            "dtype": dtype,
            "shape": [ROWS, COLUMNS],
            "data_offsets": [i * len(data), (i + 1) * len(data)],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(data)


def seconds(action: Callable[[], object], runs: int) -> float:
    """Median wall time; the first run is not counted."""
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def call(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def peak(*command: str | Path) -> float:
    """Largest resident memory of a command, in MB."""
    pid = os.posix_spawnp(str(command[0]), [str(word) for word in command], dict(os.environ))
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_maxrss / 1000


@contextmanager
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"{gigabytes} GB, {os.cpu_count()} cores, median of {runs}")
    print(f"{'work':<54}{'seconds':>8}{'/ cp':>7}{'back':>7}{'MB':>6}")
    with workspace() as folder:
        made = ""
        source, target, back = (folder / f"{name}.safetensors" for name in ("w", "q", "d"))
        for name, options, dtype in WORK:
            if dtype != made:
                make(source, dtype, gigabytes)
                made = dtype
            quantize = [*QTOOL, "quantize", source, "-o", target, "--force", "-q", *options.split()]
            dequantize = [*QTOOL, "dequantize", target, "-o", back, "--force", "-q"]
            took = seconds(lambda command=quantize: call(*command), runs)
            copying = seconds(lambda: call("cp", source, folder / "copy"), runs)
            (folder / "copy").unlink()
            restoring = seconds(lambda command=dequantize: call(*command), runs)
            copying_back = seconds(lambda: call("cp", back, folder / "copy"), runs)
            (folder / "copy").unlink()
            memory = peak(*quantize)
            back.unlink()
            print(
                f"{name:<54}{took:>8.2f}{took / copying:>7.2f}"
                f"{restoring / copying_back:>7.2f}{memory:>6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

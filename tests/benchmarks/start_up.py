"""Start-up times: `qtool --help` and a tiny `qtool quantize` against `import numpy`.

    python tests/benchmarks/start_up.py [RUNS]

Prints the median time of each in milliseconds, and how many times `import numpy` that is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RUNS = 11
TINY = "qtool quantize tiny.npy --dtype int8"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "qtool --help": ["-m", "qtool", "--help"],
    TINY: ["-m", "qtool", *TINY.split()[1:], "--force"],
}


def milliseconds(arguments: list[str], folder: str) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    return (time.perf_counter() - start) * 1000


def main(runs: int) -> None:
    """Measure every command `runs` times, in turns, so that a slow moment hits them all."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "tiny.npy"), np.ones((8, 8), np.float32))
        rounds = [
            {name: milliseconds(arguments, folder) for name, arguments in COMMANDS.items()}
            for _ in range(runs + 1)
        ][1:]  # the first one fills the caches
    medians = {name: statistics.median(times[name] for times in rounds) for name in COMMANDS}
    for name, median in medians.items():
        print(f"{name:40} {median:7.0f} ms {median / medians['import numpy']:6.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS)

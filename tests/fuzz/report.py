"""A report: judged by gates, compared with, and made a text and a table of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.mutate import of_json
from fuzz.reports import REPORT
from qtool.jobs.page import write_page
from qtool.render import page
from qtool.report import is_report, read_report, to_json
from qtool.report.gates import Gate, failure_lines, judge

JUSTIFIED = 1000
_GATES = [
    Gate.parse(text)
    for text in (
        "sqnr_db < 20", "mse / rmse > total.mse or not clipped == 0 on w*", "total.clipped > 1",
        "sqnr_db worse by 1 dB", "total.bytes_after worse by 5%", "num_scales * elements > 1",
    )
]  # fmt: skip


def seeds() -> Iterator[bytes]:
    yield json.dumps(REPORT).encode()
    yield json.dumps(REPORT | {"tensors": [], "dry_run": True}).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    path = folder / "r.json"
    path.write_bytes(data)
    is_report(path)
    report = read_report(path)
    for baseline in (report, REPORT):
        failure_lines(judge(_GATES, report, baseline))
    failure_lines(judge(_GATES, REPORT, report))
    to_json(report)
    for kind in ("md", "csv"):
        shown(path, kind)


def shown(path: Path, kind: str) -> None:
    """Make a document of the report, in which there must be no control characters."""
    made = path.with_suffix(f".{kind}")
    write_page(path, str(made), kind, page.drawer(kind))
    assert all(c.isprintable() or c in "\r\n\t" for c in made.read_bytes().decode())

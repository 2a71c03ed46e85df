"""An expression of --fail-if."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.mutate import of_bytes
from fuzz.reports import REPORT
from qtool.report.gates import Gate, failure_lines, judge

JUSTIFIED = 2000
_WORDS = (
    b"sqnr_db", b"total.", b"mse", b" and ", b" or ", b"not ", b" on ", b" worse by ", b"1%",
    b" dB", b"(",
    b")", b"<=", b"!=", b"1e999", b"1e-9999999999", b"'*'", b"re:", b"kB", b"clipped_fraction",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    yield b"sqnr_db < 20"
    yield b"not (mse > 1e-3 and clipped_fraction >= 1%) or total.bits_per_weight > 4.5"
    yield b"sqnr_db worse by 0.5 dB on w*, 're:^e'"
    yield b"total.bytes_after worse by 5%"
    yield b"-rmse * (2 + max_abs_error) / absmax != .5e1"


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng, _WORDS)


def run(data: bytes, folder: Path) -> None:
    gate = Gate.parse(data.decode("utf-8", "surrogateescape"))
    (entry,) = judge([gate], REPORT, REPORT)
    assert entry["passed"] is not bool(entry["failed"])
    failure_lines([entry])

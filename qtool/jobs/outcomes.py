"""What came of quantizing a source in several ways, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool import report
from qtool.jobs.curves import squares
from qtool.plan import Planned
from qtool.recipe import words
from qtool.stats import Stats

# Under their names in a Report: how tensors are quantized, and figures.
_HOW = ("dtype", "granularity", "axis", "block_size", "tile", "scale_dtype")
_OF_SPEC = ("method", "symmetric")
_FIGURES = (
    "bits_per_weight", "bytes_after", "sqnr_db", "relative_error", "rmse", "max_abs_error",
    "clipped_fraction", "weighted_sqnr_db", "weighted_relative_error",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One way to quantize, as words; every tensor's fate; the bytes of the file with them; the
    records and figures of those that are quantized; and how long that took."""

    words: Mapping[str, Any]
    plan: Sequence[Planned]
    file_bytes: int
    tensors: Sequence[tuple[dict[str, Any], Stats]]
    seconds: float

    def row(self) -> dict[str, Any]:
        """What is said of it alone."""
        rows = self.rows()
        totals = report.totals(self.tensors, len(self.plan) - len(rows))
        told = [row for row in rows if row["sqnr_db"] is not None]
        worst = min(told, key=lambda row: row["sqnr_db"], default=None)
        return {
            "words": words.phrase(self.words),
            "preset": self.words.get("preset"),
            **{key: _common([row[key] for row in rows]) for key in (*_HOW, *_OF_SPEC)},
            **{key: totals[key] for key in ("tensors", "skipped", *_FIGURES)},
            "file_bytes_after": self.file_bytes,
            "worst": worst and {key: worst[key] for key in ("name", "sqnr_db")},
            "seconds": round(self.seconds, 6),
        }

    def rows(self) -> list[dict[str, Any]]:
        """What is said of every quantized tensor."""
        specs = [p.spec for p in self.plan if p.spec is not None]
        return [
            {"name": record["name"]}
            | {key: record[key] for key in _HOW}
            | {key: getattr(spec, key) for key in _OF_SPEC}
            | {key: record[key] for key in _FIGURES}
            for spec, (record, _) in zip(specs, self.tensors, strict=True)
        ]

    def over(self, signals: Mapping[str, float]) -> tuple[int, float]:
        """Bytes and squared error of these tensors; those left alone have their size and no
        error. An error that is no number is infinite."""
        errors = [squares(stats)[1] for _, stats in self.tensors]
        nbytes = sum(
            p.bytes_after if p.spec is not None else p.info.nbytes
            for p in self.plan
            if p.info.name in signals
        )
        return nbytes, math.fsum(e if math.isfinite(e) else math.inf for e in errors)


def ordered(outcomes: Sequence[Outcome], *, per_tensor: bool) -> list[dict[str, Any]]:
    """A row for each, ordered by size and error; the Pareto front is marked."""
    signals = {
        record["name"]: squares(stats)[0]
        for outcome in outcomes
        for record, stats in outcome.tensors
    }
    sizes = {p.info.name: p.info.size for p in outcomes[0].plan if p.info.name in signals}
    elements, signal = sum(sizes.values()), math.fsum(signals.values())
    points = [outcome.over(signals) for outcome in outcomes]
    best = front(points)
    rows = []
    for place in sorted(range(len(points)), key=points.__getitem__):
        nbytes, error = points[place]
        has_ratio = signal > 0 and math.isfinite(error) and math.isfinite(signal)
        row = outcomes[place].row() | {
            "overall_bits_per_weight": 8 * nbytes / elements if elements else None,
            "overall_relative_error": math.sqrt(error / signal) if has_ratio else None,
            "pareto": best[place],
        }
        rows.append(row | ({"per_tensor": outcomes[place].rows()} if per_tensor else {}))
    return rows


def front(points: Sequence[tuple[int, float]]) -> list[bool]:
    """Whether each is on the Pareto front: none is as low in both, and lower in one of them."""
    return [
        not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points)
        for one in points
    ]


def _common(values: Sequence[Any]) -> Any:
    """The value that all have; None where they differ."""
    return values[0] if values and all(value == values[0] for value in values) else None

"""Reports as tables for people: results on standard output, the rest on standard error."""

from __future__ import annotations

from qtool.render.bar import progress
from qtool.render.calibration import calibrated, captured
from qtool.render.listing import dtypes, inspected, presets
from qtool.render.report import dequantized, summary, warnings

__all__ = [
    "calibrated",
    "captured",
    "dequantized",
    "dtypes",
    "inspected",
    "presets",
    "progress",
    "summary",
    "warnings",
]

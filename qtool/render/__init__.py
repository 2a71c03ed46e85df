"""Reports as tables for people: results on standard output, the rest on standard error."""

from __future__ import annotations

from qtool.render.bar import progress
from qtool.render.calibration import calibrated, captured
from qtool.render.compare import compared
from qtool.render.gates import gates
from qtool.render.histogram import histogram_bins, plotted
from qtool.render.listing import dtypes, inspected, presets
from qtool.render.planned import planned
from qtool.render.report import dequantized, summary, warnings
from qtool.render.verify import verified

__all__ = [
    "calibrated",
    "captured",
    "compared",
    "dequantized",
    "dtypes",
    "gates",
    "histogram_bins",
    "inspected",
    "planned",
    "plotted",
    "presets",
    "progress",
    "summary",
    "verified",
    "warnings",
]

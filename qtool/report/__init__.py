"""The Report: plain data with the figures of one run."""

from __future__ import annotations

from typing import Any

from qtool.report.build import (
    build,
    build_planned,
    planned_record,
    tensor_record,
    tool,
    totals,
)
from qtool.report.document import is_report, pieces, read_report, to_json

Report = dict[str, Any]

__all__ = [
    "Report",
    "build",
    "build_planned",
    "is_report",
    "pieces",
    "planned_record",
    "read_report",
    "tensor_record",
    "to_json",
    "tool",
    "totals",
]

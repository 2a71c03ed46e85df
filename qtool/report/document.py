"""A Report as a document: strict JSON, and how one is recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_json(report: Mapping[str, Any]) -> str:
    """The report as strict JSON: no NaN and no Infinity."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def is_report(path: Path) -> bool:
    """Whether a file holds a report of qtool's, which another one may replace."""
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":  # a file of weights is not read into memory
                return False
        data = json.loads(path.read_text(encoding="utf-8"))
        return data["tool"]["name"] == "qtool" and "report_version" in data
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False

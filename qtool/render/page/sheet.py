"""The tensors of a report as CSV: a row each, with every figure in full."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from qtool.render.page.figures import plain, rows
from qtool.report.table import is_formula


def document(report: Mapping[str, Any], _pictures: Mapping[str, Any]) -> bytes:
    """CSV (RFC 4180) in UTF-8: the fields of the records in the order in which they come up."""
    records = rows(report, "tensors")
    keys = list(dict.fromkeys(key for record in records for key in record)) or ["name"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([_text(key) for key in keys])
    writer.writerows([_cell(record.get(key)) for key in keys] for record in records)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and all(type(n) is int for n in value):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, (bool, int, float)) else _text(json.dumps(value))


def _text(value: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    shown = plain(value)
    return "'" + shown if is_formula(value) or is_formula(shown) else shown

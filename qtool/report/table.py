"""Results as comma-separated values, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four are full-width
_NESTED = ("per_tensor", "worst")


def to_csv(result: Mapping[str, Any]) -> str:
    """What compare_file() gives, as RFC 4180 has it: one line per combination, with "tensor" empty,
    and after it those of its tensors; then the combinations that are left out, with the reason in
    "left_out".

    Undefined figures are empty. Text that a spreadsheet would take for a formula has a ' before it;
    control characters are question marks.
    """
    rows = [*_rows(result)]
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def is_formula(text: str) -> bool:
    """Whether a spreadsheet may take a text for a formula (OWASP, CSV injection)."""
    return text.lstrip(" ").startswith(_FORMULA)


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["combinations"]:
        worst = row["worst"] or {"name": None, "sqnr_db": None}
        own = {name: value for name, value in row.items() if name not in _NESTED}
        named = {name: row[name] for name in ("words", "preset")}
        yield {
            "tensor": None, **own, "worst": worst["name"], "worst_sqnr_db": worst["sqnr_db"],
            "left_out": None,
        }  # fmt: skip
        for tensor in row.get("per_tensor", ()):
            figures = {name: value for name, value in tensor.items() if name != "name"}
            yield {"tensor": tensor["name"], **named, **figures}
    for row in result["left_out"]:
        yield {"left_out" if name == "reason" else name: value for name, value in row.items()}


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):  # a tile
        return "x".join(map(str, value))
    if isinstance(value, str) and value:
        is_risky = is_formula(value) or not value[0].isprintable()
        shown = "".join(c if c.isprintable() else "?" for c in value)
        return f"'{shown}" if is_risky else shown
    return value

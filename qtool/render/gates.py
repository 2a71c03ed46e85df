"""What gates say of a report, on standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from qtool.render.text import many, new_table, print_line, room, safe, short_names, stream
from qtool.report.gates import phrases

_ROWS = 12  # failures of a gate that are shown; the report has all
_NAMES = 3  # tensors that are named where a gate passes for want of a figure
_FIGURES = 44  # columns that a failure's figures get at least, before they are folded
_INDENT = 2


def gates(report: Mapping[str, Any]) -> None:
    """Each gate, what failed it and where it had no figure to judge."""
    console = stream(err=True)
    for entry in report["gates"]:
        word, style = ("passed", "") if entry["passed"] else ("failed", "red")
        print_line(console, f"gate {word}: {safe(entry['expression'])}", style)
        _failures(console, entry)
        _undefined(console, entry["undefined"])


def _failures(console: Console, entry: Mapping[str, Any]) -> None:
    failed = entry["failed"]
    if not failed:
        return
    cells = [_cell(f, entry["expression"]) for f in failed[:_ROWS]]
    table = new_table("tensor")
    table.add_column("figures", overflow="fold")
    width = room(table, [[cell[:_FIGURES]] for cell in cells], console.width) - _INDENT
    names = [f["tensor"] or ("totals" if f["limit"] else "-") for f in failed[:_ROWS]]
    for name, cell in zip(short_names(names, width), cells, strict=True):
        table.add_row(name, Text(cell))
    console.print(Padding.indent(table, _INDENT))
    if len(failed) > _ROWS:
        print_line(console, f"  and {many(len(failed) - _ROWS, 'more failure')}")


def _cell(failed: Mapping[str, Any], expression: str) -> str:
    """Figures and reason, and the comparison where it is not all of the expression."""
    parts = phrases(failed["figures"], 6) + [failed["reason"]] * bool(failed["reason"])
    limit = failed["limit"]
    is_all = limit is None or " ".join(expression.split()).startswith(limit)
    return safe(", ".join(parts) + ("" if is_all else f": {limit}"))


def _undefined(console: Console, undefined: Sequence[Mapping[str, Any]]) -> None:
    width = console.width // (_NAMES + 1)
    for why in dict.fromkeys(u["why"] for u in undefined):
        names = list(dict.fromkeys(u["tensor"] or "totals" for u in undefined if u["why"] == why))
        more = len(names) - _NAMES
        short = ", ".join(name.plain for name in short_names(names[:_NAMES], width))
        shown = short + (f" and {more} more" if more > 0 else "")
        print_line(console, f"  passed as {why}: {shown}")

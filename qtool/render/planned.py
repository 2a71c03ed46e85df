"""The table of a dry run, on standard output."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from qtool.render.report import warnings
from qtool.render.text import (
    kind,
    many,
    new_table,
    number,
    place,
    print_line,
    print_table,
    room,
    safe,
    short_names,
    size,
    stream,
)

_NUMBER = re.compile(r"\d+")
_SUMS = ("bytes_before", "bytes_after", "elements")


def planned(plan: dict[str, Any]) -> None:
    """What would be quantized, one row for tensors that differ in the numbers in their names
    alone; what would be left alone, by such names too, and the sizes."""
    console = stream(err=False)
    totals = plan["totals"]
    groups = _grouped(plan["tensors"])
    rows = [_cells(group) for group in groups]
    last = ["", "", "", str(totals["tensors"]), *_sizes(totals)]
    table = new_table("tensor", "from", "to", "scales")
    for column in ("count", "before", "after", "bits"):
        table.add_column(column, justify="right", no_wrap=True)
    names = [group["name"] for group in groups]
    width = room(table, [*rows, last], console.width)
    for name, cells in zip(short_names(names, width), rows, strict=True):
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("all", *last, style="bold")
    print_table(console, table)
    _left_alone(plan["skipped"], console)
    before, after = totals["file_bytes_before"], totals["file_bytes_after"]
    ratio = f", {before / after:.2f} times smaller" if after and before > after else ""
    sizes = f"{size(before)} -> {size(after)}{ratio}"
    print_line(console, f"{place(plan['output'])}: {sizes}, not written")
    warnings(plan)


def _grouped(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors, those of like names and kinds together: layers.*.weight."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in tensors:
        words = (_NUMBER.sub("*", row["name"]), *_cells(row | {"count": 1})[:3])
        groups.setdefault(words, []).append(row)
    made = []
    for (name, *_), rows in groups.items():
        sums = {key: sum(row[key] for row in rows) for key in _SUMS}
        bits = 8 * sums["bytes_after"] / sums["elements"] if sums["elements"] else None
        shown = name if len(rows) > 1 else rows[0]["name"]
        made.append(rows[0] | sums | {"name": shown, "count": len(rows), "bits_per_weight": bits})
    return made


def _left_alone(skipped: list[dict[str, Any]], console: Console) -> None:
    """The reasons why tensors are not quantized, one line each, with the names."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for entry in skipped:
        alike = reasons.setdefault(entry["reason"], {})
        alike.setdefault(_NUMBER.sub("*", entry["name"]), []).append(entry["name"])
    for reason, groups in sorted(reasons.items(), key=lambda item: -_count(item[1])):
        names = [words if len(found) > 1 else found[0] for words, found in groups.items()]
        line = f"left alone: {many(_count(groups), 'tensor')}: {reason} ({', '.join(names)})"
        print_line(console, safe(line))


def _count(groups: dict[str, list[str]]) -> int:
    return sum(map(len, groups.values()))


def _cells(row: dict[str, Any]) -> list[str]:
    return [row["source_dtype"], kind(row), row["scale_dtype"], str(row["count"]), *_sizes(row)]


def _sizes(row: dict[str, Any]) -> list[str]:
    return [
        size(row["bytes_before"]),
        size(row["bytes_after"]),
        number(row["bits_per_weight"], ".2f"),
    ]

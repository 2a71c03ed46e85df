"""The table of a dry run, on standard output."""

from __future__ import annotations

from typing import Any

from qtool.render.report import left_alone, warnings
from qtool.render.text import (
    kind,
    many,
    new_table,
    number,
    place,
    print_line,
    room,
    short_names,
    size,
    stream,
)


def planned(plan: dict[str, Any]) -> None:
    """Every tensor that would be quantized, what would be left alone, and the sizes."""
    console = stream(err=False)
    tensors, totals = plan["tensors"], plan["totals"]
    rows = [[row["source_dtype"], kind(row), row["scale_dtype"], *_sizes(row)] for row in tensors]
    last = ["", "", "", *_sizes(totals)]
    table = new_table("tensor", "from", "to", "scales")
    for column in ("before", "after", "bits"):
        table.add_column(column, justify="right", no_wrap=True)
    names = [row["name"] for row in tensors]
    width = room(table, [*rows, last], console.width)
    for name, cells in zip(short_names(names, width), rows, strict=True):
        table.add_row(name, *cells)
    table.add_section()
    table.add_row(many(totals["tensors"], "tensor"), *last, style="bold")
    console.print(table)
    left_alone(plan, console)
    before, after = totals["file_bytes_before"], totals["file_bytes_after"]
    ratio = f", {before / after:.2f} times smaller" if after and before > after else ""
    sizes = f"{size(before)} -> {size(after)}{ratio}"
    print_line(console, f"{place(plan['output'])}: {sizes}, not written")
    warnings(plan)


def _sizes(row: dict[str, Any]) -> list[str]:
    return [
        size(row["bytes_before"]),
        size(row["bytes_after"]),
        number(row["bits_per_weight"], ".2f"),
    ]

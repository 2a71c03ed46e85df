"""The tables of `capture` and `calibrate`, on standard error."""

from __future__ import annotations

from collections import Counter
from typing import Any

from qtool.render.text import (
    many,
    new_table,
    place,
    print_line,
    room,
    safe,
    short_names,
    size,
    stream,
)

ROWS = 12  # tensors that are shown; --json has all


def captured(result: dict[str, Any]) -> None:
    """The table of `capture`: what there is of every weight, and what was left out."""
    console = stream(err=True)
    shown = result["tensors"][:ROWS]
    cells = [[str(row["rows"]), str(row["in_features"])] for row in shown]
    table = new_table("tensor")
    for column in ("rows", "in"):
        table.add_column(column, justify="right", no_wrap=True)
    width = room(table, cells, console.width)
    for name, row in zip(short_names([r["name"] for r in shown], width), cells, strict=True):
        table.add_row(name, *row)
    console.print(table)
    if (more := len(result["tensors"]) - ROWS) > 0:
        print_line(console, f"and {many(more, 'more tensor')}")
    reasons = Counter(entry["reason"] for entry in result["skipped"])
    for reason, count in reasons.most_common():
        print_line(console, f"left out: {many(count, 'tensor')}: {safe(reason)}")
    output = result["output"]
    runs = many(result["samples"]["runs"], "run")
    line = f"{place(output)}: {result['kind']} of {runs}, {size(output['bytes'])}"
    print_line(console, f"{line}, {result['seconds']:.2f} s")

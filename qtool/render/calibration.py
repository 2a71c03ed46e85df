"""The tables of `capture` and `calibrate`, on standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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

ROWS = 12  # tensors that are shown; --json has all


def calibrated(result: dict[str, Any]) -> None:
    """The table of `calibrate`: range, scale and what quantizing the batches like that costs."""
    console = stream(err=True)
    rows = result["tensors"]
    cells = [
        [
            kind(row),
            f"{number(row['min'], '.4g')} to {number(row['max'], '.4g')}",
            _scale(row),
            f"{row['clipped_fraction']:.3%}" if row["clipped"] else "0",
            "exact" if row["mse"] == 0 else number(row["sqnr_db"], ".2f", " dB"),
        ]
        for row in rows[:ROWS]
    ]
    headers = ("values", "scale", "clipped", "SQNR")
    _table(console, rows, ["tensor", "type"], headers, cells)
    _left_out(console, result, "left alone")
    warnings(result)
    done = f"{place(result['output'])}: scales of {many(len(rows), 'tensor')}"
    print_line(console, f"{done}, {result['seconds']:.2f} s")


def _scale(row: dict[str, Any]) -> str:
    low, high = (number(row[name], ".4g") for name in ("scale_min", "scale_max"))
    return low if low == high else f"{low} to {high}"


def captured(result: dict[str, Any]) -> None:
    """The table of `capture`: what there is of every weight, and what was left out."""
    console = stream(err=True)
    rows = result["tensors"]
    cells = [[str(row["rows"]), str(row["in_features"])] for row in rows[:ROWS]]
    _table(console, rows, ["tensor"], ("rows", "in"), cells)
    _left_out(console, result, "left out")
    output = result["output"]
    runs = many(result["samples"]["runs"], "run")
    line = f"{place(output)}: {result['kind']} of {runs}, {size(output['bytes'])}"
    print_line(console, f"{line}, {result['seconds']:.2f} s")


def _table(
    console: Console,
    rows: Sequence[dict[str, Any]],
    left: Sequence[str],
    right: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> None:
    """The names of the first rows, with cells in the columns behind that of the names."""
    table = new_table(*left)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    names = [row["name"] for row in rows[: len(cells)]]
    width = room(table, cells, console.width)
    for name, row in zip(short_names(names, width), cells, strict=True):
        table.add_row(name, *row)
    print_table(console, table)
    if len(rows) > len(cells):
        print_line(console, f"and {many(len(rows) - len(cells), 'more tensor')}")


def _left_out(console: Console, result: dict[str, Any], how: str) -> None:
    reasons = Counter(entry["reason"] for entry in result["skipped"])
    for reason, count in reasons.most_common():
        print_line(console, f"{how}: {many(count, 'tensor')}: {safe(reason)}")

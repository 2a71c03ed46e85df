"""The tables of `quantize`, `dynamic` and `dequantize`, on standard error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

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

ROWS = 12  # tensors of a report that are shown; the report has all


def summary(report: dict[str, Any]) -> None:
    """The table of `quantize` and `dynamic`: worst tensors, totals, what was left alone."""
    console = stream(err=True)
    tensors_table(report, console)
    left_alone(report, console)
    warnings(report)
    totals = report["totals"]
    before, after = totals["file_bytes_before"], totals["file_bytes_after"]
    ratio = f", {before / after:.2f} times smaller" if after and before > after else ""
    sizes = f"{size(before)} -> {size(after)}{ratio}"
    strict = report.get("strict")
    failed = not all(entry["passed"] for entry in [*report.get("gates", ()), strict] if entry)
    end = "not written" if failed else f"{report['seconds']:.2f} s"
    print_line(console, f"{place(report['output'])}: {sizes}, {end}")


def tensors_table(report: dict[str, Any], console: Console) -> None:
    """The worst tensors, and all together."""
    tensors = sorted(report["tensors"], key=_badness)
    if tensors:
        table = _tensor_table(tensors[:ROWS], report["totals"], console.width)
        print_table(console, table)
    if len(tensors) > ROWS:
        print_line(console, f"and {many(len(tensors) - ROWS, 'more tensor')}")


def left_alone(report: dict[str, Any], console: Console) -> None:
    """The reasons why tensors are not quantized, one line each."""
    reasons = Counter(entry["reason"] for entry in report["skipped"])
    for reason, count in reasons.most_common():
        print_line(console, f"left alone: {many(count, 'tensor')}: {safe(reason)}")


def warnings(report: dict[str, Any]) -> None:
    """What the user should know although the command succeeded, one line each."""
    for warning in report["warnings"]:
        print_line(stream(err=True), f"warning: {safe(warning)}", style="yellow")


def _tensor_table(tensors: Sequence[dict[str, Any]], totals: dict[str, Any], width: int) -> Table:
    of_outputs, weighted = bool(totals["second_order"]), any(r["importance"] for r in tensors)
    shown = partial(_figures, of_outputs=of_outputs, weighted=weighted)
    rows = [[kind(row), *shown(row)] for row in tensors]
    names = [row["name"] for row in tensors]
    last = (many(totals["tensors"], "tensor"), ["", *shown(totals)])
    table = new_table("tensor, worst first", "type")
    sqnrs = ("SQNR", "weighted") if weighted else ("SQNR",)
    outputs = ("output error", "nearest") if of_outputs else ()
    extremes = () if weighted or of_outputs else ("max error", "clipped")  # 80 columns hold so many
    for column in (*sqnrs, *extremes, "bits", *outputs):
        table.add_column(column, justify="right", no_wrap=True)
    name_width = room(table, [*rows, last[1]], width)
    for name, cells in zip(short_names(names, name_width), rows, strict=True):
        table.add_row(name, *cells)
    table.add_section()
    table.add_row(last[0], *last[1], style="bold")
    return table


def _figures(row: dict[str, Any], *, of_outputs: bool, weighted: bool) -> list[str]:
    sqnr = ["exact" if row["mse"] == 0 else number(row["sqnr_db"], ".2f", " dB")]
    if weighted:
        is_exact = row["weighted_mse"] == 0
        sqnr += ["exact" if is_exact else number(row["weighted_sqnr_db"], ".2f", " dB")]
    clipped = number(row["clipped_fraction"], ".3%") if row["clipped"] else "0"
    bits = number(row["bits_per_weight"], ".2f")
    outputs = [number(row[name], ".4f") for name in ("output_error", "output_error_nearest")]
    largest = number(row["max_abs_error"], ".3g")
    extremes = [] if weighted or of_outputs else [largest, clipped]
    return [*sqnr, *extremes, bits, *(outputs if of_outputs else [])]


def _badness(row: dict[str, Any]) -> float:
    """Ascending: worst SQNR first, exact and empty tensors last."""
    return math.inf if row["sqnr_db"] is None else float(row["sqnr_db"])


def dequantized(result: dict[str, Any]) -> None:
    """The line of `dequantize`."""
    output = result["output"]
    done = f"{many(len(result['tensors']), 'tensor')} to {result['tensors'][0]['dtype']}"
    sizes = f"{size(result['source']['bytes'])} -> {size(output['bytes'])}"
    line = f"{place(output)}: dequantized {done}, {sizes}, {result['seconds']:.2f} s"
    print_line(stream(err=True), line)

"""Reports as tables for people: results on standard output, the rest on standard error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

ROWS = 12  # tensors of a report that are shown; the report has all
_SPARKS = " ▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = " .:-=+*#@"
_WIDE = 110  # columns of a terminal from which on `inspect --stats` shows shapes too
_PIPE_WIDTH = 10_000


def _console(*, err: bool) -> Console:
    """A console that cuts lines to the terminal, and not at all in a pipe or a log."""
    console = Console(stderr=err, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


class _Bar:
    """Progress of a job on a rich progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tensors = 0
        self._total = 0
        self._task: TaskID | None = None

    def begin(self, tensors: int, nbytes: int) -> None:
        self._total = tensors
        self._task = self._progress.add_task("", total=nbytes, done=self._done())

    def advance(self, name: str, nbytes: int) -> None:
        if self._task is not None:
            self._tensors += 1
            self._progress.update(self._task, advance=nbytes, done=self._done())

    def _done(self) -> str:
        return f"{self._tensors}/{self._total} tensors"


@contextmanager
def progress(*, quiet: bool) -> Iterator[_Bar | None]:
    """A progress bar on standard error while a job runs; None where nobody would see it."""
    console = _console(err=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.fields[done]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)


def summary(report: dict[str, Any]) -> None:
    """The table of `quantize` and `dynamic`: worst tensors, totals, what was left alone."""
    console = _console(err=True)
    tensors = sorted(report["tensors"], key=_badness)
    if tensors:
        console.print(_tensor_table(tensors[:ROWS], report["totals"], console.width - 47))
    if len(tensors) > ROWS:
        _line(console, f"and {_many(len(tensors) - ROWS, 'tensor')} with less error")
    reasons = Counter(entry["reason"] for entry in report["skipped"])
    for reason, count in reasons.most_common():
        _line(console, f"left alone: {_many(count, 'tensor')}: {safe(reason)}")
    for warning in report["warnings"]:
        _line(console, f"warning: {safe(warning)}", style="yellow")
    totals = report["totals"]
    before, after = totals["file_bytes_before"], totals["file_bytes_after"]
    ratio = f", {before / after:.2f} times smaller" if after and before > after else ""
    _line(console, f"{safe(report['output']['name'])}: {size(before)} -> {size(after)}{ratio}, "
                   f"{report['seconds']:.2f} s")


def _tensor_table(
    tensors: Sequence[dict[str, Any]], totals: dict[str, Any], name_width: int
) -> Table:
    table = _table("tensor, worst first", "type")
    for column in ("SQNR", "max error", "clipped", "bits"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in tensors:
        table.add_row(_name(row["name"], name_width), _kind(row), *_figures(row))
    table.add_section()
    table.add_row(_many(totals["tensors"], "tensor"), "", *_figures(totals), style="bold")
    return table


def _figures(row: dict[str, Any]) -> list[str]:
    sqnr = "exact" if row["mse"] == 0 else number(row["sqnr_db"], ".2f", " dB")
    clipped = number(row["clipped_fraction"], ".3%") if row["clipped"] else "0"
    bits = number(row["bits_per_weight"], ".2f")
    return [sqnr, number(row["max_abs_error"], ".3g"), clipped, bits]


def _kind(row: dict[str, Any]) -> str:
    where = {"per_axis": f" axis {row['axis']}", "blocked": f" /{row['block_size']}"}
    return f"{row['dtype'] or '?'}{where.get(row['granularity'], '')}"


def _badness(row: dict[str, Any]) -> float:
    """Ascending: worst SQNR first, exact and empty tensors last."""
    return math.inf if row["sqnr_db"] is None else float(row["sqnr_db"])


def dequantized(result: dict[str, Any]) -> None:
    """The line of `dequantize`."""
    output = result["output"]
    _line(_console(err=True),
          f"{safe(output['name'])}: {_many(len(result['tensors']), 'tensor')} dequantized to "
          f"{result['tensors'][0]['dtype']}, {size(result['source']['bytes'])} -> {size(output['bytes'])}, "
          f"{result['seconds']:.2f} s")


def inspected(result: dict[str, Any]) -> None:
    """The table of `inspect`, on standard output."""
    console = _console(err=False)
    _line(console, _headline(result))
    has_stats = any("stats" in row for row in result["tensors"])
    wide = console.width >= _WIDE or not has_stats
    table = _table("tensor", "type", *(("shape",) if wide else ()))
    columns = ["size"] if wide else []
    columns += ["min", "max", "zeros", "peak/rms", "histogram"] if has_stats else []
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["tensors"]:
        quantization = row["quantization"]
        cells = [row["dtype"] if quantization is None else _kind(quantization)]
        if wide:
            cells += ["x".join(map(str, row["shape"])) or "scalar", size(row["bytes"])]
        if has_stats:
            cells += _stats_cells(row, console)
        table.add_row(_name(row["name"], console.width - (56 if has_stats else 36)), *cells)
    console.print(table)
    for line in _operators(result.get("quantized_operators", [])):
        _line(console, line)


def _headline(result: dict[str, Any]) -> str:
    totals = result["totals"]
    words = [f"{safe(result['name'])}: {result['container']}", size(result["bytes"]),
             _many(totals["tensors"], "tensor")]
    if "opset_import" in result:
        words.append("opset " + ", ".join(
            str(v) if k == "ai.onnx" else f"{safe(k)} {v}"
            for k, v in result["opset_import"].items()))  # fmt: skip
        words.append(_many(result["nodes"], "node"))
    tools = ", ".join(result["quantized_by"])
    words.append(f"quantized with {tools}" if tools else "not quantized")
    return ", ".join(words)


def _operators(uses: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per operator and way of quantizing."""
    kinds = Counter(
        (use["operator"], use["dtype"] or "", use["granularity"] or "", use["block_size"] or "")
        for use in uses
    )
    for (operator, *rest), count in kinds.most_common():
        yield f"{count} {operator}: {' '.join(str(word) for word in rest if word)}".rstrip(": ")


def _stats_cells(row: dict[str, Any], console: Console) -> list[str]:
    stats = row["stats"]
    if stats is None or stats["min"] is None:
        return ["-"] * 5
    zeros = stats["zero_count"] / max(1, math.prod(row["shape"]))
    sparks = _SPARKS if console.encoding.startswith("utf") else _PLAIN_SPARKS
    return [f"{stats['min']:.3g}", f"{stats['max']:.3g}", f"{zeros:.1%}",
            number(stats["outlier_ratio"], ".1f"), sparkline(stats["histogram"], sparks)]


def sparkline(counts: Sequence[int], sparks: str = _SPARKS) -> str:
    """Counts as one character each, on a square-root scale that keeps tails visible."""
    top = math.sqrt(max(counts) or 1)
    return "".join(sparks[math.ceil(math.sqrt(c) / top * (len(sparks) - 1))] for c in counts)


def dtypes(rows: Sequence[dict[str, Any]]) -> None:
    """The table of `dtypes`, on standard output."""
    table = _table("type")
    for column in ("bits", "lowest", "highest", "ONNX code", "first opset"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["name"], str(row["bits"]), f"{row['qmin']:g}", f"{row['qmax']:g}",
                      str(row["code"]), str(row["opset"]))
    _console(err=False).print(table)


def size(nbytes: int) -> str:
    """Bytes in units of 1000: 91.2 MB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def number(value: float | None, spec: str, unit: str = "") -> str:
    """A figure with its unit, or a dash where it is undefined."""
    return "-" if value is None else format(value, spec) + unit


def safe(text: str) -> str:
    """Text of a file without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _name(name: str, width: int) -> Text:
    """A tensor's name, shortened in its middle: heads are often shared, tails tell."""
    text = safe(name)
    width = max(width, 16)
    if len(text) > width:
        text = text[: width // 3] + "…" + text[len(text) - (width - width // 3 - 1) :]
    return Text(text)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _table(*left: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")

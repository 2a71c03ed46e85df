"""The drawings of `inspect --plot`, on standard output."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from typing import Any

from qtool.render.listing import headline
from qtool.render.text import kind, many, number, print_line, safe, stream

MOST = 12  # tensors that are drawn unless they are chosen by name
HEIGHT = 8  # lines of a histogram
_LABEL = 8  # columns of the counts beside it
# Parts of a character's height, the axes, and where they meet.
_UNICODE = (" ▁▂▃▄▅▆▇█", "│", "─", "└")
_ASCII = (" .:#", "|", "-", "+")


def histogram_bins() -> int:
    """How many bins the terminal, or COLUMNS, has room for; 80 columns in a pipe."""
    return min(max(shutil.get_terminal_size().columns, 40), 120) - _LABEL - 2


def plotted(result: dict[str, Any], *, every: bool) -> None:
    """A histogram of each tensor with values; unless every, of those with the largest peaks."""
    console = stream(err=False)
    print_line(console, f"{headline(result)}; counts on a square-root scale")
    rows = [row for row in result["tensors"] if row["stats"] and row["stats"]["histogram"]]
    shown = rows
    if not every and len(rows) > MOST:
        shown = sorted(rows, key=lambda row: -(row["stats"]["outlier_ratio"] or 0.0))[:MOST]
    symbols = _UNICODE if console.encoding.startswith("utf") else _ASCII
    for row in shown:
        for line in ("", _title(row), *_drawn(row["stats"], symbols)):
            print_line(console, line)
    if len(rows) > len(shown):
        rest = many(len(rows) - len(shown), "more tensor")
        print_line(console, f"\nand {rest} with smaller peaks; choose by --include PATTERN")


def _title(row: dict[str, Any]) -> str:
    stats, quantization = row["stats"], row["quantization"]
    what = row["dtype"] if quantization is None else kind(quantization)
    shape = "x".join(map(str, row["shape"])) or "scalar"
    figures = f"rms {stats['rms']:.3g}, peak/rms {number(stats['outlier_ratio'], '.1f')}"
    odd = [f"{stats[f'{what}_count']} {what}" for what in ("nan", "inf") if stats[f"{what}_count"]]
    return ", ".join([f"{safe(row['name'])}: {what} {shape}", figures, *odd])


def _drawn(stats: dict[str, Any], symbols: tuple[str, str, str, str]) -> Iterator[str]:
    """Columns on a square-root scale, which keeps tails visible, with both axes."""
    parts, upright, level, corner = symbols
    counts = stats["histogram"]
    top = max(counts)
    steps = len(parts) - 1
    heights = [math.ceil(math.sqrt(count / top) * HEIGHT * steps) for count in counts]
    for line in range(HEIGHT - 1, -1, -1):
        cells = [parts[min(max(height - line * steps, 0), steps)] for height in heights]
        share = (line + 1) / HEIGHT
        is_labelled = line % 2 == 1
        label = _count(top * share**2) if is_labelled else ""
        yield f"{label:>{_LABEL}} {upright}{''.join(cells)}".rstrip()
    yield f"{'0':>{_LABEL}} {corner}{level * len(counts)}"
    yield " " * (_LABEL + 2) + _values(stats["min"], stats["max"], len(counts))


def _values(low: float, high: float, width: int) -> str:
    """The ends of the lower axis, and 0 at its place where there is room."""
    if low == high:
        return f"{low:.4g}".center(width).rstrip()
    left, right = f"{low:.4g}", f"{high:.4g}"
    line = left + right.rjust(width - len(left))
    at = int(width * -low / (high - low)) if low < 0 < high else 0
    if len(left) < at < width - len(right) - 1:
        line = line[:at] + "0" + line[at + 1 :]
    return line


def _count(value: float) -> str:
    """A count in thousands or millions where it is long: 950, 12.3k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.1f}".removesuffix(".0") if value < 10 else f"{value:.0f}"

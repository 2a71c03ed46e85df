"""Text, tables and streams that every command prints with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 10_000
_NAME_WIDTH = 16  # columns that a name gets on the narrowest terminal
_NUMBER = re.compile(r"(?<!\d)\d{1,4}(?!\d)")


class _Console(Console):
    """A console that leaves the exit code to the caller when its reader goes away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stream(*, err: bool) -> Console:
    """A console that cuts lines to the terminal, and not at all in a pipe or a log."""
    console = _Console(stderr=err, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


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


def kind(row: dict[str, Any]) -> str:
    """Type and granularity of a quantized tensor: int4 /32, int8 axis 0."""
    where = {"per_axis": f" axis {row['axis']}", "blocked": f" /{row['block_size']}"}
    return f"{row['dtype'] or '?'}{where.get(row['granularity'], '')}"


def place(output: dict[str, Any]) -> str:
    """Where a result went."""
    return "standard output" if output["name"] == "-" else safe(output["name"])


def safe(text: str) -> str:
    """Text of a file without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def room(table: Table, rows: Sequence[Sequence[str]], width: int) -> int:
    """Columns of the terminal that the cells of the others leave to the names in the first."""
    headers = [str(column.header) for column in table.columns[1:]]
    return width - sum(2 + max(map(len, cells)) for cells in zip(headers, *rows, strict=True))


def short_name(name: str, width: int) -> Text:
    """A tensor's name, cut in front, where names are alike.

    The last number that is cut stays, as it tells layers apart: …10…attn.q_proj.weight.
    """
    text = safe(name)
    excess = len(text) - max(width, _NAME_WIDTH)
    if excess <= 0:
        return Text(text)
    numbers = [m[0] for m in _NUMBER.finditer(text) if m.start() < excess + len("…0…")]
    mark = f"…{numbers[-1]}…" if numbers else "…"
    return Text(mark + text[excess + len(mark) :])


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text that the terminal, not rich, breaks where it is too long."""
    console.print(Text(text, style=style), soft_wrap=True)


def new_table(*left: str) -> Table:
    """A table without lines, its first columns flush left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def many(count: int, noun: str) -> str:
    """A count with its noun: 1 tensor, 2 tensors."""
    return f"{count} {noun}" + ("" if count == 1 else "s")

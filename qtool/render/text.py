"""Text, tables and streams that every command prints with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

_PIPE_WIDTH = 10_000
_LEAST_WIDTH = 40  # columns; a table shows nothing in fewer
_NAME_WIDTH = 16  # columns that a name gets on the narrowest terminal
_PART = re.compile(r"[^./:]+[./:]*|[./:]+")  # a word of a name and the separators after it
_NUMBER = re.compile(r"(?<!\d)\d{1,4}(?!\d)")


class _Console(Console):
    """A console that leaves the exit code to the caller when its reader goes away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Table(Table):
    """A table whose lines end where their text does, not in blanks."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = cast(Iterable[Segment], super().__rich_console__(console, options))
        for line in Segment.split_lines(segments):
            text = "".join(segment.text for segment in line)
            yield from Segment.adjust_line_length(line, cell_len(text.rstrip()))
            yield Segment.line()


def stream(*, err: bool) -> Console:
    """A console that cuts lines to the terminal or COLUMNS, and in a pipe or a log without that
    not at all."""
    console = _Console(stderr=err, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not (columns.isdecimal() and int(columns)):
        console.width = _PIPE_WIDTH
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def size(nbytes: int) -> str:
    """Bytes in units of 1000: 91.2 MB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def number(value: float | None, spec: str, unit: str = "") -> str:
    """A figure with its unit, or a dash where it is undefined."""
    return "-" if value is None else format(value, spec) + unit


def kind(row: dict[str, Any]) -> str:
    """Type and granularity of a quantized tensor: int4 /32, int8 axis 0."""
    where = {
        "per_axis": f" axis {row['axis']}",
        "blocked": f" /{row['block_size']}",
        "tiled": " /" + "x".join(map(str, row.get("tile") or ())),
    }
    return f"{row['dtype'] or '?'}{where.get(row['granularity'], '')}"


def origin(source: dict[str, Any]) -> str:
    """Where something comes from."""
    return "standard input" if source["name"] == "-" else safe(source["name"])


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


def short_names(names: Sequence[str], width: int) -> list[Text]:
    """Tensors' names that fit a column and can still be told apart.

    Where a name is too long its words are cut to their first letters, from the front on; the last
    two words and numbers, which tell layers apart, stay whole: m.l.10.s.q_proj.weight. Where
    names get alike by that, words keep more letters, or the last but one is cut too.
    """
    whole = [safe(name) for name in names]
    width = max(width, _NAME_WIDTH)
    best: list[str] = []
    for whole_words, letters in product((2, 1), range(1, 5)):
        short = [_fitted(name, width, letters, whole_words) for name in whole]
        if len(set(short)) > len(set(best)):
            best = short
        if len(set(best)) == len(set(whole)):
            break
    return [Text(name) for name in best]


def _fitted(name: str, width: int, letters: int, whole_words: int) -> str:
    """The name in at most width characters, all but the last words cut to so many letters."""
    words = _PART.findall(name)
    for i, word in enumerate(words[:-whole_words]):
        if sum(map(len, words)) <= width:
            break
        stem = word.rstrip("./:")
        if not any(c.isdigit() for c in stem):
            words[i] = stem[:letters] + word[len(stem) :]
    return _without_front("".join(words), width)


def _without_front(name: str, width: int) -> str:
    """The end of a name that is too long, with the last number that is cut: …10…q_proj.weight."""
    excess = len(name) - width
    if excess <= 0:
        return name
    numbers = [m[0] for m in _NUMBER.finditer(name) if m.start() < excess + len("…0…")]
    mark = f"…{numbers[-1]}…" if numbers else "…"
    cut = excess + len(mark)
    starts = [m.start() for m in _PART.finditer(name)][:-1]  # the last word alone says too little
    return mark + name[next((start for start in starts if start >= cut), cut) :]


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text that the terminal, not rich, breaks where it is too long."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table with whole figures and words; where they have no room, the terminal breaks
    lines."""
    for column in table.columns:
        column.min_width = _least_width(column)
    width, gaps = console.width, 2 * len(table.columns) - 2
    console.width = max(width, gaps + sum(column.min_width or 0 for column in table.columns))
    console.print(table, crop=False)
    console.width = width


def _least_width(column: Column) -> int:
    cells = [str(cell) for cell in (column.header, *column.cells)]
    words = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
    return max(map(cell_len, words), default=0)


def new_table(*left: str) -> Table:
    """A table without lines, its first columns flush left."""
    table = _Table(box=None, pad_edge=False, header_style="bold")
    for column in left:
        table.add_column(column, no_wrap=True)
    return table


def many(count: int, noun: str) -> str:
    """A count with its noun: 1 tensor, 2 tensors."""
    return f"{count} {noun}" + ("" if count == 1 else "s")

"""The table of `compare`, on standard output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from qtool.render.text import (
    kind,
    many,
    new_table,
    number,
    origin,
    print_line,
    print_table,
    safe,
    size,
    stream,
)

_WIDE = 110  # columns of a terminal from which on there is room for more
_SHOWN = ("preset", "dtype", "block_size", "axis", "tile", "method")  # in other words


def compared(result: dict[str, Any]) -> None:
    """The combinations by size, the Pareto front marked, and what is left out."""
    console = stream(err=False)
    source = result["source"]
    sizes = f"{source['container']}, {size(source['bytes'])}, {many(source['tensors'], 'tensor')}"
    print_line(console, f"{origin(source)}: {sizes}")
    print_table(console, _table(result["combinations"], wide=console.width >= _WIDE))
    for line in _notes(result):
        print_line(console, line)


def _table(rows: Sequence[dict[str, Any]], *, wide: bool) -> Table:
    differ, weighted = _differ(rows), any(r["weighted_sqnr_db"] is not None for r in rows)
    table = new_table("")
    for column in ("type", "method"):
        table.add_column(column, overflow="fold")
    columns = ["bits", "SQNR", "weighted" if weighted else "worst", "size", "time"]
    columns += ["max error"] if wide else []
    for column in (*(["tensors"] if differ else []), *columns):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("worst tensor", no_wrap=True)
    for row in rows:
        cells = [Text("*" if row["pareto"] else ""), Text(_label(row)), Text(row["method"] or "-")]
        cells += [Text(str(row["tensors"]))] if differ else []
        cells += [Text(cell) for cell in _figures(row, weighted=weighted)]
        if wide:
            cells.append(Text(number(row["max_abs_error"], ".3g")))
            cells.append(Text(safe(row["worst"]["name"] if row["worst"] else "")))
        table.add_row(*cells, style="bold" if row["pareto"] else "")
    return table


def _figures(row: dict[str, Any], *, weighted: bool) -> list[str]:
    third = row["weighted_sqnr_db"] if weighted else row["worst"] and row["worst"]["sqnr_db"]
    return [
        number(row["bits_per_weight"], ".2f"),
        "exact" if row["rmse"] == 0 else number(row["sqnr_db"], ".2f", " dB"),
        number(third, ".2f", " dB"),
        size(row["bytes_after"]),
        _time(row["seconds"]),
    ]


def _label(row: dict[str, Any]) -> str:
    """The preset, or type and granularity, and what else is said of it."""
    told = row["preset"] or kind(row)
    if row["preset"] is None and row["granularity"] == "per_axis" and row["axis"] is None:
        told = f"{row['dtype']} per axis"  # not the same for all tensors
    return " ".join([told, *_others(row)])


def _left_out(row: dict[str, Any]) -> str:
    """The same of one that is left out, of which words alone are known, and its method."""
    blocks = row["block_size"]
    where = f"/{blocks}" if isinstance(blocks, int) else blocks
    told = [row["preset"] or row["dtype"], where, row["method"], *_others(row)]
    return " ".join(word for word in told if word)


def _others(row: dict[str, Any]) -> list[str]:
    return [w for w in row["words"].split(", ") if w.partition("=")[0] not in _SHOWN]


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _differ(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether some combinations leave tensors alone that others quantize."""
    return any(row["bits_per_weight"] != row["overall_bits_per_weight"] for row in rows)


def _notes(result: dict[str, Any]) -> Iterator[str]:
    yield "* on the Pareto front: what is better is larger, and what is smaller is worse"
    if _differ(result["combinations"]):
        yield (
            "order and stars are by all tensors that any of these quantizes: what one of them "
            "leaves alone has its size and no error"
        )
    left_out: dict[str, list[str]] = {}
    for row in result["left_out"]:
        left_out.setdefault(row["reason"], []).append(_left_out(row))
    for reason, ways in left_out.items():
        yield f"left out: {', '.join(ways)}: {safe(reason)}"

"""The tables of `inspect` and `dtypes`, on standard output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from qtool.render.text import (
    kind,
    many,
    new_table,
    number,
    origin,
    print_line,
    print_table,
    room,
    safe,
    short_names,
    size,
    stream,
)

_SPARKS = " ▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = " .:-=+*#@"
_LONGEST = 200  # characters of a recipe that are shown
_WIDE = 110  # columns of a terminal from which on `inspect --stats` shows shapes too


def inspected(result: dict[str, Any]) -> None:
    """The table of `inspect`, on standard output."""
    console = stream(err=False)
    print_line(console, headline(result))
    if result["provenance"] is not None:
        print_line(console, _made_by(result["provenance"]))
    has_stats = any("stats" in row for row in result["tensors"])
    wide = console.width >= _WIDE or not has_stats
    columns = ["size"] if wide else []
    columns += ["min", "max", "zeros", "peak/rms", "histogram"] if has_stats else []
    table = new_table("tensor", "type", *(("shape",) if wide else ()))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    rows = [_inspect_cells(row, console, wide=wide) for row in result["tensors"]]
    names = [row["name"] for row in result["tensors"]]
    for name, cells in zip(short_names(names, room(table, rows, console.width)), rows, strict=True):
        table.add_row(name, *cells)
    print_table(console, table)
    for line in (*_operators(result.get("quantized_operators", [])), *_layouts(result["tensors"])):
        print_line(console, line)


def headline(result: dict[str, Any]) -> str:
    """What a file is, in a line."""
    totals = result["totals"]
    words = [
        f"{origin(result)}: {result['container']}",
        size(result["bytes"]),
        many(totals["tensors"], "tensor"),
    ]
    if "opset_import" in result:
        words.append("opset " + ", ".join(
            str(v) if k == "ai.onnx" else f"{safe(k)} {v}"
            for k, v in result["opset_import"].items()))  # fmt: skip
        words.append(many(result["nodes"], "node"))
    if "shards" in result:
        words.append(many(len(result["shards"]), "shard"))
    tools = ", ".join(result["quantized_by"])
    if tools == "qtool":
        quantized = [row["quantization"] for row in result["tensors"] if row["quantization"]]
        tools += f" in the {quantized[0]['layout']} layout"
    words.append(f"quantized with {tools}" if tools else "not quantized")
    return ", ".join(words)


def _made_by(provenance: dict[str, Any]) -> str:
    """The tool, and the beginning of its recipe in one line."""
    tool = provenance["tool"]
    said, *rules = provenance["recipe"].split("\n\n[[rules]]\n")
    words = [" ".join(line.split()) for line in said[:_LONGEST].splitlines() if line.strip()]
    words += [many(len(rules), "rule")] if rules else []
    made = safe(f"made by {tool['name'][:_LONGEST]} {tool['version'][:_LONGEST]}")
    text = safe(", ".join(words))
    return f"{made}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"


def _operators(uses: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per operator and way of quantizing."""
    kinds = Counter((use["operator"], kind(use)) for use in uses)
    for (operator, how), count in kinds.most_common():
        yield f"{count} {operator}" + ("" if how == "?" else f": {how}")


def _layouts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per layout of other tools and way of quantizing, then one per problem."""
    weights = [(row["name"], row["quantization"]) for row in rows if row["quantization"]]
    kinds = Counter(
        f"{how['layout']}: {kind(how)}"
        + (f", {how['scale_dtype']} scales" if how["scale_dtype"] else "")
        + (f", {how['equation']}" if how["equation"] else "")
        for _, how in weights
        if "equation" in how
    )
    for text, count in kinds.most_common():
        yield f"{many(count, 'weight')} in {text}"
    problems: dict[str, list[str]] = {}
    for name, how in weights:
        for problem in how.get("problems", []):
            problems.setdefault(problem, []).append(name)
    for problem, names in problems.items():
        where = safe(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        yield f"problem in {where}: {problem}"
    for row in rows:
        counts = {"NaN": "nan_count", "Inf": "inf_count"}
        stats = row.get("stats") or {}
        found = [f"{stats[key]} {word}" for word, key in counts.items() if stats.get(key)]
        if found:
            yield f"problem in {safe(row['name'])}: holds {' and '.join(found)}"


def _inspect_cells(row: dict[str, Any], console: Console, *, wide: bool) -> list[str]:
    quantization = row["quantization"]
    cells = [row["dtype"] if quantization is None else kind(quantization)]
    if wide:
        cells += ["x".join(map(str, row["shape"])) or "scalar", size(row["bytes"])]
    return cells + (_stats_cells(row, console, wide=wide) if "stats" in row else [])


def _stats_cells(row: dict[str, Any], console: Console, *, wide: bool) -> list[str]:
    stats = row["stats"]
    if stats is None or stats["min"] is None:
        return ["-"] * 5
    zeros = stats["zero_count"] / max(1, math.prod(row["shape"]))
    sparks = _SPARKS if console.encoding.startswith("utf") else _PLAIN_SPARKS
    counts = stats["histogram"]
    if not wide:
        counts = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]
    return [
        f"{stats['min']:.3g}",
        f"{stats['max']:.3g}",
        f"{zeros:.1%}",
        number(stats["outlier_ratio"], ".1f"),
        sparkline(counts, sparks),
    ]


def sparkline(counts: Sequence[int], sparks: str = _SPARKS) -> str:
    """Counts as one character each, on a square-root scale that keeps tails visible."""
    top = math.sqrt(max(counts) or 1)
    return "".join(sparks[math.ceil(math.sqrt(c) / top * (len(sparks) - 1))] for c in counts)


def presets(rows: Sequence[dict[str, Any]]) -> None:
    """The table of `presets`, on standard output."""
    table = new_table("preset")
    table.add_column("stands for", overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["options"])
    print_table(stream(err=False), table)


def dtypes(rows: Sequence[dict[str, Any]]) -> None:
    """The table of `dtypes`, on standard output."""
    table = new_table("type")
    for column in ("bits", "lowest", "highest", "ONNX code", "first opset"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["bits"]),
            f"{row['qmin']:g}",
            f"{row['qmax']:g}",
            str(row["code"]),
            str(row["opset"]),
        )
    print_table(stream(err=False), table)

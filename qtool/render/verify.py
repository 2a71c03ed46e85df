"""The tables of `verify`, on standard error."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from qtool.render.report import tensors_table, warnings
from qtool.render.text import many, new_table, number, origin, print_line, print_table, safe, stream


def verified(report: dict[str, Any]) -> None:
    """Worst tensors, totals, outputs, and the verdict. Problems follow as errors."""
    console = stream(err=True)
    tensors_table(report, console)
    kept = len(report["skipped"])
    if kept:
        print_line(console, f"unchanged: {many(kept, 'tensor')}")
    if report["outputs"]:
        _outputs(report["outputs"], console)
    warnings(report)
    print_line(console, f"{origin(report['output'])}: {_verdict(report)}")


def _outputs(outputs: list[dict[str, Any]], console: Console) -> None:
    table = new_table("output")
    for column in ("relative error", "max error", "cosine", "same argmax"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in outputs:
        table.add_row(
            safe(row["name"]),
            number(row["relative_error"], ".4f"),
            number(row["max_abs_error"], ".3g"),
            number(row["cosine_similarity"], ".5f"),
            number(row["argmax_agreement"], ".1%"),
        )
    print_table(console, table)


def _verdict(report: dict[str, Any]) -> str:
    """What is to be said in the end."""
    problems = len(report["problems"])
    failed = sum(not entry["passed"] for entry in report["gates"])
    faults = [many(problems, "problem")] if problems else []
    faults += [f"{many(failed, 'gate')} failed"] if failed else []
    if faults:
        return ", ".join(faults)
    known = report["checks"]["report"]
    also = "" if known is None else f" and {safe(known)}"
    return f"agrees with {origin(report['source'])}{also}, {report['seconds']:.2f} s"

"""What gates say of a report, on standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from qtool.render.text import print_line, safe, short_names, stream

_NAMES = 3  # tensors that are named where a gate passes for want of a figure


def gates(report: Mapping[str, Any]) -> None:
    """Each gate, and where it had no figure to judge; what failed it is the command's error."""
    console = stream(err=True)
    for entry in report["gates"]:
        word, style = ("passed", "") if entry["passed"] else ("failed", "red")
        print_line(console, f"{word}: --fail-if '{safe(entry['expression'])}'", style)
        _undefined(console, entry["undefined"])


def _undefined(console: Console, undefined: Sequence[Mapping[str, Any]]) -> None:
    width = console.width // (_NAMES + 1)
    for why in dict.fromkeys(u["why"] for u in undefined):
        names = list(dict.fromkeys(u["tensor"] or "totals" for u in undefined if u["why"] == why))
        more = len(names) - _NAMES
        short = ", ".join(name.plain for name in short_names(names[:_NAMES], width))
        shown = short + (f" and {more} more" if more > 0 else "")
        print_line(console, f"  passed as {why}: {shown}")

"""qtool report: a report as a page, a text, a table or a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qtool.errors import UsageError
from qtool.formats import files
from qtool.jobs import streams
from qtool.jobs.pictures import pictures
from qtool.jobs.progress import Progress, Silent
from qtool.report import Report, read_report

KINDS = ("html", "md", "csv", "png")
DRAWN = ("html", "png")  # those with pictures of tensors
# The document of a report, from it and what pictures() gives.
Draw = Callable[[Report, dict[str, Any]], bytes]


def target(src: str | Path, dst: str | Path | None, to: str | None) -> tuple[str, str]:
    """Name and kind of the document: by `to` or dst's suffix; without dst src's name with .html,
    or standard output. Raises UsageError where they contradict each other."""
    allowed = ", ".join(f".{kind}" for kind in KINDS)
    if to is not None and to not in KINDS:
        raise UsageError("--to", f"{to!r} is unknown", f"use {', '.join(KINDS)}")
    if dst is None and str(src) != streams.STANDARD:
        kind = to or "html"
        return str(Path(src).with_suffix(f".{kind}")), kind
    if dst is None or str(dst) == streams.STANDARD:
        return streams.STANDARD, to or "html"
    suffix = Path(dst).suffix[1:].lower()
    if to is None and suffix not in KINDS:
        rule = f"cannot be written as {suffix}" if suffix else "its name does not say what to write"
        raise UsageError(str(dst) or "-o ''", rule, f"use {allowed}")
    if to is not None and suffix in KINDS and suffix != to:
        raise UsageError(str(dst), f"its suffix contradicts --to {to}", "leave one of them out")
    return str(dst), to or suffix


def write_page(
    src: str | Path,
    name: str,
    kind: str,
    draw: Draw,
    *,
    original: str | Path | None = None,
    quantized: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the document that draw makes of the report src; "-" is standard input or output.

    name, kind: see target(). original, quantized: the files whose values are drawn, where they are
    not those that the report names. Returns the output, how many tensors there are, and notes on
    what could not be drawn. Raises QtoolError; the file of that name is then as it was.
    """
    if kind not in DRAWN and (original is not None or quantized is not None):
        raise UsageError("--original", f".{kind} has no pictures", f"it is for {', '.join(DRAWN)}")
    with ExitStack() as stack:
        path, folder = Path(src), Path(src).parent
        if str(src) == streams.STANDARD:
            path, folder = stack.enter_context(files.spooled(sys.stdin.buffer)), Path()
            stack.enter_context(streams.named(path, "standard input"))
        report = read_report(path)
        kept = [file for file in (src, original, quantized) if file is not None]
        streams.check_target(_named(kept), name, force=force)
        drawn: dict[str, Any] = {"tensors": [], "notes": []}
        if kind in DRAWN:
            drawn = pictures(report, folder, original, quantized, progress or Silent())
        document = draw(report, drawn)
        with (
            streams.placed(name, f"report.{kind}") as written,
            files.replacing(written, force=force) as file,
        ):
            file.write_bytes(document)
        return {
            "output": {"name": name, "bytes": len(document)},
            "tensors": len(report["tensors"]),
            "notes": drawn["notes"],
        }


def _named(kept: Sequence[str | Path]) -> list[Path]:
    return [Path(file) for file in kept if str(file) != streams.STANDARD]

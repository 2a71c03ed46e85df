"""qtool inspect."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qtool.cli import many, options
from qtool.cli.exits import exit_code
from qtool.jobs.progress import Progress

EXAMPLE = "Example: qtool inspect model.onnx --stats"


def inspect(
    src: options.Sources,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            metavar=options.FLAG,
            help="Read the values too: range, histogram, zeros, outliers.",
        ),
    ] = False,
    source_dtype: options.SourceDtype = None,
    json: options.Json = False,
    json_lines: options.JsonLines = False,
) -> None:
    """Say what files hold: their tensors, and how they are quantized.

    Headers alone are read unless --stats is given.
    """
    with exit_code():
        from qtool.jobs.inspect import inspect_file

        def run(source: str, progress: Progress) -> dict[str, Any]:
            return inspect_file(source, stats=stats, source_dtype=source_dtype, progress=progress)

        def show(result: dict[str, Any]) -> None:
            if json:
                options.show(result)
            elif not json_lines:
                from qtool import render

                if result["name"] != src[0]:
                    typer.echo()
                render.inspected(result)

        many.each(src, run, show, json=json, json_lines=json_lines, quiet=not stats)

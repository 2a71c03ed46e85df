"""qtool inspect."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool inspect model.onnx --stats"


def inspect(
    src: options.Source,
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
) -> None:
    """Say what a file holds: its tensors, and how they are quantized.

    Headers alone are read unless --stats is given.
    """
    with exit_code():
        from qtool import render
        from qtool.jobs.inspect import inspect_file

        with options.progress(quiet=not stats) as progress:
            result = inspect_file(src, stats=stats, source_dtype=source_dtype, progress=progress)
        if json:
            options.show(result)
        else:
            render.inspected(result)

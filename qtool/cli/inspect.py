"""qtool inspect."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.errors import UsageError

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
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            metavar=options.FLAG,
            help="Draw a histogram of each tensor; of many, of those with the largest peaks.",
        ),
    ] = False,
    include: options.Include = None,
    source_dtype: options.SourceDtype = None,
    json: options.Json = False,
) -> None:
    """Say what a file holds: its tensors, and how they are quantized.

    Headers alone are read unless --stats or --plot is given.
    """
    with exit_code():
        from qtool import render
        from qtool.jobs.inspect import inspect_file

        if plot and json:
            raise UsageError("--plot", "draws for people", "use --stats --json for the figures")
        wanted = {"bins": render.histogram_bins()} if plot else {}
        with options.progress(quiet=not (stats or plot)) as progress:
            result = inspect_file(
                src, stats=stats or plot, include=include or (), source_dtype=source_dtype,
                progress=progress, **wanted,
            )  # fmt: skip
        if json:
            options.show(result)
        elif plot:
            render.plotted(result, every=bool(include))
        else:
            render.inspected(result)

"""qtool inspect."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qtool.cli import many, options
from qtool.cli.exits import exit_code
from qtool.errors import UsageError
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
    json_lines: options.JsonLines = False,
) -> None:
    """Say what files hold: their tensors, and how they are quantized.

    Headers alone are read unless --stats or --plot is given.
    """
    with exit_code():
        from qtool.jobs.inspect import inspect_file

        if plot and (json or json_lines):
            raise UsageError("--plot", "draws for people", "use --stats --json for the figures")
        wanted: dict[str, Any] = {}
        if plot:
            from qtool import render

            wanted["bins"] = render.histogram_bins()

        def run(source: str, progress: Progress) -> dict[str, Any]:
            return inspect_file(
                source, stats=stats or plot, include=include or (), source_dtype=source_dtype,
                progress=progress, **wanted,
            )  # fmt: skip

        def show(result: dict[str, Any]) -> None:
            if json:
                options.show(result)
            elif not json_lines:
                from qtool import render

                if result["name"] != src[0]:
                    typer.echo()
                if plot:
                    render.plotted(result, every=bool(include))
                else:
                    render.inspected(result)

        quiet = not (stats or plot)
        many.each(src, run, show, json=json, json_lines=json_lines, quiet=quiet)

"""qtool report."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool report weights.int4.report.json -o report.html"
_PICTURES = "Pictures"


def report(
    src: Annotated[
        str,
        typer.Argument(
            metavar="REPORT",
            help="JSON report of quantize, dynamic or verify; - is standard input.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DST",
            help="File to write: .html, .md, .csv or .png; - is standard output. "
            "[default: REPORT's name with .html]",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            autocompletion=options.words("html", "md", "csv", "png"),
            help="html, md, csv or png. [default: by DST's suffix, else html]",
            show_default=False,
        ),
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the values of the weights are. [default: the report's source]",
            show_default=False,
            rich_help_panel=_PICTURES,
        ),
    ] = None,
    quantized: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where the codes and scales are. [default: the report's output]",
            show_default=False,
            rich_help_panel=_PICTURES,
        ),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Make one page of a report that a browser shows without any network: what was
    done, totals, every tensor, and pictures of where the error lies.

    Pictures of tensors are drawn from the files that the report names, if they are
    there; .md and .csv need the report alone.
    """
    with exit_code():
        from qtool.jobs.page import target, write_page

        name, kind = target(src, output, to)
        from qtool.render import page

        draw = page.drawer(kind)
        with options.progress(quiet=quiet) as progress:
            result = write_page(
                src, name, kind, draw, original=original, quantized=quantized, force=force,
                progress=progress,
            )  # fmt: skip
        if not quiet:
            page.written(result)

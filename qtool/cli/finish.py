"""qtool finish."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool finish model-int4"


def finish(
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder that the slices are for.")],
    report: options.ReportFile = None,
    fail_if: options.FailIf = None,
    baseline: options.Baseline = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Complete the folder whose shards `qtool quantize --shards K/N` has made.

    Every shard is checked: that it is there, unchanged, and made from the
    source as it is, with the same settings.
    """
    with exit_code(), options.failing(json=json, quiet=quiet):
        from qtool.jobs.finish import finish_folder

        result = finish_folder(
            dst, report=report, fail_if=fail_if or (), baseline=baseline, jobs=jobs, force=force
        )
        options.finish(result, json=json, quiet=quiet)

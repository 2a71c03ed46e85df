"""qtool calibrate."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool calibrate act0.npy act1.npy --dtype uint8 --method entropy"


def calibrate(
    batches: Annotated[
        list[str],
        typer.Argument(
            metavar="ACT...",
            help="Batches: .npz or .safetensors with arrays named like the tensors, or .npy, all "
            "of one tensor; NAME=FILE names it. - is standard input.",
        ),
    ],
    output: options.Output = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Target type, such as uint8; `qtool dtypes` lists them.",
            show_default=False,
        ),
    ] = None,
    axis: options.Axis = None,
    symmetric: options.Symmetric = None,
    method: options.Method = None,
    scale_dtype: options.ScaleDtype = None,
    narrow_range: options.NarrowRange = None,
    nonfinite: options.NonFinite = None,
    source_dtype: options.SourceDtype = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Choose scales and zero points from batches of activations, for `quantize --scale`.

    The batches of a tensor may be larger than memory together; they are read
    several times. One scale per tensor, or along --axis.
    """
    with exit_code():
        options.check_streams(output, batches, json=json)
        from qtool.jobs.calibrate import calibrate_files

        with options.progress(quiet=quiet) as progress:
            result = calibrate_files(
                batches, output, dtype=dtype, axis=axis, symmetric=symmetric, method=method,
                scale_dtype=scale_dtype, narrow_range=bool(narrow_range),
                nonfinite=nonfinite or "error", source_dtype=source_dtype, include=include or (),
                exclude=exclude or (), jobs=jobs, force=force, progress=progress,
            )  # fmt: skip
        if json:
            options.show(result)
        if not quiet:
            from qtool import render

            render.calibrated(result)
        elif result["warnings"]:
            from qtool import render

            render.warnings(result)

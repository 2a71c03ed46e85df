"""qtool capture."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.errors import UsageError

EXAMPLE = "Example: qtool capture model.onnx samples.npz --hessian"


def capture(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="ONNX model; - is standard input.")],
    samples: Annotated[
        list[str],
        typer.Argument(
            metavar="SAMPLES...",
            help="Files of arrays named like the model's inputs: .npz or .safetensors, or a .npy "
            "where there is one input.",
        ),
    ],
    output: options.Output = None,
    hessian: Annotated[
        bool,
        typer.Option(
            "--hessian",
            metavar=options.FLAG,
            help="Write the mean of x x^T over the rows x, a matrix per weight.",
        ),
    ] = False,
    mean_square: Annotated[
        bool,
        typer.Option(
            "--mean-square",
            metavar=options.FLAG,
            help="Write the mean square of each input of a weight.",
        ),
    ] = False,
    batch: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Samples of a run, where the model leaves that open."
        ),
    ] = 1,
    include: options.Include = None,
    exclude: options.Exclude = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run an ONNX model on samples and write what its weights are multiplied with.

    For every weight, under its name, the rows (rows, in_features) that a
    MatMul, Gemm or Conv multiplies by it. An array with an input's axes holds
    samples along the first one; one more axis in front counts runs. It takes
    onnxruntime: pip install 'qtool[runtime]'.
    """
    with exit_code():
        options.check_streams(output, [model], json=json)
        if hessian and mean_square:
            raise UsageError("--hessian", "is written without --mean-square", "leave one out")
        from qtool.jobs.capture import capture_file

        kind = "hessian" if hessian else "mean-square" if mean_square else "activations"
        with options.progress(quiet=quiet) as progress:
            result = capture_file(
                model, samples, output, kind=kind, batch=batch, include=include or (),
                exclude=exclude or (), jobs=jobs, force=force, progress=progress,
            )  # fmt: skip
        if json:
            options.show(result)
        if not quiet:
            from qtool import render

            render.captured(result)

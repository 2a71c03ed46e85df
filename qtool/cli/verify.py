"""qtool verify."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool verify model.onnx model.int8.onnx --random 8"


def verify(
    original: Annotated[
        str,
        typer.Argument(
            metavar="ORIGINAL",
            help="What was quantized: a file of any container, or a checkpoint folder; - is "
            "standard input.",
        ),
    ],
    quantized: Annotated[
        str,
        typer.Argument(
            metavar="QUANTIZED",
            help="What came of it, in any container and layout that `qtool dequantize` reads; - is "
            "standard input.",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REPORT",
            help="Report of `qtool quantize` that the files must agree with: types and figures of "
            "all tensors, sizes, hashes, tool, version and recipe. [default: the one beside "
            "QUANTIZED, where it is there]",
            show_default=False,
            rich_help_panel=options.CHECKS,
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            metavar=options.FLAG,
            help="Look at no report beside QUANTIZED.",
            rich_help_panel=options.CHECKS,
        ),
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPR",
            help="Exit with 3 if this holds, as in `qtool quantize`: 'sqnr_db < 20', "
            "'total.outputs_relative_error > 0.1'. Repeatable.",
            show_default=False,
            rich_help_panel=options.CHECKS,
        ),
    ] = None,
    baseline: options.Baseline = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLES",
            help="Run both ONNX models and compare outputs: a .npz or .safetensors of arrays named "
            "like the inputs, samples along the first axis, or a .npy where there is one input; - "
            "is standard input.",
            show_default=False,
            rich_help_panel=options.CHECKS,
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="The same on N random inputs: standard normal; 0 or 1 for integers; size 1 where "
            "the model leaves it open.",
            show_default=False,
            rich_help_panel=options.CHECKS,
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Where the JSON report goes. [default: nowhere]",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    source_dtype: options.SourceDtype = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a quantized file against its original, from the files alone.

    Every tensor is dequantized and measured as `qtool quantize` does. One that
    is missing, extra, of another shape, not finite, or changed without being
    quantized ends with exit code 3, and so does what the report says otherwise.
    """
    with exit_code(), options.failing(json=json, quiet=quiet):
        from qtool.jobs.verify import verify_file

        with options.progress(quiet=quiet) as progress:
            result = verify_file(
                original, quantized, against=against, alone=alone, fail_if=fail_if or (),
                baseline=baseline, run=run, random=random, report=report,
                source_dtype=source_dtype, jobs=jobs, force=force, progress=progress,
            )  # fmt: skip
        options.finish(result, json=json, quiet=quiet)

"""qtool compare."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.errors import UsageError

EXAMPLE = "Example: qtool compare m.safetensors --dtypes int8,int4 --block-sizes 32,128"
SWEEP = "Combinations"


def compare(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="File to read: .npy, .npz, .safetensors or .onnx, or a checkpoint folder; - is "
            "standard input.",
        ),
    ],
    dtypes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Target types, with commas between them. [default: int8,int4,float8e4m3fn, "
            "unless there are presets or candidates]",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    block_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Sizes of blocks for every type; also axis, one scale per channel, and tensor, "
            "one for a bare array. [default: as without --block-size, and 128,32]",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="How scales are chosen, such as absmax,mse: each for every combination. "
            "[default: the type's own]",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    presets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Presets, such as w4a16,nvfp4, with blocks of their own.",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Further combinations: types with sizes of blocks, such as int4:32,int8:128, or "
            "the words of a rule, such as 'dtype=int4, block_size=32, symmetric=false'. "
            "Repeatable.",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    axis: options.Axis = None,
    symmetric: options.Symmetric = None,
    scale_dtype: options.ScaleDtype = None,
    importance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Weights of errors, as in `qtool quantize`. Repeatable.",
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    nonfinite: options.NonFinite = None,
    source_dtype: options.SourceDtype = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    requantize: options.Requantize = False,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Whose readers the result would be for, which decides what they can load: "
            "native, compressed-tensors, modelopt or mlx; for ONNX qdq or matmul-nbits. "
            "[default: native, qdq]",
            autocompletion=options.words(
                "native", "compressed-tensors", "modelopt", "mlx", "qdq", "matmul-nbits"
            ),
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    per_tensor: Annotated[
        bool,
        typer.Option(
            "--per-tensor",
            metavar=options.FLAG,
            help="The figures of every tensor too, in JSON and CSV.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    csv: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Comma-separated values; - is standard output, in place of the table.",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            metavar=options.FLAG,
            help="No progress bar.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
) -> None:
    """Quantize in several ways, write no model, and print what each would cost.

    Bits per weight, errors and bytes are those of the report that
    `qtool quantize` writes with the same options. A star marks the Pareto
    front: what is not beaten in both size and error.
    """
    with exit_code():
        if json and csv == "-":
            raise UsageError("--csv -", "contradicts --json", "leave one of them out")
        if per_tensor and not json and csv is None:
            raise UsageError("--per-tensor", "the table has no room for it", "add --json or --csv")
        from qtool.jobs.compare import compare_file

        with options.progress(quiet=quiet) as progress:
            result = compare_file(
                src, dtypes=dtypes or (), block_sizes=block_sizes or (), methods=methods or (),
                presets=presets or (), candidates=candidates or (), axis=axis,
                symmetric=symmetric, scale_dtype=scale_dtype, importance=importance,
                nonfinite=nonfinite, source_dtype=source_dtype, include=include or (),
                exclude=exclude or (), requantize=requantize, layout=layout,
                per_tensor=per_tensor, csv=None if csv == "-" else csv, jobs=jobs, force=force,
                progress=progress,
            )  # fmt: skip
        _show(result, json=json, as_csv=csv == "-")


def _show(result: dict[str, Any], *, json: bool, as_csv: bool) -> None:
    from qtool import render

    render.warnings(result)
    if json:
        options.show(result)
    elif as_csv:
        from qtool.report.table import to_csv

        typer.echo(to_csv(result), nl=False)
    else:
        render.compared(result)

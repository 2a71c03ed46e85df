"""qtool quantize."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.errors import UsageError

EXAMPLE = "Example: qtool quantize weights.safetensors --dtype int4 --block-size 32"


def _dtype_names() -> list[str]:
    from qtool.dtypes import TARGETS

    return [dtype.name for dtype in TARGETS]


def _preset_names() -> list[str]:
    from qtool.presets import PRESETS

    return list(PRESETS)


def quantize(
    src: options.Source,
    output: options.Target = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Target type, such as int4; `qtool dtypes` lists them.",
            autocompletion=_dtype_names,
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Options under one name, such as w4a16; `qtool presets` lists them. Options "
            "beside it take precedence.",
            autocompletion=_preset_names,
            show_default=False,
        ),
    ] = None,
    axis: options.Axis = None,
    block_size: options.BlockSize = None,
    tile: options.Tile = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            metavar=options.FLAG,
            help="Grid centred on zero, or over \\[min, max]. \\[default: symmetric; "
            "asymmetric for unsigned types]",
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="How the scale is chosen: absmax (symmetric), minmax "
            "(asymmetric) or percentile:P, for example percentile:99.9. "
            "\\[default: absmax, or minmax where asymmetric]",
            autocompletion=options.words("absmax", "minmax", "percentile:99.9"),
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="GIVEN",
            help="Given scale, in place of --method and --symmetric: a number, a .npy, or a .npz "
            "or .safetensors that holds NAME.scale, such as an earlier output.",
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    zero_point: options.ZeroPoint = None,
    negative_scale: Annotated[
        bool,
        typer.Option(
            "--negative-scale",
            metavar=options.FLAG,
            help="Accept given scales below zero.",
            rich_help_panel=options.SCALES,
        ),
    ] = False,
    scale_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Type that scales are stored in: float32, float16, "
            "bfloat16, float8e8m0 or float8e4m3fn. \\[default: the weight's own]",
            autocompletion=options.words(
                "float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn"
            ),
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    global_scale: Annotated[
        bool | None,
        typer.Option(
            "--global-scale/--no-global-scale",
            metavar=options.FLAG,
            help="One float32 scale over all float8e4m3fn scales of a tensor, as in nvfp4.",
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    mx_rule: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="How float8e8m0 scales are rounded: floor, ceil, even, rceil or rceil-7.25. "
            "\\[default: of least error for DTYPE]",
            autocompletion=options.words("floor", "ceil", "even", "rceil", "rceil-7.25"),
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Type of the division: float32, float16 or bfloat16. "
            "\\[default: float32; that of a given scale]",
            autocompletion=options.words("float32", "float16", "bfloat16"),
            show_default=False,
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = None,
    saturate: Annotated[
        bool,
        typer.Option(
            "--saturate/--no-saturate",
            metavar=options.FLAG,
            help="Float8 only: out of range gives the largest value, or else NaN or Inf.",
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = True,
    nonfinite: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="NaN and Inf in the source: error, or allow (Inf "
            "saturates, NaN becomes NaN or the zero point).",
            autocompletion=options.words("error", "allow"),
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = "error",
    semantics: Annotated[
        str,
        typer.Option(
            metavar="WHOSE",
            help="onnx, or onednn: the zero point is added before rounding.",
            autocompletion=options.words("onnx", "onednn"),
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = "onnx",
    narrow_range: Annotated[
        bool,
        typer.Option(
            "--narrow-range",
            metavar=options.FLAG,
            help="Leave the lowest code unused: \\[-127, 127] for int8.",
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = False,
    source_dtype: options.SourceDtype = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="How quantized weights are spelled: native, compressed-tensors, modelopt or mlx; "
            "for ONNX qdq or matmul-nbits. \\[default: native, qdq]",
            autocompletion=options.words(
                "native", "compressed-tensors", "modelopt", "mlx", "qdq", "matmul-nbits"
            ),
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    dynamic_activations: Annotated[
        bool | None,
        typer.Option(
            "--dynamic-activations/--no-dynamic-activations",
            metavar=options.FLAG,
            help="The layout tells its readers to quantize activations too, while running.",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    to: options.To = None,
    external_data: options.ExternalData = False,
    requantize: options.Requantize = False,
    allow_empty: options.AllowEmpty = False,
    report: options.ReportFile = None,
    resume: options.Resume = False,
    shards: options.Shards = None,
    scheduler: options.Scheduler = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize every float tensor of rank 2 and more that gets smaller by it, or an array.

    The codes are those of ONNX QuantizeLinear. One scale per output channel
    of a weight, per tensor of a bare array, or, by --block-size, per block.
    A report says what it cost.
    """
    with exit_code():
        if semantics not in ("onnx", "onednn"):
            raise UsageError("--semantics", f"{semantics!r} is unknown", "use onnx or onednn")
        options.check_streams(output, json=json)
        from qtool.jobs.quantize import quantize_file

        with options.progress(quiet=quiet) as progress:
            result = quantize_file(
                src, output, dtype=dtype, preset=preset, axis=axis, block_size=block_size,
                tile=options.rows_and_columns(tile), symmetric=symmetric, method=method,
                scale=scale, zero_point=zero_point, negative_scale=negative_scale,
                scale_dtype=scale_dtype, global_scale=global_scale, mx_rule=mx_rule,
                precision=precision, saturate=saturate, nonfinite=nonfinite,
                semantics=semantics, narrow_range=narrow_range, source_dtype=source_dtype,
                include=include or (), exclude=exclude or (), layout=layout,
                dynamic_activations=dynamic_activations, to=to, external_data=external_data,
                requantize=requantize, allow_empty=allow_empty, report=report, resume=resume,
                shards=shards, scheduler=scheduler, jobs=jobs, force=force, progress=progress,
            )  # fmt: skip
        options.finish(result, json=json, quiet=quiet)

"""qtool quantize."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from qtool.cli import many, options
from qtool.cli.exits import exit_code
from qtool.jobs.progress import Progress

EXAMPLE = "Example: qtool quantize weights.safetensors --dtype int4 --block-size 32"


def _dtype_names() -> list[str]:
    from qtool.dtypes import TARGETS

    return [dtype.name for dtype in TARGETS]


def _preset_names() -> list[str]:
    from qtool.presets import PRESETS

    return list(PRESETS)


def quantize(
    src: options.Sources,
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
    symmetric: options.Symmetric = None,
    method: options.Method = None,
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
        bool | None,
        typer.Option(
            "--negative-scale/--no-negative-scale",
            metavar=options.FLAG,
            help="Choose the sign of scales too, so that the larger side has the code that only "
            "one has; accept given ones below zero. [default: no]",
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    scale_dtype: options.ScaleDtype = None,
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
            "[default: neighbours are compared]",
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
            "[default: float32; that of a given scale]",
            autocompletion=options.words("float32", "float16", "bfloat16"),
            show_default=False,
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = None,
    saturate: Annotated[
        bool | None,
        typer.Option(
            "--saturate/--no-saturate",
            metavar=options.FLAG,
            help="Float8 only: out of range gives the largest value, or else NaN or Inf. "
            "[default: saturate]",
            show_default=False,
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = None,
    nonfinite: options.NonFinite = None,
    semantics: Annotated[
        str | None,
        typer.Option(
            metavar="WHOSE",
            help="onnx, or onednn: the zero point is added before rounding. [default: onnx]",
            autocompletion=options.words("onnx", "onednn"),
            show_default=False,
            rich_help_panel=options.ARITHMETIC,
        ),
    ] = None,
    narrow_range: options.NarrowRange = None,
    source_dtype: options.SourceDtype = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="'PATTERN: dtype=int8, block_size=64' for the tensors whose name matches, with "
            "the words of this page's options (none: as if not given), or 'PATTERN: skip'. "
            "Repeatable; later rules win, word by word.",
            rich_help_panel=options.SELECTION,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="TOML with the same words, and rules; options take precedence, from variables and "
            "configuration too, and rules come behind its own. `qtool recipe` prints one; - is "
            "standard input.",
            show_default=False,
            rich_help_panel=options.SELECTION,
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            metavar="BITS",
            help="Choose type and blocks of each tensor: the least error that this many bits per "
            "weight allow, scales and zero points included.",
            show_default=False,
            rich_help_panel=options.MIXED,
        ),
    ] = None,
    target_sqnr: Annotated[
        float | None,
        typer.Option(
            metavar="DB",
            help="Choose likewise: the least size with an SQNR of that many dB over all "
            "quantized tensors.",
            show_default=False,
            rich_help_panel=options.MIXED,
        ),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="What to choose from: types with sizes of blocks, such as int4:32,int8:128, "
            "or the words of a rule. Repeatable. [default: int4 and uint4 in blocks of 16 to "
            "128, int8 in blocks of 32 and 128, and int2:32 but in DequantizeLinear, as far as "
            "the layout's readers take them]",
            show_default=False,
            rich_help_panel=options.MIXED,
        ),
    ] = None,
    save_recipe: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep all choices, those made by a target among them, as a recipe.",
            show_default=False,
            rich_help_panel=options.MIXED,
        ),
    ] = None,
    importance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Make weighted errors small: .npz, .safetensors or .npy of a weight >= 0 for each "
            "element or input channel, named as the tensors; NAME=FILE, NAME a tensor or a pattern "
            "as in --include; or activations: and either, of inputs of layers, whose mean squares "
            "are the weights. Repeatable.",
            show_default=False,
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="How quantized weights are spelled: native, compressed-tensors, modelopt or mlx; "
            "for ONNX qdq or matmul-nbits. [default: native, qdq]",
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
            help="The layout tells its readers to quantize activations too, while running, or not "
            "to where a preset has it. [default: the preset's, else no]",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    hessian: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="In place of --activations: (inputs, inputs) for each weight, the sum or mean of "
            "x x^T over inputs x. FILE or NAME=FILE. Repeatable.",
            show_default=False,
            rich_help_panel=options.ROUNDING,
        ),
    ] = None,
    activations: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Inputs of layers, for which codes of least error are chosen: .npy, .npz or "
            ".safetensors of (..., inputs) under the names of the weights; or NAME=FILE, NAME a "
            "tensor or a pattern as in --include. Repeatable.",
            show_default=False,
            rich_help_panel=options.ROUNDING,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            metavar="D",
            help="How much of its mean is added to a Hessian's diagonal. [default: 0.01]",
            show_default=False,
            rich_help_panel=options.ROUNDING,
        ),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order",
            metavar=options.FLAG,
            help="Round the columns of the largest inputs first, or in the weight's order. "
            "[default: act-order]",
            show_default=False,
            rich_help_panel=options.ROUNDING,
        ),
    ] = None,
    to: options.To = None,
    external_data: options.ExternalData = False,
    requantize: options.Requantize = False,
    allow_empty: options.AllowEmpty = False,
    report: options.ReportFile = None,
    fail_if: options.FailIf = None,
    baseline: options.Baseline = None,
    strict: options.Strict = False,
    dry_run: options.DryRun = False,
    hash: options.Hash = False,
    resume: options.Resume = False,
    shards: options.Shards = None,
    scheduler: options.Scheduler = None,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    json_lines: options.JsonLines = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize every float tensor of rank 2 and more that gets smaller by it, or an array.

    The codes are those of ONNX QuantizeLinear. One scale per output channel
    of a weight, per tensor of a bare array, or, by --block-size, per block.
    A report says what it cost.
    """
    with exit_code():
        options.check_semantics(semantics)
        if not dry_run:
            options.check_streams(output, src, json=json, json_lines=json_lines)
        from qtool.jobs.quantize import quantize_file

        def run(source: str, progress: Progress) -> dict[str, Any]:
            return quantize_file(
                source, output, dtype=dtype, preset=preset, axis=axis, block_size=block_size,
                tile=options.rows_and_columns(tile), symmetric=symmetric, method=method,
                scale=scale, zero_point=zero_point, negative_scale=negative_scale,
                scale_dtype=scale_dtype, global_scale=global_scale, mx_rule=mx_rule,
                precision=precision, saturate=saturate, nonfinite=nonfinite,
                semantics=semantics, narrow_range=narrow_range, source_dtype=source_dtype,
                include=include or (), exclude=exclude or (), rules=rule or (), recipe=said,
                target_bits=target_bits, target_sqnr=target_sqnr, candidates=candidates or (),
                save_recipe=save_recipe, importance=importance, layout=layout,
                dynamic_activations=dynamic_activations,
                hessian=hessian, activations=activations,
                damping=damping, act_order=act_order, to=to, external_data=external_data,
                requantize=requantize, allow_empty=allow_empty, report=report,
                fail_if=fail_if or (), baseline=baseline, strict=strict, dry_run=dry_run,
                hash=hash,
                resume=resume, shards=shards, scheduler=scheduler, jobs=jobs, force=force,
                progress=progress,
            )  # fmt: skip

        with (
            many.placing(src, output, report, save_recipe=save_recipe, baseline=baseline),
            many.shared("--recipe", recipe, src) as said,
        ):
            hidden = quiet or (dry_run and json_lines)  # a plan is printed on standard output too
            shown = partial(options.finish, json=json, quiet=hidden)
            many.each(src, run, shown, json=json, json_lines=json_lines, quiet=quiet)

"""qtool dynamic."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from qtool.cli import many, options
from qtool.cli.exits import exit_code
from qtool.jobs.progress import Progress

EXAMPLE = "Example: qtool dynamic input.npy"


def dynamic(
    src: options.Sources,
    output: options.Target = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph",
            metavar=options.FLAG,
            help="Let an ONNX model quantize its activations while it runs, and multiply codes.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="uint8, or int8 with [-127, 127]; with --graph that of the weights. "
            "[default: uint8; int8 with --graph]",
            autocompletion=options.words("uint8", "int8"),
            show_default=False,
        ),
    ] = None,
    per_tensor: Annotated[
        bool,
        typer.Option(
            "--per-tensor",
            metavar=options.FLAG,
            help="With --graph: one scale per weight, not per output channel.",
        ),
    ] = False,
    source_dtype: options.SourceDtype = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
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
    """Quantize an array, or each float tensor of a file, by ONNX DynamicQuantizeLinear.

    One scale and zero point per tensor, from its minimum and maximum with
    zero included. With --graph, MatMul, Gemm and Conv of an ONNX model become
    DynamicQuantizeLinear with MatMulInteger or ConvInteger.
    """
    with exit_code():
        if not dry_run:
            options.check_streams(output, src, json=json, json_lines=json_lines)
        from qtool.jobs.dynamic import dynamic_file

        def run(source: str, progress: Progress) -> dict[str, Any]:
            return dynamic_file(
                source, output, dtype=dtype, graph=graph, per_tensor=per_tensor,
                source_dtype=source_dtype, include=include or (), exclude=exclude or (), to=to,
                external_data=external_data, requantize=requantize, allow_empty=allow_empty,
                report=report, fail_if=fail_if or (), baseline=baseline, strict=strict,
                dry_run=dry_run, hash=hash, resume=resume, shards=shards, scheduler=scheduler,
                jobs=jobs, force=force, progress=progress,
            )  # fmt: skip

        with many.placing(src, output, report, baseline=baseline):
            hidden = quiet or (dry_run and json_lines)  # a plan is printed on standard output too
            shown = partial(options.finish, json=json, quiet=hidden)
            many.each(src, run, shown, json=json, json_lines=json_lines, quiet=quiet)

"""qtool dequantize."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qtool.cli import many, options
from qtool.cli.exits import exit_code
from qtool.jobs.progress import Progress

EXAMPLE = "Example: qtool dequantize weights.int4.safetensors -o restored.safetensors"


def dequantize(
    src: options.Sources,
    output: options.Target = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="float32, float16, bfloat16 or float64.",
            autocompletion=options.words("float32", "float16", "bfloat16", "float64"),
        ),
    ] = "float32",
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="GIVEN",
            help="Scale of the codes: a number, a .npy, or a .npz or .safetensors that holds "
            "NAME.scale.",
            rich_help_panel=options.SCALES,
        ),
    ] = None,
    zero_point: options.ZeroPoint = None,
    axis: options.Axis = None,
    block_size: options.BlockSize = None,
    tile: options.Tile = None,
    source_dtype: options.SourceDtype = None,
    external_data: options.ExternalData = False,
    resume: options.Resume = False,
    jobs: options.Jobs = None,
    force: options.Force = False,
    json: options.Json = False,
    json_lines: options.JsonLines = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn a quantized file back into floats, in the same container.

    --scale, --zero-point, --axis, --block-size and --tile are for a .npy, which
    holds codes alone.
    """
    with exit_code():
        options.check_streams(output, src, json=json, json_lines=json_lines)
        from qtool.jobs.dequantize import dequantize_file

        def run(source: str, progress: Progress) -> dict[str, Any]:
            return dequantize_file(
                source, output, dtype=dtype, scale=scale, zero_point=zero_point, axis=axis,
                block_size=block_size, tile=options.rows_and_columns(tile),
                source_dtype=source_dtype, external_data=external_data, resume=resume, jobs=jobs,
                force=force, progress=progress,
            )  # fmt: skip

        def show(result: dict[str, Any]) -> None:
            if json:
                options.show(result)
            if not quiet:
                from qtool import render

                render.dequantized(result)

        with many.placing(src, output, by_suffix=True):
            many.each(src, run, show, json=json, json_lines=json_lines, quiet=quiet)

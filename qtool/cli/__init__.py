"""The command line: flags -> job -> exit code. One module per command."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool import __version__
from qtool.cli import (
    calibrate,
    capture,
    compare,
    dequantize,
    dtypes,
    dynamic,
    finish,
    inspect,
    presets,
    quantize,
    recipe,
    report,
    verify,
)
from qtool.cli.command import Command, Group
from qtool.cli.exits import process
from qtool.cli.layers import PREFIX
from qtool.cli.options import FLAG

app = typer.Typer(
    name="qtool",
    cls=Group,
    help="Quantize model weights in .npy, .npz, .safetensors and ONNX files with exactly the ONNX "
    "arithmetic, and report what it cost.",
    epilog="Example: qtool quantize weights.safetensors --dtype int4 --block-size 32",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)
app.command(cls=Command, epilog=quantize.EXAMPLE)(quantize.quantize)
app.command(cls=Command, epilog=dynamic.EXAMPLE)(dynamic.dynamic)
app.command(cls=Command, epilog=dequantize.EXAMPLE)(dequantize.dequantize)
app.command(cls=Command, epilog=finish.EXAMPLE)(finish.finish)
app.command(cls=Command, epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command(cls=Command, epilog=capture.EXAMPLE)(capture.capture)
app.command(cls=Command, epilog=verify.EXAMPLE)(verify.verify)
app.command(cls=Command, epilog=inspect.EXAMPLE)(inspect.inspect)
app.command(cls=Command, epilog=compare.EXAMPLE)(compare.compare)
app.command(cls=Command, epilog=report.EXAMPLE)(report.report)
app.command(cls=Command, epilog=dtypes.EXAMPLE)(dtypes.dtypes)
app.command(cls=Command, epilog=recipe.EXAMPLE, context_settings=recipe.SETTINGS)(recipe.recipe)
app.command(cls=Command, epilog=presets.EXAMPLE)(presets.presets)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"qtool {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar=FLAG,
            help="Print the version and leave.",
            is_eager=True,
            allow_from_autoenv=False,
            callback=lambda value: _print_version(wanted=value),
        ),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Take options from this file.", show_default=False),
    ] = None,
    no_config: Annotated[
        bool,
        typer.Option("--no-config", metavar=FLAG, help="Take options from no file."),
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line; the exit code says how it went."""
    with process():
        app()

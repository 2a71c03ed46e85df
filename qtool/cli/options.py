"""Options that several commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from qtool.errors import UsageError

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="File to read; - is standard input.")
]
Target = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="DST", help="File to write; - is standard output. "
                 "\\[default: beside SRC]", show_default=False),
]
Axis = Annotated[
    int | None, typer.Option(metavar="N", help="Axis of the scales; negative counts from the end.")
]
BlockSize = Annotated[
    int | None, typer.Option(metavar="B", min=1, help="One scale per B elements along the axis.")
]
Scale = Annotated[
    str | None,
    typer.Option(metavar="S", help="Given scale: a number, a .npy, or a .safetensors that holds "
                 "NAME.scale."),
]
ZeroPoint = Annotated[
    str | None, typer.Option(metavar="Z", help="Given zero point, in the same forms.")
]
SourceDtype = Annotated[
    str | None,
    typer.Option(metavar="T", help="Element type of arrays that NumPy saved as raw bytes, "
                 "such as bfloat16."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="P", help="Only tensors whose name matches: a glob, or re: and a "
                 "regular expression. Repeatable."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="P", help="Not the tensors whose name matches. Repeatable."),
]
To = Annotated[
    str | None,
    typer.Option(metavar="FORMAT", help="Container to write: safetensors, npz, or npy (the codes "
                 "alone). [default: by DST's suffix, else safetensors]", show_default=False),
]
ExternalData = Annotated[
    bool,
    typer.Option("--external-data", help="Write ONNX weights to a file beside the model; always "
                 "so above 1 GiB."),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Accept a source that is quantized already.")
]
AllowEmpty = Annotated[
    bool, typer.Option("--allow-empty", help="Succeed where no tensor is quantized.")
]
ReportFile = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE", help="Where the JSON report goes. "
                 "\\[default: DST's name with .report.json]", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No table, no progress bar.")]


def show(result: dict[str, Any]) -> None:
    """A result as strict JSON on standard output."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def check_streams(output: str | None, *, json: bool) -> None:
    """Refuse two results on one standard output."""
    if json and output == "-":
        raise UsageError("--json", "standard output carries the file", "use --report FILE")


def finish(report: dict[str, Any], *, json: bool, quiet: bool) -> None:
    """Show the report of quantize or dynamic."""
    from qtool import render

    if json:
        show(report)
    if not quiet:
        render.summary(report)

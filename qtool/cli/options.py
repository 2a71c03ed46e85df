"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from qtool.errors import GateError, UsageError
from qtool.jobs.progress import Progress, Silent

# Panels of --help.
SCALES = "Scales"
ARITHMETIC = "Arithmetic"
ROUNDING = "Second-order rounding"
SELECTION = "Selection"
MIXED = "Mixed precision"
OUTPUT = "Output"
CHECKS = "Checks"
FOLDERS = "Checkpoint folders"
FLAG = " "  # a flag takes no value: no type beside it in --help


def words(*values: str) -> Callable[[], list[str]]:
    """What the shell completes the value of an option to."""
    return lambda: list(values)


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC...",
        help="Files to read: .npy, .npz, .safetensors or .onnx, or checkpoint folders; - is "
        "standard input.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DST",
        help="File or folder to write, or a folder (one that ends in / is made) to put files in; "
        "- is standard output. [default: beside SRC]",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DST",
        help="File to write; - is standard output. [default: beside the first file]",
        show_default=False,
    ),
]
Axis = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Axis of the scales; negative counts from the end.",
        rich_help_panel=SCALES,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="One scale per N elements along the axis.", rich_help_panel=SCALES
    ),
]
Tile = Annotated[
    str | None,
    typer.Option(
        metavar="RxC",
        help="One scale per tile of R rows and C columns, such as 128x128.",
        show_default=False,
        rich_help_panel=SCALES,
    ),
]
ZeroPoint = Annotated[
    str | None,
    typer.Option(
        metavar="GIVEN",
        help="Zero point to go with --scale, in the same forms.",
        rich_help_panel=SCALES,
    ),
]
Symmetric = Annotated[
    bool | None,
    typer.Option(
        "--symmetric/--asymmetric",
        metavar=FLAG,
        help="Grid centred on zero, or over [min, max]. [default: symmetric; "
        "asymmetric for unsigned types]",
        show_default=False,
        rich_help_panel=SCALES,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="How the scale is chosen: mse or optimal (least squared error, searched or exact), "
        "absmax (symmetric), minmax (asymmetric), entropy or percentile:P, for example "
        "percentile:99.9. [default: mse up to 4 bits and for mx and nvfp4, else absmax, or "
        "minmax where asymmetric]",
        autocompletion=words("mse", "optimal", "absmax", "minmax", "entropy", "percentile:99.9"),
        show_default=False,
        rich_help_panel=SCALES,
    ),
]
ScaleDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Type that scales are stored in: float32, float16, "
        "bfloat16, float8e8m0 or float8e4m3fn. [default: the weight's own]",
        autocompletion=words("float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn"),
        show_default=False,
        rich_help_panel=SCALES,
    ),
]
NonFinite = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="NaN and Inf in the source: error, or allow (Inf "
        "saturates, NaN becomes NaN or the zero point). [default: error]",
        autocompletion=words("error", "allow"),
        show_default=False,
        rich_help_panel=ARITHMETIC,
    ),
]
NarrowRange = Annotated[
    bool | None,
    typer.Option(
        "--narrow-range/--no-narrow-range",
        metavar=FLAG,
        help="Leave the lowest code unused: [-127, 127] for int8. [default: no]",
        show_default=False,
        rich_help_panel=ARITHMETIC,
    ),
]
SourceDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Element type of arrays that NumPy saved as raw bytes, such as bfloat16.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only tensors whose name matches: a glob such as '*.mlp.*', or "
        "re: and a regular expression. Repeatable.",
        rich_help_panel=SELECTION,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Not the tensors whose name matches. Repeatable.",
        rich_help_panel=SELECTION,
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize",
        metavar=FLAG,
        help="Accept a source that is quantized already.",
        rich_help_panel=SELECTION,
    ),
]
AllowEmpty = Annotated[
    bool,
    typer.Option(
        "--allow-empty",
        metavar=FLAG,
        help="Succeed where no tensor is quantized.",
        rich_help_panel=SELECTION,
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        autocompletion=words("safetensors", "npz", "npy"),
        help="Container to write: safetensors, npz, or npy (the codes "
        "alone). [default: by DST's suffix, else safetensors; ONNX stays ONNX]",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
ExternalData = Annotated[
    bool,
    typer.Option(
        "--external-data",
        metavar=FLAG,
        help="Write ONNX weights to a file beside the model; always so above 1 GiB.",
        rich_help_panel=OUTPUT,
    ),
]
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Where the JSON report goes. [default: DST's name with .report.json]",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="EXPR",
        help="Exit with 3, and leave DST as it was, if this holds: 'sqnr_db < 20', "
        "'max_abs_error > 0.1 on lm_head*', 'total.bits_per_weight > 4.6', "
        "'sqnr_db worse by 0.5' (than --baseline). `qtool --help` lists the figures. Repeatable.",
        show_default=False,
        rich_help_panel=CHECKS,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Report of an earlier run, for --fail-if 'FIGURE worse by N'.",
        show_default=False,
        rich_help_panel=CHECKS,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        metavar=FLAG,
        help="Exit with 3, and leave DST as it was, where a tensor is not quantized as asked, a "
        "pattern matches nothing, values are not finite, or nothing is quantized.",
        rich_help_panel=CHECKS,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar=FLAG,
        help="Print the plan, made from headers alone: the fate and the size of every tensor. "
        "Nothing is written.",
        rich_help_panel=CHECKS,
    ),
]
Hash = Annotated[
    bool,
    typer.Option(
        "--hash",
        metavar=FLAG,
        help="Put the SHA-256 of every source and output file into the report.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        metavar=FLAG,
        help="Go on with what an interrupted run has left in DST.partial.",
        rich_help_panel=FOLDERS,
    ),
]
Shards = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Do slice K of N alone; `qtool finish DST` puts the slices together.",
        rich_help_panel=FOLDERS,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Do the shards on the Dask cluster whose scheduler is at tcp://HOST:PORT.",
        rich_help_panel=FOLDERS,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Threads for large tensors. [default: the cores that the process may use]",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", metavar=FLAG, help="Replace what exists.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar=FLAG,
        help="Print the result as JSON on standard output.",
        rich_help_panel=OUTPUT,
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json-lines",
        metavar=FLAG,
        help="Print the result of each SRC as JSON in one line, as soon as it is there; an error "
        "is a line with its exit_code.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        metavar=FLAG,
        help="No table, no progress bar; warnings and errors alone.",
        rich_help_panel=OUTPUT,
    ),
]


def show(result: dict[str, Any]) -> None:
    """A result as strict JSON on standard output."""
    from qtool.report import to_json

    typer.echo(to_json(result), nl=False)


def check_streams(
    output: str | None, sources: Sequence[str], *, json: bool, json_lines: bool = False
) -> None:
    """Refuse two results on one standard output."""
    if (json or json_lines) and (output == "-" or (output is None and "-" in sources)):
        option = "--json" if json else "--json-lines"
        raise UsageError(option, "standard output carries the file", "use --report FILE")


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Progress of a job on standard error, or nothing; rich is loaded where it has something to
    show."""
    if quiet:
        yield Silent()
        return
    from qtool import render

    with render.progress() as shown:
        yield shown


@contextmanager
def failing(*, json: bool, quiet: bool) -> Iterator[None]:
    """Show the report of a result that fails, too."""
    try:
        yield
    except GateError as error:
        finish(error.report, json=json, quiet=quiet)
        raise


def finish(report: dict[str, Any], *, json: bool, quiet: bool) -> None:
    """Show the report of a command, or its plan; warnings in any case."""
    if json:
        show(report)
    if report.get("dry_run"):
        quiet = quiet or json
    if quiet and not report["warnings"]:
        return
    from qtool import render

    if quiet:
        render.warnings(report)
    elif report.get("dry_run"):
        render.planned(report)
        render.gates(report)
    else:
        show_all = render.verified if report["command"] == "verify" else render.summary
        show_all(report)
        render.gates(report)


def check_semantics(name: str | None) -> None:
    """Refuse a value of --semantics that there is not on the command line."""
    if name not in (None, "onnx", "onednn"):
        raise UsageError("--semantics", f"{name!r} is unknown", "use onnx or onednn")


def rows_and_columns(text: str | None) -> tuple[int, int] | None:
    """The value of --tile."""
    if text is None:
        return None
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise UsageError("--tile", f"{text!r} is not ROWSxCOLUMNS", "use for example 128x128")
    return int(rows), int(columns)

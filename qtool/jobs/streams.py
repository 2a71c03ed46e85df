"""Where a command reads from and writes to: file names, standard input and output."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import formats
from qtool.dtypes import DTypeLike, resolve
from qtool.errors import OutputError, QtoolError, UsageError, usage_errors
from qtool.formats import files, scratch
from qtool.report import Report, is_report, pieces

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource

STANDARD = "-"
NATIVE = ("safetensors", "npz", "npy")


@contextmanager
def opened(src: str | Path, source_dtype: DTypeLike | None = None) -> Iterator[formats.Source]:
    """The source of a command; see kept()."""
    with usage_errors():
        dtype = None if source_dtype is None else resolve(source_dtype, "source_dtype")
    with kept(src) as path, closing(formats.open(path, source_dtype=dtype)) as source:
        yield source


@contextmanager
def kept(src: str | Path) -> Iterator[Path]:
    """A file that can be opened again and again: src itself; of "-", which is standard input, and
    of other pipes a temporary copy, which errors call as the user does."""
    path = Path(src)
    with ExitStack() as stack:
        if str(src) == STANDARD:
            path = stack.enter_context(files.spooled(sys.stdin.buffer))
            stack.enter_context(named(path, "standard input"))
        elif is_pipe(path):
            path = stack.enter_context(files.spooled(stack.enter_context(path.open("rb"))))
            stack.enter_context(named(path, str(src)))
        yield path


def check_once(*names: str | Path | None) -> None:
    """Refuse standard input for two of a command's files."""
    if sum(str(name) == STANDARD for name in names) > 1:
        raise UsageError(STANDARD, "standard input is one file", "name the other one")


def is_pipe(path: Path) -> bool:
    """Whether there is a pipe of that name, which may be no name that a file can have."""
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        return False


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Let errors about a temporary file name what the user knows."""
    try:
        yield
    except QtoolError as error:
        if str(path) not in error.thing:
            raise
        thing = error.thing.replace(str(path), name)
        raise type(error)(thing, error.rule, error.remedy) from error


def target(
    src: str | Path,
    dst: str | Path | None,
    to: str | None,
    container: str,
    tag: str,
    allowed: Sequence[str] = (),
) -> tuple[str, str]:
    """Name and container of the output.

    Without dst: STEM.tag.CONTAINER beside src, or standard output for standard input; in dst where
    that is a folder. `to`, or else the suffix of dst, names the container; else it is `container`.
    allowed: the containers that it may be; none given: those that hold what `container` does.
    Raises UsageError where they contradict each other.
    """
    allowed = allowed or (("onnx",) if container == "onnx" else NATIVE)
    if to is not None and to not in allowed:
        raise UsageError(
            "--to", f"{to} cannot be written from {container}", f"use {', '.join(allowed)}"
        )
    if dst is not None and is_folder(dst) and str(src) == STANDARD:
        raise UsageError(f"-o {dst}", "standard input has no name of its own", "name a file")
    if (dst is None and str(src) != STANDARD) or (dst is not None and is_folder(dst)):
        wanted = to or container
        return placed_in(dst, f"{_stem(src)}.{tag}.{wanted}"), wanted
    if dst is None or str(dst) == STANDARD:
        return STANDARD, to or container
    suffix = Path(dst).suffix[1:].lower()
    endings = " or ".join(f".{name}" for name in allowed)
    if not suffix and to is None:
        rule = "its name does not say what to write"
        raise UsageError(str(dst) or "-o ''", rule, f"end it in {endings}")
    if suffix not in allowed and (to is None or suffix in formats.CONTAINERS):
        raise UsageError(
            str(dst),
            f"{container} cannot be written as {suffix}",
            f"end its name in {endings}",
        )
    if to is not None and suffix in allowed and suffix != to:
        raise UsageError(str(dst), f"its suffix contradicts --to {to}", "leave one of them out")
    return str(dst), to or suffix


def is_folder(name: str | Path) -> bool:
    """Whether what is written goes into a folder of that name: there is one, or it ends in /."""
    return str(name).endswith("/") or os.path.isdir(name)


def placed_in(folder: str | Path | None, name: str) -> str:
    """The file's name, in another folder where there is one."""
    return name if folder is None else os.path.join(folder, os.path.basename(name))


def check_folder(to: str | None, *, external_data: bool) -> None:
    """Refuse options of single files for a folder."""
    if to is not None:
        raise UsageError("--to", "a folder stays a folder of .safetensors", "leave it out")
    if external_data:
        raise UsageError("--external-data", "a folder has none", "it is for ONNX models")


def source_files(src: str | Path, source: formats.Source) -> list[Path]:
    """The files that a command reads and must not write: the source and an ONNX model's data."""
    named = [] if str(src) == STANDARD else [Path(src)]
    if source.container == "onnx":
        named += sorted(cast("OnnxSource", source).external_files)
    return named


def source_names(src: str | Path, source: formats.Source) -> dict[str, Path]:
    """The files of a source by the names that the user calls them."""
    names = {str(src): source.path}
    if source.container == "onnx":
        for path in cast("OnnxSource", source).external_files:
            names[_beside(str(src), path)] = path
    return names


def output_names(path: Path, output: Mapping[str, Any]) -> dict[str, Path]:
    """The files of an output at path by the names that the user calls them; output: see
    written()."""
    names = {output["name"]: path}
    if output["external_data"] is not None:
        data = path.resolve().with_name(output["external_data"])
        names[_beside(output["name"], data)] = data
    return names


def _beside(name: str, path: Path) -> str:
    """What the user calls a file whose folder is that of the one called name, or below it."""
    folder = os.path.dirname(name)
    return os.path.join(folder, os.path.relpath(path, os.path.realpath(folder)))


def check_target(sources: Sequence[Path], dst: str, *, force: bool) -> None:
    """Refuse a target that must not be written; see formats.files.check_target."""
    if dst == STANDARD:
        if sys.stdout.isatty():
            raise UsageError("-o -", "standard output is a terminal", "redirect it, or name a file")
        return
    for source in sources or [Path(STANDARD)]:
        files.check_target(Path(dst), source, force=force)


@contextmanager
def placed(dst: str, name: str) -> Iterator[Path]:
    """A path to write to; for standard output a temporary file that is copied there after."""
    if dst != STANDARD:
        yield Path(dst)
        return
    with scratch.folder() as folder:
        path = folder / name
        yield path
        if len(os.listdir(folder)) > 1:
            raise OutputError(
                "standard output", "cannot carry the model's data file too", "name a file with -o"
            )
        files.copy_to(path, sys.stdout.buffer)


def written(path: Path, name: str, container: str) -> dict[str, Any]:
    """A report's "output": the file at path, which the user calls name, and its external data."""
    nbytes = path.stat().st_size
    external = None
    if container == "onnx":
        from qtool.formats.onnx import OnnxSource

        path = path.resolve()
        with files.locked(path.parent):  # another run may replace the model and its data
            model = OnnxSource(path)
        nbytes = model.nbytes
        external = next((file.name for file in sorted(model.external_files)), None)
    return {"name": name, "container": container, "bytes": nbytes, "external_data": external}


def report_path(report: str | Path | None, dst: str) -> Path | None:
    """Where the report goes: as asked, or as STEM.report.json in that folder or beside dst."""
    if str(report) == STANDARD:
        raise UsageError("--report", f"{report} is no file", "print the report with --json")
    if report is None:
        return None if dst == STANDARD else Path(f"{_stem(dst)}.report.json")
    if not is_folder(report):
        return Path(report)
    if dst == STANDARD:
        raise UsageError(f"--report {report}", "standard output has no name", "name a file")
    return Path(placed_in(report, f"{_stem(dst)}.report.json"))


def _stem(name: str | Path) -> str:
    """A file's name without the suffix of its container; other dots belong to the name."""
    path = Path(name)
    return str(path.with_suffix("") if path.suffix[1:].lower() in formats.CONTAINERS else path)


class ReportFile:
    """Where a report goes as JSON, if anywhere.

    others: the sources and targets of the command. force: replace a file that is no report.
    Raises OutputError where the path must not be written.
    """

    def __init__(self, path: Path | None, others: Sequence[Path], *, force: bool) -> None:
        self._path = path
        self._force = force
        if path is None:
            return
        for other in others:
            same = path.exists() and other.exists() and path.samefile(other)
            if same or os.path.realpath(path) == os.path.realpath(other):
                raise OutputError(f"report {path}", f"is also {other}", "choose another name")
        self._check_kind(path)
        files.check_target(path, Path(STANDARD), force=True)

    def write(self, report: Report) -> None:
        """Write it, whole or not at all; not in the place of what is no report."""
        if self._path is None:
            return
        with (
            files.replacing(self._path) as temporary,
            temporary.open("w", encoding="utf-8") as file,
        ):
            file.writelines(pieces(report))
            self._check_kind(self._path)

    def _check_kind(self, path: Path) -> None:
        if path.is_file() and not self._force and not is_report(path):
            rule = "exists and is no qtool report"
            raise OutputError(f"report {path}", rule, "choose another name or --force")

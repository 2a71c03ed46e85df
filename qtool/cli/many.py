"""One job for each of several sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import typer

from qtool.cli import options
from qtool.cli.exits import explained, say
from qtool.errors import GateError, QtoolError, UsageError
from qtool.jobs.progress import Progress

Result = Mapping[str, Any]


def each(
    sources: Sequence[str],
    run: Callable[[str, Progress], Result],
    show: Callable[[Any], None],
    *,
    json: bool,
    json_lines: bool,
    quiet: bool,
) -> None:
    """Run a job for every source, and show what comes of it as soon as it is there.

    One that fails does not stop the others; of their exit codes the worst is left with, 1 before 2
    before 3. Of one source alone, but with --json-lines, an error is the caller's.
    """
    check_sources(sources, json=json, json_lines=json_lines)
    codes = []
    for source in sources:
        said = None
        try:
            with options.progress(quiet=quiet) as progress:
                result = run(source, progress)
        except BrokenPipeError:
            raise
        except (QtoolError, MemoryError, OSError) as error:
            if isinstance(error, GateError):
                show(error.report)
            if len(sources) == 1 and not json_lines:
                raise
            said = _failed(source, error)
        else:
            show(result)
        if json_lines:
            _print_line(result if said is None else said)
        codes.append(0 if said is None else said["exit_code"])
    if any(codes):
        raise typer.Exit(min(filter(None, codes)))


def check_sources(sources: Sequence[str], *, json: bool, json_lines: bool) -> None:
    """Refuse what cannot be said or read of several sources."""
    if sources.count("-") > 1:
        raise UsageError("SRC", "- is given twice", "standard input can be read once")
    if json and json_lines:
        raise UsageError("--json", "contradicts --json-lines", "leave one of them out")
    if json and len(sources) > 1:
        raise UsageError("--json", "is one document, for one SRC", "use --json-lines")


@contextmanager
def placing(
    sources: Sequence[str],
    output: str | None,
    report: str | None = None,
    *,
    by_suffix: bool = False,
    **single: str | None,
) -> Iterator[None]:
    """The folders that results go to, made where they end in /, and removed where nothing came.

    by_suffix: outputs keep the suffix of their source. single: other options that name one file.
    Raises UsageError where results of several sources would go to one place.
    """
    several = len(sources) > 1
    is_folder = {"-o": output, "--report": report}
    for option, name in {**is_folder, **single}.items():
        if not several or name is None or (option in is_folder and _is_folder(name)):
            continue
        remedy = "name a folder, ending in /" if option in is_folder else "leave it out"
        option = option if option in is_folder else "--" + option.replace("_", "-")
        raise UsageError(option, f"{name} is one file for {len(sources)} sources", remedy)
    for folder in {output, report}:
        _check_apart(sources, folder, by_suffix=by_suffix)
    with ExitStack() as stack:
        for folder in (output, report):
            if folder is not None and folder.endswith("/"):
                stack.enter_context(_made(folder))
        yield


@contextmanager
def shared(option: str, file: str | None, sources: Sequence[str]) -> Iterator[str | None]:
    """A file that every source is done with; of "-" and other pipes, which give what they hold
    once, a copy."""
    if file is None:
        yield None
        return
    if file == "-" and "-" in sources:
        raise UsageError(option, "- is SRC already", "standard input can be read once")
    from qtool.jobs import streams

    with streams.kept(file) as path:
        yield str(path)


def _is_folder(name: str) -> bool:
    return name.endswith("/") or os.path.isdir(name)


def _check_apart(sources: Sequence[str], folder: str | None, *, by_suffix: bool) -> None:
    seen: dict[tuple[str, str], str] = {}
    for source in sources:
        path = source.rstrip("/")
        stem, suffix = os.path.splitext(os.path.basename(path))
        if os.path.isdir(source):
            stem, suffix = stem + suffix, "/"
        elif suffix.lower() not in (".npy", ".npz", ".safetensors", ".onnx"):
            stem, suffix = stem + suffix, ""
        place = os.path.realpath(folder if folder is not None else os.path.dirname(path))
        key = (os.path.join(place, stem), suffix if by_suffix or suffix == "/" else "")
        if key in seen and source == seen[key] != "-":
            raise UsageError(source, "is given twice", "leave one of them out")
        if key in seen and source != "-":
            rule = f"would be written where that of {seen[key]} is"
            raise UsageError(source, rule, "give -o another folder, in a command of its own")
        seen[key] = source


@contextmanager
def _made(folder: str) -> Iterator[None]:
    """A folder that is there meanwhile, and stays if something is in it."""
    is_new = not os.path.isdir(folder)
    if is_new:
        os.mkdir(folder)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                os.rmdir(folder)


def _failed(source: str, error: QtoolError | MemoryError | OSError) -> dict[str, Any]:
    """Say on standard error what went wrong with a source; the line that says it too."""
    name = "standard input" if source == "-" else source
    lines, code = explained(error)
    lines = [line if name in line else f"{name}: {line}" for line in lines]
    for line in lines:
        say(line)
    said = {"source": source, "error": lines[0], "exit_code": code}
    return said | ({"report": error.report} if isinstance(error, GateError) else {})


def _print_line(result: Result) -> None:
    from qtool.report import to_json

    typer.echo(to_json(result, indent=None), nl=False)  # echo flushes

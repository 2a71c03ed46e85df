"""How a command ends: 0 done, 1 cannot be done, 2 wrong usage, 3 a gate failed, 129 hung up, 130
interrupted, 143 terminated."""

from __future__ import annotations

import codecs
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import TextIOWrapper, UnsupportedOperation

import typer

from qtool import memory
from qtool.errors import GateError, QtoolError, SpecError, UsageError

# The option that an argument is on the command line, where it is not --its-name.
_OPTIONS = {"saturate": "--no-saturate", "symmetric": "--asymmetric"}
_ARGUMENTS = {
    "axis", "block_size", "dtype", "global_scale", "method", "mx_rule", "narrow_range", "nonfinite",
    "precision", "scale", "scale_dtype", "semantics", "source_dtype", "tile", "zero_point",
}  # fmt: skip


_LINES = 20  # of failures
# What is put into a message before it is shown: where the options that it names are from.
_annotated: ContextVar[Callable[[str], str]] = ContextVar("_annotated", default=str)


@contextmanager
def speaking(annotated: Callable[[str], str]) -> Iterator[None]:
    """Let messages go through a function meanwhile."""
    token = _annotated.set(annotated)
    try:
        yield
    finally:
        _annotated.reset(token)


@contextmanager
def exit_code() -> Iterator[None]:
    """Turn what a job raises into one line on standard error and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has seen enough; the interpreter must not fail on flushing the rest
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except (QtoolError, MemoryError, OSError) as error:
        lines, code = explained(error)
        for line in lines:
            say(line)
        raise typer.Exit(code) from error


def explained(error: QtoolError | MemoryError | OSError) -> tuple[list[str], int]:
    """What an error says, each line of it, and the exit code that it asks for."""
    if isinstance(error, QtoolError):
        code = 3 if isinstance(error, GateError) else 2 if isinstance(error, UsageError) else 1
        others = list(error.others) if isinstance(error, GateError) else []
        if (more := len(others) - _LINES + 1) > 0:
            rest = f"and {more} more failures, which a report lists (--report FILE)"
            others[_LINES - 1 :] = [rest]
        return [_annotated.get()(line) for line in (_message(error), *others)], code
    if isinstance(error, UnsupportedOperation):  # see process()
        return ["standard output: is closed; redirect it to a file"], 1
    if not isinstance(error, OSError) or memory.caused(error):
        return [memory.MESSAGE], 1
    if error.errno == errno.ENOSPC and error.filename is None:  # files are OutputErrors
        return ["standard output: cannot be written: No space left on device; free some space"], 1
    where = f"{error.filename}: " if error.filename is not None else ""
    return [f"{where}{error.strerror or error}"], 1


@contextmanager
def process() -> Iterator[None]:
    """What holds for the whole process: its signals, its streams and its help.

    SIGTERM and SIGHUP unwind the stack, so that temporary files are removed, and exit with 143
    and 129; nohup stays in force.
    """

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    # Of what the parent closed no file of ours gets the number; a result for it is an error.
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    codecs.register_error("qtool", _escaped)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):  # names that the locale cannot write
            output.reconfigure(errors="qtool")
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the reader of --help is gone
            sys.exit(0)
        raise


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What is written for characters that a stream lacks: their numbers, ~ for a cut in a name."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].replace("…", "~")
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


def _message(error: QtoolError) -> str:
    """The error, with an argument called by its option: scale_dtype by --scale-dtype."""
    thing = error.thing
    if isinstance(error, SpecError) and thing in _ARGUMENTS | set(_OPTIONS):
        thing = _OPTIONS.get(thing, "--" + thing.replace("_", "-"))
    return str(QtoolError(thing, error.rule, error.remedy))


def say(message: str) -> None:
    """An error as one line on standard error."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    typer.secho(f"qtool: {line}", err=True, fg=typer.colors.RED, color=_wants_color())


def _wants_color() -> bool | None:
    """Whether the environment asks for colours, as rich reads it; None: as the stream can."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None

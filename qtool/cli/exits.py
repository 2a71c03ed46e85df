"""How a command ends: 0 done, 1 cannot be done, 2 wrong usage, 130 interrupted, 143 terminated."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from qtool.errors import QtoolError, UsageError


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
        _fail("interrupted", 130)
    except QtoolError as error:
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except MemoryError:
        _fail("out of memory: use a machine with more, or smaller tensors", 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror or error}", 1)


@contextmanager
def process() -> Iterator[None]:
    """What holds for the whole process: its signals, its streams and its help.

    SIGTERM unwinds the stack, so that temporary files are removed, and exits with 143.
    """

    def leave(_signal: int, _frame: object) -> None:
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent: no file of ours gets its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the reader of --help is gone
            sys.exit(0)
        raise


def _fail(message: str, code: int) -> None:
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    typer.secho(f"qtool: {line}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)

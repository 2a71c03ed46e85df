"""The program: python -m qtool, and the console script."""

from __future__ import annotations

import gc
import os
import signal
import sys

from qtool import memory


def main() -> None:
    """Run the command line. What fails before a command has begun, or after it, ends here."""
    gc.set_threshold(100_000)  # importing makes many objects and no garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start threads for nothing
    interrupted = False

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        memory.check(memory.NUMPY)  # it would end the process in words of its own
        from qtool.cli import main as run

        run()
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, KeyboardInterrupt) or (
            isinstance(error, ImportError) and interrupted  # what that made of it
        ):
            print("qtool: interrupted", file=sys.stderr)
            sys.exit(130)
        if memory.caused(error):
            print(f"qtool: {memory.MESSAGE}", file=sys.stderr)
            sys.exit(1)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or "is closed"  # --help, into a full disk or nowhere
        print(f"qtool: standard output: {reason}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered cannot be written either
        sys.exit(1)
    finally:
        gc.freeze()  # leaving takes a fifth of a short command's time without it


if __name__ == "__main__":
    if not sys.flags.safe_path:  # what lies in the current folder is not to be imported
        del sys.path[0]
    main()

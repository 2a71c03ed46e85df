"""The program: python -m qtool, and the console script."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from types import FrameType

from qtool import memory

_IMPORTS = "<frozen importlib._bootstrap>"
_LATER = 0.002  # seconds


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; in an import, which may print or swallow it, after that."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            again = threading.Timer(_LATER, os.kill, [os.getpid(), signal.SIGINT])
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. What fails before a command has begun, or after it, ends here."""
    gc.set_threshold(100_000)  # importing makes many objects and no garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start threads for nothing
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        memory.check(memory.NUMPY)  # it would end the process in words of its own
        from qtool.cli import main as run

        run()
    except KeyboardInterrupt:
        print("qtool: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
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

"""Runs a command of qtool in a process of its own, and says what it took.

    python load.py COUNTED COMMAND...

COUNTED: 1 to count calls of Python functions, which takes time of its own. Standard output: JSON
with "code", "peak", the largest resident memory in bytes, "seconds" of processors, and "calls".
The command's own output is discarded; it is the last line of standard error where it failed.
"""

from __future__ import annotations

import cProfile
import contextlib
import json
import os
import resource
import sys
from typing import Any

from qtool.__main__ import main


def run() -> dict[str, Any]:
    counted, sys.argv = sys.argv[1] == "1", ["qtool", *sys.argv[2:]]
    profile, code = cProfile.Profile(), 0
    try:
        if counted:
            with contextlib.suppress(AttributeError):
                pass
            profile.enable()
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    profile.disable()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "code": code,
        "peak": used.ru_maxrss * 1024,
        "seconds": used.ru_utime + used.ru_stime,
        "calls": sum(entry.callcount for entry in profile.getstats()),
    }


if __name__ == "__main__":
    kept = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    found = run()
    sys.stdout.flush()
    os.write(kept, json.dumps(found).encode())

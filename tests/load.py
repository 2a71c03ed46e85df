"""Runs a command of qtool in a process of its own, and says what it took.

    python load.py COUNTED ARGUMENTS...

COUNTED: 1 to count the calls of functions, which takes time of its own. The command's standard
output is discarded; ours: JSON with "code", "peak", the largest resident memory in bytes, "seconds"
of processors, and "calls".
"""

from __future__ import annotations

import cProfile
import json
import os
import resource
import sys
from pathlib import Path

from qtool.__main__ import main


def peak() -> int:
    """Largest resident memory of this process, in bytes; ru_maxrss has that of who started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").split()
    return int(status[status.index("VmHWM:") + 1]) << 10


def run() -> None:
    kept = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    counted, sys.argv = sys.argv[1] == "1", ["qtool", *sys.argv[2:]]
    profile, code = cProfile.Profile(), 0
    try:
        profile.runcall(main) if counted else main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "code": code,
        "peak": peak(),
        "seconds": used.ru_utime + used.ru_stime,
        "calls": sum(entry.callcount for entry in profile.getstats()),
    }
    os.write(kept, json.dumps(found).encode())


if __name__ == "__main__":
    run()

"""A command without a network and without root's rights.

    python confined.py COMMAND...

A process of it that makes a socket, unless for others on the same machine, is killed by SIGSYS,
whether Python or a library in C asks for it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct
import sys
from pathlib import Path

BAD_CALL = -signal.SIGSYS
CALL = {"x86_64": 41, "aarch64": 198}[platform.machine()]  # socket(2)
# linux/filter.h, linux/seccomp.h
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, FIRST = 0, 16  # where a call's number and its first argument are
KILL, ALLOW = 0x80000000, 0x7FFF0000
FILTER = (
    (LOAD, 0, 0, NUMBER),
    (EQUAL, 0, 3, CALL),
    (LOAD, 0, 0, FIRST),
    (EQUAL, 1, 0, socket.AF_UNIX),
    (RETURN, 0, 0, KILL),
    (RETURN, 0, 0, ALLOW),
)
NO_NEW_PRIVILEGES, SECCOMP, BY_FILTER = 38, 22, 2  # of prctl(2)
CAPABILITIES = 0x20080522  # version 3 of capset(2)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine() -> None:
    """Take both from this process and those that it starts."""
    system = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in FILTER))
    program = Program(len(FILTER), ctypes.addressof(code))
    for done in (
        system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        system.prctl(SECCOMP, BY_FILTER, ctypes.byref(program), 0, 0),
        system.capset(struct.pack("Ii", CAPABILITIES, 0), bytes(24)),
    ):
        if done:
            raise OSError(ctypes.get_errno(), "cannot be confined")


def confined(*command: str | Path) -> list[str]:
    """The command line that runs another one so."""
    return [sys.executable, "-I", __file__, *map(str, command)]


if __name__ == "__main__":
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])

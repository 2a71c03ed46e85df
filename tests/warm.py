"""A process that runs qtool's commands in forks of itself, where faults.py lets things go wrong.

    python warm.py

Standard input: a JSON list of commands per line; standard output: a list of how they ended.

Every call by which Python code touches a file below the folder ROOT is a point. Files are opened by
_pyio, the standard library's own io in Python, so that their reads and writes are such calls too.
"""

from __future__ import annotations

import _pyio
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.main

import qtool.cli

CHANGING = (
    "open", "create", "write", "pwrite", "sendfile", "ftruncate", "fchmod", "fchown", "chmod",
    "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "link", "symlink",
)  # fmt: skip
READING = ("read", "pread", "preadv", "sendfile")
CAPABILITIES = 0x20080522  # version 3 of capset(2)
LOOKING = ("stat", "fstat", "listdir", "scandir", "close")
# So that forks need not import them.
MODULES = (
    "llvmlite.binding", "onnx", "onnxruntime", "qtool.cli", "qtool.jobs.calibrate",
    "qtool.jobs.capture",
    "qtool.jobs.dequantize", "qtool.jobs.dequantize_folder", "qtool.jobs.dynamic",
    "qtool.jobs.finish", "qtool.jobs.quantize_folder", "qtool.jobs.quantize_single",
    "qtool.formats.npy", "qtool.formats.npz", "qtool.formats.safetensors",
    "qtool.formats.onnx.writer", "qtool.layouts.onnx_qdq", "qtool.layouts.onnx_dequantize",
    "qtool.layouts.onnx_dynamic", "qtool.render", "typer.rich_utils",
)  # fmt: skip


class Faults:
    """Wraps the calls of this process.

    asked: "root"; "at": the number of the point, counted from 0 among "calls" (or, with "lines",
    the lines of those files) where it gets "signal" before the call, or the call fails with
    "errno"; "lasting": so do all later ones; "change": another program changes a file, see
    change(); "pause": it waits there until a byte comes from gates[0], after it has sent one to
    gates[1].
    log: a descriptor that gets the calls, as JSON lines.
    """

    def __init__(self, asked: dict[str, Any], log: int, gates: tuple[int, int]) -> None:
        self.asked = asked
        self.log = log
        self.gates = gates
        self.root = asked.get("root", "/")
        self.at = asked.get("at")
        self.lines = tuple(asked.get("lines", ()))
        self.calls = () if self.lines else tuple(asked.get("calls") or (*CHANGING, *READING))
        self.count = 0
        self.lock = threading.RLock()
        self.real_flock = fcntl.flock
        self.real = {
            name: getattr(os, name) for name in {*CHANGING, *READING, *LOOKING} - {"create"}
        }

    def install(self) -> None:
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        for name in self.real.keys() & {*self.calls, *CHANGING}:
            setattr(os, name, self.wrapped(name))
        fcntl.flock = self.flock  # type: ignore[assignment]
        if self.lines:
            sys.settrace(self.trace)

    def flock(self, descriptor: int, operation: int) -> None:
        """The same, but others are told when this process waits."""
        try:
            self.real_flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            self.real["write"](self.gates[1], b"x")
            self.real_flock(descriptor, operation)

    def wrapped(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            paths = self.paths(name, args, kwargs)
            if any(path is not None and path.startswith(self.root) for path in paths):
                makes = name == "open" and bool(args[1] & os.O_CREAT)
                is_short = self.point(name, paths, makes=makes)
                if is_short:  # a part is written before the disk is full
                    args = (args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            return real(*args, **kwargs)

        return call

    def paths(self, name: str, args: Any, kwargs: Any) -> list[str | None]:
        """The paths that a call is about."""
        count = 2 if name in ("rename", "replace", "link", "symlink", "sendfile") else 1
        folder = kwargs.get("dir_fd")
        return [self.path(each, folder) for each in args[:count]]

    def path(self, what: Any, folder: int | None) -> str | None:
        if isinstance(what, int):
            try:
                return os.readlink(f"/proc/self/fd/{what}").removesuffix(" (deleted)")
            except OSError:
                return None
        base = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        return os.path.join(base, os.fsdecode(what))

    def point(self, name: str, paths: list[str | None], *, makes: bool) -> bool:
        """What happens at a point; whether just a part of the call is done."""
        with self.lock:
            name = "create" if makes else name
            self.say({"call": name, "paths": paths})
            if name not in self.calls:
                return False
            number, self.count = self.count, self.count + 1
            if self.at is None or number < self.at:
                return False
            if number > self.at and not self.asked.get("lasting"):
                return False
            self.strike(name)
            return bool(self.asked.get("short"))

    def strike(self, name: str) -> None:
        self.say({"hit": name})
        if self.asked.get("pause"):
            self.real["write"](self.gates[1], b"x")
            self.real["read"](self.gates[0], 1)
        elif "signal" in self.asked:
            os.kill(os.getpid(), self.asked["signal"])
            time.sleep(0)  # here the handler of a signal runs, if this is the main thread
        elif "change" in self.asked:
            self.change(*self.asked["change"])
        elif "errno" in self.asked:
            code = self.asked["errno"]
            raise OSError(code, os.strerror(code))

    def change(self, how: str, name: str) -> None:
        """What another program does with a file."""
        path = os.path.join(self.root, name)
        if how == "made":
            return self.make(path)
        size = os.stat(path).st_size
        if how == "cut":
            return os.truncate(path, size // 2)
        descriptor = self.real["open"](path, os.O_RDWR)
        data = bytearray(self.real["pread"](descriptor, size, 0))
        for place in (size // 4, size * 3 // 4):  # in different tensors
            data[place] ^= 0x10
        if how == "replaced":
            os.close(descriptor)
            descriptor = self.real["open"](f"{path}.new", os.O_RDWR | os.O_CREAT)
            self.real["rename"](f"{path}.new", path)
        self.real["pwrite"](descriptor, data, 0)
        return os.close(descriptor)

    def make(self, path: str) -> None:
        """A file where there is none, or, of a name without suffix, a folder with a file."""
        with contextlib.suppress(FileExistsError):
            if not os.path.splitext(path)[1]:
                self.real["mkdir"](path)
                path = os.path.join(path, "theirs")
            os.close(self.real["open"](path, os.O_CREAT | os.O_EXCL))

    def say(self, what: dict[str, Any]) -> None:
        self.real["write"](self.log, json.dumps(what).encode() + b"\n")

    def trace(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(self.lines):
            return None
        if event == "line":
            number, self.count = self.count, self.count + 1
            if number == self.at:
                sys.settrace(None)
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.strike(place)
        return self.trace


def limited(asked: dict[str, Any]) -> None:
    """Take from this process what it is not to have."""
    os.chdir(asked.get("root", "/"))
    for name, value in asked.get("limits", {}).items():
        if name == "RLIMIT_AS":  # more than is in use
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            value += pages * resource.getpagesize()
        number = getattr(resource, name)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))
    for number in asked.get("closed", ()):
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    if asked.get("ordinary"):  # also where the tests run as root, modes of files hold
        header, no_capabilities = struct.pack("Ii", CAPABILITIES, 0), bytes(24)
        assert ctypes.CDLL(None).capset(header, no_capabilities) == 0


def child(asked: dict[str, Any], log: int, gates: tuple[int, int]) -> int:
    """Run the command as qtool's main program does; its exit code, 70 after a traceback."""
    from qtool.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "umask" in asked:
        os.umask(asked["umask"])
    sys.argv = ["qtool", *asked["args"]]
    code = 0
    try:
        faults = Faults(asked, log, gates)
        limited(asked)
        if not asked.get("plain"):
            faults.install()
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.settrace(None)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]  # coverage.py writes what it has seen
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120
    return code


class Running:
    """A command that has been started in a fork."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.made = {name: os.memfd_create(name) for name in ("out", "err", "log")}
        come, go = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            stdin = os.memfd_create("stdin")
            os.write(stdin, asked.get("stdin", "").encode("latin-1"))
            os.lseek(stdin, 0, os.SEEK_SET)
            for number, descriptor in enumerate((stdin, self.made["out"], self.made["err"])):
                os.dup2(descriptor, number)
            code = 71
            try:
                code = child(asked, self.made["log"], (go[0], come[1]))
            finally:
                os._exit(code)
        os.close(come[1])
        os.close(go[0])
        self.come, self.go = come[0], go[1]

    def wait(self) -> None:
        """Until it pauses, waits for a lock, or has ended."""
        os.read(self.come, 1)

    def let_go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.go, b"x")
        self.wait()

    def end(self) -> dict[str, Any]:
        """How it ends: "code" (minus a signal), "out", "err", "calls" and "hit"."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.come)
        os.close(self.go)
        said = {}
        for name, descriptor in self.made.items():
            said[name] = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.close(descriptor)
        lines = [json.loads(line) for line in said["log"].splitlines()]
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": said["out"].decode("latin-1"),
            "err": said["err"].decode(errors="replace"),
            "calls": [line for line in lines if "call" in line],
            "hit": next((line["hit"] for line in lines if "hit" in line), None),
        }


def serve() -> None:
    """Run the commands of every line: the first until it pauses, then the second, and so on; then
    let them end in this order."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for module in MODULES:
        importlib.import_module(module)
    built = typer.main.get_command(qtool.cli.app)
    typer.main.get_command = lambda _: built  # half of the time of a command
    for line in sys.stdin:
        running = []
        for asked in json.loads(line):
            running.append(Running(asked))
            running[-1].wait()
        for each in running:
            each.let_go()
        print(json.dumps([each.end() for each in running]), flush=True)


if __name__ == "__main__":
    serve()

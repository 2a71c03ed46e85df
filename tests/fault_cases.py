"""The commands that write files, each on small sources, for tests in which something goes wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import checkpoints
import numpy as np
import onnx
import onnx_models
from faults import Files, Warm, files
from onnx import helper
from safetensors.numpy import load_file, save_file

RNG = np.random.default_rng(7)
WEIGHTS = {"v": RNG.normal(size=(64, 64)).astype(np.float32), "w": np.eye(64, dtype=np.float32)}


@dataclass(frozen=True)
class Case:
    """A command line, in a folder of its own.

    sources: makes what it reads. args: the command, but for -o and --jobs. dst: what it makes.
    old: other words that make another dst first; none: there is any file first. beside: other files
    that it writes, of which some say how long it took.
    """

    name: str
    sources: Callable[[Path], None]
    args: tuple[str, ...]
    dst: str
    old: tuple[str, ...]
    beside: tuple[str, ...] = ()

    @property
    def command(self) -> list[str | Path]:
        jobs = [] if self.args[0] == "report" else ["--jobs", "1"]
        return [*self.args, "-o", self.dst, *jobs, "--force", "-q"]

    @property
    def unforced(self) -> list[str | Path]:
        """The command line that replaces nothing."""
        return [word for word in self.command if word != "--force"]

    @property
    def earlier(self) -> list[str | Path]:
        """The command line that makes another dst."""
        return [*self.command, *self.old]

    @property
    def is_folder(self) -> bool:
        return "." not in self.dst

    def parts(self, found: Files) -> Files:
        """Those of the files that belong to dst: it, what is in it, or its data."""
        stem = self.dst.removesuffix(".onnx")
        return {
            name: content
            for name, content in found.items()
            if name == self.dst
            or name.startswith(f"{self.dst}/")
            or (self.dst.endswith(".onnx") and name.startswith(stem) and name.endswith(".data"))
        }


def numpy_array(folder: Path) -> None:
    np.save(folder / "x.npy", WEIGHTS["v"])


def numpy_archive(folder: Path) -> None:
    np.savez(folder / "x.npz", **WEIGHTS)


def safetensors(folder: Path) -> None:
    save_file(WEIGHTS, folder / "x.safetensors")


def model(folder: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    tensors = [onnx_models.initializer(name, values) for name, values in WEIGHTS.items()]
    made = onnx_models.model(nodes, tensors, inputs={"x": (None, 64)})
    onnx_models.save(made, folder / "x.onnx")


def model_with_data(folder: Path) -> None:
    model(folder)
    made = onnx.load_model(folder / "x.onnx")
    onnx.save_model(
        made, folder / "x.onnx", save_as_external_data=True, location="x.bin", size_threshold=0
    )


def samples(folder: Path) -> None:
    model(folder)
    np.save(folder / "samples.npy", WEIGHTS["v"][:8])


def checkpoint(folder: Path) -> None:
    shards = [checkpoints.tensors([0]), checkpoints.tensors([1])]
    checkpoints.save(folder / "m", shards, others=False)
    (folder / "m" / "LICENSE").write_text("free")


def reported(folder: Path) -> None:
    quantized(safetensors, "x.safetensors", *INT8, "-o", "q.safetensors", report="r.json")(folder)


def quantized(
    sources: Callable[[Path], None], *args: str, report: str | None = None
) -> Callable[[Path], None]:
    """Sources that qtool quantized, and their report."""

    def made(folder: Path) -> None:
        from command import ok

        with changed_to(folder):
            sources(folder)
            ok("quantize", *args, "--report", report or "none.json", "-q")
            Path("none.json").unlink(missing_ok=True)

    return made


@contextmanager
def changed_to(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


INT8 = ("--dtype", "int8")
AXIS = ("--axis", "0", *INT8)
DATA = ("--external-data",)
FOUR = ("--dtype", "int4", "--block-size", "32")
CASES = {
    case.name: case
    for case in (
        Case("quantize npy", numpy_array, ("quantize", "x.npy", *INT8), "y.npy",
             ("--dtype", "uint8"), ("y.report.json",)),
        Case("quantize npz", numpy_archive, ("quantize", "x.npz", *INT8, "--save-recipe", "r.toml"),
             "y.npz", ("--dtype", "uint8"), ("y.report.json", "r.toml")),
        Case("quantize safetensors", safetensors, ("quantize", "x.safetensors", *INT8),
             "y.safetensors", ("--dtype", "uint8"), ("y.report.json",)),
        Case("quantize onnx", model, ("quantize", "x.onnx", *INT8), "y.onnx",
             ("--dtype", "uint8"), ("y.report.json",)),
        Case("quantize onnx data", model_with_data, ("quantize", "x.onnx", *INT8, *DATA), "y.onnx",
             ("--dtype", "uint8"), ("y.report.json",)),
        Case("quantize folder", checkpoint, ("quantize", "m", *FOUR), "q",
             ("--dtype", "int8"), ("q.report.json",)),
        Case("dynamic npz", numpy_archive, ("dynamic", "x.npz"), "y.npz",
             ("--dtype", "int8"), ("y.report.json",)),
        Case("dynamic onnx", model, ("dynamic", "x.onnx", "--graph"), "y.onnx",
             ("--per-tensor",), ("y.report.json",)),
        Case("dequantize npz", quantized(numpy_archive, "x.npz", *INT8, "-o", "q.npz"),
             ("dequantize", "q.npz"), "y.npz", ("--dtype", "float16")),
        Case("dequantize safetensors",
             quantized(safetensors, "x.safetensors", *INT8, "-o", "q.safetensors"),
             ("dequantize", "q.safetensors"), "y.safetensors", ("--dtype", "float16")),
        Case("dequantize onnx data",
             quantized(model, "x.onnx", *INT8, *DATA, "-o", "q.onnx"),
             ("dequantize", "q.onnx", *DATA), "y.onnx", ("--dtype", "float16")),
        Case("dequantize folder", quantized(checkpoint, "m", *FOUR, "-o", "q4"),
             ("dequantize", "q4"), "q", ("--dtype", "float16")),
        Case("calibrate", numpy_archive, ("calibrate", "x.npz", *AXIS), "s.safetensors",
             ("--dtype", "uint8")),
        Case("capture", samples, ("capture", "x.onnx", "samples.npy"), "a.safetensors",
             ("--mean-square",)),
        Case("report md", reported, ("report", "r.json"), "y.md", ()),
        Case("report csv", reported, ("report", "r.json"), "y.csv", ()),
        Case("capture sums", samples, ("capture", "x.onnx", "samples.npy", "--hessian"),
             "a.safetensors", ("--exclude", "v")),
    )
}  # fmt: skip


class Stage:
    """A folder with the sources of a case, and what it makes of them undisturbed.

    sources, old, new: the folder's files before, with an older dst, and after the command.
    """

    def __init__(self, case: Case, warm: Warm) -> None:
        self.case = case
        self.warm = warm
        shared = "/dev/shm"  # in memory, where flushing takes no time
        self.root = Path(mkdtemp(dir=shared if os.access(shared, os.W_OK) else None))
        case.sources(self.root)
        self.sources = files(self.root)
        if case.old:
            self.old = self.made(case.earlier)
        else:
            (self.root / case.dst).write_bytes(b"older")
            self.old = files(self.root)
        self.new = self.made(case.command)
        assert case.parts(self.old)
        assert case.parts(self.new)
        assert case.parts(self.old) != case.parts(self.new)

    def made(self, command: list[str | Path]) -> Files:
        done = self.warm.run(*command, root=self.root)
        assert (done.code, done.errors) == (0, ""), done
        return files(self.root)

    def reset(self, state: Files) -> None:
        """Let the folder hold these files and nothing else."""
        for name in files(self.root):
            if name not in state:
                (self.root / name).rmdir() if name.endswith("/") else (self.root / name).unlink()
        for name, content in state.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def stable(self, found: Files) -> Files:
        """Without the reports, which say how long it took."""
        return {name: content for name, content in found.items() if ".report.json" not in name}

    def check_whole(self, found: Files) -> None:
        """The sources are as they were, and what dst is has been made by one command."""
        assert {name: found.get(name) for name in self.sources} == self.sources
        dst = self.case.parts(found)
        # Data files land before their model and go after it.
        if self.case.dst.endswith(".onnx"):
            named = {
                content: own for own in (self.case.parts(self.old), self.case.parts(self.new))
                for name, content in own.items() if name == self.case.dst
            }  # fmt: skip
            if self.case.dst in dst:
                assert dst[self.case.dst] in named
                own = named[dst[self.case.dst]]
                assert {name: dst.get(name) for name in own} == own
            return
        assert dst in ({}, self.case.parts(self.old), self.case.parts(self.new))

    def remove(self) -> None:
        shutil.rmtree(self.root)


def verified(path: Path) -> None:
    """Other programs read the file, or the folder's."""
    if path.is_dir():
        assert all(load_file(each) for each in path.glob("*.safetensors"))
    elif path.suffix == ".safetensors":
        assert load_file(path)
    elif path.suffix == ".onnx":
        onnx.checker.check_model(str(path), full_check=True)
        onnx.load_model(path)
    elif path.suffix in (".npy", ".npz"):
        assert np.load(path) is not None

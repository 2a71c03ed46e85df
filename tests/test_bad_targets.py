"""Targets that must not or cannot be written, for every option that names a file to write."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from fault_cases import WEIGHTS, changed_to, model, numpy_array, safetensors
from faults import Warm, files

INT8 = ["--dtype", "int8"]
# The option's command, the suffix of its files, and a source that it must not replace.
OUTPUTS: dict[str, tuple[list[str], str, str]] = {
    "quantize npy": (["quantize", "x.npy", *INT8, "-o", "{}"], "npy", "x.npy"),
    "quantize": (["quantize", "x.safetensors", *INT8, "-o", "{}"], "safetensors", "x.safetensors"),
    "quantize onnx": (["quantize", "x.onnx", *INT8, "-o", "{}"], "onnx", "x.onnx"),
    "quantize data": (
        ["quantize", "x.onnx", *INT8, "--external-data", "-o", "{}"], "onnx", "x.onnx"
    ),
    "quantize --scale": (
        ["quantize", "x.npy", *INT8, "--scale", "scale.npy", "-o", "{}"], "npy", "scale.npy"
    ),
    "quantize --report": (
        ["quantize", "x.npy", *INT8, "-o", "y.npy", "--report", "{}"], "json", "x.npy"
    ),
    "quantize --save-recipe": (
        ["quantize", "x.npy", *INT8, "-o", "y.npy", "--save-recipe", "{}"], "toml", "x.npy"
    ),
    "dynamic": (["dynamic", "x.npy", "-o", "{}"], "npy", "x.npy"),
    "dynamic --graph": (["dynamic", "x.onnx", "--graph", "-o", "{}"], "onnx", "x.onnx"),
    "dynamic --report": (["dynamic", "x.npy", "-o", "y.npy", "--report", "{}"], "json", "x.npy"),
    "dequantize": (["dequantize", "q.safetensors", "-o", "{}"], "safetensors", "q.safetensors"),
    "dequantize onnx": (["dequantize", "q.onnx", "-o", "{}"], "onnx", "q.onnx"),
    "calibrate": (
        ["calibrate", "x.safetensors", *INT8, "-o", "{}"], "safetensors", "x.safetensors"
    ),
    "capture": (["capture", "x.onnx", "samples.npy", "-o", "{}"], "safetensors", "samples.npy"),
    "verify --report": (
        ["verify", "x.safetensors", "q.safetensors", "--report", "{}"], "json", "x.safetensors"
    ),
    "report md": (["report", "q.report.json", "-o", "{}"], "md", "q.report.json"),
    "compare --csv": (
        ["compare", "x.safetensors", "--dtypes", "int8,int4", "--csv", "{}"], "csv", "x.safetensors"
    ),
}  # fmt: skip
FORCED = {"verify --report"}  # commands without --force


def folder(out: Path, _: Path) -> None:
    out.mkdir()


def device(out: Path, _: Path) -> None:
    out.symlink_to("/dev/full")


def pipe(out: Path, _: Path) -> None:
    os.mkfifo(out)


def plug(out: Path, _: Path) -> None:
    with changed_to(out.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(out.name)


def circle(out: Path, _: Path) -> None:
    out.symlink_to(out.name)


def nowhere(out: Path, _: Path) -> None:
    out.symlink_to("no/folder/y")


def symbolic(out: Path, source: Path) -> None:
    out.symlink_to(source.name)


def twice(out: Path, source: Path) -> None:
    (out.parent / "between").symlink_to(source)
    out.symlink_to("between")


def hard(out: Path, source: Path) -> None:
    out.hardlink_to(source)


KINDS: list[Callable[[Path, Path], None]] = [
    folder, device, pipe, plug, circle, nowhere, symbolic, twice, hard
]  # fmt: skip
# Names of the file, given the suffix and the source.
SPELLED: dict[str, Callable[[str, str], str]] = {
    "the source": lambda _, source: source,
    "dots": lambda _, source: f"./sub/../{source}",
    "slashes": lambda _, source: f".//{source}",
    "through a link": lambda _, source: f"link/{source}",
    "no folder": lambda suffix, _: f"no/y.{suffix}",
    "in a file": lambda suffix, source: f"{source}/y.{suffix}",
    "long": lambda suffix, _: "y" * 256 + f".{suffix}",
}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm()
    yield made
    made.close()


@pytest.fixture(scope="module")
def made(warm: Warm) -> Iterator[Path]:
    """A folder with the sources."""
    root = Path(mkdtemp())
    numpy_array(root)
    safetensors(root)
    model(root)
    np.save(root / "samples.npy", WEIGHTS["v"][:8])
    np.save(root / "scale.npy", np.float32(0.5))
    (root / "sub").mkdir()
    (root / "link").symlink_to(".")
    for suffix in ("safetensors", "onnx"):
        done = warm.run("quantize", f"x.{suffix}", *INT8, "-o", f"q.{suffix}", "-q", root=root)
        assert done.code == 0, done
    yield root
    rmtree(root)


def refused(warm: Warm, root: Path, name: str, out: str, **fault: Any) -> str:
    """What the command says of a file that it must not write."""
    args = [word.replace("{}", out) for word in OUTPUTS[name][0]]
    args += [] if name in FORCED else ["--force"]
    before = described(root)
    done = warm.run(*args, root=root, **fault)
    assert described(root) == before, done
    assert (done.code, done.out) == (1, ""), done
    assert done.errors.count("\n") == 1, done.errors
    assert done.errors.startswith("qtool: "), done.errors
    return done.errors


def described(root: Path) -> dict[str, Any]:
    """Every file, its content and what kind it is."""
    kinds = {
        str(path.relative_to(root)): (stat.S_IFMT(found.st_mode), found.st_ino, found.st_nlink)
        for path in root.rglob("*")
        for found in [path.lstat()]
    }
    return {"kinds": kinds, "files": files(root)}


# Others write into a folder.
PAIRS = [(name, kind) for kind in KINDS for name in OUTPUTS if kind is not folder]
PAIRS += [(name, folder) for name in ("quantize --save-recipe", "report md", "compare --csv")]


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda each: getattr(each, "__name__", each))
def test_what_is_no_file_of_its_own_is_refused(
    name: str, kind: Callable[[Path, Path], None], warm: Warm, made: Path
) -> None:
    _, suffix, source = OUTPUTS[name]
    out = made / f"y.{suffix}"
    before = set(made.iterdir())
    kind(out, made / source)
    try:
        refused(warm, made, name, out.name)
    finally:
        for path in set(made.iterdir()) - before:
            rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("spelled", SPELLED)
def test_the_source_and_what_cannot_be_there_is_refused_however_it_is_spelled(
    name: str, spelled: str, warm: Warm, made: Path
) -> None:
    _, suffix, source = OUTPUTS[name]
    out = SPELLED[spelled](suffix, source)
    if out.endswith(source) and name == "report md":
        out = f"./sub/../link/{source}.md"  # a report of another suffix is wrong usage
        (made / f"{source}.md").hardlink_to(made / source)
    refused(warm, made, name, out)
    (made / f"{source}.md").unlink(missing_ok=True)


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_folder_that_may_not_be_written_is_refused(name: str, warm: Warm, made: Path) -> None:
    (made / "sub").chmod(0o555)
    try:
        message = refused(warm, made, name, f"sub/y.{OUTPUTS[name][1]}", ordinary=True)
    finally:
        (made / "sub").chmod(0o755)
    assert "cannot be written; choose a folder that you may write to" in message

"""A configuration in TOML, for every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import typer.main

from fuzz.mutate import of_bytes
from qtool.cli import app, config
from qtool.cli.layers import _keys
from qtool.jobs.recipes import layered

JUSTIFIED = 200
_GROUP: Any = typer.main.get_command(app)
_COMMANDS = {n: _keys(c) for n, c in _GROUP.commands.items() if n != "recipe"}
_LINES = (
    "quiet = true", "jobs = 2", "[quantize]", 'dtype = "int4"', "block-size = 32",
    'include = ["a"]',
    "[verify]", 'fail-if = ["mse > 1"]', "[inspect]", "stats = true", "scale = 0.5",
    "no-saturate = true",
    'hessian = ["w=h.npy"]', 'rule = ["a: skip"]', "symmetric = false", "[tool.qtool]", "[compare]",
    "act_order = false", "damping = 1", 'importance = ["activations:x=y.npy"]',
)  # fmt: skip
_WORDS = (
    *(f"\n{line}\n".encode() for line in _LINES),
    b"true", b'"\\u0000"', b"99999999999999999999", b"[", b"]", b"=", b'"', b".", b"inf",
    b"{a = 1}", b"\xef\xbb\xbf",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    yield "\n".join(_LINES[:15]).encode()
    yield "\n".join(("[tool.qtool]", *_LINES[:2], "[tool.qtool.quantize]", *_LINES[3:6])).encode()
    yield "\n".join((*_LINES[2:4], _LINES[10], *_LINES[17:])).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng, _WORDS)


def run(data: bytes, folder: Path) -> None:
    path = folder / ("pyproject.toml" if b"tool" in data else "qtool.toml")
    path.write_bytes(data)
    said = config.loaded(str(path))
    assert said is not None
    for name in _COMMANDS:
        layered(said.layers(name, _COMMANDS))

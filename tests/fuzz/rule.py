"""A rule of the command line, and its pattern."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.mutate import of_bytes
from fuzz.recipe import applied
from qtool.recipe import Recipe, Rule, unmatched

JUSTIFIED = 400
_WORDS = (
    b": ", b"dtype=", b"block_size=32", b"skip", b", ", b"re:", b"*", b"[!", b"tile=8x16", b"(?",
    b"{2}",
    b"method=percentile:", b"axis=-1", b"none", b"preset=", b"mxfp4", b"scale_dtype=float8e8m0",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    yield b"*.w: dtype=int8, block_size=64"
    yield b"re:^model\\.(layers|x)\\.\\d+: preset=mxfp4"
    yield b"model.layers.[0-9].w: skip"
    yield b"conv: dtype=uint4, method=percentile:99.9, symmetric=false"
    yield b"a: b: tile=8x16, dtype=float8e4m3fn"


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng, _WORDS)


def run(data: bytes, folder: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    unmatched([text], ["model.layers.0.w"])
    rule = Rule.parse(text)
    rule.described()
    applied(Recipe({"dtype": "int8"}, [rule]))

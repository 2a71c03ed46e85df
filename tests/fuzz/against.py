"""The report beside a quantized file, which `verify` holds against it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from fuzz.files import safetensors_of
from fuzz.mutate import of_json
from qtool.errors import QtoolError
from qtool.jobs.quantize import quantize_file
from qtool.jobs.recipes import recipe_of
from qtool.jobs.verify import verify_file

JUSTIFIED = 1000
_TENSORS = {"w": ["F32", [16, 32]], "v": ["BF16", [8, 8]], "b": ["F32", [4]]}


@cache
def _made() -> dict[str, bytes]:
    """A file, the same quantized, and the report of that."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "o.safetensors").write_bytes(safetensors_of(_TENSORS))
        quantize_file(
            folder / "o.safetensors", folder / "q.safetensors", dtype="int4", block_size=16,
            nonfinite="allow", hash=True, jobs=1,
        )  # fmt: skip
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def seeds() -> Iterator[bytes]:
    yield _made()["q.report.json"]


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    for name, content in _made().items():
        (folder / name).write_bytes(content)
    path = folder / "q.report.json"
    path.write_bytes(data)
    with suppress(QtoolError):
        verify_file(folder / "o.safetensors", folder / "q.safetensors", jobs=1)
    recipe_of(path)

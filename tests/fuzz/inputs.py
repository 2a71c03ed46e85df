"""Files of --activations, --hessian and --importance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.files import document, safetensors_of
from fuzz.mutate import of_json
from qtool.errors import QtoolError
from qtool.jobs.quantize import quantize_file

JUSTIFIED = 200
_EYE = "".join("0000803f" if i == j else "00000000" for i in range(8) for j in range(8))


def seeds() -> Iterator[bytes]:
    yield said("activations", {"w": ["F32", [4, 8], "0000803f" * 32]})
    yield said("activations", {"w": ["F16", [2, 3, 8], "003c" * 48]})
    yield said("hessian", {"w": ["F32", [8, 8], _EYE]})
    yield said("hessian", {"w": ["F64", [8, 8], "000000000000f03f" * 64]})
    yield said("importance", {"w": ["F32", [4, 8], "0000803f" * 32]})
    yield said("importance", {"w": ["F32", [8], "0000803f" * 8]})
    yield said("importance", {"w": ["F32", [3, 8], "0000803f" * 24]}, "activations:")


def said(option: str, tensors: Any, before: str = "") -> bytes:
    return json.dumps({"option": option, "tensors": tensors, "before": before}).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    made = document(data)
    option, before = made.get("option"), made.get("before")
    if option not in ("activations", "hessian", "importance") or not isinstance(before, str):
        return
    path, source = folder / "i.safetensors", folder / "w.safetensors"
    path.write_bytes(safetensors_of(made.get("tensors")))
    source.write_bytes(safetensors_of({"w": ["F32", [4, 8], "0000803f" * 31]}))
    with suppress(QtoolError):
        quantize_file(
            source,
            folder / "b.safetensors",
            dtype="int4",
            block_size=4,
            jobs=1,
            nonfinite="allow",
            **{option: [f"{before}{path}"]},
        )  # type: ignore[arg-type]
    quantize_file(
        source,
        folder / "a.safetensors",
        dtype="int8",
        jobs=1,
        nonfinite="allow",
        **{option: [f"{before}w={path}"]},
    )  # type: ignore[arg-type]

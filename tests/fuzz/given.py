"""Scales and zero points out of files, for an array and for a file of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz.files import document, mapping, safetensors_of
from fuzz.mutate import of_json
from qtool.errors import QtoolError
from qtool.jobs.dequantize import dequantize_file
from qtool.jobs.quantize import quantize_file

JUSTIFIED = 200
_ONES = "0000803f" * 32
_ALLOWED = ("axis", "block_size", "tile", "dtype", "scale_dtype", "negative_scale", "semantics",
            "precision")  # fmt: skip


def seeds() -> Iterator[bytes]:
    zeros = {"w.zero_point": ["I8", [16], "00" * 16]}
    scales = {"w.scale": ["F32", [16], _ONES]}
    yield said({"dtype": "int8", "axis": 0}, scales)
    yield said({"dtype": "int8", "axis": 0}, scales | zeros)
    yield said({"dtype": "int4", "axis": 1, "block_size": 16}, {"w.scale": ["F32", [16, 2], _ONES]})
    yield said({"dtype": "int8"}, {"w.scale": ["F32", [], _ONES]}, {"w.zero_point": ["I8", []]})
    yield said({"dtype": "int8", "tile": [8, 16]}, {"w.scale": ["BF16", [2, 2], "803f" * 4]})


def said(options: Any, scales: Any, zero_points: Any = None) -> bytes:
    return json.dumps({"options": options, "scale": scales, "zero_point": zero_points}).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    made = document(data)
    options: dict[str, Any] = {
        k: v for k, v in mapping(made.get("options")).items() if k in _ALLOWED
    }
    kinds = {"axis": int, "block_size": int, "tile": list, "negative_scale": bool}
    if any(type(v) is not kinds.get(k, str) for k, v in options.items() if v is not None):
        return  # what the command line itself refuses
    if tile := options.get("tile"):
        if [type(n) for n in tile] != [int, int]:
            return
        options["tile"] = tuple(tile)
    for name in ("scale", "zero_point"):
        if made.get(name) is not None:
            path = folder / f"{name}.safetensors"
            path.write_bytes(safetensors_of(made[name]))
            options[name] = path
    source = folder / "w.safetensors"
    source.write_bytes(safetensors_of({"w": ["F32", [16, 32], "0000803f" * 512]}))
    np.save(folder / "w.npy", np.arange(512, dtype=np.int8).reshape(16, 32))
    bare = {
        k: v
        for k, v in options.items()
        if k in ("scale", "zero_point", "axis", "block_size", "tile")
    }
    with suppress(QtoolError):
        dequantize_file(folder / "w.npy", folder / "d.npy", jobs=1, **bare)
    quantize_file(source, folder / "q.safetensors", jobs=1, nonfinite="allow", **options)

"""What qtool's own metadata says of tensors, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from fuzz.files import document, inspected, safetensors_of
from fuzz.mutate import of_json
from qtool.errors import QtoolError
from qtool.jobs.dequantize import dequantize_file
from qtool.jobs.recipes import recipe_of
from qtool.jobs.verify import verify_file

JUSTIFIED = 200
_ROWS = {
    "int4": {"granularity": "blocked", "axis": 1, "block_size": 16, "zero_point": True},
    "uint8": {"granularity": "per_axis", "axis": 0, "block_size": None, "zero_point": True},
    "float4e2m1": {"granularity": "blocked", "axis": 1, "block_size": 16, "zero_point": False,
                   "global_scale": True},
    "int8": {"granularity": "tiled", "axis": None, "block_size": None, "tile": [8, 16],
             "zero_point": False},
    "int2": {"granularity": "per_tensor", "axis": None, "block_size": None, "zero_point": False},
}  # fmt: skip
_PARTS = {
    "int4": {"w": ["U8", [256]], "w.scale": ["F32", [16, 2]], "w.zero_point": ["U8", [16]]},
    "uint8": {"w": ["U8", [16, 32]], "w.scale": ["F16", [16]], "w.zero_point": ["U8", [16]]},
    "float4e2m1": {"w": ["U8", [256]], "w.scale": ["F8_E4M3", [16, 2]],
                   "w.global_scale": ["F32", []]},
    "int8": {"w": ["I8", [16, 32]], "w.scale": ["F32", [2, 2]]},
    "int2": {"w": ["U8", [128]], "w.scale": ["BF16", []]},
}  # fmt: skip
_SCALES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8e4m3fn"}


def seeds() -> Iterator[bytes]:
    for dtype, row in _ROWS.items():
        scale = _SCALES[str(_PARTS[dtype]["w.scale"][0])]
        row = {"dtype": dtype, "shape": [16, 32], **row}
        row |= {"scale_dtype": scale, "source_dtype": "float32"}
        said = {"version": 1, "tool": {"name": "qtool", "version": "0.1.0"}, "recipe": "",
                "tensors": {"w": row}, "stored": {}}  # fmt: skip
        for layout in ({}, {"layout": "compressed-tensors"}, {"layout": "mlx"}):
            document = {"said": said | layout, "tensors": _PARTS[dtype]}
            yield json.dumps(document).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    given = document(data)
    said = given.get("said")
    text = said if isinstance(said, str) else json.dumps(said)
    path, original = folder / "a.safetensors", folder / "o.safetensors"
    path.write_bytes(safetensors_of(given.get("tensors"), {"qtool": text}))
    original.write_bytes(safetensors_of({"w": ["F32", [16, 32]]}))
    with suppress(QtoolError):
        recipe_of(path)
    with suppress(QtoolError):
        inspected(path)
    with suppress(QtoolError):
        verify_file(original, path)
    dequantize_file(path, folder / "b.safetensors", jobs=1)

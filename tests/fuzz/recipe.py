"""A recipe in TOML, and what it makes of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from fuzz.mutate import of_bytes
from qtool.dtypes import DTYPES
from qtool.errors import QtoolError
from qtool.recipe import Recipe, effective, toml
from qtool.spec import TensorInfo

JUSTIFIED = 200
TENSORS = [
    TensorInfo("model.layers.0.w", (16, 32), DTYPES["float32"], 2048),
    TensorInfo("b", (4,), DTYPES["bfloat16"], 8),
    TensorInfo("conv", (2, 3, 4, 5), DTYPES["float16"], 240),
    TensorInfo("codes", (8, 8), DTYPES["int8"], 64),
]
_LINES = (
    'dtype = "int4"', "block_size = 32", 'preset = "nvfp4"', 'method = "percentile:99.9"',
    "axis = -1",
    'tile = "8x16"', "symmetric = false", 'scale_dtype = "float8e4m3fn"', "global_scale = true",
    'include = ["*.w"]', 'exclude = ["re:^b"]', "target_bits = 4.5",
    'candidates = ["int4", "int8"]',
    "scale = 0.5", "zero_point = 3", 'layout = "mlx"', "damping = 0.01", "act_order = false",
    '[[rules]]\npattern = "conv"\ndtype = "int8"', '[[rules]]\npattern = ["a", "b"]\nskip = true',
    'mx_rule = "even"', 'semantics = "onednn"', "negative_scale = true", "saturate = false",
    'precision = "float16"', 'nonfinite = "allow"', "narrow_range = true", "requantize = true",
)  # fmt: skip
_WORDS = (
    *(f"\n{line}\n".encode() for line in _LINES),
    b"inf", b"nan", b"1e400", b"0x7fffffffffffffffffff", b"[", b"]",
    b'"""', b"'''", b"=", b"1979-05-27",
    b"\\u0000", b"{", b"}", b".", b'"none"', b"[rules]", b"[[rules]]",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    for line in _LINES:
        yield f'dtype = "uint8"\n{line}\n'.encode() if "dtype" not in line else line.encode()
    yield "\n".join((_LINES[0], _LINES[1], *_LINES[9:11], *_LINES[18:20])).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng, _WORDS)


def run(data: bytes, folder: Path) -> None:
    said = toml.parsed(data, "a.toml")
    text = toml.written(said)
    assert toml.written(toml.parsed(text.encode(), "b.toml")) == text
    path = folder / "a.toml"
    path.write_bytes(data)
    with suppress(QtoolError):
        applied(effective(recipe=path))
    applied(said)


def applied(recipe: Recipe) -> None:
    """What a recipe makes of tensors."""
    recipe.check(typed_later=False)
    for info in TENSORS:
        recipe.demands(info)
        if recipe.reason_against(info) is None:
            recipe.spec_for(info).granularity.scale_shape(info.shape)

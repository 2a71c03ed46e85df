"""The header of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import safetensors as reference

from fuzz.files import inspected, read_whole, safetensors_of
from fuzz.mutate import of_bytes, of_json

JUSTIFIED = 200
_WORDS = (
    b'"data_offsets"', b'"shape"', b'"dtype"', b'"__metadata__"', b'"F4"', b'"BOOL"', b'"F8_E8M0"',
    b"18446744073709551615", b"-0", b"1e400", b"NaN", b"\\ud800", b"[[", b'{"a":', b"0.0", b"[0,0]",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    tensors = {
        "a": ["F32", [2, 3]], "b": ["BF16", [4]], "c": ["F4", [2, 2]], "d": ["F8_E8M0", []],
        "e": ["BOOL", [3]], "f": ["C64", [1]], "g": ["I64", [0, 5]],
    }  # fmt: skip
    yield safetensors_of(tensors, {"format": "pt"})
    yield safetensors_of({"w": ["U8", [8]], "w.scale": ["F32", []]}, {"qtool": "{}"})
    yield safetensors_of({})


def mutate(data: bytes, rng: Random) -> bytes:
    """The file damaged, or with another header of the right length."""
    end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3 or end > len(data):
        return of_bytes(data, rng, _WORDS)
    header = rng.choice((of_json, of_json, of_bytes))(data[8:end], rng)
    content = data[end:] if rng.random() < 0.7 else rng.randbytes(_end(header))
    return len(header).to_bytes(8, "little") + header + content


def _end(header: bytes) -> int:
    """Where the last tensor of a header ends, if that is not far."""
    try:
        ends = [said["data_offsets"][1] for said in json.loads(header).values()]
        return min(max(0, *map(int, ends)), 1 << 12)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return 0


def run(data: bytes, folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(data)
    found = read_whole(path)
    expected = {name: said["data"] for name, said in reference.deserialize(data)}
    assert found.keys() == expected.keys()
    inspected(path)

"""Arrays in a zip archive, and qtool's metadata among them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np

from fuzz import npy
from fuzz.files import inspected, read_whole
from fuzz.mutate import TEXTS, of_bytes, of_json
from qtool.errors import QtoolError

JUSTIFIED = 2200  # a byte of deflate can stand for 1032, which are read and then copied
_NOTE = (
    b'{"version":1,"tensors":{"w":{"dtype":"int4","shape":[3,4],"granularity":"per_axis","axis":0,'
    b'"block_size":null,"scale_dtype":"float32","source_dtype":"float32","zero_point":false}},'
    b'"stored":{"v":"bfloat16"}}'
)
_WORDS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"\xff\xff\xff\xff", b".npy")


def seeds() -> Iterator[bytes]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = {
        "w.npy": npy.file(np.arange(6, dtype=np.uint8)), "w.scale.npy": npy.file(values[:, 0]),
        "v.npy": npy.file(values.view("V2")), "__qtool__.npy": npy.file(np.frombuffer(_NOTE, "u1")),
    }  # fmt: skip
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield archive(parts, method)
        yield archive({"a.npy": npy.file(values), "b.npy": npy.file(values.T)}, method)
    yield archive({"a.npy": npy.file(np.zeros(1 << 14))}, zipfile.ZIP_DEFLATED)
    yield archive({}, zipfile.ZIP_STORED)


def archive(members: dict[str, bytes], method: int) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as written:
        for name, content in members.items():
            written.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, method)
    return stream.getvalue()


def mutate(data: bytes, rng: Random) -> bytes:
    """The archive damaged, or one of sound checksums with a member changed."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as read:
            members = {name: read.read(name) for name in read.namelist()}
    except Exception:
        return of_bytes(data, rng, _WORDS)
    if not members or rng.random() < 0.4:
        return of_bytes(data, rng, _WORDS)
    name = rng.choice(list(members))
    content = members.pop(name)
    if name == "__qtool__.npy" and rng.random() < 0.7:
        content = npy.file(np.frombuffer(of_json(_NOTE, rng), np.uint8))
    elif rng.random() < 0.8:
        content = npy.mutate(content, rng)
    else:
        name = rng.choice(TEXTS).replace("\ud800", "") + rng.choice(("", ".npy"))
    with suppress(ValueError):
        return archive({**members, name: content}, rng.choice((0, 8)))
    return data


def run(data: bytes, folder: Path) -> None:
    path = folder / "a.npz"
    path.write_bytes(data)
    with suppress(QtoolError):
        read_whole(path)
    inspected(path)

"""Where an ONNX model says that its values are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from onnx import TensorProto, helper
from onnx_models import model

from fuzz.files import document, inspected, mapping, read_whole
from fuzz.mutate import NUMBERS, of_json
from qtool.errors import QtoolError
from qtool.formats.onnx import OnnxSource

JUSTIFIED = 200


def seeds() -> Iterator[bytes]:
    said = {"location": "w.data", "offset": "0", "length": "256"}
    made = {"said": said, "dims": [8, 8], "type": 1, "bytes": 256, "links": {}}
    yield json.dumps(made).encode()
    yield json.dumps(made | {"said": said | {"offset": "64"}, "bytes": 512}).encode()
    for to in ("w.data", "../m.onnx", "/etc/hostname", "a.data", "/dev/zero"):
        linked = {"said": said | {"location": "a.data"}, "links": {"a.data": to}}
        yield json.dumps(made | linked).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    given = document(data)
    below = folder / "m"
    below.mkdir()
    for name, to in mapping(given.get("links")).items():
        with suppress(OSError, ValueError, TypeError):
            if os.path.normpath(below / name).startswith(f"{below}/"):
                os.symlink(to, below / name)
    size = given.get("bytes")
    if not os.path.lexists(below / "w.data") and type(size) is int and 0 <= size < 1 << 16:
        (below / "w.data").write_bytes(b"\1" * size)
    path = below / "m.onnx"
    path.write_bytes(_model(given))
    with suppress(QtoolError), closing(OnnxSource(path)) as source:
        for file in source.external_files:
            assert file.is_file()
            assert below.resolve() in file.resolve().parents
    read_whole(path)
    inspected(path)


def _model(given: dict[str, object]) -> bytes:
    tensor = TensorProto(name="w", data_location=TensorProto.EXTERNAL)
    kind, dims = given.get("type"), given.get("dims")
    tensor.data_type = kind if type(kind) is int and abs(kind) < 1 << 31 else 1
    sizes = dims if isinstance(dims, list) else NUMBERS[:2]
    tensor.dims.extend(n for n in sizes if type(n) is int and -(1 << 63) <= n < 1 << 63)
    for key, value in mapping(given.get("said")).items():
        text = value if isinstance(value, str) else json.dumps(value)
        tensor.external_data.add(
            key=key.encode("utf-8", "replace").decode(),
            value=text.encode("utf-8", "replace").decode(),
        )
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return bytes(model(nodes, [tensor], inputs={"x": (2, 8)}).SerializeToString())

"""Files that other tools have quantized, and the documents beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from foreign_files import FILES

from fuzz.files import document, inspected, listed, mapping, safetensors_of
from fuzz.mutate import of_json

JUSTIFIED = 200
_DOCUMENTS = ("config.json", "hf_quant_config.json")


def seeds() -> Iterator[bytes]:
    for made in FILES.values():
        with TemporaryDirectory() as folder:
            found = made()
            tensors = listed(found.save(Path(folder)).read_bytes())
        short = {name: [code, shape, data[:64]] for name, (code, shape, data) in tensors.items()}
        yield json.dumps({"tensors": short, "documents": found.documents}).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    given = document(data)
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_of(given.get("tensors")))
    for name, said in mapping(given.get("documents")).items():
        if name in _DOCUMENTS:
            text = said if isinstance(said, str) else json.dumps(said)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
    inspected(path)

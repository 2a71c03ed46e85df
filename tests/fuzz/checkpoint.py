"""A checkpoint folder: its index, its configuration, its shards, and links among them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from fuzz.files import document, inspected, mapping, safetensors_of
from fuzz.mutate import of_json
from qtool.errors import QtoolError
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, INDEX, SINGLE, CheckpointSource
from qtool.jobs.quantize import quantize_file

JUSTIFIED = 200
_SHARDS = {
    "model-00001-of-00002.safetensors": {"a.weight": ["F32", [8, 16]], "norm": ["F32", [16]]},
    "model-00002-of-00002.safetensors": {"b.weight": ["BF16", [4, 4]]},
}


def seeds() -> Iterator[bytes]:
    placed = {name: shard for shard, tensors in _SHARDS.items() for name in tensors}
    index = {"metadata": {"total_size": 1000}, "weight_map": placed}
    config = {"model_type": "llama", "torch_dtype": "float32", "tie_word_embeddings": True}
    yield document_of(_SHARDS, {INDEX: index, CONFIG: config})
    yield document_of({SINGLE: _SHARDS["model-00002-of-00002.safetensors"]}, {CONFIG: config})
    links = {
        "model-00002-of-00002.safetensors": "blob",
        "tokenizer.json": "../o",
        "x": "/etc/hostname",
    }
    yield document_of(_SHARDS, {INDEX: index, CONFIG: config, "sub/a.txt": ""}, links)


def document_of(shards: object, documents: object, links: object = None) -> bytes:
    return json.dumps({"shards": shards, "documents": documents, "links": links or {}}).encode()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_json(data, rng)


def run(data: bytes, folder: Path) -> None:
    given = document(data)
    source = folder / "m"
    source.mkdir()
    for name, tensors in mapping(given.get("shards")).items():
        _write(source, name, safetensors_of(tensors))
    for name, said in mapping(given.get("documents")).items():
        text = said if isinstance(said, str) else json.dumps(said)
        _write(source, name, text.encode("utf-8", "replace"))
    for name, to in mapping(given.get("links")).items():
        with suppress(OSError, ValueError, TypeError):
            os.symlink(to, _inside(source, name))
    with suppress(QtoolError), closing(CheckpointSource(source)) as opened:
        for path in (*others(source, opened.shards).carried, *opened.shards):
            assert source.resolve() in (source / path).resolve().parents
    with suppress(QtoolError):
        inspected(source)
    try:
        quantize_file(source, folder / "q", dtype="int8", jobs=1, fail_if=["sqnr_db < 999"])
    finally:
        assert {entry.name for entry in folder.iterdir()} <= {"m", "q", "q.report.json"}


def _write(source: Path, name: str, content: bytes) -> None:
    with suppress(OSError, ValueError):
        path = _inside(source, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _inside(source: Path, name: str) -> Path:
    """Where an input may have a file: in its folder. Raises ValueError for other places."""
    path = Path(os.path.normpath(source / name))
    path.relative_to(source)
    return path

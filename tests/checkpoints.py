"""Checkpoint folders as they are published, made small with the safetensors package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[Any]

CONFIG = {"architectures": ["TinyForCausalLM"], "model_type": "tiny", "hidden_size": 32}
INDEX = "model.safetensors.index.json"
OTHERS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "LICENSE": b"do as you please\n",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"a module of its own",
}


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def tensors(layers: Sequence[int], rows: int = 16, columns: int = 64) -> dict[str, Array]:
    """The tensors of some layers: a weight that is quantized and a vector that is not."""
    found: dict[str, Array] = {}
    for layer in layers:
        rng = np.random.default_rng(layer)
        weight = rng.normal(0, 0.02, (rows, columns)).astype(ml_dtypes.bfloat16)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = weight
        found[f"model.layers.{layer}.norm.weight"] = np.ones(columns, ml_dtypes.bfloat16)
    return found


def save(folder: Path, shards: Sequence[Mapping[str, Array]], *, others: bool = True) -> Path:
    """A folder with these shards and an index, or with model.safetensors where there is one."""
    folder.mkdir(parents=True)
    placed = {}
    for number, shard in enumerate(shards, 1):
        name = shard_name(number, len(shards)) if len(shards) > 1 else "model.safetensors"
        save_file(dict(shard), folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(x.nbytes for shard in shards for x in shard.values())
        metadata = {"total_size": total, "total_parameters": total // 2}
        document = {"metadata": metadata, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for path, content in OTHERS.items() if others else ():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def three(folder: Path) -> Path:
    """A folder of three shards."""
    return save(folder, [tensors([0, 1]), tensors([2]), tensors([3, 4])])


def index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())  # type: ignore[no-any-return]


def change_index(folder: Path, **weight_map: str | None) -> None:
    """Put tensors elsewhere in the weight map, or, with None, take them out."""
    document = index(folder)
    document["weight_map"] |= weight_map
    document["weight_map"] = {k: v for k, v in document["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(document))


def content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder and below."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def headers(path: Path) -> dict[str, int]:
    """The tensors of a .safetensors file and their bytes, as the safetensors package reads it."""
    return {
        name: len(tensor["data"])
        for name, tensor in safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }

"""Checkpoint folders as the safetensors package reads them, and values compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, found through its index; each shard holds what the index says."""
    found: dict[str, torch.Tensor] = {}
    shards = index(folder)["weight_map"]
    for shard in sorted(set(shards.values())):
        held = load_file(folder / shard)
        assert set(held) == {name for name, where in shards.items() if where == shard}
        found |= held
    return found


def modules(held: dict[str, torch.Tensor], part: str) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each module that has this part ("weight_scale"), by module and part."""
    names = [n.removesuffix(f".{part}") for n in held if n.endswith(f".{part}")]
    return {
        name: {n.removeprefix(f"{name}."): t for n, t in held.items() if n.startswith(f"{name}.")}
        for name in names
    }


def config(folder: Path) -> dict[str, Any]:
    """config.json."""
    return _json(folder / "config.json")


def index(folder: Path) -> dict[str, Any]:
    """The index of the shards."""
    return _json(folder / "model.safetensors.index.json")


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    bits = BITS[found.element_size()]
    return torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits))

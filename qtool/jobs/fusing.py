"""Tensors whose weights runtimes put together.

vLLM, SGLang and TensorRT-LLM load the projections to queries, keys and values as one matrix, and
so the gate and up projections of an MLP: they must be quantized alike, and their block scales must
stand under one global scale.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_NAMES = "|".join(name for names in _FUSED for name in names)
_PATTERN = re.compile(rf"(.*\.)?({_NAMES})\.weight")


def group(name: str) -> tuple[str, tuple[str, ...]] | None:
    """What a tensor is fused into; None where it is not."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    return match[1] or "", next(names for names in _FUSED if match[2] in names)


def fused(names: Iterable[str]) -> list[str]:
    """Those of the tensors that share their global scale with another one of them."""
    groups = defaultdict(list)
    for name in names:
        groups[group(name)].append(name)
    groups.pop(None, None)
    return [name for members in groups.values() if len(members) > 1 for name in members]


def fused_across(files: Mapping[str, str]) -> list[str]:
    """Those of the tensors, each with its file, that are fused with one in another file."""
    places = defaultdict(set)
    for name, file in files.items():
        places[group(name)].add(file)
    return [name for name in files if group(name) and len(places[group(name)]) > 1]


def shared(absmax: Mapping[str, float]) -> dict[str, float]:
    """For each of these tensors the largest magnitude of all that it is fused with."""
    largest: dict[object, float] = defaultdict(float)
    for name, value in absmax.items():
        largest[group(name)] = max(largest[group(name)], value)
    return {name: largest[group(name)] for name in absmax}

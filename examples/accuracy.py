"""Print what quantization costs the digits network, from the files that qtool writes.

    python accuracy.py

For each format: the bits per weight with the scales counted, how far the logits move (root mean
square), and how many of the test images are still recognised. Plain NumPy runs the network.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import qtool

HERE = Path(__file__).parent
MODEL = HERE / "digits.safetensors"

# Shown as, dtype, block size (None: one scale per output channel).
FORMATS: tuple[tuple[str, str, int | None], ...] = (
    ("int8 per channel", "int8", None),
    ("int4 block 32", "int4", 32),
    ("float8e4m3fn per channel", "float8e4m3fn", None),
    ("float4e2m1 block 16", "float4e2m1", 16),
)


def logits(model: Path, images: NDArray[np.float32]) -> NDArray[np.float64]:
    """(N, 64) -> (N, 10): three fully connected layers, ReLU between them.

    In float64, so that the result does not hang on the order in which a BLAS adds.
    """
    x = images.astype(np.float64)
    with closing(qtool.open(model)) as weights:
        for i in (1, 2, 3):
            weight, bias = weights.read(f"fc{i}.weight"), weights.read(f"fc{i}.bias")
            x = x @ weight.T.astype(np.float64) + bias
            x = np.maximum(x, 0.0) if i < 3 else x
    return x


def main() -> None:
    images, labels = np.load(HERE / "digits_inputs.npy"), np.load(HERE / "digits_labels.npy")
    reference = logits(MODEL, images)

    def row(name: str, bits: float, result: NDArray[np.float64]) -> None:
        correct = np.count_nonzero(result.argmax(axis=1) == labels)
        moved = np.sqrt(np.mean((result - reference) ** 2))
        print(f"{name:<26}{bits:>8.2f}{moved:>8.3f}{correct:>9}{correct / len(labels):>10.1%}")

    print(f"{'weights':<26}{'bits':>8}{'moved':>8}{'right':>9}{'accuracy':>10}")
    row("float32", 32, reference)
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype, block_size in FORMATS:
            quantized = Path(folder, f"{dtype}.safetensors")
            restored = Path(folder, f"{dtype}.float32.safetensors")
            report = qtool.quantize_file(MODEL, quantized, dtype=dtype, block_size=block_size)
            qtool.dequantize_file(quantized, restored)
            row(name, report["totals"]["bits_per_weight"], logits(restored, images))


if __name__ == "__main__":
    main()

"""What 4 bits cost rapidocr's text recogniser, by its outputs in onnxruntime on rendered lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command import ok
from fetch import fetch
from minilm import LICENSE, SENTENCES
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

pytestmark = pytest.mark.interop

Array = NDArray[Any]

MODEL = ("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx")
INT4 = ["--dtype", "int4", "--block-size", "32"]
WAYS = {
    "absmax": [*INT4, "--method", "absmax"],
    "mse": [*INT4, "--method", "mse"],
    "second-order": [*INT4, "--hessian", "HESSIAN"],
    # 4.5 bits per weight too, with the float32 scales of the model
    "blocks of 64": ["--dtype", "int4", "--block-size", "64"],
    "mixed": ["--target-bits", "4.5", "--importance", "SQUARES"],
}
LINES = [part.strip() for text in SENTENCES for part in (text[:24], text[-22:])]


OTHERS = [line.strip()[:24] for line in LICENSE.splitlines() if len(line.strip()) > 40]


def rendered(lines: list[str], seed: int) -> Array:
    """Lines in Pillow's own font, (lines, 3, 48, 320) in [-1, 1]: letters of several sizes,
    places and shades of grey on a ground that is a little uneven and noisy."""
    rng = np.random.default_rng(seed)
    waves = np.sin(np.arange(48)[:, None] / 17) * 6 + np.cos(np.arange(320) / 29) * 6
    found = []
    for line in lines:
        size, left, top = rng.integers(20, 29), rng.integers(2, 12), rng.integers(4, 14)
        image = Image.new("L", (320, 48), int(rng.integers(190, 250)))
        ink, font = int(rng.integers(10, 90)), ImageFont.load_default(int(size))
        ImageDraw.Draw(image).text((int(left), int(top)), line, fill=ink, font=font)
        pixels = np.clip(np.asarray(image) + waves + rng.normal(0, 3, (48, 320)), 0, 255)
        found.append(np.repeat((pixels / 127.5 - 1).astype(np.float32)[None], 3, axis=0))
    return np.stack(found)


def session(model: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


class Recogniser:
    """The published model's outputs, and what quantization makes of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._source = folder, fetch(*MODEL)
        self._images = rendered(LINES, 3)
        exact = session(self._source)
        known = exact.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *known, " "]
        self.exact = self._run(exact)

    def quantized(self, way: str) -> Array:
        """Probabilities of the characters, (lines, steps, characters)."""
        target = self._folder / f"{way}.onnx"
        if not target.exists():
            places = {"HESSIAN": "--hessian", "SQUARES": "--mean-square"}
            options = [
                str(self._captured(places[word])) if word in places else word for word in WAYS[way]
            ]
            ok("quantize", self._source, "-o", target, *options)
        return self._run(session(target))

    def _captured(self, what: str) -> Path:
        """What is known of the inputs that other lines give."""
        path = self._folder / f"captured{what}.safetensors"
        if not path.exists():
            np.savez(self._folder / "lines.npz", x=rendered(OTHERS, 4))
            ok("capture", self._source, self._folder / "lines.npz", "-o", path, what)
        return path

    def error(self, outputs: Array) -> float:
        """||y - y_hat|| / ||y||."""
        return float(np.linalg.norm(outputs - self.exact) / np.linalg.norm(self.exact))

    def right(self, outputs: Array) -> int:
        """How many lines are read: the likeliest characters, repetitions and blanks aside (CTC)."""
        best = outputs.argmax(axis=2)
        fresh = np.diff(best, axis=1, prepend=-1) != 0
        texts = [
            "".join(self._characters[c] for c in line[f])
            for line, f in zip(best, fresh, strict=True)
        ]
        return sum(text == line for text, line in zip(texts, LINES, strict=True))

    def _run(self, model: onnxruntime.InferenceSession) -> Array:
        return np.asarray(model.run(None, {"x": self._images})[0])


@pytest.fixture(scope="module")
def recogniser(tmp_path_factory: pytest.TempPathFactory) -> Recogniser:
    return Recogniser(tmp_path_factory.mktemp("ocr"))


def test_the_images_are_text_that_the_float_model_reads(recogniser: Recogniser) -> None:
    assert recogniser.right(recogniser.exact) >= 0.9 * len(LINES)


@pytest.mark.parametrize(
    ("better", "worse"),
    [("mse", "absmax"), ("second-order", "mse"), ("mixed", "blocks of 64")],
)
def test_the_better_way_moves_the_outputs_less_and_reads_more(
    recogniser: Recogniser, better: str, worse: str
) -> None:
    found, other = recogniser.quantized(better), recogniser.quantized(worse)
    assert 0 < recogniser.error(found) < recogniser.error(other)
    assert recogniser.right(found) > recogniser.right(other)

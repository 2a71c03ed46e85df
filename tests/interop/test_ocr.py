"""What 4 bits cost rapidocr's text recogniser, by its outputs in onnxruntime on rendered lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command import ok
from fetch import fetch
from minilm import SENTENCES
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

pytestmark = pytest.mark.interop

Array = NDArray[Any]

MODEL = ("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx")
LINES = [sentence[:24].rstrip() for sentence in SENTENCES[:24]]
INT4 = ["--dtype", "int4", "--block-size", "32"]


def rendered(text: str) -> Array:
    """Dark letters of Pillow's own font on a slightly uneven ground, (3, 48, 320) in [-1, 1]."""
    image = Image.new("L", (320, 48), 235)
    font = ImageFont.load_default(26)
    ImageDraw.Draw(image).text((6, 8), text, fill=40, font=font)
    ground = np.sin(np.arange(48)[:, None] / 17) * 6 + np.cos(np.arange(320) / 29) * 6
    pixels = np.clip(np.asarray(image) + ground, 0, 255)
    return np.repeat((pixels / 127.5 - 1).astype(np.float32)[None], 3, axis=0)


def outputs(model: Path) -> Array:
    """Probabilities of the characters, (lines, steps, characters)."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.stack([rendered(line) for line in LINES])})[0])


def read(probabilities: Array) -> list[str]:
    """The likeliest characters without repetitions and blanks (CTC)."""
    session = onnxruntime.InferenceSession(fetch(*MODEL), providers=["CPUExecutionProvider"])
    known = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    characters = ["", *known, " "]
    best = probabilities.argmax(axis=2)
    fresh = np.diff(best, axis=1, prepend=-1) != 0
    return ["".join(characters[c] for c in line[f]) for line, f in zip(best, fresh, strict=True)]


def error(folder: Path, method: str) -> float:
    """||y - y_hat|| / ||y|| of the outputs."""
    target = folder / f"{method}.onnx"
    ok("quantize", fetch(*MODEL), "-o", target, *INT4, "--method", method)
    exact = outputs(fetch(*MODEL))
    return float(np.linalg.norm(outputs(target) - exact) / np.linalg.norm(exact))


def test_the_lines_are_text_that_the_float_model_reads() -> None:
    assert read(outputs(fetch(*MODEL))) == LINES


def test_mse_moves_the_outputs_less_than_absmax(tmp_path: Path) -> None:
    assert 0 < error(tmp_path, "mse") < error(tmp_path, "absmax")

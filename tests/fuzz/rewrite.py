"""An ONNX model that is made another one of."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fuzz.onnx import JUSTIFIED, mutate, seeds
from qtool.errors import QtoolError
from qtool.jobs.dequantize import dequantize_file
from qtool.jobs.dynamic import dynamic_file
from qtool.jobs.quantize import quantize_file

__all__ = ["JUSTIFIED", "mutate", "run", "seeds"]


def run(data: bytes, folder: Path) -> None:
    path = folder / "a.onnx"
    path.write_bytes(data)
    for number, layout in enumerate(("qdq", "matmul-nbits")):
        with suppress(QtoolError):
            quantize_file(
                path, folder / f"q{number}.onnx", dtype="int4", block_size=16, layout=layout,
                requantize=True, nonfinite="allow", allow_empty=True, jobs=1,
            )  # fmt: skip
    with suppress(QtoolError):
        dynamic_file(path, folder / "dynamic.onnx", graph=True)
    for number, source_path in enumerate((path, folder / "q0.onnx", folder / "q1.onnx")):
        with suppress(QtoolError):
            if source_path.exists():
                dequantize_file(source_path, folder / f"d{number}.onnx", jobs=1)

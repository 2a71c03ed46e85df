"""qtool from Python: arrays, files, reports, gates, and what a file holds.

python api.py [FOLDER]         writes to FOLDER; default: a temporary one
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np

import qtool

HERE = Path(__file__).parent
MODEL = HERE / "digits.safetensors"


def quantize_an_array() -> None:
    """A QuantSpec says how; the result has codes, scales and figures."""
    x = np.load(HERE / "activations.npy")
    spec = qtool.QuantSpec("int4", qtool.Blocked(axis=1, block_size=32))
    tensor = qtool.quantize(x, spec)
    error = np.abs(x - tensor.dequantize()).max()
    print(f"array: {tensor.y.dtype} {tensor.y.shape}, scales {tensor.scale.shape}")
    print(f"array: error at most {error:.3f}, {tensor.stats.figures()['sqnr_db']:.2f} dB")


def apply_the_operators() -> None:
    """Those of the ONNX standard, with scales of one's own; element types are ml_dtypes'."""
    x = np.array([-1.0, 0.26, 9.0], np.float32)
    codes = qtool.quantize_linear(x, np.float32(0.5), np.int8(3))
    print("operators:", codes, qtool.dequantize_linear(codes, np.float32(0.5), np.int8(3)))


def quantize_a_file(folder: Path) -> Path:
    """The arguments are the options of the command line, and the report is plain data."""
    target = folder / "api.safetensors"
    report = qtool.quantize_file(MODEL, target, dtype="int4", block_size=32, strict=True)
    worst = min(report["tensors"], key=lambda record: record["sqnr_db"])
    print(f"file: {report['totals']['bits_per_weight']:.2f} bits per weight")
    print(f"file: worst is {worst['name']}, {worst['sqnr_db']:.2f} dB")
    return target


def gate(folder: Path) -> None:
    """A result that fails raises GateError, which has the report; no file appears."""
    target = folder / "gated.safetensors"
    try:
        qtool.quantize_file(MODEL, target, dtype="int2", fail_if=["sqnr_db < 15"])
    except qtool.GateError as error:
        failed = [f["tensor"] for entry in error.report["gates"] for f in entry["failed"]]
        print(f"gate: stopped by {', '.join(failed)}; written: {target.exists()}")


def verify(quantized: Path) -> None:
    """The same figures from the files alone; what is wrong would raise GateError."""
    kept = qtool.read_report(quantized.with_suffix(".report.json"))
    found = qtool.verify_file(MODEL, quantized)
    print(f"verify: as reported: {found['tensors'][0]['mse'] == kept['tensors'][0]['mse']}")


def compare() -> None:
    """Several ways to quantize, without writing files: those that nothing beats."""
    result = qtool.compare_file(MODEL, dtypes=["int4", "int8"], block_sizes=[32, 128])
    for way in result["combinations"]:
        if way["pareto"]:
            print(f"compare: {way['words']}: {way['bits_per_weight']:.2f} bits, "
                  f"{way['sqnr_db']:.2f} dB")  # fmt: skip


def read_values(quantized: Path, folder: Path) -> None:
    """Back in floats, and tensor by tensor; the headers alone are read before that."""
    restored = folder / "restored.safetensors"
    qtool.dequantize_file(quantized, restored)
    with closing(qtool.open(restored)) as source:
        names = [info.name for info in source.infos()]
        print(f"restored: {len(names)} tensors, {names[0]} {source.read(names[0]).shape}")


def main(folder: Path) -> None:
    quantize_an_array()
    apply_the_operators()
    quantized = quantize_a_file(folder)
    gate(folder)
    verify(quantized)
    compare()
    read_values(quantized, folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))

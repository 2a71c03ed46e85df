"""qtool compare on all-MiniLM-L6-v2, beside NumPy and what `qtool quantize` reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from minilm import file
from safetensors.numpy import load_file

import qtool

pytestmark = pytest.mark.network

# 80 columns hold the sweep of the README
SWEEP = {"dtypes": "int8,int4,float8e4m3fn", "block_sizes": "32,128", "methods": "absmax,mse"}


def test_a_published_model_is_compared_as_it_is_quantized(tmp_path: Path) -> None:
    source = file("model.safetensors")
    told = qtool.compare_file(source, presets="nvfp4,mxfp4", **SWEEP)
    assert len(told["combinations"]) == 3 * 2 * 2 + 2 * 2
    rows = {row["words"]: row for row in told["combinations"]}
    for words, options in {
        "dtype=int4, block_size=32, method=mse": {
            "dtype": "int4", "block_size": 32, "method": "mse"},
        "preset=nvfp4, method=mse": {"preset": "nvfp4", "method": "mse"},
        "dtype=float8e4m3fn, block_size=128, method=absmax": {
            "dtype": "float8e4m3fn", "block_size": 128, "method": "absmax"},
    }.items():  # fmt: skip
        report = qtool.quantize_file(source, tmp_path / "q.safetensors", force=True, **options)
        row = rows[words]
        common = row.keys() & report["totals"].keys()
        assert len(common) == 12
        assert {k: row[k] for k in common} == {k: report["totals"][k] for k in common}
    weights = [w for w in load_file(source).values() if w.dtype == np.float32 and w.ndim == 2]
    noise = signal = 0.0
    for weight in weights:  # float16 would be another error: the scale is float32 here
        blocks = weight.reshape(-1, 32)
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
        error = (np.rint(blocks / scale) * scale).astype(np.float64) - blocks
        noise, signal = noise + np.square(error).sum(), signal + np.square(weight, dtype="f8").sum()
    row = rows["dtype=int4, block_size=32, method=absmax"]
    assert row["relative_error"] == pytest.approx(np.sqrt(noise / signal), rel=1e-9)
    assert (row["tensors"], row["bits_per_weight"]) == (len(weights), 5)
    best = [row for row in told["combinations"] if row["pareto"]]
    assert best[0] is told["combinations"][0]
    errors = [row["relative_error"] for row in best]
    assert errors == sorted(errors, reverse=True)
    assert [row["words"] for row in told["combinations"] if "absmax" in row["words"]
            and "int" in row["words"] and row["pareto"]] == []  # fmt: skip

"""Reports for the targets that read them."""

from __future__ import annotations

from typing import Any

TENSOR: dict[str, Any] = {
    "name": "w", "shape": [16, 32], "source_dtype": "float32", "dtype": "int4", "elements": 512,
    "granularity": "blocked", "axis": 1, "block_size": 16, "tile": None, "precision": "float32",
    "scale_dtype": "float32", "mx_rule": None, "num_scales": 32, "scale_min": 0.1, "scale_max": 0.2,
    "global_scale": None, "zero_point": False, "rounding": None, "output_error": None,
    "output_error_nearest": None, "min": -1.5, "max": 1.5, "absmax": 1.5, "nan_count": 0,
    "inf_count": 0, "zero_count": 0, "clipped": 1, "clipped_low": 0, "clipped_high": 1,
    "clipped_fraction": 0.001953125, "flushed_to_zero": 3, "mse": 0.01, "rmse": 0.1,
    "mean_error": 0.0, "max_abs_error": 0.2, "max_abs_error_index": [1, 2], "sqnr_db": 20.0,
    "cosine_similarity": 0.99, "relative_error": 0.1, "bytes_before": 2048, "bytes_after": 384,
    "bits_per_weight_before": 32.0, "bits_per_weight": 6.0, "importance": None,
}  # fmt: skip
EXACT = TENSOR | {"name": "exact", "mse": 0.0, "rmse": 0.0, "sqnr_db": None, "max_abs_error": 0.0}
_TOTALS = {k: v for k, v in TENSOR.items() if k not in ("name", "shape", "dtype")}
REPORT: dict[str, Any] = {
    "report_version": 1, "tool": {"name": "qtool", "version": "0.1.0", "libraries": {"numpy": "2"}},
    "command": "quantize", "source": {"name": "w.safetensors", "container": "safetensors",
    "bytes": 9999}, "output": {"name": "q.safetensors", "container": "safetensors", "bytes": 999,
    "files": [{"name": "q", "sha256": "ab"}]}, "settings": {"dtype": "int4", "block_size": 16},
    "recipe": 'dtype = "int4"\n', "tensors": [TENSOR, EXACT], "warnings": ["one"],
    "skipped": [{"name": "b", "reason": "rank below 2"}], "seconds": 0.5,
    "totals": {"tensors": 2, **_TOTALS, "max_abs_error_tensor": "w", "file_bytes_before": 9999,
               "file_bytes_after": 999},
    "gates": [{"expression": "mse < 1", "passed": False, "failed": [{"tensor": "w", "figures":
               {"mse": 0.01}, "limit": "mse < 1", "reason": None}], "undefined": [{"tensor": "e",
               "figure": "sqnr_db", "why": "exact"}]}],
}  # fmt: skip

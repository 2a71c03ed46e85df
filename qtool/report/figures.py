"""The figures of a report that gates can judge, and why one of them is undefined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]  # an entry of "tensors", or "totals"

_TENSORS, _TOTALS = ("tensors",), ("totals",)
_BOTH = _TENSORS + _TOTALS
HIGHER, LOWER = "higher", "lower"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a report.

    places: whether records of tensors have it, or totals. worse: which way it gets worse; None:
    it says nothing about quality. unit: dB, B (bytes) or "".
    """

    name: str
    places: tuple[str, ...]
    worse: str | None = None
    unit: str = ""


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("elements", _BOTH),
        Figure("nan_count", _BOTH, HIGHER),
        Figure("inf_count", _BOTH, HIGHER),
        Figure("zero_count", _BOTH),
        Figure("clipped", _BOTH, HIGHER),
        Figure("clipped_low", _BOTH, HIGHER),
        Figure("clipped_high", _BOTH, HIGHER),
        Figure("clipped_fraction", _BOTH, HIGHER),
        Figure("flushed_to_zero", _BOTH, HIGHER),
        Figure("min", _BOTH),
        Figure("max", _BOTH),
        Figure("absmax", _BOTH),
        Figure("mse", _BOTH, HIGHER),
        Figure("rmse", _BOTH, HIGHER),
        Figure("mean_error", _BOTH),
        Figure("max_abs_error", _BOTH, HIGHER),
        Figure("sqnr_db", _BOTH, LOWER, "dB"),
        Figure("cosine_similarity", _BOTH, LOWER),
        Figure("relative_error", _BOTH, HIGHER),
        Figure("weighted_mse", _BOTH, HIGHER),
        Figure("weighted_relative_error", _BOTH, HIGHER),
        Figure("weighted_sqnr_db", _BOTH, LOWER, "dB"),
        Figure("output_error", _BOTH, HIGHER),
        Figure("output_error_nearest", _BOTH, HIGHER),
        Figure("bytes_before", _BOTH, None, "B"),
        Figure("bytes_after", _BOTH, HIGHER, "B"),
        Figure("bits_per_weight_before", _BOTH),
        Figure("bits_per_weight", _BOTH, HIGHER),
        Figure("axis", _TENSORS),
        Figure("block_size", _TENSORS),
        Figure("num_scales", _TENSORS),
        Figure("scale_min", _TENSORS),
        Figure("scale_max", _TENSORS),
        Figure("global_scale", _TENSORS),
        Figure("tensors", _TOTALS),
        Figure("skipped", _TOTALS),
        Figure("second_order", _TOTALS),
        Figure("outputs_relative_error", _TOTALS, HIGHER),
        Figure("outputs_max_abs_error", _TOTALS, HIGHER),
        Figure("outputs_cosine_similarity", _TOTALS, LOWER),
        Figure("outputs_argmax_agreement", _TOTALS, LOWER),
        Figure("file_bytes_before", _TOTALS, None, "B"),
        Figure("file_bytes_after", _TOTALS, HIGHER, "B"),
    )
}
# the other fields of records and totals
NO_NUMBERS = {
    "name", "shape", "source_dtype", "rounded_to", "dtype", "granularity", "tile", "precision",
    "scale_dtype", "mx_rule", "zero_point", "importance", "rounding", "max_abs_error_index",
    "max_abs_error_tensor",
}  # fmt: skip
_OPTIONAL = {"axis", "block_size", "scale_min", "scale_max", "global_scale"}


@dataclass(frozen=True, slots=True)
class Undefined:
    """Why a figure has no value.

    fails: a gate that hangs on it fails, as the values are at fault; else it passes.
    is_void: nothing was measured, so that a gate that finds no other figure checks nothing.
    """

    why: str
    fails: bool = False
    is_void: bool = False


EMPTY, EXACT = Undefined("empty"), Undefined("exact")
_NON_FINITE = Undefined("non-finite values", fails=True)


def value(record: Record, name: str) -> float | Undefined:
    """A figure of a record, or why it is null."""
    found: float | None = record.get(name)
    if found is not None:
        return found
    if record.get("elements") == 0:
        return EMPTY
    if name not in record or name in _OPTIONAL or not _is_measured(record, name):
        return Undefined("none" if name in _OPTIONAL else "not measured", is_void=True)
    if record.get("nan_count") or record.get("inf_count"):
        return _NON_FINITE
    return EXACT if is_exact(record, name) else Undefined(_fault(record, name), fails=True)


def is_exact(record: Record, name: str) -> bool:
    """Whether the errors that a figure is made of are all 0."""
    if name.startswith("weighted_"):
        return bool(record.get("weighted_mse") == 0)
    # the square of a tiny error may be 0
    return bool(record.get("mse") == 0) and not record.get("max_abs_error")


def _is_measured(record: Record, name: str) -> bool:
    if name.startswith("outputs_"):
        return False  # null: not compared, or nothing to compare
    if name.startswith("weighted_") and record.get("weighted_mse") is None:
        return record.get("importance") is not None
    return not name.startswith("output_error") or record.get("rounding") is not None


def _fault(record: Record, name: str) -> str:
    """What makes a figure null although there are values, all finite, and errors."""
    is_weighted = name.startswith("weighted_")
    mse = record.get("weighted_mse" if is_weighted else "mse")
    if mse is None:
        return "sums that overflow, or weights of 0" if is_weighted else "sums that overflow"
    return "squares that are too small" if mse == 0 else "values of 0 alone"

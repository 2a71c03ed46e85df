"""Figures of a report as text for people: whatever is missing or odd in it becomes a dash."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool.render.text import kind, number, safe, size

Record = Mapping[str, Any]

_LARGEST = sys.float_info.max
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])")


def plain(value: object) -> str:
    """Text of a file without terminal escapes and other control characters."""
    return safe(_ESCAPE.sub("", str(value)))


def figure(record: Record, key: str) -> float | None:
    """A finite number of a report."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST <= value <= _LARGEST else None


def mapping(record: Record, key: str) -> Mapping[str, Any]:
    """An object of a report; an empty one where there is none."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def tensors(report: Record) -> list[Record]:
    """The records of tensors in model order: that of the graph, and elsewhere that of the numbers
    in their names, as safetensors files sort 10 before 2."""
    found = rows(report, "tensors")
    if mapping(report, "source").get("container") == "onnx":
        return list(found)
    return sorted(found, key=lambda record: _natural(plain(record.get("name"))))


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", name)
    return [(0, int(p), "") if p.isdecimal() and len(p) < 19 else (1, 0, p) for p in parts]


def rows(record: Record, key: str) -> list[Mapping[str, Any]]:
    """The objects in a list of a report."""
    value = record.get(key)
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def texts(record: Record, key: str) -> list[str]:
    """A list of a report as texts."""
    value = record.get(key)
    return [plain(v) for v in value] if isinstance(value, list) else []


def nbytes(value: float | None) -> str:
    """Bytes in units of 1000."""
    return "-" if value is None else size(int(value))


def way(record: Record) -> str:
    """Type and granularity of a tensor: int4 /32."""
    granularity, tile = record.get("granularity"), record.get("tile")
    return plain(
        kind({
            "dtype": record.get("dtype"),
            "granularity": granularity if isinstance(granularity, str) else None,
            "axis": record.get("axis"),
            "block_size": record.get("block_size"),
            "tile": tile if isinstance(tile, list) else None,
        })
    )  # fmt: skip


def shape(record: Record) -> str:
    """A shape as 64x128."""
    found = texts(record, "shape")
    return "x".join(found) or ("scalar" if record.get("shape") == [] else "-")


def sqnr(record: Record, key: str = "sqnr_db") -> str:
    """The SQNR in dB, or why there is none."""
    value = figure(record, key)
    if value is not None:
        return f"{value:.2f}"
    if record.get("elements") == 0:
        return "empty"
    if figure(record, key.replace("sqnr_db", "mse")) == 0:
        return "exact"
    return "not finite" if is_nonfinite(record) else "-"


def is_nonfinite(record: Record) -> bool:
    """Whether the values before quantization had NaN or Inf among them."""
    return any(figure(record, key) for key in ("nan_count", "inf_count"))


def percent(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.{digits}%}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of tensors. value: what it is sorted by; None comes last."""

    title: str
    text: Callable[[Record], str]
    value: Callable[[Record], float | None]


def _number(title: str, key: str, spec: str) -> Column:
    return Column(title, lambda r: number(figure(r, key), spec), lambda r: figure(r, key))


def _bytes(title: str, key: str) -> Column:
    return Column(title, lambda r: nbytes(figure(r, key)), lambda r: figure(r, key))


def columns(records: Sequence[Record]) -> list[Column]:
    """The columns of figures that there are; a plan has no errors."""
    weighted = [
        Column(
            "weighted SQNR, dB",
            lambda r: sqnr(r, "weighted_sqnr_db"),
            lambda r: _ranked(r, "weighted_sqnr_db"),
        )
    ]
    outputs = [_number("output error", "output_error", ".4f")]
    has = {key: any(r.get(key) is not None for r in records) for key in ("importance", "rounding")}
    found = [
        Column("SQNR, dB", sqnr, lambda r: _ranked(r, "sqnr_db")),
        *(weighted if has["importance"] else ()),
        _number("relative error", "relative_error", ".4f"),
        *(outputs if has["rounding"] else ()),
        _number("max error", "max_abs_error", ".3g"),
        Column(
            "clipped",
            lambda r: percent(figure(r, "clipped_fraction")),
            lambda r: figure(r, "clipped_fraction"),
        ),
        _number("bits", "bits_per_weight", ".2f"),
        _bytes("before", "bytes_before"),
        _bytes("after", "bytes_after"),
    ]
    return [c for c in found if not records or any(c.text(r) != "-" for r in records)]


def _ranked(record: Record, key: str) -> float | None:
    """An SQNR to sort by: an exact tensor is above all others."""
    value = figure(record, key)
    is_exact = value is None and figure(record, key.replace("sqnr_db", "mse")) == 0
    return math.inf if is_exact and record.get("elements") != 0 else value

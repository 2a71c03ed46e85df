"""What in the values of a quantized tensor would break a reader: its scales, and its codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.formats import Source
from qtool.tensor import operator_scale

Array = NDArray[Any]

_PIECE = 1 << 18


def scale_figures(scale: Array, dtype: DType) -> dict[str, Any]:
    """Range and special values of scales of dtype, in whatever type of that size they come."""
    values = ops.cast(operator_scale(scale.reshape(-1).view(dtype.numpy)), ops.FLOAT64)
    finite = np.isfinite(values)
    some = bool(finite.any())
    return {
        "min": float(values.min(where=finite, initial=np.inf)) if some else None,
        "max": float(values.max(where=finite, initial=-np.inf)) if some else None,
        "zero_count": int(np.count_nonzero(values == 0)),
        "nonfinite_count": int(np.count_nonzero(~finite)),
    }


def scale_faults(figures: dict[str, Any], count: int) -> Iterator[str]:
    """What is wrong with scales, from their figures."""
    for key, what in (("nonfinite_count", "NaN or infinite"), ("zero_count", "zero")):
        if figures[key]:
            yield f"{figures[key]} of {count} scales {'is' if figures[key] == 1 else 'are'} {what}"


def code_faults(source: Source, name: str, dtype: DType, size: int) -> Iterator[str]:
    """What is wrong with codes, in whatever elements they are stored: so many of dtype."""
    first = None
    with source.reading(name) as read:
        for start in range(0, size, _PIECE):
            codes = np.empty(min(_PIECE, size - start), dtype.numpy)
            read(start, codes)
            words = codes.view(f"u{codes.itemsize}")
            first = words[0] if first is None else first
            if not bool((words == first).all()):
                return  # as most are in the first piece
    if size > 1 and first is not None:
        yield f"all code words are {int(first):#x}"


def zero_point_faults(stored: Array, bits: int, *, less_one: bool) -> Iterator[str]:
    """Whether GPTQ's packed zero points, all alike, are those of the other version of the format.

    less_one: whether they are stored less 1, as in version 1. Zero points of symmetric codes are
    half the number of codes.
    """
    words = stored.reshape(-1).view(np.uint32)
    if bits not in (2, 4, 8) or not words.size or not bool((words == words[0]).all()):
        return
    middle, code = 1 << (bits - 1), int(words[0]) & (1 << bits) - 1
    alike = int(words[0]) == code * (0xFFFFFFFF // ((1 << bits) - 1))
    other = middle if less_one else middle - 1
    if alike and code == other:
        mine, theirs = (1, 2) if less_one else (2, 1)
        yield (
            f"all zero points are stored as {code}, which is {middle} in version {theirs} of the "
            f"format and {code + less_one} in version {mine}, which the configuration says"
        )

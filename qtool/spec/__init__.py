"""What is asked for: the granularity, the QuantSpec, and what is known of a tensor unread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.spec.granularity import (
    Blocked,
    Granularity,
    OnnxGranularity,
    PerAxis,
    PerTensor,
    Shape,
    Tiled,
    describe,
    folded,
    normalize_axis,
    phrase,
)
from qtool.spec.methods import SEARCHES, SEMANTICS
from qtool.spec.quant_spec import MX_RULES, PRECISIONS, SCALE_DTYPES, QuantSpec

__all__ = [
    "MX_RULES",
    "PRECISIONS",
    "SCALE_DTYPES",
    "SEARCHES",
    "SEMANTICS",
    "Blocked",
    "Granularity",
    "OnnxGranularity",
    "PerAxis",
    "PerTensor",
    "QuantSpec",
    "Reader",
    "Shape",
    "TensorInfo",
    "Tiled",
    "Writer",
    "bytes_of",
    "describe",
    "folded",
    "normalize_axis",
    "phrase",
    "reader_of",
    "writer_of",
]

# Fills an array with the elements of a tensor, in C order, from the number given on. Threads may
# call it at the same time.
Reader = Callable[[int, NDArray[Any]], None]
# Stores bytes, in C order and little-endian, from the byte number given on. Threads may call it at
# the same time.
Writer = Callable[[int, NDArray[Any]], None]


def reader_of(array: NDArray[Any]) -> Reader:
    """A Reader of a tensor that is in memory."""
    flat = array.reshape(-1)

    def read(start: int, out: NDArray[Any]) -> None:
        out[:] = flat[start : start + out.size]

    return read


def writer_of(array: NDArray[Any]) -> Writer:
    """A Writer of a tensor that is in memory."""
    stored = array.reshape(-1).view(np.uint8)

    def write(offset: int, data: NDArray[Any]) -> None:
        stored[offset : offset + data.nbytes] = data.view(np.uint8)

    return write


def bytes_of(read: Reader, element: DType) -> Reader:
    """A Reader of the bytes of a tensor of such elements."""

    size = element.numpy.itemsize

    def read_bytes(start: int, out: NDArray[Any]) -> None:
        first, last = start // size, -(-(start + out.size) // size)
        if out.size == (last - first) * size:
            read(first, out.view(element.numpy))
            return
        elements = np.empty(last - first, element.numpy)
        read(first, elements)
        out[:] = elements.view(np.uint8)[start - first * size :][: out.size]

    return read_bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    shape: logical shape, in elements. nbytes: bytes that its values take in the file.
    output_axis, reduced_axis: where a consumer is known, the axis of its output channels and the
        one that it sums over.
    obstacle: why the file format cannot have it quantized, or None.
    """

    name: str
    shape: Shape
    dtype: DType
    nbytes: int
    output_axis: int | None = None
    reduced_axis: int | None = None
    obstacle: str | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

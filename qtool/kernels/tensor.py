"""Tiles of a tensor through the kernels."""

from __future__ import annotations

import math

import numpy as np

from qtool.dtypes import DType
from qtool.kernels import CHUNK
from qtool.kernels.codes import grid
from qtool.kernels.compiled import Array
from qtool.kernels.convert import bfloat16_to_float32, float16_to_float32
from qtool.kernels.groups import absmax, minmax, ordered
from qtool.kernels.layout import layout
from qtool.kernels.pack import pack
from qtool.kernels.tiles import quantize_floats, quantize_integers
from qtool.spec import Blocked, PerAxis, QuantSpec, Shape

_HIGHEST, _LOWEST = np.int32(0x7FFFFFFF), np.int32(-0x80000000)


def group_span(shape: Shape, spec: QuantSpec) -> tuple[int, int] | None:
    """Elements of the shortest run, from the tensor's start, that holds whole groups, and their
    number; None where only the whole tensor does."""
    granularity = spec.granularity
    if isinstance(granularity, PerAxis) and granularity.axis == 0:
        return math.prod(shape[1:]), 1
    if not isinstance(granularity, Blocked):
        return None
    size, inner = shape[granularity.axis], math.prod(shape[granularity.axis + 1 :])
    if size % granularity.block_size == 0:
        return granularity.block_size * inner, inner
    return size * inner, -(-size // granularity.block_size) * inner


def to_float32(raw: Array, source: DType, out: Array) -> Array:
    """Elements of float32, float16 or bfloat16 as float32: themselves, or in out."""
    if source.name == "float32":
        return raw
    out = out[: raw.size]
    if source.name == "bfloat16":
        bfloat16_to_float32(raw.view(np.uint16), out.view(np.uint32))
    else:
        float16_to_float32(raw.view(np.uint16), out.view(np.uint32), out)
    return out


class TileQuantizer:
    """Quantizes tiles of one tensor; any number of threads may use it at once.

    shape: of the tensor. spec: its granularity counted from the front.
    """

    def __init__(self, shape: Shape, spec: QuantSpec) -> None:
        self._spec = spec
        self._layout = layout(shape, spec.granularity)
        dtype = spec.dtype
        self._code_type = np.uint16 if dtype.bits > 8 else np.uint8
        if dtype.is_integer:
            self._limits = (np.float32(spec.qmin), np.float32(dtype.qmax))
        else:
            self._grid = grid(dtype)
            normal, magic = self._grid[1:3].view(np.float32)
            self._limits = (normal, magic)

    def ranges(self, values: Array, start: int, first: int, count: int) -> tuple[Array, Array]:
        """Finite (low, high) of count groups from number first on, among the elements from number
        start on; [-absmax, absmax] for symmetric ones."""
        bits = values.view(np.int32)
        if self._spec.symmetric:
            high = np.zeros(count, np.int32)
            absmax(bits, self._layout, start, first, high)
            return -high.view(np.float32), high.view(np.float32)
        low, high = np.full(count, _HIGHEST), np.full(count, _LOWEST)
        minmax(bits, self._layout, start, first, low, high)
        return ordered(low).view(np.float32), ordered(high).view(np.float32)

    def quantize(
        self, values: Array, scales: Array, zeros: Array, start: int, first: int
    ) -> tuple[Array, TileFigures]:
        """Codes, one per element, and figures of the elements from number start on (a multiple of
        CHUNK).

        scales, zeros: float32 of the groups from number first on; no zeros at all mean 0.
        """
        codes = np.empty(values.size, self._code_type)
        figures = TileFigures(values.size)
        finite = self._spec.nonfinite == "error"
        sums, counts, bounds, worst = figures.arrays
        if self._spec.dtype.is_integer:
            zero_first = self._spec.semantics == "onednn"
            quantize_integers(
                values, scales, zeros, self._layout, start, first, self._limits, zero_first,
                finite, codes, sums, counts, bounds, worst,
            )  # fmt: skip
        else:
            quantize_floats(
                values, scales, self._layout, start, first, self._grid, self._limits, finite,
                codes, sums, counts, bounds, worst,
            )  # fmt: skip
        return codes, figures


class TileFigures:
    """What the kernels count and sum of one tile; see figures.add_figures()."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.sums = np.zeros((-(-elements // CHUNK), 5))
        self.counts = np.zeros(7, np.int64)
        self.bounds = np.array((_HIGHEST, _LOWEST, 0), np.int32)
        self.worst = np.array([-1.0])

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """What the kernels add to."""
        return self.sums, self.counts, self.bounds, self.worst

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest finite x."""
        low, high = ordered(self.bounds[:2]).view(np.float32)
        return float(low), float(high)


def packed(codes: Array, dtype: DType) -> Array:
    """Codes as they are stored: packed below 8 bits."""
    if dtype.bits >= 8:
        return codes
    out = np.empty(dtype.nbytes(codes.size), np.uint8)
    pack(codes, dtype.bits, out)
    return out

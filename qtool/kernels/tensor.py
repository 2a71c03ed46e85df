"""Tiles of a tensor through the kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from qtool.dtypes import DType
from qtool.kernels import CHUNK, LANES, PART
from qtool.kernels.geometry import layout
from qtool.kernels.machine import Array, Kernel, address
from qtool.spec import Granularity, QuantSpec, Shape

_HIGHEST, _LOWEST = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
_LARGEST_FINITE = 0x7F7FFFFF

_find_absmax, _find_minmax = Kernel("find_absmax"), Kernel("find_minmax")
_divide, _quantize = Kernel("divide"), Kernel("quantize")
_encode, _dequantize = Kernel("encode"), Kernel("dequantize")

_FORMS = {"float32": 0, "bfloat16": 1, "float16": 2}
_INTEGERS, _ONEDNN = range(2)


class _Workspace(threading.local):
    """Memory that the kernels need for one part, of every thread its own."""

    def __init__(self) -> None:
        self._floats = np.zeros((6, PART + LANES), np.float32)
        self._codes = np.empty(PART // 4, np.uint64)
        self._lanes, self._found = np.zeros(5 * LANES), np.empty(5, np.int32)
        rows = [address(row, "f4") for row in self._floats]
        self.values, self.scale, self.zero, self.no_zero, self.x_hat, self.clean = rows
        self.codes, self.lanes = address(self._codes, "u8"), address(self._lanes, "f8")
        self._counts = np.zeros(2, np.int64)
        self.found, self.counts = address(self._found, "i4"), address(self._counts, "i8")


_workspace = _Workspace()


class TileQuantizer:
    """Quantizes tiles of one tensor; any number of threads may use it at once.

    shape, source: of the tensor. spec: its granularity counted from the front.
    """

    def __init__(self, shape: Shape, source: DType, spec: QuantSpec) -> None:
        self._form = _FORMS[source.name]
        self._layout = layout(shape, spec.granularity)
        self._symmetric = spec.symmetric and not spec.negative_scale
        self._masks = spec.nonfinite == "allow" and spec.semantics != "dynamic"
        dtype = spec.dtype
        self._mask = (1 << min(dtype.bits, 8)) - 1
        if dtype.is_integer:
            self._family = _ONEDNN if spec.semantics == "onednn" else _INTEGERS
            self._grid = np.empty(0, np.int32)
            self._limits = np.array((spec.qmin, dtype.qmax), np.float32)
        else:
            self._family = _dropped(dtype) * (1 if dtype.has_negative_zero else -1)
            self._grid, self._limits = grid(dtype)

    def ranges(
        self, elements: Array, start: int, first: int, count: int
    ) -> tuple[Array, Array] | None:
        """Finite (low, high) of count groups from number first on, among the elements from number
        start on; [-absmax, absmax] for symmetric ones whose scale is positive; NaN or 0 for a group
        without any there.

        None where an element is not finite, unless spec.nonfinite is "allow".
        """
        ranges = self._find(elements, start, first, count, masked=False)
        if ranges is None and self._masks:
            return self._find(elements, start, first, count, masked=True)
        return ranges

    def _find(
        self, elements: Array, start: int, first: int, count: int, *, masked: bool
    ) -> tuple[Array, Array] | None:
        given = (*self._source(elements), address(self._layout, "i8"), start, first, masked)
        if self._symmetric:
            high = np.zeros(count, np.int32)
            _find_absmax(*given, address(high, "i4"), _workspace.values)
            if high.max(initial=0) > _LARGEST_FINITE:
                return None
            return -high.view(np.float32), high.view(np.float32)
        low, high = np.full(count, _HIGHEST), np.full(count, _LOWEST)
        _find_minmax(*given, address(low, "i4"), address(high, "i4"), _workspace.values)
        if max(high.max(initial=0), ~low.min(initial=0)) > _LARGEST_FINITE:
            return None
        return _in_order(low).view(np.float32), _in_order(high).view(np.float32)

    def quantize(
        self,
        elements: Array,
        scales: Array,
        zeros: Array,
        start: int,
        first: int,
        width: int,
        out: Array,
    ) -> TileFigures:
        """Codes of the elements from number start on, a multiple of CHUNK, and their figures.

        scales, zeros: float32 of the groups from number first on; no zeros at all mean 0.
        width: bits of a stored code. out: bytes for all of them.
        """
        figures, work = TileFigures(elements.size), _workspace
        _quantize(
            *self._codes(elements, scales, zeros, start, first, width, out),
            address(figures.sums, "f8"), address(figures.counts, "i8"),
            address(figures.bounds, "i4"), address(figures.worst, "f8"),
            work.lanes, work.values, work.scale, work.zero if zeros.size else work.no_zero,
            work.x_hat, work.clean, work.codes, work.codes, work.codes, work.found,
        )  # fmt: skip
        return figures

    def encode(
        self,
        elements: Array,
        scales: Array,
        zeros: Array,
        start: int,
        first: int,
        width: int,
        out: Array,
    ) -> None:
        """quantize() without figures, from any start."""
        work = _workspace
        _encode(
            *self._codes(elements, scales, zeros, start, first, width, out), work.values,
            work.scale, work.zero if zeros.size else work.no_zero, work.codes, work.codes,
            work.codes, work.counts,
        )  # fmt: skip

    def _codes(
        self,
        elements: Array,
        scales: Array,
        zeros: Array,
        start: int,
        first: int,
        width: int,
        out: Array,
    ) -> tuple[int, ...]:
        """What both have in common."""
        stored = address(out, "u1")
        return (
            *self._source(elements), address(scales, "f4"), address(zeros, "f4"), zeros.size > 0,
            address(self._layout, "i8"), start, first, self._family, address(self._limits, "f4"),
            address(self._grid, "i4"), width, self._mask, stored, stored,
        )  # fmt: skip

    def _source(self, elements: Array) -> tuple[int, int, int, int]:
        place = address(elements.view(f"u{elements.itemsize}"), f"u{elements.itemsize}")
        return place, place, self._form, elements.size


class TileFigures:
    """What the kernels count and sum of one tile; see kernels.figures.add_figures()."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.sums = np.empty((-(-elements // CHUNK), 5))
        self.counts = np.zeros(7, np.int64)
        self.bounds = np.array((_HIGHEST, _LOWEST), np.int32)
        self.worst = np.array([-1.0])

    @property
    def nonfinite(self) -> int:
        """How many x are NaN or Inf."""
        return int(self.counts[4] + self.counts[5])

    @staticmethod
    def extremes(tiles: Sequence[TileFigures]) -> tuple[float, float]:
        """The smallest and the largest finite x of several, -0.0 as 0.0."""
        bounds = np.array([tile.bounds for tile in tiles])
        ends = np.array((bounds[:, 0].min(), bounds[:, 1].max()), np.int32)
        low, high = _in_order(ends).view(np.float32)
        return float(low) + 0.0, float(high) + 0.0


class TileRestorer:
    """Dequantizes tiles of one tensor to float32; any number of threads may use it at once.

    scales, zeros: float32 of all groups; no zeros at all mean 0. width: bits of a stored code.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: DType,
        granularity: Granularity,
        scales: Array,
        zeros: Array,
        width: int,
    ) -> None:
        self._width = width
        self._layout = layout(shape, granularity)
        self._dtype = dtype
        self._scales, self._zeros = scales, zeros
        self._table = np.empty(0, np.float32) if dtype.is_integer else decoder(dtype)

    def dequantize(self, stored: Array, start: int, out: Array) -> None:
        """out = (code - zero) * scale of the elements from number start on.

        stored: the bytes of their codes; start: a multiple of 4.
        """
        dtype, work, has_zeros = self._dtype, _workspace, self._zeros.size > 0
        place = address(stored, "u1")
        _dequantize(
            place, place, self._width, dtype.bits, out.size, dtype.kind == "int",
            address(self._table, "f4"), self._table.size > 0, address(self._scales, "f4"),
            address(self._zeros, "f4"), has_zeros, address(self._layout, "i8"), start,
            address(out, "f4"), work.scale, work.zero if has_zeros else work.no_zero, work.codes,
        )  # fmt: skip


def divided(bound: Array, levels: float, storage: DType) -> Array:
    """bound / levels in a float type of scales other than float8e8m0, as scales.divided() gives
    it."""
    out = np.empty(bound.shape, np.float32)
    exponent, mantissa = storage.limits.minexp, storage.limits.nmant
    limits = np.array((float(storage.limits.smallest_subnormal), storage.qmax))
    grid = np.array((exponent, mantissa), np.int64)
    _divide(
        address(bound, "f4"), bound.size, levels, address(limits, "f8"), address(grid, "i8"),
        address(out, "f4"),
    )  # fmt: skip
    return out.astype(storage.numpy, copy=False)


def _in_order(bits: Array) -> Array:
    """float32 bits (int32) to integers in the order of the floats, and back."""
    return np.asarray(bits ^ (bits >> 31) & _HIGHEST)


def grid(dtype: DType) -> tuple[Array, Array]:
    """What the kernels must know of a float type, besides its mantissa bits.

    int32: bits of the smallest normal value as float32; difference of the exponents' biases, in
    place; code of the largest finite value; the sign bit; code of NaN. float32: the number whose
    last bit counts smallest subnormal values.
    """
    mantissa, emin = dtype.limits.nmant, dtype.limits.minexp
    magic = np.array([2.0 ** (emin - mantissa + 23)], np.float32)
    normal, largest = np.array((2.0**emin, dtype.qmax), np.float32).view(np.int32).tolist()
    rebias = (126 + emin) << mantissa
    nan = np.array(np.nan if dtype.has_nan else 0.0).astype(dtype.numpy).view(np.uint8)
    top = (largest >> _dropped(dtype)) - rebias
    numbers = (normal, rebias, top, 1 << (dtype.bits - 1), nan)
    return np.array(numbers, np.int32), magic


def _dropped(dtype: DType) -> int:
    """Mantissa bits of float32 that a float type has no room for."""
    return 23 - int(dtype.limits.nmant)


def decoder(dtype: DType) -> Array:
    """The value of every code of a type of up to 8 bits, as float32."""
    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    return codes.view(dtype.numpy).astype(np.float32)

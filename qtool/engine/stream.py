"""Quantizes a tensor that is read and written tile by tile, over threads, with the kernels.

The same bytes and figures as plain.py, for any number of threads and any size of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops, packing, scales
from qtool.dtypes import resolve
from qtool.engine import global_scale
from qtool.engine.plain import naming, nonfinite_error
from qtool.engine.request import Request
from qtool.engine.searching import Searcher
from qtool.engine.tally import Groups, Tally
from qtool.engine.tiling import tile_size
from qtool.errors import TensorError
from qtool.kernels.geometry import group_span
from qtool.kernels.tensor import TileFigures, TileQuantizer, divided
from qtool.pool import buffer, in_order
from qtool.spec import SEARCHES, PerTensor, Reader, reader_of, writer_of
from qtool.tensor import Outcome, QuantizedTensor, Target

Array = NDArray[Any]

# Groups that lie within so many elements are read once; others in two passes.
_LONGEST_SPAN = 1 << 22
# Groups whose scales are computed at once.
_GROUPS = 1 << 20


class Stream:
    """One tensor on its way from a Reader to a Target.

    read: gives its elements. asked: one of which engine.can_stream() is true. jobs: threads.
    moved: told how many bytes of source more are done.
    """

    def __init__(
        self, read: Reader, asked: Request, jobs: int, moved: Callable[[int], None]
    ) -> None:
        self._read = read
        self._asked = asked
        self._size = math.prod(asked.shape)
        self._source = asked.source
        self._spec = asked.spec
        self._jobs = jobs
        self._moved = moved
        self._quantizer = TileQuantizer(asked.shape, asked.source, asked.spec)
        self._tile_size = tile_size(self._size, jobs)
        dynamic = asked.spec.semantics == "dynamic"
        self._refuses = dynamic or asked.spec.nonfinite == "error"
        self._span = group_span(asked.shape, asked.spec.granularity)
        self._over: float | None = None
        self._searches = asked.given is None and asked.spec.method in SEARCHES

    def quantize(self, target: Target) -> Outcome:
        """Quantize and store all of it. Raises TensorError as engine.quantize()."""
        known = None
        if self._spec.global_scale:
            self._over = self._global_scale()
        if self._searches:
            self._searcher = Searcher(self._read, self._asked, self._jobs, self._over or 1.0)
        if self._asked.given is not None:
            known = Groups.of(*self._asked.given)
        elif self._span is None or self._span[0] > _LONGEST_SPAN:
            known = Groups.of(*self._choose(), over=self._over)
        tally = Tally()

        def take(tile: tuple[TileFigures, Groups]) -> None:
            figures, groups = tile
            tally.add(figures, groups)
            self._moved(figures.elements * self._source.numpy.itemsize)

        in_order(lambda start: self._tile(start, known, target), self._starts(), self._jobs, take)
        tally.merge()
        zero_points = tally.zero_points
        if target.zero_point is not None and zero_points:
            codes = np.concatenate(zero_points)
            if target.is_packed:
                codes = packing.pack(codes, self._spec.dtype)
            target.zero_point(0, codes.view(np.uint8))
        if target.global_scale is not None and self._over is not None:
            target.global_scale(0, np.array([self._over], np.float32))
        storage = self._asked.storage if known is None else resolve(known.scale.dtype)
        return Outcome(
            self._spec, ops.FLOAT32, storage, tally.scales, tally.low, tally.high,
            bool(zero_points), tally.stats, self._over,
        )  # fmt: skip

    def _starts(self) -> range:
        return range(0, self._size, self._tile_size)

    def _tile(self, start: int, known: Groups | None, target: Target) -> tuple[TileFigures, Groups]:
        """Quantize and store one tile; its figures, and the groups that begin in it."""
        stop = min(start + self._tile_size, self._size)
        if known is None:
            values, groups, own = self._with_scales(start, stop)
        else:
            values, groups = self._values(start, stop), known
            own = known.part(0, known.scale.size if start == 0 else 0)
        width = self._width(target)
        codes = buffer("codes", np.dtype(np.uint8), -(-values.size * width // 8))
        figures = self._quantizer.quantize(
            values, groups.divisor, groups.offset, start, groups.first, width, codes
        )
        if self._refuses and figures.nonfinite:
            raise self._nonfinite()
        target.codes(start * width // 8, codes)
        if own.scale.size:
            target.scale(own.first * own.scale.itemsize, own.scale)
        return figures, own

    def _with_scales(self, start: int, stop: int) -> tuple[Array, Groups, Groups]:
        """Elements, the groups that they belong to, and those of them that begin there."""
        assert self._span is not None
        length, count = self._span
        begin, end = start // length * length, -(-stop // length) * length
        window = self._values(begin, min(end, self._size))  # the last span may be shorter
        first = begin // length * count
        low, high = self._ranges(window, begin, first, (end - begin) // length * count)
        found = self._parameters(low, high, self._over or 1.0)
        if self._searches:
            bound = np.maximum(-low, high)
            found = self._searcher.of_groups(window, begin, first, found, bound)
        groups = Groups.of(*found, first, self._over)
        own = groups.part(-(-start // length) * count, -(-stop // length) * count)
        return window[start - begin : stop - begin], groups, own

    def _choose(self) -> tuple[Array, Array | None]:
        """The scale and zero point of all groups, from a pass over the tensor of its own."""
        shape = self._spec.granularity.scale_shape(self._asked.shape)
        low, high = self._extremes(self._quantizer, math.prod(shape), self._span)
        storage, over = self._asked.storage, self._over or 1.0
        scale, zero_points = np.empty(low.size, storage.numpy), []
        with naming(self._asked.name):
            for start in range(0, low.size, _GROUPS):
                part = slice(start, start + _GROUPS)
                scale[part], zero_point = scales.from_ranges(
                    low[part], high[part], self._spec, storage, over=over
                )
                zero_points += [] if zero_point is None else [zero_point]
        whole = np.concatenate(zero_points) if zero_points else None
        if self._searches:
            bound = np.maximum(-low, high)
            scale, whole = self._searcher.of_tensor((scale, whole), bound, self._span)
        return scale.reshape(shape), None if whole is None else whole.reshape(shape)

    def absmax(self) -> float:
        """The largest magnitude of the tensor's finite elements, from a pass of its own."""
        asked = self._asked
        whole = TileQuantizer(asked.shape, asked.source, self._spec.at(PerTensor()))
        return float(self._extremes(whole, 1, None)[1][0])

    def _global_scale(self) -> float:
        absmax = self.absmax() if self._asked.absmax is None else self._asked.absmax

        def cost(over: float, window: range, groups: range) -> float:
            values = self._values(window.start, window.stop)
            low, high = self._ranges(values, window.start, groups.start, len(groups))
            start = self._parameters(low, high, over)
            searcher = Searcher(self._read, self._asked, self._jobs, over)
            found = searcher.searched(
                values, window.start, groups.start, start, np.maximum(-low, high)
            )
            return searcher.cost(values, window.start, groups, found)

        return global_scale.chosen(self._asked, absmax, cost)

    def _extremes(
        self, quantizer: TileQuantizer, count: int, span: tuple[int, int] | None
    ) -> tuple[Array, Array]:
        """The range of all groups of a quantizer, of which there are count; span: see
        group_span()."""
        low, high = np.full((2, count), np.nan, np.float32)
        length, many = span or (max(self._size, 1), count)

        def ranges(start: int) -> tuple[slice, Array, Array]:
            stop = min(start + self._tile_size, self._size)
            first, last = start // length * many, -(-stop // length) * many
            values = self._values(start, stop)
            found = self._ranges(values, start, first, last - first, quantizer)
            return slice(first, last), *found

        def widen(tile: tuple[slice, Array, Array]) -> None:
            part, lowest, highest = tile
            np.fmin(low[part], lowest, out=low[part])  # NaN: no element of the group in the tile
            np.fmax(high[part], highest, out=high[part])

        in_order(ranges, self._starts(), self._jobs, widen)
        return low, high

    def _parameters(self, low: Array, high: Array, over: float) -> tuple[Array, Array | None]:
        return scales.from_ranges(low, high, self._spec, self._asked.storage, divided, over)

    def _ranges(
        self,
        values: Array,
        start: int,
        first: int,
        count: int,
        quantizer: TileQuantizer | None = None,
    ) -> tuple[Array, Array]:
        ranges = (quantizer or self._quantizer).ranges(values, start, first, count)
        if ranges is None:
            raise self._nonfinite()
        return ranges

    def _values(self, begin: int, end: int) -> Array:
        """Elements as they are stored, in memory that the thread's next call overwrites."""
        raw = buffer("raw", self._source.numpy, end - begin)
        self._read(begin, raw)
        return raw

    def _width(self, target: Target) -> int:
        """Bits of a stored code: its own where the target wants codes packed, else whole bytes."""
        bits = self._spec.dtype.bits
        return bits if target.is_packed else max(bits, 8)

    def _nonfinite(self) -> TensorError:
        """What is wrong, from a pass over the whole tensor."""
        first, bad, value = -1, 0, np.float32(0)
        for start in self._starts():
            raw = np.empty(min(self._tile_size, self._size - start), self._source.numpy)
            self._read(start, raw)
            found = np.flatnonzero(~np.isfinite(ops.cast(raw, ops.FLOAT32)))
            if found.size and not bad:
                first, value = start + int(found[0]), raw[found[0]]
            bad += found.size
        return nonfinite_error(self._asked, first, value, bad)


def quantize_array(x: Array, asked: Request, *, jobs: int) -> QuantizedTensor:
    """A tensor in memory, in C order, as asked."""
    spec = asked.spec
    shape = spec.granularity.scale_shape(asked.shape)
    storage = asked.storage if asked.given is None else resolve(asked.given[0].dtype)
    y = np.empty(asked.shape, spec.dtype.numpy)
    scale = np.empty(shape, storage.numpy)
    zero_point = np.empty(shape, spec.dtype.numpy)
    target = Target(writer_of(y), writer_of(scale), writer_of(zero_point), is_packed=False)
    outcome = Stream(reader_of(x), asked, jobs, lambda _: None).quantize(target)
    return QuantizedTensor(
        y, scale, zero_point if outcome.has_zero_point else None, spec, outcome.stats,
        outcome.precision, outcome.global_scale,
    )  # fmt: skip

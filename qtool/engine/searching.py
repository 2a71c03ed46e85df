"""The search for scales of least squared error in a tensor that is read tile by tile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import scales
from qtool.dtypes import DType
from qtool.engine import tiling
from qtool.engine.request import Request
from qtool.kernels.geometry import group_span, layout, places
from qtool.kernels.searcher import TileSearcher
from qtool.pool import buffer, in_order
from qtool.scales.ranges import grouped, ranges
from qtool.scales.search import Grid, best, bounds, shares, squared
from qtool.scales.stages import stages
from qtool.spec import Blocked, Granularity, PerAxis, Reader, Shape, Tiled, reader_of

Array = NDArray[Any]
Parameters = tuple[Array, Array | None]

# Elements of a tile whose groups go on in others. Of groups that lie side by side a tile has so
# many lines at least, unless they are longer.
_TILE = 1 << 18
_LINES, _LONGEST_LINE = 32, 1 << 18
_NONE = np.empty(0, np.float32)


def weighted(
    x: Array, single: Array, asked: Request, jobs: int, over: float
) -> tuple[Array, Array | None]:
    """scales.choose() of a tensor with weights, which is single in float32."""
    spec = asked.spec
    length, count = group_span(asked.shape, spec.granularity) or (0, 0)
    if spec.method != "mse" and not 0 < length <= tiling.LARGEST_WINDOW:
        return scales.choose(single, spec, asked.storage, over, asked.weights)
    low, high = ranges(single, spec)
    scale, zero = scales.from_ranges(low, high, spec, asked.storage, over=over)
    bound = np.maximum(-low, high).reshape(-1)
    together = max(_TILE // length, 1) if length else 0
    span = (length * together, count * together) if together else None

    def found(asked: Request) -> list[Array]:
        start = scale.reshape(-1).copy(), None if zero is None else zero.reshape(-1).copy()
        parts = Searcher(reader_of(x), asked, jobs, over).of_tensor(start, bound, span)
        return [part for part in parts if part is not None]

    chosen = found(asked)
    assert asked.weights is not None
    idle = ~grouped(asked.weights, spec.granularity).any(axis=1)
    if idle.any():  # as if there were no weights
        others = found(replace(asked, weights=None))
        chosen = [np.where(idle, o, c) for o, c in zip(others, chosen, strict=True)]
    shaped = [part.reshape(scale.shape) for part in chosen]
    return shaped[0], None if zero is None else shaped[1]


class Searcher:
    """Improves the scales of one tensor.

    read: gives its elements. asked: its spec's method is one of SEARCHES. over: the global scale.
    """

    def __init__(self, read: Reader, asked: Request, jobs: int, over: float) -> None:
        self._read, self._asked, self._jobs = read, asked, jobs
        spec, storage = asked.spec, asked.storage
        self._length = group_length(asked.shape, spec.granularity)
        weights = asked.weights
        self._stages = stages(spec, storage, self._length, weighted=weights is not None)
        self._weights = _NONE if weights is None else weights.reshape(-1)
        self._shares = _NONE if weights is None else shares(grouped(weights, spec.granularity))
        self._grid = grid = Grid.of(spec, storage, over)
        self._kernel = TileSearcher(
            asked.shape, spec, self._stages, mantissa=grid.mantissa, exponent=grid.exponent,
            unit=grid.unit, loose=grid.loose(self._length), over=over, storage=grid.storage_limits,
        )  # fmt: skip

    def of_groups(
        self, window: Array, begin: int, first: int, start: Parameters, bound: Array
    ) -> Parameters:
        """Scale and zero point of whole groups from number first on, which lie in the window of
        elements from number begin on.

        start: where the search begins. bound: the largest magnitude of each group.
        """
        spec = self._asked.spec
        found = self.searched(window, begin, first, start, bound)
        if spec.method == "mse":
            return found
        count, shares = found[0].size, None
        groups = self._gathered(widened(window, self._asked.source), begin, first, count)
        if self._weights.size:
            weights = self._weights[begin : begin + window.size]
            shares = self._gathered(weights, begin, first, count)
        return scales.refined(
            groups, found, spec, self._asked.storage, self._grid.over, shares, compiled=True
        )

    def searched(
        self, window: Array, begin: int, first: int, start: Parameters, bound: Array
    ) -> Parameters:
        """of_groups() by method mse."""
        scale, zero = scales.single(*start)
        weights = self._weights[begin : begin + window.size]
        part = self._shares[first : first + scale.size]
        self._kernel.search(window, begin, first, scale, zero, weights, part)
        return scales.settled((scale, zero), start, bound, self._asked.spec)

    def _gathered(self, x: Array, begin: int, first: int, count: int) -> Array:
        """Groups of float32 in rows, completed by zeros."""
        starts, heights, widths, stride = places(
            self._asked.shape, self._asked.spec.granularity, first, count
        )
        if x.size == count * self._length and stride == 0:
            return x.reshape(count, -1)
        i = np.arange(self._length)
        width = widths[:, None]
        index = (starts - begin)[:, None] + i // width * stride + i % width
        there = i < (heights * widths)[:, None]
        return np.where(there, x[np.where(there, index, 0)], np.float32(0))

    def cost(self, window: Array, begin: int, groups: range, found: Parameters) -> float:
        """The squared error of these groups, as the search counts it."""
        scale, zero = scales.single(*found)
        candidates = bounds(scale, zero, self._grid)[:, :, None]
        pieces, steps = self._kernel.costs(window, begin, groups.start, candidates)
        total = np.zeros(scale.size)
        np.add.at(total, pieces, steps[:, 0])
        return float((total * squared(scale, self._grid)).sum())

    def of_tensor(
        self, start: Parameters, bound: Array, span: tuple[int, int] | None
    ) -> Parameters:
        """of_groups() of all groups; span: see geometry.group_span()."""
        size = math.prod(self._asked.shape)
        length, count = span or (size, bound.size)
        scale, zero_point = start
        fits = length <= tiling.LARGEST_WINDOW

        def improved(begin: int) -> tuple[slice, Parameters]:
            first, end = begin // length * count, min(begin + length, size)
            part = slice(first, first + count)
            held = scale[part], None if zero_point is None else zero_point[part]
            if not fits:
                return part, self._of_part(begin, end, first, held, bound[part])
            window = buffer("raw", self._asked.source.numpy, end - begin)
            self._read(begin, window)
            return part, self.of_groups(window, begin, first, held, bound[part])

        def keep(found: tuple[slice, Parameters]) -> None:
            part, (scale[part], zeros) = found
            if zero_point is not None:
                zero_point[part] = zeros

        in_order(improved, range(0, size, length), self._jobs if fits else 1, keep)
        return scale, zero_point

    def _of_part(
        self, begin: int, end: int, first: int, start: Parameters, bound: Array
    ) -> Parameters:
        """of_groups() of groups too long for a window, in passes over their elements."""

        def costs(candidates: Array) -> Array:
            return self._costs(begin, end, first, candidates)

        found = best(*scales.single(*start), costs, self._stages, self._grid, self._length)
        return scales.settled((found[0], found[1]), start, bound, self._asked.spec)

    def _costs(self, begin: int, end: int, first: int, candidates: Array) -> Array:
        """Of candidates (3, G, K), what each costs for each group from number first on."""
        total = np.zeros(candidates.shape[1:])
        step = self._tile_size()

        def measured(start: int) -> tuple[Array, Array]:
            values = buffer("raw", self._asked.source.numpy, min(step, end - start))
            self._read(start, values)
            weights, part = self._weights[start : start + values.size], self._shares[first:]
            return self._kernel.costs(values, start, first, candidates, weights, part)

        def add(tile: tuple[Array, Array]) -> None:
            np.add.at(total, *tile)

        in_order(measured, range(begin, end, step), self._jobs, add)
        return total

    def _tile_size(self) -> int:
        """Whole lines of elements that are of different groups, if there are such."""
        shape = layout(self._asked.shape, self._asked.spec.granularity)
        inner, are_neighbours = int(shape[1]), bool(shape[5])
        if not are_neighbours or inner > _LONGEST_LINE:
            return _TILE
        return max(_TILE // inner, _LINES) * inner


def group_length(shape: Shape, granularity: Granularity) -> int:
    """Elements of the largest group of a tensor."""
    if isinstance(granularity, Tiled):
        return min(granularity.rows, shape[-2]) * min(granularity.columns, shape[-1])
    if isinstance(granularity, Blocked):
        return min(granularity.block_size, shape[granularity.axis])
    size = math.prod(shape)
    return size // shape[granularity.axis] if isinstance(granularity, PerAxis) else size


def widened(values: Array, source: DType) -> Array:
    """Elements as float32, in memory that the thread's next call overwrites."""
    if source.name == "float32":
        return values
    wide = buffer("wide", np.dtype(np.float32), values.size)
    if source.name == "bfloat16":
        np.left_shift(values.view(np.uint16), 16, out=wide.view(np.uint32), dtype=np.uint32)
    else:
        wide[:] = values
    return wide

"""The search for scales of least squared error through the kernels; see scales.search."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.geometry import layout, pieces, places
from qtool.kernels.machine import Array, Kernel, address
from qtool.spec import QuantSpec, Shape

# What kernels.search has room for, which this page must know without numba.
ROWS, CANDIDATES, TOGETHER = 256, 96, 8

_search, _add_costs = Kernel("search"), Kernel("add_costs")

Stages = Sequence[Sequence[tuple[int, int]]]
_NONE = np.empty(0, np.float32)


class _Workspace(threading.local):
    """Memory that the kernels need for a panel, of every thread its own."""

    def __init__(self) -> None:
        floats = (ROWS, ROWS, 5 * CANDIDATES, 4 * TOGETHER)
        self._floats = [np.zeros(rows * LANES, np.float32) for rows in floats]
        self._doubles = [np.zeros(rows * LANES) for rows in (CANDIDATES, 6)]
        self.panel = tuple(address(room, "f4") for room in self._floats)
        self.costs, self.best = (address(room, "f8") for room in self._doubles)


_workspace = _Workspace()


class TileSearcher:
    """Searches among candidates for the scales of one tensor; any number of threads may use it.

    stages: the candidates. mantissa, exponent: of a float type, 0 for integers; unit, loose, over,
    storage: see scales.search.Grid.
    """

    def __init__(
        self,
        shape: Shape,
        spec: QuantSpec,
        stages: Stages,
        *,
        mantissa: int,
        exponent: int,
        unit: float,
        loose: float,
        over: float,
        storage: tuple[int, int, int, int],
    ) -> None:
        self._shape, self._granularity = shape, spec.granularity
        self._layout = layout(shape, spec.granularity)
        largest = int(np.float32(spec.dtype.qmax).view(np.int32))
        self._grid = np.array(((exponent + 127) << 23, largest), np.int32)
        self._family, self._unit = mantissa, unit
        self._loose, self._over, self._shifts = loose, over, not spec.symmetric
        self._storage = np.array(storage, np.int64)
        self._limits = np.array((spec.qmin, spec.dtype.qmax), np.float32)
        self._sizes = np.array([len(stage) for stage in stages], np.int64)
        assert self._sizes.max() <= CANDIDATES
        flat = np.array([candidate for stage in stages for candidate in stage], np.int64)
        self._steps, self._moves = np.ascontiguousarray(flat.T)

    def search(
        self,
        x: Array,
        begin: int,
        first: int,
        scale: Array,
        zero: Array,
        weights: Array = _NONE,
        shares: Array = _NONE,
    ) -> None:
        """Improve scale and zero, float32 of whole groups from number first on, in place.

        x: elements from number begin on, in which these groups lie. weights: of the
        elements; shares: what those of each group are multiplied by.
        """
        starts, heights, widths, stride = places(self._shape, self._granularity, first, scale.size)
        starts = starts - begin
        _search(
            *_source(x), address(weights, "f4"), weights.size > 0, address(shares, "f4"),
            address(starts, "i8"), address(heights, "i8"), address(widths, "i8"), stride,
            scale.size, self._family, address(self._grid, "i4"), self._unit, self._loose,
            self._over, address(self._storage, "i8"), address(self._limits, "f4"), self._shifts,
            address(self._sizes, "i8"), self._sizes.size, address(self._steps, "i8"),
            address(self._moves, "i8"), *_workspace.panel, _workspace.costs, _workspace.best,
            address(scale, "f4"), address(zero, "f4"),
        )  # fmt: skip

    def costs(
        self,
        x: Array,
        start: int,
        first: int,
        candidates: Array,
        weights: Array = _NONE,
        shares: Array = _NONE,
    ) -> tuple[Array, Array]:
        """What each candidate costs among the elements x from number start on, in squared steps:
        the group, counted from number first on, and float64 (K,) of each piece of a group there.

        candidates: float32 (3, G, K), their reciprocals, lowest and highest steps, of the groups
        from number first on.
        """
        starts, heights, widths, stride, groups = pieces(self._layout, start, start + x.size)
        groups = groups - first
        of_pieces = np.ascontiguousarray(candidates[:, groups])
        costs = np.empty(of_pieces.shape[1:])
        share = np.ascontiguousarray(shares[groups]) if shares.size else shares
        _add_costs(
            *_source(x), address(weights, "f4"), weights.size > 0, address(share, "f4"),
            address(starts, "i8"), address(heights, "i8"), address(widths, "i8"), stride,
            groups.size, self._family, address(self._grid, "i4"), self._unit,
            candidates.shape[2], address(of_pieces, "f4"), *_workspace.panel, _workspace.costs,
            address(costs, "f8"),
        )  # fmt: skip
        return groups, costs


def _source(x: Array) -> tuple[int, int, int]:
    """x, bits and form; see kernels.tiles."""
    form = 0 if x.dtype == np.float32 else 2 if x.dtype == np.float16 else 1
    place = address(x.view(f"u{x.itemsize}"), f"u{x.itemsize}")
    return place, place, form

"""The groups that tiles of a tensor have, and the figures of all of them together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.kernels.tensor import TileFigures
from qtool.stats import Stats
from qtool.tensor import operator_scale

Array = NDArray[Any]

# Tiles whose figures are added up at once.
_TOGETHER = 64


@dataclass(frozen=True)
class Groups:
    """Scales and zero points, in one dimension, of the groups from number first on.

    divisor, offset: the same as float32, the scale times the global one; no offset at all means 0.
    """

    scale: Array
    zero_point: Array | None
    divisor: Array
    offset: Array
    first: int

    @classmethod
    def of(
        cls, scale: Array, zero_point: Array | None, first: int = 0, over: float | None = None
    ) -> Groups:
        """Groups with parameters of any shape."""
        scale, offset = scale.reshape(-1), np.empty(0, np.float32)
        if zero_point is not None:
            zero_point = zero_point.reshape(-1)
            offset = zero_point.astype(np.float32)
        divisor = operator_scale(scale, over).astype(np.float32, copy=False)
        return cls(scale, zero_point, divisor, offset, first)

    def part(self, begin: int, end: int) -> Groups:
        """The groups from number begin to end."""
        place = slice(begin - self.first, end - self.first)
        zero_point = None if self.zero_point is None else self.zero_point[place]
        return Groups(self.scale[place], zero_point, self.divisor[place], self.offset[place], begin)


class Tally:
    """Adds up the tiles of a tensor, in their order."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.scales = 0
        self.low, self.high = math.inf, -math.inf
        self.zero_points: list[Array] = []
        self._recent: list[TileFigures] = []

    def add(self, figures: TileFigures, groups: Groups) -> None:
        """One more tile, and the groups that begin in it."""
        self._recent.append(figures)
        if len(self._recent) == _TOGETHER:
            self.merge()
        if groups.scale.size:
            self.scales += groups.scale.size
            self.low = min(self.low, float(groups.divisor.min()))
            self.high = max(self.high, float(groups.divisor.max()))
        if groups.zero_point is not None:
            self.zero_points.append(groups.zero_point)

    def merge(self) -> None:
        """Bring stats up to date."""
        tiles, self._recent = self._recent, []
        if not tiles:
            return
        stats = self.stats
        counts = np.sum([tile.counts[:6] for tile in tiles], axis=0).tolist()
        low, high, zeros, flushed, nan, inf = counts
        added = Stats(sum(t.elements for t in tiles), nan, inf, zeros, low, high, flushed)
        if added.elements > nan + inf:
            added.min, added.max = TileFigures.extremes(tiles)
            worst = max(tiles, key=lambda tile: float(tile.worst[0]))
            added.max_abs_error = float(worst.worst[0])
            added.max_abs_error_at = int(worst.counts[6]) - stats.elements
        stats.merge(added)
        with np.errstate(invalid="ignore"):  # Inf - Inf
            sums = np.concatenate([stats.sums[None], *(tile.sums for tile in tiles)])
            stats.sums = np.add.accumulate(sums)[-1].copy()  # not all of them

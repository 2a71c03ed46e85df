"""Method mse: a search, from coarse to fine, for the scale and zero point of least squared error.

The cost of a scale s and zero point z for a group of values x with weights w is

    s^2 * sum of w (x / s - q)^2,  q = saturate(round(x / s) + z) - z,

in steps of s squared. x / s is the float32 product with the reciprocal of s. The terms are rounded
to multiples of a unit, so that their sum, in float64, is exact in any order: it is the same for
every number of threads, size of tiles and processor. The weights of a group are scaled by a power
of two to a mean of 1/2 to 1.

A candidate has the bits of the scale that is best so far plus a number of steps, which is about
logarithmic, rounded to the type that scales are stored in; its zero point is the best so far plus a
move. In a symmetric grid a move means the other sign.
kernels.search gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.scales.stages import Candidate, stages
from qtool.spec import QuantSpec

Array = NDArray[Any]

_ROUND = np.float32(1.5 * 2**23)
_BOX = 1 << 16  # elements whose temporaries stay in the L2 cache


@dataclass(frozen=True)
class Grid:
    """What the search must know of codes and scales.

    lowest, highest: of the codes. mantissa: bits of a float type, 0 for integers; exponent: of its
    smallest normal value. shifts: whether zero points are free. over: the global scale.
    """

    lowest: float
    highest: float
    mantissa: int
    exponent: int
    shifts: bool
    storage: DType
    over: float

    @classmethod
    def of(cls, spec: QuantSpec, storage: DType, over: float) -> Grid:
        dtype = spec.dtype
        mantissa = 0 if dtype.is_integer else int(dtype.limits.nmant)
        exponent = 0 if dtype.is_integer else int(dtype.limits.minexp)
        return cls(spec.qmin, dtype.qmax, mantissa, exponent, not spec.symmetric, storage, over)

    @property
    def unit(self) -> float:
        """Terms are rounded to multiples of unit * 2^-23."""
        return 1.0 if self.mantissa else 128.0

    def loose(self, length: int) -> float:
        """By how much the cost of a group may be wrong, in squared steps: the rounding to units,
        and quotients that are wrong by two units in the last place."""
        of_element = self.unit * 2.0**-24 + (self.highest - self.lowest) * 2.0**-21
        return length * of_element

    @property
    def storage_limits(self) -> tuple[int, int, int, int]:
        """Mantissa bits, lowest normal exponent, biased, and the bits of the smallest and largest
        value of the type that scales are stored in."""
        if self.storage.name == "float8e8m0":
            ends = np.array((2.0**-127, 2.0**127), np.float32)
            return 0, 0, *ends.view(np.int32).tolist()
        limits = self.storage.limits
        ends = np.array((float(limits.smallest_subnormal), self.storage.qmax), np.float32)
        return int(limits.nmant), int(limits.minexp) + 127, *ends.view(np.int32).tolist()


def search(
    groups: Array,
    scale: Array,
    zero_point: Array,
    spec: QuantSpec,
    storage: DType,
    over: float,
    weights: Array | None,
) -> tuple[Array, Array]:
    """Scale and zero point, both float32, of least cost for each of the groups.

    groups: float32 (G, n), completed by zeros, what is not finite taken as 0. scale, zero_point:
    float32 (G,), where the search begins. weights: float32 (G, n), finite and not negative; a group
    of weights 0 is searched without them. Where the costs cannot surely be told apart, the
    beginning stays.
    """
    found = np.empty((2, len(groups)), np.float32)
    plan = stages(spec, storage, groups.shape[1], weighted=weights is not None)
    grid = Grid.of(spec, storage, over)
    step = max(_BOX // max(groups.shape[1], 1), 1)
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        x = np.where(np.isfinite(groups[part]), groups[part], np.float32(0))
        w = None if weights is None else weights[part] * shares(weights[part])[:, None]

        def cost(candidates: Array, x: Array = x, w: Array | None = w) -> Array:
            return np.stack([_steps(x, w, c, grid) for c in np.moveaxis(candidates, -1, 0)], -1)

        found[:, part] = best(scale[part], zero_point[part], cost, plan, grid, groups.shape[1])
    if weights is not None and (idle := ~weights.any(axis=1)).any():
        begin = scale[idle], zero_point[idle]
        found[:, idle] = search(groups[idle], *begin, spec, storage, over, None)
    return found[0], found[1]


def costs(
    x: Array, scale: Array, zero_point: Array, grid: Grid, weights: Array | None = None
) -> Array:
    """Of finite groups (G, n) with those scales and zero points, and weights."""
    candidate = bounds(scale, zero_point, grid)
    if weights is None:
        return _steps(x, None, candidate, grid) * squared(scale, grid)
    share = shares(weights)
    steps = _steps(x, weights * share[:, None], candidate, grid)
    return np.asarray(steps / share * squared(scale, grid))


def best(
    scale: Array,
    zero_point: Array,
    cost: Any,
    plan: Sequence[Sequence[Candidate]],
    grid: Grid,
    length: int,
) -> Array:
    """(scale, zero point) of G groups after all stages.

    cost: of candidates (3, G, K), their reciprocals, lowest and highest steps, in squared steps,
    (G, K).
    """
    held = scale, zero_point
    least = before = np.empty(0)
    for stage, candidates in enumerate(plan):
        scales, zeros = proposed(scale, zero_point, candidates, grid)
        with np.errstate(invalid="ignore"):  # NaN, of an infinite divisor, is never less
            total = cost(bounds(scales, zeros, grid)) * squared(scales, grid)
        if stage == 0:
            least = before = total[:, 0]
            scale, zero_point = scales[:, 0], zeros[:, 0]
        for k in range(total.shape[1]):
            better = total[:, k] < least
            least = np.where(better, total[:, k], least)
            scale = np.where(better, scales[:, k], scale)
            zero_point = np.where(better, zeros[:, k], zero_point)
    room = grid.loose(length) * (squared(held[0], grid) + squared(scale, grid))
    surely = (least + least * 2.0**-19 + room < before) & np.isfinite(before)
    return np.stack([np.where(surely, scale, held[0]), np.where(surely, zero_point, held[1])])


def proposed(
    scale: Array, zero_point: Array, candidates: Sequence[Candidate], grid: Grid
) -> tuple[Array, Array]:
    """Scales and zero points (G, K) of the candidates around those (G,)."""
    steps = np.array([step for step, _ in candidates])
    moves = np.array([move for _, move in candidates], np.float32)
    bits = scale.view(np.int32)[:, None]
    found = _stored((bits & 0x7FFFFFFF).astype(np.int64) + steps, grid)
    zeros = np.broadcast_to(zero_point[:, None], found.shape)
    if not grid.shifts:
        return np.where((bits < 0) != (moves != 0), -found, found), zeros
    zeros = np.clip(zero_point[:, None] + moves, np.float32(grid.lowest), np.float32(grid.highest))
    return found, np.asarray(zeros)


def bounds(scales: Array, zeros: Array, grid: Grid) -> Array:
    """Reciprocals, lowest and highest steps of candidates."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / (scales * np.float32(grid.over))
    return np.stack([inverse, np.float32(grid.lowest) - zeros, np.float32(grid.highest) - zeros])


def shares(weights: Array) -> Array:
    """Powers of two by which groups of weights (G, n) get a mean of 1/2 to 1; 1 for zeros.

    The mean is one of integers, 2^30 for the largest weight, so that it is the same in any order.
    """
    found = np.empty(len(weights), np.float32)
    length = weights.shape[1]
    step = max(_BOX // length, 1)
    for start in range(0, len(weights), step):
        part = weights[start : start + step]
        up = 30 - np.frexp(part.max(axis=1))[1]
        total = np.zeros(len(part), np.int64)
        for at in range(0, length, _BOX):
            total += np.ldexp(part[:, at : at + _BOX], up[:, None]).astype(np.int64).sum(axis=1)
        exponent = np.clip(up - np.frexp(total / length)[1], -126, 127)
        found[start : start + step] = np.ldexp(np.float32(1), np.where(total, exponent, 0))
    return found


def _stored(bits: Array, grid: Grid) -> Array:
    """Positive float32, given by their bits, rounded to the type that scales are stored in."""
    mantissa, normal, smallest, largest = grid.storage_limits
    drop = np.minimum(23, 23 - mantissa + np.maximum(0, normal - np.maximum(1, bits >> 23)))
    bits = (bits + ((1 << drop) - 1 >> 1)) >> drop << drop
    bits = np.clip(bits, smallest, largest).astype(np.int32)
    return np.asarray(bits.view(np.float32))


def squared(scales: Array, grid: Grid) -> Array:
    with np.errstate(over="ignore"):
        divisor = (scales * np.float32(grid.over)).astype(np.float64)
    return divisor * divisor


def _steps(x: Array, w: Array | None, candidate: Array, grid: Grid) -> Array:
    """The cost of one candidate for each group, in squared steps."""
    inverse, low, high = candidate[:, :, None]
    with np.errstate(all="ignore"):  # a reciprocal may be infinite, and then the cost is too
        v = x * inverse
        if grid.mantissa:
            v = np.abs(v)
            q = _on_grid(np.minimum(v, np.float32(grid.highest)), grid)
        else:
            q = (np.minimum(np.maximum(v, low), high) + _ROUND) - _ROUND
        t = np.square(v - q)
        if w is not None:
            t *= w
        unit = np.float32(grid.unit)
        return np.asarray(((t + unit) - unit).sum(axis=1, dtype=np.float64))


def _on_grid(x: Array, grid: Grid) -> Array:
    """Magnitudes up to the largest value of a float type rounded to its grid."""
    exponent = np.maximum(x.view(np.int32) & 0x7F800000, (grid.exponent + 127) << 23)
    magic = (exponent + ((23 - grid.mantissa) << 23)).view(np.float32)
    return np.asarray((x + magic) - magic)

"""Which scale and zero point stand for a group of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType, resolve
from qtool.scales.powers import power_of_two
from qtool.scales.ranges import grouped, largest, ranges
from qtool.scales.search import Grid, costs, search
from qtool.spec import SEARCHES, QuantSpec

__all__ = [
    "choose", "cost", "divided", "from_ranges", "grouped", "refined", "settled", "single", "stored",
    "symmetric_levels",
]  # fmt: skip

Array = NDArray[Any]


def choose(
    x: Array,
    spec: QuantSpec,
    storage: DType,
    over: float = 1.0,
    weights: Array | None = None,
    *,
    compiled: bool = False,
) -> tuple[Array, Array | None]:
    """The scale, in its storage type, and the zero point of every group of x.

    The range of a group is [min, max], or by spec.method between percentiles, of its finite values;
    from_ranges() has the rest. Method mse goes on from there, see search(), and optimal from that.
    x: float32, spec's axis counted from the front. over: the global scale. weights: float32 in the
    shape of x, by which squared errors count. compiled: see refined(). Returns arrays of the
    granularity's scale shape.
    """
    low, high = ranges(x, spec)
    scale, zero = from_ranges(low, high, spec, storage, over=over)
    if spec.method not in SEARCHES or not x.size:
        return scale, zero
    groups = grouped(x, spec.granularity)
    shares = None if weights is None else grouped(weights, spec.granularity)
    start = single(scale, zero)
    found = search(groups, *start, spec, storage, over, shares)
    settled_on = settled(found, (scale, zero), np.maximum(-low, high), spec)
    if spec.method == "mse":
        return settled_on
    return refined(groups, settled_on, spec, storage, over, shares, compiled=compiled)


def refined(
    groups: Array,
    start: tuple[Array, Array | None],
    spec: QuantSpec,
    storage: DType,
    over: float,
    weights: Array | None,
    *,
    compiled: bool,
) -> tuple[Array, Array | None]:
    """The very best scales and zero points of groups (G, n), see optimal.py, in the shape of those
    of the start. compiled: by the kernel, which gives the same."""
    from qtool.scales.optimal import refine, refine_compiled

    finite = np.ascontiguousarray(np.where(np.isfinite(groups), groups, np.float32(0)))
    if weights is not None:  # those of a group of zeros are all alike
        is_weighted = weights.any(axis=1, keepdims=True)
        weights = np.ascontiguousarray(np.where(is_weighted, weights, np.float32(1)))
    scale, zero_point = start[0].reshape(-1), None if start[1] is None else start[1].reshape(-1)
    best = refine_compiled if compiled else refine
    scale, zero_point = best(finite, scale, zero_point, spec, storage, over, weights)
    return scale.reshape(start[0].shape), (
        None if zero_point is None else zero_point.reshape(start[0].shape)
    )


def cost(
    groups: Array, spec: QuantSpec, storage: DType, over: float, weights: Array | None = None
) -> float:
    """The squared error, as search() counts it, that groups have with the best scales."""
    finite = np.where(np.isfinite(groups), groups, np.float32(0))
    low, high = finite.min(axis=1).astype(np.float64), finite.max(axis=1).astype(np.float64)
    start = from_ranges(low, high, spec, storage, over=over)
    found = search(groups, *single(*start), spec, storage, over, weights)
    scale, zero_point = single(*settled(found, start, np.maximum(-low, high), spec))
    grid = Grid.of(spec, storage, over)
    return float(costs(finite, scale, zero_point, grid, weights).sum())


def single(scale: Array, zero_point: Array | None) -> tuple[Array, Array]:
    """Copies of scales and zero points as float32 in one dimension, to be searched from."""
    wide = ops.cast(scale.reshape(-1), ops.FLOAT32).copy()
    zero = np.zeros(wide.size) if zero_point is None else zero_point.reshape(-1)
    return wide, zero.astype(np.float32)


def settled(
    found: tuple[Array, Array], start: tuple[Array, Array | None], bound: Array, spec: QuantSpec
) -> tuple[Array, Array | None]:
    """What a search has found, in the types and shapes of what it started from, which stays where
    groups of that largest magnitude might not come back finite otherwise."""
    scale, zero_point = start
    keep = bound >= largest(0, resolve(scale.dtype)) / 4
    chosen = np.where(keep, scale, found[0].reshape(scale.shape).astype(scale.dtype))
    if zero_point is None:
        return chosen, None
    zeros = ops.cast_integers(found[1].reshape(scale.shape).astype(np.float64), spec.dtype)
    return chosen, np.where(keep, zero_point, zeros)


def divided(bound: Array, levels: float, storage: DType) -> Array:
    """bound / levels, computed in float64 and rounded once to the storage type; see stored()."""
    return stored(bound.astype(np.float64) / levels, storage)


def from_ranges(
    low: Array,
    high: Array,
    spec: QuantSpec,
    storage: DType,
    divide: Callable[[Array, float, DType], Array] = divided,
    over: float = 1.0,
) -> tuple[Array, Array | None]:
    """The scale, in its storage type, and the zero point of groups with ranges [low, high].

    symmetric: scale = max(-low, high) / levels; levels = qmax, or 2^(b-1) - 1 for unsigned types,
        whose zero point is 2^(b-1); float8e8m0 scales: see power_of_two(); with negative_scale
        levels = 2^(b-1), and the sign is such that the side of largest magnitude has them
    asymmetric: the range is widened to include 0; scale = (high - low) / (qmax - qmin),
        zero_point = round(qmin - low / scale), saturated
    computed in float64 and rounded once to the storage type (see stored()); a group of zeros gets
    scale 1. The zero point is computed from the stored scale.
    divide: what computes as divided(). over: the global scale, which multiplies them all.
    """
    dtype = spec.dtype
    if spec.semantics == "dynamic":
        found = ops.dynamic_parameters(low.astype(np.float32), high.astype(np.float32), dtype)
        return found[0].reshape(low.shape), found[1].reshape(low.shape)  # also of one zero
    bound = np.maximum(-low, high)
    if spec.symmetric:
        levels = symmetric_levels(dtype)
        zero, middle = None, 0
        if spec.has_zero_point:
            middle = 2 ** (dtype.bits - 1)
            zero = np.full(bound.shape, middle).astype(dtype.numpy)
        last = max(levels, middle - spec.qmin)  # -8 is farther from zero than 7
        if spec.negative_scale:
            levels = last
        if spec.exponent_rule is not None:
            scale = power_of_two(bound, dtype, levels, spec.exponent_rule).astype(storage.numpy)
        else:
            scale = divide(bound, levels * over, storage)
        scale = _finite(scale, bound, last, dtype, over)
        return np.where(high > -low, -scale, scale) if spec.negative_scale else scale, zero
    low, high = low.astype(np.float64), high.astype(np.float64)
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    scale = stored((high - low) / (dtype.qmax - spec.qmin), storage)
    zero_point = np.rint(spec.qmin - low / scale.astype(np.float64))
    zero_point = np.clip(np.where(high > low, zero_point, 0.0), spec.qmin, dtype.qmax)
    farthest = np.maximum(zero_point - spec.qmin, dtype.qmax - zero_point)
    return _finite(scale, bound, farthest, dtype), ops.cast_integers(zero_point, dtype)


def symmetric_levels(dtype: DType) -> float:
    """Steps from the middle of a symmetric grid to the last code that both of its sides have."""
    return 2.0 ** (dtype.bits - 1) - 1 if dtype.kind == "uint" else dtype.qmax


def _finite(scale: Array, bound: Array, farthest: Any, dtype: DType, over: float = 1.0) -> Array:
    """Scales with which every group comes back finite, in float32 and in a 16-bit type of the
    scale's own that holds the group.

    bound: largest magnitude of the group; farthest: steps from zero of the last code. Where the
    code of bound times the scale overflows, the next smaller scale that does not takes its place.
    """
    storage = resolve(scale.dtype)
    lowest_limit = largest(0, storage)
    if bound.max(initial=0.0) < lowest_limit / 4:
        return scale
    bound = bound.astype(np.float64)
    limit = largest(bound, storage)
    while True:
        wide = scale.astype(np.float64) * over
        code = bound / wide
        code = np.rint(code) if dtype.is_integer else ops.round_to_grid(code, dtype)
        code = np.minimum(code, farthest)
        too_large = wide * code > limit
        if not too_large.any():
            return scale
        smaller = stored(limit / np.maximum(code, 1) / over, storage)
        above = smaller.astype(np.float64) * over * code > limit
        smaller = (smaller.view(f"u{smaller.itemsize}") - above).view(smaller.dtype)
        scale = np.asarray(np.where(too_large, smaller, scale))


def stored(scale: Array, storage: DType) -> Array:
    """float64 scales >= 0 rounded once to their storage type: to nearest, float8e8m0 up to the
    next power of two. Too large or too small ones become the largest or smallest positive value,
    0 becomes 1."""
    if storage.name == "float8e8m0":
        mantissa, exponent = np.frexp(scale)
        exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -127, 127)
        rounded = np.ldexp(1.0, exponent)
    else:
        smallest = float(storage.limits.smallest_subnormal)
        rounded = scale if storage == ops.FLOAT32 else ops.round_to_grid(scale, storage)
        if smallest <= rounded.min(initial=smallest) and rounded.max(initial=0.0) <= storage.qmax:
            return np.asarray(rounded.astype(storage.numpy))
        rounded = np.clip(rounded, smallest, storage.qmax)
    return np.asarray(np.where(scale == 0, 1.0, rounded).astype(storage.numpy))

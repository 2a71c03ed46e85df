"""The scale, and zero point, of least squared error among all that the storage type holds.

E(s, w) as in squares.py; x: values of positive weight; s: the stored scale times `over`. Only these
scales need to be looked at; the proofs go element by element, and float64 sums of non-negative
terms in one order keep their order, so they hold for the computed E.

Rounding. Halfway between neighbouring codes lies a float32 number, and so does x / s, divided in
float32, on the side of it where the exact quotient lies, or on it. So the code of x is the
nearest number of the window, or on such a halfway point one of the two nearest, up to rounding.

Too large. Let all codes at s be at most half of the window's ends (in an asymmetric grid:
highest - lowest code <= half of the width; another zero point has them doubled). If s / 2 can
be stored, E(s / 2) <= E(s): the quotients at s / 2 are exactly twice as large, the doubled codes
are in the grid and stand for the same values, and what is chosen instead of one is nearer to x:
where 2 x / s rounds to 2 k + 1, x / s is at least k + 1/4, a float32 number; float types double
their spacing with their values, and below the normal ones a tie at s / 2 goes to the even, that is
the doubled, code. By induction the smallest best scale is at most
    symmetric: max(highest x / t(high), -lowest x / t(low)), t(c): the quotient from which on
        codes are beyond half of c
    asymmetric: (highest - lowest x) / floor(width / 2), as highest - lowest code is at most
        (highest - lowest x) / s + 1 and has to be floor(width / 2) + 1
or at most the largest scale whose half cannot be stored (a subnormal one). Beyond 2 max|x| / c, c
the smallest positive code, all codes are 0, which no smaller scale makes worse.

Too small. Clipping alone costs sum of max(0, x - high s)^2 and the same below, which grows as s
falls: where either exceeds an error that is known, s and w are out. Asymmetric: with a and b the
smallest reach of the codes above and below 0 that does not, high s >= a and -low s >= b, so
width s >= a + b. Also E(s, w) >= E(s, no ends), which rules out s for all zero points at once;
where no x is clipped they are equal.

Scales under which a value would come back infinite (see ranges) are no candidates. Float32
scales are too many: see breakpoints.py.

Cost: elements times scales between the bounds, which are an octave or two apart: of 128 bfloat16
or 1024 float16 scales each, about 10 ns per element and scale; asymmetric, up to 4 times that. The
kernel takes 0.1 ns, and looks at fewer of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.errors import SpecError
from qtool.scales.bounds import bounds, unclipped, windows
from qtool.scales.breakpoints import cell_bits, middles, sweep
from qtool.scales.squares import UNCLIPPED, Best, Grid, Groups, spread
from qtool.spec import QuantSpec

Array = NDArray[Any]

_ELEMENTS = 1 << 16  # of groups that are refined together


def check(spec: QuantSpec, storage: DType) -> None:
    """Raise SpecError for what has no optimum that can be found, or another definition of it."""
    if spec.dtype.is_integer and spec.dtype.bits == 16 and storage == ops.FLOAT32:
        raise SpecError(
            "method",
            f"optimal float32 scales of {spec.dtype} take 32768 breakpoints per element",
            "store the scales as float16 or bfloat16, or use mse",
        )
    if spec.semantics != "onnx" and spec.has_zero_point:
        raise SpecError(
            "method",
            f"optimal zero points are those of ONNX, not of {spec.semantics}",
            "use another method",
        )
    if not spec.saturate or spec.precision not in (None, ops.FLOAT32):
        thing = "precision" if spec.saturate else "saturate"
        raise SpecError(thing, "optimal saturates and divides in float32", "leave it out")


def refine(
    values: Array,
    scale: Array,
    zero_point: Array | None,
    spec: QuantSpec,
    storage: DType,
    over: float,
    weights: Array | None,
) -> tuple[Array, Array | None]:
    """The scale and zero point of least error of every group; of equal ones the smaller scale
    (by magnitude, the positive one of two), then the smallest zero point that clips least.

    values: float32 (G, n). scale (G,), of the storage type, and zero_point (G,) or None: any good
    start, which stays where all values or weights are 0. over: the global scale. weights: float32
    (G, n), finite and >= 0, of the squared errors.
    """
    grid = Grid(spec)
    divisor, window = _started(scale, zero_point, grid, spec, over)
    _improve(values, weights, divisor, window, grid, storage, over)
    return _finished(divisor, window, grid, storage, over, zero_point, spec)


def refine_compiled(
    values: Array,
    scale: Array,
    zero_point: Array | None,
    spec: QuantSpec,
    storage: DType,
    over: float,
    weights: Array | None,
) -> tuple[Array, Array | None]:
    """refine() to the bit, by the kernel where float32 screening holds; arrays in C order."""
    from qtool.kernels import refiner

    grid = Grid(spec)
    divisor, window = _started(scale, zero_point, grid, spec, over)
    cells, table = 0, _divisors(storage, over)
    if storage == ops.FLOAT32:
        cells = cell_bits(grid)
        table = middles(np.arange(0x7F800000 >> cells, dtype=np.int32), grid)
    unhalved = 0.0 if cells else _unhalved(table)
    done = refiner.refine(
        values, weights, divisor, window, table, cells, grid.numbers(unhalved),
        grid.width if grid.shifts else 0, grid.form,
    )  # fmt: skip
    rest = np.flatnonzero(~done)
    if rest.size:
        some = None if weights is None else weights[rest]
        scales, windows_ = divisor[rest], window[rest]
        _improve(values[rest], some, scales, windows_, grid, storage, over)
        divisor[rest], window[rest] = scales, windows_
    return _finished(divisor, window, grid, storage, over, zero_point, spec)


def _started(
    scale: Array, zero_point: Array | None, grid: Grid, spec: QuantSpec, over: float
) -> tuple[Array, Array]:
    """Scales > 0, times over, as float32, and int32 windows of a start."""
    divisor = scale.astype(np.float32) * np.float32(over)
    if grid.shifts and zero_point is not None:
        return divisor, zero_point.astype(np.int32) - np.int32(spec.qmin)
    return np.abs(divisor), (divisor < 0) % np.int32(grid.count)


def _finished(
    divisor: Array, window: Array, grid: Grid, storage: DType, over: float,
    zero_point: Array | None, spec: QuantSpec,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Scales in their storage type, whose products with over are the divisors, and zero points."""
    scale = divisor.astype(np.float64) / over
    if grid.shifts:
        zero_point = ops.cast_integers(window + spec.qmin, spec.dtype)
    else:
        scale = np.where(window == 1, -scale, scale)
    return scale.astype(storage.numpy), zero_point


def _improve(
    values: Array, weights: Array | None, divisor: Array, window: Array, grid: Grid,
    storage: DType, over: float,
) -> None:  # fmt: skip
    """Put the best scales and windows in place of others."""
    table = _divisors(storage, over)
    step = max(1, _ELEMENTS // max(1, values.shape[1]))
    for at in range(0, len(values), step):
        part = slice(at, at + step)
        groups = Groups(values[part], None if weights is None else weights[part], grid, storage)
        best = Best(groups, divisor[part], window[part])
        if storage == ops.FLOAT32:
            sweep(groups, best)
        else:
            _enumerate(groups, best, table)


def _divisors(storage: DType, over: float) -> Array:
    """All positive values of a storage type of up to 16 bits, times over, as float32."""
    size = storage.numpy.itemsize
    if size > 2:
        return np.empty(0, np.float32)
    codes = np.arange(1 << (8 * size), dtype=f"u{size}").view(storage.numpy)
    with np.errstate(over="ignore", invalid="ignore"):
        values = codes.astype(np.float32) * np.float32(over)
    return np.sort(values[(values > 0) & (values < np.inf)])


def _unhalved(table: Array) -> float:
    """The largest number of a table whose half is not in it."""
    table = table.astype(np.float64)
    return float(table[~np.isin(table / 2, table)].max())


def _enumerate(groups: Groups, best: Best, table: Array) -> None:
    """Offer all scales of the table between the bounds."""
    unhalved = _unhalved(table)
    if groups.grid.shifts:
        _enumerate_zero_points(groups, best, table, unhalved)
        return
    for window in range(groups.grid.count):
        low, high = bounds(groups, best, window, unhalved)
        which, scale = _between(table, low, high)
        best.offer(which, groups.errors(which, scale, window), scale, window)


def _between(table: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The values of the table in every [low, high], at least one: numbers of groups, values."""
    first = np.minimum(np.searchsorted(table, low), table.size - 1)
    last = np.maximum(np.searchsorted(table, high, "right"), first + 1)
    which, number = spread(np.where(high > 0, last - first, 0))
    return which, table[first[which] + number]


def _enumerate_zero_points(groups: Groups, best: Best, table: Array, unhalved: float) -> None:
    low, high = bounds(groups, best, UNCLIPPED, unhalved)
    which, scale = _between(table, low, high)
    error = groups.errors(which, scale, UNCLIPPED)
    keep = error <= best.error[which]
    which, scale, error = which[keep], scale[keep], error[keep]
    fits, window = unclipped(groups, which, scale)
    best.offer(which[fits], error[fits], scale[fits], window[fits])
    keep = ~fits & (error <= best.error[which])
    which, scale = which[keep], scale[keep]
    pair, window = windows(groups, best, which, scale)
    which, scale = which[pair], scale[pair]
    best.offer(which, groups.errors(which, scale, window), scale, window)

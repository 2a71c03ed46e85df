"""The counts, extremes and sums of stats.Stats, from elements and their reconstructions.

The order of summation is the one that stats.py states.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.groups import ordered

ROWS = 16  # of LANES elements, whose sums stay in registers meanwhile

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)


@inlined
def _add_sums(
    x: Pointer, at: int, x_hat: Pointer, x_hat_at: int, rows: int, lanes: Pointer
) -> None:
    """Add x^2, e^2, e, x * x_hat and x_hat^2 to five times LANES lanes, row by row."""
    for row in range(rows // ROWS):
        _add_rows(x, at + row * ROWS * LANES, x_hat, x_hat_at + row * ROWS * LANES, ROWS, lanes)
    for row in range(rows // ROWS * ROWS, rows):
        _add_rows(x, at + row * LANES, x_hat, x_hat_at + row * LANES, 1, lanes)


@inlined
def _add_rows(
    x: Pointer, at: int, x_hat: Pointer, x_hat_at: int, rows: int, lanes: Pointer
) -> None:
    for lane in range(LANES):
        xx, ee, e = lanes[lane], lanes[LANES + lane], lanes[2 * LANES + lane]
        xy, yy = lanes[3 * LANES + lane], lanes[4 * LANES + lane]
        for row in range(rows):
            a = np.float64(x[at + row * LANES + lane])
            b = np.float64(x_hat[x_hat_at + row * LANES + lane])
            error = b - a
            xx += a * a
            ee += error * error
            e += error
            xy += a * b
            yy += b * b
        lanes[lane], lanes[LANES + lane], lanes[2 * LANES + lane] = xx, ee, e
        lanes[3 * LANES + lane], lanes[4 * LANES + lane] = xy, yy


@inlined
def fold(lanes: Pointer, sums: Pointer, at: int) -> None:
    """The five sums of the lanes, by halves, into sums[at : at + 5]; the lanes become 0."""
    for k in range(5):
        width = LANES // 2
        while width:
            for lane in range(width):
                lanes[LANES * k + lane] += lanes[LANES * k + width + lane]
            width //= 2
        sums[at + k] = lanes[LANES * k]
    for i in range(5 * LANES):
        lanes[i] = 0.0


@inlined
def _survey(x: Pointer, at: int, n: int, x_hat: Pointer, found: Pointer) -> None:
    """What vectorizes of the figures of finite x.

    found: zeros, other x whose x_hat is 0, bits of the largest |x_hat - x| rounded to float32, and
    the smallest and largest x as ordered().
    """
    zeros, flushed, error = np.int32(0), np.int32(0), np.int32(0)
    low, high = _MAGNITUDE, np.int32(-0x80000000)
    for i in range(n):
        a, b = np.float32(x[at + i]), np.float32(x_hat[i])
        is_zero = np.int32(a == np.float32(0))
        vanished = np.int32(np.int32(b == np.float32(0)) & np.int32(is_zero ^ np.int32(1)))
        zeros = np.int32(zeros + is_zero)
        flushed = np.int32(flushed + vanished)
        e = np.int32(np.float32(b - a).view(np.int32) & _MAGNITUDE)
        error = e if e > error else error
        key = ordered(a, _MAGNITUDE)
        low = key if key < low else low
        high = key if key > high else high
    found[0], found[1], found[2], found[3], found[4] = zeros, flushed, error, low, high


@inlined
def _survey_finite(
    x: Pointer, at: int, n: int, x_hat: Pointer, found: Pointer, counts: Pointer, clean: Pointer
) -> None:
    """_survey() of the finite ones among x, the others counted; clean[:n]: x with 0 in their place,
    and so x_hat."""
    zeros, flushed, error = np.int32(0), np.int32(0), np.int32(0)
    low, high = _MAGNITUDE, np.int32(-0x80000000)
    for i in range(n):
        a = np.float32(x[at + i])
        clean[i] = a
        if not np.isfinite(a):
            counts[4 if np.isnan(a) else 5] += 1
            clean[i] = np.float32(0)
            x_hat[i] = np.float32(0)
            continue
        b = np.float32(x_hat[i])
        zeros = np.int32(zeros + np.int32(a == 0))
        flushed = np.int32(flushed + np.int32(b == 0 and a != 0))
        error = max(error, np.int32(np.float32(b - a).view(np.int32) & _MAGNITUDE))
        key = ordered(a, _MAGNITUDE)
        low, high = min(low, key), max(high, key)
    found[0], found[1], found[2], found[3], found[4] = zeros, flushed, error, low, high


@inlined
def _find_worst(
    x: Pointer,
    at: int,
    n: int,
    x_hat: Pointer,
    largest: np.int32,
    start: int,
    worst: Pointer,
    counts: Pointer,
) -> None:
    """worst[0] = the largest |x_hat - x| so far, counts[6] = the number of its first element.

    largest: bits of the largest error here, rounded to float32. Rounding is monotonic: where it is
    below the worst one, rounded, nothing here is worse.
    """
    if np.int32(largest).view(np.float32) < np.float32(worst[0]):
        return
    bound, more = worst[0], np.int32(0)
    for i in range(n):
        e = np.abs(np.float64(x_hat[i]) - np.float64(x[at + i]))
        more = np.int32(more + np.int32(e > bound))
    if not more:
        return
    for i in range(n):
        e = np.abs(np.float64(x_hat[i]) - np.float64(x[at + i]))
        if e > worst[0] and np.isfinite(x[at + i]):
            worst[0] = e
            counts[6] = start + i


@inlined
def add_figures(
    x: Pointer,
    at: int,
    n: int,
    x_hat: Pointer,
    start: int,
    counts: Pointer,
    bounds: Pointer,
    worst: Pointer,
    lanes: Pointer,
    found: Pointer,
    clean: Pointer,
) -> None:
    """The figures of one part, x[at : at + n], into what is there already.

    start: number of its first element. counts: clipped low, clipped high (by the quantizing
    kernel), zeros, flushed, NaN, Inf, and the number of the element of largest error; bounds:
    smallest and largest x as ordered(); worst: the largest |e|; lanes: of the sums. x_hat, clean:
    LANES elements longer than the part.
    """
    finite, finite_at = x, at
    _survey(x, at, n, x_hat, found)
    if found[4] >= _INF or found[3] <= np.int32(_INF ^ np.int32(-1)):
        _survey_finite(x, at, n, x_hat, found, counts, clean)
        finite, finite_at = clean, 0
    counts[2] += found[0]
    counts[3] += found[1]
    bounds[0] = min(bounds[0], found[3])
    bounds[1] = max(bounds[1], found[4])
    _find_worst(x, at, n, x_hat, found[2], start, worst, counts)
    rows = n // LANES
    _add_sums(finite, finite_at, x_hat, 0, rows, lanes)
    rest = rows * LANES
    if rest < n:
        for i in range(rest, rest + LANES):
            clean[i] = finite[finite_at + i] if i < n else np.float32(0)
            x_hat[i] = x_hat[i] if i < n else np.float32(0)
        _add_rows(clean, rest, x_hat, rest, 1, lanes)

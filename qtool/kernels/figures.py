"""The counts, extremes and sums of stats.Stats, from elements and their reconstructions.

The order of summation is the one that stats.py states.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Array, compiled
from qtool.kernels.groups import has_nonfinite

SUMS = 5
_STEP = 4 * LANES


@compiled
def add_sums(x: Array, x_hat: Array, lanes: Array) -> None:
    """Add x^2, e^2, e, x * x_hat and x_hat^2 to five times 16 lanes, row by row of 16 elements."""
    whole = x.size // _STEP * _STEP
    for row in range(0, whole, _STEP):
        _add_rows(x[row : row + _STEP], x_hat[row : row + _STEP], lanes)
    for row in range(whole, x.size, LANES):
        _add_row(x[row : row + LANES], x_hat[row : row + LANES], lanes)


@compiled
def _add_rows(x: Array, x_hat: Array, lanes: Array) -> None:
    """Four rows, one after the other in each lane, whose sums stay in registers meanwhile."""
    for lane in range(LANES):
        xx, ee, e, xy, yy = (
            lanes[lane], lanes[16 + lane], lanes[32 + lane], lanes[48 + lane], lanes[64 + lane]
        )  # fmt: skip
        for row in range(4):
            a = np.float64(x[LANES * row + lane])
            b = np.float64(x_hat[LANES * row + lane])
            error = b - a
            xx += a * a
            ee += error * error
            e += error
            xy += a * b
            yy += b * b
        lanes[lane], lanes[16 + lane], lanes[32 + lane] = xx, ee, e
        lanes[48 + lane], lanes[64 + lane] = xy, yy


@compiled
def _add_row(x: Array, x_hat: Array, lanes: Array) -> None:
    for lane in range(LANES):
        a, b = np.float64(x[lane]), np.float64(x_hat[lane])
        e = b - a
        lanes[lane] += a * a
        lanes[16 + lane] += e * e
        lanes[32 + lane] += e
        lanes[48 + lane] += a * b
        lanes[64 + lane] += b * b


@compiled
def fold(lanes: Array, out: Array) -> None:
    """The sums of the lanes, by halves."""
    for k in range(5):
        width = 8
        while width:
            for lane in range(width):
                lanes[16 * k + lane] += lanes[16 * k + width + lane]
            width //= 2
        out[k] = lanes[16 * k]


@compiled
def _count(x: Array, x_hat: Array, error: Array, counts: Array) -> None:
    """Count zeros and other x whose x_hat is 0; error = |x_hat - x|, rounded to float32."""
    zero, flushed = np.int32(0), np.int32(0)
    for i in range(x.size):
        is_zero = np.int32(x[i] == np.float32(0))
        vanished = np.int32(x_hat[i] == np.float32(0)) & np.int32(is_zero ^ np.int32(1))
        zero = np.int32(zero + is_zero)
        flushed = np.int32(flushed + np.int32(vanished))
        error[i] = np.abs(np.float32(x_hat[i] - x[i]))
    counts[2] += zero
    counts[3] += flushed


@compiled
def _bound(bits: Array, error_bits: Array, bounds: Array) -> None:
    """Widen bounds by x and by the errors, all as int32 bits.

    bounds: smallest x, largest x and largest error as integers that are ordered like the floats;
    the map between the two is its own inverse.
    """
    low, high, largest = bounds[0], bounds[1], bounds[2]
    for i in range(bits.size):
        b = np.int32(bits[i])
        key = np.int32(b ^ np.int32(np.int32(b >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        low = key if key < low else low
        high = key if key > high else high
        e = np.int32(error_bits[i])
        largest = e if e > largest else largest
    bounds[0], bounds[1], bounds[2] = low, high, largest


@compiled
def _finite_part(
    x: Array,
    x_hat: Array,
    error: Array,
    counts: Array,
    bounds: Array,
    clean: Array,
    clean_hat: Array,
) -> None:
    """_count() and _bound() of a chunk with NaN or Inf, which are counted and left out; clean and
    clean_hat get 0 in their place."""
    for i in range(x.size):
        clean[i] = x[i]
        clean_hat[i] = x_hat[i]
        if np.isfinite(x[i]):
            one = slice(i, i + 1)
            _count(x[one], x_hat[one], error[one], counts)
            _bound(x[one].view(np.int32), error[one].view(np.int32), bounds)
        else:
            counts[4 if np.isnan(x[i]) else 5] += 1
            clean[i] = np.float32(0)
            clean_hat[i] = np.float32(0)


@compiled
def add_figures(
    x: Array,
    x_hat: Array,
    start: int,
    finite: bool,
    sums: Array,
    counts: Array,
    bounds: Array,
    worst: Array,
) -> None:
    """The figures of one chunk: its sums (5), and into what is there already:

    counts: clipped low, clipped high (by the quantizing kernel), zeros, flushed, NaN, Inf, and the
    index of the largest error; bounds: see _bound(); worst: largest |e|.
    finite: x is known to have no NaN and no Inf.
    """
    n = x.size
    clean, clean_hat = x, x_hat
    error = np.empty(n, np.float32)
    bounds[2] = 0
    if not finite and has_nonfinite(x.view(np.int32)):
        clean, clean_hat = np.empty(n, np.float32), np.empty(n, np.float32)
        _finite_part(x, x_hat, error, counts, bounds, clean, clean_hat)
    else:
        _count(x, x_hat, error, counts)
        _bound(x.view(np.int32), error.view(np.int32), bounds)
    lanes = np.zeros(SUMS * LANES)
    whole = n // LANES * LANES
    add_sums(clean[:whole], clean_hat[:whole], lanes)
    if whole < n:
        rest, rest_hat = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
        rest[: n - whole] = clean[whole:]
        rest_hat[: n - whole] = clean_hat[whole:]
        add_sums(rest, rest_hat, lanes)
    fold(lanes, sums)
    # rounding is monotonic: no chunk whose largest error rounds to less can hold the largest
    if bounds[2:].view(np.float32)[0] >= np.float32(worst[0]):
        for i in range(n):
            e = np.abs(np.float64(x_hat[i]) - np.float64(x[i]))
            if e > worst[0] and np.isfinite(x[i]):
                worst[0] = e
                counts[6] = start + i

"""Sums of squared errors of one group under given scales and windows; see scales.squares.

Values and weights: padded with zeros to whole rows of LANES. mantissa: of a float type's numbers,
or negative for integers; emin: bits of its smallest normal number as float32.
"""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels import CHUNK, LANES, WIDTH
from qtool.kernels.compiled import Pointer, inlined

TOGETHER = 256  # elements that are summed in one go

_EXPONENT = np.int32(0x7F800000)
_HALF = np.int32(0x400000)


@inlined
def rounded(quotient: np.float32, mantissa: np.int32, emin: np.int32) -> np.float32:
    """The nearest number of the grid continued without end.

    Floats: 1.5 * 2^23 times the spacing around the quotient, added and subtracted again, rounds.
    """
    if mantissa < 0:
        return np.float32(np.rint(quotient))
    bits = np.int32(np.float32(quotient).view(np.int32) & _EXPONENT)
    bits = bits if bits > emin else emin
    place = np.int32(np.int32(np.int32(23) - mantissa) << np.int32(23))
    magic = np.int32(np.int32(bits + place) + _HALF).view(np.float32)
    return np.float32(np.float32(quotient + magic) - magic)


@inlined
def _squared(
    x: np.float32,
    inverse: np.float32,
    scale: np.float32,
    low: np.float32,
    high: np.float32,
    mantissa: np.int32,
    emin: np.int32,
) -> np.float32:
    k = rounded(np.float32(x * inverse), mantissa, emin)
    k = k if k > low else low
    k = k if k < high else high
    error = np.float32(x - np.float32(k * scale))
    return np.float32(error * error)


@inlined
def screen(
    x: Pointer,
    weights: Pointer,
    weighted: bool,
    n: int,
    scale: Pointer,
    inverse: Pointer,
    low: Pointer,
    high: Pointer,
    mantissa: np.int32,
    emin: np.int32,
    part: Pointer,
    out: Pointer,
    at: int,
) -> None:
    """out[at : at + WIDTH] = errors in float32, with reciprocals, of as many scales.

    weighted, mantissa, emin: as constants. part: WIDTH sums of a part of the elements.
    """
    for c in range(WIDTH):
        out[at + c] = np.float32(0)
    for begin in range(0, n, TOGETHER):
        for c in range(WIDTH):
            part[c] = np.float32(0)
        for d in range(begin, min(begin + TOGETHER, n), 4):
            x0, x1, x2, x3 = x[d], x[d + 1], x[d + 2], x[d + 3]
            w0, w1, w2, w3 = weights[d], weights[d + 1], weights[d + 2], weights[d + 3]
            for c in range(WIDTH):
                r, s, a, b = inverse[c], scale[c], low[c], high[c]
                e0 = _squared(x0, r, s, a, b, mantissa, emin)
                e1 = _squared(x1, r, s, a, b, mantissa, emin)
                e2 = _squared(x2, r, s, a, b, mantissa, emin)
                e3 = _squared(x3, r, s, a, b, mantissa, emin)
                if weighted:
                    e0, e1 = np.float32(e0 * w0), np.float32(e1 * w1)
                    e2, e3 = np.float32(e2 * w2), np.float32(e3 * w3)
                total = np.float32(part[c] + e0)
                total = np.float32(total + e1)
                total = np.float32(total + e2)
                part[c] = np.float32(total + e3)
        for c in range(WIDTH):
            out[at + c] = np.float32(out[at + c] + part[c])


@inlined
def exact(
    x: Pointer,
    weights: Pointer,
    weighted: bool,
    n: int,
    scale: np.float32,
    low: np.float32,
    high: np.float32,
    mantissa: np.int32,
    emin: np.int32,
    lanes: Pointer,
) -> float:
    """The error as scales.squares defines it, to the last bit."""
    total = 0.0
    for begin in range(0, n, CHUNK):
        for lane in range(LANES):
            lanes[lane] = 0.0
        for row in range(begin, min(begin + CHUNK, n), LANES):
            for lane in range(LANES):
                value = x[row + lane]
                k = rounded(np.float32(value / scale), mantissa, emin)
                k = k if k > low else low
                k = k if k < high else high
                error = np.float64(value) - np.float64(k) * np.float64(scale)
                square = error * error
                if weighted:
                    square = square * np.float64(weights[row + lane])
                lanes[lane] += square
        width = LANES // 2
        while width:
            for lane in range(width):
                lanes[lane] += lanes[width + lane]
            width //= 2
        total += lanes[0]
    return total


@inlined
def _clipping(
    x: Pointer, shares: Pointer, n: int, sign: np.float32, end: np.float32, sums: Pointer
) -> float:
    """sum of w max(0, sign * x - end)^2, in float32."""
    for lane in range(LANES):
        sums[lane] = np.float32(0)
    for row in range(0, n, LANES):
        for lane in range(LANES):
            over = np.float32(np.float32(x[row + lane] * sign) - end)
            over = over if over > np.float32(0) else np.float32(0)
            square = np.float32(np.float32(over * over) * shares[row + lane])
            sums[lane] = np.float32(sums[lane] + square)
    width = LANES // 2
    while width:
        for lane in range(width):
            sums[lane] = np.float32(sums[lane] + sums[width + lane])
        width //= 2
    return np.float64(sums[0])


@inlined
def reach(
    x: Pointer,
    shares: Pointer,
    weighted: int,
    n: int,
    sign: np.float32,
    top: np.float32,
    error: float,
    sums: Pointer,
) -> np.float32:
    """Where codes end that clip values by more than the error; see scales.squares.reach().

    The largest value alone, of weight 1, says about as much of a short group.
    """
    outside, inside = np.float32(0), top
    if not weighted:
        alone = np.float64(top) - math.sqrt(error) * (1.0 + 2.0**-20)
        outside = np.float32(max(alone, 0.0) * (1.0 - 2.0**-20))
    limit = error * (1.001 + 1e-8 * n)
    for _ in range(6 if weighted or n > 128 else 0):
        middle = np.float32(np.float32(outside + inside) * np.float32(0.5))
        if _clipping(x, shares, n, sign, middle, sums) > limit:
            outside = middle
        else:
            inside = middle
    return outside

"""A group of values and weights, where the kernel of optimal scales wants them."""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Pointer, inlined

_MAGNITUDE, _SIGN = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
_INF = np.int32(0x7F800000)
_LARGEST, _SMALLEST = np.float32(2.0**40), np.float32(2.0**-40)


@inlined
def load(
    x: Pointer,
    given: Pointer,
    weighted: int,
    at: int,
    n: int,
    rows: int,
    values: Pointer,
    weights: Pointer,
    shares: Pointer,
    value_bits: Pointer,
    lanes: Pointer,
) -> tuple[np.float32, np.float32, float, float, bool]:
    """A group, padded, with its weights, also relative to the largest one; returns the largest -x
    and x of positive weight, the sum of w x^2, 1 / the largest weight, and whether float32
    screening holds for all of it."""
    for i in range(n):
        values[i] = x[at + i]
    heaviest = np.float32(1)
    if weighted:
        heaviest = np.float32(0)
        for i in range(n):
            w = np.float32(given[at + i])
            weights[i] = w
            heaviest = w if w > heaviest else heaviest
    unit = 1.0 / np.float64(heaviest) if heaviest > np.float32(0) else 0.0
    low, high, largest = np.int32(0), np.int32(0), np.int32(0)
    fits = True
    if weighted:
        for i in range(n):
            share = np.float32(np.float64(weights[i]) * unit)
            shares[i] = share
            bits = np.int32(value_bits[i])
            size = np.int32(bits & _MAGNITUDE)
            largest = size if size > largest else largest
            if share > np.float32(0):
                high = bits if bits > high else high
                negative = np.int32(bits ^ _SIGN)
                low = negative if negative > low else low
            if share == np.float32(0) and weights[i] > np.float32(0):
                fits = False
    else:
        for i in range(n):
            bits = np.int32(value_bits[i])
            high = bits if bits > high else high
            negative = np.int32(bits ^ _SIGN)
            low = negative if negative > low else low
        largest = high if high > low else low
    for lane in range(LANES):
        lanes[lane] = 0.0
    for row in range(0, rows, LANES):
        for lane in range(LANES):
            v = np.float64(values[row + lane])
            lanes[lane] += np.float64(shares[row + lane]) * (v * v)
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[width + lane]
        width //= 2
    square = np.float64(lanes[0])
    below, above = np.int32(low).view(np.float32), np.int32(high).view(np.float32)
    absmax = below if below > above else above
    if np.int32(largest).view(np.float32) > _LARGEST or np.int32(largest) > _INF:
        fits = False
    if largest > np.int32(0) and absmax < _SMALLEST:
        fits = False
    if square < 2.0**-40 * np.float64(absmax) * np.float64(absmax):
        fits = False
    return below, above, square, unit, fits

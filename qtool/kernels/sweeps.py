"""The minima of a group's error among neighbouring float32 scales; see scales.breakpoints."""

from __future__ import annotations

import numpy as np

from qtool.kernels import AROUND, MINIMA
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.squares import rounded

_MARGIN = 1e-9
_LARGEST = np.int32(0x7F7FFFFF)


@inlined
def sweep(
    x: Pointer,
    shares: Pointer,
    n: int,
    left: np.float32,
    right: np.float32,
    low: np.float32,
    high: np.float32,
    mantissa: np.int32,
    emin: np.int32,
    square: float,
    least: float,
    events: Pointer,
    room: int,
    out: Pointer,
) -> int:
    """Candidates in [left, right] into out, and their number; -1 where there are too many, or more
    breakpoints than there is room for.

    square: sum of w x^2; least: the least error known. events: places, in units of left, and steps
    of a and b, of the breakpoints from right to left.
    """
    unit = np.float64(left) * np.float64(left) / square
    a, b, count = 0.0, 0.0, 0
    for d in range(n):
        value = np.float32(x[d])
        last = high if value > np.float32(0) else np.float32(-low)
        size = np.float32(np.abs(value))
        code = rounded(np.float32(size / right), mantissa, emin)
        outer = rounded(np.float32(size / left), mantissa, emin)
        code = code if code < last else last
        outer = outer if outer < last else last
        share, quotient = np.float64(shares[d]) * unit, np.float64(size) / np.float64(left)
        a += share * quotient * np.float64(code)
        b += share * np.float64(code) * np.float64(code)
        while code < outer:
            if count == room:
                return -1
            after = np.float32(code + _spacing(code, mantissa, emin))
            k, k1 = np.float64(code), np.float64(after)
            events[3 * count] = quotient / (0.5 * (k + k1))
            events[3 * count + 1] = share * quotient * (k1 - k)
            events[3 * count + 2] = share * (k1 * k1 - k * k)
            count += 1
            code = after
    _sort(events, count)
    found = 0
    start: float = np.float64(right) / np.float64(left)
    for i in range(count + 1):
        end = events[3 * i] if i < count else 1.0
        t = a / b if b > 0.0 else 0.0
        t = min(max(t, end), start)
        if 1.0 - 2.0 * t * a + t * t * b - _MARGIN <= least * (1.0 + _MARGIN) / square:
            if found == (2 * AROUND + 1) * MINIMA:
                return -1
            found = _around(np.float32(t * np.float64(left)), out, found)
        if i < count:
            start = end
            a += events[3 * i + 1]
            b += events[3 * i + 2]
    return found


@inlined
def _spacing(code: np.float32, mantissa: np.int32, emin: np.int32) -> np.float32:
    """From a code >= 0 to the next one."""
    if mantissa < 0:
        return np.float32(1)
    bits = np.int32(np.float32(code).view(np.int32) & np.int32(0x7F800000))
    bits = bits if bits > emin else emin
    return np.int32(bits - np.int32(mantissa << np.int32(23))).view(np.float32)


@inlined
def _sort(events: Pointer, count: int) -> None:
    """Breakpoints in falling order of places (Shell's sort, with Knuth's gaps)."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap:
        for at in range(gap, count):
            place, a, b = events[3 * at], events[3 * at + 1], events[3 * at + 2]
            i = at
            while i >= gap and events[3 * (i - gap)] < place:
                for k in range(3):
                    events[3 * i + k] = events[3 * (i - gap) + k]
                i -= gap
            events[3 * i], events[3 * i + 1], events[3 * i + 2] = place, a, b
        gap //= 3


@inlined
def _around(scale: np.float32, out: Pointer, found: int) -> int:
    bits = np.float32(scale).view(np.int32)
    for step in range(-AROUND, AROUND + 1):
        near = np.int32(bits + np.int32(step))
        near = near if near > np.int32(1) else np.int32(1)
        near = near if near < _LARGEST else _LARGEST
        out[found + step + AROUND] = np.int32(near).view(np.float32)
    return found + 2 * AROUND + 1

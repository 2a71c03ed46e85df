"""The minima of a group's error among neighbouring float32 scales; see scales.breakpoints.

As functions of u = s / right - 1, relative to the sum of w x^2, errors are c + g u + b u^2. state:
c, g and b at the right end. events: places, in u, and steps of b, of the breakpoints from right to
left.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import AROUND, LANES, MINIMA
from qtool.kernels.compiled import Pointer, inlined

# In state: sums by lanes, and a row's codes at the right and at the left end.
_LANE_SUMS, _INNER, _OUTER = 16, 64, 80
_LARGEST = np.int32(0x7F7FFFFF)
_EXPONENT = np.int64(0x7FF0000000000000)
_HALF = np.int64(0x0008000000000000)


@inlined
def breakpoints(
    x: Pointer,
    weights: Pointer,
    n: int,
    left: np.float32,
    right: np.float32,
    low: np.float32,
    high: np.float32,
    mantissa: np.int32,
    emin: np.int32,
    scaling: float,
    state: Pointer,
    events: Pointer,
    room: int,
) -> int:
    """Find those in [left, right]; returns how many, or -1 where there is no room for them.

    scaling: 1 / sum of w x^2.
    """
    wide = np.float64(right)
    ratio = wide / np.float64(left)
    count = 0
    for at in range(_LANE_SUMS, _LANE_SUMS + 3 * LANES):
        state[at] = 0.0
    for row in range(0, n, LANES):
        changes = _row(x, weights, row, wide, ratio, low, high, mantissa, emin, scaling, state)
        for lane in range(LANES if changes else 0):
            code, outer = state[_INNER + lane], state[_OUTER + lane]
            quotient = np.abs(np.float64(x[row + lane])) / wide
            share = np.float64(weights[row + lane]) * (scaling * wide * wide)
            while code < outer:
                if count == room:
                    return -1
                after = code + _spacing(code, mantissa, emin)
                events[2 * count] = quotient / (0.5 * (code + after)) - 1.0
                events[2 * count + 1] = share * (after * after - code * code)
                count += 1
                code = after
    _sort(events, count)
    for k in range(3):
        total = 0.0
        for lane in range(LANES):
            total += state[_LANE_SUMS + k * LANES + lane]
        state[k] = total
    return count


@inlined
def _row(
    x: Pointer,
    weights: Pointer,
    row: int,
    wide: float,
    ratio: float,
    low: np.float32,
    high: np.float32,
    mantissa: np.int32,
    emin: np.int32,
    scaling: float,
    state: Pointer,
) -> int:
    """Add LANES elements to c, g and b of their lanes; returns how many codes change, and puts them
    at both ends into state."""
    inverse, unit = 1.0 / wide, scaling * wide * wide
    most, least = np.float64(high), -np.float64(low)
    changes = np.int64(0)
    for lane in range(LANES):
        value = np.float64(x[row + lane])
        last = most if value > 0.0 else least
        share, quotient = np.float64(weights[row + lane]) * unit, np.abs(value) * inverse
        code = _nearest(quotient, mantissa, emin)
        outer = _nearest(quotient * ratio, mantissa, emin)
        code = code if code < last else last
        outer = outer if outer < last else last
        error = quotient - code
        state[_LANE_SUMS + lane] += share * error * error
        state[_LANE_SUMS + LANES + lane] -= 2.0 * share * code * error
        state[_LANE_SUMS + 2 * LANES + lane] += share * code * code
        state[_INNER + lane] = code
        state[_OUTER + lane] = outer
        changes += np.int64(code < outer)
    return int(changes)


@inlined
def minima(
    events: Pointer,
    count: int,
    state: Pointer,
    left: np.float32,
    right: np.float32,
    limit: float,
    only_least: bool,
    out: Pointer,
) -> int:
    """Scales around the minima between breakpoints that are within the limit into out, and how
    many; -1 where there are too many. only_least: around the least of them."""
    least, least_at, found = limit, -1.0, 0
    last = _LARGEST
    c, g, b, start = state[0], state[1], state[2], 0.0
    final = np.float64(left) / np.float64(right) - 1.0
    for i in range(count + 1):
        end = events[2 * i] if i < count else final
        u = -0.5 * g / b if b > 0.0 else 0.0
        u = min(max(u, end), start)
        error = c + g * u + b * u * u
        if only_least and error <= least:
            least, least_at = error, u
        if not only_least and error <= limit:
            if found > (2 * AROUND + 1) * (MINIMA - 1):
                return -1
            found, last = _around(np.float32((1.0 + u) * np.float64(right)), last, out, found)
        if i < count:
            step = events[2 * i + 1]
            start = end
            c -= step * end
            g += step * (1.0 - end)
            b += step
    if least_at > -1.0:
        found, last = _around(np.float32((1.0 + least_at) * np.float64(right)), last, out, 0)
    return found


@inlined
def _nearest(quotient: float, mantissa: np.int32, emin: np.int32) -> float:
    """squares.rounded() in float64."""
    if mantissa < 0:
        return float(np.rint(quotient))
    lowest = np.int64((np.int64(emin) >> np.int64(23)) + 896) << np.int64(52)
    bits = np.int64(np.float64(quotient).view(np.int64) & _EXPONENT)
    bits = bits if bits > lowest else lowest
    place = np.int64(np.int64(52) - np.int64(mantissa)) << np.int64(52)
    magic = np.int64(bits + place + _HALF).view(np.float64)
    return quotient + magic - magic


@inlined
def _spacing(code: float, mantissa: np.int32, emin: np.int32) -> float:
    """From a code >= 0 to the next one."""
    if mantissa < 0:
        return 1.0
    bits = np.int32(np.float32(code).view(np.int32) & np.int32(0x7F800000))
    bits = bits if bits > emin else emin
    return np.float64(np.int32(bits - np.int32(mantissa << np.int32(23))).view(np.float32))


@inlined
def _sort(events: Pointer, count: int) -> None:
    """In falling order of places (Shell's sort, with Knuth's gaps)."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap:
        for at in range(gap, count):
            place, step = events[2 * at], events[2 * at + 1]
            i = at
            while i >= gap and events[2 * (i - gap)] < place:
                events[2 * i] = events[2 * (i - gap)]
                events[2 * i + 1] = events[2 * (i - gap) + 1]
                i -= gap
            events[2 * i], events[2 * i + 1] = place, step
        gap //= 3


@inlined
def _around(scale: np.float32, last: np.int32, out: Pointer, found: int) -> tuple[int, np.int32]:
    """Float32 numbers around one, but those below `last` only, and their least."""
    bits = np.int32(np.float32(scale).view(np.int32) + np.int32(AROUND))
    for _ in range(2 * AROUND + 1):
        if np.int32(1) <= bits < last:
            out[found] = np.int32(bits).view(np.float32)
            last = bits
            found += 1
        bits = np.int32(bits - np.int32(1))
    return found, last

"""The scales of least squared error; see scales.optimal for what they are and why.

Candidates are screened many at a time, in float32 with reciprocals, and those that may be the best
are evaluated as scales.squares does. Long ranges are screened in two steps: where one of `stride`
neighbouring scales shows that the others cannot be better (by the inequality of
scales.breakpoints), these are left out. Asymmetric grids have their scales screened without
ends first, and those that may be better with all windows that may be.
"""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels import LANES, WIDTH
from qtool.kernels.candidates import (
    UNCLIPPED,
    add_windows,
    edges,
    ends_of,
    every,
    fill,
    first_window,
    pad,
    spaced,
    span,
    widest,
)
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.loaded import load
from qtool.kernels.squares import TOGETHER, exact, reach, screen
from qtool.kernels.sweeps import breakpoints, minima

# What float32 and reciprocals do to the square root of an error: 2^-21 of that of the sum of w x^2,
# on either side; with room to spare.
_BLUR = 2.0**-19
_TINY = 1e-15  # of the sum of w x^2


def optimal(
    x: Pointer,
    given: Pointer,
    weighted: int,
    groups: int,
    n: int,
    table: Pointer,
    size: int,
    binades: Pointer,
    cells: int,
    numbers: Pointer,
    mirrors: int,
    width: int,
    mantissa: int,
    emin: int,
    scales: Pointer,
    windows: Pointer,
    done: Pointer,
    values: Pointer,
    weights: Pointer,
    shares: Pointer,
    value_bits: Pointer,
    lanes: Pointer,
    sums: Pointer,
    best: Pointer,
    divisor: Pointer,
    inverse: Pointer,
    low: Pointer,
    high: Pointer,
    part: Pointer,
    ids: Pointer,
    ends: Pointer,
    errors: Pointer,
    error_bits: Pointer,
    room: int,
    state: Pointer,
    events: Pointer,
    breaks: int,
    near: Pointer,
) -> None:
    """Better scales and windows of groups of n elements; done[g] = 1 where they are the best.

    x, given: values and, if weighted, their weights. table: the scales, or if cells the middles of
    cells of float32 numbers that differ in that many bits. mirrors: whether window 1 is there;
    numbers, width: see candidates. mantissa: of a float type's numbers, or negative for integers;
    emin: bits of its smallest normal number. scales, windows: a start, and the result. The rest is
    memory: best has error, scale and window, ids and ends the candidates and errors theirs, for
    `room` of them and WIDTH more, state and events (for `breaks`) are those of sweeps.
    """
    kind, normal = np.int32(mantissa), np.int32(emin)
    rows = -(-n // LANES) * LANES
    blur = 2.0**-23 * (8 + min(n, TOGETHER) + n // TOGETHER)
    margin = 2.0**-52 * (64 + n)  # of sums along a sweep
    cell = 1.0 / np.float64(1 << (24 - cells))
    for g in range(groups):
        below, above, square, unit, fits = load(
            x, given, weighted, g * n, n, rows, values, weights, shares, value_bits, lanes
        )
        done[g] = np.uint8(fits)
        if not fits or square == 0.0:
            continue
        norm = math.sqrt(square)
        best[1], best[2] = np.float64(scales[g]), np.float64(windows[g])
        first, last = ends_of(numbers, width, int(windows[g]))
        best[0] = exact(
            values, weights, weighted != 0, rows, scales[g], first, last, kind, normal, lanes
        )
        begin, end, following, stride = 0, 0, 0, 1
        for step in range(4 if width or mirrors else 2):
            stage, is_coarse = step // 2, step % 2 == 0
            is_open = width > 0 and stage == 0  # windows are still to be found
            if is_coarse and (is_open or not width):
                error = best[0] * unit
                a = reach(values, shares, weighted, rows, np.float32(1), above, error, sums)
                b = reach(values, shares, weighted, rows, np.float32(-1), below, error, sums)
                start, stop = span(table, size, binades, numbers, width, stage, above, below, a, b)
                stride = every(table, start, stop, math.sqrt(error) / norm)
                window = np.int32(UNCLIPPED if width else stage)
                begin, end = 0, spaced(start, stop, stride, window, room, ids, ends)
                following = end
                if stride == 1:
                    continue
            elif is_coarse:
                continue
            elif stride > 1 or (width and stage):
                begin, end = end, following
            if end > room:
                done[g] = np.uint8(0)
                break
            if end > begin:
                pad(ids, ends, end)
            for at in range(begin, end, WIDTH):
                fill(table, numbers, width, ids, ends, at, divisor, inverse, low, high)
                _screen(
                    values, shares, weighted, rows, divisor, inverse, low, high, kind, normal,
                    part, errors, at,
                )  # fmt: skip
            least = (
                math.sqrt(
                    _least(table, ids, errors, error_bits, begin, end, above, below, width, is_open)
                )
                * (1.0 + blur)
                + _BLUR * norm
            )
            least = min(least, math.sqrt(best[0] * unit))
            limit = least * (1.0 + blur) + _BLUR * norm
            bar = _bits(limit)
            if is_coarse:
                bar = _bits(limit + widest(table, start, stop, stride, cells) * (norm + least))
            elif cells:
                bar = _bits(limit + cell * (norm + least))
            following = end
            lead = begin
            if cells:
                lead = _lead(error_bits, begin, end)
            for place in range(begin - 1 if begin < end else end, end):
                i = lead if place < begin else place  # the most promising one first
                if place == lead or np.int32(error_bits[i]) > bar:
                    continue
                scale = np.float32(table[ids[i]])
                left, right = scale, scale
                if is_coarse:
                    first_id, last_id = start + i * stride, min(start + (i + 1) * stride, stop) - 1
                    left, right = np.float32(table[first_id]), np.float32(table[last_id])
                if cells:
                    left, right = edges(left, cells)[0], edges(right, cells)[1]
                if cells or is_coarse:
                    middle = np.float64(scale)
                    ratio = max(middle / np.float64(left) - 1.0, 1.0 - middle / np.float64(right))
                    bound = limit + ratio * (norm + least)
                    if np.float64(errors[i]) > bound * bound:
                        continue
                if is_coarse:
                    for number in range(first_id, last_id + 1):
                        if following < room:
                            ids[following], ends[following] = np.int32(number), ends[i]
                        following += 1
                    continue
                w = int(ends[i])
                if is_open:
                    w = first_window(above, below, left, width)
                    if w < 0:
                        following = add_windows(
                            a, b, right, width, ids[i], following, room, ids, ends
                        )
                        continue
                first, last = ends_of(numbers, width, w)
                count = 0
                if cells:
                    count = breakpoints(
                        values, weights, rows, left, right, first, last, kind, normal,
                        unit / square, state, events, breaks,
                    )  # fmt: skip
                near[0], found = scale, 1
                for turn in range(3 if cells and count >= 0 else 1):
                    if turn:
                        most = best[0] * unit / square * (1.0 + margin) + _TINY
                        found = minima(events, count, state, left, right, most, turn == 1, near)
                    _settle(
                        values, weights, weighted, rows, near, found, first, last, kind, normal,
                        lanes, w, best,
                    )  # fmt: skip
                if count < 0 or found < 0:
                    done[g] = np.uint8(0)
                    break
        if width:
            w = first_window(above, below, np.float32(best[1]), width)
            best[2] = np.float64(w) if w >= 0 else best[2]
        if done[g]:
            scales[g], windows[g] = np.float32(best[1]), np.int32(best[2])


@inlined
def _bits(root: float) -> np.int32:
    """The bits of a float32 number of at least root^2."""
    return np.int32(np.int32(np.float32(root * root).view(np.int32)) + np.int32(1))


@inlined
def _screen(
    values: Pointer,
    shares: Pointer,
    weighted: int,
    rows: int,
    divisor: Pointer,
    inverse: Pointer,
    low: Pointer,
    high: Pointer,
    kind: np.int32,
    normal: np.int32,
    part: Pointer,
    errors: Pointer,
    at: int,
) -> None:
    """screen() with constants where they matter."""
    if kind < 0 and not weighted:
        screen(
            values, shares, False, rows, divisor, inverse, low, high, np.int32(-1), normal, part,
            errors, at,
        )  # fmt: skip
    elif kind < 0:
        screen(
            values, shares, True, rows, divisor, inverse, low, high, np.int32(-1), normal, part,
            errors, at,
        )  # fmt: skip
    else:
        screen(
            values, shares, True, rows, divisor, inverse, low, high, kind, normal, part, errors, at
        )


@inlined
def _least(
    table: Pointer,
    ids: Pointer,
    errors: Pointer,
    error_bits: Pointer,
    begin: int,
    end: int,
    above: np.float32,
    below: np.float32,
    width: int,
    is_open: bool,
) -> float:
    """The least error of the candidates; of those that clip nothing where windows are open."""
    bits = np.int32(0x7F7FFFFF)
    if not is_open:
        for i in range(begin, end):
            value = np.int32(error_bits[i])
            bits = value if value < bits else bits
    else:
        for i in range(begin, end):
            value = np.int32(error_bits[i])
            if value < bits and first_window(above, below, table[ids[i]], width) >= 0:
                bits = value
    return np.float64(np.int32(bits).view(np.float32))


@inlined
def _lead(error_bits: Pointer, begin: int, end: int) -> int:
    """The candidate of least error."""
    lead = begin
    for i in range(begin, end):
        lead = i if np.int32(error_bits[i]) < np.int32(error_bits[lead]) else lead
    return lead


@inlined
def _settle(
    values: Pointer,
    weights: Pointer,
    weighted: int,
    rows: int,
    near: Pointer,
    count: int,
    first: np.float32,
    last: np.float32,
    kind: np.int32,
    normal: np.int32,
    lanes: Pointer,
    window: int,
    best: Pointer,
) -> None:
    """Offer scales with their exact errors."""
    for c in range(count):
        error = exact(
            values, weights, weighted != 0, rows, near[c], first, last, kind, normal, lanes
        )
        _offer(best, error, np.float64(near[c]), np.float64(window))


@inlined
def _offer(best: Pointer, error: float, scale: float, window: float) -> None:
    """Of equal errors the smaller scale, then the first window."""
    is_tie = error == best[0]
    is_less = scale < best[1] or (scale == best[1] and window < best[2])
    if error < best[0] or (is_tie and is_less):
        best[0], best[1], best[2] = error, scale, window

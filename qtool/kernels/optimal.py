"""The scales of least squared error; see scales.optimal for what they are and why.

A candidate is a number of the table and a window, in the lists ids and ends; errors has what they
are screened with. best: error, scale, window. numbers: of window w at 4 w its low and high and
the quotients from which on codes are beyond half of each; at 8 the largest scale whose half cannot be
stored, the smallest positive code.
"""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels import LANES, WIDTH
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.squares import TOGETHER, exact, reach, screen
from qtool.kernels.sweeps import sweep

_UNCLIPPED = -1
_MAGNITUDE, _SIGN, _INF = np.int32(0x7FFFFFFF), np.int32(-0x80000000), np.int32(0x7F800000)
_FAR = np.float32(2.0**30)
_LARGEST, _SMALLEST = np.float32(2.0**40), np.float32(2.0**-40)
_SLACK = 1.0 + 2.0**-20
# What float32 and reciprocals do to the square root of an error: 2^-21 of that of the sum of w x^2,
# on either side; with room to spare.
_BLUR = 2.0**-19


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
    events: Pointer,
    near: Pointer,
) -> None:
    """Better scales and windows of groups of n elements; done[g] = 1 where they are the best.

    x, given: values and, if weighted, their weights. table: the scales, or if cells the middles of
    cells of float32 numbers that differ in that many bits. mirrors: whether window 1 is there;
    width: of the windows of an asymmetric grid, else 0. mantissa: of a float type's numbers, or
    negative for integers; emin: bits of its smallest normal number. What follows is memory.
    """
    kind, normal = np.int32(mantissa), np.int32(emin)
    rows = -(-n // LANES) * LANES
    blur = 2.0**-23 * (8 + min(n, TOGETHER) + n // TOGETHER)
    cell = 1.0 / np.float64(1 << (24 - cells))
    for g in range(groups):
        below, above, square, unit, fits = _load(
            x, given, weighted, g * n, n, rows, values, weights, shares, value_bits, lanes
        )
        done[g] = np.uint8(fits)
        if not fits or square == 0.0:
            continue
        norm = math.sqrt(square)
        best[1], best[2] = np.float64(scales[g]), np.float64(windows[g])
        first, last = _ends(numbers, width, np.int64(windows[g]))
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
                start, stop = _between(
                    table, size, binades, numbers, width, stage, above, below, a, b
                )
                stride = _stride(table, start, stop, math.sqrt(error) / norm)
                window = np.int32(_UNCLIPPED if width else stage)
                begin, end = 0, _list(start, stop, stride, window, room, ids, ends)
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
                _pad(ids, ends, end)
            for at in range(begin, end, WIDTH):
                _fill(table, numbers, width, ids, ends, at, divisor, inverse, low, high)
                _screen(
                    values, shares, weighted, rows, divisor, inverse, low, high, kind, normal,
                    part, errors, at,
                )  # fmt: skip
            least = math.sqrt(_least(
                table, ids, errors, error_bits, begin, end, above, below, width, is_open
            )) * (1.0 + blur) + _BLUR * norm
            least = min(least, math.sqrt(best[0] * unit))
            limit = least * (1.0 + blur) + _BLUR * norm
            bar = _bits(limit)
            if is_coarse:
                bar = _bits(limit + _widest(table, start, stop, stride, cells) * (norm + least))
            elif cells:
                bar = _bits(limit + cell * (norm + least))
            following = end
            for i in range(begin, end):
                if np.int32(error_bits[i]) > bar:
                    continue
                scale = np.float32(table[ids[i]])
                left, right = scale, scale
                if is_coarse:
                    first_id, last_id = start + i * stride, min(start + (i + 1) * stride, stop) - 1
                    left, right = np.float32(table[first_id]), np.float32(table[last_id])
                if cells:
                    left, right = _edges(left, cells)[0], _edges(right, cells)[1]
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
                w = np.int64(ends[i])
                if is_open:
                    w = _window(above, below, left, width)
                    if w < 0:
                        following = _windows(
                            a, b, right, width, ids[i], following, room, ids, ends
                        )
                        continue
                first, last = _ends(numbers, width, w)
                count = 0
                if cells:
                    count = sweep(
                        values, shares, rows, left, right, first, last, kind, normal, square,
                        least * least, events, near,
                    )  # fmt: skip
                    if count < 0:
                        done[g] = np.uint8(0)
                        break
                near[count] = scale
                for c in range(count + 1):
                    error = exact(
                        values, weights, weighted != 0, rows, near[c], first, last, kind, normal,
                        lanes,
                    )  # fmt: skip
                    _offer(best, error, np.float64(near[c]), np.float64(w))
        if width:
            w = _window(above, below, np.float32(best[1]), width)
            best[2] = np.float64(w) if w >= 0 else best[2]
        if done[g]:
            scales[g], windows[g] = np.float32(best[1]), np.int32(best[2])


@inlined
def _load(
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
            fits = fits and (share > np.float32(0) or weights[i] == np.float32(0))
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
    fits = fits and np.int32(largest).view(np.float32) <= _LARGEST
    fits = fits and (largest == 0 or absmax >= _SMALLEST)
    fits = fits and square >= 2.0**-40 * np.float64(absmax) * np.float64(absmax)
    return below, above, square, unit, fits


@inlined
def _ends(numbers: Pointer, width: int, w: int) -> tuple[np.float32, np.float32]:
    """Low and high of a window."""
    if w == _UNCLIPPED:
        return np.float32(-_FAR), _FAR
    if width:
        return np.float32(-w), np.float32(width - w)
    return np.float32(numbers[4 * w]), np.float32(numbers[4 * w + 1])


@inlined
def _between(
    table: Pointer,
    size: int,
    binades: Pointer,
    numbers: Pointer,
    width: int,
    w: int,
    above: np.float32,
    below: np.float32,
    a: np.float32,
    b: np.float32,
) -> tuple[int, int]:
    """The numbers of the table, from one to before another, between scales.bounds.bounds()."""
    least, most = np.float64(below), np.float64(above)
    if width:
        low = (np.float64(a) + np.float64(b)) / np.float64(width)
        high = (least + most) / np.float64(width // 2)
    else:
        low = max(np.float64(a) / numbers[4 * w + 1], np.float64(b) / -numbers[4 * w])
        high = max(least / numbers[4 * w + 2], most / numbers[4 * w + 3])
    all_zero = 2.0 * max(least, most) / numbers[9]
    high = min(max(high, numbers[8]), all_zero)
    first = max(min(_search(table, binades, low / _SLACK), size) - 1, 0)
    last = min(max(_search(table, binades, high * _SLACK), first) + 1, size)
    return first, last


@inlined
def _stride(table: Pointer, start: int, stop: int, error: float) -> int:
    """Of how many numbers one is screened first: so many that the others cannot be much better."""
    spacing = _spacing(table, start, stop)
    wanted = -(-(stop - start) // WIDTH)
    useful = 0.5 * error / spacing if spacing > 0.0 else 1.0
    return max(1, min(wanted, np.int64(min(useful, 1e6))))


@inlined
def _spacing(table: Pointer, start: int, stop: int) -> float:
    """Between the first two numbers, relative to the first; that of others is at most twice as
    large."""
    return np.float64(table[min(start + 1, stop - 1)]) / np.float64(table[start]) - 1.0


@inlined
def _widest(table: Pointer, start: int, stop: int, stride: int, cells: int) -> float:
    """How far, relatively, numbers can be from the one in the middle of `stride` of them.

    (1 + y)^h < 1 + h y + (h y)^2 for h y < 1.
    """
    steps = 0.5 * stride + (0.5 if cells else 0.0)
    reach = 2.01 * _spacing(table, start, stop) * steps
    return reach + reach * reach if reach < 1.0 else 1e9


@inlined
def _list(
    start: int, stop: int, stride: int, window: np.int32, room: int, ids: Pointer, ends: Pointer
) -> int:
    """List the numbers in the middle of every `stride` ones; returns how many."""
    count = -(-(stop - start) // stride)
    if count > room:
        return room + 1
    for i in range(count):
        ids[i] = np.int32(min(start + i * stride + stride // 2, stop - 1))
        ends[i] = window
    return count


@inlined
def _bits(root: float) -> np.int32:
    """The bits of a float32 number of at least root^2."""
    return np.int32(np.int32(np.float32(root * root).view(np.int32)) + np.int32(1))


@inlined
def _search(table: Pointer, binades: Pointer, value: float) -> int:
    """How many numbers are below a value. binades: how many are below 2^(e - 127), for all e."""
    exponent = np.int32(np.float32(value).view(np.int32)) >> np.int32(23)
    base, left = np.int64(binades[exponent]), np.int64(binades[exponent + 1])
    left -= base
    while left > 0:
        half = (left + 1) // 2
        base += half * np.int64(np.float64(table[base + half - 1]) < value)
        left -= half
    return base


@inlined
def _pad(ids: Pointer, ends: Pointer, end: int) -> None:
    """Repeat the last candidate as often as the last WIDTH may want."""
    number, window = ids[end - 1], ends[end - 1]
    for c in range(WIDTH):
        ids[end + c], ends[end + c] = number, window


@inlined
def _fill(
    table: Pointer,
    numbers: Pointer,
    width: int,
    ids: Pointer,
    ends: Pointer,
    at: int,
    divisor: Pointer,
    inverse: Pointer,
    low: Pointer,
    high: Pointer,
) -> None:
    """WIDTH candidates from number `at` on."""
    for c in range(WIDTH):
        divisor[c] = table[ids[at + c]]
    for c in range(WIDTH):
        inverse[c] = np.float32(np.float32(1) / np.float32(divisor[c]))
    first, last = _ends(numbers, width, np.int64(ends[at]))
    if width and ends[at] != _UNCLIPPED:
        for c in range(WIDTH):
            low[c] = np.float32(-ends[at + c])
            high[c] = np.float32(np.int32(width) - np.int32(ends[at + c]))
    else:
        for c in range(WIDTH):
            low[c], high[c] = first, last


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
            if value < bits and _window(above, below, table[ids[i]], width) >= 0:
                bits = value
    return np.float64(np.int32(bits).view(np.float32))


@inlined
def _edges(scale: np.float32, cells: int) -> tuple[np.float32, np.float32]:
    """The smallest number of a cell and the one after the largest."""
    cell = np.int32(np.float32(scale).view(np.int32) >> np.int32(cells))
    left = np.int32(cell << np.int32(cells)).view(np.float32)
    right = np.int32(np.int32(cell + np.int32(1)) << np.int32(cells)).view(np.float32)
    return left, right


@inlined
def _window(above: np.float32, below: np.float32, scale: np.float32, width: int) -> int:
    """The first window of an asymmetric grid that clips nothing; -1 if all do."""
    first = np.float32(np.rint(np.float32(below / scale)))
    last = np.float32(np.rint(np.float32(above / scale)))
    return np.int64(first) if first + last <= np.float32(width) else -1


@inlined
def _windows(
    a: np.float32,
    b: np.float32,
    scale: np.float32,
    width: int,
    number: int,
    end: int,
    room: int,
    ids: Pointer,
    ends: Pointer,
) -> int:
    """Append a scale with all windows that may be better; returns the new end of the list."""
    wide = np.float64(scale) * _SLACK
    first = np.int64(math.ceil(np.float64(b) / wide))
    last = np.int64(math.floor(np.float64(width) - np.float64(a) / wide))
    for w in range(first, last + 1):
        if end < room:
            ids[end], ends[end] = np.int32(number), np.int32(w)
        end += 1
    return end


@inlined
def _offer(best: Pointer, error: float, scale: float, window: float) -> None:
    """Of equal errors the smaller scale, then the first window."""
    is_tie = error == best[0]
    is_less = scale < best[1] or (scale == best[1] and window < best[2])
    if error < best[0] or (is_tie and is_less):
        best[0], best[1], best[2] = error, scale, window

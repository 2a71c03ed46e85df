"""Candidates for a group's best scale: numbers of a table of scales, and windows.

numbers: of window w at 4 w its low and high and the quotients from which on codes are beyond half
of each; at 8 the largest scale whose half cannot be stored, then the smallest positive code. width:
of the windows of an asymmetric grid, else 0. See scales.bounds.
"""

from __future__ import annotations

import math

import numpy as np

from qtool.kernels import WIDTH
from qtool.kernels.compiled import Pointer, inlined

UNCLIPPED = -1
_FAR = np.float32(2.0**30)
_SLACK = 1.0 + 2.0**-20


@inlined
def ends_of(numbers: Pointer, width: int, w: int) -> tuple[np.float32, np.float32]:
    """Low and high of a window."""
    if w == UNCLIPPED:
        return np.float32(-_FAR), _FAR
    if width:
        return np.float32(-w), np.float32(width - w)
    return np.float32(numbers[4 * w]), np.float32(numbers[4 * w + 1])


@inlined
def span(
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
    first = max(min(search(table, binades, low / _SLACK), size) - 1, 0)
    last = min(max(search(table, binades, high * _SLACK), first) + 1, size)
    return first, last


@inlined
def search(table: Pointer, binades: Pointer, value: float) -> int:
    """How many numbers are below a value. binades: how many are below 2^(e - 127), for all e."""
    exponent = np.int32(np.float32(value).view(np.int32)) >> np.int32(23)
    base = int(binades[exponent])
    left = int(binades[exponent + 1]) - base
    while left > 0:
        half = (left + 1) // 2
        base += half * int(np.float64(table[base + half - 1]) < value)
        left -= half
    return base


@inlined
def relative_step(table: Pointer, start: int, stop: int) -> float:
    """Between the first two numbers, relative to the first; that of others is at most twice as
    large."""
    step: float = np.float64(table[min(start + 1, stop - 1)]) / np.float64(table[start]) - 1.0
    return step


@inlined
def widest(table: Pointer, start: int, stop: int, stride: int, cells: int) -> float:
    """How far, relatively, numbers can be from the one in the middle of `stride` of them.

    (1 + y)^h < 1 + h y + (h y)^2 for h y < 1.
    """
    steps = 0.5 * stride + (0.5 if cells else 0.0)
    reach = 2.01 * relative_step(table, start, stop) * steps
    return reach + reach * reach if reach < 1.0 else 1e9


@inlined
def every(table: Pointer, start: int, stop: int, error: float) -> int:
    """Of how many numbers one is screened first: so many that the others cannot be much better."""
    spacing = relative_step(table, start, stop)
    wanted = -(-(stop - start) // WIDTH)
    useful = int(min(0.5 * error / spacing, 1e6)) if spacing > 0.0 else 1
    return max(1, min(wanted, useful))


@inlined
def spaced(
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
def pad(ids: Pointer, ends: Pointer, end: int) -> None:
    """Repeat the last candidate as often as the last WIDTH may want."""
    number, window = ids[end - 1], ends[end - 1]
    for c in range(WIDTH):
        ids[end + c], ends[end + c] = number, window


@inlined
def fill(
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
    first, last = ends_of(numbers, width, int(ends[at]))
    if width and ends[at] != UNCLIPPED:
        for c in range(WIDTH):
            low[c] = np.float32(-ends[at + c])
            high[c] = np.float32(np.int32(width) - np.int32(ends[at + c]))
    else:
        for c in range(WIDTH):
            low[c], high[c] = first, last


@inlined
def edges(scale: np.float32, cells: int) -> tuple[np.float32, np.float32]:
    """The smallest number of a cell and the one after the largest."""
    cell = np.int32(np.float32(scale).view(np.int32) >> np.int32(cells))
    left = np.int32(cell << np.int32(cells)).view(np.float32)
    right = np.int32(np.int32(cell + np.int32(1)) << np.int32(cells)).view(np.float32)
    return left, right


@inlined
def first_window(above: np.float32, below: np.float32, scale: np.float32, width: int) -> int:
    """The first window of an asymmetric grid that clips nothing; -1 if all do."""
    first = np.float32(np.rint(np.float32(below / scale)))
    last = np.float32(np.rint(np.float32(above / scale)))
    return int(first) if first + last <= np.float32(width) else -1


@inlined
def add_windows(
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

"""16 groups side by side: element i of all of them is one vector, so that sums need no folding.

panel, shared: ROWS rows of LANES float32, of elements and of their weights. room, terms, costs: see
search.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.convert import float16
from qtool.kernels.searcher import CANDIDATES, TOGETHER

INVERSE, LOW, HIGH = (CANDIDATES * LANES * k for k in (2, 3, 4))

_TERMS = TOGETHER * LANES
_MAGNITUDE = np.int32(0x7FFFFFFF)
_EXPONENT = np.int32(0x7F800000)
_LARGEST_FINITE = np.int32(0x7F7FFFFF)
_ROUND = np.float32(1.5 * 2**23)  # added and subtracted, it rounds to integers, half to even


@inlined
def gather(
    x: Pointer,
    bits: Pointer,
    form: int,
    starts: Pointer,
    heights: Pointer,
    widths: Pointer,
    stride: int,
    first: int,
    lanes: int,
    begin: int,
    rows: int,
    panel: Pointer,
) -> None:
    """Elements begin to begin + rows of the groups from number first on, side by side; 0 for what
    is not finite or not there. The rows are completed to a multiple of TOGETHER."""
    whole = -(-rows // TOGETHER) * TOGETHER
    for lane in range(LANES):
        there, width, at, step = 0, 1, 0, 1
        if lane < lanes:
            width, at = widths[first + lane], starts[first + lane]
            there = min(rows, max(heights[first + lane] * width - begin, 0))
        if width == 1:
            step = stride
        if width == 1 or begin + there <= width:
            at += begin * step
            if form == 0:
                for i in range(there):
                    panel[i * LANES + lane] = _finite(np.float32(x[at + i * step]))
            elif form == 1:
                for i in range(there):
                    panel[i * LANES + lane] = _finite(_bfloat16(bits[at + i * step]))
            else:
                for i in range(there):
                    panel[i * LANES + lane] = _finite(float16(bits[at + i * step]))
        else:
            column = begin % width
            at += begin // width * stride + column
            for i in range(there):
                value = np.float32(0)
                if form == 0:
                    value = np.float32(x[at])
                elif form == 1:
                    value = _bfloat16(bits[at])
                else:
                    value = float16(bits[at])
                panel[i * LANES + lane] = _finite(value)
                column += 1
                at += 1
                if column == width:
                    column = 0
                    at += stride - width
        for i in range(there, whole):
            panel[i * LANES + lane] = np.float32(0)


@inlined
def _bfloat16(bits: int) -> np.float32:
    return np.float32(np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32))


@inlined
def _finite(value: np.float32) -> np.float32:
    bits = np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)
    return np.float32(value) if bits <= _LARGEST_FINITE else np.float32(0)


@inlined
def multiply(shared: Pointer, rows: int, shares: Pointer, first: int, lanes: int) -> None:
    for lane in range(lanes):
        share = np.float32(shares[first + lane])
        for i in range(rows):
            shared[i * LANES + lane] = np.float32(shared[i * LANES + lane] * share)


@inlined
def measure(
    panel: Pointer,
    shared: Pointer,
    weighted: int,
    rows: int,
    room: Pointer,
    size: int,
    family: int,
    alike: int,
    grid: Pointer,
    unit: float,
    terms: Pointer,
    costs: Pointer,
) -> None:
    """Add the squared errors of a panel to the costs of every candidate, in squared steps.

    alike: whether lowest and highest steps are the same for all candidates and lanes.
    """
    low, high = np.float32(room[LOW]), np.float32(room[HIGH])
    for k in range(size):
        at = k * LANES
        _spread(room, INVERSE + at, terms, 0)
        if family == 0 and (weighted or not alike):
            _spread(room, LOW + at, terms, _TERMS)
            _spread(room, HIGH + at, terms, 2 * _TERMS)
        for d in range(0, rows * LANES, _TERMS):
            if family != 0 and weighted:
                _floats(panel, d, family, grid, unit, shared, True, terms)
            elif family != 0:
                _floats(panel, d, family, grid, unit, shared, False, terms)
            elif weighted:
                _integers(panel, d, low, high, False, unit, shared, True, terms)
            elif alike:
                _integers(panel, d, low, high, True, unit, shared, False, terms)
            else:
                _integers(panel, d, low, high, False, unit, shared, False, terms)
            for lane in range(LANES):
                total = 0.0
                for row in range(TOGETHER):
                    total += np.float64(terms[3 * _TERMS + row * LANES + lane])
                costs[at + lane] += total


@inlined
def _spread(room: Pointer, at: int, terms: Pointer, to: int) -> None:
    """One row of lanes into TOGETHER."""
    for row in range(TOGETHER):
        for lane in range(LANES):
            terms[to + row * LANES + lane] = np.float32(room[at + lane])


@inlined
def _integers(
    panel: Pointer,
    at: int,
    low: np.float32,
    high: np.float32,
    alike: bool,
    unit: float,
    shared: Pointer,
    weighted: bool,
    terms: Pointer,
) -> None:
    coarse = np.float32(unit)
    for i in range(_TERMS):
        lowest = low if alike else np.float32(terms[_TERMS + i])
        highest = high if alike else np.float32(terms[2 * _TERMS + i])
        v = np.float32(panel[at + i] * terms[i])
        c = v if v > lowest else lowest
        c = c if c < highest else highest
        r = np.float32(v - np.float32(np.float32(c + _ROUND) - _ROUND))
        t = np.float32(r * r)
        if weighted:
            t = np.float32(t * shared[at + i])
        terms[3 * _TERMS + i] = np.float32(np.float32(t + coarse) - coarse)


@inlined
def _floats(
    panel: Pointer,
    at: int,
    mantissa: int,
    grid: Pointer,
    unit: float,
    shared: Pointer,
    weighted: bool,
    terms: Pointer,
) -> None:
    lowest, largest = np.int32(grid[0]), np.float32(np.int32(grid[1]).view(np.float32))
    shift, coarse = np.int32(np.int32(23 - mantissa) << np.int32(23)), np.float32(unit)
    for i in range(_TERMS):
        v = np.float32(abs(np.float32(panel[at + i] * terms[i])))
        c = v if v < largest else largest
        exponent = np.int32(np.float32(c).view(np.int32) & _EXPONENT)
        exponent = exponent if exponent > lowest else lowest
        steps = np.float32(np.int32(exponent + shift).view(np.float32))
        r = np.float32(v - np.float32(np.float32(c + steps) - steps))
        t = np.float32(r * r)
        if weighted:
            t = np.float32(t * shared[at + i])
        terms[3 * _TERMS + i] = np.float32(np.float32(t + coarse) - coarse)

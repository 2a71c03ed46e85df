"""The scale of least squared error among candidates, of 16 groups at once.

The same numbers as scales.search, which says what candidates and costs are. Groups lie side by
side in a panel: element i of all of them is one vector, so that sums need no folding.

x: float32. weights: of the elements, where weighted is set; shares: what those of a group are
multiplied by. A group has heights[g] runs of widths[g] elements, the first at starts[g] and each
`stride` after the last. family: 0 for integers, or the mantissa bits of a float type, whose lowest
normal exponent, biased, and largest value are in grid. unit: see scales.search.
panel, shared: ROWS * LANES float32. The following are rows of LANES. room, float32: for each
candidate its scale, zero point, reciprocal, lowest and highest step. terms, float32: of TOGETHER
rows of the panel. costs, float64: of each candidate. best, float64: cost, scale and zero point of
the best candidate so far, and those of the beginning.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.searcher import CANDIDATES, ROWS, TOGETHER

_ZERO, _INVERSE, _LOW, _HIGH = (CANDIDATES * LANES * k for k in range(1, 5))
_SCALE, _OFFSET, _BEFORE, _FIRST_SCALE, _FIRST_OFFSET = (LANES * k for k in range(1, 6))
_TERMS = TOGETHER * LANES
_MAGNITUDE = np.int32(0x7FFFFFFF)
_EXPONENT = np.int32(0x7F800000)
_LARGEST_FINITE = np.int32(0x7F7FFFFF)
_ROUND = np.float32(1.5 * 2**23)  # added and subtracted, it rounds to integers, half to even


def search(
    x: Pointer,
    weights: Pointer,
    weighted: int,
    shares: Pointer,
    starts: Pointer,
    heights: Pointer,
    widths: Pointer,
    stride: int,
    count: int,
    family: int,
    grid: Pointer,
    unit: float,
    loose: float,
    over: float,
    storage: Pointer,
    limits: Pointer,
    shifts: int,
    sizes: Pointer,
    stages: int,
    steps: Pointer,
    moves: Pointer,
    panel: Pointer,
    shared: Pointer,
    room: Pointer,
    terms: Pointer,
    costs: Pointer,
    best: Pointer,
    scale: Pointer,
    zero: Pointer,
) -> None:
    """scale and zero of count groups become those of least cost, if that is surely less.

    limits: qmin, qmax. storage: see _stored(). over: the global scale. shifts: whether zero points
    are free. sizes: candidates of each stage; steps, moves: of all of them, one after another, the
    very first ones 0. loose: what is surely less.
    """
    for first in range(0, count, LANES):
        lanes = min(LANES, count - first)
        longest, at = 0, 0
        for lane in range(LANES):
            g = first + min(lane, lanes - 1)
            longest = max(longest, heights[g] * widths[g])
            best[_SCALE + lane] = best[_FIRST_SCALE + lane] = scale[g]
            best[_OFFSET + lane] = best[_FIRST_OFFSET + lane] = zero[g]
        for stage in range(stages):
            size = sizes[stage]
            _propose(best, room, steps, moves, at, size, over, storage, limits, shifts)
            at += size
            for i in range(size * LANES):
                costs[i] = 0.0
            for begin in range(0, longest, ROWS):
                rows = min(ROWS, longest - begin)
                if stage == 0 or longest > ROWS:
                    _gather(x, starts, heights, widths, stride, first, lanes, begin, rows, panel)
                    if weighted:
                        _gather(
                            weights, starts, heights, widths, stride, first, lanes, begin, rows,
                            shared,
                        )  # fmt: skip
                        _multiply(shared, rows, shares, first, lanes)
                _measure(
                    panel, shared, weighted, rows, room, size, family, grid, unit, terms, costs
                )
            _choose(room, costs, size, over, stage == 0, best)
        _hold_on(loose, over, best)
        for lane in range(lanes):
            scale[first + lane] = np.float32(best[_SCALE + lane])
            zero[first + lane] = np.float32(best[_OFFSET + lane])


def add_costs(
    x: Pointer,
    weights: Pointer,
    weighted: int,
    shares: Pointer,
    starts: Pointer,
    heights: Pointer,
    widths: Pointer,
    stride: int,
    count: int,
    family: int,
    grid: Pointer,
    unit: float,
    size: int,
    candidates: Pointer,
    panel: Pointer,
    shared: Pointer,
    room: Pointer,
    terms: Pointer,
    costs: Pointer,
    out: Pointer,
) -> None:
    """out[g, k] = cost, in squared steps, of candidate k among the elements of piece g.

    candidates: reciprocal, lowest and highest step of all candidates of each piece.
    """
    for first in range(0, count, LANES):
        lanes = min(LANES, count - first)
        longest = 0
        for lane in range(lanes):
            longest = max(longest, heights[first + lane] * widths[first + lane])
            for k in range(size):
                for word in range(3):
                    room[_INVERSE + word * CANDIDATES * LANES + k * LANES + lane] = candidates[
                        (word * count + first + lane) * size + k
                    ]
        for i in range(size * LANES):
            costs[i] = 0.0
        for begin in range(0, longest, ROWS):
            rows = min(ROWS, longest - begin)
            _gather(x, starts, heights, widths, stride, first, lanes, begin, rows, panel)
            if weighted:
                _gather(weights, starts, heights, widths, stride, first, lanes, begin, rows, shared)
                _multiply(shared, rows, shares, first, lanes)
            _measure(panel, shared, weighted, rows, room, size, family, grid, unit, terms, costs)
        for lane in range(lanes):
            for k in range(size):
                out[(first + lane) * size + k] = costs[k * LANES + lane]


@inlined
def _propose(
    best: Pointer,
    room: Pointer,
    steps: Pointer,
    moves: Pointer,
    at: int,
    size: int,
    over: float,
    storage: Pointer,
    limits: Pointer,
    shifts: int,
) -> None:
    """The candidates of a stage, from the scale and zero point that are best so far."""
    qmin, qmax = np.float32(limits[0]), np.float32(limits[1])
    mantissa, normal = np.int32(storage[0]), np.int32(storage[1])
    smallest, largest = np.int32(storage[2]), np.int32(storage[3])
    for k in range(size):
        step, move, to = np.int32(steps[at + k]), np.float32(moves[at + k]), k * LANES
        for lane in range(LANES):
            s, z = np.float32(best[_SCALE + lane]), np.float32(best[_OFFSET + lane])
            bits = np.int32(np.float32(s).view(np.int32))
            moved = np.int32(np.int32(bits & _MAGNITUDE) + step)
            candidate = _stored(moved, mantissa, normal, smallest, largest)
            offset = z
            if shifts:
                offset = np.float32(z + move)
                offset = offset if offset >= qmin else qmin
                offset = offset if offset <= qmax else qmax
            elif (bits < 0) != (move != 0):
                candidate = np.float32(-candidate)
            room[to + lane], room[_ZERO + to + lane] = candidate, offset
            divisor = np.float32(candidate * np.float32(over))
            room[_INVERSE + to + lane] = np.float32(np.float32(1) / divisor)
            room[_LOW + to + lane] = np.float32(qmin - offset)
            room[_HIGH + to + lane] = np.float32(qmax - offset)


@inlined
def _stored(
    bits: np.int32, mantissa: np.int32, normal: np.int32, smallest: np.int32, largest: np.int32
) -> np.float32:
    """A positive float32, given by its bits, rounded to the type that scales are stored in.

    Given are its mantissa bits, lowest normal exponent, biased, and the bits of its smallest and
    largest value.
    """
    bits = bits if bits >= np.int32(1) else np.int32(1)
    bits = bits if bits <= largest else largest
    below = np.int32(normal - np.int32(bits >> np.int32(23)))
    below = below if below >= np.int32(0) else np.int32(0)
    drop = np.int32(np.int32(np.int32(23) - mantissa) + below)
    drop = drop if drop <= np.int32(23) else np.int32(23)
    half = np.int32(np.int32(np.int32(1) << drop) >> np.int32(1))
    bits = np.int32(np.int32(np.int32(bits + half) >> drop) << drop)
    bits = bits if bits >= smallest else smallest
    bits = bits if bits <= largest else largest
    return np.float32(np.int32(bits).view(np.float32))


@inlined
def _gather(
    x: Pointer,
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
        there, width, at = 0, 1, 0
        if lane < lanes:
            width, at = widths[first + lane], starts[first + lane]
            there = min(rows, max(heights[first + lane] * width - begin, 0))
        if width == 1 or begin + there <= width:
            step = stride if width == 1 else 1
            at += begin * step
            for i in range(there):
                panel[i * LANES + lane] = _finite(x[at + i * step])
        else:
            column = begin % width
            at += begin // width * stride + column
            for i in range(there):
                panel[i * LANES + lane] = _finite(x[at])
                column += 1
                at += 1
                if column == width:
                    column = 0
                    at += stride - width
        for i in range(there, whole):
            panel[i * LANES + lane] = np.float32(0)


@inlined
def _finite(value: np.float32) -> np.float32:
    bits = np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)
    return np.float32(value) if bits <= _LARGEST_FINITE else np.float32(0)


@inlined
def _multiply(shared: Pointer, rows: int, shares: Pointer, first: int, lanes: int) -> None:
    for lane in range(lanes):
        share = np.float32(shares[first + lane])
        for i in range(rows):
            shared[i * LANES + lane] = np.float32(shared[i * LANES + lane] * share)


@inlined
def _measure(
    panel: Pointer,
    shared: Pointer,
    weighted: int,
    rows: int,
    room: Pointer,
    size: int,
    family: int,
    grid: Pointer,
    unit: float,
    terms: Pointer,
    costs: Pointer,
) -> None:
    """Add the squared errors of a panel to the costs of every candidate, in squared steps."""
    for k in range(size):
        at = k * LANES
        for row in range(TOGETHER):
            for lane in range(LANES):
                to = row * LANES + lane
                terms[to] = np.float32(room[_INVERSE + at + lane])
                terms[_TERMS + to] = np.float32(room[_LOW + at + lane])
                terms[2 * _TERMS + to] = np.float32(room[_HIGH + at + lane])
        for d in range(0, rows * LANES, _TERMS):
            if family == 0 and weighted:
                _integers(panel, d, unit, shared, True, terms)
            elif family == 0:
                _integers(panel, d, unit, shared, False, terms)
            elif weighted:
                _floats(panel, d, family, grid, unit, shared, True, terms)
            else:
                _floats(panel, d, family, grid, unit, shared, False, terms)
            for lane in range(LANES):
                total = 0.0
                for row in range(TOGETHER):
                    total += np.float64(terms[3 * _TERMS + row * LANES + lane])
                costs[at + lane] += total


@inlined
def _integers(
    panel: Pointer, at: int, unit: float, shared: Pointer, weighted: bool, terms: Pointer
) -> None:
    coarse = np.float32(unit)
    for i in range(_TERMS):
        low, high = np.float32(terms[_TERMS + i]), np.float32(terms[2 * _TERMS + i])
        v = np.float32(panel[at + i] * terms[i])
        c = v if v > low else low
        c = c if c < high else high
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


@inlined
def _choose(
    room: Pointer, costs: Pointer, size: int, over: float, is_first: bool, best: Pointer
) -> None:
    """The best candidate of a stage, if it is better than what was; the first one of all is the
    beginning."""
    for k in range(size):
        to = k * LANES
        for lane in range(LANES):
            s, z = np.float64(room[to + lane]), np.float64(room[_ZERO + to + lane])
            divisor = np.float64(np.float32(np.float32(s) * np.float32(over)))
            cost = costs[to + lane] * (divisor * divisor)
            least = best[lane]
            if is_first and k == 0:
                best[_BEFORE + lane] = cost
                least = np.inf
            better = cost < least
            best[lane] = cost if better else least
            best[_SCALE + lane] = s if better else best[_SCALE + lane]
            best[_OFFSET + lane] = z if better else best[_OFFSET + lane]


@inlined
def _hold_on(loose: float, over: float, best: Pointer) -> None:
    """Go back to the beginning where the costs may not be told apart."""
    for lane in range(LANES):
        before = np.float64(np.float32(np.float32(best[_FIRST_SCALE + lane]) * np.float32(over)))
        after = np.float64(np.float32(np.float32(best[_SCALE + lane]) * np.float32(over)))
        slack = loose * (before * before + after * after)
        cost = best[_BEFORE + lane]
        if not (best[lane] + best[lane] * 2.0**-19 + slack < cost and cost < np.inf):
            best[_SCALE + lane] = best[_FIRST_SCALE + lane]
            best[_OFFSET + lane] = best[_FIRST_OFFSET + lane]

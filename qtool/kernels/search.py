"""The scale of least squared error among candidates, of 16 groups at once.

The same numbers as scales.search, which says what candidates and costs are.

x, bits, form: see tiles. weights: of the elements, where weighted is set; shares: what those of a
group are multiplied by. A group has heights[g] runs of widths[g] elements, the first at starts[g]
and each `stride` after the last. family: 0 for integers, or the mantissa bits of a float type,
whose lowest normal exponent, biased, and largest value are in grid. unit: see scales.search.
panel, shared: ROWS * LANES float32. The following are rows of LANES. room, float32: for each
candidate its scale, zero point, reciprocal, lowest and highest step. terms, float32: of TOGETHER
rows of a panel. costs, float64: of each candidate. best, float64: cost, scale and zero point of
the best candidate so far, and those of the beginning.
"""

from __future__ import annotations

import numpy as np

from qtool.kernels import LANES
from qtool.kernels.compiled import Pointer, inlined
from qtool.kernels.panel import HIGH, INVERSE, LOW, gather, measure, multiply
from qtool.kernels.searcher import CANDIDATES, ROWS

_ZERO = CANDIDATES * LANES
_SCALE, _OFFSET, _BEFORE, _FIRST_SCALE, _FIRST_OFFSET = (LANES * k for k in range(1, 6))
_MAGNITUDE = np.int32(0x7FFFFFFF)


def search(
    x: Pointer,
    bits: Pointer,
    form: int,
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
                    gather(
                        x, bits, form, starts, heights, widths, stride, first, lanes, begin, rows,
                        panel,
                    )  # fmt: skip
                    if weighted:
                        gather(
                            weights, bits, 0, starts, heights, widths, stride, first, lanes,
                            begin, rows, shared,
                        )  # fmt: skip
                        multiply(shared, rows, shares, first, lanes)
                measure(
                    panel, shared, weighted, rows, room, size, family, shifts == 0, grid, unit,
                    terms, costs,
                )  # fmt: skip
            _choose(room, costs, size, over, stage == 0, best)
        _hold_on(loose, over, best)
        for lane in range(lanes):
            scale[first + lane] = np.float32(best[_SCALE + lane])
            zero[first + lane] = np.float32(best[_OFFSET + lane])


def add_costs(
    x: Pointer,
    bits: Pointer,
    form: int,
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
                    room[INVERSE + word * CANDIDATES * LANES + k * LANES + lane] = candidates[
                        (word * count + first + lane) * size + k
                    ]
        for i in range(size * LANES):
            costs[i] = 0.0
        for begin in range(0, longest, ROWS):
            rows = min(ROWS, longest - begin)
            gather(x, bits, form, starts, heights, widths, stride, first, lanes, begin, rows, panel)
            if weighted:
                gather(
                    weights, bits, 0, starts, heights, widths, stride, first, lanes, begin, rows,
                    shared,
                )  # fmt: skip
                multiply(shared, rows, shares, first, lanes)
            measure(panel, shared, weighted, rows, room, size, family, 0, grid, unit, terms, costs)
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
            room[INVERSE + to + lane] = np.float32(np.float32(1) / divisor)
            room[LOW + to + lane] = np.float32(qmin - offset)
            room[HIGH + to + lane] = np.float32(qmax - offset)


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
    exponent = np.int32(bits >> np.int32(23))
    below = np.int32(normal - (exponent if exponent >= np.int32(1) else np.int32(1)))
    below = below if below >= np.int32(0) else np.int32(0)
    drop = np.int32(np.int32(np.int32(23) - mantissa) + below)
    drop = drop if drop <= np.int32(23) else np.int32(23)
    half = np.int32(np.int32(np.int32(np.int32(1) << drop) - np.int32(1)) >> np.int32(1))
    bits = np.int32(np.int32(np.int32(bits + half) >> drop) << drop)
    bits = bits if bits >= smallest else smallest
    bits = bits if bits <= largest else largest
    return np.float32(np.int32(bits).view(np.float32))


@inlined
def _choose(
    room: Pointer, costs: Pointer, size: int, over: float, is_first: bool, best: Pointer
) -> None:
    """The best candidate of a stage, if it is better than what was; the first one of all is the
    beginning."""
    for i in range(size * LANES):
        divisor = np.float64(np.float32(np.float32(room[i]) * np.float32(over)))
        costs[i] = costs[i] * (divisor * divisor)
    # a number that is not known when this is compiled: else the loops become single steps
    width = min(size, 1) * LANES
    if is_first:
        for lane in range(width):
            best[_BEFORE + lane] = costs[lane]
            best[lane] = np.inf
    for k in range(size):
        to = k * LANES
        for lane in range(width):
            s, z = np.float64(room[to + lane]), np.float64(room[_ZERO + to + lane])
            cost, least = costs[to + lane], best[lane]
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

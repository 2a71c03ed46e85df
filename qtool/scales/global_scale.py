"""The float32 scale over all float8e4m3fn scales of a tensor, as nvfp4 has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES
from qtool.scales.powers import ceil_log2

Array = NDArray[Any]

# Elements of a window, and of those by which a large tensor's global scale is chosen.
_WINDOW, _JUDGED = 1 << 12, 1 << 16
_SMALLEST = 2.0**-126  # the smallest normal float32
# The significands of float8e4m3fn.
_SIGNIFICANDS = np.arange(8, 16, dtype=np.float32)


def power(absmax: float, levels: float) -> float:
    """The smallest power of two under which every block scale fits float8e4m3fn:
    absmax / (levels * 448) rounded up; 1 for a tensor of zeros."""
    if not absmax:
        return 1.0
    exponent = ceil_log2(np.float64(absmax) / _reach(levels))
    return max(float(np.ldexp(1.0, int(exponent))), _SMALLEST)


def options(absmax: float, levels: float) -> list[float]:
    """Global scales among which the best one is searched for.

    Twice the power of two leaves room for block scales larger than their block needs, and is what
    tensors have that share theirs with others; then follow it, absmax / (levels * 448), and that
    with room for the next steps of float4e2m1.
    """
    if not absmax:
        return [1.0]
    least = power(absmax, levels)
    tight = absmax / _reach(levels)
    return [2 * least, least, *(exchangeable(factor * tight) for factor in (1.0, 1.5, 1.75))]


def exchangeable(value: float) -> float:
    """The float32 nearest to a number of which every product with a float8e4m3fn scale equals the
    quotient by the rounded reciprocal, which some readers are given in its place, and which is the
    rounded reciprocal of that."""
    centre = np.float32(max(value, _SMALLEST))
    steps = np.arange(1, 4096)
    order = np.concatenate([[0], np.stack([steps, -steps], 1).reshape(-1)])
    near = (centre.view(np.int32) + order).astype(np.int32).view(np.float32)[:, None]
    inverse = np.float32(1) / near
    same = (_SIGNIFICANDS * near == _SIGNIFICANDS / inverse).all(axis=1)
    comes_back = (np.float32(1) / inverse == near)[:, 0]
    return float(near[np.argmax(same & comes_back), 0])


def best(
    choices: list[float], windows: Sequence[range], cost: Callable[[float, range], float]
) -> float:
    """The first of those choices of least cost in all windows together.

    Where a reciprocal is infinite, so is the cost, or NaN if there is a zero or filler.
    """
    totals = [sum(cost(choice, window) for window in windows) for choice in choices]
    return choices[int(np.argmin(np.nan_to_num(totals, nan=np.inf, posinf=np.inf)))]


def windows(size: int, span: int, *, all_of_it: bool) -> list[range]:
    """Parts of a tensor by which global scales are judged: of whole spans, a run of elements that
    holds whole groups, and evenly spread over it, or all of it."""
    width = span * max(_WINDOW // span, 1)
    count = -(-size // width)
    judged = count if all_of_it else min(count, max(_JUDGED // width, 1))
    starts = [index * count // judged * width for index in range(judged)]
    return [range(start, min(start + width, size)) for start in starts]


def _reach(levels: float) -> float:
    return levels * DTYPES["float8e4m3fn"].qmax

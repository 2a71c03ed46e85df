"""Chooses the global scale of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

from qtool import scales
from qtool.engine.request import Request
from qtool.kernels.geometry import group_span
from qtool.scales import global_scale
from qtool.spec import SEARCHES


def chosen(asked: Request, absmax: float, cost: Callable[[float, range, range], float]) -> float:
    """The smallest power of two that will do; of least cost where spec's method is a search, unless
    the tensor shares it with others.

    absmax: of the tensor, or of all those. cost: of a global scale, for the elements and the groups
    of a window.
    """
    spec, shape = asked.spec, asked.shape
    levels = scales.symmetric_levels(spec.dtype)
    if spec.method not in SEARCHES:
        return global_scale.power(absmax, levels)
    choices = global_scale.options(absmax, levels)
    span = group_span(shape, spec.granularity)
    if asked.absmax is not None or span is None or len(choices) == 1:
        return choices[0]
    length, count = span

    def of_window(over: float, window: range) -> float:
        groups = range(window.start // length * count, -(-window.stop // length) * count)
        return cost(over, window, groups)

    windows = global_scale.windows(math.prod(shape), length, all_of_it=spec.method == "optimal")
    return global_scale.best(choices, windows, of_window)

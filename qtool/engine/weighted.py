"""Weights of squared errors: checked, spread over a tensor, and searched with by the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.engine.request import Request
from qtool.errors import SpecError
from qtool.spec import SEARCHES, Blocked, PerAxis, QuantSpec, Shape, TensorInfo

Array = NDArray[Any]


def request(asked: Request, importance: Array) -> Request:
    """asked with weights of errors, one per element or per input channel.

    Raises SpecError for those that do not fit, and where scales are not searched for.
    """
    thing = f"importance of {asked.name}"
    if asked.given is not None:
        raise SpecError(thing, "a given scale leaves nothing to weigh", "leave one of them out")
    if asked.spec.method not in SEARCHES:
        rule = f"method {asked.spec.method} follows the range alone"
        raise SpecError(thing, rule, "use " + " or ".join(SEARCHES))
    info = TensorInfo(asked.name, asked.shape, asked.source, 0)
    axis = input_axis(info, asked.spec)
    if importance.shape != asked.shape and importance.shape not in channels(info, axis):
        rule = f"shape {importance.shape}, but the tensor has {asked.shape}"
        raise SpecError(thing, rule, "give " + wanted(info, axis))
    return replace(asked, weights=spread(checked(importance, thing), asked.shape, axis))


def input_axis(info: TensorInfo, spec: QuantSpec) -> int:
    """The axis of a tensor's input channels: what its consumer sums over; where none is known that
    of (outputs, inputs, ...), or of (inputs, outputs), as scales per index of axis 1 or blocks
    along axis 0 say."""
    if info.reduced_axis is not None:
        return info.reduced_axis
    granularity = spec.granularity
    inputs_first = (isinstance(granularity, PerAxis) and granularity.axis == 1) or (
        isinstance(granularity, Blocked) and granularity.axis == 0
    )
    return 0 if inputs_first else 1


def channels(info: TensorInfo, axis: int) -> list[tuple[int]]:
    """The shapes of weights per channel: one for each index of the input axis, or, of (outputs,
    inputs, ...), one for each element of a kernel."""
    if len(info.shape) < 2:
        return []
    found = [(info.shape[axis],)]
    if axis == 1 and info.output_axis in (0, None):
        found.append((math.prod(info.shape[1:]),))
    return list(dict.fromkeys(found))


def wanted(info: TensorInfo, axis: int) -> str:
    """The shapes that weights may have, for a message."""
    return " or ".join(str(shape) for shape in dict.fromkeys([info.shape, *channels(info, axis)]))


def checked(weights: Array, thing: str) -> Array:
    """Weights as float32. Raises SpecError for what cannot be one."""
    if weights.dtype.kind not in "fiuV":  # V: the element types of ml_dtypes
        raise SpecError(thing, f"{weights.dtype} values", "give numbers")
    with np.errstate(over="ignore"):
        single = ops.cast(weights, ops.FLOAT32)
    bad = ~(np.isfinite(single) & (single >= 0))
    if bad.any():
        first = int(np.argmax(bad))
        at = [int(i) for i in np.unravel_index(first, weights.shape)]
        rule = f"{weights.reshape(-1)[first]} at {at} is no weight"
        raise SpecError(thing, rule, "give finite ones of 0 and more")
    if weights.size and not single.any():
        raise SpecError(thing, "zeros alone", "leave it out, or give some weight")
    return single


def spread(weights: Array, shape: Shape, axis: int) -> Array:
    """Weights of elements or channels in the tensor's shape."""
    if weights.shape == shape:
        return weights
    if weights.size == shape[axis]:
        weights = weights.reshape(-1, *(1,) * (len(shape) - axis - 1))
    else:
        weights = weights.reshape(1, *shape[1:])
    return np.ascontiguousarray(np.broadcast_to(weights, shape))

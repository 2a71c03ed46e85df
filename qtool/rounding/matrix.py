"""A weight as the matrix that multiplies a layer's inputs."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from qtool.errors import SpecError
from qtool.spec import Blocked, Granularity, PerAxis, Shape, TensorInfo

Array = NDArray[Any]


def input_axis(info: TensorInfo, granularity: Granularity) -> int:
    """The axis, 0 or 1, of a weight's inputs; further ones belong to them, or to the outputs.

    (outputs, inputs): 1; a kernel of a convolution (outputs, inputs, ...): 1; (inputs, outputs),
    as MatMul of ONNX reads them: 0. Where no consumer is known, one scale per index of axis 1, or
    blocks along axis 0, say that the inputs come first.
    Raises SpecError where a weight is no such matrix.
    """
    thing = f"tensor {info.name}"
    if len(info.shape) < 2:
        raise SpecError(thing, f"shape {info.shape} is no matrix", "leave its activations out")
    axes = info.output_axis, info.reduced_axis
    if axes == (None, None):
        axes = (0, 1)
        if isinstance(granularity, PerAxis) and granularity.axis:
            axes = (granularity.axis, 0)
        if isinstance(granularity, Blocked) and granularity.axis == 0:
            axes = (1, 0)
    output, reduced = axes
    if output == 0 and reduced in (1, None):
        return 1
    if reduced == 0 and output in (1, None):
        return 0
    raise SpecError(
        thing,
        f"of shape {info.shape} is no one matrix: axis {output} has its outputs, {reduced} is "
        "summed over",
        "leave its activations out",
    )


def input_count(shape: Shape, axis: int) -> int:
    """How many inputs a weight has whose input_axis() is axis."""
    return shape[0] if axis == 0 else math.prod(shape[1:])


def as_matrix(values: Array, axis: int) -> Array:
    """A weight whose input_axis() is axis as (outputs, inputs); a view where it can be one."""
    flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    return flat if axis == 1 else flat.T

"""Which scale belongs to which element: per tensor, per axis and in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SpecError
from qtool.spec import Blocked, OnnxGranularity, PerAxis, PerTensor, Shape, normalize_axis

Array = NDArray[Any]


def expand(values: Array, shape: Shape, axis: int, block_size: int, thing: str) -> Array:
    """values of a scale or zero point, broadcastable to x's shape; errors as granularity_of()."""
    granularity = granularity_of(values.shape, shape, axis, block_size, thing)
    if isinstance(granularity, PerTensor):
        return values.reshape(())
    axis = granularity.axis
    if isinstance(granularity, PerAxis):
        return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    if block_size >= shape[axis]:
        return values
    repeated = np.repeat(values, block_size, axis=axis)
    return repeated[(slice(None),) * axis + (slice(shape[axis]),)]


def granularity_of(
    values: Shape, shape: Shape, axis: int, block_size: int, thing: str
) -> OnnxGranularity:
    """How a scale or zero point of the shape `values` belongs to x's shape.

    Raises SpecError where it does not fit the shape, the axis or the block size.
    """
    if block_size < 0:
        raise SpecError("block_size", f"{block_size} is negative", "use 0 or a positive integer")
    if block_size:
        axis = normalize_axis(axis, len(shape))
        _check_blocks(values, shape, axis, block_size, thing)
        return Blocked(axis, block_size)
    if values in ((), (1,)):
        return PerTensor()
    if len(values) != 1 or not shape:
        raise SpecError(
            thing,
            f"shape {values} fits neither per tensor nor per axis",
            "use a scalar or one dimension, or give block_size",
        )
    axis = normalize_axis(axis, len(shape))
    if values[0] != shape[axis]:
        raise SpecError(
            thing,
            f"length {values[0]} for axis {axis} of shape {shape}",
            f"use length {shape[axis]} or another axis",
        )
    return PerAxis(axis)


def _check_blocks(blocks: Shape, shape: Shape, axis: int, block_size: int, thing: str) -> None:
    without = [(*s[:axis], *s[axis + 1 :]) for s in (blocks, shape)]
    if len(blocks) != len(shape) or without[0] != without[1]:
        raise SpecError(
            thing,
            f"shape {blocks} for x of shape {shape}, blocks along axis {axis}",
            "it must equal x's shape except on the axis",
        )
    size, count = shape[axis], blocks[axis]
    needed = -(-size // block_size)
    if count == needed:
        return
    low = -(-size // max(count, 1))
    high = -(-size // (count - 1)) - 1 if count > 1 else size
    if count == 0 or not 0 < low <= high:
        raise SpecError(
            thing, f"{count} blocks for {size} elements on axis {axis}", f"use {needed}"
        )
    accepted = f"the accepted range is [{low}, {high}]" if count > 1 else f"use {low} or more"
    raise SpecError(
        "block_size", f"{block_size} does not split {size} elements into {count}", accepted
    )


def check_same_shape(scale: Array, zero: Array, scale_name: str, zero_name: str) -> None:
    single = ((), (1,))
    if scale.shape != zero.shape and not (scale.shape in single and zero.shape in single):
        raise SpecError(
            zero_name,
            f"shape {zero.shape} differs from {scale_name}'s {scale.shape}",
            "give both the same shape",
        )

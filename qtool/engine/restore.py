"""Dequantizes a tensor that is read and written tile by tile, over threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.engine.stream import tile_size
from qtool.kernels.tensor import TileRestorer
from qtool.pool import buffer, in_order
from qtool.spec import Granularity, Reader, Shape, Writer
from qtool.tensor import operator_scale

Array = NDArray[Any]


def restore(
    read: Reader,
    write: Writer,
    shape: Shape,
    dtype: DType,
    granularity: Granularity,
    scale: Array,
    zero_point: Array | None,
    output: DType,
    *,
    jobs: int,
    moved: Callable[[int], None],
) -> None:
    """Write (code - zero_point) * scale of every element, in the output type.

    read: gives the codes as stored: uint8 or uint16, packed below 8 bits. moved: told how many
    bytes of output more are done. The same values as tensor.dequantize().
    """
    compute = output if output.bits < 32 else ops.FLOAT32
    scales = ops.cast(operator_scale(scale), compute).astype(np.float32).reshape(-1)
    zeros = np.empty(0, np.float32)
    if zero_point is not None:
        zeros = zero_point.astype(np.float32).reshape(-1)
    restorer = TileRestorer(shape, dtype, granularity, scales, zeros)
    size, unit = math.prod(shape), np.dtype(np.uint16 if dtype.bits > 8 else np.uint8)
    step = tile_size(size, jobs)

    def tile(start: int) -> int:
        count = min(step, size - start)
        stored = buffer("codes", unit, dtype.nbytes(count) // unit.itemsize)
        read(start * dtype.bits // 8 // unit.itemsize, stored)
        values = buffer("values", np.dtype(np.float32), count)
        restorer.dequantize(stored.view(np.uint8), start, values)
        result = ops.cast(values, output) if output.bits < 64 else values.astype(np.float64)
        write(start * output.numpy.itemsize, result)
        return result.nbytes

    for nbytes in in_order(tile, range(0, size, step), jobs):
        moved(nbytes)

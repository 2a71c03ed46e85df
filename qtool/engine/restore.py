"""Dequantizes a tensor that is read and written tile by tile, over threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.engine.stream import TILE
from qtool.kernels.dequantize import decoder, dequantize
from qtool.kernels.layout import layout
from qtool.kernels.pack import unpack
from qtool.pool import in_order
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
    groups, table = layout(shape, granularity), decoder(dtype)
    compute = output if output.bits < 32 else ops.FLOAT32
    scales = ops.cast(operator_scale(scale), compute).astype(np.float32).reshape(-1)
    zeros = np.empty(0, np.float32)
    if zero_point is not None:
        zeros = zero_point.astype(np.float32).reshape(-1)
    size = math.prod(shape)

    def tile(start: int) -> int:
        count = min(TILE, size - start)
        codes = _codes(read, dtype, start, count)
        values = np.empty(count, np.float32)
        dequantize(codes, table, scales, zeros, groups, start, values)
        result = ops.cast(values, output) if output.bits < 64 else values.astype(np.float64)
        write(start * output.numpy.itemsize, result)
        return result.nbytes

    for nbytes in in_order(tile, range(0, size, TILE), jobs):
        moved(nbytes)


def _codes(read: Reader, dtype: DType, start: int, count: int) -> Array:
    """The codes of count elements, one each."""
    if dtype.bits >= 8:
        codes = np.empty(count, np.uint16 if dtype.bits > 8 else np.uint8)
        read(start, codes)
        return codes
    packed = np.empty(dtype.nbytes(count), np.uint8)
    read(start * dtype.bits // 8, packed)
    codes = np.empty(count, np.uint8)
    unpack(packed, dtype.bits, codes)
    return codes

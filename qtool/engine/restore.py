"""Dequantizes a tensor that is read and written tile by tile, over threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from qtool import ops
from qtool.dtypes import DType
from qtool.engine.tiling import tile_size
from qtool.kernels.tensor import TileRestorer
from qtool.pool import buffer, in_order
from qtool.spec import Writer
from qtool.tensor import Codes, operator_scale


def restore(
    codes: Codes, write: Writer, output: DType, *, jobs: int, moved: Callable[[int], None]
) -> None:
    """Write (code - zero_point) * scale of every element, in the output type.

    codes: such that engine.can_restore() is true. moved: told how many bytes of output more are
    done. The same values as tensor.dequantize().
    """
    dtype = codes.dtype
    compute = output if output.bits < 32 else ops.FLOAT32
    scales = (
        ops.cast(operator_scale(codes.scale, codes.global_scale), compute)
        .astype(np.float32)
        .reshape(-1)
    )
    zeros = np.empty(0, np.float32)
    if codes.zero_point is not None:
        zeros = codes.zero_point.astype(np.float32).reshape(-1)
    width = dtype.bits if codes.is_packed else max(dtype.bits, 8)
    restorer = TileRestorer(codes.shape, dtype, codes.granularity, scales, zeros, width)
    size = math.prod(codes.shape)
    step = tile_size(size, jobs)

    def tile(start: int) -> int:
        count = min(step, size - start)
        stored = buffer("codes", np.dtype(np.uint8), -(-count * width // 8))
        codes.read(start * width // 8, stored)
        values = buffer("values", np.dtype(np.float32), count)
        restorer.dequantize(stored, start, values)
        result = ops.cast(values, output) if output.bits < 64 else values.astype(np.float64)
        write(start * output.numpy.itemsize, result)
        return result.nbytes

    in_order(tile, range(0, size, step), jobs, moved)

"""QuantizeLinear of large arrays, with the kernels."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool import ops
from qtool.dtypes import DTypeLike, resolve
from qtool.engine import SOURCES, kernels_pay
from qtool.engine.tiling import tile_size
from qtool.pool import default_jobs, in_order
from qtool.spec import QuantSpec

Array = NDArray[Any]


@wraps(ops.quantize_linear)
def quantize_linear(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
    precision: DTypeLike | None = None,
    saturate: bool = True,
) -> Array:
    x = np.asarray(x)
    if resolve(x.dtype, "x").name in SOURCES and kernels_pay(x.size):
        y = _with_kernels(
            x, y_scale, y_zero_point, axis, block_size, output_dtype, precision, saturate
        )
        if y is not None:
            return y
    return ops.quantize_linear(
        x, y_scale, y_zero_point, axis=axis, block_size=block_size, output_dtype=output_dtype,
        precision=precision, saturate=saturate,
    )  # fmt: skip


def _with_kernels(
    x: Array,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None,
    axis: int,
    block_size: int,
    output_dtype: DTypeLike | None,
    precision: DTypeLike | None,
    saturate: bool,
) -> Array | None:
    """y; None where the kernels do not know the case."""
    inputs = ops.quantize_inputs(x, y_scale, y_zero_point, output_dtype, precision)
    _, scale, zero_point, dtype, divide_in = inputs
    granularity = ops.granularity_of(scale.shape, x.shape, axis, block_size, "y_scale")
    if zero_point is not None:
        ops.granularity_of(zero_point.shape, x.shape, axis, block_size, "y_zero_point")
    shifts_grid = zero_point is not None and not dtype.is_integer
    if divide_in != ops.FLOAT32 or shifts_grid or not (saturate or dtype.is_integer):
        return None
    from qtool.kernels.tensor import TileQuantizer

    spec = QuantSpec(dtype, granularity, nonfinite="allow")
    quantizer = TileQuantizer(x.shape, resolve(x.dtype), spec)
    divisor, offset = scale.astype(np.float32).reshape(-1), np.empty(0, np.float32)
    if zero_point is not None:
        offset = zero_point.astype(np.float32).reshape(-1)
    y = np.empty(x.shape, dtype.numpy)
    flat, width = np.ascontiguousarray(x).reshape(-1), max(dtype.bits, 8)
    stored = y.reshape(-1).view(np.uint8)

    jobs = default_jobs()
    step = tile_size(flat.size, jobs)

    def tile(start: int) -> None:
        part = flat[start : start + step]
        out = stored[start * width // 8 : (start + part.size) * width // 8]
        quantizer.encode(part, divisor, offset, start, 0, width, out)

    in_order(tile, range(0, flat.size, step), jobs, lambda _: None)
    return y

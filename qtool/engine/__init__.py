"""Quantizes tensors: plainly, or for large ones with kernels, tile by tile over threads."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from qtool.dtypes import DType, resolve
from qtool.engine import measuring, plain, restore_plain, tiling
from qtool.engine.request import SOURCES, Request, given_codes, given_scale, request
from qtool.errors import SpecError
from qtool.kernels.geometry import group_span
from qtool.pool import default_jobs
from qtool.spec import QuantSpec, Reader
from qtool.tensor import Codes, QuantizedTensor

__all__ = [
    "SOURCES",
    "TILES_PAY",
    "Request",
    "can_restore",
    "can_stream",
    "default_jobs",
    "find_absmax",
    "given_codes",
    "given_scale",
    "kernels_pay",
    "measuring",
    "plain",
    "quantize",
    "request",
    "restore_plain",
    "work",
]

# Elements from which on loading the kernels pays, and compiling them, which happens once.
LOADING_PAYS, COMPILING_PAYS = 1 << 21, 1 << 25
# Elements of one tensor from which on tiles pay, once the kernels are loaded.
TILES_PAY = 1 << 16

_EFFORT = {"mse": 4, "optimal": 128}


def quantize(
    x: ArrayLike,
    spec: QuantSpec,
    *,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    importance: ArrayLike | None = None,
    hessian: ArrayLike | None = None,
    damping: float | None = None,
    act_order: bool | None = None,
    name: str = "x",
) -> QuantizedTensor:
    """Quantize one tensor as spec says.

    x: float32, float16, bfloat16, float64 (rounded to float32 first) or int32, any shape.
    scale, zero_point: given ones instead of spec.method: a number for every group, or an array of
        the granularity's scale shape. Without a zero point it is 0.
    importance: a non-negative weight of the squared error of each element, or, of shape
        (inputs,), of each index of axis 1, or of axis 0 where spec has scales per axis 1 or blocks
        along axis 0; spec.method, one of SEARCHES, makes the weighted error small.
    hessian: (inputs, inputs), the sum or mean of v v^T over inputs v of the layer whose weight x
        is: codes are chosen for the least error of its outputs, see engine.second_order. x is
        (outputs, inputs, ...), or (inputs, outputs) where spec has scales per axis 1 or blocks
        along axis 0. damping, act_order: see rounding.factored(); None: 0.01 and True.
    name: what messages call the tensor.

    The codes are computed from the scale as it is stored; a chosen scale divides in float32 unless
    spec.precision says otherwise, a given one in the standard's default precision; oneDNN's
    semantics always divide in float32.
    Raises SpecError for arguments that do not fit, TensorError for NaN and Inf in x unless
    spec.nonfinite is "allow".
    """
    x = np.asarray(x, order="C")
    asked = request(name, x.shape, resolve(x.dtype, name), spec, scale, zero_point)
    if importance is not None:
        from qtool.engine import weighted

        asked = weighted.request(asked, np.asarray(importance))
    if hessian is not None:
        from qtool.engine import second_order

        return second_order.quantize_array(x, asked, np.asarray(hessian), damping, act_order)
    if damping is not None or act_order is not None:
        raise SpecError("damping, act_order", "given without a Hessian", "give one")
    searches = asked.weights is not None or spec.method == "optimal"
    if not (can_stream(asked) or searches) or not kernels_pay(work(spec, x.size)):
        return plain.quantize(x, asked)
    if not can_stream(asked):
        return plain.quantize(x, asked, default_jobs())
    from qtool.engine.stream import quantize_array

    return quantize_array(x, asked, jobs=default_jobs())


def find_absmax(read: Reader, asked: Request, *, jobs: int) -> float:
    """The largest magnitude among the finite elements of a tensor, 0 where there are none."""
    size = math.prod(asked.shape)
    if can_stream(asked) and kernels_pay(size):
        from qtool.engine.stream import Stream

        return Stream(read, asked, jobs, lambda _: None).absmax()
    largest = 0.0
    for start in range(0, size, plain.BOX):
        x = np.empty(min(plain.BOX, size - start), asked.source.numpy)
        read(start, x)
        wide = np.abs(x.astype(np.float32))
        largest = max(largest, float(wide.max(where=np.isfinite(wide), initial=0.0)))
    return largest


def work(spec: QuantSpec, elements: int) -> int:
    """What quantizing by spec takes, as elements that are not searched for scales."""
    return elements * _EFFORT.get(spec.method, 1)


def kernels_pay(elements: int) -> bool:
    """Whether work on that many elements in all, see work(), is done sooner with kernels."""
    if elements < LOADING_PAYS:
        return False
    from qtool.kernels import machine

    return elements >= COMPILING_PAYS or machine.is_kept()


def can_stream(asked: Request) -> bool:
    """Whether there is something for the kernels to do, they know the case, and no range
    needs all values at once."""
    spec = asked.spec
    shifts_grid = asked.given is not None and asked.given[1] is not None
    return (
        0 not in asked.shape
        and asked.weights is None
        and asked.source.name in SOURCES
        and asked.precision.name == "float32"
        and spec.saturate
        and not spec.bias
        and not (spec.needs_distribution and asked.given is None)
        and (spec.dtype.is_integer or not shifts_grid)
        and (spec.method != "optimal" or asked.given is not None or _has_windows(asked))
    )


def _has_windows(asked: Request) -> bool:
    """Whether whole groups lie in runs that memory holds."""
    span = group_span(asked.shape, asked.spec.granularity)
    return span is not None and span[0] <= tiling.LARGEST_WINDOW


def can_restore(codes: Codes, output: DType) -> bool:
    """Whether float32 holds the product before it is rounded to the output type.

    A difference of 16-bit codes does not fit 16-bit floats, so its rounding comes first.
    """
    dtype = codes.dtype
    return dtype.is_target and (output.bits >= 32 or dtype.bits <= 8) and codes.bias is None

"""Quantizes a weight so that a layer's outputs, not the weight itself, change least."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import engine, ops, rounding
from qtool.engine import plain
from qtool.engine.request import Request
from qtool.errors import SpecError, TensorError
from qtool.pool import default_jobs, in_order
from qtool.rounding.products import kernels_pay
from qtool.spec import QuantSpec, TensorInfo, folded
from qtool.tensor import OutputError, QuantizedTensor, bias_of, operator_scale

Array = NDArray[Any]

# Rows of a matrix that are quantized at once. A row's result does not hang on the others.
ROWS = 512


def quantize(
    x: Array,
    asked: Request,
    hessian: Array,
    axis: int,
    *,
    damping: float = rounding.DAMPING,
    act_order: bool = True,
    jobs: int = 1,
) -> QuantizedTensor:
    """The tensor x, in C order, as asked, its codes chosen by rounding.quantize_rows().

    hessian: (inputs, inputs), as rounding.checked() or rounding.mean_of_products() returns it.
    axis: of the inputs, see rounding.input_axis(). damping, act_order: see rounding.factored().
    Scales are those of nearest rounding, so that columns come in any order: on MiniLM, with int4
    in blocks of 32, outputs had nine tenths of the error that scales chosen anew at each block,
    whose columns come in order, gave.
    Raises TensorError as engine.quantize(), and where hessian is none.
    """
    single = ops.cast(x, ops.FLOAT32)
    _check(x, single, asked)
    if not x.size:
        return plain.quantize(x, asked)
    scale, zero, over = _parameters(x, single, asked, jobs)
    factor = rounding.factored(hessian, damping, asked.name, act_order=act_order, jobs=jobs)
    grid = _grid(asked, scale, zero, over, axis)
    y = np.empty(x.shape, asked.spec.dtype.numpy)
    weight, codes = (rounding.as_matrix(array, axis) for array in (single, y))
    compiled = kernels_pay(x.size * len(hessian))

    def chunk(start: int) -> rounding.Figures:
        part = slice(start, start + ROWS)
        rows = grid.rows(part)
        return rounding.quantize_rows(weight[part], factor, rows, codes[part], compiled=compiled)

    found: list[rounding.Figures] = []
    in_order(chunk, range(0, len(weight), ROWS), jobs, found.append)
    tensor = plain.measured(x, single, scale, zero, asked, over, y)
    tensor.stats.clipped_low = sum(figures.clipped_low for figures in found)
    tensor.stats.clipped_high = sum(figures.clipped_high for figures in found)
    squares = np.concatenate([figures.squares for figures in found], axis=1)
    return replace(tensor, output_error=OutputError.of(*map(math.fsum, squares)))


def quantize_array(
    x: Array, asked: Request, hessian: Array, damping: float | None, act_order: bool | None
) -> QuantizedTensor:
    """quantize() by what engine.quantize() is given."""
    if damping is not None and not 0 <= damping < math.inf:
        raise SpecError("damping", f"{damping} is negative or not finite", "use 0.01")
    info = TensorInfo(asked.name, asked.shape, asked.source, x.nbytes)
    axis = rounding.input_axis(info, asked.spec.granularity)
    inputs = rounding.input_count(asked.shape, axis)
    return quantize(
        x, asked, rounding.checked(hessian, inputs, asked.name), axis,
        damping=rounding.DAMPING if damping is None else damping,
        act_order=act_order is not False, jobs=default_jobs(),
    )  # fmt: skip


def check_spec(spec: QuantSpec) -> None:
    """Refuse codes that have no finite error."""
    if not spec.saturate:
        rule = "NaN and Inf have no error that could be carried to other columns"
        raise SpecError("saturate", rule, "leave --no-saturate or second-order rounding out")


def _check(x: Array, single: Array, asked: Request) -> None:
    """Refuse what an error cannot be carried on from."""
    check_spec(asked.spec)
    bad = ~np.isfinite(single)
    if bad.any():
        first = int(np.argmax(bad))
        error = plain.nonfinite_error(asked, first, x.reshape(-1)[first], int(bad.sum()))
        raise TensorError(error.thing, error.rule, "mend the weights, or leave its activations out")


def _parameters(
    x: Array, single: Array, asked: Request, jobs: int
) -> tuple[Array, Array | None, float | None]:
    """Scale, zero point and global scale of nearest rounding, with kernels where that pays."""
    pays = engine.kernels_pay(engine.work(asked.spec, x.size))
    if not (engine.can_stream(asked) and pays):
        return plain.parameters(x, single, asked, jobs if pays else 0)
    from qtool.engine import stream

    tensor = stream.quantize_array(x, asked, jobs=jobs)
    return tensor.scale, tensor.zero_point, tensor.global_scale


def _grid(
    asked: Request, scale: Array, zero: Array | None, over: float | None, axis: int
) -> rounding.Grid:
    """The parameters of every element of the matrix."""
    spec, shape = asked.spec, folded(asked.shape, asked.spec.granularity)
    groups = plain.Groups(asked.shape, spec.granularity)
    bias = bias_of(scale, zero, spec.dtype) if spec.bias else None
    everything = slice(None), slice(None), slice(None)

    def spread(values: Array | None) -> Array | None:
        if values is None:
            return None
        wide = np.broadcast_to(groups.of(values, everything), shape)
        return rounding.as_matrix(wide.reshape(asked.shape), axis)

    divisor = spread(operator_scale(scale, over))
    assert divisor is not None
    return rounding.Grid(spec, asked.precision, divisor, spread(zero), spread(bias))

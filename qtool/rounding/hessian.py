"""H of a layer's inputs: E = tr(D H D^T) is the squared error of its outputs, D that of its
weights (outputs, inputs)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import resolve
from qtool.errors import TensorError
from qtool.pool import in_order
from qtool.rounding.products import kernels_pay, subtract_product

Array = NDArray[Any]

# Rows of H that a thread works on at once.
_STRIP = 128
# How far from symmetric H may be, in parts of its largest element: files may hold float32 sums.
_ASYMMETRY = 1e-4
# Of what sums over inputs in float32 can be, with room for squares of them.
_LARGEST = 1e100


def mean_of_products(batches: Iterable[Array], inputs: int, jobs: int) -> tuple[Array, int]:
    """(inputs, inputs): the mean of x x^T over all samples x, and how many there are.

    batches: float32 of (rows, inputs). Every element is added up in float64 in the order of the
    samples, however they are divided into batches.
    """
    total, rows = np.zeros((inputs, inputs)), 0
    for batch in batches:
        subtract_products(total, batch, jobs)
        rows += len(batch)
    return mean(total, rows), rows


def subtract_products(total: Array, batch: Array, jobs: int) -> None:
    """Subtract x x^T of all samples x from a matrix, in its upper triangle alone."""
    x, inputs = np.ascontiguousarray(batch, np.float64), batch.shape[1]
    compiled = kernels_pay(x.size * inputs)

    def strip(start: int) -> None:
        stop = min(start + _STRIP, inputs)
        part, columns = total[start:stop, start:], x[:, start:stop]
        subtract_product(part, columns.T, x[:, start:], compiled=compiled)

    in_order(strip, range(0, inputs, _STRIP), jobs, lambda _: None)


def mean(total: Array, rows: int) -> Array:
    """What subtract_products() has made of zeros and of so many samples, as their mean."""
    total /= -max(rows, 1)
    for start in range(0, len(total), _STRIP):
        stop = min(start + _STRIP, len(total))
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total


def checked(hessian: Array, inputs: int, name: str) -> Array:
    """float64 H of the tensor of that name, symmetric to the last bit.

    Raises TensorError where it is no H: of another shape, not finite, not symmetric, or negative
    on the diagonal.
    """
    thing, remedy = f"Hessian of {name}", "give the sum or the mean of x x^T"
    if hessian.shape != (inputs, inputs):
        rule = f"shape {hessian.shape}, but the tensor has {inputs} inputs"
        raise TensorError(thing, rule, f"give ({inputs}, {inputs})")
    if resolve(hessian.dtype, thing).kind in ("bool", "complex"):
        raise TensorError(thing, f"{hessian.dtype} values", remedy)
    with np.errstate(invalid="ignore"):  # of a signaling NaN
        h = hessian.astype(np.float64)
    largest = float(max(h.max(initial=0.0), -h.min(initial=0.0)))
    if not largest <= _LARGEST:
        rule = f"its largest value is {largest:g}"
        raise TensorError(thing, rule, f"{remedy}, finite and at most {_LARGEST:g}")
    for start in range(0, inputs, _STRIP):
        stop = min(start + _STRIP, inputs)
        part, other = h[start:stop, start:], h[start:, start:stop].T
        if np.abs(part - other).max() > _ASYMMETRY * largest:
            raise TensorError(thing, "is not symmetric", remedy)
        part += other
        part /= 2
        h[start:, start:stop] = part.T
    if (h.diagonal() < 0).any():
        at = int(np.argmax(h.diagonal() < 0))
        raise TensorError(thing, f"{h[at, at]:g} at [{at}, {at}] is below zero", remedy)
    return h

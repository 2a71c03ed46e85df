"""The triangular factor of a damped Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import TensorError
from qtool.pool import in_order
from qtool.rounding.products import kernels_pay, subtract_product

Array = NDArray[Any]

DAMPING = 0.01  # of GPTQ
# Columns that are done before what they change elsewhere is worked out: a product of matrices.
BLOCK = 64
# Rows of the factor that a thread works on at once.
_STRIP = 128


@dataclass(frozen=True)
class Factor:
    """U, upper triangular: U^T U = (H + diag(added))[places][:, places].

    places: the inputs, the one whose column is quantized first in the last place. added: to the
    diagonal, in the order of places.
    """

    upper: Array
    places: Array
    added: Array


def factored(hessian: Array, damping: float, name: str, *, act_order: bool, jobs: int) -> Factor:
    """The factor of a Hessian that hessian.checked() has returned.

    damping: in parts of the mean of the diagonal, added to it. act_order: columns of large diagonal
    elements are quantized first. An input that is always zero changes no output: its column stands
    for itself, with the mean as its diagonal element.
    Raises TensorError where the result is not positive definite.
    """
    diagonal = hessian.diagonal()
    live = diagonal > 0
    mean = math.fsum(diagonal) / max(int(live.sum()), 1) or 1.0
    unit = math.ldexp(1.0, -math.frexp(mean)[1])  # a power of two changes no digit
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
    places = order[::-1].copy()
    added = np.where(live, damping * mean, mean)[places] * unit
    upper = hessian[np.ix_(places, places)]
    upper *= unit
    np.fill_diagonal(upper, upper.diagonal() + added)
    if hessian[~live].any():
        raise _not_positive(name, damping)
    _cholesky(upper, name, damping, jobs)
    return Factor(upper, places, added)


def _cholesky(upper: Array, name: str, damping: float, jobs: int) -> None:
    """Replace a symmetric matrix, of which the upper triangle is read, by U with U^T U = it.

    From each element the products that belong to it are subtracted in the order of the rows of U.
    """
    size = len(upper)
    least = upper.diagonal() * (size * np.finfo(np.float64).eps)  # what rounding leaves of zero
    compiled = kernels_pay(size**3 // 6)
    for low in range(0, size, BLOCK):
        high = min(low + BLOCK, size)
        for k in range(low, high):
            if not upper[k, k] > least[k]:
                raise _not_positive(name, damping)
            root = math.sqrt(upper[k, k])
            upper[k, k], upper[k, :k] = root, 0.0
            row = upper[k, k + 1 :]
            row /= root
            upper[k + 1 : high, k + 1 :] -= np.multiply.outer(row[: high - k - 1], row)

        def strip(start: int, rows: Array = upper[low:high]) -> None:
            stop = min(start + _STRIP, size)
            part, columns = upper[start:stop, start:], rows[:, start:stop]
            subtract_product(part, columns.T, rows[:, start:], compiled=compiled)

        in_order(strip, range(high, size, _STRIP), jobs, lambda _: None)


def _not_positive(name: str, damping: float) -> TensorError:
    rule = f"is not positive definite with a damping of {damping:g}"
    return TensorError(f"Hessian of {name}", rule, "use a larger --damping, or more samples")

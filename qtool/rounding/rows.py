"""Second-order rounding of rows of a weight: the error of a column is carried to later ones.

Of all that is still open, the columns not yet quantized, the best real values are kept in mind.
With H = R R^T, R upper triangular in the order of the columns, the squared error of the outputs is
tr(D H D^T) = ||D R||^2, and column k of D R is r_kk (D_k + sum over i < k of D_i r_ik / r_kk): so
the best value of column k is w_k less that sum, whatever comes later, and its nearest code leaves
the error r_kk (code's value - best value). This is OBQ and GPTQ, whose Cholesky factor of the
inverse Hessian is the inverse of R, without inverting anything.

Source: Frantar et al. 2022, GPTQ, arXiv 2210.17323.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DType
from qtool.rounding.factor import BLOCK, Factor
from qtool.rounding.nearest import codes_of, estimated
from qtool.rounding.products import subtract_product
from qtool.spec import QuantSpec

Array = NDArray[Any]
# What rounding leaves of a difference of equal sums of squares.
_NOISE = 1e-12
Parameters = tuple[Array, Array | None, Array | None]


@dataclass(frozen=True)
class Grid:
    """The codes that a matrix (outputs, inputs) may have, and what they stand for.

    scale, zero_point, bias: of each element. precision: type of the division.
    """

    spec: QuantSpec
    precision: DType
    scale: Array
    zero_point: Array | None
    bias: Array | None

    def rows(self, part: slice) -> Grid:
        """Of some rows of the matrix."""
        zero_point = None if self.zero_point is None else self.zero_point[part]
        bias = None if self.bias is None else self.bias[part]
        return Grid(self.spec, self.precision, self.scale[part], zero_point, bias)

    def columns(self, places: Array) -> Parameters:
        """Scale, zero point and bias of some columns, each a row."""
        scale, zero, bias = (
            None if a is None else np.ascontiguousarray(a[:, places].T)
            for a in (self.scale, self.zero_point, self.bias)
        )
        assert scale is not None
        return scale, zero, bias

    def nearest(self, x: Array, parameters: Parameters) -> tuple[Array, Array, Array]:
        """Of float32 x: the rounded values before saturation, the codes, and what these stand
        for."""
        scale, zero_point, bias = parameters
        v, codes = codes_of(x, scale, zero_point, self.spec, self.precision)
        return v, codes, estimated(codes, scale, zero_point, bias, self.spec.dtype)


@dataclass(frozen=True)
class Figures:
    """What is to be said of quantized rows.

    clipped_low, clipped_high: how many rounded values lay below and above the codes.
    squares: for each row d H d^T, with d the error of its codes, that of the nearest ones, and the
    row itself.
    """

    clipped_low: int
    clipped_high: int
    squares: Array


def quantize_rows(
    weight: Array, factor: Factor, grid: Grid, codes: Array, *, compiled: bool
) -> Figures:
    """Quantize float32 rows (rows, inputs), each on its own, into codes.

    compiled: whether with kernels.
    """
    w = np.ascontiguousarray(weight.T[factor.places])
    squares, added = np.zeros((2, 3, len(weight)))
    clipped_low = clipped_high = 0
    pending = np.zeros(w.shape)  # less the sum that the best value needs, times r_kk
    nearest = np.empty(w.shape)
    for high in range(len(w), 0, -BLOCK):
        low = max(high - BLOCK, 0)
        block = slice(low, high)
        parameters = grid.columns(factor.places[block])
        v, found, error, residue = _block(w[block], pending[block], factor.upper[block, block],
                                          grid, parameters)  # fmt: skip
        codes[:, factor.places[block]] = found.T
        subtract_product(pending[:low], factor.upper[:low, block], error, compiled=compiled)
        squares[0] += _squares(residue)
        added[0] += _squares(error, factor.added[block])
        clipped_low += int(np.count_nonzero(v < grid.spec.qmin))
        clipped_high += int(np.count_nonzero(v > grid.spec.dtype.qmax))
        nearest[block] = grid.nearest(w[block], parameters)[2]
        nearest[block] -= w[block]
    for i in (1, 2):
        squares[i] = _outputs(nearest, factor, pending, compiled=compiled)
        added[i] = _squares(nearest, factor.added)
        nearest[:] = w
    of_outputs = squares - added
    of_outputs[of_outputs < squares * _NOISE] = 0.0
    return Figures(clipped_low, clipped_high, of_outputs)


def _block(
    w: Array, pending: Array, upper: Array, grid: Grid, parameters: Parameters
) -> tuple[Array, Array, Array, Array]:
    """Quantize the columns of one block, the last one first; `pending` of the others follows.

    Returns rounded values before saturation, codes, D, and columns of D R.
    """
    v, error, residue = np.empty((3, *w.shape))
    codes = np.empty(w.shape, grid.spec.dtype.numpy)
    for k in reversed(range(len(w))):
        shift = pending[k] / upper[k, k]
        best = w[k] + shift
        np.copyto(best, w[k], where=shift == 0)  # -0.0 stays -0.0
        scale, zero, bias = (None if a is None else a[k] for a in parameters)
        assert scale is not None
        parts = scale, zero, bias
        v[k], codes[k], value = grid.nearest(ops.cast(best, ops.FLOAT32), parts)
        if not (fits := np.isfinite(value)).all():  # the others are rounded as they are
            best = np.where(fits, best, w[k])
            v[k], codes[k], value = grid.nearest(ops.cast(best, ops.FLOAT32), parts)
        np.subtract(value, w[k], out=error[k], dtype=np.float64)
        np.multiply(value - best, upper[k, k], out=residue[k])
        pending[:k] -= np.multiply.outer(upper[:k, k], error[k])
    return v, codes, error, residue


def _outputs(d: Array, factor: Factor, memory: Array, *, compiled: bool) -> Array:
    """d R R^T d^T of every column of d (inputs, rows), in the order of factor.places."""
    memory[:] = 0.0
    for low in range(0, len(d), BLOCK):
        high = min(low + BLOCK, len(d))
        block = slice(low, high)
        subtract_product(memory[:high], factor.upper[:high, block], d[block], compiled=compiled)
    return _squares(memory)


def _squares(x: Array, weights: Array | None = None) -> Array:
    """The sum over axis 0 of x^2, or of weights x^2."""
    squared = np.square(x)
    if weights is not None:
        squared *= weights[:, None]
    return np.asarray(np.add.reduce(squared, axis=0))

"""Which code stands for a value: the nearest one, or the one of least error of a layer's output."""

from __future__ import annotations

from qtool.rounding.factor import DAMPING, Factor, factored
from qtool.rounding.hessian import checked, mean_of_products
from qtool.rounding.matrix import as_matrix, input_axis, input_count
from qtool.rounding.nearest import codes_of, estimated, unbounded
from qtool.rounding.rows import Figures, Grid, quantize_rows

__all__ = [
    "DAMPING",
    "Factor",
    "Figures",
    "Grid",
    "as_matrix",
    "checked",
    "codes_of",
    "estimated",
    "factored",
    "input_axis",
    "input_count",
    "mean_of_products",
    "quantize_rows",
    "unbounded",
]

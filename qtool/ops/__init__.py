"""The standard operators in plain NumPy: the definition that every faster path must equal.

Sources: ONNX QuantizeLinear 10 to 28, DequantizeLinear 10 to 28, DynamicQuantizeLinear 11, and
oneDNN Graph "Quantize".
"""

from __future__ import annotations

from qtool.ops.arithmetic import (
    FLOAT32,
    FLOAT64,
    biased,
    cast,
    cast_integers,
    check_scale,
    round_to_grid,
    rounded,
    rounded_onednn,
    saturate_cast,
    scaled,
)
from qtool.ops.dynamic import dynamic_parameters, dynamic_quantize_linear
from qtool.ops.linear import SOURCES, dequantize_linear, quantize_inputs, quantize_linear
from qtool.ops.onednn import onednn_quantize
from qtool.ops.shapes import expand, granularity_of

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "SOURCES",
    "biased",
    "cast",
    "cast_integers",
    "check_scale",
    "dequantize_linear",
    "dynamic_parameters",
    "dynamic_quantize_linear",
    "expand",
    "granularity_of",
    "onednn_quantize",
    "quantize_inputs",
    "quantize_linear",
    "round_to_grid",
    "rounded",
    "rounded_onednn",
    "saturate_cast",
    "scaled",
]

"""dequantize_linear on values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.dtypes import DTYPES
from qtool.ops import biased, dequantize_linear

Array = NDArray[Any]
INF, NAN = float("inf"), float("nan")


def array(dtype: str, values: Any) -> Array:
    """values rounded once to the type called dtype."""
    return np.array(values, np.float64).astype(DTYPES[dtype].numpy)


def bits(dtype: str, codes: Any) -> Array:
    """The value of the type called dtype with these bits."""
    return np.array(codes, np.uint8).view(DTYPES[dtype].numpy)


# fmt: off
VECTORS = [
    # name, x, x_scale, x_zero_point, attributes, type and values of y
    ("per tensor", array("uint8", [0, 3, 128, 255]), array("float32", 2), array("uint8", 128), {},
     "float32", [-256, -250, 0, 254]),
    ("without zero point", array("int4", [-8, 7]), array("float32", 0.5), None, {},
     "float32", [-4, 3.5]),
    ("the widest difference of int8", array("int8", [-128, 127]), array("float32", [1, 1]),
     array("int8", [127, -128]), {"axis": 0}, "float32", [-255, 255]),
    ("the widest difference of uint16", array("uint16", [0, 65535]), array("float32", [1, 1]),
     array("uint16", [65535, 0]), {"axis": 0}, "float32", [-65535, 65535]),
    ("axis 0", array("int8", [[1, 2], [3, 4]]), array("float32", [1, 10]), array("int8", [0, 1]),
     {"axis": 0}, "float32", [[1, 2], [20, 30]]),
    ("axis 1 is the default", array("int8", [[1, 2], [3, 4]]), array("float32", [1, 10]),
     array("int8", [0, 1]), {}, "float32", [[1, 10], [3, 30]]),
    ("axis -2", array("int8", [[1, 2], [3, 4]]), array("float32", [1, 10]), None, {"axis": -2},
     "float32", [[1, 2], [30, 40]]),
    ("a short last block", array("uint2", [[0, 1, 2, 3, 3]]), array("float32", [[1, 2, 5]]),
     array("uint2", [[0, 1, 2]]), {"block_size": 2}, "float32", [[0, 1, 2, 4, 5]]),
    ("blocks along axis -2", array("int8", [[1], [2], [3]]), array("float32", [[1], [3]]), None,
     {"axis": -2, "block_size": 2}, "float32", [[1], [2], [9]]),
    ("int32", np.array([2**31 - 1, -(2**31), 16777217], np.int32), array("float32", 1), None, {},
     "float32", [2147483648, -2147483648, 16777216]),
    ("int32 to bfloat16 rounds once", np.array([2**30 + 2**22 + 1], np.int32),
     array("bfloat16", 1), None, {}, "bfloat16", [2**30 + 2**23]),
    ("int32 to float16 overflows", np.array([65519, 65520], np.int32), array("float16", 1), None,
     {}, "float16", [65504, INF]),
    ("y has the type of the scale", array("int8", [3]), array("float16", 0.1), None, {},
     "float16", [0.2998046875]),
    ("output_dtype is the type of the product", array("int8", [3]), array("float16", 0.1), None,
     {"output_dtype": 1}, "float32", [0.29992675781250]),
    ("the scale is rounded to output_dtype first", array("int8", [3]), array("float32", 0.1), None,
     {"output_dtype": "bfloat16"}, "bfloat16", [0.30078125]),
    ("the difference is rounded to output_dtype", array("int16", [257]), array("float32", 1), None,
     {"output_dtype": 16}, "bfloat16", [256]),
    ("output_dtype 0 is the default", array("int8", [3]), array("float16", 1), None,
     {"output_dtype": 0}, "float16", [3]),
    ("a float8e8m0 scale", array("int8", [3]), array("float8e8m0", 0.125), None,
     {"output_dtype": "float32"}, "float32", [0.375]),
    ("float8", array("float8e4m3fn", [448, -0.0, NAN, 0.001953125]), array("float32", 2), None, {},
     "float32", [896, -0.0, NAN, 0.00390625]),
    ("Inf of float8", array("float8e5m2", [INF, -INF]), array("float32", -1), None, {},
     "float32", [-INF, INF]),
    ("a float8 zero point far from x", bits("float8e5m2", [0x7B]), array("bfloat16", 1),
     bits("float8e5m2", 0x01), {}, "bfloat16", [57344]),
    ("the product overflows", array("int8", [127]), array("float32", 3e38), None, {},
     "float32", [INF]),
    ("float4 and float6", array("float4e2m1", [-6, 0.5, -0.0]), array("float32", 1), None, {},
     "float32", [-6, 0.5, -0.0]),
    ("a scale of zero", array("int8", [-1, 1]), array("float32", 0), None, {},
     "float32", [-0.0, 0.0]),
    ("a scalar", array("int8", 5), array("float32", 2), None, {}, "float32", 10),
    ("no elements", np.zeros((0, 3), np.int8), array("float32", [1, 2, 3]), None, {},
     "float32", np.zeros((0, 3))),
    ("scale (1,) beside zero point ()", array("int8", [5]), array("float32", [2]),
     array("int8", 1), {}, "float32", [8]),
]
# fmt: on


@pytest.mark.parametrize(
    ("x", "scale", "zero", "attributes", "dtype", "expected"),
    [pytest.param(*row[1:], id=row[0]) for row in VECTORS],
)
def test_dequantize_linear_holds_the_values_that_the_text_gives(
    x: Array,
    scale: Array,
    zero: Array | None,
    attributes: dict[str, Any],
    dtype: str,
    expected: Any,
) -> None:
    y = dequantize_linear(x, scale, zero, **attributes)
    assert y.dtype == DTYPES[dtype].numpy
    assert y.shape == x.shape
    # repr tells -0.0 from 0.0 and has one NaN
    assert repr(y.astype(float).tolist()) == repr(np.asarray(expected, float).tolist())


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
def test_a_bias_that_is_not_finite_is_added_without_a_warning(output: str) -> None:
    codes = np.array([0, 1, 2, 2], np.int32)
    y = biased(codes, array(output, INF), array(output, [0, -INF, INF, NAN]), DTYPES[output])
    assert y.dtype == DTYPES[output].numpy
    assert repr(y.astype(float).tolist()) == "[nan, nan, inf, nan]"
    large = biased(codes, array(output, 6e4), array(output, 6e4), DTYPES[output])
    assert (large.astype(float)[3] == INF) == (output == "float16")

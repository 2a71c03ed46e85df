"""dynamic_quantize_linear on values worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qtool.dtypes import DTYPES
from qtool.errors import TensorError
from qtool.ops import dynamic_parameters, dynamic_quantize_linear

# fmt: off
VECTORS = [
    # name, x, y, y_scale, y_zero_point
    ("ties of the zero point and of the data", [-253, 257], [0, 254], 2.0, 126),
    ("a tie beside an odd zero point", [-127, 128, 0.5], [0, 255, 127], 1.0, 127),
    ("ties both ways", [-126, 129, 1.5, -0.5, 0.5], [0, 255, 128, 126, 126], 1.0, 126),
    ("mixed signs", [0, 2, -3, -2.5, 1.34, 0.5], [153, 255, 0, 26, 221, 179],
     0.019607843831181526, 153),
    ("all positive", [1, 2, 3], [85, 170, 255], 0.0117647061124444, 0),
    ("all negative", [-1, -2, -3], [170, 85, 0], 0.0117647061124444, 255),
    ("a constant", [5, 5], [255, 255], 0.019607843831181526, 0),
    ("one value", [7], [255], 0.027450980618596077, 0),
    ("one negative value", [-4], [0], 0.01568627543747425, 255),
    ("zeros", [0, 0, 0], [0, 0, 0], 1.0, 0),
    ("minus zeros", [-0.0, -0.0], [0, 0], 1.0, 0),
    ("nothing", [], [], 1.0, 0),
    ("a scale that underflows", [2.0**-149, 0, -(2.0**-148)], [3, 2, 0], 2.0**-149, 2),
]
INT8_VECTORS = [
    ("symmetric range", [-127, 127, 0.5, 1.5], [-127, 127, 0, 2], 1.0, 0),
    ("all positive", [0, 254], [-127, 127], 1.0, -127),
    ("all negative", [-254, 0], [-127, 127], 1.0, 127),
    ("zeros", [0, 0], [0, 0], 1.0, 0),
    ("nothing", [], [], 1.0, 0),
]
# fmt: on


@pytest.mark.parametrize(
    ("x", "y", "scale", "zero_point"), [pytest.param(*row[1:], id=row[0]) for row in VECTORS]
)
def test_uint8_spans_0_to_255_with_the_range_widened_to_zero(
    x: list[float], y: list[int], scale: float, zero_point: int
) -> None:
    codes, y_scale, y_zero_point = dynamic_quantize_linear(np.array(x, np.float32))
    assert [a.dtype.name for a in (codes, y_scale, y_zero_point)] == ["uint8", "float32", "uint8"]
    assert (codes.shape, y_scale.shape, y_zero_point.shape) == ((len(x),), (), ())
    assert codes.tolist() == y
    assert float(y_scale) == scale
    assert int(y_zero_point) == zero_point


@pytest.mark.parametrize(
    ("x", "y", "scale", "zero_point"), [pytest.param(*row[1:], id=row[0]) for row in INT8_VECTORS]
)
@pytest.mark.parametrize("dtype", ["int8", 3, np.int8])
def test_int8_spans_minus_127_to_127(
    dtype: Any, x: list[float], y: list[int], scale: float, zero_point: int
) -> None:
    codes, y_scale, y_zero_point = dynamic_quantize_linear(np.array(x, np.float32), dtype=dtype)
    assert [a.dtype.name for a in (codes, y_scale, y_zero_point)] == ["int8", "float32", "int8"]
    assert codes.tolist() == y
    assert float(y_scale) == scale
    assert int(y_zero_point) == zero_point


def test_int8_never_gives_minus_128() -> None:
    # The scale 300/254 of the smallest float32 rounds to 1 of it, so that the zero point saturates.
    x = np.array([-300 * 2.0**-149, 0], np.float32)
    codes, scale, zero_point = dynamic_quantize_linear(x, dtype="int8")
    assert float(scale) == 2.0**-149
    assert int(zero_point) == 127
    assert codes.tolist() == [-127, 127]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, ">f4"])
def test_other_float_types_give_what_their_float32_values_give(dtype: Any) -> None:
    x = np.array([-253, 257, 3.25]).astype(dtype)
    expected = dynamic_quantize_linear(x.astype(np.float32))
    actual = dynamic_quantize_linear(x)
    assert [a.tobytes() for a in actual] == [e.tobytes() for e in expected]


def test_any_shape_has_one_scale() -> None:
    y, scale, zero_point = dynamic_quantize_linear(np.ones((2, 0, 3), np.float32))
    assert (y.shape, scale.shape, zero_point.shape) == ((2, 0, 3), (), ())
    y, scale, _ = dynamic_quantize_linear(np.float32(255))
    assert (y.shape, int(y), float(scale)) == ((), 255, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"), [(0.5, 255, 1, 0), (2, 510, 2, 0), (-255, -0.5, 1, 255)]
)
def test_the_range_of_given_extremes_is_widened_to_zero(
    low: float, high: float, scale: float, zero_point: int
) -> None:
    extremes = (np.array(low, np.float32), np.array(high, np.float32))
    found, zero = dynamic_parameters(*extremes, DTYPES["uint8"])
    assert (found.dtype, zero.dtype) == (np.float32, np.uint8)
    assert (found.tolist(), zero.tolist()) == (scale, zero_point)


def test_a_signalling_nan_is_refused_without_a_warning() -> None:
    x = np.array([0x7F800001, 0], np.uint32).view(np.float32)
    with pytest.raises(TensorError, match="is not finite in float32"):
        dynamic_quantize_linear(x)

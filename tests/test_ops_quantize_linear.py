"""quantize_linear on values worked out by hand."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.dtypes import DTYPES
from qtool.ops import cast, quantize_linear

Array = NDArray[Any]
INF, NAN = float("inf"), float("nan")


def array(dtype: str, values: Any) -> Array:
    """values rounded once to the type called dtype."""
    return np.array(values, np.float64).astype(DTYPES[dtype].numpy)


def f32(values: Any) -> Array:
    return np.array(values, np.float32)


# fmt: off
INTEGER_VECTORS = [
    # name, x, y_scale, type and value of y_zero_point, attributes, y
    ("ties in int8", f32([0.25, 0.75, 1.25, 1.75, -0.25, -0.75, -1.25, -1.75]), f32(0.5), "int8", 0,
     {}, [0, 2, 2, 4, 0, -2, -2, -4]),
    ("ties in uint8", f32([0.25, 0.75, 1.25, 1.75]), f32(0.5), "uint8", 0, {}, [0, 2, 2, 4]),
    ("ties in int4", f32([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5]), f32(1), "int4", 0,
     {}, [0, 2, 2, 4, 0, -2, -2]),
    ("rounded before an odd zero point", f32([0.5, 1.5, 2.5, 3.5, -0.5, -1.5]), f32(1), "uint8", 3,
     {}, [3, 5, 5, 7, 3, 1]),
    ("rounded before a negative odd zero point", f32([0.5, 1.5, -0.5, -1.5]), f32(1), "int8", -7,
     {}, [-7, -5, -7, -9]),
    ("an even zero point", f32([0.5, 1.5, 2.5]), f32(1), "uint8", 4, {}, [4, 6, 6]),
    ("divided, not multiplied by a reciprocal or in float64",
     f32([0.35, 1.55, 2.35, 0.85, 0.95, 0.15]), f32(0.1), "int8", 0, {}, [4, 15, 23, 8, 10, 2]),
    ("ends of int8", f32([-129, -128.5, -128, -127, 126, 127, 127.5, 128, 129]), f32(1), "int8", 0,
     {}, [-128, -128, -128, -127, 126, 127, 127, 127, 127]),
    ("ends of int4", f32([-9, -8.5, -8, 7, 7.4, 7.5, 8]), f32(1), "int4", 0,
     {}, [-8, -8, -8, 7, 7, 7, 7]),
    ("ends of int2", f32([-3, -2, 1, 1.5, 2]), f32(1), "int2", 0, {}, [-2, -2, 1, 1, 1]),
    ("ends of uint2", f32([-1, 3, 3.5, 4]), f32(1), "uint2", 0, {}, [0, 3, 3, 3]),
    ("ends of uint4", f32([-1, -0.5, 15, 15.5, 16]), f32(1), "uint4", 0, {}, [0, 0, 15, 15, 15]),
    ("Inf and what int32 cannot hold, int8",
     f32([INF, -INF, 3e9, -3e9, 2147483648, 2147483520, 3e38]), f32(1), "int8", 0,
     {}, [127, -128, 127, -128, 127, 127, 127]),
    ("Inf and what int32 cannot hold, uint8", f32([INF, -INF, 4e9, -4e9]), f32(1), "uint8", 255,
     {}, [255, 0, 255, 0]),
    ("a sum that int32 cannot hold",
     f32([2147483520, 2147483648, -2147483648, -4e9]), f32(1), "int16", -32768,
     {}, [32767, 32767, -32768, -32768]),
    ("a quotient that float16 cannot hold", array("float16", [60000, -60000, 1]),
     array("float16", 0.5), "int8", 0, {}, [127, -128, 2]),
    ("NaN gives the zero point", f32([NAN, -NAN, 1]), f32(1), "int8", -7, {}, [-7, -7, -6]),
    ("minus zero gives the zero point", f32([-0.0, 0.0]), f32(1), "uint8", 9, {}, [9, 9]),
    ("axis -1", f32([[1, 2, 3], [4, 5, 6]]), f32([1, 2, 3]), "int8", [0, 0, 0],
     {"axis": -1}, [[1, 1, 1], [4, 2, 2]]),
    ("axis -2", f32([[1, 2, 3], [4, 5, 6]]), f32([1, 2]), "int8", [0, 0],
     {"axis": -2}, [[1, 2, 3], [2, 2, 3]]),
    ("axis 0 of a square", f32([[10, 20], [30, 40]]), f32([1, 10]), "int8", [0, 0],
     {"axis": 0}, [[10, 20], [3, 4]]),
    ("axis 1 of a square", f32([[10, 20], [30, 40]]), f32([1, 10]), "int8", [0, 5],
     {"axis": 1}, [[10, 7], [30, 9]]),
    ("axis 1 is the default", f32([[10, 20], [30, 40]]), f32([1, 10]), "int8", [0, 5],
     {}, [[10, 7], [30, 9]]),
    ("a short last block", f32([[10, 20, 30, 40, 50]]), f32([[1, 2, 5]]), "int8", [[0, 0, 0]],
     {"axis": 1, "block_size": 2}, [[10, 20, 15, 20, 10]]),
    ("blocks along axis 0", f32([[10], [20], [30]]), f32([[1], [3]]), "int8", [[0], [0]],
     {"axis": 0, "block_size": 2}, [[10], [20], [10]]),
    ("a zero point per block", f32([[9, 9, 9, 9, 9]]), f32([[1, 2, 3]]), "int4", [[1, -2, 3]],
     {"axis": 1, "block_size": 2}, [[7, 7, 2, 2, 6]]),
    ("a block longer than the axis", f32([[10, 20, 30, 40, 50]]), f32([[2]]), "int8", [[0]],
     {"axis": 1, "block_size": 7}, [[5, 10, 15, 20, 25]]),
    ("a block longer than memory", f32([[10], [20]]), f32([[2]]), "int8", [[1]],
     {"axis": 0, "block_size": 2**60}, [[6], [11]]),
    ("blocks of one", f32([[1, 2, 3], [4, 5, 6]]), f32([[1, 2, 3], [4, 1, 2]]), "int8",
     [[0, 0, 0], [1, 1, 1]], {"axis": 1, "block_size": 1}, [[1, 1, 1], [2, 6, 4]]),
    ("no elements", f32([]), f32(2), "int8", 0, {}, []),
    ("no rows", f32(np.zeros((0, 3))), f32([1, 2, 3]), "int8", [0, 0, 0],
     {"axis": 1}, np.zeros((0, 3))),
    ("no columns", f32(np.zeros((3, 0))), f32([1, 2, 3]), "int8", [0, 0, 0],
     {"axis": 0}, np.zeros((3, 0))),
    ("no blocks", f32(np.zeros((3, 0))), f32(np.zeros((3, 0))), "int8", np.zeros((3, 0)),
     {"axis": 1, "block_size": 4}, np.zeros((3, 0))),
    ("a scalar", f32(7), f32(2), "int8", 0, {}, 4),
    ("rank 1 with a scale of one element", f32([1, 2, 3]), f32([2]), "uint8", [1], {}, [1, 2, 3]),
    ("scale () beside zero point (1,)", f32([1, 2, 3]), f32(2), "uint8", [1], {}, [1, 2, 3]),
    ("saturate is for float8 alone", f32([300, -300]), f32(1), "int8", 0, {"saturate": False},
     [127, -128]),
    ("a negative scale", f32([1, -2, 300]), f32(-1), "int8", 0, {}, [-1, 2, -128]),
    ("float16 by float16 divides in float16",
     array("float16", [0.25, 0.45, 0.55, 0.65, 0.85, 1.35, 2.95]), array("float16", 0.1), "int8", 0,
     {}, [2, 4, 6, 6, 8, 14, 30]),
    ("float16 by float16 with precision 1",
     array("float16", [0.25, 0.45, 0.55, 0.65, 0.85, 1.35, 2.95]), array("float16", 0.1), "int8", 0,
     {"precision": 1}, [3, 5, 5, 7, 9, 13, 29]),
    ("float16 by float32 divides in float32", array("float16", [15.5]), f32(1.0003), "int8", 0,
     {}, [15]),
    ("precision 1 leaves room above 65504", array("float16", [60000, -60000]),
     array("float16", 0.5), "uint16", 0, {"precision": 1}, [65535, 0]),
    ("precision 10 rounds both to float16", f32([2049, 65520]), f32(1), "uint16", 0,
     {"precision": 10}, [2048, 65535]),
    ("precision 16 rounds both to bfloat16", f32([257, 259]), f32(1), "int16", 0,
     {"precision": 16}, [256, 260]),
    ("int32 by float32 divides in float32", np.array([16777729, 5, -5, 7, 300], np.int32),
     f32(1024), "int16", 0, {}, [16384, 0, 0, 0, 0]),
    ("int32 ties", np.array([5, -5, 7, 300], np.int32), f32(2), "int8", 0, {}, [2, -2, 4, 127]),
    ("int32 rounds to bfloat16 once", np.array([2**30 + 2**22 + 1], np.int32),
     array("bfloat16", 2.0**22), "int16", 0, {}, [258]),
    ("an int32 scale divides in float32", f32([7, 9, 10]), np.array(4, np.int32), "int8", 0,
     {}, [2, 2, 2]),
    ("a float8e8m0 scale divides in float32", f32([257, 3]), array("float8e8m0", 2), "int16", 0,
     {}, [128, 2]),
    ("float64 is rounded to float32 first", np.array([2.5 + 1e-9, 2.5 + 1e-6]), f32(1), "int8", 0,
     {}, [2, 3]),
    # 1 + 2^-11 + 2^-40 is the tie 1 + 2^-11 in float32, and beyond it in float64
    ("float64 is rounded to float32 before float16", np.array([1 + 2.0**-11 + 2.0**-40]),
     array("float16", 2.0**-10), "int16", 0, {}, [1024]),
    ("a subnormal scale, whose reciprocal is Inf", f32([2e-37, -1.2e-37, 1e-38, 0]),
     f32(1.5748031e-39), "int8", 0, {}, [127, -76, 6, 0]),
    ("the smallest float32 scale", f32([1e-45, -1e-45, 0]), f32(1e-45), "int8", 0, {}, [1, -1, 0]),
    ("the smallest float16 scale", array("float16", [1e-05, -1e-05, 5e-06]),
     array("float16", 5.96e-08), "int8", 0, {}, [127, -128, 84]),
    ("big-endian values", f32([1, 2, 3]).astype(">f4"), f32([2]).astype(">f4"), "uint8", 1,
     {}, [1, 2, 3]),
]
X_448 = [448, 449, 463.9, 464, 464.1, 480, 1e9, -1e9, INF, -INF, -480]
X_240 = [-0.0, 0, 240, 247.9, 248, INF, -INF, NAN, -1e-09, 0.0009765625]
X_FNUZ = [-0.0, 57344, 61439, 61440, INF, -INF, NAN]
X_E5M2 = [-0.0, 57344, 61439, -61439, 61440, -61440, INF, -INF, NAN]
FLOAT_VECTORS = [
    # name, x, y_scale, type of y, saturate, bits of y
    ("e4m3fn", X_448, 1, "float8e4m3fn", True, "7e 7e 7e 7e 7e 7e 7e fe 7e fe fe"),
    ("e4m3fn unsaturated", X_448, 1, "float8e4m3fn", False, "7e 7e 7e 7e 7f 7f 7f 7f 7f 7f 7f"),
    ("e4m3fn small", [1.8131605, 4.25, 4.75, -4.25, 0.001953125, 0.0009765625, 0.000986328125,
                      0.0029296875, 248, 17, 19, -0.0, NAN], 1, "float8e4m3fn", True,
     "3f 48 4a c8 01 00 01 02 78 58 5a 80 7f"),
    ("e4m3fnuz", X_240, 1, "float8e4m3fnuz", True, "00 00 7f 7f 7f 7f ff 80 00 01"),
    ("e4m3fnuz unsaturated", X_240, 1, "float8e4m3fnuz", False, "00 00 7f 7f 80 80 80 80 00 01"),
    ("e5m2", X_E5M2, 1, "float8e5m2", True, "80 7b 7b fb 7b fb 7b fb 7e"),
    ("e5m2 unsaturated", X_E5M2, 1, "float8e5m2", False, "80 7b 7b fb 7c fc 7c fc 7e"),
    ("e5m2 small", [1.52587890625e-05, 7.62939453125e-06, 7.7056884765625e-06, 3.5, 4.5, 4.6], 1,
     "float8e5m2", True, "01 00 01 43 44 45"),
    ("e5m2fnuz", X_FNUZ, 1, "float8e5m2fnuz", True, "00 7f 7f 7f 7f ff 80"),
    ("e5m2fnuz unsaturated", X_FNUZ, 1, "float8e5m2fnuz", False, "00 7f 7f 80 80 80 80"),
    ("e2m1", [-0.0, 0, -0.1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 7, INF, -INF, NAN], 1,
     "float4e2m1", True, "08 00 08 00 02 02 04 04 06 06 0e 07 07 0f 00"),
    ("e2m1 saturates always", [7, -INF], 1, "float4e2m1", False, "07 0f"),
    ("e2m1 divided, not multiplied", [0.02392577938735485], 0.0136719, "float4e2m1", True, "03"),
    ("e2m3", [-0.0, 0.0625, 0.1875, -7.75, 7.75, INF, NAN], 1, "float6e2m3", True,
     "20 00 02 3f 1f 1f 00"),
    ("e3m2", [-0.0, 0.03125, 0.09375, -26, 30, -INF, NAN], 1, "float6e3m2", True,
     "20 00 02 3e 1f 3f 00"),
    ("e3m2 saturates always", [30, -INF], 1, "float6e3m2", False, "1f 3f"),
]
# fmt: on


@pytest.mark.parametrize(
    ("x", "scale", "dtype", "zero", "attributes", "expected"),
    [pytest.param(*row[1:], id=row[0]) for row in INTEGER_VECTORS],
)
def test_integer_targets_hold_the_values_that_the_text_gives(
    x: Array, scale: Array, dtype: str, zero: Any, attributes: dict[str, Any], expected: Any
) -> None:
    y = quantize_linear(x, scale, array(dtype, zero), **attributes)
    assert y.dtype == DTYPES[dtype].numpy
    assert y.shape == x.shape
    assert y.astype(int).tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize(
    ("x", "scale", "dtype", "saturate", "expected"),
    [pytest.param(*row[1:], id=row[0]) for row in FLOAT_VECTORS],
)
def test_float_targets_hold_the_bits_that_the_cast_tables_give(
    x: list[float], scale: float, dtype: str, saturate: bool, expected: str
) -> None:
    y = quantize_linear(f32(x), f32(scale), output_dtype=dtype, saturate=saturate)
    assert y.dtype == DTYPES[dtype].numpy
    assert y.tobytes().hex(" ") == expected


def test_a_float_zero_point_is_added_before_the_one_rounding() -> None:
    zero = array("float8e4m3fn", 0.0625)
    y = quantize_linear(f32([1.0, 1.0625, -0.0625, 448]), f32(1), zero)
    # 1.0625 lies between 1 and 1.125, ties to even; 1.125 is a value; 448.0625 rounds to 448.
    assert y.astype(np.float32).tolist() == [1.0, 1.125, 0.0, 448.0]


def test_a_zero_point_of_plus_zero_takes_the_sign_of_minus_zero_away() -> None:
    y = quantize_linear(f32([-0.0]), f32(1), array("float8e4m3fn", 0))
    assert y.tobytes() == b"\x00"


def test_without_zero_point_and_output_dtype_y_is_uint8() -> None:
    y = quantize_linear(f32([-1, 300, 2.5, 0.5]), f32(1))
    assert y.dtype == np.uint8
    assert y.tolist() == [0, 255, 2, 0]


@pytest.mark.parametrize("name", [5, "int16", np.int16, np.dtype(np.int16), DTYPES["int16"]])
def test_output_dtype_takes_a_code_a_name_and_a_type(name: Any) -> None:
    y = quantize_linear(f32([-40000, 2.5]), f32(1), output_dtype=name)
    assert y.dtype == np.int16
    assert y.tolist() == [-32768, 2]


@pytest.mark.parametrize("precision", [16, "bfloat16", ml_dtypes.bfloat16])
def test_precision_takes_a_code_a_name_and_a_type(precision: Any) -> None:
    y = quantize_linear(f32([257]), f32(1), output_dtype="int16", precision=precision)
    assert y.tolist() == [256]


def test_the_attributes_and_their_defaults_are_those_of_the_kernel_contract() -> None:
    parameters = inspect.signature(quantize_linear).parameters
    assert list(parameters) == [
        "x",
        "y_scale",
        "y_zero_point",
        "axis",
        "block_size",
        "output_dtype",
        "precision",
        "saturate",
    ]
    assert parameters["axis"].default == 1
    assert parameters["block_size"].default == 0
    assert parameters["saturate"].default is True


def test_infinities_of_float8_zero_points_are_added_without_a_warning() -> None:
    x, zero = f32([[INF, -INF, 5], [INF, -INF, 5]]), array("float8e5m2", [INF, -INF])
    y = quantize_linear(x, f32([1, 1]), zero, axis=0)
    expected = [[57344, NAN, 57344], [NAN, -57344, -57344]]
    assert repr(y.astype(float).tolist()) == repr(np.array(expected, float).tolist())


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [np.uint32(0x7F800001), np.uint64(0x7FF0000000000001)])
def test_a_signalling_nan_is_cast_without_a_warning(bits: Any, target: str) -> None:
    x = np.array([bits]).view(f"f{bits.itemsize}")
    y = cast(x, DTYPES[target])
    assert y.dtype == DTYPES[target].numpy
    assert np.isnan(y).all()


def test_float8_saturates_unless_told_otherwise() -> None:
    y = quantize_linear(f32([1e6, -INF]), f32(1), output_dtype="float8e4m3fn")
    assert y.astype(float).tolist() == [448, -448]


@pytest.mark.parametrize(("zero", "dtype"), [(None, np.uint8), (np.int8(0), np.int8)])
def test_zero_means_the_default_of_output_dtype_and_precision(zero: Any, dtype: Any) -> None:
    x, scale = array("float16", [0.25, 0.45]), array("float16", 0.1)
    y = quantize_linear(x, scale, zero, axis=1, block_size=0, output_dtype=0, precision=0)
    assert y.dtype == dtype
    assert y.tolist() == [2, 4]


def test_the_axis_is_not_looked_at_per_tensor() -> None:
    assert quantize_linear(f32([3]), f32([2]), axis=7).tolist() == [2]


def test_inputs_are_left_as_they_were() -> None:
    x, scale, zero = f32([[1, 2], [3, 4]]), f32([1, 2]), np.array([1, 2], np.uint8)
    before = x.tobytes() + scale.tobytes() + zero.tobytes()
    quantize_linear(x, scale, zero, axis=0)
    assert x.tobytes() + scale.tobytes() + zero.tobytes() == before

"""What the operators refuse: which input, which rule, what would be right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.dtypes import DTYPES
from qtool.errors import QtoolError, SpecError, TensorError
from qtool.ops import (
    dequantize_linear,
    dynamic_quantize_linear,
    onednn_quantize,
    quantize_linear,
    rounded,
)

Array = NDArray[Any]
INF, NAN = float("inf"), float("nan")


def array(dtype: str, values: Any) -> Array:
    """values rounded once to the type called dtype."""
    return np.array(values, np.float64).astype(DTYPES[dtype].numpy)


def f32(values: Any) -> Array:
    return np.array(values, np.float32)


X, ONE = f32([[1, 2, 3], [4, 5, 6]]), f32(1)
TARGET_NAMES = (
    "int2, uint2, int4, uint4, int8, uint8, int16, uint16, float4e2m1, float6e2m3, float6e3m2, "
    "float8e4m3fn, float8e4m3fnuz, float8e5m2, float8e5m2fnuz"
)
# fmt: off
QUANTIZE = [
    ("axis too large", (X, f32([1, 2])), {"axis": 2},
     "axis: 2 is out of range for rank 2; use -2 to 1"),
    ("axis too small", (X, f32([1, 2])), {"axis": -3},
     "axis: -3 is out of range for rank 2; use -2 to 1"),
    ("length of the default axis", (X, f32([1, 2])), {},
     "y_scale: length 2 for axis 1 of shape (2, 3); use length 3 or another axis"),
    ("length of a negative axis", (X, f32([1, 2])), {"axis": -1},
     "y_scale: length 2 for axis 1 of shape (2, 3); use length 3 or another axis"),
    ("two dimensions without blocks", (X, f32([[1, 2, 3]])), {},
     "y_scale: shape (1, 3) fits neither per tensor nor per axis; "
     "use a scalar or one dimension, or give block_size"),
    ("many scales for a scalar", (ONE, f32([1, 2])), {},
     "y_scale: shape (2,) fits neither per tensor nor per axis; "
     "use a scalar or one dimension, or give block_size"),
    ("a negative block size", (X, ONE), {"block_size": -1},
     "block_size: -1 is negative; use 0 or a positive integer"),
    ("blocks of a scalar", (ONE, ONE), {"block_size": 2},
     "axis: 1 is out of range for rank 0; a scalar has no axis"),
    ("a scalar scale for blocks", (X, ONE), {"block_size": 2},
     "y_scale: shape () for x of shape (2, 3), blocks along axis 1; "
     "it must equal x's shape except on the axis"),
    ("blocks along the wrong axis", (X, f32([[1, 2], [1, 2]])), {"axis": 0, "block_size": 2},
     "y_scale: shape (2, 2) for x of shape (2, 3), blocks along axis 0; "
     "it must equal x's shape except on the axis"),
    ("a block size that is too small", (f32([range(8)]), f32([[1, 1, 1]])), {"block_size": 2},
     "block_size: 2 does not split 8 elements into 3; the accepted range is [3, 3]"),
    ("scales that need blocks of one", (f32([range(5)]), f32([[1, 1, 1, 1, 1]])), {"block_size": 2},
     "block_size: 2 does not split 5 elements into 5; the accepted range is [1, 1]"),
    ("a block size that is too large", (f32([range(9)]), f32([[1, 1]])), {"block_size": 9},
     "block_size: 9 does not split 9 elements into 2; the accepted range is [5, 8]"),
    ("one block that is too short", (f32([range(8)]), f32([[1]])), {"block_size": 7},
     "block_size: 7 does not split 8 elements into 1; use 8 or more"),
    ("a number of blocks that no block size gives", (f32([range(5)]), f32([[1, 1, 1, 1]])),
     {"block_size": 2}, "y_scale: 4 blocks for 5 elements on axis 1; use 3"),
    ("more blocks than elements", (f32([range(3)]), f32([[1, 1, 1, 1, 1]])), {"block_size": 1},
     "y_scale: 5 blocks for 3 elements on axis 1; use 3"),
    ("blocks of nothing", (np.zeros((1, 0), np.float32), f32([[1]])), {"block_size": 2},
     "y_scale: 1 blocks for 0 elements on axis 1; use 0"),
    ("no blocks of something", (f32([range(5)]), np.zeros((1, 0), np.float32)), {"block_size": 2},
     "y_scale: 0 blocks for 5 elements on axis 1; use 3"),
    ("zero point of another length", (X, f32([1, 2, 3]), np.zeros(2, np.int8)), {},
     "y_zero_point: shape (2,) differs from y_scale's (3,); give both the same shape"),
    ("zero point beside scales", (X, f32([1, 2, 3]), np.int8(0)), {},
     "y_zero_point: shape () differs from y_scale's (3,); give both the same shape"),
    ("zero point of another granularity", (X, f32([[1]]), np.zeros(1, np.int8)), {},
     "y_zero_point: shape (1,) differs from y_scale's (1, 1); give both the same shape"),
    ("zero point of a type that is no target", (X, ONE, np.int32(0)), {},
     f"y_zero_point: QuantizeLinear does not produce int32; use one of {TARGET_NAMES}"),
    ("output_dtype against the zero point", (X, ONE, np.uint8(0)), {"output_dtype": "int8"},
     "output_dtype: int8 disagrees with a zero point of type uint8; leave one of them out"),
    ("output_dtype that is no target", (X, ONE), {"output_dtype": 1},
     f"output_dtype: QuantizeLinear does not produce float32; use one of {TARGET_NAMES}"),
    ("a precision that is no float", (X, ONE), {"precision": "int8"},
     "precision: type int8 is not allowed; use float32, float16, bfloat16"),
    ("a precision that is too wide", (X, ONE), {"precision": 11},
     "precision: type float64 is not allowed; use float32, float16, bfloat16"),
    ("x of integers", (np.zeros(2, np.int8), ONE), {},
     "x: type int8 is not allowed; use float32, float16, bfloat16, int32, float64"),
    ("a scale of float64", (X, np.float64(1)), {},
     "y_scale: type float64 is not allowed; use float32, float16, bfloat16, int32, float8e8m0"),
    ("scale zero", (X, f32(0)), {},
     "y_scale: 0.0 in float32 cannot divide; scales must be finite and not zero"),
    ("scale minus zero among others", (X, f32([1, -0.0, 2])), {},
     "y_scale: -0.0 at [1] in float32 cannot divide; scales must be finite and not zero"),
    ("scale zero of a block", (X, f32([[1, 1], [0, 1]])), {"block_size": 2},
     "y_scale: 0.0 at [1, 0] in float32 cannot divide; scales must be finite and not zero"),
    ("scale zero of the last block", (f32([range(4)]), f32([[1, 0]])), {"block_size": 2},
     "y_scale: 0.0 at [0, 1] in float32 cannot divide; scales must be finite and not zero"),
    ("scale NaN", (X, f32(NAN)), {},
     "y_scale: nan in float32 cannot divide; scales must be finite and not zero"),
    ("scale Inf", (X, f32(-INF)), {},
     "y_scale: -inf in float32 cannot divide; scales must be finite and not zero"),
    ("an int32 scale of zero", (X, np.int32(0)), {},
     "y_scale: 0.0 in float32 cannot divide; scales must be finite and not zero"),
    ("a scale that float16 makes zero", (X, f32(1e-9)), {"precision": "float16"},
     "y_scale: 0.0 in float16 cannot divide; scales must be finite and not zero"),
    ("a scale that float16 makes infinite", (X, f32(65520)), {"precision": "float16"},
     "y_scale: inf in float16 cannot divide; scales must be finite and not zero"),
    ("a float8e8m0 scale of NaN", (X, array("float8e8m0", NAN)), {},
     "y_scale: nan in float32 cannot divide; scales must be finite and not zero"),
]
# fmt: on


@pytest.mark.parametrize(
    ("args", "attributes", "message"), [pytest.param(*row[1:], id=row[0]) for row in QUANTIZE]
)
def test_quantize_linear_refuses_what_the_standard_does_not_allow(
    args: tuple[Array, ...], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        quantize_linear(*args, **attributes)
    assert str(error.value) == message


def test_errors_are_value_errors_that_carry_thing_rule_and_remedy() -> None:
    with pytest.raises(QtoolError) as error:
        quantize_linear(X, f32([1, 2]), axis=5)
    assert isinstance(error.value, ValueError)
    assert error.value.thing == "axis"
    assert error.value.rule == "5 is out of range for rank 2"
    assert error.value.remedy == "use -2 to 1"


@pytest.mark.parametrize("value", ["int9", 99, True, int, np.dtype("V1"), "i4"], ids=str)
def test_an_unknown_type_is_refused_with_the_nearest_or_all_that_are_right(value: Any) -> None:
    def remedy(*allowed: str, near: str = "") -> str:
        text = f"did you mean {near}?" if near else f"use {', '.join(allowed)}"
        return re.escape(f" {value!r} is not an element type; {text}") + "$"

    near = {"int9": "int8, int4 or int2", "i4": "int4 or uint4"}.get(str(value), "")
    with pytest.raises(SpecError, match="^output_dtype:" + remedy(TARGET_NAMES, near=near)):
        quantize_linear(X, ONE, output_dtype=value)
    with pytest.raises(SpecError, match="^precision:" + remedy("float32", "float16", "bfloat16")):
        quantize_linear(X, ONE, precision=value)
    with pytest.raises(
        SpecError, match="^output_dtype:" + remedy("float32", "float16", "bfloat16")
    ):
        dequantize_linear(I8, ONE, output_dtype=value)
    near = "int8 or uint8" if value == "int9" else ""
    of_onednn = remedy("int8", "uint8", "float8e4m3fn", "float8e5m2", near=near)
    with pytest.raises(SpecError, match="^dst:" + of_onednn):
        onednn_quantize(X, [1.0], dst=value)


I8 = np.array([[1, 2, 3], [4, 5, 6]], np.int8)
TIME = np.zeros((), "m8[s]")


@pytest.mark.parametrize(
    ("operator", "args", "thing"),
    [
        (quantize_linear, (TIME, ONE), "x"),
        (quantize_linear, (X, TIME), "y_scale"),
        (quantize_linear, (X, ONE, TIME), "y_zero_point"),
        (dequantize_linear, (TIME, ONE), "x"),
        (dequantize_linear, (I8, TIME), "x_scale"),
        (dequantize_linear, (I8, ONE, TIME), "x_zero_point"),
        (dynamic_quantize_linear, (TIME,), "x"),
        (onednn_quantize, (TIME, [1.0]), "src"),
    ],
)
def test_an_array_of_a_type_that_is_none_is_named(operator: Any, args: Any, thing: str) -> None:
    with pytest.raises(SpecError, match=rf"^{thing}: dtype\('<m8\[s\]'\) is not an element type; "):
        operator(*args)


SCALE_NAMES = "float32, float16, bfloat16, float8e8m0"
# fmt: off
DEQUANTIZE = [
    ("codes of floats", (X, ONE), {},
     "x: DequantizeLinear does not take float32; give codes of a quantized type or int32"),
    ("codes of int64", (np.zeros(2, np.int64), ONE), {},
     "x: DequantizeLinear does not take int64; give codes of a quantized type or int32"),
    ("an int32 scale", (I8, np.int32(1)), {},
     f"x_scale: type int32 is not allowed; use {SCALE_NAMES}"),
    ("a float64 scale", (I8, np.float64(1)), {},
     f"x_scale: type float64 is not allowed; use {SCALE_NAMES}"),
    ("zero point of another type", (I8, ONE, np.uint8(0)), {},
     "x_zero_point: uint8 does not match x; use int8"),
    ("zero point of int32", (np.zeros(2, np.int32), ONE, np.int32(0)), {},
     "x_zero_point: int32 has no zero point; leave it out"),
    ("zero point of another shape", (I8, f32([1, 2, 3]), np.int8(0)), {},
     "x_zero_point: shape () differs from x_scale's (3,); give both the same shape"),
    ("output of float64", (I8, ONE), {"output_dtype": 11},
     "output_dtype: type float64 is not allowed; use float32, float16, bfloat16"),
    ("float8e8m0 output by default", (I8, array("float8e8m0", 1)), {},
     "output_dtype: type float8e8m0 is not allowed; use float32, float16, bfloat16"),
    ("axis out of range", (I8, f32([1, 2])), {"axis": 2},
     "axis: 2 is out of range for rank 2; use -2 to 1"),
    ("length of the axis", (I8, f32([1, 2])), {},
     "x_scale: length 2 for axis 1 of shape (2, 3); use length 3 or another axis"),
    ("block size out of range", (I8, f32([[1], [1]])), {"block_size": 2},
     "block_size: 2 does not split 3 elements into 1; use 3 or more"),
]
ONEDNN = [
    ("two scales per tensor", (X, [1.0, 2.0]), {}, "scales: 2 values; exactly 1 are needed"),
    ("no scales", (X, []), {}, "scales: 0 values; exactly 1 are needed"),
    ("scales for another axis", (X, [1.0, 2.0]), {"qtype": "per_channel"},
     "scales: 2 values; exactly 3 are needed"),
    ("two zps per tensor", (X, [1.0], [1, 2]), {}, "zps: 2 values; exactly 1 are needed"),
    ("one zp for three channels", (X, [1.0, 1.0, 1.0], [1]), {"qtype": "per_channel"},
     "zps: 1 values; exactly 3 are needed"),
    ("unknown qtype", (X, [1.0]), {"qtype": "per_group"},
     "qtype: 'per_group' is unknown; use per_tensor or per_channel"),
    ("zps with f8_e4m3", (X, [1.0], [0]), {"dst": "f8_e4m3"},
     "zps: not supported for f8_e4m3; leave it out"),
    ("zps with f8_e5m2", (X, [1.0], [0]), {"dst": "f8_e5m2"},
     "zps: not supported for f8_e5m2; leave it out"),
    ("zps with fractions", (X, [1.0], [0.5]), {}, "zps: float64 values; use integers"),
    ("axis too large", (X, [1.0, 1.0]), {"qtype": "per_channel", "axis": 2},
     "axis: 2 is out of range for rank 2; use -2 to 1"),
    ("axis too small", (X, [1.0, 1.0]), {"qtype": "per_channel", "axis": -3},
     "axis: -3 is out of range for rank 2; use -2 to 1"),
    ("channels of a scalar", (ONE, [1.0]), {"qtype": "per_channel"},
     "axis: 1 is out of range for rank 0; a scalar has no axis"),
    ("scale zero", (X, [0.0]), {},
     "scales: 0.0 in float32 cannot divide; scales must be finite and not zero"),
    ("scale that float32 makes zero", (X, [1e-60]), {},
     "scales: 0.0 in float32 cannot divide; scales must be finite and not zero"),
    ("scale that float32 makes infinite", (X, [1.0, 1e300, 1.0]), {"qtype": "per_channel"},
     "scales: inf at [1] in float32 cannot divide; scales must be finite and not zero"),
    ("a type that oneDNN has not", (X, [1.0]), {"dst": "int4"},
     "dst: oneDNN Quantize does not produce int4; use s8, u8, f8_e4m3, f8_e5m2"),
    ("float32 itself", (X, [1.0]), {"dst": "float32"},
     "dst: oneDNN Quantize does not produce float32; use s8, u8, f8_e4m3, f8_e5m2"),
    ("a source of integers", (I8, [1.0]), {}, "src: type int8 is not allowed; use float32"),
    ("a source of float8", (array("float8e5m2", [1]), [1.0]), {},
     "src: type float8e5m2 is not allowed; use float32"),
]
DYNAMIC = [
    ("NaN", f32([1, NAN]), {}, TensorError,
     "x: the range [nan, nan] is not finite in float32; "
     "DynamicQuantizeLinear needs finite values and a range below 3.4e38"),
    ("Inf", f32([1, INF]), {}, TensorError,
     "x: the range [0.0, inf] is not finite in float32; "
     "DynamicQuantizeLinear needs finite values and a range below 3.4e38"),
    ("minus Inf", f32([1, -INF]), {}, TensorError,
     "x: the range [-inf, 1.0] is not finite in float32; "
     "DynamicQuantizeLinear needs finite values and a range below 3.4e38"),
    ("Inf on both sides", f32([INF, -INF]), {}, TensorError,
     "x: the range [-inf, inf] is not finite in float32; "
     "DynamicQuantizeLinear needs finite values and a range below 3.4e38"),
    ("a range that overflows", f32([2.0**127, -(2.0**127)]), {}, TensorError,
     "x: the range [-1.7014118346046923e+38, 1.7014118346046923e+38] is not finite in float32; "
     "DynamicQuantizeLinear needs finite values and a range below 3.4e38"),
    ("another type", f32([1]), {"dtype": "int4"}, SpecError,
     "dtype: DynamicQuantizeLinear does not produce int4; use uint8 or int8"),
    ("integers", np.array([1], np.int32), {}, SpecError,
     "x: type int32 is not allowed; use float32"),
]
# fmt: on


@pytest.mark.parametrize(
    ("args", "attributes", "message"), [pytest.param(*row[1:], id=row[0]) for row in DEQUANTIZE]
)
def test_dequantize_linear_refuses_what_the_standard_does_not_allow(
    args: tuple[Array, ...], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        dequantize_linear(*args, **attributes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("args", "attributes", "message"), [pytest.param(*row[1:], id=row[0]) for row in ONEDNN]
)
def test_onednn_quantize_refuses_what_its_page_does_not_allow(
    args: tuple[Any, ...], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        onednn_quantize(*args, **attributes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("x", "attributes", "kind", "message"),
    [pytest.param(*row[1:], id=row[0]) for row in DYNAMIC],
)
def test_dynamic_quantize_linear_refuses_what_has_no_scale(
    x: Array, attributes: dict[str, Any], kind: type[QtoolError], message: str
) -> None:
    with pytest.raises(kind) as error:
        dynamic_quantize_linear(x, **attributes)
    assert str(error.value) == message


def test_rounded_refuses_a_scale_that_the_precision_makes_zero() -> None:
    x, scale = f32([1, 2]), f32([1, 1e-9])
    with pytest.raises(SpecError) as error:
        rounded(x, scale, None, DTYPES["int8"], DTYPES["float16"])
    assert str(error.value) == (
        "y_scale: 0.0 at [1] in float16 cannot divide; scales must be finite and not zero"
    )


@pytest.mark.parametrize("kind", [SpecError, TensorError])
def test_every_refusal_is_a_qtool_error_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, QtoolError)
    assert issubclass(kind, ValueError)

"""QuantizedTensor: what codes, scale and zero point stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import pytest

from qtool.engine import quantize
from qtool.errors import SpecError
from qtool.spec import Blocked, PerAxis, PerTensor, QuantSpec
from qtool.tensor import dequantize, operator_scale

X = np.random.default_rng(5).normal(size=(4, 11)).astype(np.float32)
CODES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.mark.parametrize("output", list(CODES))
@pytest.mark.parametrize(
    "scale_dtype", ["float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn"]
)
@pytest.mark.parametrize("target", ["int4", "uint8", "float4e2m1", "float8e4m3fn"])
def test_dequantize_equals_exact_arithmetic(target: str, scale_dtype: str, output: str) -> None:
    q = quantize(X, QuantSpec(target, Blocked(1, 4), scale_dtype=scale_dtype))
    values = q.dequantize(output)
    assert (values.shape, values.dtype) == (X.shape, CODES[output])
    for index in np.ndindex(X.shape):
        where = (index[0], index[1] // 4)
        zero = None if q.zero_point is None else float(q.zero_point[where])
        wanted = oracle.dequantize(float(q.y[index]), float(q.scale[where]), zero, output)
        assert float(values[index]).hex() == wanted.hex()


def test_dequantize_gives_float32_unless_told_otherwise() -> None:
    q = quantize(np.array([1, 2], np.float16), QuantSpec("int8", PerTensor()))
    assert q.dequantize().dtype == np.float32


def test_the_error_figures_are_those_of_dequantize() -> None:
    for spec in (
        QuantSpec("int4", PerAxis(1)),
        QuantSpec("float8e5m2", PerTensor()),
        QuantSpec("uint2", Blocked(0, 3)),
    ):
        q = quantize(X, spec)
        error = np.abs(q.dequantize().astype(np.float64) - X)
        assert q.stats.max_abs_error == error.max()
        assert q.stats.max_abs_error_at == error.argmax()


@pytest.mark.parametrize("output", ["float64", "int8", "float8e4m3fn"])
def test_other_result_types_are_refused(output: str) -> None:
    q = quantize(X, QuantSpec("int8", PerTensor()))
    with pytest.raises(SpecError) as error:
        q.dequantize(output)
    assert str(error.value) == (
        f"output_dtype: type {output} is not allowed; use float32, float16, bfloat16"
    )


def test_the_storage_type_of_the_scale_is_told() -> None:
    q = quantize(X, QuantSpec("int8", PerTensor(), scale_dtype="float8e8m0"))
    assert q.scale_dtype.name == "float8e8m0"
    assert q.scale.dtype == ml_dtypes.float8_e8m0fnu


def test_only_float8e4m3fn_scales_are_widened_for_the_operators() -> None:
    widened = operator_scale(np.array([0.5, 448], ml_dtypes.float8_e4m3fn))
    assert (widened.dtype, widened.tolist()) == (np.float32, [0.5, 448.0])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu):
        scale = np.array([0.5], dtype)
        assert operator_scale(scale) is scale


def test_codes_alone_are_dequantized_with_their_parameters() -> None:
    y = np.array([[0, 15], [8, 9]], np.uint8).astype(ml_dtypes.uint4)
    scale = np.array([0.5, 2], np.float32)
    zero_point = np.array([8, 0], np.uint8).astype(ml_dtypes.uint4)
    assert dequantize(y, scale, zero_point, PerAxis(0), "float32").tolist() == [[-4, 3.5], [16, 18]]
    assert dequantize(y, scale, None, PerAxis(1), "float32").tolist() == [[0, 30], [4, 18]]


@pytest.mark.parametrize("output", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", ["uint16", "int16"])
def test_codes_of_16_bits_come_back_in_types_of_16_bits(target: str, output: str) -> None:
    """65535 is Inf in float16, and code differences above 2048 are not whole numbers there."""
    x = np.linspace(0, 1, 4097, dtype=np.float32)
    restored = quantize(x, QuantSpec(target, PerTensor())).dequantize(output).astype(np.float64)
    assert np.abs(restored - x).max() <= {"float16": 2.0**-12, "bfloat16": 2.0**-9}[output] + 2e-5


@pytest.mark.parametrize("zero_point", [None, 11])
@pytest.mark.parametrize("output", list(CODES))
def test_a_bias_in_place_of_a_zero_point_is_rounded_and_added(
    output: str, zero_point: int | None
) -> None:
    """Readers of such layouts have x_hat = (code - lowest code) * scale + bias."""
    spec = QuantSpec("uint4", Blocked(1, 4), symmetric=False, scale_dtype="bfloat16", bias=True)
    made = quantize(X, spec, scale=0.3, zero_point=zero_point)
    rounded = CODES[output]
    scale = np.float32(made.scale[0, 0])
    assert scale == np.float32(ml_dtypes.bfloat16(0.3))
    bias = np.float32(ml_dtypes.bfloat16(-scale * np.float32(zero_point or 0)))
    assert made.dequantize(output).dtype == rounded
    for value, code in zip(made.dequantize(output).flat, made.y.flat, strict=True):
        product = rounded(rounded(code) * rounded(scale))
        assert value == rounded(product + rounded(bias))

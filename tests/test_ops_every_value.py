"""Every float16, every bfloat16 and every code: nothing left to sampling."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, TARGETS
from qtool.ops import dequantize_linear, onednn_quantize, quantize_linear, round_to_grid
from qtool.packing import pack, unpack

Array = NDArray[Any]

SOURCES = {
    name: np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16))
}
# What rounds beyond the largest value: from this magnitude on, itself included where the
# largest value's code is odd, so that the tie goes up.
OVERFLOW = {
    "float8e4m3fn": (464.0, False),
    "float8e4m3fnuz": (248.0, True),
    "float8e5m2": (61440.0, True),
    "float8e5m2fnuz": (61440.0, True),
    "float4e2m1": (7.0, True),
    "float6e2m3": (7.75, True),
    "float6e3m2": (30.0, True),
}
# The Cast tables of ONNX: code of the largest value, sign bit, code of NaN, and without saturation
# code of what overflows.
TABLES = {
    "float8e4m3fn": (0x7E, 0x80, 0x7F, 0x7F),
    "float8e4m3fnuz": (0x7F, 0x80, 0x80, 0x80),
    "float8e5m2": (0x7B, 0x80, 0x7E, 0x7C),
    "float8e5m2fnuz": (0x7F, 0x80, 0x80, 0x80),
    "float4e2m1": (0x07, 0x08, 0x00, 0x07),
    "float6e2m3": (0x1F, 0x20, 0x00, 0x1F),
    "float6e3m2": (0x1F, 0x20, 0x00, 0x1F),
}
SMALL = [dtype.name for dtype in TARGETS if dtype.bits <= 8]


def exact(x: Array) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


def float_codes(x: Array, target: str, saturate: bool) -> Array:
    """Codes of float64 x by search in the list of the type's values, by magnitude.

    Codes count the magnitudes upwards, so a tie goes to the neighbour with the even code; the
    midpoints of so few bits are exact in float64.
    """
    largest, sign, nan, overflow = TABLES[target]
    values = np.array([oracle.decode(code, target) for code in range(largest + 1)])
    middles = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(middles, np.abs(x), side="left")
    tie = np.isin(np.abs(x), middles)
    codes = below + (tie & (below % 2 == 1))
    limit, inclusive = OVERFLOW[target]
    beyond = np.abs(x) >= limit if inclusive else np.abs(x) > limit
    codes = np.where(beyond, largest if saturate else overflow, codes)
    signed = ~((beyond & (codes == nan)) | ((codes == 0) & target.endswith("uz")))
    codes = np.where(np.signbit(x) & signed, codes | sign, codes)
    return np.where(np.isnan(x), nan, codes)


@pytest.mark.parametrize("saturate", [True, False], ids=["saturated", "unsaturated"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TABLES)
def test_every_16_bit_value_goes_to_the_nearest_value_of_a_float_type(
    target: str, source: str, saturate: bool
) -> None:
    x = SOURCES[source]
    y = quantize_linear(x, np.ones((), x.dtype), output_dtype=target, saturate=saturate)
    expected = float_codes(exact(x), target, saturate)
    assert y.view(np.uint8).tolist() == expected.tolist()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", oracle.INTEGERS)
def test_every_16_bit_value_goes_to_the_nearest_integer(target: str, source: str) -> None:
    x = SOURCES[source]
    low, high = oracle.INTEGERS[target]
    zero = 1 if high < 4 else 3
    y = quantize_linear(x, np.ones((), x.dtype), np.array(zero).astype(DTYPES[target].numpy))
    expected = []
    for value in exact(x).tolist():
        if value != value:
            expected.append(zero)
        elif abs(value) == float("inf"):
            expected.append(high if value > 0 else low)
        else:
            expected.append(min(max(round(value) + zero, low), high))
    assert y.astype(int).tolist() == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("dst", "target"), [("f8_e4m3", "float8e4m3fn"), ("f8_e5m2", "float8e5m2")]
)
def test_every_16_bit_value_goes_to_the_nearest_float8_of_onednn(
    dst: str, target: str, source: str
) -> None:
    x = SOURCES[source]
    y = onednn_quantize(x, [1.0], dst=dst)
    assert y.dtype == DTYPES[target].numpy
    expected = float_codes(exact(x), target, True)
    assert y.view(np.uint8).tolist() == expected.tolist()


@pytest.mark.parametrize("target", [*TABLES, "float16", "bfloat16"])
def test_powers_of_two_are_on_every_grid_far_beyond_its_type(target: str) -> None:
    powers = 2.0 ** np.arange(990)
    assert round_to_grid(powers, DTYPES[target]).tolist() == powers.tolist()


def every_code(target: str) -> Array:
    dtype = DTYPES[target]
    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    return codes.view(dtype.numpy)


@pytest.mark.parametrize("target", SMALL)
def test_every_code_dequantizes_to_its_value(target: str) -> None:
    codes = every_code(target)
    if target in oracle.INTEGERS:
        low, high = oracle.INTEGERS[target]
        expected = [float(c - (high - low + 1) if c > high else c) for c in range(high - low + 1)]
    else:
        expected = [oracle.decode(code, target) for code in range(codes.size)]
    y = dequantize_linear(codes, np.float32(1))
    assert y.dtype == np.float32
    assert list(map(repr, y.tolist())) == list(map(repr, expected))  # tells -0.0 from 0.0


@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-100, 3e-39, 1e30], ids=str)
@pytest.mark.parametrize("target", SMALL)
def test_every_code_comes_back_from_quantizing_its_dequantized_value(
    target: str, scale: float
) -> None:
    codes = every_code(target)
    zero = np.zeros((), codes.dtype) if target in oracle.INTEGERS else None
    values = dequantize_linear(codes, np.float32(scale), zero)
    back = quantize_linear(values, np.float32(scale), zero, output_dtype=target, saturate=False)
    same = back.view(np.uint8) == codes.view(np.uint8)
    nan = np.isnan(codes.astype(np.float32))
    assert np.isnan(back.astype(np.float32)[nan]).all()
    assert same[~nan].all()


@pytest.mark.parametrize("target", ["int2", "uint2", "int4", "uint4", "int8", "uint8"])
def test_every_code_comes_back_around_every_zero_point(target: str) -> None:
    codes = every_code(target)
    scales = np.full(codes.size, 0.1, np.float32)
    x = np.repeat(codes[:, None], codes.size, axis=1)
    values = dequantize_linear(x, scales, codes, axis=1)
    assert quantize_linear(values, scales, codes, axis=1).tobytes() == x.tobytes()


@pytest.mark.parametrize("target", SMALL)
def test_every_code_comes_back_from_packing(target: str) -> None:
    codes = every_code(target)
    packed = pack(codes, DTYPES[target])
    assert packed.size == codes.size * DTYPES[target].bits // 8
    back = unpack(packed, DTYPES[target], codes.shape)
    assert back.dtype == codes.dtype
    assert back.tobytes() == codes.tobytes()


@pytest.mark.parametrize("target", ["int16", "uint16"])
def test_every_16_bit_code_comes_back(target: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[target].numpy)
    values = dequantize_linear(codes, np.float32(0.1))
    assert quantize_linear(values, np.float32(0.1), output_dtype=target).tolist() == codes.tolist()

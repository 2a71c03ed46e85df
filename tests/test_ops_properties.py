"""The operators against exact rational arithmetic, over types, shapes, axes and block sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import Layout, any_scales, bits, layouts, scales, sources, zero_points

from qtool.dtypes import DTYPES, TARGETS
from qtool.ops import (
    biased,
    dequantize_linear,
    dynamic_quantize_linear,
    onednn_quantize,
    quantize_linear,
)

Array = NDArray[Any]
TARGET_NAMES = [dtype.name for dtype in TARGETS]
PRECISIONS = ["float32", "float16", "bfloat16"]


def exact(values: Array) -> Array:
    """values as float64, which holds every type here exactly."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def spread_out(values: Array, layout: Layout) -> Array:
    """The value of a scale or zero point for every element of x."""
    flat, out = exact(values), np.empty(layout.shape)
    if layout.per_tensor:
        out[...] = flat.reshape(())
        return out
    where = (layout.shape, layout.axis, layout.block_size, False)
    for index in np.ndindex(layout.shape):
        out[index] = flat[oracle.scale_index(index, *where)]
    return out


def as_codes(y: Array, target: str) -> list[int]:
    """What the oracle gives: the values of an integer type, the bits of a float type."""
    whole = y.astype(int) if target in oracle.INTEGERS else y.view(np.uint8)
    return [int(v) for v in whole.reshape(-1)]


def channel_values(values: Array, layout: Layout, per_channel: bool) -> Array:
    if not per_channel:
        return np.full(layout.shape, float(values[0]))
    out = np.empty(layout.shape)
    for index in np.ndindex(layout.shape):
        out[index] = values[index[layout.axis]]
    return out


@pytest.mark.parametrize("target", TARGET_NAMES)
@settings(max_examples=120)
@given(data=st.data())
def test_quantize_linear_equals_exact_arithmetic(target: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    scale_type = data.draw(st.sampled_from([*PRECISIONS, "int32", "float8e8m0"]))
    default = scale_type if scale_type in PRECISIONS else "float32"
    precision = data.draw(st.sampled_from([None, *PRECISIONS]))
    divide_in = precision or default
    scale = data.draw(scales(scale_type, divide_in, layout.scale_shape))
    spread = spread_out(scale, layout)
    x = data.draw(sources(data.draw(st.sampled_from([*PRECISIONS, "int32"])), spread))
    zero = None
    if data.draw(st.booleans()):
        zero = data.draw(zero_points(target, layout))
    saturate = data.draw(st.booleans())

    y = quantize_linear(
        x,
        scale,
        zero,
        axis=layout.axis,
        block_size=layout.block_size,
        output_dtype=target,
        precision=precision,
        saturate=saturate,
    )

    zeros = [None] * x.size if zero is None else spread_out(zero, layout).reshape(-1).tolist()
    expected = [
        oracle.quantize(v, s, z, target, divide_in, saturate=saturate)
        for v, s, z in zip(
            exact(x).reshape(-1).tolist(), spread.reshape(-1).tolist(), zeros, strict=True
        )
    ]
    assert y.shape == layout.shape
    assert y.dtype == DTYPES[target].numpy
    assert as_codes(y, target) == expected


@pytest.mark.parametrize("source", [*TARGET_NAMES, "int32"])
@settings(max_examples=80)
@given(data=st.data())
def test_dequantize_linear_equals_exact_arithmetic(source: str, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    scale_type = data.draw(st.sampled_from([*PRECISIONS, "float8e8m0"]))
    output = data.draw(st.sampled_from(PRECISIONS))
    named = output if scale_type == "float8e8m0" or data.draw(st.booleans()) else None
    output = named or scale_type
    x = data.draw(bits(source, layout.shape))
    scale = data.draw(any_scales(scale_type, layout.scale_shape))
    zero = None
    if source != "int32" and data.draw(st.booleans()):
        zero = data.draw(zero_points(source, layout))

    y = dequantize_linear(
        x, scale, zero, axis=layout.axis, block_size=layout.block_size, output_dtype=named
    )

    zeros = [None] * x.size if zero is None else spread_out(zero, layout).reshape(-1).tolist()
    spread = spread_out(scale, layout).reshape(-1).tolist()
    expected = [
        oracle.dequantize(v, s, z, output)
        for v, s, z in zip(exact(x).reshape(-1).tolist(), spread, zeros, strict=True)
    ]
    assert y.shape == layout.shape
    assert y.dtype == DTYPES[output].numpy
    assert list(map(repr, exact(y).reshape(-1).tolist())) == list(map(repr, expected))


@pytest.mark.parametrize("output", PRECISIONS)
@settings(max_examples=80)
@given(data=st.data())
def test_a_bias_is_added_to_the_rounded_product(output: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    codes = data.draw(bits("uint16", shape)).astype(np.int32)
    scale = data.draw(any_scales(data.draw(st.sampled_from(PRECISIONS)), shape[-1:]))
    bias = data.draw(any_scales(data.draw(st.sampled_from(PRECISIONS)), shape))

    y = biased(codes, scale, bias, DTYPES[output])

    fmt = oracle.FORMATS[output]
    values = (np.broadcast_to(exact(a), shape).reshape(-1).tolist() for a in (codes, scale, bias))
    expected = [
        oracle.add(
            oracle.multiply(oracle.convert(c, fmt), oracle.convert(s, fmt), fmt),
            oracle.convert(b, fmt),
            fmt,
        )
        for c, s, b in zip(*values, strict=True)
    ]
    assert y.shape == shape
    assert y.dtype == DTYPES[output].numpy
    assert list(map(repr, exact(y).reshape(-1).tolist())) == list(map(repr, expected))


@pytest.mark.parametrize(
    ("dst", "target"),
    [("u8", "uint8"), ("s8", "int8"), ("f8_e4m3", "float8e4m3fn"), ("f8_e5m2", "float8e5m2")],
)
@settings(max_examples=120)
@given(data=st.data())
def test_onednn_quantize_equals_exact_arithmetic(
    dst: str, target: str, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    per_channel = data.draw(st.booleans())
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    channels = shape[axis] if per_channel else 1
    layout = Layout(shape, axis, 0, (channels,) if per_channel else ())
    scale = data.draw(scales("float32", "float32", (channels,)))
    zps = None
    if target in oracle.INTEGERS and data.draw(st.booleans()):
        zps = data.draw(
            st.lists(
                st.integers(-(2**31), 2**31) | st.integers(-9, 255),
                min_size=channels,
                max_size=channels,
            )
        )
    spread = channel_values(scale, layout, per_channel)
    x = data.draw(sources("float32", spread))

    y = onednn_quantize(
        x,
        scale.tolist(),
        zps,
        qtype="per_channel" if per_channel else "per_tensor",
        axis=axis,
        dst=dst,
    )

    zeros = [None] * x.size
    if zps is not None:
        zeros = channel_values(np.array(zps), layout, per_channel).astype(int).reshape(-1).tolist()
    expected = [
        oracle.onednn(v, s, z, target)
        for v, s, z in zip(
            exact(x).reshape(-1).tolist(), spread.reshape(-1).tolist(), zeros, strict=True
        )
    ]
    assert y.shape == shape
    assert as_codes(y, target) == expected


@pytest.mark.parametrize("target", ["uint8", "int8"])
@settings(max_examples=200)
@given(data=st.data())
def test_dynamic_quantize_linear_equals_exact_arithmetic(target: str, data: st.DataObject) -> None:
    finite = st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126)
    unit = data.draw(st.sampled_from([0.5, 2.0**-149]))
    small = st.integers(-300, 300).map(lambda k: k * unit)
    values = data.draw(st.lists(finite, max_size=12) | st.lists(small, max_size=12))
    x = np.array(values, np.float32)

    y, scale, zero_point = dynamic_quantize_linear(x, dtype=target)

    codes, expected_scale, expected_zero = oracle.dynamic(exact(x).tolist(), target)
    assert (y.dtype, zero_point.dtype) == (DTYPES[target].numpy, DTYPES[target].numpy)
    assert scale.dtype == np.float32
    assert (scale.shape, zero_point.shape) == ((), ())
    assert float(scale) == expected_scale
    assert int(zero_point) == expected_zero
    assert y.tolist() == codes

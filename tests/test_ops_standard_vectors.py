"""The operators against onnx: node tests, documented examples, onnxruntime and the evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from qtool import ops
from qtool.dtypes import DTYPES

Array = NDArray[Any]

OPERATORS: dict[str, Callable[..., Any]] = {
    "QuantizeLinear": ops.quantize_linear,
    "DequantizeLinear": ops.dequantize_linear,
    "DynamicQuantizeLinear": ops.dynamic_quantize_linear,
}
NODE_TESTS = [
    "test_dequantizelinear", "test_dequantizelinear_axis", "test_dequantizelinear_blocked",
    "test_dequantizelinear_e4m3fn", "test_dequantizelinear_e4m3fn_float16",
    "test_dequantizelinear_e4m3fn_zero_point", "test_dequantizelinear_e5m2",
    "test_dequantizelinear_float4e2m1", "test_dequantizelinear_int16", "test_dequantizelinear_int2",
    "test_dequantizelinear_int4", "test_dequantizelinear_uint16", "test_dequantizelinear_uint2",
    "test_dequantizelinear_uint4", "test_dynamicquantizelinear",
    "test_dynamicquantizelinear_max_adjusted", "test_dynamicquantizelinear_min_adjusted",
    "test_quantizelinear", "test_quantizelinear_axis", "test_quantizelinear_blocked_asymmetric",
    "test_quantizelinear_blocked_symmetric", "test_quantizelinear_e4m3fn",
    "test_quantizelinear_e5m2", "test_quantizelinear_float4e2m1", "test_quantizelinear_int16",
    "test_quantizelinear_int2", "test_quantizelinear_int4", "test_quantizelinear_uint16",
    "test_quantizelinear_uint2", "test_quantizelinear_uint4",
]  # fmt: skip


@cache
def node_tests() -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # onnx computes NaN and Inf for other operators
        tests = load_model_tests(kind="node")
    return {t.name: t for t in tests if "quantize" in t.name and "expanded" not in t.name}


def as_array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def test_every_node_test_of_onnx_is_listed_here() -> None:
    assert sorted(NODE_TESTS) == sorted(node_tests())


@pytest.mark.parametrize("name", NODE_TESTS)
def test_node_tests_agree_to_the_last_bit(name: str) -> None:
    test = node_tests()[name]
    (node,) = test.model.graph.node
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in test.data_sets:
        result = OPERATORS[node.op_type](*map(as_array, inputs), **attributes)
        results = result if isinstance(result, tuple) else (result,)
        expected = [as_array(output) for output in outputs]
        assert [(r.dtype, r.shape) for r in results] == [(e.dtype, e.shape) for e in expected]
        assert [r.tobytes() for r in results] == [e.tobytes() for e in expected]


# Worked examples of the documentation of QuantizeLinear-25 that are no node tests.
X = np.array([0, 2, 3, 1000, -254, -1000], np.float32)


def test_the_documented_example_without_zero_point() -> None:
    y = ops.quantize_linear(X, np.float32(2))
    assert y.dtype == np.uint8
    assert y.tolist() == [0, 1, 2, 255, 0, 0]


def test_the_documented_example_with_an_int8_zero_point() -> None:
    y = ops.quantize_linear(X, np.float32(2), np.int8(-10))
    assert y.dtype == np.int8
    assert y.tolist() == [-10, -9, -8, 127, -128, -128]


def test_the_documented_example_of_signed_zeros_in_float4() -> None:
    y = ops.quantize_linear(np.array([-0.0, 0.0], np.float32), np.float32(1), output_dtype=23)
    assert y.tobytes().hex() == "0800"


def model(
    op: str, x: Array, scale: Array, zero: Array, opset: int, **attributes: Any
) -> onnx.ModelProto:
    """A model of one node, its scale and zero point stored inside."""
    codes = [DTYPES[name].code or 0 for name in ("float32", type_name(zero))]
    source, target = codes if op == "QuantizeLinear" else codes[::-1]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "scale", "zero"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", source, x.shape)],
        [helper.make_tensor_value_info("y", target, x.shape)],
        [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(zero, "zero")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def type_name(values: Array) -> str:
    return next(d.name for d in DTYPES.values() if d.numpy == values.dtype)


def run_in_onnxruntime(m: onnx.ModelProto, x: Array) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        m.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(x, DTYPES[type_name(x)].code)
    (y,) = session.run_with_ort_values(None, {"x": value})
    return np.asarray(y.numpy())


def sample(seed: int) -> tuple[Array, Array]:
    """(12, 70) values with ties and Inf, and scales for blocks of 32 along axis 1."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.01, 3, (12, 3)).astype(np.float32)
    x = (rng.normal(0, 60, (12, 70)) * np.repeat(scale, 32, axis=1)[:, :70]).astype(np.float32)
    x[:, ::5] = np.rint(x[:, ::5]) + 0.5
    x[0, :4] = [np.inf, -np.inf, 1e30, -1e30]
    scale[::2] = 1
    return x, scale


@pytest.mark.parametrize("granularity", ["tensor", "axis", "blocks"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_quantize_linear_gives_the_bytes_of_onnxruntime(dtype: str, granularity: str) -> None:
    x, scale = sample(21)
    attributes: dict[str, Any] = {}
    if granularity == "tensor":
        scale = scale[1, 0].reshape(())
    elif granularity == "axis":
        scale, attributes = scale[:, 0].copy(), {"axis": -2}
    else:
        attributes = {"axis": 1, "block_size": 32}
    zero = np.full(scale.shape, 3, DTYPES[dtype].numpy)
    expected = run_in_onnxruntime(model("QuantizeLinear", x, scale, zero, 21, **attributes), x)
    actual = ops.quantize_linear(x, scale, zero, **attributes)
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("granularity", ["tensor", "axis", "blocks"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_dequantize_linear_gives_the_bytes_of_onnxruntime(dtype: str, granularity: str) -> None:
    _, scale = sample(22)
    limits = np.iinfo(DTYPES[dtype].numpy)
    rng = np.random.default_rng(23)
    x = rng.integers(limits.min, limits.max + 1, (12, 70)).astype(DTYPES[dtype].numpy)
    attributes: dict[str, Any] = {}
    if granularity == "tensor":
        scale = scale[1, 0].reshape(())
    elif granularity == "axis":
        scale, attributes = scale[:, 0].copy(), {"axis": 0}
    else:
        attributes = {"axis": -1, "block_size": 32}
    zero = np.full(scale.shape, 3, DTYPES[dtype].numpy)
    expected = run_in_onnxruntime(model("DequantizeLinear", x, scale, zero, 21, **attributes), x)
    actual = ops.dequantize_linear(x, scale, zero, **attributes)
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4e2m1", "float6e2m3",
                                   "float6e3m2", "float8e4m3fn", "float8e5m2"])  # fmt: skip
def test_quantize_linear_gives_the_values_of_onnx_s_evaluator(dtype: str) -> None:
    """Where its cast to int32 does not wrap."""
    x, scale = sample(24)
    x = np.clip(x, -3e4, 3e4)
    zero = np.zeros(scale.shape, DTYPES[dtype].numpy)
    attributes: dict[str, Any] = {"axis": 1, "block_size": 32}
    evaluator = ReferenceEvaluator(model("QuantizeLinear", x, scale, zero, 28, **attributes))
    (expected,) = map(np.asarray, evaluator.run(None, {"x": x}))
    actual = ops.quantize_linear(x, scale, zero, **attributes)
    assert actual.dtype == expected.dtype
    assert actual.astype(np.float32).tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_dynamic_quantize_linear_gives_the_bytes_of_onnxruntime(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.normal(), 10.0 ** rng.integers(-30, 30), 500).astype(np.float32)
    m = helper.make_model(
        helper.make_graph(
            [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])],
            "g",
            [helper.make_tensor_value_info("x", 1, x.shape)],
            [
                helper.make_tensor_value_info(n, t, None)
                for n, t in (("y", 2), ("scale", 1), ("zero", 2))
            ],
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(
        m.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = session.run(None, {"x": x})
    actual = ops.dynamic_quantize_linear(x)
    assert [a.tobytes() for a in actual] == [np.asarray(e).tobytes() for e in expected]

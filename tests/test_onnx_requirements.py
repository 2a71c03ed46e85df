"""What quantized types ask of an ONNX model, and whether it then computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper
from onnx_models import constant, initializer, model, quantize, quantized, replaced, run, same, save

from qtool.dtypes import DTYPES
from qtool.errors import FormatError
from qtool.formats.onnx import OnnxSource
from qtool.layouts.onnx_qdq import OnnxQdq
from qtool.layouts.onnx_weight import Weight
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec

WEIGHT = np.random.default_rng(3).normal(size=(8, 6)).astype(np.float32)
X = np.random.default_rng(4).normal(size=(3, 8)).astype(np.float32)


def matmul(opset: int = 21, ir_version: int = 10) -> ModelProto:
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [initializer("w", WEIGHT)],
        inputs={"x": (None, 8)},
        opset=opset,
        ir_version=ir_version,
    )


# codes, granularity, scale type, zero point -> opset and IR version of a model that has opset 12.
RAISED: list[Any] = [
    ("int8", PerTensor(), "float32", None, 12, 7),
    ("uint8", PerTensor(), "float32", 128, 12, 7),
    ("int8", PerAxis(1), "float32", None, 13, 7),
    ("uint8", PerAxis(0), "float32", 120, 13, 7),
    ("float8e4m3fn", PerAxis(1), "float32", None, 19, 9),
    ("float8e5m2", PerTensor(), "float32", None, 19, 9),
    ("int16", PerTensor(), "float32", None, 21, 10),
    ("uint16", PerAxis(0), "float32", 9, 21, 10),
    ("int4", PerAxis(0), "float32", None, 21, 10),
    ("uint4", Blocked(0, 3), "float32", 8, 21, 10),
    ("int8", Blocked(1, 4), "float32", None, 21, 10),
    ("int8", PerAxis(0), "float16", None, 23, 11),
    ("int8", PerAxis(0), "bfloat16", None, 23, 11),
    ("float4e2m1", Blocked(0, 4), "float32", None, 23, 11),
    ("int8", PerTensor(), "float8e8m0", None, 24, 12),
    ("int2", Blocked(0, 4), "float32", None, 25, 13),
    ("uint2", PerAxis(1), "float32", 1, 25, 13),
    ("float6e2m3", PerAxis(0), "float32", None, 28, 14),
    ("float6e3m2", PerTensor(), "float32", None, 28, 14),
]


@pytest.mark.parametrize(("dtype", "granularity", "scale", "zero", "opset", "ir"), RAISED)
def test_the_opset_is_raised_as_far_as_the_types_need(
    tmp_path: Path,
    dtype: str,
    granularity: Granularity,
    scale: str,
    zero: int | None,
    opset: int,
    ir: int,
) -> None:
    made = quantize(
        matmul(opset=12, ir_version=7),
        tmp_path / "q.onnx",
        {"w": QuantSpec(dtype, granularity)},
        scale_dtype=scale,
        zero_point=zero,
    )
    assert (made.opset_import[0].version, made.ir_version) == (opset, ir)
    codes = next(t for t in made.graph.initializer if t.name == "w_quantized")
    expected = quantized(WEIGHT, QuantSpec(dtype, granularity), scale, zero).y
    assert codes.data_type == DTYPES[dtype].code
    assert len(codes.raw_data) == -(-48 * DTYPES[dtype].bits // 8)
    assert numpy_helper.to_array(codes).tobytes() == expected.tobytes()


# What onnxruntime has kernels for.
COMPUTED: list[Any] = [
    row[:4]
    for row in RAISED
    if row[2] == "float32" and not row[0].startswith(("float4", "float6", "float8e5"))
]


@pytest.mark.parametrize(("dtype", "granularity", "scale", "zero"), COMPUTED)
@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
def test_the_model_computes_with_the_dequantized_weight(
    tmp_path: Path,
    dtype: str,
    granularity: Granularity,
    scale: str,
    zero: int | None,
    external_data: bool,
) -> None:
    path, spec = tmp_path / "q.onnx", QuantSpec(dtype, granularity)
    quantize(matmul(), path, {"w": spec}, zero_point=zero, external_data=external_data)
    tensor = quantized(WEIGHT, spec, scale, zero)
    expected = (tensor.y.astype(np.float32) - np.float32(zero or 0)) * np.float32(0.25)
    assert same(path, replaced(matmul(), w=expected), x=X)


def test_a_model_is_converted_with_its_meaning_kept(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            constant("s", [1, 2, 2], np.int64),
            helper.make_node("Reshape", ["h", "s"], ["r"]),
            helper.make_node("Softmax", ["r"], ["y"]),
        ],
        [initializer("w", np.zeros((2, 2)))],
        inputs={"x": (2, 2)},
        opset=11,
        ir_version=6,
    )
    result = quantize(made, tmp_path / "q.onnx", {"w": QuantSpec("int4", PerAxis(0))})
    assert result.opset_import[0].version == 21
    y = run(result, {"x": np.ones((2, 2), np.float32)})[0]
    assert y.tolist() == [[[0.25, 0.25], [0.25, 0.25]]]


def test_a_model_that_cannot_be_converted_is_refused_from_headers_alone(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("GroupNormalization", ["h", "s", "s"], ["y"], num_groups=2),
        ],
        [initializer("w", WEIGHT)],
        inputs={"x": (3, 8), "s": (2,)},
        opset=18,
    )
    source = OnnxSource(save(made, tmp_path / "m.onnx"))
    weight = Weight(QuantSpec("int4", PerAxis(0)), DTYPES["float32"], has_zero_point=False)
    with pytest.raises(FormatError, match=r"m\.onnx: opset 21 .*GroupNormalization"):
        OnnxQdq(source, {"w": weight}, tmp_path / "q.onnx", external_data=False)

"""Raising models from before opset 7, where operators broadcast, trained and cast by attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_models import Array, initializer, run

from qtool.errors import FormatError
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset

X = np.random.default_rng(7).normal(size=(2, 3, 4, 5)).astype(np.float32)
ONES = np.ones(3, np.float32)


def early(
    operator: str,
    opset: int,
    attributes: dict[str, Any],
    inputs: tuple[Array, ...] = (),
    *,
    result: int = TensorProto.FLOAT,
    outputs: tuple[str, ...] = ("y",),
) -> ModelProto:
    """A model of IR version 3, in which initializers are inputs too."""
    names = [f"i{index}" for index in range(len(inputs))]
    node = helper.make_node(operator, ["x", *names], outputs, name="old", **attributes)
    values = [initializer(n, v, v.dtype) for n, v in zip(names, inputs, strict=True)]
    shapes = {"x": X.shape, **{n: v.shape for n, v in zip(names, inputs, strict=True)}}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()],
        [helper.make_tensor_value_info("y", result, [None] * 4)],
        values,
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=3)


def along(values: Array, axis: int) -> Array:
    return values.reshape(values.shape + (1,) * (X.ndim - axis - values.ndim))


CHANNELS = np.array([0.5, -1, 2], np.float32)
PLANES = np.arange(12, dtype=np.float32).reshape(3, 4)
LAST = np.arange(5, dtype=np.float32)
SQUARES = np.square(X)

# onnxruntime runs no opset below 7: the expected values follow from the standard's text.
CONVERTED = [
    pytest.param(
        "PRelu", 6, {}, (CHANNELS,), np.where(X < 0, X * along(CHANNELS, 1), X), id="slope"
    ),
    pytest.param("PRelu", 6, {}, (CHANNELS[:1],), np.where(X < 0, X / 2, X), id="one-slope"),
    pytest.param(
        "PRelu", 6, {}, (np.array(-2, np.float32),), np.where(X < 0, -2 * X, X), id="scalar"
    ),
    pytest.param("Add", 6, {"broadcast": 1}, (LAST,), X + LAST, id="suffix"),
    pytest.param("Add", 6, {"broadcast": 0}, (X,), X + X, id="same-shape"),
    pytest.param(
        "Mul", 6, {"broadcast": 1, "axis": 1}, (CHANNELS,), X * along(CHANNELS, 1), id="channels"
    ),
    pytest.param(
        "Sub", 6, {"broadcast": 1, "axis": 1}, (PLANES,), X - along(PLANES, 1), id="planes"
    ),
    pytest.param("Pow", 1, {"broadcast": 1}, (np.array([2], np.float32),), SQUARES, id="pow"),
    pytest.param("Dropout", 6, {"is_test": 1, "ratio": 0.5}, (), X, id="dropout"),
    pytest.param(
        "GlobalLpPool",
        1,
        {"p": 2.0},
        (),
        np.sqrt(SQUARES.sum((2, 3), keepdims=True)),
        id="global-lp-pool",
    ),
    pytest.param(
        "LpPool",
        1,
        {"kernel_shape": [4, 5]},
        (),
        np.sqrt(SQUARES.sum((2, 3), keepdims=True)),
        id="lp-pool",
    ),
    pytest.param(
        "BatchNormalization",
        6,
        {"is_test": 1, "epsilon": 0.0},
        (CHANNELS, ONES, ONES, 4 * ONES),
        (X - 1) / 2 * along(CHANNELS, 1) + 1,
        id="batch-normalization",
    ),
]


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize(("operator", "first", "attributes", "inputs", "expected"), CONVERTED)
def test_an_early_operator_computes_what_its_text_says(
    operator: str,
    first: int,
    attributes: dict[str, Any],
    inputs: tuple[Array, ...],
    expected: Array,
    opset: int,
) -> None:
    made = early(operator, first, attributes, inputs)
    raise_opset(made, opset, Names.of(made), "model.onnx")
    onnx.checker.check_model(made, full_check=True)
    np.testing.assert_allclose(run(made, {"x": X})[0], expected, rtol=1e-5, atol=1e-6)


def test_the_type_that_an_early_cast_names_becomes_a_number() -> None:
    made = early("Cast", 5, {"to": "INT64"}, result=TensorProto.INT64)
    raise_opset(made, 13, Names.of(made), "model.onnx")
    onnx.checker.check_model(made, full_check=True)
    assert run(made, {"x": X})[0].tobytes() == X.astype(np.int64).tobytes()


def test_an_early_gemm_broadcasts_its_addend() -> None:
    rows, weight, bias = X[0, 0], X[0, 1].T.copy(), np.arange(4, dtype=np.float32)
    made = early("Gemm", 6, {"broadcast": 1}, (weight, bias))
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5]))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4]))
    raise_opset(made, 13, Names.of(made), "model.onnx")
    onnx.checker.check_model(made, full_check=True)
    np.testing.assert_allclose(run(made, {"x": rows})[0], rows @ weight + bias, rtol=1e-5)


REFUSED = [
    pytest.param("Dropout", 6, {}, 0, "it trains unless is_test=1", id="dropout"),
    pytest.param("Dropout", 1, {"is_test": 0}, 0, "it trains unless is_test=1", id="dropout-1"),
    pytest.param("BatchNormalization", 6, {}, 4, "it trains unless is_test=1", id="normalization"),
    pytest.param("LpPool", 1, {"p": 2.5}, 0, "kernel_shape became required", id="kernel-shape"),
    pytest.param("GlobalLpPool", 1, {"p": 2.5}, 0, "p=2.5 is no integer", id="exponent"),
    pytest.param("GlobalLpPool", 1, {"p": np.inf}, 0, "p=inf is no integer", id="infinite"),
    pytest.param("Cast", 1, {"to": "REAL"}, 0, "to='REAL' is no type", id="type"),
    pytest.param(
        "Add", 6, {"broadcast": 1, "axis": 4}, 1, "axis=4 is out of range", id="broadcast"
    ),
    pytest.param(
        "Relu", 1, {"consumed_inputs": [0]}, 0, "'consumed_inputs' is gone", id="in-place"
    ),
    pytest.param("Pad", 1, {"paddings": [0, 1]}, 0, "'paddings' is gone", id="paddings"),
    pytest.param("Reshape", 1, {"shape": [-1]}, 0, "'shape' is gone", id="reshape"),
    pytest.param("Reshape", 4, {}, 0, "its inputs or outputs changed", id="reshape-input"),
    pytest.param("Split", 1, {"axis": 1}, 1, "its inputs or outputs changed", id="split"),
    pytest.param(
        "Upsample",
        6,
        {"height_scale": 2.0, "width_scale": 2.0},
        0,
        "'height_scale' is gone",
        id="upsample",
    ),
    pytest.param("Concat", 3, {}, 1, "axis became required", id="concat"),
]


@pytest.mark.parametrize(("operator", "opset", "attributes", "inputs", "reason"), REFUSED)
def test_an_early_operator_without_an_equivalent_is_refused_by_name(
    operator: str, opset: int, attributes: dict[str, Any], inputs: int, reason: str
) -> None:
    made = early(operator, opset, attributes, (ONES,) * inputs)
    place = rf"'{operator}' \(node 'old', opset {opset}\)"
    with pytest.raises(FormatError, match=f"{place} cannot be converted: .*{reason}"):
        raise_opset(made, 13, Names.of(made), "model.onnx")


def test_a_slope_whose_meaning_depends_on_an_unknown_rank_is_refused() -> None:
    made = early("PRelu", 6, {}, (CHANNELS,))
    made.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(FormatError, match=r"'PRelu'.*rank of its input 'x' is not known"):
        raise_opset(made, 13, Names.of(made), "model.onnx")


def test_a_slope_of_more_axes_is_refused() -> None:
    made = early("PRelu", 6, {}, (PLANES,))
    with pytest.raises(FormatError, match=r"'PRelu'.*its slope has more than one axis"):
        raise_opset(made, 13, Names.of(made), "model.onnx")

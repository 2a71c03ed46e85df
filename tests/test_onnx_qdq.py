"""Quantized ONNX models: the graph around each weight, in full, and what it computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_models import (
    Array,
    constant,
    initializer,
    model,
    quantize,
    replaced,
    run,
    same,
)

from qtool.formats.onnx import graph as onnx_graph
from qtool.spec import Blocked, Granularity, PerAxis, QuantSpec

WEIGHT = np.random.default_rng(3).normal(size=(8, 6)).astype(np.float32)
X = np.random.default_rng(4).normal(size=(3, 8)).astype(np.float32)
MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])


def int8(granularity: Granularity | None = None) -> QuantSpec:
    return QuantSpec("int8", granularity or PerAxis(0))


def matmul(weight: Array = WEIGHT, **fields: Any) -> ModelProto:
    dtype = helper.np_dtype_to_tensor_dtype(weight.dtype)
    return model(
        [MATMUL],
        [initializer("w", weight, weight.dtype)],
        inputs={"x": (None, 8)},
        dtype=dtype,
        **fields,
    )


def nodes(made: ModelProto) -> list[tuple[str, list[str], list[str]]]:
    return [(n.op_type, list(n.input), list(n.output)) for n in made.graph.node]


ROUNDED = (np.rint(WEIGHT * 4) / 4 + 0).astype(np.float32)  # + 0: codes have no negative zero


def test_codes_scale_and_zero_point_take_the_place_of_the_weight(tmp_path: Path) -> None:
    weight = np.array([[1, -1, 0.5], [0.25, 0, -0.75]], np.float32)
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")],
        [initializer("w", weight)],
        inputs={"x": (1, 2)},
    )
    result = quantize(
        made, tmp_path / "q.onnx", {"w": QuantSpec("uint4", Blocked(0, 2))}, zero_point=8
    )
    assert nodes(result) == [
        ("DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["w"]),
        ("MatMul", ["x", "w"], ["y"]),
    ]
    assert {a.name: a.i for a in result.graph.node[0].attribute} == {"axis": 0, "block_size": 2}
    values = {
        t.name: (t.data_type, list(t.dims), t.raw_data.hex()) for t in result.graph.initializer
    }
    assert values == {
        "w_quantized": (TensorProto.UINT4, [2, 3], "4c9a58"),
        "w_scale": (TensorProto.FLOAT, [1, 3], "0000803e" * 3),
        "w_zero_point": (TensorProto.UINT4, [1, 3], "8808"),
    }


def test_a_tied_weight_is_quantized_once(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Gather", ["w", "i"], ["g"]),
            helper.make_node("Gemm", ["g", "w"], ["y"], transB=1),
        ],
        [initializer("w", WEIGHT), initializer("i", [1, 5], np.int64)],
    )
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    assert [n.op_type for n in result.graph.node] == ["DequantizeLinear", "Gather", "Gemm"]
    assert sorted(t.name for t in result.graph.initializer) == ["i", "w_quantized", "w_scale"]
    assert same(result, replaced(made, w=ROUNDED))


def test_a_weight_that_is_a_graph_output_stays_one(tmp_path: Path) -> None:
    made = matmul(outputs=("y", "w"))
    result = quantize(made, tmp_path / "q.onnx", {"w": int8(PerAxis(1))})
    assert [output.name for output in result.graph.output] == ["y", "w"]
    assert run(result, {"x": X})[1].tolist() == ROUNDED.tolist()


def test_new_names_avoid_every_name_in_use(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["w_DequantizeLinear"])],
        "b",
        [],
        [helper.make_tensor_value_info("w_DequantizeLinear", TensorProto.FLOAT, [8, 6])],
    )
    made = model(
        [
            helper.make_node("Relu", ["x"], ["w_scale"], name="w_quantized_1"),
            helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch),
            helper.make_node("MatMul", ["w_scale", "w"], ["m"]),
            helper.make_node("Add", ["m", "w_zero_point"], ["y"], name="w_quantized"),
        ],
        [
            initializer("w", WEIGHT),
            initializer("w_zero_point", np.zeros(6)),
            initializer("c", True, np.bool_),
        ],
        inputs={"x": (None, 8)},
        outputs=("y", "w_scale", "z"),
    )
    made.graph.value_info.append(helper.make_tensor_value_info("w_zero_point_1", 1, [6]))
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()}, zero_point=0)
    assert nodes(result)[0] == (
        "DequantizeLinear",
        ["w_quantized_2", "w_scale_1", "w_zero_point_2"],
        ["w"],
    )
    names = [t.name for t in result.graph.initializer] + [
        name for node in onnx_graph.all_nodes(result.graph.node) for name in node.output
    ]
    twice = {name for name, count in Counter(names).items() if count > 1}
    assert twice == {"w_DequantizeLinear"}  # one in each branch, as before
    assert result.graph.node[0].name == "w_DequantizeLinear_1"
    assert same(result, replaced(made, w=ROUNDED), x=X)


def test_a_constant_node_gives_way_to_the_dequantization(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            constant("w", WEIGHT),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        inputs={"x": (None, 8)},
    )
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    assert [n.op_type for n in result.graph.node] == ["Relu", "DequantizeLinear", "MatMul"]
    assert same(result, replaced(made, w=ROUNDED), x=X)


def test_a_weight_behind_transpose_and_cast_is_quantized(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["c"], ["t"]),
            helper.make_node("MatMul", ["x", "t"], ["y"]),
        ],
        [initializer("w", WEIGHT.T, np.float16)],
        inputs={"x": (None, 8)},
    )
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()}, scale_dtype="float16")
    expected = replaced(made, w=ROUNDED.T.astype(np.float16))
    assert same(result, expected, x=X)


def test_a_float64_weight_is_cast_back(tmp_path: Path) -> None:
    made = matmul(WEIGHT.astype(np.float64))
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    assert nodes(result)[:2] == [
        ("DequantizeLinear", ["w_quantized", "w_scale"], ["w_float32"]),
        ("Cast", ["w_float32"], ["w"]),
    ]
    x = X.astype(np.float64)
    expected = replaced(made, w=ROUNDED.astype(np.float64))
    assert same(result, expected, x=x)


@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float8e8m0"])
def test_a_scale_of_another_type_keeps_the_type_of_the_weight(tmp_path: Path, scale: str) -> None:
    result = quantize(matmul(), tmp_path / "q.onnx", {"w": int8()}, scale_dtype=scale)
    attributes = {a.name: a.i for a in result.graph.node[0].attribute}
    assert attributes == {"axis": 0, "output_dtype": TensorProto.FLOAT}


def test_before_ir_version_4_the_weights_stop_being_graph_inputs(tmp_path: Path) -> None:
    made = matmul(opset=9, ir_version=3)
    for name, shape in (("w", (8, 6)), ("b", (6,))):
        made.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    made.graph.initializer.append(initializer("b", np.ones(6)))
    made.graph.node.append(helper.make_node("Add", ["y", "b"], ["z"]))
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    assert [value.name for value in result.graph.input] == ["x"]
    assert result.ir_version == 7


def test_a_weight_that_only_a_nested_graph_reads_is_quantized(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"])],
        "b",
        [],
        [helper.make_tensor_value_info("m", TensorProto.FLOAT, [None, 6])],
    )
    made = model(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        [initializer("w", WEIGHT), initializer("c", True, np.bool_)],
        inputs={"x": (None, 8)},
    )
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    assert same(result, replaced(made, w=ROUNDED), x=X)


def test_nothing_to_quantize_gives_the_same_model(tmp_path: Path) -> None:
    made = matmul(opset=9, ir_version=4, producer_name="somebody")
    assert quantize(made, tmp_path / "q.onnx", {}) == made


def test_what_is_not_quantized_stays_as_it_was(tmp_path: Path) -> None:
    made = matmul(doc_string="words")
    made.graph.initializer.append(helper.make_tensor("field", TensorProto.FLOAT, [2], [1.5, 2.5]))
    made.graph.quantization_annotation.add(tensor_name="w")
    helper.set_model_props(made, {"author": "héllo"})
    result = quantize(made, tmp_path / "q.onnx", {"w": int8()})
    del result.graph.node[0], result.graph.initializer[1:]
    result.graph.initializer.insert(0, made.graph.initializer[0])
    assert result == made

"""What the nodes of a model say about its tensors: axes, obstacles, quantization that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper
from onnx_models import constant, initializer, model, save

from qtool.dtypes import DTYPES
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx.uses import QuantizedUse, uses, uses_of_stored_codes


def make(operator: str, *inputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, list(inputs), ["y"], **attributes)


AXES: list[Any] = [
    pytest.param([make("MatMul", "x", "w")], 2, (1, 0), id="matmul"),
    pytest.param([make("MatMul", "x", "w")], 3, (2, 1), id="batched-matmul"),
    pytest.param([make("MatMul", "w", "x")], 2, (0, 1), id="matmul-left"),
    pytest.param([make("Gemm", "x", "w")], 2, (1, 0), id="gemm"),
    pytest.param([make("Gemm", "x", "w", transB=1)], 2, (0, 1), id="gemm-transposed"),
    pytest.param([make("Conv", "x", "w")], 4, (0, 1), id="conv"),
    pytest.param([make("ConvTranspose", "x", "w")], 4, (1, 0), id="conv-transpose"),
    pytest.param([make("Gather", "w", "x")], 2, (0, 1), id="embedding"),
    pytest.param([make("Gather", "w", "x", axis=1)], 2, (1, 0), id="gather-columns"),
    pytest.param([make("Gather", "w", "x", axis=-2)], 3, (1, 2), id="gather-the-middle"),
    pytest.param([make("LSTM", "x", "w", "r")], 3, (1, 2), id="lstm"),
    pytest.param([make("GRU", "x", "r", "w")], 3, (1, 2), id="gru-recurrence"),
    pytest.param([make("LSTM", "x", "v", "r", "w")], 2, (None, None), id="lstm-bias"),
    pytest.param([make("Einsum", "x", "w", equation="ij,jk")], 2, (1, 0), id="einsum"),
    pytest.param([make("Einsum", "w", "x", equation="ij, jk -> ki")], 2, (0, 1), id="einsum-left"),
    # of several axes of one role the longest counts
    pytest.param([make("Einsum", "x", "w", equation="ah,hbc->abc")], 3, (2, 0), id="einsum-wide"),
    pytest.param([make("Einsum", "x", "w", equation="bhi,hoi->bho")], 3, (1, 2), id="einsum-heads"),
    pytest.param([make("Einsum", "x", "w", equation="...j,...jk")], 3, (2, 1), id="ellipsis"),
    pytest.param([make("Einsum", "x", "w", equation="i,jj->i")], 2, (None, None), id="diagonal"),
    pytest.param([make("Einsum", "x", "w", equation="ij")], 2, (None, None), id="too-few-terms"),
    pytest.param([make("Einsum", "x", "w", equation="i,ijk->i")], 2, (None, None), id="other-rank"),
    pytest.param([make("Add", "x", "w"), make("Conv", "x", "w")], 4, (0, 1), id="one-knows"),
    pytest.param(
        [make("Gather", "w", "x"), make("MatMul", "x", "w"), make("Gemm", "x", "w", transB=1)],
        2,
        (0, 1),
        id="most-agree",
    ),
    pytest.param([make("MatMul", "x", "w"), make("Gather", "w", "x")], 2, (1, 0), id="first"),
    pytest.param(
        [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), make("MatMul", "x", "t")],
        2,
        (0, 1),
        id="behind-transpose",
    ),
    pytest.param(
        [helper.make_node("Transpose", ["w"], ["t"], perm=[2, 0, 1]), make("MatMul", "x", "t")],
        3,
        (1, 0),
        id="behind-rotation",
    ),
    pytest.param(
        [
            helper.make_node("Cast", ["w"], ["c"], to=1),
            helper.make_node("Identity", ["c"], ["i"]),
            make("Conv", "x", "i"),
        ],
        4,
        (0, 1),
        id="behind-cast-and-identity",
    ),
    pytest.param(
        [helper.make_node("Flatten", ["w"], ["f"]), make("Gemm", "x", "f", transB=1)],
        3,
        (0, 2),
        id="behind-flatten",
    ),
    pytest.param(
        [helper.make_node("Unsqueeze", ["w"], ["u"], axes=[0, 3]), make("Conv", "x", "u")],
        2,
        (None, 0),
        id="behind-unsqueeze",
    ),
    pytest.param(
        [helper.make_node("Reshape", ["w"], ["r"], shape=[0, 12]), make("MatMul", "x", "r")],
        3,
        (2, 0),
        id="behind-reshape-1",
    ),
    pytest.param(
        [helper.make_node("Reshape", ["w", "unknown"], ["r"]), make("MatMul", "x", "r")],
        3,
        (None, None),
        id="behind-reshape-to-what-is-not-stored",
    ),
    pytest.param(
        [
            constant("s", [3, 2], np.int64),
            helper.make_node("Reshape", ["w", "s"], ["r"]),
            make("MatMul", "x", "r"),
        ],
        2,
        (None, None),
        id="behind-reshape-across-axes",
    ),
    pytest.param(
        [
            constant("s", [2, -1], np.int64),
            helper.make_node("Reshape", ["w", "s"], ["r"]),
            helper.make_node("Transpose", ["r"], ["t"]),
            make("MatMul", "x", "t"),
        ],
        3,
        (0, 2),
        id="behind-reshape-and-transpose",
    ),
    pytest.param(
        [helper.make_node("Identity", ["w"], ["v"]), helper.make_node("Identity", ["v"], ["w"])],
        2,
        (None, None),
        id="a-circle",
    ),
]


@pytest.mark.parametrize(("nodes", "rank", "axes"), AXES)
def test_the_axes_come_from_the_consumers(
    tmp_path: Path, nodes: list[NodeProto], rank: int, axes: tuple[int | None, int | None]
) -> None:
    graph = helper.make_graph(nodes, "g", [], [], [initializer("w", np.ones((2, 3, 4, 5)[:rank]))])
    source = OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx"))
    info = next(i for i in source.infos() if i.name == "w")
    assert (info.output_axis, info.reduced_axis) == axes


def test_the_search_for_axes_takes_no_way_twice(tmp_path: Path) -> None:
    """Functions of which each calls the next one twice: a thousand million ways to the last."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    functions = []
    for level in range(30):
        calls = [
            helper.make_node(f"F{level + 1}", ["a", "b"], [f"y{side}"], domain="own")
            for side in range(2)
        ]
        last = [helper.make_node("MatMul", ["a", "b"], ["y0"])]
        nodes = calls if level < 29 else last
        functions.append(
            helper.make_function("own", f"F{level}", ["a", "b"], ["y0"], nodes, imports)
        )
    node = helper.make_node("F0", ["x", "w"], ["y"], domain="own")
    graph = helper.make_graph([node], "g", [], [], [initializer("w", np.ones((2, 3)))])
    made = helper.make_model(graph, functions=functions)
    (info,) = OnnxSource(save(made, tmp_path / "m.onnx")).infos()
    assert (info.output_axis, info.reduced_axis) == (1, 0)


def test_a_consumer_in_a_nested_graph_counts_unless_the_name_is_its_own(tmp_path: Path) -> None:
    def body(*own: TensorProto) -> Any:
        return helper.make_graph([make("Conv", "x", "w")], "b", [], [], own)

    w = initializer("w", np.ones((2, 3, 1, 1)))
    for own, axes in (((), (0, 1)), ((w,), (None, None))):
        node = helper.make_node("If", ["c"], ["z"], then_branch=body(*own), else_branch=body(*own))
        graph = helper.make_graph([node], "g", [], [], [w])
        info = OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx")).infos()[0]
        assert (info.output_axis, info.reduced_axis) == axes


W = initializer("w", np.ones((4, 4)))


def obstacle(tmp_path: Path, *nodes: NodeProto, ir_version: int = 10, **fields: Any) -> str | None:
    made = model(nodes, [W], ir_version=ir_version, **fields)
    return OnnxSource(save(made, tmp_path / "m.onnx")).infos()[0].obstacle


def test_what_callers_may_set_and_no_operator_multiplies_by_is_an_obstacle(tmp_path: Path) -> None:
    inputs = {"x": (1, 4), "w": (4, 4)}
    found = obstacle(tmp_path, make("Add", "x", "w"), inputs=inputs)
    assert found == "is a graph input that callers may set, read by no matrix operator"
    assert obstacle(tmp_path, make("MatMul", "x", "w"), inputs=inputs) is None
    assert obstacle(tmp_path, make("Add", "x", "w"), inputs=inputs, ir_version=3) is None


def test_an_initializer_that_a_loop_sets_is_an_obstacle(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4])]
    body = helper.make_graph([make("MatMul", "w", "w")], "b", values, [], [W])
    node = helper.make_node("Loop", ["n", "", "x"], ["z"], body=body)
    graph = helper.make_graph([node], "g", [], [])
    (info,) = OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx")).infos()
    assert info.obstacle == "is an input of the nested graph that it is in"


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("index", [3, 5, 7])
def test_what_recurrent_operators_add_is_an_obstacle(
    tmp_path: Path, operator: str, index: int
) -> None:
    inputs = ["x", "v", "r", *[""] * (index - 3), "w"]
    found = obstacle(tmp_path, make(operator, *inputs), inputs={"x": (1,), "v": (1,), "r": (1,)})
    assert found == f"is a bias or a state of {operator}"


def test_what_a_quantized_operator_reads_is_an_obstacle(tmp_path: Path) -> None:
    found = obstacle(tmp_path, make("QuantizeLinear", "w", "s"), inputs={"s": ()})
    assert found == "is read by QuantizeLinear, so it is part of something quantized already"
    scale = make("MatMulNBits", "x", "b", "w", domain="com.microsoft")
    imports = [helper.make_opsetid("com.microsoft", 1)]
    assert obstacle(tmp_path, scale, inputs={"x": (1,), "b": (1,)}, imports=imports) is not None
    assert obstacle(tmp_path, make("MatMul", "x", "w"), inputs={"x": (1, 4)}) is None


VECTORS: list[Any] = [
    pytest.param((1, 4, 1, 1), make("Add", "x", "w"), True, id="bias"),
    pytest.param((1, 4), make("Mul", "x", "w"), True, id="row"),
    pytest.param((1, 1), make("Mul", "x", "w"), True, id="scalar"),
    pytest.param((2, 4), make("Mul", "x", "w"), False, id="matrix"),
    pytest.param((4,), make("Mul", "x", "w"), False, id="plain-vector"),
    pytest.param((4, 1), make("MatMul", "x", "w"), False, id="weight-of-one-output"),
    pytest.param((4, 1, 1, 1), make("Conv", "x", "w"), False, id="depthwise"),
]


@pytest.mark.parametrize(("shape", "node", "is_left_alone"), VECTORS)
def test_a_vector_in_the_shape_of_a_matrix_is_an_obstacle(
    tmp_path: Path, shape: tuple[int, ...], node: NodeProto, is_left_alone: bool
) -> None:
    graph = helper.make_graph([node], "g", [], [], [initializer("w", np.ones(shape))])
    (info,) = OnnxSource(save(helper.make_model(graph), tmp_path / "m.onnx")).infos()
    reason = "a vector in its shape, read by no matrix operator"
    assert info.obstacle == (reason if is_left_alone else None)


def test_a_weight_that_training_updates_is_an_obstacle(tmp_path: Path) -> None:
    made = model([make("MatMul", "x", "w")], [W], inputs={"x": (1, 4)})
    made.training_info.add().update_binding.add(key="w", value="w_new")
    info = OnnxSource(save(made, tmp_path / "m.onnx")).infos()[0]
    assert info.obstacle == "is updated in training"


def int8(name: str, shape: tuple[int, ...]) -> TensorProto:
    return initializer(name, np.zeros(shape), np.int8)


FLOAT32, FLOAT16, INT8 = DTYPES["float32"], DTYPES["float16"], DTYPES["int8"]
USES: list[Any] = [
    pytest.param(
        make("DequantizeLinear", "q", "s", axis=0),
        [int8("q", (2, 4)), initializer("s", [1, 2])],
        QuantizedUse("q", "DequantizeLinear", INT8, "per_axis", 0, None, FLOAT32),
        id="per-axis",
    ),
    pytest.param(
        make("DequantizeLinear", "q", "s", axis=1, block_size=2),
        [int8("q", (2, 4)), initializer("s", np.ones((2, 2)), np.float16)],
        QuantizedUse("q", "DequantizeLinear", INT8, "blocked", 1, 2, FLOAT16),
        id="blocked",
    ),
    pytest.param(
        make("QuantizeLinear", "x", "s", "z"),
        [initializer("s", 1), int8("z", ())],
        QuantizedUse("x", "QuantizeLinear", INT8, "per_tensor", None, None, FLOAT32),
        id="activation",
    ),
    pytest.param(
        make("QuantizeLinear", "x", "s", output_dtype=22),
        [initializer("s", [1])],
        QuantizedUse("x", "QuantizeLinear", DTYPES["int4"], "per_tensor", None, None, FLOAT32),
        id="output-dtype",
    ),
    pytest.param(
        make("MatMulNBits", "x", "b", "s", K=4, N=4, block_size=16, domain="com.microsoft"),
        [],
        QuantizedUse("b", "MatMulNBits", DTYPES["uint4"], "blocked", None, 16, None),
        id="matmul-nbits",
    ),
    pytest.param(
        make("QLinearConv", "x", "s"),
        [],
        QuantizedUse("x", "QLinearConv", None, None, None, None, None),
        id="qlinear",
    ),
]


@pytest.mark.parametrize(("node", "tensors", "use"), USES)
def test_quantized_operators_are_described(
    node: NodeProto, tensors: list[TensorProto], use: QuantizedUse
) -> None:
    graph = helper.make_graph([constant("unrelated", [1]), node], "g", [], [], tensors)
    assert uses(helper.make_model(graph)) == [use]


def test_quantized_operators_in_nested_graphs_and_functions_are_found() -> None:
    body = helper.make_graph([make("MatMulInteger", "a", "b")], "b", [], [])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    function = helper.make_function(
        "local", "F", ["a"], ["y"], [make("ConvInteger", "a", "a")], [helper.make_opsetid("", 21)]
    )
    made = helper.make_model(helper.make_graph([node], "g", [], []), functions=[function])
    assert [use.operator for use in uses(made)] == ["MatMulInteger", "MatMulInteger", "ConvInteger"]


def test_a_float_model_is_not_quantized() -> None:
    made = model([make("MatMul", "x", "w")], [W], inputs={"x": (1, 4)})
    assert uses(made) == []


STORED = [int8("q", (2, 4)), int8("z", ()), initializer("s", 1), initializer("w", [1, 2])]
STORED_CODES: list[Any] = [
    pytest.param(make("DequantizeLinear", "q", "s", "z"), True, id="weight"),
    pytest.param(make("DequantizeLinear", "x", "s", "z"), False, id="activation"),
    pytest.param(make("QuantizeLinear", "x", "s", "z"), False, id="quantized-activation"),
    pytest.param(make("QuantizeLinear", "w", "s", "z"), False, id="float-weight"),
    pytest.param(make("DynamicQuantizeLinear", "x"), False, id="dynamic"),
    pytest.param(make("MatMulInteger", "x", "q"), True, id="matmul-integer"),
    pytest.param(make("MatMulInteger", "x", "a", "z", "z"), False, id="of-activations"),
    pytest.param(make("QLinearConv", "x", "s", "z", "q", "s", "z", "s", "z"), True, id="conv"),
    pytest.param(make("QLinearAdd", "x", "s", "z", "a", "s", "z", "s", "z"), False, id="add"),
    pytest.param(make("MatMulNBits", "x", "q", "s"), True, id="matmul-nbits"),
]


@pytest.mark.parametrize(("node", "reads_codes"), STORED_CODES)
def test_stored_codes_are_told_from_those_of_activations(
    node: NodeProto, reads_codes: bool
) -> None:
    made = helper.make_model(helper.make_graph([node], "g", [], [], STORED))
    assert [use.operator for use in uses_of_stored_codes(made)] == [node.op_type] * reads_codes


def test_codes_that_a_function_takes_count_as_stored() -> None:
    function = helper.make_function(
        "local", "F", ["c", "s"], ["y"], [make("DequantizeLinear", "c", "s")],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    made = helper.make_model(helper.make_graph([], "g", [], []), functions=[function])
    assert [use.operator for use in uses_of_stored_codes(made)] == ["DequantizeLinear"]

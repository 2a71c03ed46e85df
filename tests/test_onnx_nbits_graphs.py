"""--layout matmul-nbits: which weights it takes, sharing, nested graphs; inspect; and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from command import ok, refused
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx_jobs import job, normal, replaced, reseed, same, unsigned
from onnx_models import check, constant, initializer, model, run, save
from onnx_nbits import Array, gather_weight, matmul_weight, stored

import qtool

make = helper.make_node
OPTIONS: dict[str, Any] = {"dtype": "int4", "block_size": 16, "layout": "matmul-nbits"}
X = {"x": (3, 48)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    reseed()


def values(made: ModelProto, **names: str) -> dict[str, Array]:
    """The weights of a result: name=the codes that its node reads."""
    found = {}
    for node in all_nodes(made.graph):
        for name, codes in names.items():
            if codes in node.input:
                read = gather_weight if node.op_type == "GatherBlockQuantized" else matmul_weight
                found[name] = read(node, stored(made))
    return found


def all_nodes(graph: onnx.GraphProto) -> list[NodeProto]:
    nested = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for inner in nested for node in all_nodes(inner))]


def reasons(report: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["reason"] for entry in report["skipped"]}


def close(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Equal up to the order in which 48 products of values around 1 are added."""
    for new, old in zip(found, expected, strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        np.testing.assert_allclose(new, old, rtol=0, atol=48 * 2e-6)


# ------------------------------------------- Gemm

BIASES = {
    "none": None, "vector": (5,), "row": (1, 5), "column": (3, 1), "matrix": (3, 5), "scalar": (),
}  # fmt: skip


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_is_a_product_and_an_add(transposed: int, bias: str, tmp_path: Path) -> None:
    w = normal(5, 48) if transposed else normal(48, 5)
    shape = BIASES[bias]
    third = [] if shape is None else ["c"]
    nodes = [make("Gemm", ["x", "w", *third], ["y"], "layer", transB=transposed)]
    tensors = [initializer("w", w), *(initializer(name, normal(*(shape or ()))) for name in third)]
    made = model(nodes, tensors, inputs=X)
    result, _ = job(made, tmp_path, **OPTIONS)
    operators = ["MatMulNBits", "Add"] if third else ["MatMulNBits"]
    assert [node.op_type for node in result.graph.node] == operators
    assert result.graph.node[0].name == "layer"
    stored_values = values(result, w="w_Q4")["w"]
    expected = {"w": stored_values.T if transposed else stored_values}
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, expected), x))


@pytest.mark.parametrize(
    "attributes", [{"alpha": 0.5}, {"alpha": 0.0}, {"beta": 2.0}, {"transA": 1}], ids=str
)
def test_gemm_with_factors_stays(attributes: dict[str, Any], tmp_path: Path) -> None:
    nodes = [make("Gemm", ["x", "w", "c"], ["y"], **attributes)]
    tensors = [initializer("w", normal(48, 5)), initializer("c", normal(5))]
    shape = (48, 3) if "transA" in attributes else (3, 48)
    made = model(nodes, tensors, inputs={"x": shape})
    result, report = job(made, tmp_path, allow_empty=True, **OPTIONS)
    assert reasons(report)["w"].startswith("is read by Gemm with transA, alpha or beta")
    assert unsigned(result) == made


def test_a_beta_without_a_third_input_means_nothing(tmp_path: Path) -> None:
    node = make("Gemm", ["x", "w"], ["y"], beta=2.0)
    made = model([node], [initializer("w", normal(48, 5))], inputs=X)
    result, _ = job(made, tmp_path, **OPTIONS)
    assert [node.op_type for node in result.graph.node] == ["MatMulNBits"]


# ------------------------------------------- what stays


def stays(nodes: list[NodeProto], shape: tuple[int, ...] = (48, 48), **more: Any) -> Any:
    return nodes, shape, more


STAYS: dict[str, tuple[Any, str]] = {
    "conv": (
        stays([make("Unsqueeze", ["x", "axes"], ["a"]), make("Conv", ["a", "w"], ["y"])],
              (48, 3, 16)), "is read by Conv, which has no counterpart with blocks of codes"),
    "left-factor": (stays([make("MatMul", ["w", "t"], ["y"])]), "is the left factor of MatMul"),
    "batch": (stays([make("MatMul", ["x", "w"], ["y"])], (2, 48, 16)),
              "is multiplied as more than one matrix"),
    "unread": (stays([make("Identity", ["x"], ["y"])]), "is read by no node"),
    "both": (stays([make("MatMul", ["x", "w"], ["h"]), make("Mul", ["w", "h2"], ["y"])]),
             "is read by Mul, which has no counterpart"),
    "columns-gathered": (
        stays([make("Gather", ["w", "i"], ["y"], axis=1)]), "is read by Gather, which has no"),
    "two-axes": (
        stays([make("MatMul", ["x", "w"], ["h"]), make("Gather", ["w", "i"], ["y"])]),
        "is read along different axes"),
    "output": (stays([make("MatMul", ["x", "w"], ["y"])], outputs=("y", "w")),
               "is an output of a graph, or read in training"),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS)
def test_a_weight_that_the_operators_cannot_hold_stays_with_a_reason(
    case: str, tmp_path: Path
) -> None:
    (nodes, shape, more), reason = STAYS[case]
    tensors = [
        initializer("w", normal(*shape)), initializer("axes", [0], np.int64),
        initializer("t", normal(48)), initializer("h2", normal(1)),
        initializer("i", [1], np.int64), initializer("v", normal(48, 5)),
    ]  # fmt: skip
    nodes = [*nodes, make("MatMul", ["x", "v"], ["z"])]
    outputs = (*more.get("outputs", ("y",)), "z")
    made = model(nodes, tensors, inputs=X | more.get("inputs", {}), outputs=outputs)
    result, report = job(made, tmp_path, **OPTIONS)
    assert reasons(report)["w"].startswith(reason)
    assert [tensor["name"] for tensor in report["tensors"]] == ["v"]
    kept = {t.name: t for t in result.graph.initializer}
    assert kept["w"] == tensors[0]


def test_float64_stays(tmp_path: Path) -> None:
    w = numpy_helper.from_array(normal(48, 5).astype(np.float64), "w")
    made = model([make("MatMul", ["x", "w"], ["y"])], [w], inputs=X, dtype=TensorProto.DOUBLE)
    _, report = job(made, tmp_path, allow_empty=True, **OPTIONS)
    assert reasons(report)["w"] == "is float64, which MatMulNBits does not take"


# ------------------------------------------- sharing, Constant nodes, nested graphs, old models


def test_one_weight_that_several_nodes_read_is_stored_once(tmp_path: Path) -> None:
    nodes = [
        make("MatMul", ["x", "w"], ["h"], "first"), make("Relu", ["h"], ["r"]),
        make("Gemm", ["r", "w", "c"], ["y"], "second"),
    ]  # fmt: skip
    made = model(nodes, [initializer("w", normal(48, 48)), initializer("c", normal(48))], inputs=X)
    result, _ = job(made, tmp_path, **OPTIONS)
    assert sorted(stored(result)) == ["c", "w_Q4", "w_scales"]
    x = {"x": normal(3, 48)}
    expected = run(replaced(made, values(result, w="w_Q4")), x)
    np.testing.assert_allclose(run(result, x)[0], expected[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint2"])
def test_an_embedding_that_is_also_the_output_layer_is_stored_for_both(
    dtype: str, tmp_path: Path
) -> None:
    nodes = [make("Gather", ["w", "i"], ["x"]), make("Gemm", ["x", "w"], ["y"], transB=1)]
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("i", TensorProto.INT32, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 9])],
        [initializer("w", normal(9, 56))],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    result, report = job(made, tmp_path, **OPTIONS | {"dtype": dtype})
    gathered, product = result.graph.node
    assert (gathered.op_type, product.op_type) == ("GatherBlockQuantized", "MatMulNBits")
    assert gathered.input[0] != product.input[1]
    table = gather_weight(gathered, stored(result))
    assert (
        table.tobytes() == np.ascontiguousarray(matmul_weight(product, stored(result)).T).tobytes()
    )
    i = {"i": np.array([8, 0, -1, 3], np.int32)}
    close(run(result, i), run(replaced(made, {"w": table}), i))
    nbytes = sum(len(tensor.raw_data) for tensor in result.graph.initializer)
    assert report["tensors"][0]["bytes_after"] == nbytes


@pytest.mark.parametrize(
    ("between", "shape"),
    [
        ([make("Transpose", ["w"], ["v"])], (5, 48)),
        ([make("Transpose", ["w"], ["v"], perm=[1, 0])], (5, 48)),
        ([make("Transpose", ["w"], ["v"], perm=[0, 1])], (48, 5)),
        ([make("Identity", ["w"], ["v"])], (48, 5)),
        ([make("Identity", ["w"], ["u"]), make("Transpose", ["u"], ["t"]),
          make("Transpose", ["t"], ["v"])], (48, 5)),
    ],
    ids=["transpose", "perm", "same-perm", "identity", "chain"],
)  # fmt: skip
@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_a_weight_is_found_behind_transpose_and_identity(
    operator: str, between: list[NodeProto], shape: tuple[int, int], tmp_path: Path
) -> None:
    nodes = [*between, make(operator, ["x", "v"], ["y"])]
    made = model(nodes, [initializer("w", normal(*shape))], inputs=X)
    made.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [48, 5]))
    result, report = job(made, tmp_path, **OPTIONS)
    assert [node.op_type for node in result.graph.node] == ["MatMulNBits"]
    assert not result.graph.value_info
    assert report["tensors"][0]["axis"] == shape.index(48)
    value = values(result, w="w_Q4")["w"]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, {"w": value if shape[0] == 48 else value.T}), x))


def test_an_embedding_is_tied_by_a_transpose_too(tmp_path: Path) -> None:
    nodes = [
        make("Gather", ["w", "i"], ["h"]), make("Transpose", ["w"], ["t"]),
        make("MatMul", ["h", "t"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("i", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 9])],
        [initializer("w", normal(9, 56))],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    result, _ = job(made, tmp_path, **OPTIONS)
    operators = [node.op_type for node in result.graph.node]
    assert operators == ["GatherBlockQuantized", "MatMulNBits"]
    table = gather_weight(result.graph.node[0], stored(result))
    i = {"i": np.array([8, 0, -1, 3])}
    close(run(result, i), run(replaced(made, {"w": table}), i))


@pytest.mark.parametrize("reader", ["Relu", "output", "Gather"])
def test_a_transpose_that_something_else_reads_too_stays(reader: str, tmp_path: Path) -> None:
    nodes = [make("Transpose", ["w"], ["t"]), make("MatMul", ["x", "t"], ["y"])]
    if reader != "output":
        inputs = ["t", "i"] if reader == "Gather" else ["t"]
        nodes.append(make(reader, inputs, ["z"]))
    outputs = ("y", "t" if reader == "output" else "z")
    tensors = [initializer("w", normal(5, 48)), initializer("i", [1], np.int64)]
    made = model(nodes, tensors, inputs=X, outputs=outputs)
    result, report = job(made, tmp_path, allow_empty=True, **OPTIONS)
    expected = {"output": "is read by Transpose", "Gather": "is read by Gather along its columns"}
    assert reasons(report)["w"].startswith(expected.get(reader, "is read by Relu"))
    assert unsigned(result) == made


def test_a_constant_node_is_a_weight_too(tmp_path: Path) -> None:
    made = model(
        [constant("w", normal(48, 5)), make("MatMul", ["x", "w"], ["y"])], inputs=X, opset=11
    )
    result, _ = job(made, tmp_path, **OPTIONS)
    assert [node.op_type for node in result.graph.node] == ["MatMulNBits"]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4")), x))


def branches(*names: str) -> NodeProto:
    """An If whose branches read the weight w of the graph around them."""
    made = []
    for name in names:
        out = helper.make_tensor_value_info(f"z_{name}", TensorProto.FLOAT, [3, 5])
        node = make("Gemm", ["x", "w", "c"], [f"z_{name}"])
        made.append(helper.make_graph([node], name, [], [out]))
    return make("If", ["b"], ["y"], then_branch=made[0], else_branch=made[1])


def test_nodes_of_nested_graphs_read_the_weights_of_the_graph_around_them(tmp_path: Path) -> None:
    tensors = [
        initializer("w", normal(48, 5)), initializer("c", normal(5)), initializer("b", True, bool)
    ]  # fmt: skip
    nodes = [branches("yes", "no"), make("MatMul", ["x", "w"], ["v"])]
    made = model(nodes, tensors, inputs=X, outputs=("y", "v"))
    result, _ = job(made, tmp_path, **OPTIONS)
    nested = [node.op_type for node in all_nodes(result.graph)]
    assert nested == ["If", "MatMulNBits", *["MatMulNBits", "Add"] * 2]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4")), x))
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    close(run(back, x), run(result, x))
    assert {"MatMulNBits", "Gemm"}.isdisjoint(node.op_type for node in all_nodes(back.graph))


def test_a_name_that_a_nested_graph_gives_anew_is_another_tensor(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, [3, 5])
    inner = [make("Mul", ["v", "v"], ["w2"]), make("MatMul", ["x", "w2"], ["z"])]
    body = helper.make_graph(inner, "body", [], [out], [initializer("v", normal(48, 5))])
    node = make("If", ["b"], ["y"], then_branch=body, else_branch=body)
    tensors = [initializer("w", normal(48, 5)), initializer("b", True, bool)]
    made = model([node, make("MatMul", ["x", "w"], ["u"])], tensors, inputs=X, outputs=("y", "u"))
    result, report = job(made, tmp_path, **OPTIONS)
    assert [tensor["name"] for tensor in report["tensors"]] == ["w"]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4")), x))


def test_weights_in_nested_graphs_stay_there(tmp_path: Path) -> None:
    made = []
    for name in ("yes", "no"):
        out = helper.make_tensor_value_info(f"z_{name}", TensorProto.FLOAT, [3, 5])
        nodes = [make("Transpose", ["w"], ["t"]), make("Gemm", ["x", "t", "c"], [f"z_{name}"])]
        stored_here = [initializer("w", normal(5, 48)), initializer("c", normal(5))]
        made.append(helper.make_graph(nodes, name, [], [out], stored_here))
    node = make("If", ["b"], ["y"], then_branch=made[0], else_branch=made[1])
    whole = model([node], inputs=X | {"b": ()})
    whole.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    result, report = job(whole, tmp_path, **OPTIONS)
    names = [tensor["name"] for tensor in report["tensors"]]
    assert names == ["If.else_branch/w", "If.then_branch/w"]
    nested = [a.g for a in result.graph.node[0].attribute]
    assert [[n.op_type for n in graph.node] for graph in nested] == [["MatMulNBits", "Add"]] * 2
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    for flag, graph in zip((False, True), nested, strict=True):
        tensors = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        w = matmul_weight(graph.node[0], tensors)
        x = normal(3, 48)
        feeds = {"x": x, "b": np.array(flag)}
        close(run(result, feeds), [x @ w + tensors["c"]])
        close(run(back, feeds), [x @ w + tensors["c"]])


def test_weights_in_functions_become_constants(tmp_path: Path) -> None:
    body = [
        constant("w", normal(48, 5)), constant("e", normal(9, 48)), constant("i", [1], np.int64),
        make("MatMul", ["a", "w"], ["f"]), make("Gather", ["e", "i"], ["g"]),
    ]  # fmt: skip
    function = helper.make_function("local", "F", ["a"], ["f", "g"], body,
                                    [helper.make_opsetid("", 17)])  # fmt: skip
    node = make("F", ["x"], ["y", "z"], domain="local")
    made = model([node], inputs=X, outputs=("y", "z"), functions=[function], opset=17, ir_version=8,
                 imports=[helper.make_opsetid("local", 1)])  # fmt: skip
    result, report = job(made, tmp_path, **OPTIONS)
    assert reasons(report)["e"] == "is gathered in a function, which may hold no int4"
    assert [entry.domain for entry in result.functions[0].opset_import] == ["", "com.microsoft"]
    nodes = result.functions[0].node
    assert [n.op_type for n in nodes if n.op_type != "Constant"] == ["MatMulNBits", "Gather"]
    tensors = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in nodes
               if n.op_type == "Constant"}  # fmt: skip
    product = next(n for n in nodes if n.op_type == "MatMulNBits")
    x = {"x": normal(3, 48)}
    expected = [x["x"] @ matmul_weight(product, tensors), tensors["e"][[1]]]
    close(run(result, x), expected)
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    assert [entry.domain for entry in back.functions[0].opset_import] == [""]
    close(run(back, x), expected)


def test_attributes_that_callers_of_a_function_set_are_not_guessed(tmp_path: Path) -> None:
    gemm = make("Gemm", ["a", "w"], ["f"])
    gemm.attribute.append(onnx.AttributeProto(name="transB", ref_attr_name="t",
                                              type=onnx.AttributeProto.INT))  # fmt: skip
    function = helper.make_function("local", "F", ["a"], ["f"],
                                    [constant("w", normal(48, 48)), gemm],
                                    [helper.make_opsetid("", 17)], ["t"])  # fmt: skip
    made = model([make("F", ["x"], ["y"], domain="local", t=1)], inputs=X, functions=[function],
                 opset=17, ir_version=8, imports=[helper.make_opsetid("local", 1)])  # fmt: skip
    result, report = job(made, tmp_path, allow_empty=True, **OPTIONS)
    assert reasons(report)["w"] == "is read by Gemm, whose attributes the callers of a function set"
    assert unsigned(result) == made


def test_a_weight_that_callers_may_set_is_fixed(tmp_path: Path) -> None:
    made = model([make("MatMul", ["x", "w"], ["y"])], [initializer("w", normal(48, 5))],
                 inputs=X | {"w": (48, 5)})  # fmt: skip
    result, _ = job(made, tmp_path, **OPTIONS)
    assert [value.name for value in result.graph.input] == ["x"]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4")), x))


def test_an_old_model_whose_weights_are_inputs_by_form(tmp_path: Path) -> None:
    made = model([make("Gemm", ["x", "w", "c"], ["y"])],
                 [initializer("w", normal(48, 5)), initializer("c", normal(5))],
                 inputs=X | {"w": (48, 5), "c": (5,)}, opset=8, ir_version=3)  # fmt: skip
    result, _ = job(made, tmp_path, **OPTIONS)
    assert [value.name for value in result.graph.input] == ["x"]
    assert (result.ir_version, result.opset_import[0].version) == (4, 8)
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4")), x))


def test_gemm_before_opset_7_stays(tmp_path: Path) -> None:
    node = make("Gemm", ["x", "w", "c"], ["y"], broadcast=1)
    made = model([node], [initializer("w", normal(48, 5)), initializer("c", normal(5))], inputs=X,
                 opset=6, ir_version=4)  # fmt: skip
    _, report = job(made, tmp_path, allow_empty=True, **OPTIONS)
    assert reasons(report)["w"].startswith("is read by Gemm of opset 6")


def test_names_in_use_are_not_taken_and_domains_imported_once(tmp_path: Path) -> None:
    nodes = [
        make("MatMul", ["x", "w"], ["h"]), make("Gelu", ["h"], ["w_Q4"], domain="com.microsoft"),
        make("Identity", ["w_Q4"], ["y"]),
    ]  # fmt: skip
    made = model(nodes, [initializer("w", normal(48, 5)), initializer("w_scales", [1])], inputs=X,
                 imports=[helper.make_opsetid("com.microsoft", 1)])  # fmt: skip
    result, _ = job(made, tmp_path, **OPTIONS)
    assert list(result.graph.node[0].input) == ["x", "w_Q4_1", "w_scales_1"]
    assert [entry.domain for entry in result.opset_import] == ["", "com.microsoft"]
    x = {"x": normal(3, 48)}
    close(run(result, x), run(replaced(made, values(result, w="w_Q4_1")), x))
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    assert [t.name for t in back.graph.initializer] == ["w_scales", "w"]
    assert [entry.domain for entry in back.opset_import] == ["", "com.microsoft"]


def test_nothing_quantized_is_the_model_as_it_was(tmp_path: Path) -> None:
    made = model([make("MatMul", ["x", "w"], ["y"])], [initializer("w", normal(48, 5))], inputs=X)
    result, _ = job(made, tmp_path, allow_empty=True, exclude=["w"], **OPTIONS)
    assert unsigned(result) == made


# ------------------------------------------- back to floats, again, and inspect


def network(dtype: Any = np.float32) -> ModelProto:
    """Embedding, two products of which one has a bias."""
    code = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}.get(
        dtype, TensorProto.BFLOAT16
    )
    tensors = {"e": (9, 48), "w": (48, 40), "v": (5, 40), "c": (5,)}
    nodes = [
        make("Gather", ["e", "i"], ["h"]), make("MatMul", ["h", "w"], ["g"]),
        make("Gemm", ["g", "v", "c"], ["y"], transB=1),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", code, ["n", 5])],
        [numpy_helper.from_array(normal(*s).astype(dtype), n) for n, s in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("options", [{}, {"external_data": True}], ids=["inline", "external"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", ["int2", "uint4", "int8"])
def test_dequantize_gives_the_float_model_back(
    dtype: str, symmetric: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    asked = OPTIONS | {"dtype": dtype, "symmetric": symmetric}
    job(network(), tmp_path, **asked, **options)
    done = qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx", **options)
    bits = dtype[-1]
    assert {t["name"]: t["shape"] for t in done["tensors"]} == {
        "e": [9, 48], "w": [48, 40], "v": [40, 5],
    }  # fmt: skip
    assert {t["dtype"] for t in done["tensors"]} == {"float32"}
    back = check(tmp_path / "back.onnx")
    assert [node.op_type for node in back.graph.node] == ["Gather", "MatMul", "MatMul", "Add"]
    assert [entry.domain for entry in back.opset_import] == [""]
    tensors = stored(back, tmp_path)
    assert sorted(tensors) == ["c", "e", "v", "w"]
    loaded = onnx.load(tmp_path / "out.onnx")
    expected = values(loaded, e=f"e_Q{bits}", w=f"w_Q{bits}", v=f"v_Q{bits}")
    for name, value in expected.items():
        same([tensors[name]], [np.ascontiguousarray(value)])
    i = {"i": np.array([3, 0, 8])}
    (found,), (quantized,) = run(tmp_path / "back.onnx", i), run(tmp_path / "out.onnx", i)
    np.testing.assert_allclose(found, quantized, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
def test_other_float_types_are_cast_to_what_the_operators_had(
    source: Any, output: str, tmp_path: Path
) -> None:
    job(network(source), tmp_path, **OPTIONS)
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx", dtype=output)
    back = check(tmp_path / "back.onnx")
    is_same = np.dtype(source).name == output
    casts = [node for node in back.graph.node if node.op_type == "Cast"]
    assert len(casts) == (0 if is_same else 3)
    names = {"e", "w", "v"} if is_same else {f"{name}_{output}" for name in ("e", "w", "v")}
    floats = {name: value for name, value in stored(back).items() if name != "c"}
    assert floats.keys() == names
    assert {str(value.dtype) for value in floats.values()} == {output}
    loaded = onnx.load(tmp_path / "out.onnx")
    found = floats["w" if is_same else f"w_{output}"]
    expected = values(with_scales(loaded, found.dtype), w="w_Q4")["w"]
    same([found], [np.ascontiguousarray(expected)])


def with_scales(made: ModelProto, dtype: Any) -> ModelProto:
    """The model with scales of another type, in which their products are rounded then."""
    copy = ModelProto()
    copy.CopyFrom(made)
    for tensor in copy.graph.initializer:
        if tensor.name.endswith("_scales"):
            scales = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(scales, tensor.name))
    return copy


def by_another(
    *, zero_points: Array | None = None, extra: Sequence[str] = (), scales: Any = None,
    codes: Any = None, **attributes: Any,
) -> ModelProto:  # fmt: skip
    """A MatMulNBits of K = 40, N = 3, as other tools write it."""
    tensors = [
        numpy_helper.from_array(
            np.arange(3 * 3 * 8).astype(np.uint8).reshape(3, 3, 8) if codes is None else codes,
            "packed"),
        initializer("s", [0.5] * 9 if scales is None else scales),
        initializer("bias", [1, 2, 3]), initializer("g", [0] * 48, np.int32),
    ]  # fmt: skip
    third = [""] if zero_points is None else ["z"]
    if zero_points is not None:
        tensors.append(numpy_helper.from_array(zero_points, "z"))
    given = {"K": 40, "N": 3, "block_size": 16, "bits": 4} | attributes
    node = make("MatMulNBits", ["x", "packed", "s", *third, *extra], ["y"],
                domain="com.microsoft", **given)  # fmt: skip
    return model([node], tensors, inputs={"x": (2, 40)}, outputs=("y",),
                 imports=[helper.make_opsetid("com.microsoft", 1)])  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        by_another(),
        by_another(extra=["", "bias"]),
        by_another(zero_points=np.array([0x21, 3, 0x54, 6, 0x87, 9], np.uint8)),
        by_another(scales=[-0.5, 0.25, 3] * 3),
    ],
    ids=["flat-scales", "bias", "flat-zero-points", "negative-scales"],
)
def test_models_of_other_tools_are_dequantized(made: ModelProto, tmp_path: Path) -> None:
    source = save(made, tmp_path / "m.onnx")
    qtool.dequantize_file(source, tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    assert "MatMulNBits" not in {node.op_type for node in back.graph.node}
    assert "packed_1" in {t.name for t in back.graph.initializer}
    x = {"x": normal(2, 40)}
    np.testing.assert_allclose(run(back, x)[0], run(source, x)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "made",
    [
        by_another(zero_points=np.full((3, 3), 7.5, np.float32)),
        by_another(extra=["g"]),
        by_another(weight_prepacked=1),
        by_another(bits=3),
    ],
    ids=["float-zero-points", "group-index", "prepacked", "3-bits"],
)
def test_what_qtool_does_not_read_is_not_guessed(made: ModelProto, tmp_path: Path) -> None:
    source = save(made, tmp_path / "m.onnx")
    message = refused("dequantize", source, "-o", tmp_path / "back.onnx")
    assert "has no node that qtool knows to dequantize" in message


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (by_another(K=64), "tensor 'packed': holds 72 elements, its MatMulNBits needs 96"),
        (by_another(scales=[1, 2]), "tensor 's': holds 2 elements, its MatMulNBits needs 9"),
        (by_another(zero_points=np.zeros(5, np.uint8)),
         "tensor 'z': holds 5 elements, its MatMulNBits needs 6"),
    ],
    ids=["codes", "scales", "zero-points"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(made: ModelProto, message: str, tmp_path: Path) -> None:
    source = save(made, tmp_path / "m.onnx")
    assert message in refused("dequantize", source, "-o", tmp_path / "back.onnx")


def test_it_is_not_quantized_again_unasked(tmp_path: Path) -> None:
    job(network(), tmp_path, **OPTIONS)
    message = refused("quantize", tmp_path / "out.onnx", "--dtype", "int4", "-o",
                      tmp_path / "again.onnx")  # fmt: skip
    assert "is quantized already (GatherBlockQuantized of e_Q4)" in message


def test_more_can_be_quantized_later(tmp_path: Path) -> None:
    job(network(), tmp_path, **OPTIONS | {"include": ["w"]})
    qtool.quantize_file(tmp_path / "out.onnx", tmp_path / "all.onnx", requantize=True, **OPTIONS)
    result = check(tmp_path / "all.onnx")
    assert [node.op_type for node in result.graph.node] == [
        "GatherBlockQuantized", "MatMulNBits", "MatMulNBits", "Add",
    ]  # fmt: skip
    assert run(result, {"i": np.array([3, 0, 8])})[0].shape == (3, 5)


def test_inspect_names_what_it_holds(tmp_path: Path) -> None:
    job(network(np.float16), tmp_path, **OPTIONS | {"dtype": "int8"})
    found = ok("inspect", tmp_path / "out.onnx", "--json").json
    assert found["quantized_by"] == ["GatherBlockQuantized", "MatMulNBits"]
    assert found["opset_import"] == {"ai.onnx": 17, "com.microsoft": 1}
    uses = {use["tensor"]: use for use in found["quantized_operators"]}
    assert {name: (use["operator"], use["dtype"]) for name, use in uses.items()} == {
        "e_Q8": ("GatherBlockQuantized", "uint8"),
        "w_Q8": ("MatMulNBits", "uint8"),
        "v_Q8": ("MatMulNBits", "uint8"),
    }
    rows = {row["name"]: row["quantization"] for row in found["tensors"]}
    how = [rows["w_Q8"][key] for key in ("granularity", "axis", "block_size", "scale_dtype")]
    assert how == ["blocked", 0, 16, "float16"]
    assert rows["w_Q8"]["problems"] == rows["e_Q8"]["problems"] == []
    assert "2 MatMulNBits: uint8 /16" in ok("inspect", tmp_path / "out.onnx").out.decode()


# ------------------------------------------- the command line

REFUSED = [
    ("--dtype int4", "--layout: MatMulNBits has blocks; give their size, for example"),
    ("--dtype int4 --block-size 8", "--block-size: 8 is no block size of MatMulNBits; use a power"),
    ("--dtype int4 --block-size 48", "--block-size: 48 is no block size of MatMulNBits"),
    ("--dtype int2 --block-size 512", "--block-size: onnxruntime takes no 512 codes of 2 bits"),
    (
        "--dtype int16 --block-size 32",
        "--layout: MatMulNBits holds no int16 codes; use int2, u",
    ),
    ("--dtype float8e4m3fn --block-size 32", "--layout: MatMulNBits holds no float8e4m3fn codes"),
    ("--dtype int4 --block-size 32 --axis 0", "--axis: MatMulNBits has blocks along the axis"),
    ("--dtype int4 --block-size 32 --scale-dtype float16", "--scale-dtype: MatMulNBits has scales"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[o for o, _ in REFUSED])
def test_what_the_operators_do_not_take_is_refused_in_one_line(
    options: str, message: str, tmp_path: Path
) -> None:
    source = save(network(), tmp_path / "m.onnx")
    command = ["quantize", source, *options.split(), "--layout", "matmul-nbits"]
    assert message in refused(*command, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("layout", ["qdq", "matmul-nbits"])
def test_the_layouts_of_models_are_for_models(layout: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=normal(64, 64))
    message = refused("quantize", tmp_path / "w.npz", "--dtype", "int4", "--layout", layout,
                      "--block-size", "32", code=2)  # fmt: skip
    assert message.startswith("--layout: ")
    assert "for ONNX models" in message


def test_other_layouts_are_not_for_models(tmp_path: Path) -> None:
    source = save(network(), tmp_path / "m.onnx")
    message = refused("quantize", source, "--dtype", "int4", "--layout", "mlx", code=2)
    assert message == "--layout: mlx cannot be written to ONNX; use qdq or matmul-nbits"


def test_the_command_writes_what_the_library_writes(tmp_path: Path) -> None:
    source = save(network(), tmp_path / "model.onnx")
    ok("quantize", source, "-o", tmp_path / "a.onnx", "--dtype", "uint4", "--block-size", "16",
       "--layout", "matmul-nbits")  # fmt: skip
    job(network(), tmp_path, **OPTIONS | {"dtype": "uint4"})
    assert check(tmp_path / "a.onnx").graph.node == check(tmp_path / "out.onnx").graph.node

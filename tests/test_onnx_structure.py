"""Whole commands on ONNX models whose weights are shared, named, nested or stored in odd ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx_jobs import check_runs, job, network, normal, reseed
from onnx_models import check, constant, initializer, model

import qtool
from qtool.formats.onnx import writer as onnx_writer

make = helper.make_node


@pytest.fixture(autouse=True)
def _seed() -> None:
    reseed()


# ------------------------------------------- how weights are used and named


def test_a_weight_with_several_readers_is_quantized_once(tmp_path: Path) -> None:
    nodes = [
        make("Cast", ["x"], ["i"], to=7),
        make("Gather", ["w", "i"], ["e"]),
        make("Transpose", ["w"], ["t"], perm=[1, 0]),
        make("MatMul", ["e", "t"], ["y"]),
        make("Identity", ["w"], ["v"]),
    ]
    made = model(nodes, [initializer("w", normal(12, 8))], inputs={"x": (2,)}, outputs=["y", "v"])
    result, report = job(made, tmp_path, dtype="int4", block_size=4)
    assert [(t["axis"], t["num_scales"]) for t in report["tensors"]] == [(1, 24)]
    check_runs(made, result, {"x": np.array([7, 0], np.float32)})


def test_a_weight_that_is_an_output_stays_one(tmp_path: Path) -> None:
    made = model(
        [make("MatMul", ["x", "w"], ["y"])],
        [initializer("w", normal(8, 4))],
        inputs={"x": (2, 8)},
        outputs=["y", "w"],
    )
    result, _ = job(made, tmp_path, dtype="int8")
    check_runs(made, result, {"x": normal(2, 8)})


def test_names_that_are_taken_are_avoided(tmp_path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [make("Mul", ["w_scale", factor], ["w_zero_point"], name="w_DequantizeLinear_1")],
            name,
            [],
            [helper.make_tensor_value_info("w_zero_point", TensorProto.FLOAT, None)],
            [initializer(factor, 2)],
        )
        for name, factor in (("then", "w_quantized_1"), ("else", "w_quantized_2"))
    }
    nodes = [
        make("MatMul", ["x", "w"], ["w_scale"], name="w_DequantizeLinear"),
        make("Greater", ["limit", "w_quantized"], ["c"]),
        make("If", ["c"], ["y"], **branches),
    ]
    made = model(
        nodes,
        [initializer("w", normal(8, 4)), initializer("limit", 1.0)],
        inputs={"x": (2, 8), "w_quantized": ()},
    )
    result, _ = job(made, tmp_path, dtype="uint8")
    names = {name for node in result.graph.node[:1] for name in (*node.input, node.name)}
    assert names == {"w_quantized_3", "w_scale_1", "w_zero_point_1", "w_DequantizeLinear_2"}
    check_runs(made, result, {"x": normal(2, 8), "w_quantized": np.array(0.5, np.float32)})


def test_constant_nodes_are_quantized_where_they_stand(tmp_path: Path) -> None:
    nodes = [
        constant("w", normal(8, 8)),
        make("MatMul", ["x", "w"], ["h"]),
        constant("v", normal(8, 4)),
        constant("b", normal(4)),
        make("Gemm", ["h", "v", "b"], ["y"]),
    ]
    made = model(nodes, inputs={"x": (2, 8)})
    result, _ = job(made, tmp_path, dtype="int8")
    assert [n.op_type for n in result.graph.node] == [
        "DequantizeLinear",
        "MatMul",
        "DequantizeLinear",
        "Constant",
        "Gemm",
    ]
    check_runs(made, result, {"x": normal(2, 8)})


def test_before_ir_version_4_weights_are_inputs_by_form_alone(tmp_path: Path) -> None:
    made = network(8)
    made.ir_version = 3
    for tensor in made.graph.initializer:
        made.graph.input.append(
            helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.dims))
        )
    result, report = job(made, tmp_path, dtype="int8")
    assert [t["name"] for t in report["tensors"]] == ["k", "w"]
    assert result.ir_version == 7
    assert [value.name for value in result.graph.input] == ["x"]
    check_runs(made, result, {"x": normal(2, 6, 6, 6)})


def test_a_weight_that_callers_could_set_is_fixed_and_named(tmp_path: Path) -> None:
    made = model(
        [make("MatMul", ["x", "w"], ["h"]), make("MatMul", ["h", "v"], ["y"])],
        [initializer("w", normal(8, 8)), initializer("v", normal(8, 8))],
        inputs={"x": (2, 8), "w": (8, 8)},
    )
    result, report = job(made, tmp_path, dtype="int8")
    assert report["warnings"] == [
        "weights that callers of the model could set are fixed now; --exclude keeps them: w"
    ]
    assert [value.name for value in result.graph.input] == ["x"]
    check_runs(made, result, {"x": normal(2, 8)})
    result, report = job(made, tmp_path, dtype="int8", exclude=["w"], force=True)
    assert report["warnings"] == []
    check_runs(made, result, {"x": normal(2, 8), "w": normal(8, 8)})


# ------------------------------------------- nested graphs, functions, other domains


def branch(name: str, nodes: list[NodeProto], output: str, *stored: TensorProto) -> onnx.GraphProto:
    """A graph without inputs."""
    value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [value], stored)


@pytest.mark.parametrize("limit", [-100, 100], ids=["then", "else"])
def test_nested_graphs_read_a_quantized_weight(limit: float, tmp_path: Path) -> None:
    inner = make(
        "If",
        ["c"],
        ["d"],
        then_branch=branch("deep", [make("MatMul", ["x", "w"], ["e"])], "e"),
        else_branch=branch("deeper", [make("Add", ["x", "x"], ["f"])], "f"),
    )
    then = branch(
        "then", [inner, make("MatMul", ["d", "own"], ["t"])], "t", initializer("own", normal(8, 8))
    )
    other = branch(
        "else",
        [
            constant("k", normal(8, 8)),
            make("MatMul", ["w", "k"], ["m"]),
            make("ReduceMean", ["m"], ["o"], axes=[0]),
        ],
        "o",
    )
    nodes = [
        make("ReduceMax", ["x"], ["s"], keepdims=0),
        make("Greater", ["s", "l"], ["c"]),
        make("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    made = model(
        nodes,
        [initializer("w", normal(8, 8)), initializer("l", limit)],
        inputs={"x": (2, 8)},
        opset=13,
        ir_version=7,
    )
    result, report = job(made, tmp_path, dtype="int4", block_size=8)
    assert [t["name"] for t in report["tensors"]] == ["w", "k", "own"]
    check_runs(made, result, {"x": normal(2, 8)})


def test_a_loop_reads_a_quantized_weight(tmp_path: Path) -> None:
    body = helper.make_graph(
        [make("Identity", ["go"], ["on"]), make("MatMul", ["state", "w"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, 8]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [2, 8]),
        ],
    )
    nodes = [make("Loop", ["times", "", "x"], ["y"], body=body)]
    made = model(
        nodes,
        [initializer("times", 3, np.int64), initializer("w", normal(8, 8))],
        inputs={"x": (2, 8)},
        opset=13,
        ir_version=7,
    )
    result, report = job(made, tmp_path, dtype="int8")
    assert [t["axis"] for t in report["tensors"]] == [1]
    check_runs(made, result, {"x": normal(2, 8)})


def test_functions_take_a_quantized_weight(tmp_path: Path) -> None:
    body = [
        make("Constant", [], ["half"], value=initializer("", np.full((4, 4), 0.5))),
        make("MatMul", ["a", "b"], ["m"]),
        make("Softmax", ["m"], ["s"], axis=0),
        make("MatMul", ["s", "half"], ["out"]),
    ]
    function = helper.make_function(
        "local", "Layer", ["a", "b"], ["out"], body, [helper.make_opsetid("", 11)]
    )
    made = model(
        [make("Layer", ["x", "w"], ["y"], domain="local")],
        [initializer("w", normal(8, 4))],
        inputs={"x": (2, 8)},
        opset=11,
        ir_version=8,
        imports=[helper.make_opsetid("local", 1)],
        functions=[function],
    )
    result, report = job(made, tmp_path, dtype="int4", block_size=8)
    assert [t["name"] for t in report["tensors"]] == ["w", "half"]
    assert result.functions[0].opset_import[0].version == 21
    check_runs(made, result, {"x": normal(2, 8)})


def test_operators_of_other_domains_read_quantized_weights(tmp_path: Path) -> None:
    nodes = [
        make("FusedMatMul", ["x", "w"], ["h"], domain="com.microsoft", transB=1, alpha=2.0),
        make("ReduceSum", ["h"], ["c"], axes=[1]),
        make("Gelu", ["c"], ["y"], domain="com.microsoft"),
    ]
    made = model(
        nodes,
        [initializer("w", normal(4, 8))],
        inputs={"x": (2, 8)},
        opset=7,
        ir_version=4,
        imports=[helper.make_opsetid("com.microsoft", 1)],
    )
    result, report = job(made, tmp_path, dtype="int4", block_size=8)
    assert [t["axis"] for t in report["tensors"]] == [1]
    assert {o.domain: o.version for o in result.opset_import} == {"": 21, "com.microsoft": 1}
    check_runs(made, result, {"x": normal(2, 8)})


def test_nodes_of_unknown_domains_stay_as_they_are(tmp_path: Path) -> None:
    node = make(
        "Softmax",
        ["x", "w"],
        ["y"],
        domain="own.domain",
        axis=1,
        text="kept",
        table=initializer("inside", normal(4, 4)),
    )
    made = model(
        [node],
        [initializer("w", normal(4, 8))],
        inputs={"x": (2, 8)},
        opset=9,
        ir_version=4,
        imports=[helper.make_opsetid("own.domain", 3)],
    )
    result, report = job(made, tmp_path, dtype="int4")
    assert [t["name"] for t in report["tensors"]] == ["w"]
    assert result.graph.node[1] == node
    assert {o.domain: o.version for o in result.opset_import} == {"": 21, "own.domain": 3}


# ------------------------------------------- external data


def stored_outside(made: ModelProto, folder: Path) -> Path:
    """The model, with every tensor in weights.bin."""
    path, copy = folder / "model.onnx", ModelProto()
    copy.CopyFrom(made)
    onnx.save_model(
        copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    return path


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_external_data_gives_the_same_model_as_data_inside(tmp_path: Path) -> None:
    made = network(13)
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    result, _ = job(made, inside, dtype="int4", block_size=8)
    source = stored_outside(made, outside)
    before = listing(outside)
    qtool.quantize_file(source, outside / "out.onnx", dtype="int4", block_size=8)
    assert check(outside / "out.onnx") == result
    assert {name: listing(outside)[name] for name in before} == before


def test_the_same_command_twice_leaves_one_data_file(tmp_path: Path) -> None:
    made = model(
        [make("MatMul", ["x", "w"], ["h"]), make("Add", ["h", "b"], ["y"])],
        [initializer("w", normal(64, 64)), initializer("b", normal(64))],
        inputs={"x": (2, 64)},
    )
    source = stored_outside(made, tmp_path)
    out = tmp_path / "out.onnx"
    report = qtool.quantize_file(source, out, dtype="int8", external_data=True)
    first = listing(tmp_path)
    (data,) = first.keys() - {"model.onnx", "weights.bin", "out.onnx", "out.report.json"}
    assert report["output"]["external_data"] == data
    assert report["output"]["bytes"] == len(first[data]) + len(first["out.onnx"])
    check(out)
    check_runs(made, out, {"x": normal(2, 64)})
    qtool.quantize_file(source, out, dtype="int8", external_data=True, force=True)
    del first["out.report.json"]  # it holds the time
    assert {k: v for k, v in listing(tmp_path).items() if k != "out.report.json"} == first
    qtool.quantize_file(source, out, dtype="int4", external_data=True, force=True)
    (other,) = listing(tmp_path).keys() - {*first.keys() - {data}, "out.report.json"}
    assert other != data
    qtool.quantize_file(source, out, dtype="int4", force=True)
    assert listing(tmp_path).keys() == {"model.onnx", "weights.bin", "out.onnx", "out.report.json"}


def test_a_large_model_gets_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_writer, "INLINE_LIMIT", 4000)
    made = model(
        [make("MatMul", ["x", "w"], ["y"])],
        [initializer("w", normal(64, 64))],
        inputs={"x": (2, 64)},
    )
    result, report = job(made, tmp_path, dtype="int8")
    assert report["output"]["external_data"] is not None
    codes, scale = result.graph.initializer
    assert (codes.data_location, scale.data_location) == (TensorProto.EXTERNAL, TensorProto.DEFAULT)
    check_runs(made, tmp_path / "out.onnx", {"x": normal(2, 64)})
    small, report = job(made, tmp_path, dtype="int4", force=True)
    assert report["output"]["external_data"] is None
    assert listing(tmp_path).keys() == {"model.onnx", "out.onnx", "out.report.json"}
    check_runs(made, small, {"x": normal(2, 64)})

"""Raising the opset in nested graphs, functions and training: each knows only its own tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_models import model, run
from onnx_raised import raised

from qtool.errors import FormatError
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset

X = np.random.default_rng(5).normal(size=(2, 4, 6, 8)).astype(np.float32)


def test_nested_graphs_are_converted_too() -> None:
    def branch(name: str, axis: int) -> onnx.GraphProto:
        nodes = [helper.make_node("ReduceSum", ["x"], [name], axes=[axis], keepdims=0)]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None])]
        )

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("t", 0), else_branch=branch("e", 1)
    )
    made = model([node], inputs={"x": (2, 3)}, opset=11, ir_version=6)
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for condition, expected in ((True, [3, 5, 7]), (False, [3, 12])):
        feeds = {"x": x, "c": np.array(condition)}
        assert run(raised(made, 21), feeds)[0].tolist() == expected


def test_functions_are_converted_too() -> None:
    body = [helper.make_node("ReduceMean", ["a"], ["b"], axes=[1], keepdims=0)]
    function = helper.make_function(
        "local", "MeanOfRows", ["a"], ["b"], body, [helper.make_opsetid("", 17)]
    )
    node = helper.make_node("MeanOfRows", ["x"], ["y"], domain="local")
    made = model(
        [node],
        inputs={"x": (2, 3)},
        opset=17,
        functions=[function],
        imports=[helper.make_opsetid("local", 1)],
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    converted = raised(made, 21)
    assert converted.functions[0].opset_import[0].version == 21
    assert run(converted, {"x": x})[0].tolist() == [1, 4]


SOFTMAX = [helper.make_node("Softmax", ["x"], ["z"], axis=1)]


@pytest.mark.parametrize("names", [("x", "z"), ("a", "b")], ids=["same-names", "other-names"])
def test_a_function_does_not_take_the_ranks_of_the_graph(names: tuple[str, str]) -> None:
    function = helper.make_function(
        "local", "Soft", ["x"], ["z"], SOFTMAX, [helper.make_opsetid("", 11)]
    )
    nodes = [
        helper.make_node("Identity", ["rows"], [names[0]]),
        helper.make_node("Soft", [names[0]], [names[1]], domain="local"),
        helper.make_node("Soft", ["cube"], ["y"], domain="local"),
    ]
    made = model(
        nodes,
        inputs={"rows": (2, 3), "cube": (2, 3, 4)},
        outputs=("y", names[1]),
        opset=11,
        ir_version=8,
        functions=[function],
        imports=[helper.make_opsetid("local", 1)],
    )
    made.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None, None])
    )
    feeds = {"rows": X[0, 0, :2, :3], "cube": X[0, :2, :3, :4]}
    for old, new in zip(run(made, feeds), run(raised(made, 21), feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-6)


def test_a_clip_in_a_function_is_refused_as_its_type_is_that_of_each_call() -> None:
    clip = helper.make_node("Clip", ["x"], ["z"], name="clip", min=0.1)
    function = helper.make_function(
        "local", "Bound", ["x"], ["z"], [clip], [helper.make_opsetid("", 10)]
    )
    made = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        inputs={"x": (2, 3)},
        opset=10,
        dtype=TensorProto.DOUBLE,
        functions=[function],
    )
    reason = r"'Clip' \(node 'clip', opset 10\).*type of its input 'x' is not known"
    with pytest.raises(FormatError, match=reason):
        raise_opset(made, 21, Names.of(made), "model.onnx")


def test_a_branch_does_not_take_the_ranks_of_the_other() -> None:
    def branch(name: str, made: onnx.NodeProto) -> onnx.GraphProto:
        nodes = [made, helper.make_node("Softmax", ["t"], [name], axis=1)]
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [info])

    unknown = helper.make_node("QuickGelu", ["cube"], ["t"], domain="com.microsoft")
    node = helper.make_node(
        "If",
        ["c"],
        ["y"],
        then_branch=branch("p", helper.make_node("Identity", ["rows"], ["t"])),
        else_branch=branch("q", unknown),
    )
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, [2, 3]),
            helper.make_tensor_value_info("cube", TensorProto.FLOAT, [2, 3, 4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=8)
    new = ModelProto()
    new.CopyFrom(made)
    raise_opset(new, 21, Names.of(new), "model.onnx")
    branches = {a.name: [n.op_type for n in a.g.node] for a in new.graph.node[0].attribute}
    assert branches == {
        "then_branch": ["Identity", "Softmax"],  # of rank 2, as the graph around it says
        "else_branch": ["QuickGelu", "Shape", "Flatten", "Softmax", "Reshape"],
    }
    for condition in (False, True):
        feeds = {"c": np.array(condition), "rows": X[0, 0, :2, :3], "cube": X[0, :2, :3, :4]}
        np.testing.assert_allclose(run(new, feeds)[0], run(made, feeds)[0], rtol=2e-6)


@pytest.mark.parametrize(("source", "count"), [("deep", 4), ("x", 1)], ids=["own", "models"])
def test_a_training_graph_sees_its_own_tensors_before_those_of_the_model(
    source: str, count: int
) -> None:
    made = model([helper.make_node("Identity", ["x"], ["t"])], inputs={"x": (2, 3)}, opset=11)
    algorithm = made.training_info.add().algorithm
    algorithm.input.append(helper.make_tensor_value_info("deep", TensorProto.FLOAT, [2, 3, 4]))
    if source == "deep":
        algorithm.node.append(helper.make_node("Identity", ["deep"], ["t"]))
    algorithm.node.append(helper.make_node("Softmax", ["t"], ["s"], axis=1))
    made.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [2, 3]))
    raise_opset(made, 21, Names.of(made), "model.onnx")
    nodes = [node.op_type for node in made.training_info[0].algorithm.node]
    assert len(nodes) - nodes.count("Identity") == count


REFERENCES = [
    pytest.param("Softmax", 11, "axis", 2, id="softmax"),
    pytest.param("Clip", 10, "min", 1, id="clip"),
    pytest.param("ReduceSum", 12, "axes", 7, id="reduce-sum"),
    pytest.param("ReduceMean", 17, "axes", 7, id="reduce-mean"),
    pytest.param("Squeeze", 11, "axes", 7, id="squeeze"),
    pytest.param("GridSample", 16, "mode", 3, id="grid-sample"),
    pytest.param("Resize", 11, "coordinate_transformation_mode", 3, id="resize"),
    pytest.param("DFT", 17, "axis", 2, id="dft"),
    pytest.param("Cast", 5, "to", 3, id="cast"),
]


def calling(operator: str, opset: int, name: str, kind: int, inputs: int = 3) -> ModelProto:
    """A model with a function whose caller sets an attribute of the operator."""
    node = helper.make_node(operator, ["x"] * inputs, ["z"], name="inner")
    node.attribute.add(name=name, type=kind, ref_attr_name="given")
    imports = [helper.make_opsetid("", opset)]
    function = helper.make_function("local", "F", ["x"], ["z"], [node], imports, ["given"])
    call = helper.make_node("F", ["x"], ["y"], domain="local", given=0.5)
    return model(
        [call],
        inputs={"x": (2, 3)},
        opset=opset,
        ir_version=8,
        functions=[function],
        imports=[helper.make_opsetid("local", 1)],
    )


@pytest.mark.parametrize(("operator", "opset", "name", "kind"), REFERENCES)
def test_an_attribute_that_the_callers_of_a_function_set_is_refused_where_it_would_change(
    operator: str, opset: int, name: str, kind: int
) -> None:
    inputs = 3 if operator == "Resize" else 2 if operator == "GridSample" else 1
    made = calling(operator, opset, name, kind, inputs)
    reason = f"each call of the function around it sets its attribute {name}"
    with pytest.raises(FormatError, match=rf"'{operator}' \(node 'inner', .*{reason}"):
        raise_opset(made, 21, Names.of(made), "model.onnx")


def test_an_attribute_that_the_callers_of_a_function_set_stays_where_nothing_changed() -> None:
    made = calling("LeakyRelu", 13, "alpha", 1, 1)
    x = {"x": np.array([[-2, 2, 4], [-4, 0, 1]], np.float32)}
    assert run(raised(made, 21), x)[0].tolist() == [[-1, 2, 4], [-2, 0, 1]]

"""Raising the opset of a model: its outputs stay, and so does all that need not change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, defs, helper
from onnx_models import Array, constant, initializer, model, run

from qtool.errors import FormatError
from qtool.formats.onnx_adapters import ADAPTERS
from qtool.formats.onnx_graph import Names
from qtool.formats.onnx_opset import ir_version, raise_opset

X = np.random.default_rng(5).normal(size=(2, 4, 6, 8)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A node of an old opset. inputs: initializers after x."""

    operator: str
    opset: int
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Array, ...] = ()
    x: Array = field(default_factory=lambda: X)
    outputs: int = 1

    def __str__(self) -> str:
        text = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.operator}-{self.opset}({text})"

    @property
    def model(self) -> ModelProto:
        names = [f"i{index}" for index in range(len(self.inputs))]
        outputs = [f"y{index}" for index in range(self.outputs)]
        node = helper.make_node(self.operator, ["x", *names], outputs, **self.attributes)
        values = [initializer(n, v, v.dtype) for n, v in zip(names, self.inputs, strict=True)]
        dtype = helper.np_dtype_to_tensor_dtype(self.x.dtype)
        return model(
            [node],
            values,
            inputs={"x": self.x.shape},
            outputs=outputs,
            opset=self.opset,
            ir_version=4,
            dtype=dtype,
        )


def raised(made: ModelProto, opset: int) -> ModelProto:
    """A copy at that opset, checked in full."""
    copy = ModelProto()
    copy.CopyFrom(made)
    raise_opset(copy, opset, Names(copy), "model.onnx")
    copy.ir_version = max(copy.ir_version, ir_version(opset))
    onnx.checker.check_model(copy, full_check=True)
    return copy


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


ROWS = np.array([0, 3, 1, 2], np.int64).reshape(1, 4, 1, 1)
UPDATES = np.array([9, 8, 7, 6], np.float32).reshape(1, 4, 1, 1)
ROIS = np.array([[0, 0, 5, 4], [1, 1, 6, 5]], np.float32)
GRID = np.random.default_rng(6).uniform(-1.2, 1.2, (2, 3, 3, 2)).astype(np.float32)
CHANNEL = np.array([1, 2, 3, 4], np.float32)

# onnxruntime runs both sides: the old operator as it is, and what it was converted to.
CASES = [
    *[
        Case(name, 11, {"axis": axis})
        for name in ("Softmax", "LogSoftmax", "Hardmax")
        for axis in (0, 1, 2, 3, -1, -2)
    ],
    Case("Softmax", 9),
    Case("Softmax", 12),
    Case("ReduceSum", 11, {"axes": [1, -1]}),
    Case("ReduceSum", 11),
    Case("ReduceSum", 12, {"axes": [0], "keepdims": 0}),
    *[
        Case(f"Reduce{name}", 13, {"axes": [1, 3], "keepdims": 0})
        for name in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    ],
    Case("ReduceLogSum", 13, {"axes": [2]}, x=np.abs(X)),
    Case("ReduceMean", 11),
    Case("ReduceMean", 17, {"axes": [-2]}),
    Case("Squeeze", 11, {"axes": [0, 2]}, x=X[:1, :, :1]),
    Case("Squeeze", 11, x=X[:1, :, :1]),
    Case("Unsqueeze", 11, {"axes": [0, 3]}),
    Case("Unsqueeze", 12, {"axes": [-1]}),
    Case("Split", 11, {"axis": 3, "split": [2, 5, 1]}, outputs=3),
    Case("Split", 11, {"axis": 1}, outputs=2),
    Case("Split", 13, {"axis": 2}, outputs=3),
    Case("Split", 13, {"axis": 3}, (ints(2, 6),), outputs=2),
    Case("Clip", 6, {"min": -0.5, "max": 0.25}),
    Case("Clip", 10, {"max": 0.5}),
    Case("Clip", 7),
    Case("Pad", 10, {"pads": [0, 0, 1, 2, 0, 1, 0, 1], "value": 1.5}),
    Case("Pad", 7, {"pads": [0, 0, 1, 1, 0, 0, 2, 2], "mode": "reflect"}),
    Case("Pad", 12, {}, (ints(0, 0, 1, 1, 0, 0, 0, 2),)),
    Case("Slice", 9, {"starts": [1, -3], "ends": [4, 9], "axes": [1, 3]}),
    Case("Slice", 9, {"starts": [0, 2], "ends": [1, 3]}),
    Case("TopK", 9, {"k": 3, "axis": 2}, outputs=2),
    Case("Dropout", 10, {"ratio": 0.3}),
    Case("Dropout", 7),
    Case("Upsample", 9, {"mode": "nearest"}, (np.array([1, 1, 2, 3], np.float32),)),
    Case("Upsample", 7, {"mode": "linear", "scales": [1.0, 1.0, 2.0, 2.0]}),
    Case("Resize", 10, {"mode": "nearest"}, (np.array([1, 1, 0.5, 1.6], np.float32),)),
    Case("Resize", 10, {"mode": "linear"}, (np.array([1, 1, 2.5, 1.5], np.float32),)),
    Case(
        "Resize",
        11,
        {"coordinate_transformation_mode": "align_corners", "mode": "cubic"},
        (np.zeros(0, np.float32), np.array([1, 1, 2, 1.5], np.float32)),
    ),
    Case("BatchNormalization", 8, {"spatial": 1}, (CHANNEL, CHANNEL, -CHANNEL, CHANNEL)),
    Case("BatchNormalization", 13, {"epsilon": 0.5}, (CHANNEL, CHANNEL, CHANNEL, CHANNEL)),
    Case("Scatter", 10, {"axis": 1}, (ROWS, UPDATES)),
    Case("RoiAlign", 10, {"output_height": 3, "output_width": 2}, (ROIS, ints(0, 1))),
    Case("GridSample", 16, {}, (GRID,)),
    Case("GridSample", 16, {"mode": "bicubic"}, (GRID,)),
    Case("GridSample", 16, {"mode": "nearest", "padding_mode": "border"}, (GRID,)),
    Case("DFT", 17, {}, x=X[..., None]),
    Case("DFT", 17, {"axis": 2, "onesided": 1}, x=X[..., None]),
    Case("AveragePool", 10, {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}),
    Case("MaxPool", 8, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("DepthToSpace", 10, {"blocksize": 2}),
    Case("Flatten", 9, {"axis": 2}),
    Case("ArgMax", 11, {"axis": 1}),
    Case("Cast", 9, {"to": 6}),
    Case("LRN", 12, {"size": 3}),
    Case("Gather", 10, {"axis": 2}, (ints(0, 5, 1),)),
    Case("Concat", 10, {"axis": 1}, (X,)),
    Case("Pow", 11, {}, (np.float32(2),)),
]


@pytest.mark.parametrize("opset", [13, 19, 21])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_converted_operator_computes_what_the_old_one_did(case: Case, opset: int) -> None:
    converted = raised(case.model, opset)
    assert converted.opset_import[0].version == max(opset, case.opset)
    for old, new in zip(run(case.model, {"x": case.x}), run(converted, {"x": case.x}), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        np.testing.assert_allclose(new, old, rtol=2e-6, atol=2e-6)


def test_every_adapter_belongs_to_a_version_of_its_operator() -> None:
    versions = {
        (s.name, s.since_version) for s in defs.get_all_schemas_with_history() if s.domain == ""
    }
    assert set(ADAPTERS) <= versions


def test_the_bounds_of_a_clip_get_the_type_of_its_input() -> None:
    node = helper.make_node("Clip", ["x"], ["y"], min=-1.5, max=2.0)
    made = model([node], inputs={"x": (3,)}, opset=10, ir_version=5, dtype=TensorProto.FLOAT16)
    values = [node.attribute[0].t for node in raised(made, 13).graph.node[:2]]
    assert {value.data_type for value in values} == {TensorProto.FLOAT16}


def test_a_softmax_over_a_tensor_of_unknown_rank_still_flattens() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"]),
    ]
    made = model(nodes, inputs={"x": (2, 2)}, opset=11, ir_version=6)
    made.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, ["n"]))
    feeds = {"x": np.ones((2, 2), np.float32), "shape": ints(1, 2, 2)}
    assert run(raised(made, 21), feeds)[0].tolist() == [[[0.25, 0.25], [0.25, 0.25]]]


def test_a_softmax_over_the_last_axis_stays_one_node() -> None:
    made = model(
        [helper.make_node("Softmax", ["x"], ["y"], axis=3)],
        inputs={"x": X.shape},
        opset=11,
        ir_version=6,
    )
    assert [node.op_type for node in raised(made, 21).graph.node] == ["Softmax"]


REFUSED = [
    pytest.param("GroupNormalization", 18, {"num_groups": 2}, "per group", id="groups"),
    pytest.param("BatchNormalization", 8, {"spatial": 0}, "spatial=0", id="spatial"),
    pytest.param(
        "Resize",
        11,
        {"coordinate_transformation_mode": "tf_half_pixel_for_nn"},
        "tf_half_pixel_for_nn",
        id="resize-mode",
    ),
    pytest.param("Scan", 8, {"num_scan_inputs": 1}, "batch axis", id="scan-8"),
    pytest.param("GridSample", 11, {}, "opset 11 has no such operator", id="too-new"),
    pytest.param("Softmax", 11, {"axis": "1"}, "malformed", id="malformed"),
    pytest.param("ATen", 17, {}, "opset 17 has no such operator", id="unknown"),
    pytest.param("Affine", 8, {}, "opset 8 has no such operator", id="experimental"),
]


@pytest.mark.parametrize(("operator", "opset", "attributes", "reason"), REFUSED)
def test_an_operator_without_an_equivalent_is_refused_by_name(
    operator: str, opset: int, attributes: dict[str, Any], reason: str
) -> None:
    node = helper.make_node(operator, list("xabcd"), ["y"], name="the node", **attributes)
    imports = [helper.make_opsetid("", opset)]
    made = helper.make_model(helper.make_graph([node], "g", [], []), opset_imports=imports)
    place = rf"opset 21 is needed, but '{operator}' \(node 'the node', opset {opset}\)"
    with pytest.raises(FormatError, match=f"^model.onnx: {place} cannot be converted: .*{reason}"):
        raise_opset(made, 21, Names(made), "model.onnx")


def test_training_outputs_of_a_batch_normalization_are_refused() -> None:
    node = helper.make_node("BatchNormalization", list("xsbmv"), ["y", "rm", "rv", "sm", "sv"])
    made = model([node], opset=9)
    with pytest.raises(FormatError, match="training outputs"):
        raise_opset(made, 21, Names(made), "model.onnx")


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


def test_nothing_but_the_opset_changes_where_no_operator_did() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mm", doc_string="kept"),
        helper.make_node("Gelu", ["h"], ["g"], domain="com.microsoft"),
        constant("c", [1, 2]),
        helper.make_node("Add", ["g", "c"], ["y"]),
    ]
    made = model(
        nodes,
        [initializer("w", [[1, 2], [3, 4]])],
        inputs={"x": (1, 2)},
        opset=17,
        imports=[helper.make_opsetid("com.microsoft", 1)],
        producer_name="somebody",
    )
    helper.set_model_props(made, {"key": "value"})
    made.graph.quantization_annotation.add(tensor_name="w")
    expected = ModelProto()
    expected.CopyFrom(made)
    expected.opset_import[0].version = 21
    assert raised(made, 21).SerializeToString(deterministic=True) == expected.SerializeToString(
        deterministic=True
    )


def test_an_opset_that_is_high_enough_stays() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], inputs={"x": (1,)}, opset=22)
    assert raised(made, 13).opset_import[0].version == 22


def test_a_model_without_standard_operators_gets_the_opset() -> None:
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    made = model([node], inputs={"x": (1, 1)}, imports=[helper.make_opsetid("com.microsoft", 1)])
    del made.opset_import[0]
    assert {o.domain: o.version for o in raised(made, 21).opset_import} == {
        "com.microsoft": 1,
        "": 21,
    }


@pytest.mark.parametrize(
    ("opset", "version"),
    [(10, 5), (13, 7), (19, 9), (21, 10), (23, 11), (24, 12), (25, 13), (28, 14)],
)
def test_the_ir_version_is_that_of_the_opsets_release(opset: int, version: int) -> None:
    assert ir_version(opset) == version

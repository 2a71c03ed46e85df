"""Raising the opset of a model: its outputs stay, and so does all that need not change."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, defs, helper
from onnx_models import Array, check, constant, initializer, model, run, save
from onnx_raised import raised

import qtool
from qtool.errors import FormatError
from qtool.formats.onnx.adapters import ADAPTERS
from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import ir_version, raise_opset

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
    Case("OneHot", 9, {"axis": 0}, (np.array(3), CHANNEL[:2]), x=ints(0, -1, 2, -3, 3, -4)),
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
    *[
        Case("Resize", 10, {"mode": "nearest"}, (np.array([1, 1, *scales], np.float32),))
        for scales in ((0.4, 0.7), (1 / 3, 1 / 7), (0.55, 1), (2.5, 1.4), (1, 1), (0.25, 2.3))
    ],
    Case("Resize", 10, {"mode": "linear"}, (np.array([1, 1, 0.4, 1.7], np.float32),)),
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
    Case("Pow", 11, {}, (np.array(2, np.float32),)),
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


def test_a_bound_beyond_the_type_is_none() -> None:
    node = helper.make_node("Clip", ["x"], ["y"], min=-3e38, max=2.0)
    made = model([node], inputs={"x": (3,)}, opset=10, ir_version=5, dtype=TensorProto.FLOAT16)
    x = np.array([-65504, 1, 65504], np.float16)
    assert run(raised(made, 13), {"x": x})[0].tolist() == [-65504, 1, 2]


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
        raise_opset(made, 21, Names.of(made), "model.onnx")


SCALES = {
    "mixed": (initializer("s", [1, 1, 0.4, 1.5]), "differs between axes that grow"),
    "computed": (helper.make_tensor_value_info("s", TensorProto.FLOAT, [4]), "are not stored"),
}


@pytest.mark.parametrize("scales", SCALES)
def test_a_resize_whose_nearest_pixels_are_not_told_by_one_rule_is_refused(scales: str) -> None:
    value, reason = SCALES[scales]
    node = helper.make_node("Resize", ["x", "s"], ["y"], name="zoom", mode="nearest")
    made = model([node], inputs={"x": X.shape}, opset=10, ir_version=5)
    (made.graph.initializer if scales == "mixed" else made.graph.input).append(value)
    with pytest.raises(FormatError, match=rf"'Resize' \(node 'zoom', opset 10\).*{reason}"):
        raise_opset(made, 13, Names.of(made), "model.onnx")


@pytest.mark.parametrize("opset", [10, 13, 21])
def test_an_upsample_by_computed_scales_is_converted(opset: int) -> None:
    node = helper.make_node("Upsample", ["x", "s"], ["y"])
    made = model([node], inputs={"x": X.shape}, opset=9, ir_version=4)
    made.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, [4]))
    feeds = {"x": X, "s": np.array([1, 1, 2.3, 1.5], np.float32)}
    new = ModelProto()
    new.CopyFrom(made)
    raise_opset(new, opset, Names.of(new), "model.onnx")
    assert run(new, feeds)[0].tobytes() == run(made, feeds)[0].tobytes()


EMPTY = [(13, (0, 3, 4), 1), (13, (2, 0, 3), 1), (14, (2, 0, 3, 4), 2), (21, (2, 3, 0), 1)]


@pytest.mark.parametrize(("opset", "shape", "axis"), EMPTY)
def test_a_softmax_of_nothing_gives_nothing_of_the_same_shape(
    opset: int, shape: tuple[int, ...], axis: int
) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    made = model([node], inputs={"x": [None] * len(shape)}, opset=11, ir_version=6)
    assert run(raised(made, opset), {"x": np.zeros(shape, np.float32)})[0].shape == shape


def test_a_squeeze_of_an_empty_list_of_axes_drops_all_of_size_1() -> None:
    node = helper.make_node("Squeeze", ["x"], ["y"])
    node.attribute.add(name="axes", type=onnx.AttributeProto.INTS)
    made = model([node], inputs={"x": (1, 2, 1, 3)}, opset=11, ir_version=6)
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]))
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 1, 3)
    for one in (made, raised(made, 21)):
        assert run(one, {"x": x})[0].tolist() == [[0, 1, 2], [3, 4, 5]]


# ------------------------------------------- masks


def dropout(opset: int, *nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> ModelProto:
    first = helper.make_node("Dropout", ["x"], ["y", "mask"])
    return model([first, *nodes], inputs={"x": (3,)}, outputs=outputs, opset=opset, ir_version=5)


@pytest.mark.parametrize("opset", [7, 10])
def test_a_mask_that_nothing_reads_is_no_obstacle(opset: int) -> None:
    made = dropout(opset)
    kind = TensorProto.FLOAT if opset == 7 else TensorProto.BOOL
    made.graph.value_info.append(helper.make_tensor_value_info("mask", kind, [3]))
    x = {"x": np.array([1, 2, 3], np.float32)}
    assert run(raised(made, 21), x)[0].tolist() == run(made, x)[0].tolist() == [1, 2, 3]


def reading_branch() -> onnx.NodeProto:
    info = [helper.make_tensor_value_info("z", TensorProto.BOOL, [3])]
    branch = helper.make_graph([helper.make_node("Not", ["mask"], ["z"])], "b", [], info)
    return helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch)


READ = {
    "output-7": (dropout(7, outputs=("y", "mask")), "its mask became boolean"),
    "output-10": (dropout(10, outputs=("y", "mask")), "its mask became true"),
    "node-10": (dropout(10, helper.make_node("Not", ["mask"], ["n"])), "its mask became true"),
    "nested-10": (dropout(10, reading_branch()), "its mask became true"),
}


@pytest.mark.parametrize("case", READ)
def test_a_mask_that_is_read_is_refused(case: str) -> None:
    made, reason = READ[case]
    with pytest.raises(FormatError, match=f"'Dropout'.*{reason}"):
        raise_opset(made, 21, Names.of(made), "model.onnx")


def test_training_outputs_of_a_batch_normalization_are_refused() -> None:
    node = helper.make_node("BatchNormalization", list("xsbmv"), ["y", "rm", "rv", "sm", "sv"])
    made = model([node], opset=9)
    with pytest.raises(FormatError, match="training outputs"):
        raise_opset(made, 21, Names.of(made), "model.onnx")


# ------------------------------------------- the model around it


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


IMPORTS = [
    ((("", 13), ("", 11)), 11, 21),
    ((("", 11), ("", 13)), 13, 21),
    ((("ai.onnx", 13), ("", 11)), 11, 13),
    ((("", 11), ("ai.onnx", 13)), 13, 13),
    ((("", 11), ("local", 1), ("ai.onnx", 22)), 22, 21),
]


@pytest.mark.parametrize(("imports", "counts", "opset"), IMPORTS)
def test_of_several_imports_the_last_counts_and_one_is_left(
    imports: tuple[tuple[str, int], ...], counts: int, opset: int
) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    made = model([node], inputs={"x": (2, 3, 4)}, opset=11, ir_version=7)
    del made.opset_import[:]
    made.opset_import.extend(helper.make_opsetid(*entry) for entry in imports)
    converted = raised(made, opset)
    standard = [o.version for o in converted.opset_import if o.domain in ("", "ai.onnx")]
    assert standard == [max(counts, opset)]
    x = {"x": np.ones((2, 3, 4), np.float32)}
    assert run(made, x)[0].max() == np.float32(1 / 12 if counts < 13 else 1 / 3)
    np.testing.assert_allclose(run(converted, x)[0], run(made, x)[0], rtol=2e-6)


def test_the_ir_version_rises_with_the_opset_and_what_is_stored_stops_being_an_input() -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    made = model(
        nodes, [initializer("w", [1, 2])], inputs={"x": (2,), "w": (2,)}, opset=8, ir_version=3
    )
    converted = raised(made, 13)
    assert (converted.ir_version, [value.name for value in converted.graph.input]) == (7, ["x"])
    again = raised(converted, 13)
    assert again == converted


def test_dequantizing_to_bfloat16_gives_the_ir_version_of_the_opset_it_takes(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["c", "s"], ["w"]),
        helper.make_node("Mul", ["x", "w"], ["y"]),
    ]
    stored = [initializer("c", [2, -4], np.int8), initializer("s", 0.5)]
    made = model(nodes, stored, inputs={"x": (2,)}, opset=10, ir_version=5)
    source, target = save(made, tmp_path / "q.onnx"), tmp_path / "b.onnx"
    qtool.dequantize_file(source, target, dtype="bfloat16")
    result = check(target)
    assert (result.opset_import[0].version, result.ir_version) == (13, 7)
    assert run(result, {"x": np.array([3, 5], np.float32)})[0].tolist() == [3, -10]


def test_from_ir_version_4_on_what_callers_may_set_stays_an_input() -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    made = model(
        nodes, [initializer("w", [1, 2])], inputs={"x": (2,), "w": (2,)}, opset=9, ir_version=4
    )
    assert [value.name for value in raised(made, 13).graph.input] == ["x", "w"]


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

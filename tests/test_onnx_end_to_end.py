"""Whole commands on small ONNX models: every type on every consumer, opsets, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx_jobs import (
    RNG,
    Array,
    attributes,
    check_runs,
    dequantized,
    job,
    network,
    normal,
    reference,
    replaced,
    reseed,
    same,
    weights,
)
from onnx_models import check, initializer, model, run, save
from oracle import INTEGERS, decode, quantize, scale_index

import qtool

make = helper.make_node


@pytest.fixture(autouse=True)
def _seed() -> None:
    reseed()


# ------------------------------------------- every type, granularity and consumer

TYPES = [
    "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float4e2m1",
    "float6e2m3", "float6e3m2", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
]  # fmt: skip
NOT_IN_ONNXRUNTIME = ("float4e2m1", "float6e2m3", "float6e3m2")

# nodes, weights by name, shape of x, axis of the output channels, axis that is summed over
CONSUMERS: dict[str, tuple[list[NodeProto], dict[str, tuple[int, ...]], tuple[int, ...], int, int]]
CONSUMERS = {
    "matmul": ([make("MatMul", ["x", "w"], ["y"])], {"w": (16, 8)}, (3, 16), 1, 0),
    "batched": ([make("MatMul", ["x", "w"], ["y"])], {"w": (2, 8, 7)}, (2, 3, 8), 2, 1),
    "gemm": ([make("Gemm", ["x", "w"], ["y"], transB=1, alpha=0.5)], {"w": (8, 16)}, (3, 16), 0, 1),
    "conv": ([make("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])], {"w": (6, 8, 2, 2)},
             (1, 8, 5, 4), 0, 1),
    "conv-transpose": ([make("ConvTranspose", ["x", "w"], ["y"])], {"w": (6, 8, 2, 2)},
                       (1, 6, 4, 4), 1, 0),
    "gather": ([make("Cast", ["x"], ["i"], to=7), make("Gather", ["w", "i"], ["y"])],
               {"w": (12, 8)}, (2, 3), 0, 1),
    "lstm": ([make("LSTM", ["x", "w", "r"], ["y"], hidden_size=4)],
             {"w": (1, 16, 8), "r": (1, 16, 4)}, (5, 2, 8), 1, 2),
}  # fmt: skip
GRANULARITIES: dict[str, dict[str, int]] = {
    "per-axis": {}, "last-axis": {"axis": -1}, "blocked": {"block_size": 8},
    "ragged-blocks-of-axis-1": {"block_size": 5, "axis": 1},
}  # fmt: skip


def consumer(name: str, opset: int = 13) -> tuple[ModelProto, dict[str, Array]]:
    """A model with one consumer of weights, and an input for it."""
    nodes, shapes, x, _, _ = CONSUMERS[name]
    stored = [initializer(weight, normal(*shape)) for weight, shape in shapes.items()]
    made = model(nodes, stored, inputs={"x": x}, opset=opset, ir_version=7)
    rows = np.arange(6, dtype=np.float32)
    return made, {"x": rows.reshape(x) if name == "gather" else normal(*x)}


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_granularity_computes_what_its_codes_stand_for(
    dtype: str, granularity: str, name: str, tmp_path: Path
) -> None:
    made, feeds = consumer(name)
    options = GRANULARITIES[granularity]
    result, report = job(made, tmp_path, dtype=dtype, **options)
    shapes, output, reduced = CONSUMERS[name][1], *CONSUMERS[name][3:]
    axis = options.get("axis", reduced if "block_size" in options else output)
    assert [(t["name"], t["axis"], t["block_size"]) for t in report["tensors"]] == [
        (weight, axis % len(shape), options.get("block_size")) for weight, shape in shapes.items()
    ]
    check_codes(made, result, dtype)
    if dtype in NOT_IN_ONNXRUNTIME:
        same(reference(result, feeds), reference(replaced(made, weights(result)), feeds))
    else:
        check_runs(made, result, feeds)


def check_codes(made: ModelProto, result: ModelProto, dtype: str) -> None:
    """Every code is the exact one for the source and the scale that is stored."""
    sources = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    nodes = [node for node in result.graph.node if node.op_type == "DequantizeLinear"]
    assert [node.output[0] for node in nodes] == [*sources]
    for node in nodes:
        x, (codes, scale) = sources[node.output[0]], (stored[name] for name in node.input[:2])
        zero = stored[node.input[2]] if len(node.input) > 2 else None
        layout = (x.shape, attributes(node)["axis"], attributes(node).get("block_size", 0))
        for index in np.ndindex(x.shape):
            group = scale_index(index, *layout, per_tensor=False)
            code = quantize(float(x[index]), float(scale[group]),
                            None if zero is None else float(zero[group]), dtype, "float32",
                            saturate=True)  # fmt: skip
            expected = float(code) if dtype in INTEGERS else decode(code, dtype)
            assert str(float(codes[index])) == str(expected)  # -0.0 counts


# ------------------------------------------- zero points, other source types, DynamicQuantizeLinear


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "int8", "symmetric": False}, id="int8"),
        pytest.param({"dtype": "int4", "symmetric": False, "block_size": 8}, id="int4"),
        pytest.param({"dtype": "uint8", "symmetric": True}, id="uint8-symmetric"),
        pytest.param({"dtype": "int8", "scale": 0.03125, "zero_point": -7}, id="given"),
    ],
)
def test_zero_points_are_written_and_read(options: dict[str, Any], tmp_path: Path) -> None:
    made, feeds = consumer("matmul")
    result, report = job(made, tmp_path, **options)
    assert [len(n.input) for n in result.graph.node] == [3, 2]
    assert report["tensors"][0]["zero_point"] is True
    check_codes(made, result, options["dtype"])
    check_runs(made, result, feeds)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_dynamic_gives_one_scale_per_tensor(dtype: str, tmp_path: Path) -> None:
    w = np.array([[-1, 0.25], [0.5, 1.5], [2, 0]], np.float32)
    made = model([make("MatMul", ["x", "w"], ["y"])], [initializer("w", w)], inputs={"x": (1, 3)})
    report = qtool.dynamic_file(save(made, tmp_path / "m.onnx"), tmp_path / "out.onnx", dtype=dtype)
    result = check(tmp_path / "out.onnx")
    assert report["tensors"][0]["granularity"] == "per_tensor"
    codes, scale, zero = (numpy_helper.to_array(t) for t in result.graph.initializer)
    steps, low = (255, 0) if dtype == "uint8" else (254, -127)
    assert scale.tobytes() == np.float32(3 / np.float32(steps)).tobytes()
    assert zero == low + round(1 / float(scale))
    assert codes.tolist() == (np.rint(w / scale) + zero).tolist()
    check_runs(made, result, {"x": normal(1, 3)})


def test_float16_weights_have_float16_scales(tmp_path: Path) -> None:
    w = normal(16, 8).astype(np.float16)
    made = model(
        [make("MatMul", ["x", "w"], ["y"])],
        [numpy_helper.from_array(w, "w")],
        inputs={"x": (2, 16)},
        dtype=TensorProto.FLOAT16,
    )
    result, _ = job(made, tmp_path, dtype="int8")
    assert [t.data_type for t in result.graph.initializer] == [
        TensorProto.INT8,
        TensorProto.FLOAT16,
    ]
    check_runs(made, result, {"x": normal(2, 16).astype(np.float16)})


def test_float64_weights_are_cast_back(tmp_path: Path) -> None:
    made = model(
        [make("MatMul", ["x", "w"], ["y"])],
        [numpy_helper.from_array(RNG.normal(size=(16, 8)), "w")],
        inputs={"x": (2, 16)},
        dtype=TensorProto.DOUBLE,
    )
    result, report = job(made, tmp_path, dtype="int8")
    assert report["tensors"][0]["rounded_to"] == "float32"
    (values,) = weights(result).values()
    x = {"x": RNG.normal(size=(2, 16))}
    same(run(result, x), run(replaced(made, {"w": values.astype(np.float64)}), x))


def test_bfloat16_weights_raise_the_opset_for_their_scales(tmp_path: Path) -> None:
    made = model(
        [make("MatMul", ["x", "w"], ["y"])],
        [numpy_helper.from_array(normal(16, 8).astype(ml_dtypes.bfloat16), "w")],
        inputs={"x": (2, 16)},
        dtype=TensorProto.BFLOAT16,
        opset=13,
        ir_version=7,
    )
    result, _ = job(made, tmp_path, dtype="int8")
    assert result.opset_import[0].version == 19
    x = {"x": normal(2, 16).astype(ml_dtypes.bfloat16)}
    same(reference(result, x), reference(replaced(made, weights(result)), x))


@pytest.mark.parametrize(
    ("options", "opset"),
    [
        pytest.param(
            {"dtype": "float4e2m1", "block_size": 32, "scale_dtype": "float8e8m0"}, 24, id="mxfp4"
        ),
        pytest.param(
            {"dtype": "float8e4m3fn", "block_size": 32, "scale_dtype": "float8e8m0"}, 24, id="mxfp8"
        ),
        pytest.param({"dtype": "int8", "scale_dtype": "float16"}, 23, id="float16"),
        pytest.param(
            {"dtype": "uint4", "block_size": 16, "scale_dtype": "bfloat16"}, 23, id="bfloat16"
        ),
    ],
)
def test_scales_of_another_type_give_float32_weights(
    options: dict[str, Any], opset: int, tmp_path: Path
) -> None:
    made, feeds = consumer("matmul")
    result, _ = job(made, tmp_path, **options)
    assert result.opset_import[0].version == opset
    node, given = result.graph.node[0], attributes(result.graph.node[0])
    assert given.pop("output_dtype") == TensorProto.FLOAT
    stored = {t.name: numpy_helper.to_array(t) for t in result.graph.initializer}
    codes, scale, *zero = (stored[name].astype(np.float32) for name in node.input)
    values = dequantized(make("DequantizeLinear", ["a"], ["b"], **given), codes, scale, *zero)
    same(reference(result, feeds), reference(replaced(made, {"w": values}), feeds))


# ------------------------------------------- opsets


@pytest.mark.parametrize("opset", range(7, 23))
@pytest.mark.parametrize(
    ("options", "needed"),
    [
        pytest.param({"dtype": "int8"}, 13, id="int8"),
        pytest.param({"dtype": "float8e4m3fn"}, 19, id="float8"),
        pytest.param({"dtype": "int4", "block_size": 3}, 21, id="int4"),
        pytest.param({"dtype": "uint2", "block_size": 4}, 25, id="uint2"),
    ],
)
def test_a_model_of_any_opset_is_raised_no_further_than_needed(
    options: dict[str, Any], needed: int, opset: int, tmp_path: Path
) -> None:
    made = network(opset)
    result, _ = job(made, tmp_path, **options)
    assert result.opset_import[0].version == max(needed, opset)
    check_runs(made, result, {"x": normal(2, 6, 6, 6)})


H = (2, 4, 6, 8)
# operator, the last opset before its meaning or its form changed, attributes, further inputs
CHANGED: list[tuple[str, int, dict[str, Any], list[Array]]] = [
    ("Softmax", 12, {}, []),
    ("Softmax", 12, {"axis": 2}, []),
    ("LogSoftmax", 12, {"axis": -3}, []),
    ("Hardmax", 12, {}, []),
    ("Clip", 10, {"min": -0.5, "max": 0.75}, []),
    ("Pad", 10, {"pads": [0, 0, 1, 0, 0, 1, 0, 2], "value": -1.0}, []),
    ("Slice", 9, {"starts": [1, -5], "ends": [3, 100], "axes": [1, 3]}, []),
    ("Upsample", 8, {"scales": [1.0, 1.0, 2.0, 2.0], "mode": "nearest"}, []),
    ("Upsample", 9, {"mode": "linear"}, [np.array([1, 1, 2, 1.5], np.float32)]),
    ("Resize", 10, {"mode": "nearest"}, [np.array([1, 1, 0.5, 1.75], np.float32)]),
    ("Dropout", 11, {"ratio": 0.7}, []),
    ("BatchNormalization", 13, {}, [np.array(v, np.float32) for v in (
        [1, 2, 3, 4], [0, 1, 0, -1], [0.1, 0, 0.2, 0], [1, 4, 9, 2])]),
    ("Squeeze", 12, {}, []),
    ("Unsqueeze", 12, {"axes": [1, -1]}, []),
    ("ReduceSum", 12, {"axes": [-1, 1], "keepdims": 0}, []),
    ("ReduceMean", 17, {"axes": [1]}, []),
    ("ReduceL2", 17, {}, []),
    ("Split", 12, {"axis": 3, "split": [3, 5]}, []),
    ("Split", 17, {"axis": -1}, []),
    ("TopK", 9, {"k": 2}, []),
    ("Scatter", 10, {"axis": 1}, [np.zeros((1, 1, 1, 2), np.int64),
                                  np.ones((1, 1, 1, 2), np.float32)]),
    ("GridSample", 19, {"mode": "bicubic"}, [normal(2, 3, 3, 2).clip(-1, 1)]),
    ("AveragePool", 18, {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]}, []),
    ("Gelu", 20, {"approximate": "tanh"}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "opset", "attributes", "inputs"), CHANGED,
    ids=[f"{name}-{opset}-{index}" for index, (name, opset, *_) in enumerate(CHANGED)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int4", "int2"])
def test_the_meaning_of_an_operator_that_changed_is_kept(
    operator: str,
    opset: int,
    attributes: dict[str, Any],
    inputs: list[Array],
    dtype: str,
    tmp_path: Path,
) -> None:
    names = [f"i{index}" for index in range(len(inputs))]
    outputs = ["y", "z"][: 2 if operator in ("Split", "TopK") else 1]
    nodes = [
        make("MatMul", ["x", "w"], ["h"]),
        make(operator, ["h", *names], outputs, **attributes),
    ]
    stored = [numpy_helper.from_array(v, n) for n, v in zip(names, inputs, strict=True)]
    shape = (1, 4, 1, 8) if operator == "Squeeze" else H
    made = model(
        nodes,
        [initializer("w", normal(8, 8)), *stored],
        inputs={"x": shape},
        outputs=outputs,
        opset=opset,
        ir_version=4,
    )
    result, _ = job(made, tmp_path, dtype=dtype, block_size=8, include=["w"])
    x = {"x": normal(*shape)}
    values = weights(result)
    assert list(values) == ["w"]
    for new, old in zip(run(result, x), run(replaced(made, values), x), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        # newer kernels add in another order; the values are around 1
        np.testing.assert_allclose(new, old, rtol=2e-6, atol=2e-6)


def test_a_model_that_cannot_be_raised_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    nodes = [
        make("MatMul", ["x", "w"], ["h"]),
        make(
            "Resize",
            ["h", "roi", "scales"],
            ["y"],
            coordinate_transformation_mode="tf_half_pixel_for_nn",
        ),
    ]
    stored = [
        initializer("w", normal(8, 8)),
        initializer("roi", []),
        initializer("scales", [1, 1, 2, 3]),
    ]
    made = model(nodes, stored, inputs={"x": H}, opset=11, ir_version=6)
    source = save(made, tmp_path / "model.onnx")
    with pytest.raises(qtool.QtoolError, match=r"opset 13 is needed.*Resize.*tf_half_pixel_for_nn"):
        qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    qtool.dynamic_file(source, tmp_path / "out.onnx", include=["w"])  # opset 10 is enough
    check_runs(made, check(tmp_path / "out.onnx"), {"x": normal(*H)})


def test_a_dropout_mask_that_is_read_is_refused(tmp_path: Path) -> None:
    """It is a float up to opset 9, and a bool from 10 on."""
    nodes = [make("MatMul", ["x", "w"], ["h"]), make("Dropout", ["h"], ["y", "mask"])]
    made = model(
        nodes,
        [initializer("w", normal(8, 8))],
        inputs={"x": (2, 8)},
        opset=9,
        ir_version=4,
        outputs=["y", "mask"],
    )
    with pytest.raises(qtool.QtoolError, match=r"Dropout.*its mask became boolean"):
        job(made, tmp_path, dtype="int8")


# ------------------------------------------- and back


@pytest.mark.parametrize("external", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("dtype", ["int4", "uint8", "float8e4m3fn"])
def test_dequantize_gives_a_float_model_of_the_same_outputs(
    dtype: str, external: bool, tmp_path: Path
) -> None:
    made = network(11)
    quantized, _ = job(made, tmp_path, dtype=dtype, external_data=external)
    qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "back.onnx", external_data=external)
    back = check(tmp_path / "back.onnx")
    assert "DequantizeLinear" not in {node.op_type for node in back.graph.node}
    assert {t.name for t in back.graph.initializer} == {t.name for t in made.graph.initializer}
    onnx.load_external_data_for_model(back, str(tmp_path))
    values = weights(quantized, tmp_path)
    for tensor in back.graph.initializer:
        if tensor.name in values:
            same([numpy_helper.to_array(tensor)], [values[tensor.name]])
    x = {"x": normal(2, 6, 6, 6)}
    same(run(tmp_path / "back.onnx", x), run(replaced(made, values), x))


def test_a_quantized_model_is_not_quantized_again_unasked(tmp_path: Path) -> None:
    job(network(13), tmp_path, dtype="int8")
    with pytest.raises(qtool.QtoolError, match=r"quantized already .*--requantize"):
        qtool.quantize_file(tmp_path / "out.onnx", tmp_path / "again.onnx", dtype="int4")
    assert not (tmp_path / "again.onnx").exists()
    assert json.loads((tmp_path / "out.report.json").read_text())["command"] == "quantize"


def test_what_is_not_quantized_yet_can_be_added(tmp_path: Path) -> None:
    made = network(13)
    first, _ = job(made, tmp_path, dtype="int8", include=["k"])
    qtool.quantize_file(
        tmp_path / "out.onnx", tmp_path / "again.onnx", dtype="int4", block_size=8, requantize=True
    )
    result = check(tmp_path / "again.onnx")
    kept = {t.name: t for t in result.graph.initializer}
    for tensor in first.graph.initializer:
        if tensor.name != "w":
            assert kept[tensor.name] == tensor
    assert [*weights(result)] == ["w", "k"]
    check_runs(made, result, {"x": normal(2, 6, 6, 6)})


# ------------------------------------------- files beside the model, and what is quantized already


def test_dequantize_counts_the_data_file(tmp_path: Path) -> None:
    made = model([make("MatMul", ["x", "w"], ["y"])], [initializer("w", normal(64, 64))],
                 inputs={"x": (1, 64)})  # fmt: skip
    job(made, tmp_path, dtype="int8")
    done = qtool.dequantize_file(tmp_path / "out.onnx", tmp_path / "b.onnx", external_data=True)
    (data,) = tmp_path.glob("b.*.data")
    nbytes = (tmp_path / "b.onnx").stat().st_size + data.stat().st_size
    assert done["output"] == {
        "name": str(tmp_path / "b.onnx"), "container": "onnx", "bytes": nbytes,
        "external_data": data.name,
    }  # fmt: skip


def test_a_link_to_a_model_elsewhere_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out.onnx").symlink_to("there/m.onnx")
    made, x = consumer("matmul")
    made.graph.initializer[0].CopyFrom(initializer("w", normal(16, 800)))
    del made.graph.output[0].type.tensor_type.shape.dim[:]
    source = save(made, tmp_path / "model.onnx")
    report = qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int8", external_data=True)
    (data,) = tmp_path.rglob("*.data")
    assert data.parent == tmp_path / "there"
    assert report["output"]["external_data"] == data.name
    assert run(tmp_path / "there" / "m.onnx", x)[0].shape == (3, 800)


def test_a_model_of_quantized_activations_is_quantized_after_it_was_dequantized(
    tmp_path: Path,
) -> None:
    stored = [
        initializer("q", RNG.integers(-128, 128, (16, 8)), np.int8), initializer("s", 0.5),
        initializer("t", 0.25), initializer("z", 3, np.uint8),
    ]  # fmt: skip
    nodes = [
        make("QuantizeLinear", ["x", "t", "z"], ["c"]),
        make("DequantizeLinear", ["c", "t", "z"], ["a"]),
        make("DequantizeLinear", ["q", "s"], ["w"]),
        make("MatMul", ["a", "w"], ["y"]),
    ]
    source = save(model(nodes, stored, inputs={"x": (3, 16)}), tmp_path / "m.onnx")
    with pytest.raises(qtool.QtoolError, match=r"is quantized already \(DequantizeLinear of q\)"):
        qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int4")
    qtool.dequantize_file(source, tmp_path / "float.onnx")
    report = qtool.quantize_file(tmp_path / "float.onnx", tmp_path / "out.onnx", dtype="int4")
    assert [tensor["name"] for tensor in report["tensors"]] == ["w"]
    (found,) = run(check(tmp_path / "out.onnx"), {"x": normal(3, 16)})
    assert found.shape == (3, 8)


def test_a_model_without_a_weight_is_refused_with_what_stands_against_them(tmp_path: Path) -> None:
    def body(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("z", TensorProto.FLOAT, [3, 8])
        nodes = [make("Add", ["x", "v"], ["z"])]
        return helper.make_graph(nodes, name, [], [out], [initializer("v", normal(8))])

    node = make("If", ["c"], ["y"], then_branch=body("yes"), else_branch=body("no"))
    made = model([node], [initializer("c", True, np.bool_)], inputs={"x": (3, 8)})
    rule = r"nothing to quantize: rank below 2 \(2\), bool is no source type \(1\)"
    with pytest.raises(qtool.QtoolError, match=rule):
        job(made, tmp_path, dtype="int8")
    copy, report = job(made, tmp_path, dtype="int8", allow_empty=True)
    (entry,) = copy.metadata_props
    assert json.loads(entry.value)["recipe"] == 'dtype = "int8"\nallow_empty = true\n'
    del copy.metadata_props[:]
    assert copy == made
    names = [entry["name"] for entry in report["skipped"]]
    assert names == ["c", "If.else_branch/v", "If.then_branch/v"]

"""`qtool dynamic --graph`: which weights it takes, what it says of the others, and its options."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_jobs
import pytest
from command import Array, initializers, ok, refused, report
from integer_oracle import codes_of, converted, operators, product, same, sparse
from jsonschema import Draft202012Validator
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx_jobs import normal
from onnx_models import constant, initializer, model, run, save
from safetensors.numpy import save_file

from qtool import engine

MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    onnx_jobs.reseed()


def written(made: ModelProto, folder: Path, *options: str) -> dict[str, Any]:
    """The report of a model of which something may be left alone."""
    ok("dynamic", save(made, folder / "m.onnx"), "--graph", "--allow-empty", *options)
    found: dict[str, Any] = report(folder / "m.dynamic.onnx")
    return found


# ---------------------------------------------------------------- left alone

NONE = "is the weight of no MatMul, Gemm or Conv"
ALONE: list[Any] = [
    ([helper.make_node("MatMul", ["w", "x"], ["y"])], (16, 16), NONE, "first-input"),
    ([helper.make_node("Add", ["x", "w"], ["y"])], (16, 16), NONE, "sum"),
    ([helper.make_node("Transpose", ["w"], ["v"]), helper.make_node("MatMul", ["x", "v"], ["y"])],
     (16, 16), NONE, "behind-transpose"),
    ([helper.make_node("ConvTranspose", ["x", "w"], ["y"])], (3, 8, 3, 3), NONE, "conv-transpose"),
    ([MATMUL, helper.make_node("Gather", ["w", "i"], ["z"])], (16, 16),
     "is read by Gather too, which needs floats", "gather"),
    ([MATMUL, helper.make_node("MatMul", ["w", "x"], ["z"])], (16, 16),
     "is read by MatMul too, which needs floats", "both-sides"),
    ([MATMUL, helper.make_node("Gemm", ["x", "w"], ["z"], transB=1)], (16, 16),
     "is read along different axes", "both-ways"),
    ([MATMUL], (16,), "rank below 2", "vector"),
    ([MATMUL], (1, 2), "would not get smaller as int8", "small"),
    ([helper.make_node("MatMul", ["x", "w"], ["y"], domain="other")], (16, 16), NONE, "domain"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "shape", "reason"), [pytest.param(*case[:3], id=case[3]) for case in ALONE]
)
def test_what_cannot_be_quantized_is_left_alone_and_says_why(
    nodes: list[NodeProto], shape: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    stored = [initializer("w", normal(*shape)), initializer("i", [0], np.int64)]
    inputs = {"x": (1, 3, 8, 8) if len(shape) == 4 else (shape[0], shape[0])}
    made = model(nodes, stored, inputs=inputs, imports=[helper.make_opsetid("other", 1)])
    found = written(made, tmp_path)
    assert found["tensors"] == []
    assert {"name": "w", "reason": reason} in found["skipped"]
    same(initializers(tmp_path / "m.dynamic.onnx")["w"],
         onnx.numpy_helper.to_array(made.graph.initializer[0]))  # fmt: skip
    assert operators(onnx.load(tmp_path / "m.dynamic.onnx")) == [node.op_type for node in nodes]


def test_a_weight_that_is_an_output_too_is_left_alone(tmp_path: Path) -> None:
    made = model([MATMUL], [initializer("w", normal(16, 16))], inputs={"x": (5, 16)})
    made.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (16, 16)))
    [skipped] = written(made, tmp_path)["skipped"]
    assert skipped == {"name": "w", "reason": "is an output too, which needs floats"}


def test_a_weight_that_callers_could_set_is_fixed_and_named(tmp_path: Path) -> None:
    w = initializer("w", normal(16, 16))
    made = model([MATMUL], [w], inputs={"x": (5, 16), "w": (16, 16)})
    found = written(made, tmp_path)
    assert [row["name"] for row in found["tensors"]] == ["w"]
    assert found["warnings"] == [
        "weights that callers of the model could set are fixed now; --exclude keeps them: w"
    ]
    result = onnx.load(tmp_path / "m.dynamic.onnx")
    assert [value.name for value in result.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        pytest.param(["--include", "*a"], ["wa"], id="include"),
        pytest.param(["--exclude", "re:a$"], ["wb"], id="exclude"),
    ],
)
def test_patterns_select(options: list[str], chosen: list[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "wa"], ["h"]),
             helper.make_node("MatMul", ["h", "wb"], ["y"])]  # fmt: skip
    stored = [initializer(name, normal(16, 16)) for name in ("wa", "wb")]
    found = written(model(nodes, stored, inputs={"x": (5, 16)}), tmp_path, *options)
    assert [record["name"] for record in found["tensors"]] == chosen


# ---------------------------------------------------------------- where weights are


def test_constant_nodes_are_weights(tmp_path: Path) -> None:
    w, x = sparse(16, 7, axis=0), normal(5, 16)
    made = model([constant("w", w), MATMUL], inputs={"x": (5, 16)})
    result, _ = converted(made, tmp_path)
    assert "Constant" not in operators(result)
    codes, scale, zero = codes_of(w, "int8", 1)
    same(run(result, {"x": x})[0], product(x, codes, scale.reshape(-1), zero))


def branch(name: str, *nodes: NodeProto, stored: Any = ()) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [output], list(stored))


def test_nested_graphs_multiply_by_the_codes_around_them(tmp_path: Path) -> None:
    """The other branch has a w of its own, which is no weight that is stored outside."""
    w, other, x = sparse(16, 7, axis=0), normal(16, 7), normal(5, 16)
    then = branch("p", helper.make_node("Gemm", ["x", "w"], ["p"]))
    own = branch("q", helper.make_node("Identity", ["o"], ["w"]),
                 helper.make_node("MatMul", ["x", "w"], ["q"]),
                 stored=[initializer("o", other)])  # fmt: skip
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=then, else_branch=own),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    made = model(nodes, [initializer("w", w)], inputs={"x": (5, 16)}, outputs=("y", "z"))
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, ()))
    result, stored = converted(made, tmp_path)
    assert sorted(stored) == ["w_quantized", "w_scale"]
    codes, scale, zero = codes_of(w, "int8", 1)
    expected = product(x, codes, scale.reshape(-1), zero)
    for condition in (True, False):
        y, z = run(result, {"x": x, "c": np.array(condition)})
        same(y, expected)
        if condition:
            same(z, expected)
        else:
            plain = model([MATMUL], [initializer("w", other)], inputs={"x": (5, 16)})
            same(z, run(plain, {"x": x})[0])


def test_external_data_goes_in_and_out(tmp_path: Path) -> None:
    w, x = sparse(64, 48, axis=0), normal(5, 64)
    made = model([MATMUL], [initializer("w", w)], inputs={"x": (5, 64)})
    (tmp_path / "w.bin").write_bytes(made.graph.initializer[0].raw_data)
    made.graph.initializer[0].ClearField("raw_data")
    made.graph.initializer[0].data_location = TensorProto.EXTERNAL
    made.graph.initializer[0].external_data.add(key="location", value="w.bin")
    ok("dynamic", save(made, tmp_path / "m.onnx"), "--graph", "--external-data")
    [data] = tmp_path.glob("m.dynamic.*.data")
    assert data.stat().st_size == 64 * 48  # the scales are small and stay in the model
    codes, scale, zero = codes_of(w, "int8", 1)
    [y] = run(tmp_path / "m.dynamic.onnx", {"x": x})
    same(y, product(x, codes, scale.reshape(-1), zero))


@pytest.mark.parametrize("node", [
    MATMUL, helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    helper.make_node("Conv", ["x", "w"], ["y"]),
], ids=lambda node: node.op_type)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_large_weights_go_tile_by_tile_with_the_same_bytes(
    node: NodeProto, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (40, 60, 5, 5) if node.op_type == "Conv" else (300, 200)
    made = model([node], [initializer("w", normal(*shape))],
                 inputs={"x": (1, 60, 8, 8) if node.op_type == "Conv" else (1, 200)}
                 if node.op_type != "MatMul" else {"x": (1, 300)})  # fmt: skip
    source = save(made, tmp_path / "m.onnx")
    for name, pays in (("plain", False), ("tiles", True)):
        monkeypatch.setattr(engine, "kernels_pay", lambda elements, pays=pays: pays)
        monkeypatch.setattr(engine, "TILES_PAY", 0)
        ok("dynamic", source, "--graph", "--dtype", dtype, "-o", tmp_path / f"{name}.onnx")
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "tiles.onnx").read_bytes()


# ---------------------------------------------------------------- versions and other tensors


@pytest.mark.parametrize(("before", "after"), [(8, 11), (9, 11), (11, 11), (17, 17), (21, 21)])
def test_the_opset_is_raised_where_it_is_needed(before: int, after: int, tmp_path: Path) -> None:
    made = onnx_jobs.network(before)
    result, _ = converted(made, tmp_path)
    assert [(entry.domain, entry.version) for entry in result.opset_import] == [("", after)]
    x = {"x": normal(2, 6, 6, 6)}
    [y], [expected] = run(result, x), run(made, x)
    assert np.linalg.norm(y - expected) < 0.03 * np.linalg.norm(expected)


def test_initializers_of_old_models_are_no_inputs_any_more(tmp_path: Path) -> None:
    made = model([MATMUL], [initializer("w", normal(16, 16))],
                 inputs={"x": (5, 16), "w": (16, 16)}, opset=8, ir_version=3)  # fmt: skip
    result, _ = converted(made, tmp_path)
    assert [value.name for value in result.graph.input] == ["x"]


def test_all_else_stays_as_it_was(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="first", doc_string="kept"),
        helper.make_node("MatMul", ["r", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"], name="last"),
    ]
    made = model(nodes, [initializer("w", normal(16, 16)), initializer("b", normal(16))],
                 inputs={"x": (5, 16)}, producer_name="me", doc_string="about")  # fmt: skip
    made.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("p", (5, 16)), ("w", (16, 16)))
    )
    helper.set_model_props(made, {"key": "value"})
    result, _ = converted(made, tmp_path)
    kept = [node for node in result.graph.node if node.name in ("first", "last")]
    assert kept == [nodes[0], nodes[2]]
    assert result.graph.initializer[0] == made.graph.initializer[1]
    assert [value.name for value in result.graph.value_info] == ["p"]
    assert result.metadata_props[0] == made.metadata_props[0]
    assert [entry.key for entry in result.metadata_props] == ["key", "qtool"]
    for field in ("producer_name", "doc_string", "opset_import", "ir_version"):
        assert getattr(result, field) == getattr(made, field)
    assert (result.graph.input, result.graph.output) == (made.graph.input, made.graph.output)


# ---------------------------------------------------------------- report and usage


def test_the_report_describes_the_weights(tmp_path: Path) -> None:
    w = normal(16, 32)
    made = model([helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
                 [initializer("w", w), initializer("b", normal(16))], inputs={"x": (5, 32)},
                 )  # fmt: skip
    found = written(made, tmp_path, "--dtype", "uint8")
    schema = json.loads(resources.files("qtool").joinpath("report.schema.json").read_text())
    Draft202012Validator(schema).validate(found)
    assert (found["command"], found["settings"]["graph"]) == ("dynamic", "per_axis")
    assert found["settings"]["dtype"] == "uint8"
    [record] = found["tensors"]
    codes, scale, zero = codes_of(w, "uint8", 0, shifted=True)
    difference = ((codes - zero).astype(np.float32) * scale - w).astype(np.float64)
    expected = {
        "name": "w", "shape": [16, 32], "dtype": "uint8", "granularity": "per_axis", "axis": 0,
        "num_scales": 16, "scale_dtype": "float32", "zero_point": True, "bytes_before": w.nbytes,
        "bytes_after": 16 * 32 + 16 * 4 + 16, "max_abs_error": np.abs(difference).max(),
    }  # fmt: skip
    assert {key: record[key] for key in expected} == expected
    assert record["mse"] == pytest.approx(np.square(difference).mean(), rel=1e-12)
    assert found["skipped"] == [{"name": "b", "reason": "rank below 2"}]


def test_one_zero_point_for_all_channels_takes_one_byte(tmp_path: Path) -> None:
    made = model([helper.make_node("Conv", ["x", "w"], ["y"])],
                 [initializer("w", normal(8, 4, 3, 3))], inputs={"x": (1, 4, 8, 8)})  # fmt: skip
    [record] = written(made, tmp_path, "--dtype", "uint8")["tensors"]
    assert record["bytes_after"] == 8 * 4 * 3 * 3 + 8 * 4 + 1
    stored = initializers(tmp_path / "m.dynamic.onnx").values()
    assert sum(values.nbytes for values in stored) == record["bytes_after"]


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    source = save(onnx_jobs.network(13), tmp_path / "m.onnx")
    for name in ("1.onnx", "2.onnx"):
        ok("dynamic", source, "--graph", "-o", tmp_path / name)
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


def test_it_is_not_done_twice_and_inspect_names_the_operators(tmp_path: Path) -> None:
    source = save(onnx_jobs.network(13), tmp_path / "m.onnx")
    ok("dynamic", source, "--graph")
    found = ok("inspect", tmp_path / "m.dynamic.onnx", "--json").json
    assert found["quantized_by"] == ["ConvInteger", "DynamicQuantizeLinear", "MatMulInteger"]
    for command in (["dynamic", "--graph"], ["dynamic"], ["quantize", "--dtype", "int4"]):
        line = refused(*command, tmp_path / "m.dynamic.onnx", "-o", tmp_path / "twice.onnx")
        assert "is quantized already (ConvInteger of x_quantized); dequantize it first" in line


USAGE = [
    pytest.param("x.npy --graph", "--graph: npy has no graph; it is for ONNX models", id="npy"),
    pytest.param("m.safetensors --graph", "--graph: safetensors has no graph", id="safetensors"),
    pytest.param("m.onnx --graph --dtype int4", "--dtype: int4 has no MatMulInteger; use int8 or "
                 "uint8", id="int4"),
    pytest.param("m.onnx --graph --dtype int9", "'int9' is not an element type", id="no-type"),
    pytest.param("x.npy --per-tensor", "--per-tensor: is for --graph", id="per-tensor"),
    pytest.param("m.onnx --graph --to npz", "--to: npz cannot be written from onnx", id="to-npz"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_wrong_usage_is_told_in_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    x: Array = normal(16, 16)
    np.save(tmp_path / "x.npy", x)
    save_file({"x": x}, tmp_path / "m.safetensors")
    save(onnx_jobs.network(13), tmp_path / "m.onnx")
    name, *options = arguments.split()
    assert message in refused("dynamic", tmp_path / name, *options, code=2)
    assert len(list(tmp_path.iterdir())) == 3

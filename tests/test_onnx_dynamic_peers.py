"""`qtool dynamic --graph` beside onnxruntime's quantize_dynamic, and back to floats from both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_jobs
import pytest
from command import Array, initializers, ok, refused
from integer_oracle import (
    by_onnxruntime,
    codes_of,
    converted,
    operators,
    optimized,
    relative_error,
    same,
    sparse,
)
from onnx import ModelProto, TensorProto, helper, load_model, numpy_helper
from onnx_jobs import normal
from onnx_models import check, initializer, model, replaced, run, save

from qtool.formats.onnx.graph import all_nodes

KINDS = [(dtype, channel) for dtype in ("int8", "uint8") for channel in (False, True)]
IDS = [f"{dtype}-{'channel' if channel else 'tensor'}" for dtype, channel in KINDS]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    onnx_jobs.reseed()


def dense() -> tuple[ModelProto, dict[str, Array]]:
    """Two MatMul and a Gemm, whose channels differ in size."""
    nodes = [
        helper.make_node("MatMul", ["x", "u"], ["a"], "first"),
        helper.make_node("Add", ["a", "p"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["d"], "second"),
        helper.make_node("Gemm", ["d", "w", "q"], ["y"], "third", transB=1),
    ]
    spread = np.geomspace(0.1, 3, 64).astype(np.float32)
    stored = {"u": sparse(48, 64, axis=0) * spread, "v": sparse(64, 64, axis=0) * spread,
              "w": sparse(32, 64, axis=1), "p": normal(64), "q": normal(32)}  # fmt: skip
    made = model(nodes, [initializer(k, v) for k, v in stored.items()], inputs={"x": (20, 48)})
    return made, {"x": normal(20, 48)}


def images() -> tuple[ModelProto, dict[str, Array]]:
    nodes = [
        helper.make_node("Conv", ["x", "u", "p"], ["a"], "first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["y"], "second", group=4, strides=[2, 2]),
    ]
    spread = np.geomspace(0.1, 3, 16).astype(np.float32)[:, None]
    u = (sparse(16, 27, axis=1) * spread).reshape(16, 3, 3, 3)
    v = (sparse(16, 36, axis=1) * spread).reshape(16, 4, 3, 3)
    stored = {"u": u, "v": v, "p": normal(16)}
    made = model(nodes, [initializer(k, v) for k, v in stored.items()],
                 inputs={"x": (2, 3, 20, 20)})  # fmt: skip
    return made, {"x": normal(2, 3, 20, 20)}


Network = Callable[[], tuple[ModelProto, dict[str, Array]]]
MODELS = pytest.mark.parametrize("network", [dense, images], ids=["dense", "images"])


@MODELS
@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_onnxruntimes_own_quantizer_gives_the_same_or_a_worse_model(
    network: Network, dtype: str, channel: bool, tmp_path: Path
) -> None:
    """It gives Conv one scale per tensor, whatever is asked for."""
    made, feeds = network()
    ours, _ = converted(made, tmp_path, "--dtype", dtype, *([] if channel else ["--per-tensor"]))
    target = tmp_path / "out.onnx"
    peer = by_onnxruntime(tmp_path / "m.onnx", tmp_path / "r.onnx", dtype, per_channel=channel)
    theirs = load_model(peer)
    counts = [Counter(operators(m)) - Counter(["Constant"]) for m in (ours, theirs)]
    assert counts[0] == counts[1]
    assert optimized(target, tmp_path) == optimized(peer, tmp_path)
    assert target.stat().st_size < peer.stat().st_size
    outputs, peer_outputs, expected = (run(m, feeds) for m in (ours, theirs, made))
    if network is dense or not channel:
        same(outputs[0], peer_outputs[0])
    else:
        error, peer_error = (relative_error(y, expected) for y in (outputs, peer_outputs))
        assert error < 0.95 * peer_error
    assert relative_error(outputs, expected) < 0.04


# ---------------------------------------------------------------- back to floats


def given(made: ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}


@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_dequantize_gives_conv_with_the_values_of_the_codes(
    dtype: str, channel: bool, tmp_path: Path
) -> None:
    made, feeds = images()
    converted(made, tmp_path, "--dtype", dtype, *([] if channel else ["--per-tensor"]))
    done = ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx", "--json").json
    assert [t["name"] for t in done["tensors"]] == ["u", "v"]
    back, stored = check(tmp_path / "back.onnx"), initializers(tmp_path / "back.onnx")
    values = {}
    for name in ("u", "v"):
        shifted = dtype == "uint8" and not channel
        codes, scale, zero = codes_of(
            given(made)[name], dtype, 0 if channel else None, shifted=shifted
        )
        values[name] = (codes - zero).astype(np.float32) * scale
        same(stored[name], values[name])
    assert stored.keys() == {"u", "v", "p"}
    convs = [node for node in back.graph.node if node.op_type == "Conv"]
    nodes = [node for node in made.graph.node if node.op_type == "Conv"]
    assert [[*node.attribute] for node in convs] == [[*node.attribute] for node in nodes]
    without = model([helper.make_node("Conv", ["x", "u"], ["a"], pads=[1, 1, 1, 1]),
                     helper.make_node("Add", ["a", "r"], ["c"]),
                     helper.make_node("Relu", ["c"], ["b"]), made.graph.node[2]],
                    [initializer("u", values["u"]), initializer("v", values["v"]),
                     initializer("r", given(made)["p"].reshape(1, 16, 1, 1))],
                    inputs={"x": (2, 3, 20, 20)})  # fmt: skip
    same(run(back, feeds)[0], run(without, feeds)[0])


@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_dequantize_gives_matmul_with_the_values_of_the_codes(
    dtype: str, channel: bool, tmp_path: Path
) -> None:
    made, feeds = dense()
    converted(made, tmp_path, "--dtype", dtype, *([] if channel else ["--per-tensor"]))
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    back, stored = check(tmp_path / "back.onnx"), initializers(tmp_path / "back.onnx")
    matrices = given(made)
    for name in ("u", "v", "w"):
        w = matrices[name].T if name == "w" else matrices[name]
        codes, scale, zero = codes_of(w, dtype, 1 if channel else None, shifted=dtype == "uint8")
        same(stored[name], (codes - zero).astype(np.float32) * scale)
    assert stored.keys() == {"u", "v", "w", "p", "q"}
    assert operators(back) == ["MatMul", "Add", "Relu", "MatMul", "MatMul", "Add"]
    nodes = [*made.graph.node[:4], helper.make_node("MatMul", ["d", "w"], ["e"]),
             helper.make_node("Add", ["e", "q"], ["y"])]  # fmt: skip
    plain = model(nodes, [initializer(k, v) for k, v in stored.items()], inputs={"x": (20, 48)})
    same(run(back, feeds)[0], run(plain, feeds)[0])


@MODELS
@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_models_of_onnxruntimes_quantizer_come_back_too(
    network: Network, dtype: str, channel: bool, tmp_path: Path
) -> None:
    """With the values of the codes as this file reads them out of the model."""
    made, feeds = network()
    source = save(made, tmp_path / "m.onnx")
    peer = by_onnxruntime(source, tmp_path / "r.onnx", dtype, per_channel=channel)
    parts = initializers(peer)
    ok("dequantize", peer, "-o", tmp_path / "back.onnx")
    back, stored = check(tmp_path / "back.onnx"), initializers(tmp_path / "back.onnx")
    for name in (key.removesuffix("_quantized") for key in parts if key.endswith("_quantized")):
        codes, scale, zero = (
            parts[f"{name}_{part}"] for part in ("quantized", "scale", "zero_point")
        )
        same(stored[name], (codes.astype(np.float32) - zero.astype(np.float32)) * scale)
    assert not {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"} & {*operators(back)}
    assert relative_error(run(back, feeds), run(made, feeds)) < 0.04


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weights_come_back_in_the_type_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    made, _ = dense()
    converted(made, tmp_path)
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx", "--dtype", dtype)
    codes, scale, _ = codes_of(given(made)["u"], "int8", 1)
    found = initializers(tmp_path / "back.onnx")[f"u_{dtype}"]
    computed = np.float32 if dtype == "float64" else found.dtype  # by DequantizeLinear
    same(found, (codes.astype(computed) * scale.astype(computed)).astype(found.dtype))
    assert str(found.dtype) == dtype
    assert operators(check(tmp_path / "back.onnx")).count("Cast") == 3


def test_float16_models_come_back_between_their_casts(tmp_path: Path) -> None:
    half: Any = np.float16
    w = sparse(16, 7, axis=0).astype(half)
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [initializer("w", w, half)],
                 inputs={"x": (5, 16)}, dtype=TensorProto.FLOAT16)  # fmt: skip
    converted(made, tmp_path)
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    back = check(tmp_path / "back.onnx")
    assert operators(back) == ["Cast", "MatMul", "Cast"]
    x = normal(5, 16).astype(half)
    codes, scale, _ = codes_of(w.astype(np.float32), "int8", 1)
    exact = x.astype(np.float64) @ (codes * scale.astype(np.float64))
    [y] = run(back, {"x": x})
    assert y.dtype == half
    np.testing.assert_allclose(y, exact, rtol=2**-10, atol=2**-10)


def test_transposed_activations_and_shared_weights_come_back(tmp_path: Path) -> None:
    w, x = sparse(16, 7, axis=0), normal(16, 5)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transA=1),
             helper.make_node("Gemm", ["x", "w"], ["z"], transA=1, alpha=2.0)]  # fmt: skip
    made = model(nodes, [initializer("w", w)], inputs={"x": (16, 5)}, outputs=("y", "z"))
    converted(made, tmp_path)
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    back, stored = check(tmp_path / "back.onnx"), initializers(tmp_path / "back.onnx")
    assert Counter(operators(back)) == {"Transpose": 2, "MatMul": 2, "Mul": 1, "Constant": 1}
    codes, scale, _ = codes_of(w, "int8", 1)
    same(stored["w"], codes.astype(np.float32) * scale)
    nodes = [helper.make_node("Transpose", ["x"], ["t"]),
             helper.make_node("MatMul", ["t", "w"], ["y"]),
             helper.make_node("Add", ["y", "y"], ["z"])]  # fmt: skip
    plain = model(nodes, [initializer("w", stored["w"])], inputs={"x": (16, 5)},
                  outputs=("y", "z"))  # fmt: skip
    for actual, expected in zip(run(back, {"x": x}), run(plain, {"x": x}), strict=True):
        same(actual, expected)


def test_nested_graphs_come_back(tmp_path: Path) -> None:
    w, x = sparse(16, 7, axis=0), normal(5, 16)
    output = helper.make_tensor_value_info("p", TensorProto.FLOAT, None)
    branches = [
        helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["p"])], "then", [], [output]),
        helper.make_graph([helper.make_node("Gemm", ["x", "w"], ["p"])], "else", [], [output]),
    ]
    made = model([helper.make_node("If", ["c"], ["y"], then_branch=branches[0],
                                   else_branch=branches[1])],
                 [initializer("w", w)], inputs={"x": (5, 16)})  # fmt: skip
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, ()))
    converted(made, tmp_path)
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    back, stored = check(tmp_path / "back.onnx"), initializers(tmp_path / "back.onnx")
    assert [node.op_type for node in all_nodes(back.graph.node)] == ["If", "MatMul", "MatMul"]
    feeds = {"x": x, "c": np.array(True)}
    expected = run(replaced(made, w=stored["w"]), feeds)
    same(run(back, feeds)[0], expected[0])


def other_scale(made: ModelProto) -> None:
    """The scale has the shape of the rows."""
    [scale] = [t for t in made.graph.initializer if t.name == "w_scale"]
    scale.CopyFrom(initializer("w_scale", np.ones((5, 1))))


def other_zero_point(made: ModelProto) -> None:
    """The product uses another zero point than DynamicQuantizeLinear gives."""
    made.graph.initializer.append(initializer("other", 3, np.uint8))
    [node] = [n for n in made.graph.node if n.op_type == "MatMulInteger"]
    node.input[2] = "other"


def other_cast(made: ModelProto) -> None:
    [node] = [n for n in made.graph.node if n.op_type == "Cast"]
    node.attribute[0].i = TensorProto.DOUBLE


@pytest.mark.parametrize("change", [other_scale, other_zero_point, other_cast])
def test_products_of_another_kind_are_no_products_of_weights(
    change: Callable[[ModelProto], None], tmp_path: Path
) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])],
                 [initializer("w", normal(16, 7))], inputs={"x": (5, 16)})  # fmt: skip
    result, _ = converted(made, tmp_path)
    change(result)
    save(result, tmp_path / "out.onnx")
    line = refused("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    assert "has no node that qtool knows to dequantize or multiply stored codes" in line
    assert not (tmp_path / "back.onnx").exists()


def test_codes_that_something_else_reads_stay(tmp_path: Path) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])],
                 [initializer("w", normal(16, 7))], inputs={"x": (5, 16)})  # fmt: skip
    result, _ = converted(made, tmp_path)
    result.graph.node.append(helper.make_node("Identity", ["x_quantized"], ["z"]))
    result.graph.output.append(helper.make_tensor_value_info("z", TensorProto.UINT8, (5, 16)))
    save(result, tmp_path / "out.onnx")
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx")
    back = operators(check(tmp_path / "back.onnx"))
    assert sorted(back) == ["DynamicQuantizeLinear", "Identity", "MatMul"]

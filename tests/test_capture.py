"""qtool capture: what weights are multiplied with, held against what onnxruntime computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from qtool.jobs import capture
from tests.command import leftovers, ok, process, refused, stored
from tests.onnx_models import constant, initializer, model, run, save

Array = NDArray[Any]
node = helper.make_node
RNG = np.random.default_rng(5)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape, np.float32)


def captured(tmp_path: Path, made: ModelProto, *options: str, **inputs: Array) -> dict[str, Array]:
    """What the command writes for a model and samples."""
    path = save(made, tmp_path / "model.onnx")
    np.savez(tmp_path / "samples.npz", **inputs)
    dst = tmp_path / "dst.safetensors"
    ok("capture", path, tmp_path / "samples.npz", "-o", dst, "--force", *options)
    return stored(dst)


def skipped(tmp_path: Path, made: ModelProto, **inputs: Array) -> dict[str, str]:
    """The reasons why tensors are left out."""
    path = save(made, tmp_path / "model.onnx")
    np.savez(tmp_path / "samples.npz", **inputs)
    args = ("-o", tmp_path / "dst.safetensors", "--force", "--json")
    done = ok("capture", path, tmp_path / "samples.npz", *args)
    return {entry["name"]: entry["reason"] for entry in done.json["skipped"]}


W = floats(6, 5)
PRODUCTS: dict[str, tuple[list[onnx.NodeProto], Array, Array, Any]] = {
    # nodes, the weight "w", the input "x", and the output that rows must give
    "MatMul": ([node("MatMul", ["x", "w"], ["y"])], W, floats(7, 3, 6), lambda r: r @ W),
    "weight on the left": (
        [node("MatMul", ["w", "x"], ["y"])],
        W.T,
        floats(2, 6, 3),
        lambda r: np.swapaxes((r @ W).reshape(2, 3, 5), 1, 2),
    ),
    "Gemm": ([node("Gemm", ["x", "w"], ["y"])], W, floats(4, 6), lambda r: r @ W),
    "Gemm transB": (
        [node("Gemm", ["x", "w"], ["y"], transB=1)],
        W.T,
        floats(4, 6),
        lambda r: r @ W,
    ),
    "Gemm transA": (
        [node("Gemm", ["x", "w"], ["y"], transA=1)],
        W,
        floats(6, 4),
        lambda r: r @ W,
    ),
    "Gemm, weight on the left": (
        [node("Gemm", ["w", "x"], ["y"], transA=1, transB=1)],
        W,
        floats(4, 6),
        lambda r: (r @ W).T,
    ),
    "Transpose": (
        [node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])],
        W.T,
        floats(2, 6),
        lambda r: r @ W,
    ),
    "Unsqueeze and Identity": (
        [
            constant("axes", [0], np.int64),
            node("Unsqueeze", ["w", "axes"], ["u"]),
            node("Identity", ["u"], ["i"]),
            node("MatMul", ["x", "i"], ["y"]),
        ],
        W,
        floats(2, 3, 6),
        lambda r: r @ W,
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_rows_times_the_weight_are_what_the_operator_gives(tmp_path: Path, case: str) -> None:
    nodes, w, x, product = PRODUCTS[case]
    made = model(nodes, [initializer("w", w)], inputs={"x": x.shape})
    found = captured(tmp_path, made, x=x[None])
    assert list(found) == ["w"]
    assert (found["w"].dtype, found["w"].shape[1]) == (np.float32, 6)
    [y] = run(made, {"x": x})
    np.testing.assert_allclose(product(found["w"]).reshape(y.shape), y, rtol=1e-5, atol=1e-6)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 8, 9), (4, 3, 3, 2), {}),
    "strides and pads": ((1, 3, 8, 9), (4, 3, 3, 2), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    "dilations": ((1, 2, 9, 9), (4, 2, 3, 3), {"dilations": [2, 3]}),
    "SAME_UPPER": ((1, 2, 7, 8), (3, 2, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "SAME_LOWER": ((1, 2, 7, 8), (3, 2, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "VALID": ((1, 2, 7, 8), (3, 2, 4, 3), {"auto_pad": "VALID"}),
    "one axis": ((2, 3, 11), (5, 3, 4), {"pads": [2, 1], "strides": [2]}),
    "three axes": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {}),
    "groups": ((2, 6, 5, 5), (4, 3, 3, 3), {"group": 2}),
    "depthwise": ((1, 4, 6, 6), (8, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_patches_times_the_kernels_are_what_a_convolution_gives(tmp_path: Path, case: str) -> None:
    shape, kernels, attributes = CONVOLUTIONS[case]
    x, w = floats(*shape), floats(*kernels)
    convolution = node("Conv", ["x", "w"], ["y"], **attributes)
    made = model([convolution], [initializer("w", w)], inputs={"x": shape})
    rows = captured(tmp_path, made, x=x[None])["w"]
    [y] = run(made, {"x": x})
    groups = attributes.get("group", 1)
    positions = rows.reshape(y.shape[0], -1, groups, w[0].size)
    per_group = w.reshape(groups, -1, w[0].size)
    expected = np.einsum("npgi,goi->ngop", positions, per_group).reshape(y.shape)
    np.testing.assert_allclose(expected, y, rtol=1e-4, atol=1e-5)


def test_rows_of_a_transposed_convolution_are_channels(tmp_path: Path) -> None:
    x, w = floats(2, 3, 4, 5), floats(3, 6, 2, 2)
    transposed = node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    made = model([transposed], [initializer("w", w)], inputs={"x": x.shape})
    rows = captured(tmp_path, made, x=x[None])["w"]
    assert rows.shape == (40, 3)
    blocks = (rows @ w.reshape(3, -1)).reshape(2, 4, 5, 6, 2, 2)
    [y] = run(made, {"x": x})
    pixels = blocks.transpose(0, 3, 1, 4, 2, 5).reshape(y.shape)
    np.testing.assert_allclose(pixels, y, rtol=1e-5, atol=1e-6)


def two_layers(**inputs: Any) -> ModelProto:
    """x (?, 6) -> w -> relu -> v."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "v"], ["y"]),
    ]
    weights = [initializer("w", W), initializer("v", np.eye(5, 4, dtype=np.float32))]
    return model(nodes, weights, inputs=inputs or {"x": (None, 6)})


def test_samples_stand_along_the_first_axis_and_batches_make_no_difference(tmp_path: Path) -> None:
    x = floats(10, 6)
    found = captured(tmp_path, two_layers(), x=x)
    assert found["w"].tobytes() == x.tobytes()
    np.testing.assert_allclose(found["v"], np.maximum(x @ W, 0), rtol=1e-5, atol=1e-6)
    for batch in (3, 10, 64):
        again = captured(tmp_path, two_layers(), "--batch", str(batch), x=x)
        np.testing.assert_allclose(again["v"], found["v"], rtol=1e-5, atol=1e-6)


def test_a_model_of_fixed_batches_gets_whole_ones(tmp_path: Path) -> None:
    x = floats(12, 6)
    made = two_layers(x=(4, 6))
    assert captured(tmp_path, made, x=x)["w"].tobytes() == x.tobytes()
    assert captured(tmp_path, made, x=x.reshape(3, 4, 6))["w"].tobytes() == x.tobytes()
    np.save(tmp_path / "odd.npy", x[:10])
    line = refused("capture", tmp_path / "model.onnx", tmp_path / "odd.npy")
    assert "10 samples are no whole runs of 4" in line
    assert leftovers(tmp_path) == []


def test_several_files_and_a_npy_of_a_single_input(tmp_path: Path) -> None:
    x = floats(9, 6)
    path = save(two_layers(), tmp_path / "model.onnx")
    np.save(tmp_path / "a.npy", x[:4])
    np.savez(tmp_path / "b.npz", x=x[4:], labels=np.arange(5))
    done = ok("capture", path, tmp_path / "a.npy", tmp_path / "b.npz", "--json").json
    dst = tmp_path / "model.activations.safetensors"
    assert stored(dst)["w"].tobytes() == x.tobytes()
    assert done["samples"]["runs"] == 9
    assert done["tensors"][0] == {"name": "w", "rows": 9, "in_features": 6}
    ok("capture", path, tmp_path / "a.npy", "-o", tmp_path / "d.npz")
    with np.load(tmp_path / "d.npz") as found:
        assert {name: found[name].shape for name in found} == {"w": (4, 6), "v": (4, 5)}


def test_inputs_of_other_types_and_numbers(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["table", "ids"], ["rows"]),
        node("Mul", ["rows", "factor"], ["x"]),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    table = floats(7, 6)
    made = model(nodes, [initializer("table", table), initializer("w", W)])
    for name, kind, shape in (("ids", TensorProto.INT64, ("n", 2)), ("factor", 1, ())):
        made.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    ids = np.array([[1, 2], [3, 4], [6, 0]], np.int32)
    found = captured(tmp_path, made, ids=ids, factor=np.float32(2))
    assert found["w"].tobytes() == (table[ids].reshape(-1, 6) * 2).tobytes()
    factors = captured(tmp_path, made, ids=ids, factor=np.float32([1, 2, 4]))
    expected = table[ids] * np.float32([1, 2, 4])[:, None, None]
    assert factors["w"].tobytes() == expected.tobytes()
    reasons = skipped(tmp_path, made, ids=ids, factor=np.float32(2))
    assert reasons == {"table": "is multiplied by no MatMul, Gemm or Conv"}


def test_a_weight_of_several_nodes_has_the_inputs_of_all(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Neg", ["x"], ["n"]),
        node("MatMul", ["n", "w"], ["b"]),
        node("MatMul", ["x", "w"], ["c"]),
        node("Sum", ["a", "b", "c"], ["y"]),
    ]
    x = floats(4, 6)
    made = model(nodes, [initializer("w", W)], inputs={"x": (None, 6)})
    found = captured(tmp_path, made, "--batch", "4", x=x)
    assert found["w"].tobytes() == np.concatenate([x, -x]).tobytes()
    hessian = captured(tmp_path, made, "--hessian", x=x)["w"]
    np.testing.assert_allclose(hessian, x.astype(np.float64).T @ x / 4, rtol=1e-6)


def test_constants_of_the_graph_and_half_floats(tmp_path: Path) -> None:
    nodes = [constant("w", W, np.float16), node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, inputs={"x": (None, 6)}, dtype=TensorProto.FLOAT16)
    x = floats(3, 6)
    found = captured(tmp_path, made, x=x)
    assert found["w"].tobytes() == x.astype(np.float16).astype(np.float32).tobytes()


def test_external_data_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "m.onnx"
    onnx.save_model(
        two_layers(), str(path), save_as_external_data=True, size_threshold=0, location="m.data"
    )
    x = floats(3, 6)
    np.save(tmp_path / "x.npy", x)
    monkeypatch.chdir(tmp_path)
    ok("capture", "model/m.onnx", "x.npy", "-o", "d.safetensors")
    assert stored(tmp_path / "d.safetensors")["w"].tobytes() == x.tobytes()
    assert sorted(os.listdir(tmp_path)) == ["d.safetensors", "model", "x.npy"]


def test_what_cannot_be_captured_is_listed_with_the_reason(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [node("MatMul", ["x", "inner"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("If", ["condition"], ["a"], then_branch=branch, else_branch=branch),
        node("MatMul", ["x", "w"], ["b"]),
        node("MatMul", ["x", "square"], ["c"]),
        node("MatMul", ["square", "x6"], ["d"]),
        node("MatMul", ["left", "w"], ["e"]),
        node("Einsum", ["x", "einsum"], ["f"], equation="ni,io->no"),
        node("Identity", ["condition"], ["y"]),
    ]
    names = ("inner", "einsum", "left")
    weights = [initializer(name, floats(6, 6)) for name in (*names, "square", "x6")]
    bare = node("MatMul", ["x", "fine"], ["g"])
    made = model(
        [*nodes, bare], [*weights, initializer("w", W), initializer("fine", W)],
        inputs={"x": (None, 6)}, outputs=(),
    )  # fmt: skip
    made.graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, ()))
    assert skipped(tmp_path, made, x=floats(2, 6), condition=np.array(True)) == {
        "inner": "is read by MatMul in a nested graph or a function",
        "einsum": "is read by Einsum, whose inputs are not captured",
        "left": "is multiplied with a stored tensor",
        "w": "is multiplied with a stored tensor",
        "square": "is multiplied with a stored tensor",
        "x6": "is multiplied with a stored tensor",
    }
    assert list(stored(tmp_path / "dst.safetensors")) == ["fine"]


def test_a_weight_read_along_both_axes_is_left_out(tmp_path: Path) -> None:
    square = floats(6, 6)
    nodes = [
        node("MatMul", ["x", "s"], ["a"]),
        node("Gemm", ["a", "s"], ["b"], transB=1),
        node("MatMul", ["b", "w"], ["y"]),
    ]
    weights = [initializer("s", square), initializer("w", W)]
    made = model(nodes, weights, inputs={"x": (None, 6)})
    assert skipped(tmp_path, made, x=floats(2, 6)) == {"s": "is read along different axes"}


def test_means_over_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = floats(50, 6)
    rows = captured(tmp_path, two_layers(), x=x)
    for limit in (2 << 30, 1):  # at once, and each weight in a pass of its own
        monkeypatch.setattr(capture, "_SUMS", limit)
        hessians = captured(tmp_path, two_layers(), "--hessian", x=x)
        squares = captured(tmp_path, two_layers(), "--mean-square", x=x)
        for name, values in rows.items():
            wide = values.astype(np.float64)
            exact = np.einsum("ri,rj->ij", wide, wide) / 50
            assert hessians[name].dtype == squares[name].dtype == np.float32
            np.testing.assert_allclose(hessians[name], exact, rtol=3e-7, atol=1e-12)
            np.testing.assert_allclose(squares[name], np.diag(exact), rtol=3e-7, atol=1e-12)


def test_include_and_exclude_choose_weights(tmp_path: Path) -> None:
    assert list(captured(tmp_path, two_layers(), "--include", "w", x=floats(2, 6))) == ["w"]
    assert list(captured(tmp_path, two_layers(), "--exclude", "w", x=floats(2, 6))) == ["v"]


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"z": floats(2, 6)}, "has no array 'x'; the model's inputs are x"),
        ({"x": floats(2, 5)}, "does not fit input x of shape (?, 6)"),
        ({"x": floats(0, 6)}, "enough for no runs"),
        ({"x": floats(6)}, "does not fit input x of shape (?, 6)"),
        ({"x": np.array([[1j] * 6])}, "complex128 values, the model takes float32"),
        ({"x": np.full((2, 6), np.nan, np.float32)}, "tensor x: holds NaN or Inf in run 1"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, Array], line: str
) -> None:
    path = save(two_layers(), tmp_path / "model.onnx")
    np.savez(tmp_path / "s.npz", **arrays)  # type: ignore[arg-type]
    assert line in refused("capture", path, tmp_path / "s.npz")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "s.npz"]


def test_a_file_that_is_not_there_is_said_as_everywhere(tmp_path: Path) -> None:
    path = save(two_layers(), tmp_path / "model.onnx")
    line = refused("capture", path, tmp_path / "no.npy")
    assert line == f"{tmp_path / 'no.npy'}: cannot be read: No such file or directory"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_inputs_must_have_as_many_samples(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "z"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    made = model(nodes, [initializer("w", W)], inputs={"x": (None, 6), "z": (None, 6)})
    path = save(made, tmp_path / "model.onnx")
    np.savez(tmp_path / "s.npz", x=floats(2, 6), z=floats(3, 6))
    assert "enough for 2 and 3 runs" in refused("capture", path, tmp_path / "s.npz")


def test_what_is_no_model_or_has_no_weights_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", floats(2, 6))
    line = refused("capture", tmp_path / "x.npy", tmp_path / "x.npy")
    assert "is npy, which cannot be run" in line
    made = model([node("Relu", ["x"], ["y"])], inputs={"x": (None, 6)})
    path = save(made, tmp_path / "relu.onnx")
    assert "no weight whose inputs" in refused("capture", path, tmp_path / "x.npy")
    path = save(two_layers(), tmp_path / "model.onnx")
    ok("quantize", path, "-o", tmp_path / "q.onnx", "--dtype", "int8", "--allow-empty")
    both = ("--hessian", "--mean-square")
    assert "leave one out" in refused("capture", path, tmp_path / "x.npy", *both, code=2)


def test_a_model_that_onnxruntime_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Mystery", ["a"], ["y"], domain="no.where")]
    imports = [helper.make_opsetid("no.where", 1)]
    made = model(nodes, [initializer("w", W)], inputs={"x": (None, 6)}, imports=imports)
    path = save(made, tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", floats(2, 6))
    line = refused("capture", path, tmp_path / "x.npy")
    assert "model.onnx: onnxruntime cannot run it: " in line
    assert "Mystery" in line


def test_without_onnxruntime_the_remedy_is_named(tmp_path: Path) -> None:
    save(two_layers(), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", floats(2, 6))
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('none here')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = process(
        "capture", "model.onnx", "x.npy", cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "qtool: onnxruntime: is needed to run a model (none here); pip install 'qtool[runtime]'\n"
    )


def test_results_go_down_a_pipe(tmp_path: Path) -> None:
    path = save(two_layers(), tmp_path / "model.onnx")
    x = floats(2, 6)
    np.save(tmp_path / "x.npy", x)
    done = ok("capture", "-", tmp_path / "x.npy", "-o", "-", stdin=path.read_bytes())
    assert stored(done.out)["w"].tobytes() == x.tobytes()


def test_the_table_says_what_there_is_and_what_was_left_out(tmp_path: Path) -> None:
    many = [initializer(f"w{i}", W) for i in range(14)]
    nodes = [node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(14)]
    nodes.append(node("Add", ["y0", "bias"], ["y"]))
    made = model(nodes, [*many, initializer("bias", W[0, :5])], inputs={"x": (None, 6)})
    path = save(made, tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", floats(3, 6))
    lines = ok("capture", path, tmp_path / "x.npy", "-o", tmp_path / "d.npz").err.splitlines()
    assert [line.split() for line in lines[:2]] == [["tensor", "rows", "in"], ["w0", "3", "6"]]
    assert lines[-3:-1] == ["and 2 more tensors", "left out: 1 tensor: rank below 2"]
    assert lines[-1].startswith(f"{tmp_path / 'd.npz'}: activations of 3 runs, ")
    again = ("capture", path, tmp_path / "x.npy", "-o", tmp_path / "d.npz", "--force", "--quiet")
    assert ok(*again).err == ""

"""`qtool dynamic --graph`: what the model computes, in onnxruntime and by arithmetic in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_jobs
import pytest
from command import Array
from integer_oracle import codes_of, converted, operators, product, same, sparse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_jobs import normal, reference
from onnx_models import constant, initializer, model, run

CHAIN = ["DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul", "Mul"]
CONV_CHAIN = ["ConvInteger" if op == "MatMulInteger" else op for op in CHAIN]
# Options, type of the codes, whether there is a scale per channel.
WEIGHTS = [
    pytest.param([], "int8", True, id="int8"),
    pytest.param(["--per-tensor"], "int8", False, id="int8-per-tensor"),
    pytest.param(["--dtype", "uint8"], "uint8", True, id="uint8"),
    pytest.param(["--dtype", "uint8", "--per-tensor"], "uint8", False, id="uint8-per-tensor"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    onnx_jobs.reseed()


# ---------------------------------------------------------------- MatMul


@pytest.mark.parametrize(("options", "dtype", "per_channel"), WEIGHTS)
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (16,)], ids=str)
def test_matmul(
    shape: tuple[int, ...], options: list[str], dtype: str, per_channel: bool, tmp_path: Path
) -> None:
    w, x = sparse(16, 7, axis=0), normal(*shape)
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [initializer("w", w)],
                 inputs={"x": shape})  # fmt: skip
    result, stored = converted(made, tmp_path, *options)
    codes, scale, zero = codes_of(w, dtype, 1 if per_channel else None, shifted=dtype == "uint8")
    same(stored["w_quantized"], codes.astype(dtype))
    same(stored["w_scale"], scale.reshape(7 if per_channel else ()))
    if dtype == "uint8":
        same(stored["w_zero_point"], zero.reshape(stored["w_scale"].shape).astype(dtype))
    assert stored.keys() == {"w_quantized", "w_scale"} | ({"w_zero_point"} & {*stored})
    assert operators(result) == CHAIN
    [y] = run(result, {"x": x})
    same(y, product(x, codes, scale.reshape(-1), zero))


@pytest.mark.parametrize(("options", "dtype", "per_channel"), WEIGHTS)
def test_matmul_of_stacked_matrices_has_a_single_zero_point(
    options: list[str], dtype: str, per_channel: bool, tmp_path: Path
) -> None:
    w, x = sparse(3, 16, 7, axis=1), normal(3, 5, 16)
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [initializer("w", w)],
                 inputs={"x": x.shape})  # fmt: skip
    result, stored = converted(made, tmp_path, *options)
    shifted = dtype == "uint8" and not per_channel
    codes, scale, zero = codes_of(w, dtype, 2 if per_channel else None, shifted=shifted)
    same(stored["w_quantized"], codes.astype(dtype))
    if dtype == "uint8":
        same(stored["w_zero_point"], np.asarray(zero.flat[0], np.uint8))
    [y] = run(result, {"x": x})
    same(y, product(x, codes, scale.reshape(-1), zero))


# ---------------------------------------------------------------- Gemm


@pytest.mark.parametrize(("options", "dtype", "per_channel"), WEIGHTS)
@pytest.mark.parametrize("a_transposed", [0, 1])
@pytest.mark.parametrize("b_transposed", [0, 1])
def test_gemm(
    a_transposed: int, b_transposed: int, options: list[str], dtype: str, per_channel: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    w, x, bias = sparse(16, 7, axis=0), normal(5, 16), normal(7)
    kept = w.T.copy() if b_transposed else w
    fed = x.T.copy() if a_transposed else x
    node = helper.make_node(
        "Gemm", ["x", "w", "b"], ["y"], transA=a_transposed, transB=b_transposed
    )
    made = model([node], [initializer("w", kept), initializer("b", bias)],
                 inputs={"x": fed.shape})  # fmt: skip
    result, stored = converted(made, tmp_path, *options)
    codes, scale, zero = codes_of(w, dtype, 1 if per_channel else None, shifted=dtype == "uint8")
    same(stored["w_quantized"], codes.astype(dtype))
    assert operators(result) == [
        *CHAIN[:1], *["Transpose"] * a_transposed, *CHAIN[1:], "Add",
    ]  # fmt: skip
    [y] = run(result, {"x": fed})
    same(y, product(x, codes, scale.reshape(-1), zero) + bias)


FACTORS = [
    pytest.param({"alpha": 0.3}, ["Mul", "Add"], 0.3, 1, id="alpha"),
    pytest.param({"beta": 0.7}, ["Mul", "Add"], 1, 0.7, id="beta"),
    pytest.param({"alpha": -2.0, "beta": 0.7}, ["Mul", "Mul", "Add"], -2, 0.7, id="both"),
    pytest.param({"beta": 0.0}, ["Mul", "Add"], 1, 0, id="no-bias-by-beta"),
    pytest.param({"alpha": 1.0, "beta": 1.0}, ["Add"], 1, 1, id="the-defaults"),
]


@pytest.mark.parametrize(("attributes", "after", "alpha", "beta"), FACTORS)
@pytest.mark.parametrize("bias", [(), (1,), (7,), (5, 1), (1, 7), (5, 7)], ids=str)
def test_gemm_with_factors_and_any_bias(
    bias: tuple[int, ...], attributes: dict[str, Any], after: list[str], alpha: float,
    beta: float, tmp_path: Path,
) -> None:  # fmt: skip
    w, x, c = sparse(16, 7, axis=0), normal(5, 16), normal(*bias)
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], **attributes)
    made = model([node], [initializer("w", w), initializer("b", c)], inputs={"x": x.shape})
    result, _ = converted(made, tmp_path)
    codes, scale, zero = codes_of(w, "int8", 1)
    found = operators(result)
    assert [op for op in found[len(CHAIN) :] if op != "Constant"] == after
    [y] = run(result, {"x": x})
    scaled = product(x, codes, scale.reshape(-1), zero) * np.float32(alpha)
    same(y, scaled + np.float32(beta) * c)


@pytest.mark.parametrize("inputs", [["x", "w"], ["x", "w", ""]], ids=["two", "empty-name"])
def test_gemm_without_bias(inputs: list[str], tmp_path: Path) -> None:
    w, x = sparse(16, 7, axis=0), normal(5, 16)
    made = model([helper.make_node("Gemm", inputs, ["y"], beta=0.5)], [initializer("w", w)],
                 inputs={"x": x.shape})  # fmt: skip
    result, _ = converted(made, tmp_path)
    assert operators(result) == CHAIN
    codes, scale, zero = codes_of(w, "int8", 1)
    same(run(result, {"x": x})[0], product(x, codes, scale.reshape(-1), zero))


# ---------------------------------------------------------------- Conv

CONVS = [
    pytest.param((2, 4, 11), (6, 4, 3), {"pads": [2, 1]}, id="1d"),
    pytest.param((2, 4, 9, 8), (6, 4, 3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}, id="2d"),
    pytest.param((1, 2, 5, 6, 5), (4, 2, 2, 3, 2), {"strides": [1, 2, 1]}, id="3d"),
    pytest.param((1, 6, 9, 9), (4, 3, 3, 3), {"group": 2, "dilations": [2, 3]}, id="groups"),
    pytest.param((1, 4, 9, 9), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}, id="depthwise"),
    pytest.param((1, 4, 9, 9), (5, 4, 1, 1), {}, id="pointwise"),
]


@pytest.mark.parametrize(("options", "dtype", "per_channel"), WEIGHTS)
@pytest.mark.parametrize(("shape", "kernel", "attributes"), CONVS)
def test_conv(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any],
    options: list[str], dtype: str, per_channel: bool, tmp_path: Path,
) -> None:  # fmt: skip
    w = sparse(kernel[0], int(np.prod(kernel[1:])), axis=1).reshape(kernel)
    x, bias = normal(*shape) + 1, normal(kernel[0])
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], kernel_shape=kernel[2:], **attributes)
    made = model([node], [initializer("w", w), initializer("b", bias)], inputs={"x": shape})
    result, stored = converted(made, tmp_path, *options)
    shifted = dtype == "uint8" and not per_channel
    codes, scale, zero = codes_of(w, dtype, 0 if per_channel else None, shifted=shifted)
    same(stored["w_quantized"], codes.astype(dtype))
    same(stored["w_scale"], scale[:, 0] if per_channel else scale.reshape(()))
    if dtype == "uint8":  # onnxruntime has no zero point per channel
        same(stored["w_zero_point"], np.asarray(zero.flat[0], np.uint8))
    assert [op for op in operators(result) if op != "Constant"] == [*CONV_CHAIN, "Reshape", "Add"]
    [integer] = [n for n in result.graph.node if n.op_type == "ConvInteger"]
    assert [*integer.attribute] == [*node.attribute]
    [y] = run(result, {"x": x})
    scales = scale.reshape(scale.shape[0], *[1] * (w.ndim - 2))
    expected = product(x, codes, scales, zero, group=attributes.get("group", 1), **{
        k: v for k, v in attributes.items() if k != "group"})  # fmt: skip
    same(y, expected + bias.reshape(-1, *[1] * (w.ndim - 2)))


@pytest.mark.parametrize(
    ("auto_pad", "pads"),
    [("SAME_UPPER", [1, 0, 1, 1]), ("SAME_LOWER", [1, 1, 1, 0]), ("VALID", [0, 0, 0, 0])],
)
def test_conv_pads_by_itself(auto_pad: str, pads: list[int], tmp_path: Path) -> None:
    w, x = sparse(4, 12, axis=1).reshape(4, 2, 3, 2), normal(1, 2, 5, 5)
    node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto_pad)
    result, _ = converted(model([node], [initializer("w", w)], inputs={"x": x.shape}), tmp_path)
    assert operators(result) == CONV_CHAIN
    codes, scale, zero = codes_of(w, "int8", 0)
    same(run(result, {"x": x})[0], product(x, codes, scale[:, 0], zero, pads=pads))


# ---------------------------------------------------------------- other floats


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_cast_before_and_behind(dtype: Any, tmp_path: Path) -> None:
    """float16 in onnx's own evaluator: onnxruntime leaves out the rounding in its casts."""
    w = sparse(16, 7, axis=0).astype(dtype)
    x, bias = normal(5, 16).astype(dtype), normal(7).astype(dtype)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    made = model(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=0.25)],
        [initializer("w", w, dtype), initializer("b", bias, dtype)],
        inputs={"x": x.shape}, dtype=code,
    )  # fmt: skip
    result, stored = converted(made, tmp_path)
    assert stored["w_scale"].dtype == np.float32
    found = [op for op in operators(result) if op != "Constant"]
    assert found == ["Cast", *CHAIN, "Mul", "Cast", "Mul", "Add"]
    [y] = (reference if dtype == np.float16 else run)(result, {"x": x})
    codes, scale, zero = codes_of(w.astype(np.float32), "int8", 1)
    scaled = product(x, codes, scale.reshape(-1), zero) * np.float32(0.5)
    same(y, scaled.astype(dtype) + bias * dtype(0.25))


def test_bfloat16_is_cast_before_and_behind(tmp_path: Path) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], inputs={"x": (5, 16)},
                 dtype=TensorProto.BFLOAT16)  # fmt: skip
    w = helper.make_tensor("w", TensorProto.BFLOAT16, (16, 7), normal(16, 7).reshape(-1))
    made.graph.initializer.append(w)
    result, _ = converted(made, tmp_path)
    assert operators(result) == ["Cast", *CHAIN, "Cast"]
    casts = [n.attribute[0].i for n in result.graph.node if n.op_type == "Cast"]
    assert casts == [TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.BFLOAT16]


# ---------------------------------------------------------------- several operators


def two_products(**weights: Array) -> ModelProto:
    """y = x @ w + (x @ w) * k, z = x @ v; the stored w is read twice."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Gemm", ["x", "w", "k"], ["q"]),
        helper.make_node("Add", ["p", "q"], ["y"]),
        helper.make_node("MatMul", ["x", "v"], ["z"]),
    ]
    stored = {"w": sparse(16, 7, axis=0), "v": sparse(16, 9, axis=0), "k": normal(7)} | weights
    return model(nodes, [initializer(k, v) for k, v in stored.items()], inputs={"x": (5, 16)},
                 outputs=("y", "z"))  # fmt: skip


def test_one_tensor_is_quantized_once_for_all_that_read_it(tmp_path: Path) -> None:
    made, x = two_products(), normal(5, 16)
    result, stored = converted(made, tmp_path)
    assert operators(result).count("DynamicQuantizeLinear") == 1
    assert operators(result).count("MatMulInteger") == 3
    assert sorted(stored) == ["k", "v_quantized", "v_scale", "w_quantized", "w_scale"]
    given = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    parts = {name: codes_of(given[name], "int8", 1) for name in ("w", "v")}
    p, z = (product(x, c, s.reshape(-1), zero) for c, s, zero in (parts["w"], parts["v"]))
    y, found = run(result, {"x": x})
    same(y, p + (p + given["k"]))
    same(found, z)


def test_names_that_are_in_use_are_left_alone(tmp_path: Path) -> None:
    taken = ["x_quantized", "x_scale", "p_MatMulInteger", "w_quantized", "w_scale", "y_Mul"]
    made, x = two_products(), normal(5, 16)
    for name in taken:
        made.graph.node.append(constant(name, [1.0]))
    result, _ = converted(made, tmp_path)
    names = [name for node in result.graph.node for name in node.output]
    names += [t.name for t in result.graph.initializer]
    assert len(names) == len(set(names))
    assert set(taken) <= set(names)
    plain, _ = converted(two_products_like(made), tmp_path, "--force")
    for actual, expected in zip(run(result, {"x": x}), run(plain, {"x": x}), strict=True):
        same(actual, expected)


def two_products_like(made: ModelProto) -> ModelProto:
    """The model without the constants that were added to it."""
    copy = ModelProto()
    copy.CopyFrom(made)
    del copy.graph.node[4:]
    return copy


def test_a_tensor_used_in_two_types_of_operators_is_quantized_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("Conv", ["x", "l"], ["d"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
    ]
    k, l_, w = sparse(4, 18, axis=1).reshape(4, 2, 3, 3), normal(3, 2, 1, 1), normal(6, 5)
    made = model(nodes, [initializer("k", k), initializer("l", l_), initializer("w", w)],
                 inputs={"x": (1, 2, 6, 6)}, outputs=("c", "d", "m"))  # fmt: skip
    result, _ = converted(made, tmp_path)
    assert operators(result) == [
        *CONV_CHAIN, *CONV_CHAIN[1:], *CHAIN[1:],
    ]  # fmt: skip

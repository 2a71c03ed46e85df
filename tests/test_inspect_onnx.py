"""`qtool inspect` on ONNX models of other tools: their weights, and what onnxruntime refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_jobs
import pytest
from command import Array, ok
from integer_oracle import by_onnxruntime, converted, sparse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_jobs import normal
from onnx_models import initializer, model, run, save

MICROSOFT = helper.make_opsetid("com.microsoft", 1)
OUT, IN = 24, 64


@pytest.fixture(autouse=True)
def _seeded() -> None:
    onnx_jobs.reseed()


def inspected(made: ModelProto | Path, folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The rows of the quantized weights, by name."""
    path = made if isinstance(made, Path) else save(made, folder / "m.onnx")
    rows = ok("inspect", path, "--json", *options).json["tensors"]
    return {r["name"]: r for r in rows if r["quantization"] and "equation" in r["quantization"]}


def packed(codes: Array, bits: int) -> Array:
    """Codes along the last axis, the first one in the lowest bits."""
    stream = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    bits_of = stream[..., :bits].reshape(*codes.shape[:-1], -1)
    return np.packbits(bits_of, axis=-1, bitorder="little")


def nbits(
    bits: int = 4, size: int = 32, *, zero: bool = False, half: bool = False
) -> tuple[ModelProto, dict[str, Array], Array]:
    """A MatMulNBits node: the model, its codes and parameters over the weight, the weight."""
    blocks = -(-IN // size)
    codes = onnx_jobs.RNG.integers(0, 1 << bits, (OUT, blocks, size))
    scale = np.abs(normal(OUT, blocks)) + 1
    zeros = onnx_jobs.RNG.integers(0, 1 << bits, (OUT, blocks))
    dtype: Any = np.float16 if half else np.float32
    scale = scale.astype(dtype)
    stored = [numpy_helper.from_array(packed(codes, bits), "b"), initializer("s", scale, dtype)]
    if zero:
        stored.append(numpy_helper.from_array(packed(zeros, bits), "z"))
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s", *(["z"] if zero else [])], ["y"], domain="com.microsoft",
        K=IN, N=OUT, bits=bits, block_size=size,
    )  # fmt: skip
    made = model([node], stored, inputs={"x": (5, IN)}, imports=[MICROSOFT],
                 dtype=TensorProto.FLOAT16 if half else TensorProto.FLOAT)  # fmt: skip
    wide = codes.reshape(OUT, -1)[:, :IN].T.astype(np.float64)
    spread = [np.repeat(v, size, 1)[:, :IN].T.astype(np.float64) for v in (scale, zeros)]
    middle = spread[1] if zero else 1 << (bits - 1)
    return made, {"code": wide, "scale": spread[0], "zero_point": spread[1]}, (
        wide - middle) * spread[0]  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_matmul_nbits(bits: int, zero: bool, tmp_path: Path) -> None:
    made, values, weight = nbits(bits, zero=zero)
    row = inspected(made, tmp_path)["b"]
    how = row["quantization"]
    known = {
        "layout": "MatMulNBits",
        "dtype": f"uint{bits}",
        "granularity": "blocked",
        "axis": 0,
        "block_size": 32,
        "scale_dtype": "float32",
        "zero_point": zero,
        "problems": [],
    }
    assert {key: how[key] for key in known} == known
    assert (row["shape"], row["dtype"]) == ([IN, OUT], f"uint{bits}")
    computed = eval(how["equation"], {"__builtins__": {}}, values)
    np.testing.assert_array_equal(computed, weight)
    x = normal(5, IN)
    np.testing.assert_allclose(run(made, {"x": x})[0], x @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "zero", "equation"),
    [
        ("uint8", False, "(code - 8) * scale"),
        ("uint8", True, "(code - zero_point) * scale"),
        ("int4", False, "code * scale"),
        ("uint4", False, "code * scale"),
        ("uint4", True, "(code - zero_point) * scale"),
    ],
)
def test_gather_block_quantized(dtype: str, zero: bool, equation: str, tmp_path: Path) -> None:
    """The equation is what onnxruntime computes."""
    codes = onnx_jobs.RNG.integers(0, 8, (OUT, IN))
    zeros = onnx_jobs.RNG.integers(0, 8, (OUT, IN // 16))
    scale = np.abs(normal(OUT, IN // 16)) + 1
    kind: Any = getattr(ml_dtypes, dtype, np.uint8)
    parts = [(packed(v, 4) if dtype == "uint8" else v.astype(kind)) for v in (codes, zeros)]
    stored = [numpy_helper.from_array(parts[0], "b"), initializer("s", scale)]
    if zero:
        stored.append(numpy_helper.from_array(parts[1], "z"))
    node = helper.make_node(
        "GatherBlockQuantized", ["b", "i", "s", *(["z"] if zero else [])], ["y"],
        domain="com.microsoft", gather_axis=0, quantize_axis=1, block_size=16, bits=4,
    )  # fmt: skip
    made = model([node], stored, imports=[MICROSOFT])
    made.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, (OUT,)))
    row = inspected(made, tmp_path)["b"]
    how = row["quantization"]
    assert (how["equation"], how["axis"], how["block_size"]) == (equation, 1, 16)
    assert (row["shape"], how["dtype"]) == ([OUT, IN], "uint4" if dtype == "uint8" else dtype)
    spread = {"code": codes, "scale": np.repeat(scale, 16, 1),
              "zero_point": np.repeat(zeros, 16, 1)}  # fmt: skip
    [y] = run(made, {"i": np.arange(OUT)})
    np.testing.assert_allclose(y, eval(equation, {}, spread), rtol=1e-6)


DEQUANTIZED: list[Any] = [
    ([2, 3], None, {}, {"granularity": "per_tensor", "zero_point": False}, "code * scale"),
    ([2, 3], [2], {"axis": 0}, {"granularity": "per_axis", "axis": 0}, "code * scale"),
    ([4, 3], [2, 3], {"axis": 0, "block_size": 2},
     {"granularity": "blocked", "axis": 0, "block_size": 2, "zero_point": True},
     "(code - zero_point) * scale"),
    ([2, 3], [3], {"axis": -1}, {"granularity": "per_axis", "axis": 1}, "code * scale"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "scale", "attributes", "known", "equation"), DEQUANTIZED)
def test_dequantize_linear(
    shape: list[int], scale: list[int] | None, attributes: dict[str, int], known: dict[str, Any],
    equation: str, tmp_path: Path,
) -> None:  # fmt: skip
    zero = "zero_point" in equation
    stored = [initializer("c", onnx_jobs.RNG.integers(-9, 9, shape), np.int8),
              initializer("s", np.full(scale or (), 0.5))]  # fmt: skip
    if zero:
        stored.append(initializer("z", np.full(scale or (), 3), np.int8))
    node = helper.make_node("DequantizeLinear", ["c", "s", "z"][: 2 + zero], ["w"], **attributes)
    nodes = [node, helper.make_node("Mul", ["w", "x"], ["y"])]
    row = inspected(model(nodes, stored, inputs={"x": shape}), tmp_path)["c"]
    how = row["quantization"]
    assert {key: how[key] for key in known} == known
    assert (how["equation"], how["dtype"], how["scale_dtype"]) == (equation, "int8", "float32")
    assert how["problems"] == []


def test_a_scale_that_is_dequantized_itself(tmp_path: Path) -> None:
    codes, scale = onnx_jobs.RNG.bytes(OUT * 16), bytes([56] * OUT * 2)
    stored = [
        helper.make_tensor("c", TensorProto.FLOAT4E2M1, (OUT, 32), codes, raw=True),
        helper.make_tensor("s", TensorProto.FLOAT8E4M3FN, (OUT, 2), scale, raw=True),
        initializer("g", 0.5),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["s", "g"], ["t"]),
        helper.make_node("DequantizeLinear", ["c", "t"], ["w"], axis=1, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    made = model(nodes, stored, inputs={"x": (5, OUT)}, opset=23, ir_version=11)
    how = inspected(made, tmp_path)["c"]["quantization"]
    assert how["equation"] == "code * (scale * global_scale)"
    assert (how["dtype"], how["scale_dtype"]) == ("float4e2m1", "float8e4m3fn")
    assert how["problems"] == [
        "onnxruntime has no CPU kernel for DequantizeLinear with float4e2m1 codes"
    ]
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run(made, {"x": normal(5, OUT)})


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ([], {"dtype": "int8", "granularity": "per_axis", "axis": 1, "zero_point": False}),
        (["--per-tensor"], {"dtype": "int8", "granularity": "per_tensor"}),
        (["--dtype", "uint8"], {"dtype": "uint8", "axis": 1, "zero_point": True}),
    ],
)
def test_integer_products(options: list[str], known: dict[str, Any], tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]),
             helper.make_node("Gemm", ["h", "v"], ["y"], transB=1)]  # fmt: skip
    stored = [initializer("w", sparse(16, 12, axis=0)), initializer("v", sparse(8, 12, axis=1))]
    converted(model(nodes, stored, inputs={"x": (5, 16)}), tmp_path, *options)
    rows = inspected(tmp_path / "out.onnx", tmp_path, "--stats")
    assert {name: row["shape"] for name, row in rows.items()} == {
        "w_quantized": [16, 12], "v_quantized": [12, 8]}  # fmt: skip
    for row in rows.values():
        how = row["quantization"]
        assert {key: how[key] for key in known} == known
        assert (how["layout"], how["scale_dtype"]) == ("MatMulInteger", "float32")
        assert how["problems"] == []
        shifted = "(code - zero_point) * scale"
        assert how["equation"] == (shifted if known.get("zero_point") else "code * scale")
    lines = ok("inspect", tmp_path / "out.onnx").out.decode().splitlines()
    assert "2 MatMulInteger" in lines
    assert lines[-1].startswith("2 weights in MatMulInteger: ")


def test_integer_products_of_onnxruntimes_quantizer(tmp_path: Path) -> None:
    made = model([helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
                 [initializer("w", normal(8, 4, 3, 3))], inputs={"x": (1, 4, 8, 8)})  # fmt: skip
    source = save(made, tmp_path / "m.onnx")
    [row] = inspected(
        by_onnxruntime(source, tmp_path / "r.onnx", "uint8", per_channel=False), tmp_path
    ).values()
    how = row["quantization"]
    assert (how["layout"], how["granularity"], how["zero_point"]) == (
        "ConvInteger", "per_tensor", True)  # fmt: skip


# ---------------------------------------------------------------- problems

REFUSED: list[Any] = [
    (lambda: nbits(4, 24)[0], "blocks of 24, but onnxruntime takes powers of two from 16 on in "
     "MatMulNBits", "power-of-two"),
    (lambda: nbits(4, 8)[0], "blocks of 8, but onnxruntime takes powers of two from 16 on in "
     "MatMulNBits", "power-of-two"),
    (lambda: nbits(3, 32)[0], "codes of 3 bits, but onnxruntime takes 2, 4 and 8 in MatMulNBits",
     "Only 2b, 4b and 8b"),
    (lambda: nbits(2, 512)[0], "blocks of 512, but onnxruntime takes 256 at most for 2 bits in "
     "MatMulNBits", "must not exceed 256"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "problem", "refusal"), REFUSED)
def test_what_onnxruntime_refuses_is_told(
    make: Any, problem: str, refusal: str, tmp_path: Path
) -> None:
    made = make()
    assert inspected(made, tmp_path)["b"]["quantization"]["problems"] == [problem]
    assert ok("inspect", tmp_path / "m.onnx").out.decode().endswith(f"problem in b: {problem}\n")
    with pytest.raises(Exception, match=refusal):
        run(made, {"x": normal(5, IN)})


def test_powers_of_two_as_scales_are_told(tmp_path: Path) -> None:
    stored = [initializer("c", np.ones((OUT, 32)), ml_dtypes.float8_e4m3fn),
              helper.make_tensor("s", TensorProto.FLOAT8E8M0, (OUT,), bytes([127] * OUT), raw=True),
              ]  # fmt: skip
    node = helper.make_node("DequantizeLinear", ["c", "s"], ["w"], axis=0, output_dtype=1)
    nodes = [node, helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, stored, inputs={"x": (5, OUT)}, opset=24, ir_version=12)
    problem = "onnxruntime has no CPU kernel for DequantizeLinear with float8e8m0 scales"
    assert inspected(made, tmp_path)["c"]["quantization"]["problems"] == [problem]
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run(made, {"x": normal(5, OUT)})


@pytest.mark.parametrize("operator", ["ConvInteger", "MatMulInteger"])
def test_several_zero_points_where_one_is_taken_are_told(operator: str, tmp_path: Path) -> None:
    shape = (3, 4, 2, 2) if operator == "ConvInteger" else (2, 4, 3)
    node = helper.make_node(operator, ["x", "w", "", "z"], ["y"])
    made = model([node], [initializer("w", np.arange(np.prod(shape)).reshape(shape), np.uint8),
                          initializer("z", [1, 2, 3], np.uint8)],
                 inputs={"x": (1, 4, 5, 5) if operator == "ConvInteger" else (2, 5, 4)},
                 dtype=TensorProto.UINT8)  # fmt: skip
    how = inspected(made, tmp_path)["w"]["quantization"]
    assert how["problems"] == [
        f"several zero points, but onnxruntime takes one in such a {operator}"
    ]
    x = np.ones((1, 4, 5, 5) if operator == "ConvInteger" else (2, 5, 4), np.uint8)
    with pytest.raises(Exception, match="Non-zero status code"):
        run(made, {"x": x})


def test_stats_look_at_scales_and_codes(tmp_path: Path) -> None:
    made, _, _ = nbits(half=True)
    tensors = {t.name: t for t in made.graph.initializer}
    scale = numpy_helper.to_array(tensors["s"]).copy()
    scale.flat[:3] = [np.nan, np.inf, 0]
    tensors["s"].CopyFrom(numpy_helper.from_array(scale, "s"))
    codes = np.full_like(numpy_helper.to_array(tensors["b"]), 0x88)
    tensors["b"].CopyFrom(numpy_helper.from_array(codes, "b"))
    row = inspected(made, tmp_path, "--stats")["b"]
    assert row["quantization"]["problems"] == [
        f"2 of {scale.size} scales are NaN or infinite", f"1 of {scale.size} scales is zero",
        "all code words are 0x88",
    ]  # fmt: skip
    found = row["quantization"]["scales"]
    assert (found["zero_count"], found["nonfinite_count"]) == (1, 2)
    assert inspected(made, tmp_path)["b"]["quantization"]["problems"] == []


def test_a_bias_of_zeros_is_no_problem(tmp_path: Path) -> None:
    stored = [initializer("c", np.zeros(16), np.int32), initializer("s", np.full(16, 0.5))]
    nodes = [helper.make_node("DequantizeLinear", ["c", "s"], ["b"], axis=0),
             helper.make_node("Add", ["x", "b"], ["y"])]  # fmt: skip
    made = model(nodes, stored, inputs={"x": (5, 16)})
    assert inspected(made, tmp_path, "--stats")["c"]["quantization"]["problems"] == []


def test_codes_that_callers_may_set_or_another_domain_reads_are_no_weights(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["c", "s"], ["w"], domain="other"),
             helper.make_node("DequantizeLinear", ["x", "s"], ["y"])]  # fmt: skip
    stored = [initializer("c", np.ones((2, 2)), np.int8), initializer("s", 0.5)]
    made = model(nodes, stored, inputs={"x": (2, 2)}, dtype=TensorProto.INT8,
                 imports=[helper.make_opsetid("other", 1)])  # fmt: skip
    assert inspected(made, tmp_path) == {}


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("MatMulNBits", ["x", "c", "s"], {"bits": 0, "K": -5, "N": 3, "block_size": 32}),
        ("MatMulNBits", ["x", "c", "s"], {"bits": 10**12, "block_size": -1}),
        ("MatMulNBits", ["x"], {}),
        ("GatherBlockQuantized", ["c", "x", "s"], {"quantize_axis": 99, "bits": 5}),
        ("GatherBlockQuantized", ["c"], {"block_size": 2**62}),
        ("DequantizeLinear", ["c", "s"], {"axis": -9}),
        ("DequantizeLinear", ["c"], {}),
        ("MatMulInteger", ["x", "c"], {}),
        ("ConvInteger", ["x", "s", "", "c"], {}),
    ],
)
def test_damaged_operators_are_described_all_the_same(
    operator: str, inputs: list[str], attributes: dict[str, int], tmp_path: Path
) -> None:
    domain = "com.microsoft" if "Block" in operator or "NBits" in operator else ""
    node = helper.make_node(operator, inputs, ["y"], domain=domain, **attributes)
    made = ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21), MICROSOFT])
    made.graph.node.append(node)
    stored = [initializer("c", np.ones((2, 3, 4)), np.uint8), initializer("s", np.ones((2, 3)))]
    made.graph.initializer.extend(stored)
    assert ok("inspect", save(made, tmp_path / "m.onnx"), "--stats").code == 0

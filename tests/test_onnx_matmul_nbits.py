"""quantize --layout matmul-nbits: what is stored, and what onnxruntime computes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx_jobs import attributes, job, normal, reseed
from onnx_models import check, model, run, save
from onnx_nbits import (
    Array,
    gather_codes,
    gather_weight,
    matmul_codes,
    matmul_weight,
    rows,
    stored,
)
from onnxruntime.capi._pybind_state import (
    quantize_matmul_2bits,
    quantize_matmul_4bits,
    quantize_matmul_8bits,
)
from oracle import INTEGERS, quantize

import qtool

make = helper.make_node

TYPES = ["int2", "uint2", "int4", "uint4", "int8", "uint8"]
SYMMETRIC = [None, True, False]
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CODES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
         "bfloat16": TensorProto.BFLOAT16}  # fmt: skip
# K, N, block size: whole blocks, ragged ones, an odd K, a block larger than K, one column, and
# numbers of blocks whose zero points fill bytes or do not
SHAPES = [(64, 6, 32), (80, 5, 32), (49, 3, 16), (20, 7, 32), (95, 1, 32), (210, 2, 128)]
LAYOUT: dict[str, Any] = {"layout": "matmul-nbits"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    reseed()


def weight(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Values around a mean that is not 0, so that zero points differ from the middle."""
    return (normal(*shape) + np.float32(0.5)).astype(FLOATS[dtype])


def matmul(w: Array) -> ModelProto:
    (dtype,) = (name for name, numpy in FLOATS.items() if w.dtype == numpy)
    return model(
        [make("MatMul", ["x", "w"], ["y"])], [numpy_helper.from_array(w, "w")],
        inputs={"x": ["n", len(w)]}, dtype=CODES[dtype],
    )  # fmt: skip


def check_codes(
    w: Array, codes: Array, scales: Array, zeros: Array, dtype: str, block: int, offset: int
) -> None:
    """Every code of [N, K] is the exact one for the source and what is stored."""
    for index in np.ndindex(w.shape):
        group = (*index[:-1], index[-1] // block)
        zero = int(zeros[group]) - offset
        code = quantize(float(w[index]), float(scales[group]), zero, dtype, "float32",
                        saturate=True)  # fmt: skip
        assert codes[index] == code + offset


def offset_of(dtype: str) -> int:
    return -INTEGERS[dtype][0]


def bound(x: Array, w: Array) -> Array:
    """How far a sum of K products, each rounded, may be from the exact one: 2 (K + 1) u."""
    wide = [values.astype(np.float64) for values in (x, w)]
    unit = float(ml_dtypes.finfo(w.dtype).eps) / 2
    return 2 * (len(w) + 1) * unit * (np.abs(wide[0]) @ np.abs(wide[1]))  # type: ignore[no-any-return]


# ------------------------------------------- MatMul


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize(("k", "n", "block"), SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", SYMMETRIC, ids=["default", "symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", TYPES)
def test_matmul_computes_what_its_codes_stand_for(
    dtype: str, symmetric: bool | None, k: int, n: int, block: int, source: str, tmp_path: Path
) -> None:
    w = weight((k, n), source)
    result, report = job(matmul(w), tmp_path, dtype=dtype, symmetric=symmetric, block_size=block,
                         **LAYOUT)  # fmt: skip
    (node,) = result.graph.node
    assert (node.op_type, node.domain) == ("MatMulNBits", "com.microsoft")
    assert attributes(node) == {"K": k, "N": n, "bits": int(dtype[-1]), "block_size": block}
    assert {entry.domain: entry.version for entry in result.opset_import} == {
        "": 21, "com.microsoft": 1,
    }  # fmt: skip
    is_symmetric = dtype.startswith("int") if symmetric is None else symmetric
    assert len(node.input) == (3 if is_symmetric else 4)
    for zero_points in [stored(result)[name] for name in node.input[3:]]:
        assert not rows(zero_points, int(dtype[-1]))[:, -(-k // block) :].any()
    codes, scales, zeros = matmul_codes(node, stored(result))
    assert scales.dtype == w.dtype
    check_codes(w.T, codes[:, :k], scales, zeros, dtype, block, offset_of(dtype))
    assert (codes[:, k:] == zeros[:, -1:]).all()  # what lies behind K stands for 0
    assert report["tensors"][0]["dtype"] == dtype
    values = matmul_weight(node, stored(result))
    if source == "bfloat16":  # onnxruntime's CPU execution provider has no kernel
        return
    (identity,) = run(result, {"x": np.eye(k, dtype=w.dtype)})
    assert identity.tobytes() == values.tobytes()
    x = normal(3, k).astype(w.dtype)
    for options in ({}, {"is_optimized": True}):
        (y,) = run_as_deployed(result, x) if options else run(result, {"x": x})
        error = np.abs(y.astype(np.float64) - x.astype(np.float64) @ values.astype(np.float64))
        assert (error <= bound(x, values)).all()


def run_as_deployed(made: ModelProto, x: Array) -> list[Array]:
    """The outputs with onnxruntime's own defaults: prepacked weights, and fusions."""
    session = onnxruntime.InferenceSession(made.SerializeToString())
    outputs: list[Array] = session.run(None, {"x": x})
    return outputs


@pytest.mark.parametrize("dtype", TYPES)
def test_scales_are_those_of_the_plain_formula(dtype: str, tmp_path: Path) -> None:
    w = weight((80, 5))
    low, high = INTEGERS[dtype]
    for symmetric in (True, False):
        result, _ = job(matmul(w), tmp_path, dtype=dtype, block_size=32, force=True,
                        method="absmax" if symmetric else "minmax", **LAYOUT)  # fmt: skip
        _, scales, zeros = matmul_codes(result.graph.node[0], stored(result))
        for column in range(5):
            for block in range(3):
                values = w[32 * block : 32 * block + 32, column].astype(np.float64)
                if symmetric:
                    exact = np.abs(values).max() / max(high if low else high // 2, 1)
                    assert zeros[column, block] == (high - low + 1) // 2
                else:
                    exact = (max(values.max(), 0) - min(values.min(), 0)) / (high - low)
                    zero = round(-min(values.min(), 0) / float(np.float32(exact)))
                    assert zeros[column, block] == min(max(zero, 0), high - low)
                assert scales[column, block] == np.float32(exact)


# ------------------------------------------- Gather


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block"), [((9, 64), 32), ((5, 80), 32), ((7, 20), 16), ((2, 3, 40), 16)], ids=str
)
@pytest.mark.parametrize("symmetric", SYMMETRIC, ids=["default", "symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", TYPES)
def test_gather_gives_rows_of_what_its_codes_stand_for(
    dtype: str, symmetric: bool | None, shape: tuple[int, ...], block: int, source: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    w = weight(shape, source)
    made = gather(w)
    result, _ = job(made, tmp_path, dtype=dtype, symmetric=symmetric, block_size=block, **LAYOUT)
    (node,) = result.graph.node
    assert (node.op_type, node.domain) == ("GatherBlockQuantized", "com.microsoft")
    codes, scales, zeros = gather_codes(node, stored(result))
    assert (codes.shape, scales.dtype) == (shape, w.dtype)
    is_int4 = stored(result)[node.input[0]].dtype == ml_dtypes.int4
    assert is_int4 == (dtype == "int4")
    check_codes(w, codes, scales, zeros, dtype, block, 0 if is_int4 else offset_of(dtype))
    if source == "bfloat16":
        return
    indices = np.array([[0, len(w) - 1, -1], [1, 0, -len(w)]])
    (gathered,) = run(result, {"i": indices})
    assert gathered.tobytes() == gather_weight(node, stored(result))[indices].tobytes()


def gather(w: Array, **options: Any) -> ModelProto:
    (code,) = (CODES[name] for name, numpy in FLOATS.items() if w.dtype == numpy)
    graph = helper.make_graph(
        [make("Gather", ["w", "i"], ["y"], **options)], "graph",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["m", "n"])],
        [helper.make_tensor_value_info("y", code, ["m", "n", *w.shape[1:]])],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


@pytest.mark.parametrize(("dtype", "ir_version"), [("uint4", 10), ("uint8", 8)])
def test_types_that_came_with_an_ir_version_raise_it(
    dtype: str, ir_version: int, tmp_path: Path
) -> None:
    result, _ = job(gather(weight((5, 64))), tmp_path, dtype=dtype, block_size=16, **LAYOUT)
    assert result.ir_version == ir_version
    assert result.opset_import[0].version == 17


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_rows_that_are_no_whole_bytes_stay_floats(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(qtool.QtoolError, match=f"has rows of 63 {dtype} codes, which are no whole"):
        job(gather(weight((5, 63))), tmp_path, dtype=dtype, block_size=16, **LAYOUT)


def test_odd_rows_of_4_bit_codes_are_gathered(tmp_path: Path) -> None:
    w = weight((5, 63))
    result, _ = job(gather(w), tmp_path, dtype="int4", block_size=16, **LAYOUT)
    (gathered,) = run(result, {"i": np.array([[4, 1]])})
    expected = gather_weight(result.graph.node[0], stored(result))[[[4, 1]]]
    assert gathered.tobytes() == expected.tobytes()


# ------------------------------------------- given scales and zero points


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zero", [None, 1], ids=["without", "with-zero-point"])
def test_given_parameters_are_stored_whatever_the_operators_default_is(
    dtype: str, zero: int | None, tmp_path: Path
) -> None:
    w, table = weight((40, 3)), weight((9, 64))
    for made, codes_of in ((matmul(w), matmul_codes), (gather(table), gather_codes)):
        result, _ = job(made, tmp_path, dtype=dtype, block_size=16, scale=0.25, zero_point=zero,
                        force=True, **LAYOUT)  # fmt: skip
        (node,) = result.graph.node
        codes, scales, zeros = codes_of(node, stored(result))
        is_typed = stored(result)[node.input[node.op_type == "MatMulNBits"]].dtype != np.uint8
        offset = 0 if is_typed else offset_of(dtype)
        assert (scales == 0.25).all()
        assert (zeros == offset + (zero or 0)).all()
        values = w.T if node.op_type == "MatMulNBits" else table
        check_codes(values, codes[:, : values.shape[1]], scales, zeros, dtype, 16, offset)


def test_scales_of_another_type_than_the_weight_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.full((3, 3), 0.25, np.float16))
    with pytest.raises(qtool.QtoolError, match="has float16 scales, MatMulNBits needs float32"):
        job(matmul(weight((40, 3))), tmp_path, dtype="int4", block_size=16,
            scale=tmp_path / "s.npy", **LAYOUT)  # fmt: skip


# ------------------------------------------- beside onnxruntime's own quantizer

QUANTIZERS = {2: quantize_matmul_2bits, 4: quantize_matmul_4bits, 8: quantize_matmul_8bits}


def by_onnxruntime(
    w: Array, bits: int, block: int, *, symmetric: bool
) -> tuple[NodeProto, dict[str, Array]]:
    """A node and its tensors, as MatMulNBitsQuantizer of onnxruntime makes them."""
    k, n = w.shape
    blocks = -(-k // block)
    codes = np.zeros((n, blocks, block * bits // 8), np.uint8)
    scales = np.zeros((n, blocks), w.dtype)
    zeros = np.zeros((n, -(-blocks * bits // 8)), np.uint8)
    padded = np.pad(w, ((0, blocks * block - k), (0, 0)))
    QUANTIZERS[bits](codes, padded, scales, zeros, block, n, k, symmetric)
    tensors = {"b": codes, "s": scales} | ({} if symmetric else {"z": zeros})
    node = make("MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", K=k, N=n, bits=bits,
                block_size=block)  # fmt: skip
    return node, tensors


def served(node: NodeProto, tensors: dict[str, Array], x: Array) -> Array:
    """What onnxruntime computes from a node and its tensors."""
    values = [numpy_helper.from_array(v, name) for name, v in tensors.items()]
    made = model([node], values, inputs={"x": x.shape},
                 imports=[helper.make_opsetid("com.microsoft", 1)])  # fmt: skip
    return run(made, {"x": x})[0]


@pytest.mark.parametrize("source", ["float32", "float16"])
@pytest.mark.parametrize(("k", "n", "block"), SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_it_is_as_small_and_as_close_as_onnxruntimes_own_quantizer(
    bits: int, symmetric: bool, k: int, n: int, block: int, source: str, tmp_path: Path
) -> None:
    w = weight((k, n), source)
    theirs, their_tensors = by_onnxruntime(w, bits, block, symmetric=symmetric)
    if source == "float32":  # the reader of this test understands them
        identity = served(theirs, their_tensors, np.eye(k, dtype=np.float32))
        assert np.array_equal(identity, matmul_weight(theirs, their_tensors))  # but for -0.0
    result, report = job(matmul(w), tmp_path, dtype=f"uint{bits}", block_size=block,
                         method="absmax" if symmetric else "minmax", **LAYOUT)  # fmt: skip
    (ours,), our_tensors = result.graph.node, stored(result)
    assert attributes(ours) == attributes(theirs)
    assert [(t.dtype, t.shape) for t in our_tensors.values()] == [
        (t.dtype, t.shape) for t in their_tensors.values()
    ]
    nbytes = sum(t.nbytes for t in their_tensors.values())
    assert report["tensors"][0]["bytes_after"] == nbytes
    if symmetric:  # theirs has a code more on the side of the largest value, ours may clip less
        return
    codes, scales, zeros = matmul_codes(ours, our_tensors)
    their_codes, their_scales, their_zeros = matmul_codes(theirs, their_tensors)
    # the same formula, in another order; what lies behind K they do not set
    eps = float(ml_dtypes.finfo(w.dtype).eps)
    np.testing.assert_allclose(scales.astype(float), their_scales.astype(float), rtol=eps)
    assert (zeros == their_zeros).all()
    difference = np.abs(codes - their_codes)[:, :k]
    assert difference.max() <= 1
    assert np.count_nonzero(difference) <= 1


@pytest.mark.parametrize("source", ["float32", "float16"])
@pytest.mark.parametrize(("k", "n", "block"), SHAPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True, "negative_scale": True}], ids=["default", "symmetric"]
)
@pytest.mark.parametrize("bits", [2, 4])
def test_its_error_is_not_above_that_of_onnxruntimes_own_quantizer(
    bits: int, options: dict[str, Any], k: int, n: int, block: int, source: str, tmp_path: Path
) -> None:
    """With a zero point, and without one, where the sign of their scales is free too."""
    w = weight((k, n), source)
    theirs = by_onnxruntime(w, bits, block, symmetric="symmetric" in options)
    result, _ = job(matmul(w), tmp_path, dtype=f"uint{bits}", block_size=block, **options, **LAYOUT)
    errors = [
        float(np.square(matmul_weight(node, tensors).astype(np.float64) - w).sum())
        for node, tensors in ((result.graph.node[0], stored(result)), theirs)
    ]
    assert errors[0] <= errors[1]


# ------------------------------------------- odd weights


def test_columns_and_rows_of_one_element(tmp_path: Path) -> None:
    """K = 1 never gets smaller by blocks of 16; N = 1 does."""
    for shape in ((1, 9), (0, 9), (9, 0)):
        with pytest.raises(qtool.QtoolError, match="would not get smaller as int4"):
            job(matmul(weight(shape)), tmp_path, dtype="int4", block_size=16, **LAYOUT)
    result, _ = job(matmul(weight((17, 1))), tmp_path, dtype="int4", block_size=16, **LAYOUT)
    (identity,) = run(result, {"x": np.eye(17, dtype=np.float32)})
    assert identity.tobytes() == matmul_weight(result.graph.node[0], stored(result)).tobytes()


def test_weights_that_the_padding_makes_larger_stay_as_they_are(tmp_path: Path) -> None:
    """20 values of 16 bits, but blocks of 128 codes and a scale."""
    w = weight((20, 7), "float16")
    with pytest.raises(qtool.QtoolError, match="would not get smaller as int4"):
        job(matmul(w), tmp_path, dtype="int4", block_size=128, **LAYOUT)


def test_a_block_of_zeros_has_scale_1_and_zero_codes(tmp_path: Path) -> None:
    w = weight((40, 3))
    w[16:32, 1] = 0
    for dtype in TYPES:
        result, _ = job(matmul(w), tmp_path, dtype=dtype, block_size=16, force=True, **LAYOUT)
        _, scales, _ = matmul_codes(result.graph.node[0], stored(result))
        assert scales[1, 1] == 1
        values = matmul_weight(result.graph.node[0], stored(result))
        assert not values[16:32, 1].any()


def test_values_that_are_not_finite_are_refused_or_saturated(tmp_path: Path) -> None:
    w = weight((40, 3))
    w[5, 1], w[6, 2], w[39, 0] = np.inf, -np.inf, np.nan
    made = matmul(w)
    with pytest.raises(qtool.QtoolError, match=r"tensor w: inf at \[5, 1\]: 3 of 120 values"):
        job(made, tmp_path, dtype="int4", block_size=16, **LAYOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    result, _ = job(made, tmp_path, dtype="int4", block_size=16, nonfinite="allow", **LAYOUT)
    codes, _, zeros = matmul_codes(result.graph.node[0], stored(result))
    assert (codes[1, 5], codes[2, 6], codes[0, 39]) == (15, 0, zeros[0, 2])


def test_subnormal_and_largest_values(tmp_path: Path) -> None:
    w = weight((40, 3), "float16")
    w[:16] *= np.float16(2**-14)
    w[16:32] = np.float16(65504)
    result, _ = job(matmul(w), tmp_path, dtype="uint4", block_size=16, **LAYOUT)
    (identity,) = run(result, {"x": np.eye(40, dtype=np.float16)})
    values = matmul_weight(result.graph.node[0], stored(result))
    assert np.isfinite(values).all()
    assert identity.tobytes() == values.tobytes()


# ------------------------------------------- tiles, threads and stripes


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("dtype", ["int2", "uint4", "int8"])
def test_tiles_threads_and_stripes_change_no_byte(
    dtype: str, external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, v, e = weight((600, 520)), weight((530, 605)), weight((900, 304))
    nodes = [
        make("Gather", ["e", "i"], ["r"]), make("MatMul", ["x", "w"], ["h"]),
        make("Gemm", ["g", "v"], ["y"], transB=1),
    ]  # fmt: skip
    tensors = [numpy_helper.from_array(t, n) for n, t in (("w", w), ("v", v), ("e", e))]
    made = helper.make_model(
        helper.make_graph(
            nodes, "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 600]),
             helper.make_tensor_value_info("g", TensorProto.FLOAT, [1, 605]),
             helper.make_tensor_value_info("i", TensorProto.INT64, [1])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
             for name, shape in (("y", [1, 530]), ("h", [1, 520]), ("r", [1, 304]))],
            tensors,
        ),
        opset_imports=[helper.make_opsetid("", 21)], ir_version=10,
    )  # fmt: skip
    source, out = save(made, tmp_path / "m.onnx"), tmp_path / "q.onnx"

    def files(jobs: int) -> dict[str, bytes]:
        qtool.quantize_file(source, out, dtype=dtype, block_size=32, jobs=jobs, force=True,
                            external_data=external, **LAYOUT)  # fmt: skip
        back = tmp_path / "back.onnx"
        qtool.dequantize_file(out, back, jobs=jobs, force=True, external_data=external)
        return {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix != ".json"}

    plain = files(1)
    check(out)
    monkeypatch.setattr(qtool.engine, "kernels_pay", lambda elements: True)  # type: ignore[attr-defined]
    monkeypatch.setattr(qtool.engine, "TILES_PAY", 0)  # type: ignore[attr-defined]
    assert files(1) == plain
    assert files(3) == plain
    monkeypatch.setattr("qtool.layouts.reordered._STRIPE", 20_000)
    assert files(3) == plain
    monkeypatch.setattr("qtool.layouts.reordered._PIECE", 1)
    assert files(3) == plain
    monkeypatch.setattr("qtool.layouts.reordered._STEP", 5_000)
    monkeypatch.setattr("qtool.layouts.nbits_codes._STEP", 5_000)
    monkeypatch.setattr("qtool.layouts.reordered._TILE", 100)
    assert files(2) == plain
    loaded = onnx.load(out)
    (r, h, y) = run(loaded, {"x": np.eye(1, 600, dtype=np.float32), "i": np.array([7]),
                             "g": np.eye(1, 605, dtype=np.float32)})[::-1]  # fmt: skip
    assert (r.shape, h.shape, y.shape) == ((1, 304), (1, 520), (1, 530))
    by_name = {node.op_type: node for node in loaded.graph.node if node.op_type != "Gemm"}
    assert (
        r.tobytes() == gather_weight(by_name["GatherBlockQuantized"], stored(loaded))[7].tobytes()
    )


def test_a_preset_works_with_the_layout(tmp_path: Path) -> None:
    w = weight((256, 8))
    result, report = job(matmul(w), tmp_path, preset="w4a16", **LAYOUT)
    assert attributes(result.graph.node[0])["block_size"] == 128
    assert report["settings"]["layout"] == "matmul-nbits"

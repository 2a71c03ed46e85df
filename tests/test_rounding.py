"""Second-order rounding against the textbook's, and what it costs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from textbook import correlated, damped, matrix, obq, output_error

import qtool
from qtool import Blocked, PerAxis, PerTensor, QuantSpec, Tiled, engine, rounding
from qtool.dtypes import DTYPES
from qtool.errors import SpecError, TensorError
from qtool.jobs.activations import mean_square
from qtool.rounding import mean_of_products, products
from qtool.rounding.hessian import mean, subtract_products
from qtool.spec import TensorInfo

Array = NDArray[Any]

NVFP4 = {"scale_dtype": "float8e4m3fn", "global_scale": True}
SPECS = {
    "int4 block": QuantSpec("int4", Blocked(1, 16)),
    "int4 short last block": QuantSpec("int4", Blocked(1, 44)),
    "int4 axis": QuantSpec("int4", PerAxis(0)),
    "int4 tensor": QuantSpec("int4", PerTensor()),
    "int4 asymmetric": QuantSpec("int4", Blocked(1, 32), symmetric=False),
    "uint4": QuantSpec("uint4", Blocked(1, 32)),
    "uint4 symmetric": QuantSpec("uint4", Blocked(1, 32), symmetric=True),
    "int2": QuantSpec("int2", Blocked(1, 16), symmetric=False),
    "uint2": QuantSpec("uint2", Blocked(1, 16)),
    "int8 narrow": QuantSpec("int8", PerAxis(0), narrow_range=True),
    "uint8 onednn": QuantSpec("uint8", PerAxis(0), semantics="onednn"),
    "int16": QuantSpec("int16", PerAxis(0)),
    "int4 tiles": QuantSpec("int4", Tiled((4, 16))),
    "inputs first, axis": QuantSpec("int4", PerAxis(1)),
    "inputs first, blocks": QuantSpec("uint4", Blocked(0, 16)),
    "percentile": QuantSpec("int4", PerAxis(0), method="percentile:97"),
    "bfloat16 scales": QuantSpec("int4", Blocked(1, 16), scale_dtype="bfloat16"),
    "float16 division": QuantSpec("int4", Blocked(1, 16), precision="float16"),
    "float8": QuantSpec("float8e4m3fn", PerAxis(0)),
    "float8e5m2": QuantSpec("float8e5m2", PerTensor()),
    "float6": QuantSpec("float6e2m3", Blocked(1, 32), scale_dtype="float8e8m0"),
    "mxfp4": QuantSpec("float4e2m1", Blocked(1, 32), scale_dtype="float8e8m0"),
    "nvfp4": QuantSpec("float4e2m1", Blocked(1, 16), **NVFP4),  # type: ignore[arg-type]
}


def case(spec: QuantSpec, inputs: int = 90, outputs: int = 7) -> tuple[Array, Array]:
    """A weight, in the way that spec lays it, and the Hessian of its inputs."""
    rng = np.random.default_rng(inputs)
    x = correlated(rng, 300, inputs).astype(np.float64)
    w = rng.standard_normal((outputs, inputs), np.float32)
    inputs_first = spec.granularity in (PerAxis(1), Blocked(0, 16))
    return np.ascontiguousarray(w.T if inputs_first else w), x.T @ x / len(x)


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("name", SPECS)
def test_codes_are_those_of_the_textbook(name: str, act_order: bool) -> None:
    spec = SPECS[name]
    w, hessian = case(spec)
    tensor = qtool.quantize(w, spec, hessian=hessian, act_order=act_order)
    expected = obq(w, hessian, tensor, damping=0.01, act_order=act_order)
    np.testing.assert_array_equal(matrix(tensor.y, tensor).astype(np.float64), expected)
    plain = qtool.quantize(w, spec)
    assert tensor.scale.tobytes() == plain.scale.tobytes()
    assert (tensor.y.view(np.uint8) != plain.y.view(np.uint8)).any()


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_damping_is_that_part_of_the_mean_diagonal(damping: float) -> None:
    spec = SPECS["int4 block"]
    w, hessian = case(spec)
    tensor = qtool.quantize(w, spec, hessian=hessian, damping=damping, act_order=False)
    expected = obq(w, hessian, tensor, damping=damping, act_order=False)
    np.testing.assert_array_equal(tensor.y.astype(np.float64), expected)


@pytest.mark.parametrize("granularity", [PerAxis(0), Blocked(1, 4), Blocked(2, 2), PerTensor()])
def test_a_kernel_of_a_convolution_is_a_matrix_of_its_windows(granularity: Any) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, 8, 3, 3), np.float32)
    x = correlated(rng, 400, 72).astype(np.float64)
    tensor = qtool.quantize(w, QuantSpec("int4", granularity), hessian=x.T @ x)
    expected = obq(w, x.T @ x, tensor, damping=0.01, act_order=True)
    np.testing.assert_array_equal(tensor.y.reshape(5, 72).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_source_types(dtype: Any) -> None:
    w, hessian = case(SPECS["int4 block"])
    w = w.astype(dtype)
    tensor = qtool.quantize(w, SPECS["int4 block"], hessian=hessian)
    expected = obq(w.astype(np.float32), hessian, tensor, damping=0.01, act_order=True)
    np.testing.assert_array_equal(tensor.y.astype(np.float64), expected)


def test_given_scales() -> None:
    w, hessian = case(SPECS["int4 block"])
    spec = QuantSpec("uint4", PerAxis(0))
    zero = np.full(7, 7, ml_dtypes.uint4)
    tensor = qtool.quantize(w, spec, scale=0.5, zero_point=zero, hessian=hessian)
    assert (tensor.scale == 0.5).all()
    expected = obq(w, hessian, tensor, damping=0.01, act_order=True)
    np.testing.assert_array_equal(tensor.y.astype(np.float64), expected)
    assert tensor.stats.clipped_low == 0 == tensor.stats.clipped_high


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_independent_inputs_give_the_nearest_codes(name: str, act_order: bool) -> None:
    spec = SPECS[name]
    w, hessian = case(spec)
    w[w.shape[0] // 2, :3] = (-0.0, 0.0, -1e-30)
    hessian = np.diag(np.diag(hessian))
    hessian[5, 5] = 0
    plain = qtool.quantize(w, spec)
    for diagonal in (np.eye(90), hessian, np.zeros((90, 90))):
        tensor = qtool.quantize(w, spec, hessian=diagonal, act_order=act_order)
        assert tensor.y.tobytes() == plain.y.tobytes()
        assert tensor.scale.tobytes() == plain.scale.tobytes()
        mine, its = tensor.stats.figures(), plain.stats.figures()
        assert mine == its


def test_the_unit_of_a_hessian_does_not_matter() -> None:
    w, hessian = case(SPECS["int4 block"])
    first = qtool.quantize(w, SPECS["int4 block"], hessian=hessian)
    for unit in (2.0**-200, 2.0**100):
        other = qtool.quantize(w, SPECS["int4 block"], hessian=hessian * unit)
        assert other.y.tobytes() == first.y.tobytes()
        assert other.output_error == first.output_error


# ---------------------------------------------------------------- the error of outputs


@pytest.mark.parametrize("name", SPECS)
def test_output_errors(name: str) -> None:
    spec = SPECS[name]
    w, hessian = case(spec)
    tensor = qtool.quantize(w, spec, hessian=hessian)
    plain = qtool.quantize(w, spec)
    found = tensor.output_error
    assert found is not None
    assert plain.output_error is None
    own, near, source = (matrix(a, tensor) for a in (tensor.dequantize(), plain.dequantize(), w))
    assert found.second_order == pytest.approx(output_error(source, own, hessian), rel=1e-9)
    assert found.nearest == pytest.approx(output_error(source, near, hessian), rel=1e-9)
    assert found.second_order is not None
    assert found.nearest is not None
    assert found.second_order < found.nearest


def test_output_errors_of_fewer_samples_than_inputs() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 90))
    w = rng.standard_normal((7, 90), np.float32)
    tensor = qtool.quantize(w, SPECS["int4 axis"], hessian=x.T @ x)
    assert tensor.output_error is not None
    exact = output_error(w, tensor.dequantize(), x.T @ x)
    assert tensor.output_error.second_order == pytest.approx(exact, rel=1e-6)
    assert exact < 0.02


def test_clipped_elements_and_errors_are_of_the_codes() -> None:
    rng = np.random.default_rng(2)
    w, hessian = rng.standard_normal((40, 90), np.float32), case(SPECS["int4 axis"])[1]
    tensor = qtool.quantize(w, QuantSpec("int4", PerAxis(0)), scale=0.2, hessian=hessian)
    stats = tensor.stats
    at_ends = np.isin(tensor.y.astype(int), (-8, 7))
    assert 0 < stats.clipped_low + stats.clipped_high <= np.count_nonzero(at_ends)
    errors = tensor.dequantize().astype(np.float64) - w
    assert stats.figures()["mse"] == pytest.approx(np.mean(errors**2), rel=1e-12)
    assert stats.max_abs_error == np.abs(errors).max()


# ---------------------------------------------------------------- inputs


def test_an_input_that_is_always_zero_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    x = correlated(rng, 300, 90).astype(np.float64)
    dead = [0, 17, 89]
    x[:, dead] = 0
    w = rng.standard_normal((7, 90), np.float32)
    tensor = qtool.quantize(w, SPECS["int4 axis"], hessian=x.T @ x)
    expected = obq(w, x.T @ x, tensor, damping=0.01, act_order=True)
    np.testing.assert_array_equal(tensor.y.astype(np.float64), expected)
    plain = qtool.quantize(w, SPECS["int4 axis"])
    assert tensor.y[:, dead].tobytes() == plain.y[:, dead].tobytes()
    assert tensor.output_error is not None
    exact = output_error(w, tensor.dequantize(), x.T @ x)
    assert tensor.output_error.second_order == pytest.approx(exact, rel=1e-9)


def test_without_any_input_there_is_no_output() -> None:
    w = np.ones((4, 8), np.float32)
    tensor = qtool.quantize(w, SPECS["int4 axis"], hessian=np.zeros((8, 8)))
    assert tensor.outcome.describe()["rounding"] == "second-order"
    assert tensor.outcome.describe()["output_error"] is None


def test_empty_weights() -> None:
    for shape in ((0, 4), (4, 0)):
        tensor = qtool.quantize(
            np.empty(shape, np.float32), SPECS["int4 axis"], hessian=np.eye(shape[1])
        )
        assert tensor.y.shape == shape


def asymmetric() -> Array:
    h = np.eye(4)
    h[0, 1] = 0.5
    return h


@pytest.mark.parametrize(
    ("hessian", "told"),
    [
        (np.eye(4) * 1j, "complex128 values"),
        (np.eye(5), "shape (5, 5), but the tensor has 4 inputs"),
        (np.ones(4), "shape (4,), but"),
        (np.full((4, 4), np.nan), "its largest value is nan"),
        (np.diag([1, 1, np.inf, 1]), "its largest value is inf"),
        (np.eye(4) * 1e200, "its largest value is 1e+200"),
        (asymmetric(), "is not symmetric"),
        (np.diag([1.0, -2, 1, 1]), "-2 at [1, 1] is below zero"),
        (np.eye(4) + np.fliplr(np.eye(4)) * 2, "is not positive definite with a damping of 0.01"),
        (np.fliplr(np.eye(4)), "is not positive definite"),
    ],
)
def test_a_matrix_that_is_no_hessian_is_refused(hessian: Array, told: str) -> None:
    with pytest.raises(TensorError) as caught:
        qtool.quantize(np.ones((3, 4), np.float32), SPECS["int4 axis"], hessian=hessian, name="w")
    assert str(caught.value).startswith("Hessian of w: ")
    assert told in str(caught.value)


def test_dependent_inputs_need_damping() -> None:
    hessian = np.ones((4, 4))
    w = np.ones((3, 4), np.float32)
    qtool.quantize(w, SPECS["int4 axis"], hessian=hessian)
    with pytest.raises(TensorError, match=r"damping of 0; use a larger --damping"):
        qtool.quantize(w, SPECS["int4 axis"], hessian=hessian, damping=0)


@pytest.mark.parametrize(
    ("shape", "spec", "options", "told"),
    [
        ((4,), QuantSpec("int4", PerTensor()), {}, "is no matrix"),
        ((2, 3, 4), QuantSpec("int4", PerAxis(2)), {}, "is no one matrix"),
        ((3, 4), QuantSpec("float8e4m3fn", PerTensor(), saturate=False), {}, "saturate"),
        ((3, 4), QuantSpec("int4", PerTensor()), {"damping": -1}, "damping: -1 is negative"),
        ((3, 4), QuantSpec("int4", PerTensor()), {"damping": np.nan}, "damping: nan"),
    ],
)
def test_what_cannot_be_rounded_so(
    shape: tuple[int, ...], spec: QuantSpec, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        qtool.quantize(np.ones(shape, np.float32), spec, hessian=np.eye(4), **options)


def test_options_without_a_hessian() -> None:
    for options in ({"damping": 0.1}, {"act_order": True}):
        with pytest.raises(SpecError, match="given without a Hessian"):
            qtool.quantize(np.ones((3, 4)), SPECS["int4 axis"], **options)  # type: ignore[arg-type]


def test_weights_that_are_not_finite() -> None:
    w = np.ones((3, 4), np.float32)
    w[1, 2] = np.nan
    for nonfinite in ("error", "allow"):
        spec = QuantSpec("int4", PerAxis(0), nonfinite=nonfinite)
        with pytest.raises(TensorError, match=r"nan at \[1, 2\].*leave its activations out"):
            qtool.quantize(w, spec, hessian=np.eye(4))


# ---------------------------------------------------------------- sums


def test_the_mean_of_products_does_not_depend_on_batches_and_threads() -> None:
    x = correlated(np.random.default_rng(0), 50, 300)
    whole, rows = mean_of_products([x], 300, 1)
    assert rows == 50
    np.testing.assert_allclose(whole, x.T.astype(np.float64) @ x / 50, rtol=1e-12, atol=1e-12)
    assert (whole == whole.T).all()
    parts, _ = mean_of_products([x[:7], x[7:8], x[8:8], x[8:]], 300, 2)
    assert parts.tobytes() == whole.tobytes()
    squares = mean_square([x[:7], x[7:]])
    assert squares.tobytes() == mean_square([x]).tobytes()
    np.testing.assert_allclose(squares, np.diag(whole), rtol=1e-14)
    one = [mean_square(np.split(x[:, :1], parts)) for parts in (1, 5, 50)]
    assert one[0].tobytes() == one[1].tobytes() == one[2].tobytes()


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (2, 257, 8), (7, 300, 71)])
def test_kernels_give_the_same_bits(rows: int, columns: int, depth: int) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((depth, 2 * rows))[:, ::2].T
    b = rng.standard_normal((depth, columns + 3))[:, 3:]
    plain = rng.standard_normal((rows, columns + 1))[:, 1:]
    fast = plain.copy()
    expected = plain.copy()
    for k in range(depth):
        for i in range(rows):
            for j in range(columns):
                expected[i, j] -= a[i, k] * b[k, j]
    products.subtract_product(plain, a, b, compiled=False)
    products.subtract_product(fast, a, b, compiled=True)
    assert plain.tobytes() == fast.tobytes() == expected.tobytes()


def test_kernels_give_the_same_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    w, hessian = case(SPECS["uint4"], inputs=200, outputs=600)
    plain = qtool.quantize(w, SPECS["uint4"], hessian=hessian)
    monkeypatch.setattr(products, "LOADING_PAYS", 0)
    monkeypatch.setattr(products, "COMPILING_PAYS", 0)
    monkeypatch.setattr("qtool.pool.default_jobs", lambda: 1)
    fast = qtool.quantize(w, SPECS["uint4"], hessian=hessian)
    assert plain.y.tobytes() == fast.y.tobytes()
    assert plain.output_error == fast.output_error
    assert plain.stats.figures() == fast.stats.figures()


def test_damped_of_the_textbook() -> None:
    np.testing.assert_array_equal(damped(np.diag([1.0, 0, 3])), np.diag([1.02, 2.0, 3.02]))


@pytest.mark.parametrize("name", ["int4 axis", "uint4"])
def test_scales_of_large_weights_are_those_of_the_plain_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, hessian = case(SPECS[name], inputs=64, outputs=100)
    plain = qtool.quantize(w, SPECS[name], hessian=hessian)
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: True)
    fast = qtool.quantize(w, SPECS[name], hessian=hessian)
    assert plain.scale.tobytes() == fast.scale.tobytes()
    assert plain.y.tobytes() == fast.y.tobytes()


@pytest.mark.parametrize(
    ("granularity", "consumer", "axis"),
    [
        (PerTensor(), (None, None), 1), (PerAxis(0), (None, None), 1),
        (PerAxis(1), (None, None), 0), (Blocked(1, 2), (None, None), 1),
        (Blocked(0, 2), (None, None), 0), (PerTensor(), (0, 1), 1), (PerTensor(), (0, None), 1),
        (PerTensor(), (1, 0), 0), (PerTensor(), (None, 0), 0), (PerAxis(1), (0, 1), 1),
    ],
)  # fmt: skip
def test_the_axis_of_inputs(
    granularity: Any, consumer: tuple[int | None, int | None], axis: int
) -> None:
    output, reduced = consumer
    info = TensorInfo("w", (4, 6), DTYPES["float32"], 96, output_axis=output, reduced_axis=reduced)
    assert rounding.input_axis(info, granularity) == axis


@pytest.mark.parametrize("rows", [40, 5000])
def test_products_are_those_of_samples_in_any_order_of_memory(rows: int) -> None:
    """40 by NumPy, 5,000 by the kernel; captured convolutions come column by column."""
    x = np.random.default_rng(0).integers(-8, 9, (rows, 300)).astype(np.float32)
    total = np.zeros((300, 300))
    subtract_products(total, np.asfortranarray(x), 2)
    exact = x.T.astype(np.int64) @ x.astype(np.int64)
    assert (mean(total, 1) == exact).all()

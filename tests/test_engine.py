"""quantize(): the operators on whole arrays, whatever the tiling; given scales; refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import TARGETS
from qtool.engine import plain, quantize
from qtool.errors import QtoolError, SpecError, TensorError
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec

Array = NDArray[Any]

TARGET_NAMES = [dtype.name for dtype in TARGETS]
SOURCES = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64, "int32": np.int32,
}  # fmt: skip
GRANULARITIES = [
    PerTensor(), PerAxis(0), PerAxis(1), PerAxis(-1), Blocked(-1, 4), Blocked(0, 2),
    Blocked(1, 2), Blocked(1, 100),
]  # fmt: skip


def example(source: str, shape: tuple[int, ...] = (5, 3, 9)) -> Array:
    random = np.random.default_rng(4)
    x = random.normal(size=shape) * 10.0 ** random.uniform(-3, 3, shape)
    return np.asarray(x * (1000 if source == "int32" else 1)).astype(SOURCES[source])


def float32_scale(scale: Array) -> Array:
    """A scale in a type that the operator takes as it is, or widened."""
    return scale.astype(np.float32) if scale.dtype == ml_dtypes.float8_e4m3fn else scale


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_codes_equal_the_operator_on_the_whole_array(target: str, granularity: Granularity) -> None:
    for source in SOURCES:
        x = example(source)
        q = quantize(x, QuantSpec(target, granularity))
        assert q.scale.dtype == (x.dtype if source in ("float16", "bfloat16") else np.float32)
        wanted = ops.quantize_linear(
            x,
            q.scale,
            q.zero_point,
            **granularity.attributes,
            output_dtype=target,
            precision="float32",
        )
        assert q.precision.name == "float32"
        assert q.y.dtype == wanted.dtype
        assert q.y.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "scale_dtype", ["float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn"]
)
@pytest.mark.parametrize("target", ["int8", "uint4", "float8e4m3fn", "float4e2m1"])
def test_scale_types_and_precisions_equal_the_operator(
    target: str, scale_dtype: str, precision: str
) -> None:
    for granularity in (PerTensor(), PerAxis(1), Blocked(2, 4)):
        x = example("float32")
        spec = QuantSpec(target, granularity, scale_dtype=scale_dtype, precision=precision)
        q = quantize(x, spec)
        wanted = ops.quantize_linear(
            x,
            float32_scale(q.scale),
            q.zero_point,
            **granularity.attributes,
            output_dtype=target,
            precision=precision,
        )
        assert (q.scale_dtype.name, q.precision.name) == (scale_dtype, precision)
        assert q.y.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("target", ["int8", "uint8", "int4", "uint2", "int16"])
def test_codes_equal_exact_arithmetic(target: str) -> None:
    x = example("float32", (4, 11))
    q = quantize(x, QuantSpec(target, Blocked(1, 4)))
    for index in np.ndindex(x.shape):
        where = (index[0], index[1] // 4)
        zero = None if q.zero_point is None else float(q.zero_point[where])
        wanted = oracle.quantize(
            float(x[index]), float(q.scale[where]), zero, target, "float32", saturate=True
        )
        assert int(q.y[index]) == wanted


@pytest.mark.parametrize("box", [1, 5, 16, 100, 1000])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("arguments", [
    {"dtype": "int4"}, {"dtype": "uint8"}, {"dtype": "float8e5m2"},
    {"dtype": "int8", "method": "percentile:99"}, {"dtype": "uint4", "narrow_range": True},
], ids=lambda arguments: "-".join(map(str, arguments.values())))  # fmt: skip
def test_the_size_of_a_box_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], granularity: Granularity, box: int
) -> None:
    x = example("float32", (7, 5, 17))
    x[2, 1, 3] = np.nan
    spec = QuantSpec(granularity=granularity, nonfinite="allow", **arguments)
    whole = quantize(x, spec)
    monkeypatch.setattr(plain, "BOX", box)
    cut = quantize(x, spec)
    assert cut.y.tobytes() == whole.y.tobytes()
    assert cut.scale.tobytes() == whole.scale.tobytes()
    assert (cut.zero_point is None) == (whole.zero_point is None)
    if cut.zero_point is not None and whole.zero_point is not None:
        assert cut.zero_point.tobytes() == whole.zero_point.tobytes()
    assert cut.stats.sums.tobytes() == whole.stats.sums.tobytes()
    assert cut.stats.figures() == whole.stats.figures()
    assert cut.stats.max_abs_error_at == whole.stats.max_abs_error_at


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0), PerAxis(1), Blocked(1, 32),
                                         Blocked(0, 3)], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 70001), (70001, 3), (300, 301)], ids=str)
def test_tensors_of_several_boxes_equal_the_operator(
    shape: tuple[int, ...], granularity: Granularity
) -> None:
    x = example("float32", shape)
    q = quantize(x, QuantSpec("uint8", granularity))
    wanted = ops.quantize_linear(x, q.scale, q.zero_point, **granularity.attributes)
    assert q.y.tobytes() == wanted.tobytes()
    assert q.stats.elements == x.size


@pytest.mark.parametrize("shape", [(1, 1, 100), (40, 5, 3), (3, 40, 5), (2, 3, 90), (9, 1, 16)],
                         ids=str)  # fmt: skip
def test_boxes_are_bounded_and_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(plain, "BOX", 32)
    order = np.arange(np.prod(shape)).reshape(shape)
    pieces = [order[box].reshape(-1) for box in plain._boxes(shape)]
    assert max(piece.size for piece in pieces) <= 32
    assert np.concatenate(pieces).tolist() == list(range(order.size))


def test_a_box_of_every_order_of_axes_is_in_c_order() -> None:
    x = example("float32", (4, 6, 8))
    for order in ((2, 1, 0), (1, 0, 2)):
        turned = x.transpose(order)
        q = quantize(turned, QuantSpec("int8", PerAxis(0)))
        assert q.y.flags.c_contiguous
        wanted = quantize(np.ascontiguousarray(turned), QuantSpec("int8", PerAxis(0)))
        assert q.y.tobytes() == wanted.y.tobytes()


@pytest.mark.parametrize(
    ("shape", "granularity", "scale_shape"),
    [
        ((), PerTensor(), ()), ((1,), PerTensor(), ()), ((0,), PerTensor(), ()),
        ((0, 3), PerAxis(1), (3,)), ((0, 3), PerAxis(0), (0,)), ((3, 0), Blocked(1, 4), (3, 0)),
        ((0, 5), Blocked(1, 4), (0, 2)), ((2, 0, 3), Blocked(0, 1), (2, 0, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_scalars_and_empty_tensors_keep_shape_and_type(
    shape: tuple[int, ...], granularity: Granularity, scale_shape: tuple[int, ...]
) -> None:
    for target in TARGET_NAMES:
        q = quantize(np.ones(shape, np.float32), QuantSpec(target, granularity))
        assert (q.y.shape, q.scale.shape) == (shape, scale_shape)
        assert q.y.dtype == q.spec.dtype.numpy
        scale = q.scale.astype(np.float64)
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        if q.zero_point is not None:
            assert q.zero_point.shape == scale_shape
        assert q.stats.elements == int(np.prod(shape))


def test_float64_is_rounded_to_float32_first() -> None:
    x = np.array([0.5 + 2.0**-40, -127])  # the float64 value would round up
    q = quantize(x, QuantSpec("int8", PerTensor()), scale=1)
    assert q.y.tolist() == [0, -127]
    assert q.scale.dtype == np.float32
    assert q.stats.max_abs_error == 0.5 + 2.0**-40


def test_int32_is_divided_in_float32_and_measured_as_it_is() -> None:
    x = np.array([2**24 + 1, -(2**31)], np.int32)
    q = quantize(x, QuantSpec("int16", PerTensor()))
    assert float(q.scale) == float(np.float32(2**31 / 32767))
    assert (q.stats.min, q.stats.max) == (-(2.0**31), 2.0**24 + 1)


def test_a_narrow_range_leaves_the_lowest_code_out_and_counts_what_it_clips() -> None:
    x = np.array([-1000, -128, -127, 127, 128], np.float32)
    q = quantize(x, QuantSpec("int8", PerTensor(), narrow_range=True), scale=1)
    assert q.y.tolist() == [-127, -127, -127, 127, 127]
    assert (q.stats.clipped_low, q.stats.clipped_high) == (2, 1)


def test_infinity_saturates_and_nan_gives_the_zero_point() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 127, -128], np.float32)
    q = quantize(x, QuantSpec("uint8", PerTensor(), nonfinite="allow"))
    assert float(q.scale) == 1
    assert q.y.tolist() == [255, 0, 128, 255, 0]
    assert (q.stats.nan_count, q.stats.inf_count) == (1, 2)
    assert (q.stats.clipped_low, q.stats.clipped_high) == (1, 1)


@pytest.mark.parametrize(
    ("target", "codes"),
    [
        ("float8e4m3fn", "7e 7f ff 7f 7f"),
        ("float8e4m3fnuz", "7f 80 80 80 80"),
        ("float8e5m2", "7b 7c fc 7c 7e"),
        ("float8e5m2fnuz", "7f 80 80 80 80"),
    ],
)
def test_without_saturation_what_is_out_of_range_is_no_number(target: str, codes: str) -> None:
    largest = float(oracle.FORMATS[target].largest)
    x = np.array([largest, 1e30, -1e30, np.inf, np.nan], np.float32)
    spec = QuantSpec(target, PerTensor(), saturate=False, nonfinite="allow")
    q = quantize(x, spec, scale=1)
    assert [b & 0x7F if target == "float8e4m3fn" else b for b in q.y.view(np.uint8)] == [
        b & 0x7F if target == "float8e4m3fn" else b for b in bytes.fromhex(codes)
    ]
    assert (q.stats.clipped_low, q.stats.clipped_high) == (1, 2)
    assert q.stats.figures()["mse"] is None
    assert q.stats.max_abs_error_at == 1


# ---------------------------------------------------------------- given scales


@pytest.mark.parametrize("source", list(SOURCES))
def test_a_plain_number_is_the_scale_of_every_group(source: str) -> None:
    x = example(source)
    q = quantize(x, QuantSpec("int8", Blocked(2, 4)), scale=0.5, zero_point=3)
    assert q.zero_point is not None
    assert q.scale.shape == q.zero_point.shape == (5, 3, 3)
    assert q.scale.dtype == (x.dtype if source in ("float16", "bfloat16") else np.float32)
    assert set(q.scale.astype(float).flat) == {0.5}
    assert set(q.zero_point.flat) == {3}
    wanted = ops.quantize_linear(x, q.scale, q.zero_point, axis=2, block_size=4)
    assert q.y.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("given", "source", "scale_dtype", "stored", "divided_in"),
    [
        (0.1, "float32", None, "float32", "float32"),
        (0.1, "float16", None, "float16", "float16"),
        (np.float16(0.1), "float32", None, "float16", "float16"),
        (np.array(0.1, ml_dtypes.bfloat16), "float32", None, "bfloat16", "bfloat16"),
        (np.array(0.25, ml_dtypes.float8_e8m0fnu), "float16", None, "float8e8m0", "float32"),
        (np.array(0.1, ml_dtypes.float8_e4m3fn), "float32", None, "float8e4m3fn", "float32"),
        (np.float64(0.1), "bfloat16", None, "bfloat16", "bfloat16"),
        (np.float32(0.1), "float32", "float16", "float16", "float16"),
        (2, "float32", None, "float32", "float32"),
    ],
    ids=str,
)
def test_a_given_scale_keeps_its_type_and_divides_as_the_standard_does(
    given: Any, source: str, scale_dtype: str | None, stored: str, divided_in: str
) -> None:
    x = example(source)
    q = quantize(x, QuantSpec("int8", PerTensor(), scale_dtype=scale_dtype), scale=given)
    assert (q.scale_dtype.name, q.precision.name) == (stored, divided_in)
    wanted = ops.quantize_linear(x, float32_scale(q.scale), output_dtype="int8")
    assert q.y.tobytes() == wanted.tobytes()
    assert q.zero_point is None


def test_a_given_scale_obeys_precision() -> None:
    x = example("float32")
    q = quantize(x, QuantSpec("int8", PerTensor(), precision="bfloat16"), scale=np.float32(0.1))
    wanted = ops.quantize_linear(x, np.float32(0.1), output_dtype="int8", precision="bfloat16")
    assert q.precision.name == "bfloat16"
    assert q.y.tobytes() == wanted.tobytes()


def test_negative_scales_have_to_be_meant() -> None:
    x = np.array([1, -2], np.float32)
    q = quantize(x, QuantSpec("int8", PerTensor(), negative_scale=True), scale=-0.5)
    assert q.y.tolist() == [-2, 4]
    assert q.dequantize().tolist() == [1, -2]


SHAPE_ADVICE = "give one value or that shape, or another --axis or --block-size"
INT8_3 = QuantSpec("int8", PerAxis(0))


@pytest.mark.parametrize(
    ("spec", "scale", "zero_point", "message"),
    [
        (
            INT8_3,
            [1.0, 2.0],
            None,
            f"scale of w: shape (2,), but the granularity needs (3,); {SHAPE_ADVICE}",
        ),
        (
            INT8_3,
            [[1.0, 2.0, 3.0]],
            None,
            f"scale of w: shape (1, 3), but the granularity needs (3,); {SHAPE_ADVICE}",
        ),
        (
            INT8_3,
            [[1.0]],
            None,
            f"scale of w: shape (1, 1), but the granularity needs (3,); {SHAPE_ADVICE}",
        ),
        (
            INT8_3,
            1,
            [1, 2],
            f"zero_point of w: shape (2,), but the granularity needs (3,); {SHAPE_ADVICE}",
        ),
        (
            INT8_3,
            [1.0, 0.0, 2.0],
            None,
            "scale of w: 0.0 at [1] in float32 cannot divide; scales must be finite and not zero",
        ),
        (
            INT8_3,
            float("nan"),
            None,
            "scale of w: nan at [0] in float32 cannot divide; scales must be finite and not zero",
        ),
        (
            INT8_3,
            [1.0, 2.0, float("inf")],
            None,
            "scale of w: inf at [2] in float32 cannot divide; scales must be finite and not zero",
        ),
        (
            INT8_3,
            1e300,
            None,
            "scale of w: inf at [0] in float32 cannot divide; scales must be finite and not zero",
        ),
        (
            QuantSpec("int8", PerTensor(), scale_dtype="float16"),
            1e-9,
            None,
            "scale of w: 0.0 in float16 cannot divide; scales must be finite and not zero",
        ),
        (
            QuantSpec("int8", PerAxis(0), precision="float16"),
            [1.0, 1e-9, 1.0],
            None,
            "scale of w: 0.0 at [1] in float16 cannot divide; scales must be finite and not zero",
        ),
        (INT8_3, -1.0, None, "scale of w: a value below zero; use --negative-scale if it is meant"),
        (
            INT8_3,
            1.0,
            128,
            "zero_point of w: a value that int8 cannot hold; use whole values in [-128, 127]",
        ),
        (
            INT8_3,
            1.0,
            0.5,
            "zero_point of w: a value that int8 cannot hold; use whole values in [-128, 127]",
        ),
        (
            INT8_3,
            1.0,
            float("nan"),
            "zero_point of w: a value that int8 cannot hold; use whole values in [-128, 127]",
        ),
        (
            QuantSpec("uint4", PerTensor()),
            1.0,
            -1,
            "zero_point of w: a value that uint4 cannot hold; use whole values in [0, 15]",
        ),
        (INT8_3, None, 1, "zero_point of w: given without a scale; give both"),
        (
            QuantSpec("int8", PerTensor(), narrow_range=True),
            1.0,
            -128,
            "zero_point of w: a value outside the narrow range; use -127 or more",
        ),
        (
            QuantSpec("float8e5m2", PerTensor(), semantics="onednn"),
            1.0,
            0,
            "zero_point of w: oneDNN Quantize takes none for float8e5m2; leave it out",
        ),
    ],
)
def test_given_values_that_do_not_fit_are_refused(
    spec: QuantSpec, scale: Any, zero_point: Any, message: str
) -> None:
    with pytest.raises(SpecError) as error:
        quantize(np.ones((3, 4), np.float32), spec, scale=scale, zero_point=zero_point, name="w")
    assert str(error.value) == message


def test_a_chosen_scale_that_precision_cannot_hold_is_named_with_its_place() -> None:
    x = np.ones((3, 70000), np.float32)
    x[2] = 1e-9
    with pytest.raises(SpecError) as error:
        quantize(x, QuantSpec("int8", PerAxis(0), precision="float16"), name="w")
    assert str(error.value) == (
        "scale of w: 0.0 at [2] in float16 cannot divide; scales must be finite and not zero"
    )


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            np.array([[1, 2], [np.nan, np.inf]], np.float32),
            "tensor w: nan at [1, 0]: 2 of 4 values are not finite",
        ),
        (np.array([1, -np.inf], np.float16), "tensor w: -inf at [1]: 1 of 2 values is not finite"),
        (np.array(np.nan, ml_dtypes.bfloat16), "tensor w: nan at []: 1 of 1 value is not finite"),
        (np.array([0, 1e39]), "tensor w: 1e+39 at [1]: 1 of 2 values is not finite in float32"),
    ],
)
def test_values_that_are_not_finite_are_refused_with_the_first_place(
    x: Array, message: str
) -> None:
    with pytest.raises(TensorError) as error:
        quantize(x, QuantSpec("int8", PerTensor()), name="w")
    advice = "mend the weights, or use --nonfinite allow to saturate"
    assert str(error.value) == f"{message}; {advice}"


@pytest.mark.parametrize(
    "x", [np.zeros(3, np.int8), np.zeros(3, bool), np.zeros(3, np.int64), np.zeros(3, complex),
          np.zeros(3, ml_dtypes.float8_e4m3fn), np.array(["a"]), np.array([None])],
    ids=lambda x: str(x.dtype),
)  # fmt: skip
def test_other_source_types_are_refused(x: Array) -> None:
    with pytest.raises(QtoolError, match=r"^w: "):
        quantize(x, QuantSpec("int8", PerTensor()), name="w")


@pytest.mark.parametrize("granularity", [PerAxis(2), Blocked(-3, 4)], ids=str)
def test_an_axis_out_of_range_is_refused(granularity: Granularity) -> None:
    with pytest.raises(SpecError, match=r"is out of range for rank 2; use -2 to 1$"):
        quantize(np.ones((2, 3), np.float32), QuantSpec("int8", granularity))


def test_the_result_holds_the_axis_counted_from_the_front() -> None:
    q = quantize(np.ones((2, 3), np.float32), QuantSpec("int8", Blocked(-1, 2)))
    assert q.spec.granularity == Blocked(1, 2)


# ---------------------------------------------------------------- oneDNN and dynamic


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0), PerAxis(-1)], ids=str)
@pytest.mark.parametrize(
    ("target", "dst"),
    [("uint8", "u8"), ("int8", "s8"), ("float8e4m3fn", "f8_e4m3"), ("float8e5m2", "f8_e5m2")],
)
def test_onednn_semantics_equal_its_operator(
    target: str, dst: str, granularity: Granularity
) -> None:
    for source in ("float32", "float16", "bfloat16", "float64"):
        x = example(source)
        q = quantize(x, QuantSpec(target, granularity, semantics="onednn"))
        arguments: dict[str, Any] = {"qtype": "per_tensor"}
        if isinstance(granularity, PerAxis):
            arguments = {"qtype": "per_channel", "axis": granularity.axis}
        zero_points = None if q.zero_point is None else q.zero_point.reshape(-1)
        wanted = ops.onednn_quantize(x, q.scale.reshape(-1), zero_points, dst=dst, **arguments)
        assert q.y.tobytes() == wanted.tobytes()


def test_onednn_adds_the_zero_point_before_it_rounds() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5], np.float32)
    for semantics, codes in (("onednn", [2, 2, 4, 0]), ("onnx", [1, 3, 3, 1])):
        q = quantize(x, QuantSpec("uint8", PerTensor(), semantics=semantics), scale=1, zero_point=1)
        assert q.y.tolist() == codes


@pytest.mark.parametrize("scale", [np.float16(0.1), np.array(0.1, ml_dtypes.bfloat16)], ids=str)
def test_onednn_divides_in_float32_whatever_the_scale(scale: Any) -> None:
    x = example("float32")
    q = quantize(x, QuantSpec("int8", PerTensor(), semantics="onednn"), scale=scale)
    assert q.precision.name == "float32"
    wanted = ops.onednn_quantize(x, [float(scale)], dst="s8")
    assert q.y.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("target", ["uint8", "int8"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64"])
def test_dynamic_semantics_equal_their_operator(target: str, source: str) -> None:
    x = example(source)
    q = quantize(x, QuantSpec(target, PerTensor(), semantics="dynamic"))
    y, scale, zero_point = ops.dynamic_quantize_linear(x, dtype=target)
    assert q.zero_point is not None
    assert q.y.tobytes() == y.tobytes()
    assert q.scale.tobytes() == scale.tobytes()
    assert q.zero_point.tobytes() == zero_point.tobytes()


def test_dynamic_semantics_refuse_nan_whatever_is_allowed() -> None:
    spec = QuantSpec("uint8", PerTensor(), semantics="dynamic", nonfinite="allow")
    with pytest.raises(TensorError, match=r"^tensor w: nan at \[0\]"):
        quantize(np.array([np.nan], np.float32), spec, name="w")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            QuantSpec("uint8", PerTensor(), symmetric=False, negative_scale=True),
            "negative_scale: only symmetric grids of integers have a larger side to choose; leave "
            "it out, or give scales",
        ),
        (
            QuantSpec("float8e5m2", PerTensor(), negative_scale=True),
            "negative_scale: only symmetric grids of integers have a larger side to choose; leave "
            "it out, or give scales",
        ),
        (
            QuantSpec("int4", PerTensor(), negative_scale=True, scale_dtype="float8e8m0"),
            "negative_scale: float8e8m0 scales have no sign; leave it out",
        ),
        (
            QuantSpec("int16", PerTensor(), method="optimal"),
            "method: optimal float32 scales of int16 take 32768 breakpoints per element; store the "
            "scales as float16 or bfloat16, or use mse",
        ),
    ],
)
def test_scales_that_cannot_be_chosen_so_are_refused(spec: QuantSpec, message: str) -> None:
    with pytest.raises(SpecError) as error:
        quantize(np.ones((3, 4), np.float32), spec)
    assert str(error.value) == message


@pytest.mark.parametrize("scale", [True, 1j])
def test_scales_that_are_no_real_numbers_are_refused(scale: Any) -> None:
    kind = "bool" if scale is True else "complex128"
    with pytest.raises(SpecError) as error:
        quantize(np.ones(3, np.float32), QuantSpec("int8", PerTensor()), scale=scale)
    assert str(error.value).startswith(f"scale of x: {kind} values; give ")

"""Granularities, QuantSpec and TensorInfo: what they compute and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.dtypes import DTYPES
from qtool.errors import QtoolError, SpecError
from qtool.spec import (
    Blocked,
    PerAxis,
    PerTensor,
    QuantSpec,
    TensorInfo,
    Tiled,
    bytes_of,
    describe,
    normalize_axis,
    phrase,
    reader_of,
)


@pytest.mark.parametrize(
    ("axis", "rank", "expected"), [(0, 1, 0), (-1, 1, 0), (1, 2, 1), (-2, 2, 0), (3, 4, 3)]
)
def test_axes_count_from_either_end(axis: int, rank: int, expected: int) -> None:
    assert normalize_axis(axis, rank) == expected


@pytest.mark.parametrize(
    ("axis", "rank", "message"),
    [
        (2, 2, "axis: 2 is out of range for rank 2; use -2 to 1"),
        (-3, 2, "axis: -3 is out of range for rank 2; use -2 to 1"),
        (1, 1, "axis: 1 is out of range for rank 1; use -1 to 0"),
        (0, 0, "axis: 0 is out of range for rank 0; a scalar has no axis"),
    ],
)
def test_axes_out_of_range_are_refused(axis: int, rank: int, message: str) -> None:
    with pytest.raises(SpecError) as error:
        normalize_axis(axis, rank)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("granularity", "shape", "resolved", "scale_shape"),
    [
        (PerTensor(), (4, 33), PerTensor(), ()),
        (PerTensor(), (), PerTensor(), ()),
        (PerAxis(0), (4, 33), PerAxis(0), (4,)),
        (PerAxis(-1), (4, 33), PerAxis(1), (33,)),
        (Blocked(1, 16), (4, 33), Blocked(1, 16), (4, 3)),
        (Blocked(-1, 33), (4, 33), Blocked(1, 33), (4, 1)),
        (Blocked(-2, 3), (4, 33), Blocked(0, 3), (2, 33)),
        (Blocked(0, 100), (4, 33), Blocked(0, 100), (1, 33)),
        (Blocked(1, 1), (2, 3, 4), Blocked(1, 1), (2, 3, 4)),
        (Blocked(1, 2), (2, 0, 4), Blocked(1, 2), (2, 0, 4)),
        (Tiled((128, 128)), (300, 200), Tiled((128, 128)), (3, 2)),
        (Tiled((4, 3)), (4, 33), Tiled((4, 3)), (1, 11)),
        (Tiled((3, 100)), (2, 4, 33), Tiled((3, 100)), (2, 2, 1)),
        (Tiled((2, 2)), (0, 5), Tiled((2, 2)), (0, 3)),
    ],
    ids=str,
)
def test_granularities_know_the_shape_of_their_scales(
    granularity: Any, shape: tuple[int, ...], resolved: Any, scale_shape: tuple[int, ...]
) -> None:
    assert granularity.resolve(shape) == resolved
    assert granularity.scale_shape(shape) == scale_shape
    assert resolved.scale_shape(shape) == scale_shape


def test_granularities_have_the_names_that_reports_use() -> None:
    names = [PerTensor().name, PerAxis(0).name, Blocked(0, 1).name, Tiled((1, 1)).name]
    assert names == ["per_tensor", "per_axis", "blocked", "tiled"]
    assert [describe(g) for g in (PerTensor(), PerAxis(1), Blocked(0, 4), Tiled((3, 5)))] == [
        {"granularity": "per_tensor", "axis": None, "block_size": None, "tile": None},
        {"granularity": "per_axis", "axis": 1, "block_size": None, "tile": None},
        {"granularity": "blocked", "axis": 0, "block_size": 4, "tile": None},
        {"granularity": "tiled", "axis": None, "block_size": None, "tile": [3, 5]},
    ]


@pytest.mark.parametrize("granularity", [PerAxis(2), PerAxis(-3), Blocked(2, 4)], ids=str)
def test_an_axis_that_the_shape_has_not_is_refused(granularity: Any) -> None:
    with pytest.raises(SpecError, match=r"^axis: .* is out of range for rank 2; use -2 to 1$"):
        granularity.resolve((4, 33))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_tiles_need_rows_and_columns(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError) as error:
        Tiled((2, 2)).resolve(shape)
    assert str(error.value) == f"tile: a tensor of rank {len(shape)} has none; use --block-size"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 4), "tile: must be at least 1, got 0"),
        ((4, -1), "tile: must be at least 1, got -1"),
        ((4, 2**63), f"tile: {2**63} does not fit 64 bits; use less"),
        ((4,), "tile: (4,) is not rows and columns; use (128, 128)"),
        ((4, 4, 4), "tile: (4, 4, 4) is not rows and columns; use (128, 128)"),
    ],
)
def test_tiles_that_are_none_are_refused(shape: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Tiled(shape)
    assert str(error.value) == message


@pytest.mark.parametrize("block_size", [0, -1])
def test_blocks_hold_at_least_one_element(block_size: int) -> None:
    with pytest.raises(SpecError) as error:
        Blocked(0, block_size)
    assert str(error.value) == f"block_size: must be at least 1, got {block_size}"


@pytest.mark.parametrize(
    ("dtype", "arguments", "symmetric", "method"),
    [
        ("int8", {}, True, "absmax"),
        ("int16", {}, True, "absmax"),
        ("int4", {}, True, "mse"),
        ("int4", {"symmetric": False}, False, "mse"),
        ("int4", {"method": "absmax"}, True, "absmax"),
        ("int4", {"method": "minmax"}, False, "minmax"),
        ("int4", {"precision": "float32"}, True, "mse"),
        ("int4", {"precision": "float16"}, True, "absmax"),
        ("int4", {"scale_dtype": "float8e8m0", "mx_rule": "even"}, True, "absmax"),
        ("uint8", {}, False, "minmax"),
        ("uint2", {}, False, "mse"),
        ("uint4", {"symmetric": True}, True, "mse"),
        ("uint4", {"precision": "bfloat16"}, False, "minmax"),
        ("float8e4m3fn", {}, True, "absmax"),
        ("float8e4m3fn", {"scale_dtype": "float8e8m0"}, True, "mse"),
        ("float8e4m3fn", {"scale_dtype": "float8e8m0", "saturate": False}, True, "absmax"),
        ("float6e2m3", {}, True, "absmax"),
        ("float6e2m3", {"scale_dtype": "float8e8m0"}, True, "mse"),
        ("uint8", {"scale_dtype": "float8e8m0"}, False, "mse"),
        ("uint8", {"method": "mse"}, False, "mse"),
        ("uint8", {"method": "mse", "symmetric": True}, True, "mse"),
        ("int8", {"method": "entropy"}, True, "entropy"),
        ("float4e2m1", {}, True, "mse"),
        ("uint8", {"symmetric": True}, True, "absmax"),
        ("int8", {"symmetric": False}, False, "minmax"),
        ("uint8", {"method": "absmax"}, True, "absmax"),
        ("int8", {"method": "minmax"}, False, "minmax"),
        ("int8", {"method": "percentile:99.9"}, True, "percentile:99.9"),
        ("uint8", {"method": "percentile:100"}, False, "percentile:100"),
        ("uint8", {"method": "percentile:50", "symmetric": True}, True, "percentile:50"),
        ("uint8", {"semantics": "dynamic"}, False, "minmax"),
        ("int8", {"semantics": "dynamic"}, False, "minmax"),
    ],
)
def test_symmetry_and_method_follow_from_the_type_and_from_each_other(
    dtype: str, arguments: dict[str, Any], symmetric: bool, method: str
) -> None:
    spec = QuantSpec(dtype, PerTensor(), **arguments)
    assert (spec.symmetric, spec.method) == (symmetric, method)


@pytest.mark.parametrize(
    ("dtype", "symmetric", "expected"),
    [("int8", True, False), ("int8", False, True), ("uint8", True, True), ("uint8", False, True),
     ("float8e5m2", True, False)],
)  # fmt: skip
def test_zero_points_other_than_zero(dtype: str, symmetric: bool, expected: bool) -> None:
    assert QuantSpec(dtype, PerTensor(), symmetric=symmetric).has_zero_point is expected


def test_percentile_is_the_number_in_the_method() -> None:
    assert QuantSpec("int8", PerTensor(), method="percentile:99.95").percentile == 99.95
    assert QuantSpec("int8", PerTensor()).percentile is None


@pytest.mark.parametrize(
    ("dtype", "narrow", "qmin"),
    [("int8", False, -128), ("int8", True, -127), ("int4", True, -7), ("uint8", True, 1)],
)
def test_narrow_range_raises_the_lowest_code(dtype: str, narrow: bool, qmin: float) -> None:
    assert QuantSpec(dtype, PerTensor(), narrow_range=narrow).qmin == qmin


def test_dynamic_int8_starts_at_minus_127() -> None:
    assert QuantSpec("int8", PerTensor(), semantics="dynamic").qmin == -127
    assert QuantSpec("uint8", PerTensor(), semantics="dynamic").qmin == 0


def test_types_are_resolved_and_zero_means_none() -> None:
    spec = QuantSpec(22, PerAxis(0), scale_dtype="bfloat16", precision=10)
    assert spec.dtype is DTYPES["int4"]
    assert spec.scale_dtype is DTYPES["bfloat16"]
    assert spec.precision is DTYPES["float16"]
    spec = QuantSpec("int4", PerAxis(0), scale_dtype=None, precision=0)
    assert (spec.scale_dtype, spec.precision) == (None, None)


def test_at_changes_the_granularity_alone() -> None:
    spec = QuantSpec("uint4", PerAxis(0), method="percentile:99", narrow_range=True,
                     scale_dtype="float16", nonfinite="allow", negative_scale=True)  # fmt: skip
    moved = spec.at(Blocked(1, 32))
    assert moved.granularity == Blocked(1, 32)
    assert moved.at(PerAxis(0)) == spec


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn"])
def test_scale_types(name: str) -> None:
    spec = QuantSpec("int4", PerTensor(), scale_dtype=name)
    assert spec.storage_dtype(DTYPES["float16"], DTYPES["float32"]) is DTYPES[name]


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("float32", None, "float32"), ("float64", None, "float32"), ("int32", None, "float32"),
        ("float16", None, "float16"), ("bfloat16", None, "bfloat16"),
        ("float32", "float16", "float16"), ("float16", "float64", "float16"),
        ("bfloat16", "float32", "float32"),
    ],
)  # fmt: skip
def test_scales_are_stored_in_their_own_type_or_that_of_the_tensor(
    source: str, given: str | None, expected: str
) -> None:
    spec = QuantSpec("int4", PerTensor())
    stored = spec.storage_dtype(DTYPES[source], DTYPES[given] if given else None)
    assert stored is DTYPES[expected]


METHODS = "absmax, minmax, mse, optimal, entropy or percentile:P with P in (0, 100]"
# fmt: off
REFUSED = [
    ("float32", PerTensor(), {}, "dtype: QuantizeLinear does not produce float32; use one of "),
    ("int9", PerTensor(), {},
     "dtype: 'int9' is not an element type; did you mean int8, int4 or int2?"),
    ("int8", PerTensor(), {"method": "ms"}, "method: 'ms' is unknown; did you mean mse?"),
    ("int8", PerTensor(), {"scale_dtype": "bfloat"},
     "scale_dtype: 'bfloat' is not an element type; did you mean bfloat16, float32 or float16?"),
    ("int8", PerTensor(), {"method": "median"},
     f"method: 'median' is unknown; use {METHODS}"),
    ("int8", PerTensor(), {"method": "percentile"},
     f"method: 'percentile' is unknown; use {METHODS}"),
    ("int8", PerTensor(), {"method": "percentile:-1"},
     f"method: 'percentile:-1' is unknown; use {METHODS}"),
    ("int8", PerTensor(), {"method": "percentile:nan"},
     f"method: 'percentile:nan' is unknown; use {METHODS}"),
    ("int8", PerTensor(), {"method": "percentile:0"},
     "method: percentile 0 is outside (0, 100]; use for example percentile:99.9"),
    ("int8", PerTensor(), {"method": "percentile:100.1"},
     "method: percentile 100.1 is outside (0, 100]; use for example percentile:99.9"),
    ("int8", PerTensor(), {"method": "mse", "precision": "float16"},
     "method: mse does not go with precision float16; use absmax or minmax"),
    ("int8", PerTensor(), {"method": "mse", "semantics": "onednn"},
     "method: mse does not go with semantics onednn; use absmax or minmax"),
    ("uint8", PerTensor(), {"method": "mse", "semantics": "dynamic"},
     "method: mse does not go with semantics dynamic; use absmax or minmax"),
    ("float8e5m2", PerTensor(), {"method": "mse", "saturate": False},
     "method: mse does not go with saturation turned off; use absmax or minmax"),
    ("int4", PerTensor(), {"method": "mse", "scale_dtype": "float8e8m0", "mx_rule": "even"},
     "mx_rule: mse compares scales instead of following a rule; leave one of them out"),
    ("float4e2m1", PerTensor(), {"method": "entropy"},
     "method: entropy needs codes in equal steps, float4e2m1 has others"),
    ("int8", PerTensor(), {"method": "absmax", "symmetric": False},
     "method: absmax is symmetric; use --symmetric or another method"),
    ("int8", PerTensor(), {"method": "minmax", "symmetric": True},
     "method: minmax is asymmetric; use --asymmetric or another method"),
    ("float8e4m3fn", PerTensor(), {"symmetric": False},
     "symmetric: float8e4m3fn has no zero point to shift its grid by; "
     "quantize float types symmetrically"),
    ("float4e2m1", PerTensor(), {"method": "minmax"},
     "method: float4e2m1 has no zero point to shift its grid by; "
     "quantize float types symmetrically"),
    ("float8e4m3fn", PerTensor(), {"narrow_range": True},
     "narrow_range: float8e4m3fn is a float type; it is for integer types"),
    ("int8", PerTensor(), {"saturate": False},
     "saturate: int8 always saturates; doing without is for the float8 types"),
    ("float4e2m1", PerTensor(), {"saturate": False},
     "saturate: float4e2m1 always saturates; doing without is for the float8 types"),
    ("int8", PerTensor(), {"nonfinite": "skip"},
     "nonfinite: 'skip' is unknown; use error or allow"),
    ("int8", PerTensor(), {"semantics": "tflite"},
     "semantics: 'tflite' is unknown; use onnx, onednn, dynamic"),
    ("int8", PerTensor(), {"scale_dtype": "float64"},
     "scale_dtype: float64 is not allowed; "
     "use float32, float16, bfloat16, float8e8m0, float8e4m3fn"),
    ("int8", PerTensor(), {"precision": "float64"},
     "precision: float64 is not allowed; use float32, float16, bfloat16"),
    ("int4", PerTensor(), {"semantics": "onednn"},
     "semantics: oneDNN Quantize does not produce int4; "
     "use uint8, int8, float8e4m3fn or float8e5m2"),
    ("int8", Blocked(0, 4), {"semantics": "onednn"},
     "semantics: oneDNN Quantize has no blocks; quantize per tensor or per axis"),
    ("int8", PerTensor(), {"semantics": "onednn", "precision": "float16"},
     "precision: oneDNN Quantize divides in float32; leave it out"),
    ("float8e5m2", PerTensor(), {"semantics": "onednn", "saturate": False},
     "saturate: oneDNN Quantize always saturates; leave it out"),
    ("int4", PerTensor(), {"semantics": "dynamic"},
     "dtype: DynamicQuantizeLinear gives uint8 or int8; use `qtool quantize` for int4"),
    ("int8", PerAxis(0), {"semantics": "dynamic"},
     "granularity: DynamicQuantizeLinear has one scale per tensor; use PerTensor()"),
    ("int8", Tiled((2, 2)), {"semantics": "dynamic"},
     "granularity: DynamicQuantizeLinear has one scale per tensor; use PerTensor()"),
    ("int8", Tiled((2, 2)), {"semantics": "onednn"},
     "semantics: oneDNN Quantize has no blocks; quantize per tensor or per axis"),
]
# fmt: on


@pytest.mark.parametrize(("dtype", "granularity", "arguments", "message"), REFUSED)
def test_contradictions_are_refused_at_construction(
    dtype: str, granularity: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        QuantSpec(dtype, granularity, **arguments)
    assert str(error.value).startswith(message)
    if not message.endswith("use one of "):
        assert str(error.value) == message


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8e4m3fn", "float8e5m2"])
def test_what_onednn_produces_is_accepted(dtype: str) -> None:
    for granularity in (PerTensor(), PerAxis(1)):
        spec = QuantSpec(dtype, granularity, semantics="onednn", precision="float32")
        assert spec.semantics == "onednn"


@pytest.mark.parametrize(
    ("shape", "size"), [((), 1), ((4, 33), 132), ((0, 3), 0), ((2**40, 2**40), 2**80)]
)
def test_tensor_info_counts_elements(shape: tuple[int, ...], size: int) -> None:
    assert TensorInfo("w", shape, DTYPES["float32"], 4 * size).size == size


@given(
    name=st.sampled_from(["uint8", "bfloat16", "float32", "int64"]),
    count=st.integers(1, 40),
    data=st.data(),
)
def test_any_run_of_the_bytes_of_a_tensor_can_be_read(
    name: str, count: int, data: st.DataObject
) -> None:
    """Aligned with its elements or not; the elements that are asked for are those of the run."""
    dtype = DTYPES[name]
    size = dtype.numpy.itemsize
    held = data.draw(st.binary(min_size=count * size, max_size=count * size))
    read, asked = reader_of(np.frombuffer(held, dtype.numpy)), []

    def watched(start: int, out: Any) -> None:
        asked.append((start, out.size))
        read(start, out)

    start = data.draw(st.integers(0, count * size))
    stop = data.draw(st.integers(start, count * size))
    out = np.empty(stop - start, np.uint8)
    bytes_of(watched, dtype)(start, out)
    assert out.tobytes() == held[start:stop]
    assert asked == [(start // size, -(-stop // size) - start // size)]


def test_an_error_without_a_remedy_is_thing_and_rule() -> None:
    error = QtoolError("thing", "rule")
    assert (str(error), error.remedy) == ("thing: rule", None)
    assert str(QtoolError("thing", "rule", "remedy")) == "thing: rule; remedy"


@pytest.mark.parametrize(
    ("granularity", "words"),
    [
        (PerTensor(), "per tensor"), (PerAxis(1), "per axis 1"),
        (Blocked(0, 32), "in blocks of 32 along axis 0"), (Tiled((2, 3)), "in tiles of 2x3"),
    ],
)  # fmt: skip
def test_granularities_in_words_of_a_message(granularity: Any, words: str) -> None:
    assert phrase(granularity) == words

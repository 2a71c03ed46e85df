"""Chosen scales and zero points against exact rational arithmetic, group by group."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from qtool import scales
from qtool.dtypes import DTYPES, TARGETS
from qtool.engine import quantize
from qtool.errors import TensorError
from qtool.scales.ranges import largest
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, Tiled

Array = NDArray[Any]

PLAIN = {True: "absmax", False: "minmax"}  # the method of the whole range, by symmetry
STORAGES = ["float32", "float16", "bfloat16", "float8e4m3fn", "float8e8m0"]
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133,
            "float8e4m3fn": 2.0**-9}  # fmt: skip
RANGES = {name: (Fraction(low), Fraction(high)) for name, (low, high) in oracle.INTEGERS.items()}
RANGES |= {name: (-f.largest, f.largest) for name, f in oracle.FORMATS.items()
           if name in oracle.EXPONENT_BITS}  # fmt: skip


def stored(exact: Fraction, storage: str) -> float:
    """An exact scale in its storage type."""
    if exact == 0:
        return 1.0
    if storage == "float8e8m0":
        exponent = -127
        while exponent < 127 and Fraction(2) ** exponent < exact:
            exponent += 1
        return math.ldexp(1.0, exponent)
    fmt = oracle.FORMATS[storage]
    nearest = min(oracle.nearest(exact, fmt), fmt.largest)
    return max(float(nearest), SMALLEST[storage])


def expected(
    low: float, high: float, target: str, storage: str, *, symmetric: bool, narrow: bool
) -> tuple[float, int | None]:
    """Scale and zero point of a group whose values span [low, high]."""
    qmin, qmax = RANGES[target]
    qmin += narrow
    if symmetric:
        unsigned = target.startswith("uint")
        half = (qmax + 1) / 2
        absmax = max(abs(Fraction(low)), abs(Fraction(high)))
        scale = stored(absmax / (half - 1 if unsigned else qmax), storage)
        return scale, int(half) if unsigned else None
    bottom, top = min(low, 0.0), max(high, 0.0)
    extent = Fraction(top - bottom)  # rounded to float64: [-1e-20, 255] is as wide as [0, 255]
    scale = stored(extent / (qmax - qmin), storage)
    zero = Fraction(0) if top == bottom else round(qmin - Fraction(bottom) / Fraction(scale))
    return scale, int(min(max(zero, qmin), qmax))


def group_values(x: Array, granularity: Granularity) -> dict[tuple[int, ...], list[float]]:
    """The elements of every group, in C order, by the index of its scale."""
    groups: dict[tuple[int, ...], list[float]] = {
        index: [] for index in np.ndindex(granularity.scale_shape(x.shape))
    }
    attributes = granularity.attributes
    axis, size = attributes.get("axis", 0), attributes.get("block_size", 0)
    for index in np.ndindex(x.shape):
        if isinstance(granularity, Tiled):
            *others, row, column = index
            tile = (*others, row // granularity.rows, column // granularity.columns)
            groups[tile].append(float(x[index]))
            continue
        where = oracle.scale_index(index, x.shape, axis, size, isinstance(granularity, PerTensor))
        groups[where].append(float(x[index]))
    return groups


def many_groups() -> Array:
    """Rows: every kind of group, and random ones of every magnitude; 0 stands last in some."""
    tiny, huge = 1e-45, 1.2e34
    rows = [
        [0.0, 0.0, 0.0], [-0.0, 0.0, -0.0], [tiny, 0.0, 0.0], [-tiny, tiny, tiny],
        [huge, -huge, 1.0], [huge, huge, huge], [-huge, 0.0, -1.0], [1.0, 2.0, 3.0],
        [-3.0, -2.0, -1.0], [5e-8, -5e-8, 1e-8], [7e4, 1e5, -2e6], [448.0, -448.0, 1.0],
        [127.0, -128.0, 0.5], [2e-39, -1e-39, 1e-40], [255.0, -1e-20, 0.0],
    ]  # fmt: skip
    random = np.random.default_rng(1)
    spread = random.normal(size=(33, 3)) * 10.0 ** random.uniform(-44, 33, (33, 1))
    return np.concatenate([np.array(rows), spread]).astype(np.float32)


SYMMETRIES = [
    pytest.param(name, symmetric, narrow, id=f"{name}-{'sym' if symmetric else 'asym'}"
                 + ("-narrow" if narrow else ""))
    for name in RANGES
    for symmetric in ((True, False) if name in oracle.INTEGERS else (True,))
    for narrow in ((False, True) if name in oracle.INTEGERS else (False,))
]  # fmt: skip


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("target", "symmetric", "narrow"), SYMMETRIES)
def test_scale_and_zero_point_equal_exact_arithmetic(
    target: str, symmetric: bool, narrow: bool, storage: str
) -> None:
    x = many_groups()
    spec = QuantSpec(target, PerAxis(0), method=PLAIN[symmetric], narrow_range=narrow)
    scale, zero_point = scales.choose(x, spec, DTYPES[storage])
    wanted = [
        expected(
            float(row.min()), float(row.max()), target, storage, symmetric=symmetric, narrow=narrow
        )
        for row in x
    ]
    assert scale.dtype == DTYPES[storage].numpy
    assert scale.astype(np.float64).tolist() == [pair[0] for pair in wanted]
    if wanted[0][1] is None:
        assert zero_point is None
    else:
        assert zero_point is not None
        assert zero_point.dtype == DTYPES[target].numpy
        assert zero_point.astype(int).tolist() == [pair[1] for pair in wanted]


def test_the_targets_of_these_tests_are_all_there_are() -> None:
    assert set(RANGES) == {dtype.name for dtype in TARGETS}


LAYOUTS = [
    ((), PerTensor()), ((1,), PerTensor()), ((2, 3, 5), PerTensor()), ((7,), PerAxis(0)),
    ((2, 3, 5), PerAxis(0)), ((2, 3, 5), PerAxis(1)), ((2, 3, 5), PerAxis(2)),
    ((2, 3, 2, 4), PerAxis(2)), ((7,), Blocked(0, 3)), ((2, 7), Blocked(1, 4)),
    ((7, 2), Blocked(0, 4)), ((2, 6), Blocked(1, 3)), ((2, 3, 5), Blocked(1, 2)),
    ((2, 5, 3), Blocked(1, 5)), ((2, 5, 3), Blocked(2, 1)), ((2, 5, 3), Blocked(1, 100)),
    ((2, 3, 2, 5), Blocked(3, 2)), ((0,), PerTensor()), ((0, 3), PerAxis(1)),
    ((0, 3), PerAxis(0)), ((2, 0), Blocked(1, 4)), ((0, 5), Blocked(1, 4)),
    ((4, 6), Tiled((2, 3))), ((5, 7), Tiled((2, 3))), ((5, 7), Tiled((100, 100))),
    ((1, 7), Tiled((2, 3))), ((7, 1), Tiled((3, 2))), ((2, 5, 7), Tiled((3, 4))),
    ((2, 2, 3, 4), Tiled((2, 1))), ((3, 4), Tiled((1, 1))), ((0, 5), Tiled((2, 2))),
    ((5, 0), Tiled((2, 2))), ((0, 2, 3), Tiled((2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "granularity"), LAYOUTS, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_every_group_gets_the_scale_of_its_own_elements(
    shape: tuple[int, ...], granularity: Granularity, symmetric: bool
) -> None:
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    spec = QuantSpec("int8", granularity, symmetric=symmetric)
    scale, zero_point = scales.choose(x, spec, DTYPES["float32"])
    assert scale.shape == granularity.scale_shape(shape)
    for index, values in group_values(x, granularity).items():
        wanted = expected(
            min(values, default=0.0),
            max(values, default=0.0),
            "int8",
            "float32",
            symmetric=symmetric,
            narrow=False,
        )
        found = None if zero_point is None else int(zero_point[index])
        assert (float(scale[index]), found) == wanted


@pytest.mark.parametrize(("shape", "granularity"), LAYOUTS, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("p", ["50", "90", "99.9", "100"])
@pytest.mark.parametrize("holes", [False, True], ids=["finite", "nan-and-inf"])
def test_percentiles_are_numpys_of_the_finite_values_of_a_group(
    shape: tuple[int, ...], granularity: Granularity, symmetric: bool, p: str, holes: bool
) -> None:
    random = np.random.default_rng(3)
    x = random.normal(size=shape).astype(np.float32)
    if holes:
        x = np.where(random.random(shape) < 0.3, np.float32(np.nan), x)
        x = np.where(random.random(shape) < 0.2, np.float32(-np.inf), x)
    spec = QuantSpec(
        "int8", granularity, symmetric=symmetric, method=f"percentile:{p}", nonfinite="allow"
    )
    scale, zero_point = scales.choose(x, spec, DTYPES["float32"])
    for index, values in group_values(x, granularity).items():
        low, high = percentile_range([v for v in values if math.isfinite(v)], float(p), symmetric)
        wanted = expected(low, high, "int8", "float32", symmetric=symmetric, narrow=False)
        found = None if zero_point is None else int(zero_point[index])
        assert (float(scale[index]), found) == wanted


def percentile_range(values: list[float], p: float, symmetric: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    if symmetric:
        high = float(np.percentile(np.abs(values), p))
        low = -high
    else:
        low = min(0.0, float(np.percentile(values, 100 - p)))
        high = max(0.0, float(np.percentile(values, p)))
    return (low, high) if high > low else (min(values), max(values))


def test_percentile_100_is_the_whole_range() -> None:
    x = many_groups()
    for symmetric in (True, False):
        whole = QuantSpec("int8", PerAxis(0), symmetric=symmetric)
        percentile = QuantSpec("int8", PerAxis(0), symmetric=symmetric, method="percentile:100")
        for a, b in zip(
            scales.choose(x, whole, DTYPES["float32"]),
            scales.choose(x, percentile, DTYPES["float32"]),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_a_group_whose_percentile_is_zero_keeps_its_whole_range() -> None:
    x = np.zeros((1, 100), np.float32)
    x[0, 7] = 12.7
    spec = QuantSpec("int8", PerAxis(0), method="percentile:90")
    scale, _ = scales.choose(x, spec, DTYPES["float32"])
    assert scale.tolist() == [float(np.float32(float(np.float32(12.7)) / 127))]


def test_an_all_zero_channel_gets_scale_one_and_codes_of_zero() -> None:
    x = np.array([[0, 0], [1, -1], [-0.0, 0]], np.float32)
    q = quantize(x, QuantSpec("int8", PerAxis(0)))
    assert q.scale.tolist() == [1.0, float.fromhex("0x1.020408p-7"), 1.0]
    assert q.y.tolist() == [[0, 0], [127, -127], [0, 0]]
    assert q.dequantize().tolist() == [[0, 0], [1, -1], [0, 0]]


def test_a_scale_that_float16_cannot_hold_becomes_its_smallest_value() -> None:
    x = np.array([3e-6, -3e-6, 1e-6, 0], np.float16)
    q = quantize(x, QuantSpec("int8", PerTensor()))
    assert q.scale.dtype == np.float16
    assert float(q.scale) == 2.0**-24
    assert q.y.tolist() == [50, -50, 17, 0]


@pytest.mark.parametrize("target", ["uint2", "uint4", "uint8", "uint16"])
def test_zeros_stay_zero_in_a_narrow_unsigned_range(target: str) -> None:
    x = np.array([[0, 0], [1, 3], [-1, 3]], np.float32)
    for symmetric in (True, False):
        spec = QuantSpec(target, PerAxis(0), symmetric=symmetric, narrow_range=True)
        q = quantize(x, spec)
        assert q.dequantize()[0].tolist() == [0, 0]
        assert int(q.y.astype(int).min()) >= 1


@pytest.mark.parametrize(
    ("target", "arguments", "x", "scale", "zero_point", "codes"),
    [
        pytest.param("int8", {}, [-128, 127], 128 / 127, None, [-127, 126], id="int8"),
        pytest.param(
            "int8", {"narrow_range": True}, [-127, 127], 1, None, [-127, 127], id="int8-narrow"
        ),
        pytest.param(
            "int4", {"method": "absmax"}, [-7, 7, 3.5], 1, None, [-7, 7, 4], id="int4-absmax"
        ),
        pytest.param("int2", {"method": "absmax"}, [-2, 1], 2, None, [-1, 0], id="int2-absmax"),
        pytest.param("int2", {}, [-2, 1], 1, None, [-2, 1], id="int2"),
        pytest.param(
            "int8", {"symmetric": False}, [-55, 200], 1, -73, [-128, 127], id="int8-asymmetric"
        ),
        pytest.param(
            "int8",
            {"symmetric": False, "narrow_range": True},
            [-54, 200],
            1,
            -73,
            [-127, 127],
            id="int8-asymmetric-narrow",
        ),
        pytest.param("uint8", {}, [-55, 200], 1, 55, [0, 255], id="uint8"),
        pytest.param("uint8", {}, [10, 255], 1, 0, [10, 255], id="uint8-all-above-zero"),
        pytest.param("uint8", {}, [-255, -10], 1, 255, [0, 245], id="uint8-all-below-zero"),
        pytest.param(
            "uint8", {"narrow_range": True}, [-55, 199], 1, 56, [1, 255], id="uint8-narrow"
        ),
        pytest.param(
            "uint8", {"symmetric": True}, [-127, 64], 1, 128, [1, 192], id="uint8-symmetric"
        ),
        pytest.param("uint4", {"symmetric": True}, [-14, 14], 2, 8, [1, 15], id="uint4-symmetric"),
        pytest.param("uint4", {"method": "absmax"}, [-14, 14], 2, 8, [1, 15], id="uint4-absmax"),
        pytest.param("uint2", {"symmetric": True}, [-3, 3], 3, 2, [1, 3], id="uint2-symmetric"),
        pytest.param("uint2", {"method": "absmax"}, [-3, 3], 3, 2, [1, 3], id="uint2-absmax"),
        pytest.param("uint16", {}, [0, 65535], 1, 0, [0, 65535], id="uint16"),
        pytest.param("float4e2m1", {}, [-12, 1], 2, None, [-6, 0.5], id="float4e2m1"),
        pytest.param(
            "float4e2m1", {"method": "absmax"}, [-12, 1], 2, None, [-6, 0.5], id="float4e2m1-absmax"
        ),
        pytest.param("float8e5m2", {}, [57344, 1], 1, None, [57344, 1], id="float8e5m2"),
    ],
)
def test_ranges_by_hand(
    target: str,
    arguments: dict[str, Any],
    x: list[float],
    scale: float,
    zero_point: int | None,
    codes: list[float],
) -> None:
    q = quantize(np.array(x, np.float32), QuantSpec(target, PerTensor(), **arguments))
    assert float(q.scale) == float(np.float32(scale))
    assert (None if q.zero_point is None else int(q.zero_point)) == zero_point
    assert q.y.astype(np.float64).tolist() == codes


@pytest.mark.parametrize(
    ("storage", "exact", "kept"),
    [
        ("float32", 0.0, 1.0), ("float32", 1e-50, 2.0**-149),
        ("float32", 1e300, 2.0**128 - 2.0**104),
        ("float32", 1 + 2.0**-24, 1.0), ("float32", 1 + 3 * 2.0**-24, 1 + 2.0**-22),
        ("float16", 1e-9, 2.0**-24), ("float16", 2.0**-24 * 1.5, 2.0**-23),
        ("float16", 65519.0, 65504.0), ("float16", 1e6, 65504.0),
        ("float16", 1 + 2.0**-11 + 2.0**-30, 1 + 2.0**-10), ("float16", 1 + 2.0**-11, 1.0),
        ("bfloat16", 1 + 2.0**-8, 1.0), ("bfloat16", 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),
        ("bfloat16", 1e-39, 2.0**-133 * 11), ("bfloat16", 1e-45, 2.0**-133),
        ("bfloat16", 3.4e38, 255 * 2.0**120),
        ("float8e4m3fn", 1e-9, 2.0**-9), ("float8e4m3fn", 1e9, 448.0),
        ("float8e4m3fn", 1.0625, 1.0), ("float8e4m3fn", 1.1875, 1.25),
        ("float8e8m0", 1.0, 1.0), ("float8e8m0", 1 + 2.0**-52, 2.0), ("float8e8m0", 1.99, 2.0),
        ("float8e8m0", 0.75, 1.0), ("float8e8m0", 0.5, 0.5), ("float8e8m0", 1e-45, 2.0**-127),
        ("float8e8m0", 1e39, 2.0**127), ("float8e8m0", 0.0, 1.0),
    ],
)  # fmt: skip
def test_scales_are_rounded_once_to_their_storage_type(
    storage: str, exact: float, kept: float
) -> None:
    found = scales.stored(np.array([exact]), DTYPES[storage])
    assert found.dtype == DTYPES[storage].numpy
    assert found.astype(np.float64).tolist() == [kept]


@pytest.mark.parametrize("method", ["absmax", "minmax", "percentile:90"])
@pytest.mark.parametrize(
    "granularity", [PerAxis(0), Blocked(1, 4), PerTensor(), Tiled((1, 4))], ids=str
)
def test_nan_and_infinity_do_not_count(method: str, granularity: Granularity) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, np.nan], [1, np.nan, -2, np.inf]], np.float32)
    spec = QuantSpec("int8", granularity, method=method, nonfinite="allow")
    scale, _ = scales.choose(x, spec, DTYPES["float32"])
    if not isinstance(granularity, PerTensor):
        assert scale.reshape(-1)[0] == 1
    alone = np.array([[1, -2]], np.float32)
    wanted, _ = scales.choose(alone, spec, DTYPES["float32"])
    assert scale.reshape(-1)[-1] == wanted.reshape(-1)[-1]


@pytest.mark.parametrize("target", ["uint8", "int8"])
@pytest.mark.parametrize(
    "values",
    [[], [0.0], [-0.0, 0.0], [1.0, 2.0], [-5.5, -1.0], [-1.5, 3.25, 0.1], [1e-45]],
    ids=str,
)
def test_dynamic_semantics_give_the_operators_scale(target: str, values: list[float]) -> None:
    x = np.array(values, np.float32)
    q = quantize(x, QuantSpec(target, PerTensor(), semantics="dynamic"))
    codes, scale, zero_point = oracle.dynamic([float(v) for v in x], target)
    assert q.zero_point is not None
    assert (q.scale.dtype, float(q.scale), int(q.zero_point)) == (np.float32, scale, zero_point)
    assert q.y.tolist() == codes


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dynamic_scales_are_float32_whatever_the_source(source: Any) -> None:
    q = quantize(np.array([-1, 2], source), QuantSpec("uint8", PerTensor(), semantics="dynamic"))
    assert q.scale.dtype == np.float32
    assert q.spec.storage_dtype(DTYPES["bfloat16"]) == DTYPES["float32"]


def test_a_dynamic_range_beyond_float32_names_the_tensor() -> None:
    x = np.array([3e38, -3e38], np.float32)
    with pytest.raises(TensorError, match=r"^tensor w: the range \[-3\.0.*\] is not finite"):
        quantize(x, QuantSpec("uint8", PerTensor(), semantics="dynamic"), name="w")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("target", "symmetric", "narrow"), SYMMETRIES)
@pytest.mark.parametrize("searches", [False, True], ids=["plain", "mse"])
def test_the_largest_values_come_back_finite(
    target: str, symmetric: bool, narrow: bool, searches: bool, storage: str
) -> None:
    """Rounded up, a scale may be so large that its product with the last code is Inf."""
    dtype = np.float16 if storage == "float16" else np.float32
    top = float(np.finfo(dtype).max)
    rows = [[top, -top, 1], [top, top, top], [-top, 0, -1], [top, -top / 3, 0], [top * 0.999, 0, 0]]
    x = np.array(rows).astype(dtype)
    method = "mse" if searches else PLAIN[symmetric]
    spec = QuantSpec(
        target,
        PerAxis(0),
        symmetric=symmetric,
        method=method,
        narrow_range=narrow,
        scale_dtype=storage,
    )
    tensor = quantize(x, spec)
    output = "float16" if storage == "float16" and tensor.spec.dtype.bits <= 8 else "float32"
    assert np.isfinite(tensor.dequantize(output).astype(np.float64)).all()
    if symmetric and storage == "float32":
        ideal = top / (
            tensor.spec.dtype.qmax
            if not target.startswith("u")
            else 2 ** (tensor.spec.dtype.bits - 1) - 1
        )
        assert tensor.scale[0] == pytest.approx(ideal, rel=2**-22)


@pytest.mark.parametrize(
    ("shape", "granularity", "rows"),
    [
        ((2, 2), PerTensor(), [[0, 1, 2, 3]]), ((2, 3), PerAxis(1), [[0, 3], [1, 4], [2, 5]]),
        ((2, 5), Blocked(1, 3), [[0, 1, 2], [3, 4, -1], [5, 6, 7], [8, 9, -1]]),
        ((3, 2), Blocked(0, 2), [[0, 2], [1, 3], [4, -1], [5, -1]]),
        ((2, 2), Blocked(1, 9), [[0, 1], [2, 3]]),
        ((3, 3), Tiled((2, 2)), [[0, 1, 3, 4], [2, -1, 5, -1], [6, 7, -1, -1], [8, -1, -1, -1]]),
        ((1, 2, 3), Tiled((2, 2)), [[0, 1, 3, 4], [2, -1, 5, -1]]),
        ((2, 1, 3), Tiled((1, 2)), [[0, 1], [2, -1], [3, 4], [5, -1]]),
        ((4, 3, 2), Tiled((2, 9)), [[0, 1, 2, 3], [4, 5, -1, -1], [6, 7, 8, 9], [10, 11, -1, -1],
                                    [12, 13, 14, 15], [16, 17, -1, -1], [18, 19, 20, 21],
                                    [22, 23, -1, -1]]),
    ],
    ids=str,
)  # fmt: skip
def test_groups_in_rows(
    shape: tuple[int, ...], granularity: Granularity, rows: list[list[int]]
) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert scales.grouped(x, granularity, -1).tolist() == rows
    zeros = [[max(number, 0) for number in row] for row in rows]
    assert scales.grouped(x, granularity).tolist() == zeros


@pytest.mark.parametrize(
    ("storage", "bound", "limit"),
    [
        ("float16", 65504.0, 65504.0), ("float16", 65505.0, float(np.finfo(np.float32).max)),
        ("bfloat16", 1.0, 255 * 2.0**120), ("float32", 1.0, float(np.finfo(np.float32).max)),
        ("float8e4m3fn", 1.0, float(np.finfo(np.float32).max)),
    ],
)  # fmt: skip
def test_what_values_may_come_back_as(storage: str, bound: float, limit: float) -> None:
    assert largest(np.array([bound]), DTYPES[storage]).tolist() == [limit]


def comes_back(bound: float, scale: float, target: str, farthest: Fraction) -> Fraction:
    """What the largest magnitude of a group is dequantized to."""
    code = Fraction(bound) / Fraction(scale)
    if target in oracle.INTEGERS:
        code = Fraction(round(code))
    else:
        code = oracle.nearest(code, oracle.FORMATS[target])
    return min(code, farthest) * Fraction(scale)


def next_below(scale: float, storage: str) -> float:
    kind = DTYPES[storage].numpy
    bits = np.array([scale], kind).view(f"u{kind.itemsize}") - 1
    return float(bits.view(kind)[0])


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("target", "symmetric"),
    [("int8", True), ("uint8", True), ("int8", False), ("uint8", False), ("int4", True),
     ("uint4", False), ("int2", True), ("float4e2m1", True), ("float8e4m3fn", True)],
)  # fmt: skip
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_scale_with_which_a_group_comes_back_finite(
    target: str, symmetric: bool, storage: str, sign: float
) -> None:
    top = float(largest(1.0, DTYPES[storage]))
    shares = 1 - np.random.default_rng(15).random(60) * np.repeat([0.01, 0.3, 0.9], 20)
    magnitudes = np.array([*(top * shares), top, top / 4], np.float64)
    low, high = np.minimum(sign * magnitudes, 0), np.maximum(sign * magnitudes, 0)
    spec = QuantSpec(target, PerAxis(0), method=PLAIN[symmetric], scale_dtype=storage)
    scale, zero = scales.from_ranges(low, high, spec, DTYPES[storage])
    for number, (bottom, upper) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        wanted, point = expected(bottom, upper, target, storage, symmetric=symmetric, narrow=False)
        assert point is None or zero is not None
        assert point is None or zero is None or int(zero[number]) == point
        middle = (point or 0) if target in oracle.INTEGERS else 0
        qmin, qmax = RANGES[target]
        farthest = max(middle - qmin, qmax - middle)
        while comes_back(max(-bottom, upper), wanted, target, farthest) > top:
            wanted = next_below(wanted, storage)
        assert float(scale[number]) == wanted


def test_the_cost_of_a_group_that_might_come_back_infinite_is_that_of_the_scale_it_keeps() -> None:
    top = float(np.finfo(np.float32).max)
    groups = -(top * np.random.default_rng(19).random((3, 32)) ** 3).astype(np.float32)
    storage, over = DTYPES["float8e4m3fn"], 2.0**120
    spec = QuantSpec("int4", PerAxis(0), method="mse", scale_dtype=storage, global_scale=True)
    scale, _ = scales.choose(groups, spec, storage, over)
    divisor = scale.astype(float)[:, None] * over
    errors = (groups - np.clip(np.rint(groups / divisor), -8, 7) * divisor) ** 2
    assert scales.cost(groups, spec, storage, over) == pytest.approx(errors.sum(), rel=1e-4)


def test_costs_of_groups_are_their_weighted_errors() -> None:
    random = np.random.default_rng(16)
    groups = (random.standard_normal((7, 16)) * np.exp2(np.arange(7))[:, None]).astype(np.float32)
    groups[1, 2] = np.inf
    weights = random.random(groups.shape).astype(np.float32)
    storage, over = DTYPES["float8e4m3fn"], 0.03
    spec = QuantSpec("int4", PerAxis(0), method="mse", scale_dtype=storage, global_scale=True)
    finite = np.where(np.isfinite(groups), groups, 0).astype(float)
    for given in (None, weights):
        scale, _ = scales.choose(groups, spec, storage, over, given)
        divisor = scale.astype(float)[:, None] * over
        errors = (finite - np.clip(np.rint(finite / divisor), -8, 7) * divisor) ** 2
        wanted = (errors * (1 if given is None else given.astype(float))).sum()
        assert scales.cost(groups, spec, storage, over, given) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("target", ["int2", "int4", "uint4", "float6e2m3", "float4e2m1"])
def test_the_largest_scale_under_a_global_one_with_which_a_group_comes_back_finite(
    target: str,
) -> None:
    random = np.random.default_rng(17)
    top, levels = float(np.finfo(np.float32).max), float(RANGES[target][1])
    levels = 7 if target == "uint4" else levels
    farthest = 8 if target.endswith("int4") else 2 if target == "int2" else levels
    spec = QuantSpec(target, PerAxis(0), symmetric=True, method="absmax")
    for over in (2.0 ** random.uniform(117, 120, 40)).astype(np.float32).astype(float).tolist():
        bound = top * (1 - random.random(4) * [0, 1e-3, 0.1, 0.6])
        scale, _ = scales.from_ranges(-bound, bound / 2, spec, DTYPES["float8e4m3fn"], over=over)
        for found, magnitude in zip(scale.astype(float).tolist(), bound.tolist(), strict=True):
            wanted = stored(Fraction(magnitude) / Fraction(levels * over), "float8e4m3fn")
            while comes_back(magnitude, wanted * over, target, Fraction(farthest)) > top:
                wanted = next_below(wanted, "float8e4m3fn")
            assert found == wanted

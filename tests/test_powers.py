"""Scales that are powers of two, against exact rational arithmetic: the mx rules, global scales."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qtool import scales
from qtool.dtypes import DTYPES, TARGETS
from qtool.engine import quantize
from qtool.errors import SpecError
from qtool.scales import global_scale
from qtool.scales.powers import power_of_two
from qtool.spec import MX_RULES, Blocked, PerAxis, PerTensor, QuantSpec, Tiled

Array = NDArray[Any]

FLOAT32_MAX = float(np.finfo(np.float32).max)
# The largest code of a grid centred on zero, and the bits that it has after its leading one.
LEVELS = {
    "int2": (1, 0), "uint2": (1, 0), "int4": (7, 2), "uint4": (7, 2), "int8": (127, 6),
    "uint8": (127, 6), "int16": (32767, 14), "uint16": (32767, 14), "float4e2m1": (6, 1),
    "float6e2m3": (7.5, 3), "float6e3m2": (28, 2), "float8e4m3fn": (448, 3),
    "float8e4m3fnuz": (240, 3), "float8e5m2": (57344, 2), "float8e5m2fnuz": (57344, 2),
}  # fmt: skip
# The rule of method absmax where none is asked for.
DEFAULTS = dict.fromkeys(LEVELS, "even") | {
    "float4e2m1": "rceil-7.25", "float8e4m3fn": "rceil", "float8e4m3fnuz": "rceil",
    "float8e5m2": "rceil", "float8e5m2fnuz": "rceil",
}  # fmt: skip
EVERY_RULE = [
    pytest.param(target, rule, id=f"{target}-{rule}")
    for target, rule in itertools.product(LEVELS, MX_RULES)
    if rule != "rceil-7.25" or target == "float4e2m1"
]


def floor_log2(value: Fraction) -> int:
    """The largest k with 2^k <= value."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


def ceil_log2(value: Fraction) -> int:
    """The smallest k with 2^k >= value."""
    k = floor_log2(value)
    return k if Fraction(2) ** k == value else k + 1


def exponent(absmax: Fraction, target: str, rule: str) -> int:
    """k of the scale 2^k, before it is kept within what float8e8m0 holds."""
    largest, bits = LEVELS[target]
    last = floor_log2(Fraction(largest))
    if rule == "floor":
        return floor_log2(absmax) - last
    if rule == "ceil":
        return ceil_log2(absmax) - last
    if rule == "even":
        step = Fraction(2) ** (floor_log2(absmax) - bits)
        return floor_log2((absmax / step + Fraction(1, 2)).__floor__() * step) - last
    return ceil_log2(absmax / Fraction(7.25 if rule == "rceil-7.25" else largest))


def expected(absmax: float, target: str, rule: str) -> float:
    """The scale of a group with that largest magnitude."""
    if absmax == 0:
        return 1.0
    return 2.0 ** min(max(exponent(Fraction(absmax), target, rule), -127), 127)


def turning_points(target: str) -> Array:
    """In [1, 2): where some rule changes its mind, as far as float32 goes."""
    largest, bits = LEVELS[target]
    points = [1.0, 1.5, 1.75, 7.25 / 4, 2 - 2.0 ** -(bits + 1), 2 - 2.0**-23]
    points += [largest / 2.0 ** floor_log2(Fraction(largest))]
    near = np.array(points, np.float32)
    beside = [np.nextafter(near, np.float32(to)) for to in (0, 4)]
    return np.unique(np.concatenate([near, *beside]))


def magnitudes(target: str) -> Array:
    """Those at every exponent of float32, and its subnormal numbers around powers of two."""
    with np.errstate(over="ignore", under="ignore"):
        grid = np.ldexp(turning_points(target)[:, None], np.arange(-149, 128)).astype(np.float32)
    subnormal = (1 << np.arange(23))[:, None] + np.array([-1, 0, 1])
    tiny = subnormal.astype(np.uint32).view(np.float32)
    every = np.concatenate([grid.reshape(-1), tiny.reshape(-1), [0, FLOAT32_MAX]])
    return np.unique(every[np.isfinite(every)]).astype(np.float64)


def test_the_targets_of_these_tests_are_all_there_are() -> None:
    assert set(LEVELS) == {dtype.name for dtype in TARGETS}


@pytest.mark.parametrize(("target", "rule"), EVERY_RULE)
def test_a_rule_is_what_exact_arithmetic_says(target: str, rule: str) -> None:
    absmax = magnitudes(target)
    found = power_of_two(absmax, DTYPES[target], LEVELS[target][0], rule)
    wanted = [expected(value, target, rule) for value in absmax.tolist()]
    assert found.dtype == np.float64
    assert found.tolist() == wanted
    assert (min(wanted), max(wanted[1:])) == (2.0**-127, found[-1])


@given(
    absmax=st.floats(2.0**-400, 2.0**400),
    case=st.sampled_from([param.values for param in EVERY_RULE]),
)
@settings(max_examples=400)
@example(absmax=float(np.nextafter(6.0, 7)), case=("float4e2m1", "rceil"))
@example(absmax=float(np.nextafter(7.25, 6)), case=("float4e2m1", "rceil-7.25"))
@example(absmax=float(np.nextafter(1.75, 0)), case=("float4e2m1", "even"))
def test_magnitudes_between_percentiles_are_exact_too(absmax: float, case: Any) -> None:
    """Those are float64."""
    target, rule = case
    found = power_of_two(np.array([absmax]), DTYPES[target], LEVELS[target][0], rule)
    assert found.tolist() == [expected(absmax, target, rule)]


@pytest.mark.parametrize(
    ("target", "rule", "absmax", "scale"),
    [
        ("float4e2m1", "floor", 7.9, 1), ("float4e2m1", "floor", 4, 1),
        ("float4e2m1", "floor", 3.9, 0.5), ("float4e2m1", "ceil", 4, 1),
        ("float4e2m1", "ceil", 4.1, 2), ("float4e2m1", "even", 6.9, 1),
        ("float4e2m1", "even", 7, 2), ("float4e2m1", "rceil", 6, 1),
        ("float4e2m1", "rceil", 6.1, 2), ("float4e2m1", "rceil-7.25", 7.25, 1),
        ("float4e2m1", "rceil-7.25", 7.3, 2), ("float8e4m3fn", "rceil", 448, 1),
        ("float8e4m3fn", "rceil", 449, 2), ("float8e4m3fn", "even", 479, 1),
        ("float8e4m3fn", "even", 496, 2), ("float8e4m3fn", "floor", 511, 1),
        ("int8", "rceil", 127, 1), ("int8", "rceil", 127.1, 2), ("int8", "even", 127.4, 1),
        ("int8", "even", 127.5, 2), ("int2", "even", 1.4, 1), ("int2", "even", 1.5, 2),
        ("uint4", "rceil", 7, 1), ("uint4", "rceil", 7.1, 2),
        ("float4e2m1", "floor", FLOAT32_MAX, 2.0**125), ("int2", "ceil", FLOAT32_MAX, 2.0**127),
        ("float8e4m3fn", "rceil", 2.0**-149, 2.0**-127), ("int2", "even", 0, 1),
    ],
)  # fmt: skip
def test_scales_by_hand(target: str, rule: str, absmax: float, scale: float) -> None:
    found = power_of_two(np.array([absmax]), DTYPES[target], LEVELS[target][0], rule)
    assert found.tolist() == [scale]


@pytest.mark.parametrize("target", list(LEVELS))
def test_chosen_scales_follow_the_rule_that_is_asked_for_or_the_default(target: str) -> None:
    """Below 2^125 no scale times a code overflows."""
    absmax = magnitudes(target)
    absmax = absmax[absmax < 2.0**125]
    x = np.stack([-absmax, absmax / 2], axis=1).astype(np.float32)
    e8m0 = DTYPES["float8e8m0"]
    for rule in [None, *(rule for rule in MX_RULES if rule != "rceil-7.25")]:
        spec = QuantSpec(
            target, PerAxis(0), method="absmax", scale_dtype="float8e8m0", mx_rule=rule
        )
        named = rule or DEFAULTS[target]
        assert spec.mx_rule == named
        scale, zero_point = scales.choose(x, spec, e8m0)
        assert scale.dtype == ml_dtypes.float8_e8m0fnu
        wanted = [expected(value, target, named) for value in absmax.tolist()]
        assert scale.astype(np.float64).tolist() == wanted
        assert (zero_point is None) == (not target.startswith("uint"))


@pytest.mark.parametrize("target", list(LEVELS))
@pytest.mark.parametrize("rule", [None, *(rule for rule in MX_RULES if rule != "rceil-7.25")])
def test_no_group_comes_back_infinite(target: str, rule: str | None) -> None:
    x = np.array([[FLOAT32_MAX, -1.0], [-FLOAT32_MAX, FLOAT32_MAX], [2.0**127, 0]], np.float32)
    spec = QuantSpec(target, PerAxis(0), symmetric=True, scale_dtype="float8e8m0", mx_rule=rule)
    assert spec.method == ("absmax" if rule else "mse")
    q = quantize(x, spec)
    values = q.dequantize().astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values[:2, 0]).min() >= FLOAT32_MAX / 4  # int2: scale 2^126, for -2 to be finite


def test_asymmetric_grids_have_scales_that_cover_them() -> None:
    spec = QuantSpec("uint4", PerAxis(0), method="minmax", scale_dtype="float8e8m0")
    assert (spec.symmetric, spec.mx_rule) == (False, None)
    scale, _ = scales.choose(np.float32([[0, 15], [0, 15.1], [-1, 29]]), spec, DTYPES["float8e8m0"])
    assert scale.astype(float).tolist() == [1, 2, 2]


def test_a_given_scale_follows_no_rule() -> None:
    spec = QuantSpec("float4e2m1", PerTensor(), scale_dtype="float8e8m0")
    q = quantize(np.float32([8, 1]), spec, scale=4)
    assert q.y.astype(float).tolist() == [2, 0]  # 0.25 is a tie with 0.5


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("float4e2m1", {"scale_dtype": "float8e8m0", "mx_rule": "round"},
         "mx_rule: 'round' is unknown; use floor, ceil, even, rceil, rceil-7.25"),
        ("float4e2m1", {"mx_rule": "ceil"},
         "mx_rule: it chooses the float8e8m0 scales of a symmetric grid; use it with "
         "--scale-dtype float8e8m0"),
        ("uint8", {"mx_rule": "ceil", "scale_dtype": "float8e8m0"},
         "mx_rule: it chooses the float8e8m0 scales of a symmetric grid; use it with "
         "--scale-dtype float8e8m0"),
        ("int8", {"mx_rule": "rceil-7.25", "scale_dtype": "float8e8m0"},
         "mx_rule: rceil-7.25 is for float4e2m1, not int8"),
        ("float4e2m1", {"global_scale": True},
         "global_scale: it stands over float8e4m3fn scales of a symmetric grid; use it with "
         "--scale-dtype float8e4m3fn"),
        ("float4e2m1", {"global_scale": True, "scale_dtype": "float8e8m0"},
         "global_scale: it stands over float8e4m3fn scales of a symmetric grid; use it with "
         "--scale-dtype float8e4m3fn"),
        ("uint4", {"global_scale": True, "scale_dtype": "float8e4m3fn"},
         "global_scale: it stands over float8e4m3fn scales of a symmetric grid; use it with "
         "--scale-dtype float8e4m3fn"),
    ],
    ids=str,
)  # fmt: skip
def test_rules_and_global_scales_that_contradict_the_rest_are_refused(
    target: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        QuantSpec(target, Blocked(1, 16), **options)
    assert str(error.value) == message


# ---------------------------------------------------------------- global scales


def expected_global(absmax: float, levels: float) -> float:
    """The smallest normal power of two g with absmax / (levels * g) <= 448."""
    if absmax == 0:
        return 1.0
    k = ceil_log2(Fraction(absmax) / Fraction(levels) / 448)
    return 2.0 ** max(k, -126)


@given(absmax=st.floats(0, FLOAT32_MAX, width=32), target=st.sampled_from(list(LEVELS)))
@settings(max_examples=400)
@example(absmax=2688.0, target="float4e2m1")
@example(absmax=float(np.nextafter(np.float32(2688), np.float32(1e9))), target="float4e2m1")
@example(absmax=2.0**-149, target="float4e2m1")
@example(absmax=FLOAT32_MAX, target="int2")
def test_a_global_scale_is_the_smallest_under_which_every_scale_fits(
    absmax: float, target: str
) -> None:
    found = global_scale.power(absmax, LEVELS[target][0])
    assert found == expected_global(absmax, LEVELS[target][0])


def block_scale(absmax: float, levels: float, over: float) -> float:
    """The float8e4m3fn scale of a block: absmax / (levels * over) rounded once, at least 2^-9."""
    if absmax == 0:
        return 1.0
    exact = Fraction(absmax) / Fraction(levels) / Fraction(over)
    return max(float(oracle.nearest(exact, oracle.FORMATS["float8e4m3fn"])), 2.0**-9)


@st.composite
def blocks_of_weights(draw: st.DrawFn) -> Array:
    """Four rows of nine: of any magnitude, alike or not, and some of them zeros."""
    size = 36
    exponents = st.integers(
        *sorted(draw(st.tuples(st.integers(-120, 110), st.integers(-120, 110))))
    )
    mantissas = draw(st.lists(st.integers(-(2**24) + 1, 2**24 - 1), min_size=size, max_size=size))
    powers = draw(st.lists(exponents, min_size=size, max_size=size))
    x = np.ldexp(np.array(mantissas, np.float64), np.array(powers) - 24).astype(np.float32)
    x = x.reshape(4, 9)
    x[draw(st.integers(0, 4)) :] *= np.float32(draw(st.sampled_from([0, 1])))
    return x


@given(
    x=blocks_of_weights(),
    target=st.sampled_from(["float4e2m1", "float6e3m2", "float8e4m3fn", "int4", "int8"]),
    tiled=st.booleans(),
)
@settings(max_examples=150)
def test_two_level_scales_equal_exact_arithmetic(x: Array, target: str, tiled: bool) -> None:
    granularity = Tiled((3, 4)) if tiled else Blocked(1, 4)
    spec = QuantSpec(
        target, granularity, method="absmax", scale_dtype="float8e4m3fn", global_scale=True
    )
    q = quantize(x, spec)
    levels = LEVELS[target][0]
    over = expected_global(float(np.abs(x).max()), levels)
    assert q.global_scale == over
    rows = 3 if tiled else 1
    values = q.dequantize()
    for r, c in np.ndindex(q.scale.shape):
        part = x[r * rows : (r + 1) * rows, c * 4 : (c + 1) * 4]
        scale = block_scale(float(np.abs(part).max()), levels, over)
        assert float(q.scale[r, c]) == scale
        assert scale <= 448
    for index in np.ndindex(x.shape):
        scale = float(q.scale[index[0] // rows, index[1] // 4]) * over  # exact: a power of two
        wanted = oracle.quantize(float(x[index]), scale, None, target, "float32", saturate=True)
        code = q.y[index]
        assert (int(code) if target.startswith("int") else int(code.view(np.uint8))) == wanted
        # x_hat = code * (scale * global), in float32
        product = oracle.multiply(float(code), scale, oracle.FORMATS["float32"])
        assert float(values[index]).hex() == product.hex()
    assert q.outcome.describe()["scale_max"] == float(q.scale.astype(np.float64).max()) * over


@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_zeros_have_global_scale_one(method: str) -> None:
    spec = QuantSpec(
        "float4e2m1", Blocked(1, 2), method=method, scale_dtype="float8e4m3fn", global_scale=True
    )
    q = quantize(np.zeros((2, 4), np.float32), spec)
    assert q.global_scale == 1
    assert q.scale.astype(float).tolist() == [[1, 1], [1, 1]]
    assert not q.dequantize().any()


def test_nan_and_infinity_have_no_part_in_a_global_scale() -> None:
    spec = QuantSpec("float4e2m1", Blocked(1, 2), method="absmax", scale_dtype="float8e4m3fn",
                     global_scale=True, nonfinite="allow")  # fmt: skip
    x = np.float32([[np.inf, 6 * 448, np.nan, -3]])
    q = quantize(x, spec)
    assert q.global_scale == 1
    assert q.scale.astype(float).tolist() == [[448, 0.5]]
    assert q.y.astype(float).tolist() == [[6, 6, 0, -6]]


def test_nan_and_infinity_have_no_part_in_the_search_for_one_either() -> None:
    spec = QuantSpec("float4e2m1", Blocked(1, 16), scale_dtype="float8e4m3fn", global_scale=True,
                     nonfinite="allow")  # fmt: skip
    assert spec.method == "mse"
    x = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
    holes = x.copy()
    holes[::2, ::5], holes[1::2, ::7], holes[1::2, 3::7] = np.nan, np.inf, -np.inf
    kept = np.isfinite(holes)
    found, wanted = quantize(holes, spec), quantize(np.where(kept, x, np.float32(0)), spec)
    assert found.global_scale == wanted.global_scale
    assert found.scale.tobytes() == wanted.scale.tobytes()
    assert (found.y == wanted.y)[kept].all()


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("target", ["float4e2m1", "float8e4m3fn", "int2", "int8"])
def test_no_group_under_a_global_scale_comes_back_infinite(target: str, method: str) -> None:
    x = np.array([[FLOAT32_MAX, -1.0], [-FLOAT32_MAX, FLOAT32_MAX]], np.float32)
    spec = QuantSpec(
        target, PerAxis(0), method=method, scale_dtype="float8e4m3fn", global_scale=True
    )
    q = quantize(x, spec)
    values = q.dequantize().astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values[:2, 0]).min() >= FLOAT32_MAX / 4  # int2: scale 2^126, for -2 to be finite


def test_a_global_scale_takes_no_given_scales() -> None:
    spec = QuantSpec("float4e2m1", PerTensor(), scale_dtype="float8e4m3fn", global_scale=True)
    with pytest.raises(SpecError) as error:
        quantize(np.ones(4, np.float32), spec, scale=1, name="w")
    assert str(error.value) == "scale of w: a global scale needs chosen scales; leave one out"

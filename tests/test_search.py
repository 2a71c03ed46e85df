"""Method mse: what it finds, held against errors that are summed in float64 here."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import qtool
from qtool import scales
from qtool.dtypes import DTYPES
from qtool.engine import plain, request, stream
from qtool.errors import SpecError
from qtool.kernels.searcher import TileSearcher
from qtool.scales import global_scale
from qtool.scales.search import Grid, best, bounds, costs, proposed, search, shares, squared
from qtool.scales.stages import stages
from qtool.spec import Blocked, PerAxis, PerTensor, QuantSpec, Tiled

Array = NDArray[Any]

RNG = np.random.default_rng(7)
KINDS = {
    "normal": RNG.standard_normal((200, 64)),
    "heavy tails": RNG.standard_t(2, (200, 64)),
    "one outlier": RNG.standard_normal((200, 64)) + 50 * np.eye(200, 64),
    "skewed": RNG.exponential(1, (200, 64)),
    "on the grid": RNG.integers(-7, 8, (200, 64)),
    "ties": RNG.integers(-20, 21, (200, 64)) / 2,
    "constant": np.full((200, 64), 0.3),
    "zeros": np.zeros((200, 64)),
    "scales almost subnormal": RNG.standard_normal((200, 64)) * 1e-37,
    "scales subnormal": RNG.standard_normal((200, 64)) * 1e-38,
    "tiny": RNG.standard_normal((200, 64)) * 1e-42,
    "huge": RNG.standard_normal((200, 64)) * 1e37,
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def values(kind: str) -> Array:
    return KINDS[kind].astype(np.float32)


def errors(x: Array, tensor: qtool.QuantizedTensor, block: int) -> Array:
    """Squared error of each block in float64, from codes, scale and zero point alone."""
    codes = tensor.y.astype(np.float64)
    scale = np.repeat(tensor.scale.astype(np.float64), block, axis=1) * (tensor.global_scale or 1)
    zero = 0.0
    if tensor.zero_point is not None:
        zero = np.repeat(tensor.zero_point.astype(np.float64), block, axis=1)
    squares = (x.astype(np.float64) - (codes - zero) * scale) ** 2
    return np.asarray(squares.reshape(len(x), -1, block).sum(axis=2))


def quantized(x: Array, dtype: str, block: int, **options: Any) -> qtool.QuantizedTensor:
    return qtool.quantize(x, QuantSpec(dtype, Blocked(1, block), **options))


@EVERY
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16", "float8e4m3fn"])
@pytest.mark.parametrize("dtype", ["int2", "int4", "int8", "int16", "float4e2m1", "float8e5m2"])
def test_no_block_has_a_larger_error_than_absmax_gives(
    kind: str, scale_dtype: str, dtype: str
) -> None:
    x = values(kind)
    found = errors(x, quantized(x, dtype, 32, method="mse", scale_dtype=scale_dtype), 32)
    plain = errors(x, quantized(x, dtype, 32, method="absmax", scale_dtype=scale_dtype), 32)
    assert (found <= plain * (1 + 1e-12)).all()


@EVERY
@pytest.mark.parametrize("dtype", ["int2", "uint4", "int4", "uint8"])
def test_no_block_has_a_larger_error_than_minmax_gives(kind: str, dtype: str) -> None:
    x = values(kind)
    options = {"symmetric": False, "scale_dtype": "float32"}
    found = errors(x, quantized(x, dtype, 32, method="mse", **options), 32)
    plain = errors(x, quantized(x, dtype, 32, method="minmax", **options), 32)
    assert (found <= plain * (1 + 1e-12)).all()


def least(x: Array, block: int, scales: Array, low: int, high: int) -> Array:
    """The least squared error of each block among absmax times these factors."""
    groups = x.reshape(-1, block).astype(np.float64)
    absmax = np.abs(groups).max(axis=1, keepdims=True)
    best = np.full(len(groups), np.inf)
    for factor in scales:
        s = absmax * factor
        codes = np.clip(np.rint(groups / s), low, high)
        best = np.minimum(best, ((groups - codes * s) ** 2).sum(axis=1))
    return best


@pytest.mark.parametrize(
    ("dtype", "low", "high", "block", "slack"),
    [
        ("int4", -8, 7, 32, 1.01), ("int4", -8, 7, 16, 1.015), ("int4", -8, 7, 64, 1.01),
        ("int2", -2, 1, 32, 1.01), ("int8", -128, 127, 32, 1.04),
    ],
)  # fmt: skip
def test_the_error_is_near_the_least_of_thousands_of_scales(
    dtype: str, low: int, high: int, block: int, slack: float
) -> None:
    x = np.random.default_rng(1).standard_normal((512, 128)).astype(np.float32)
    factors = np.geomspace(0.2 / high, 2.1 / high, 4000)
    best = np.sqrt(least(x, block, factors, low, high).sum())
    found = np.sqrt(errors(x, quantized(x, dtype, block, method="mse"), block).sum())
    assert best * 0.999 < found < best * slack


def test_the_float4_grid_is_searched_up_to_scales_where_six_is_unused() -> None:
    # 4 and 3 are codes at scale 1; at absmax / 6 they would be 6 and 4.5, which is none
    x = np.array([[4.0, 3, 2, 1, 4, 3, 2, 1] * 2], np.float32)
    found = quantized(x, "float4e2m1", 16, scale_dtype="float8e4m3fn")
    assert found.scale.astype(np.float32).item() == 1
    assert errors(x, found, 16).sum() == 0


def test_scales_of_eight_bits_are_the_best_of_all_such_scales() -> None:
    x = np.random.default_rng(2).standard_normal((300, 64)).astype(np.float32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    stored = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    groups = np.abs(x.reshape(-1, 16).astype(np.float64))
    best = np.full(len(groups), np.inf)
    for s in stored:
        distance = np.abs(groups[:, :, None] / s - grid).min(axis=2) * s
        best = np.minimum(best, (distance**2).sum(axis=1))
    found = errors(x, quantized(x, "float4e2m1", 16, scale_dtype="float8e4m3fn"), 16)
    assert np.allclose(found.reshape(-1), best, rtol=1e-6, atol=0)


def test_mx_scales_are_the_best_powers_of_two() -> None:
    x = np.random.default_rng(3).standard_normal((300, 64)).astype(np.float32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = np.abs(x.reshape(-1, 32).astype(np.float64))
    best = np.full(len(groups), np.inf)
    for s in np.exp2(np.arange(-12.0, 6)):
        distance = np.abs(groups[:, :, None] / s - grid).min(axis=2) * s
        best = np.minimum(best, (distance**2).sum(axis=1))
    tensor = quantized(x, "float4e2m1", 32, scale_dtype="float8e8m0")
    assert np.allclose(errors(x, tensor, 32).reshape(-1), best, rtol=1e-3, atol=0)
    assert tensor.spec.mx_rule is None


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8e4m3fn", "float8e8m0"])
def test_the_search_begins_with_any_scale_that_can_be_stored(name: str) -> None:
    storage = DTYPES[name]
    size = storage.numpy.itemsize
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 8 * size, dtype=f"u{size}").view(storage.numpy).astype(np.float32)
    every = every[(every > 0) & (every < np.inf)]
    grid = Grid.of(QuantSpec("int4", PerTensor()), storage, 1.0)
    found, _ = proposed(every, np.zeros(every.size, np.float32), [(0, 0)], grid)
    assert np.array_equal(found[:, 0], every)


def test_a_scale_without_a_sign_takes_none() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(SpecError, match=r"^negative_scale: float8e8m0 scales have no sign; leave"):
        quantized(x, "int4", 32, negative_scale=True, scale_dtype="float8e8m0")


def test_the_order_of_elements_and_of_blocks_does_not_matter() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 40)).astype(np.float32)
    mixed = rng.permuted(x, axis=1)[::-1].copy()
    scale = quantized(x, "int4", 40).scale
    assert np.array_equal(quantized(mixed, "int4", 40).scale, scale[::-1])


def test_the_larger_side_gets_the_code_that_only_one_side_has() -> None:
    x = np.array([[-8.0, 3], [8, -3], [-7, 7], [16, 1]], np.float32)
    spec = QuantSpec("int4", PerAxis(0), method="absmax", negative_scale=True)
    found = qtool.quantize(x, spec)
    assert found.scale.tolist() == [1, -1, 0.875, -2]
    assert found.y.astype(int).tolist() == [[-8, 3], [-8, 3], [-8, 7], [-8, 0]]
    as_unsigned = QuantSpec(
        "uint4", PerAxis(0), method="absmax", symmetric=True, negative_scale=True
    )
    shifted = qtool.quantize(x, as_unsigned)
    assert shifted.scale.tolist() == [1, -1, 0.875, -2]
    assert (shifted.y.astype(int) - 8).tolist() == found.y.astype(int).tolist()


def test_a_free_sign_makes_errors_smaller() -> None:
    x = np.random.default_rng(5).standard_normal((256, 64)).astype(np.float32)
    fixed = errors(x, quantized(x, "int4", 32), 32).sum()
    free = errors(x, quantized(x, "int4", 32, negative_scale=True), 32).sum()
    given = errors(x, quantized(x, "int4", 32, negative_scale=True, method="absmax"), 32).sum()
    assert free < 0.93 * fixed
    assert free < 0.95 * given


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float4e2m1", {}), ("float8e4m3fn", {"method": "mse"}),
        ("int4", {"symmetric": False}), ("int4", {"scale_dtype": "float8e8m0", "symmetric": False}),
    ],
)  # fmt: skip
def test_a_sign_that_cannot_be_chosen_is_refused(dtype: str, options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as error:
        quantized(np.ones((2, 32), np.float32), dtype, 32, negative_scale=True, **options)
    assert str(error.value).startswith("negative_scale: only symmetric grids of integers have")


@pytest.mark.parametrize(
    ("dtype", "options", "method"),
    [
        ("int4", {}, "mse"), ("uint4", {}, "mse"), ("int2", {}, "mse"), ("float4e2m1", {}, "mse"),
        ("int8", {}, "absmax"), ("uint8", {}, "minmax"), ("float8e4m3fn", {}, "absmax"),
        ("float8e4m3fn", {"scale_dtype": "float8e8m0"}, "mse"),
        ("float6e2m3", {"scale_dtype": "float8e8m0"}, "mse"),
        ("float6e2m3", {"scale_dtype": "float8e8m0", "mx_rule": "even"}, "absmax"),
        ("int4", {"precision": "float16"}, "absmax"),
        ("uint4", {"precision": "bfloat16"}, "minmax"),
        ("float8e5m2", {"scale_dtype": "float8e8m0", "saturate": False}, "absmax"),
        ("uint8", {"semantics": "dynamic"}, "minmax"),
    ],
)  # fmt: skip
def test_the_default_method_follows_from_the_type(
    dtype: str, options: dict[str, Any], method: str
) -> None:
    assert QuantSpec(dtype, PerTensor(), **options).method == method


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float16"}, "method: mse does not go with precision float16; use absmax or "
         "minmax"),
        ({"semantics": "onednn"}, "method: mse does not go with semantics onednn; use absmax or "
         "minmax"),
        ({"scale_dtype": "float8e8m0", "mx_rule": "even"},
         "mx_rule: mse compares scales instead of following a rule; leave one of them out"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_search_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        QuantSpec("int8", PerTensor(), method="mse", **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis(0), PerAxis(1), Blocked(0, 3), Tiled((8, 8))]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_granularity_clips_outliers_that_cost_more_than_they_are_worth(
    granularity: Any, *, symmetric: bool
) -> None:
    x = np.random.default_rng(6).standard_normal((64, 96)).astype(np.float32)
    x[::16, ::32] = 12
    options = {"symmetric": symmetric, "scale_dtype": "float32"}
    found = qtool.quantize(x, QuantSpec("int4", granularity, method="mse", **options))
    by_range = "absmax" if symmetric else "minmax"
    plain = qtool.quantize(x, QuantSpec("int4", granularity, method=by_range, **options))
    assert found.stats.figures()["mse"] < 0.98 * plain.stats.figures()["mse"]


@pytest.mark.parametrize(
    "row", [[60000.0, -60000, 55000, 1], [-60000, -40000, -20000, -1], [16376, -3, 9000, 7000]]
)
def test_groups_that_might_come_back_infinite_keep_their_scale(row: list[float]) -> None:
    x = np.array([row * 8], np.float16)
    found, plain = (quantized(x, "int4", 32, method=m) for m in ("mse", "absmax"))
    assert np.array_equal(found.scale, plain.scale)
    assert np.isfinite(found.dequantize("float16").astype(np.float32)).all()


@pytest.mark.parametrize("value", [*np.geomspace(1e-30, 1e30, 61).tolist(), 2.0**-127, 1 / 3])
def test_products_with_a_global_scale_are_quotients_by_its_reciprocal(value: float) -> None:
    """The nearest float32 of that kind, the larger one of two."""
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def is_one(number: Any) -> bool:
        reciprocal = np.float32(1) / number
        products = np.array_equal(every * number, every / reciprocal)
        return products and np.float32(1) / reciprocal == number

    above = below = np.float32(max(value, 2.0**-126))
    while not (is_one(above) or is_one(below)):
        above, below = np.nextafter(above, np.float32(np.inf)), np.nextafter(below, np.float32(0))
    assert global_scale.exchangeable(value) == (above if is_one(above) else below)
    assert abs(above - below) < 1e-4 * below


@pytest.mark.parametrize("absmax", [1e-3, 1.0, 6.0, 2688.0, 1e9])
def test_under_every_global_scale_that_is_tried_block_scales_fit(absmax: float) -> None:
    tried = global_scale.options(absmax, 6)
    assert len(tried) == 5
    largest = [absmax / 6 / over for over in tried]
    assert all(scale < 448.1 for scale in largest)
    assert tried[0] == 2 * tried[1] == 2 * 2.0 ** np.ceil(np.log2(absmax / 2688))
    assert tried[2:] == pytest.approx([f * absmax / 2688 for f in (1, 1.5, 1.75)], rel=1e-4)


@pytest.mark.parametrize(
    ("size", "span", "all_of_it", "expected"),
    [
        (10, 3, False, [range(10)]), (4095, 3, False, [range(4095)]),
        (4096, 3, True, [range(4095), range(4095, 4096)]),
        (100000, 16, False, [range(k * 4096, k * 4096 + 4096) for k in
                             (0, 1, 3, 4, 6, 7, 9, 10, 12, 14, 15, 17, 18, 20, 21, 23)]),
        (100000, 16, True, [range(k, min(k + 4096, 100000)) for k in range(0, 100000, 4096)]),
        (16000, 5000, False, [range(5000), range(5000, 10000), range(10000, 15000),
                              range(15000, 16000)]),
        (300000, 70000, False, [range(70000)]),
    ],
)  # fmt: skip
def test_global_scales_are_judged_by_windows_of_whole_groups(
    size: int, span: int, all_of_it: bool, expected: list[range]
) -> None:
    assert global_scale.windows(size, span, all_of_it=all_of_it) == expected


def test_a_cost_that_is_no_number_is_not_the_least() -> None:
    costs_of = {2.0: np.nan, 1.0: 3.0, 0.5: 1.0, 0.25: np.inf, 0.125: 1.0}
    windows = [range(4), range(4, 6)]
    found = global_scale.best(list(costs_of), windows, lambda choice, part: costs_of[choice])
    assert found == 0.5
    assert global_scale.best([2.0, 0.25], windows, lambda choice, part: costs_of[choice]) == 2
    assert global_scale.best([4.0, 8.0], windows, lambda choice, part: len(part) / choice) == 8


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_blocks_with_infinite_reciprocals_choose_the_same_in_kernels(seed: int) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((16, 300)) * 2.0**-136).astype(np.float32)
    x[0] = random.standard_normal(300) * 2.0**-109 * random.random()
    options = {"method": "mse", "scale_dtype": "float8e4m3fn", "global_scale": True}
    spec = QuantSpec("float4e2m1", Blocked(1, 300), **options)
    asked = request("x", x.shape, DTYPES["float32"], spec, None, None)
    found, wanted = stream.quantize_array(x, asked, jobs=1), plain.quantize(x, asked)
    assert found.global_scale == wanted.global_scale
    assert found.scale.tobytes() == wanted.scale.tobytes()


def test_the_global_scale_of_least_error_is_taken() -> None:
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((64, 256)) * np.exp(rng.standard_normal((64, 1)))).astype(np.float32)
    options = {"scale_dtype": "float8e4m3fn"}
    found = quantized(x, "float4e2m1", 16, global_scale=True, **options)
    totals = []
    for over in global_scale.options(float(np.abs(x).max()), 6):
        # dividing by a power of two or not, x / over has the scales that x has under over
        scaled = quantized((x / np.float32(over)).astype(np.float32), "float4e2m1", 16, **options)
        totals.append(scaled.stats.figures()["mse"] * over**2)
    assert found.stats.figures()["mse"] <= min(totals) * (1 + 1e-3)
    assert found.global_scale in global_scale.options(float(np.abs(x).max()), 6)


@pytest.mark.parametrize("name", ["int4", "uint4", "float4e2m1", "int8"])
def test_values_that_are_not_finite_have_no_part_in_the_search(name: str) -> None:
    x = np.random.default_rng(9).standard_normal((8, 64)).astype(np.float32)
    options = {"method": "mse", "nonfinite": "allow"}
    zeroed = x.copy()
    zeroed[:, ::9] = 0
    x[:, ::9] = np.inf
    x[0, 0] = np.nan
    found, expected = quantized(x, name, 32, **options), quantized(zeroed, name, 32, **options)
    assert found.scale.tobytes() == expected.scale.tobytes()
    assert DTYPES[name] == found.spec.dtype


OCTAVE = 1 << 23  # float32 numbers from one to its double


def steps(low: int, high: int, part: int) -> list[int]:
    return [math.floor(Fraction(k, part) * OCTAVE) for k in range(low, high + 1)]


def halves(*parts: int) -> list[list[tuple[int, int]]]:
    return [[(math.floor(Fraction(k * OCTAVE, part)), 0) for k in (-1, 1)] for part in parts]


NEAR, BOTH = [(0, -1), (0, 1)], [(0, -1), (0, 1), (0, -2), (0, 2)]
ALL = [(0, sign << k) for k in range(6) for sign in (-1, 1)]
AGAIN = [(step, 0) for step in steps(-3, 2, 4)]
WEIGHTED = sorted({*steps(-8, 1, 12), *steps(-22, -1, 4)})
PLANS = {
    "int4": ("int4", {}, 256, False, [0], steps(-5, 1, 8), halves(24)),
    "int4, long": ("int4", {}, 257, False, [0], steps(-22, 1, 4), halves(8, 16, 32, 64)),
    "int4, any sign": ("int4", {"negative_scale": True}, 32, False, [0, 1], steps(-5, 3, 8),
                       halves(24)),
    "int4, weighted": ("int4", {}, 32, True, [0], sorted({*WEIGHTED, *steps(-5, 1, 8)}),
                       halves(8, 16, 24, 32, 48)),
    "int4, long, weighted": ("int4", {}, 300, True, [0], steps(-22, 1, 4), halves(8, 16, 32, 64)),
    "int2": ("int2", {}, 32, False, [0], steps(-8, 1, 4), halves(8, 16, 32)),
    "int2, any sign": ("int2", {"negative_scale": True}, 32, False, [0, 1], steps(-8, 1, 4),
                       halves(8, 16, 32)),
    "uint2": ("uint2", {}, 32, False, [0, -1, 1], steps(-8, 1, 4),
              [NEAR, *halves(8, 16, 32), NEAR]),
    "uint4": ("uint4", {}, 32, False, [0], steps(-5, 1, 8), [BOTH, *halves(24), NEAR]),
    "uint4, long": ("uint4", {}, 999, False, [0], steps(-22, 1, 4),
                    [BOTH, AGAIN, BOTH, *halves(8, 16, 32, 64), NEAR]),
    "int8": ("int8", {}, 32, False, [0], steps(-3, 15, 128), halves(256)),
    "uint8": ("uint8", {}, 32, False, [0], steps(-3, 15, 128), [ALL, *halves(256), NEAR]),
    "float4e2m1": ("float4e2m1", {}, 32, False, [0], steps(-6, 6, 8), halves(16, 32)),
    "float6e2m3": ("float6e2m3", {}, 32, False, [0], steps(-2, 16, 16), halves(32)),
    "float8e5m2": ("float8e5m2", {}, 32, False, [0], steps(-2, 16, 16), halves(32)),
    "mx": ("float4e2m1", {"scale_dtype": "float8e8m0"}, 32, False, [0], steps(-1, 1, 1), []),
    "mx, long": ("int8", {"scale_dtype": "float8e8m0"}, 300, False, [0], steps(-5, 1, 1), []),
    "mx, weighted": ("int8", {"scale_dtype": "float8e8m0"}, 32, True, [0], steps(-5, 1, 1), []),
    "float8": ("float4e2m1", {"scale_dtype": "float8e4m3fn"}, 16, False, [0], steps(-2, 6, 8), []),
    "float8, long": ("int4", {"scale_dtype": "float8e4m3fn"}, 257, False, [0],
                     steps(-24, 6, 8), []),
    "float8, weighted": ("int4", {"scale_dtype": "float8e4m3fn"}, 32, True, [0],
                         steps(-24, 6, 8), []),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_candidates_by_hand(case: str) -> None:
    """They decide the bytes of every file that a search writes."""
    dtype, options, length, weighted, moves, coarse, later = PLANS[case]
    spec = QuantSpec(dtype, PerTensor(), **{"method": "mse", "scale_dtype": "float32"} | options)
    assert spec.scale_dtype is not None
    first, *rest = stages(spec, spec.scale_dtype, length, weighted=weighted)
    assert first[0] == (0, 0)  # what the search begins with, which is no candidate twice
    assert first[1:] == [(k, m) for m in moves for k in coarse if (k, m) != (0, 0)]
    assert rest == later


@pytest.mark.parametrize(
    ("dtype", "unit", "width"), [("int4", 128, 15), ("uint8", 128, 255), ("float4e2m1", 1, 12)]
)
@pytest.mark.parametrize("over", [1.0, 4.0])
def test_a_scale_is_taken_where_rounding_cannot_be_what_makes_it_better(
    dtype: str, unit: int, width: int, over: float
) -> None:
    """Costs of 1 and 2, in steps squared, are errors that differ by more than they may be wrong."""
    grid = Grid.of(QuantSpec(dtype, PerTensor(), method="mse"), DTYPES["float32"], over)
    wrong = 32 * (Fraction(unit, 2**24) + Fraction(width, 2**21)) * (1 + 4)
    bound = float(1 + Fraction(1, 2**19) + wrong)  # of errors in units of over squared
    begin = np.ones(4, np.float32), np.zeros(4, np.float32)
    before = np.array([bound, np.nextafter(bound, 2), np.inf, 0.5])

    def cost(candidates: Array) -> Array:
        return np.where(candidates[0] == 1 / over, before[:, None], 0.25)

    found = best(*begin, cost, [[(0, 0)], [(OCTAVE, 0)]], grid, 32)
    assert found.tolist() == [[1, 2, 1, 1], [0, 0, 0, 0]]


def test_every_stage_goes_on_from_the_best_so_far() -> None:
    grid = Grid.of(QuantSpec("uint8", PerTensor(), method="mse"), DTYPES["float32"], 1.0)

    def cost(candidates: Array) -> Array:
        scale, zero = 1 / candidates[0], -candidates[1]
        return ((scale - 8) ** 2 + (zero - 5) ** 2 + 1) / scale**2

    begin = np.ones(2, np.float32), np.array([2, 7], np.float32)
    plan = [[(0, 0), (OCTAVE, 0), (2 * OCTAVE, 0)], [(OCTAVE, 0), (0, 1)], [(0, -1), (0, 1)]]
    scale, zero = best(*begin, cost, [*plan, plan[2], plan[2]], grid, 1)
    assert scale.tolist() == [8, 8]
    assert zero.tolist() == [5, 5]


COMPILED = [
    ("int4", "float32", {}, 1.0), ("int4", "float16", {"negative_scale": True}, 1.0),
    ("uint4", "bfloat16", {"symmetric": False}, 1.0), ("uint2", "float32", {}, 1.0),
    ("int8", "float8e4m3fn", {}, 0.75), ("uint8", "float32", {}, 1.0), ("int16", "float32", {}, 1),
    ("float4e2m1", "float8e4m3fn", {}, float(np.float32(0.0123))),
    ("float6e2m3", "float8e8m0", {}, 1.0), ("float6e3m2", "float32", {}, 1.0),
    ("float8e4m3fn", "float32", {}, 1.0), ("float8e5m2", "bfloat16", {}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("length", [32, 300])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("dtype", "storage", "options", "over"), COMPILED, ids=str)
def test_the_kernel_finds_the_same(
    dtype: str, storage: str, options: dict[str, Any], over: float, is_weighted: bool, length: int
) -> None:
    every = np.concatenate([values(kind)[:15] for kind in KINDS]).reshape(-1)
    groups = every[: every.size // length * length].reshape(-1, length).copy()
    groups[3, 5:7] = np.nan, np.inf
    random = np.random.default_rng(10)
    weights = random.exponential(size=groups.shape).astype(np.float32)
    weights[random.random(groups.shape) < 0.2] = 0
    weights[::3] *= np.float32(1e-20)
    spec = QuantSpec(dtype, PerAxis(0), method="mse", scale_dtype=storage, **options)
    kind = DTYPES[storage]
    finite = np.where(np.isfinite(groups), groups, 0)
    low, high = (finite.min(axis=1).astype(float), finite.max(axis=1).astype(float))
    start = scales.single(*scales.from_ranges(low, high, spec, kind, over=over))
    given = weights if is_weighted else None
    found = search(groups, *start, spec, kind, over, given)
    grid = Grid.of(spec, kind, over)
    kernel = TileSearcher(
        groups.shape, spec, stages(spec, kind, length, weighted=is_weighted),
        mantissa=grid.mantissa, exponent=grid.exponent, unit=grid.unit, loose=grid.loose(length),
        over=over, storage=grid.storage_limits,
    )  # fmt: skip
    extra = (weights.reshape(-1), shares(weights)) if is_weighted else ()
    scale, zero = (part.copy() for part in start)
    kernel.search(groups.reshape(-1), 0, 0, scale, zero, *extra)
    assert found[0].tobytes() == scale.tobytes()
    assert found[1].tobytes() == zero.tobytes()
    assert (found[0] != start[0]).any() or dtype in ("int16", "float6e2m3")
    # and says the same of what was found
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / (scale * np.float32(over))
    candidate = np.stack([inverse, np.float32(spec.qmin) - zero, np.float32(grid.highest) - zero])
    pieces, steps = kernel.costs(groups.reshape(-1), 0, 0, candidate[:, :, None], *extra)
    total = np.bincount(pieces, steps[:, 0])
    total *= (scale * np.float32(over)).astype(float) ** 2 / (extra[1] if is_weighted else 1)
    cost = costs(finite, scale, zero, grid, given)
    is_number = np.isfinite(cost)  # but where a reciprocal is infinite
    assert np.array_equal(np.isfinite(total), is_number)
    assert np.array_equal(total[is_number], cost[is_number])


def test_groups_of_weights_0_are_searched_without_them() -> None:
    groups, storage = values("skewed")[:6], DTYPES["float32"]
    weights = np.ones(groups.shape, np.float32)
    weights[2:4] = 0
    spec = QuantSpec("int4", PerAxis(0), method="mse")
    start = np.full(6, 0.7, np.float32), np.zeros(6, np.float32)
    found, _ = search(groups, *start, spec, storage, 1.0, weights)
    plain, _ = search(groups, *start, spec, storage, 1.0, None)
    alone, _ = search(groups[:2], start[0][:2], start[1][:2], spec, storage, 1.0, weights[:2])
    assert found[2:4].tolist() == plain[2:4].tolist()
    assert found[:2].tolist() == alone.tolist()
    assert found[2] != start[0][2]


@pytest.mark.parametrize("length", [1, 5, 70000])
def test_weights_get_a_mean_of_a_half_to_one(length: int) -> None:
    random = np.random.default_rng(length)
    weights = np.ldexp(random.random((5, length)), random.integers(-120, 120, (5, 1)))
    weights[2] = 0
    weights[4] = [*np.full(length - 1, 0), 0.75]
    found = shares(weights.astype(np.float32))
    assert found[2] == 1
    for share, row in zip(found.tolist(), weights.astype(np.float32), strict=True):
        assert math.frexp(share)[0] == 0.5
        mean = math.fsum(row.astype(float)) / length * share
        # weights below 2^-30 of the largest are none
        assert 0.5 - 2.0**-30 <= mean < 1 or not row.any()
    assert shares(np.full((1, 3), 1e-45, np.float32)).tolist() == [2.0**127]
    assert shares(np.full((1, 3), 3e38, np.float32)).tolist() == [2.0**-126]
    assert shares(np.full((1, 4), 1, np.float32)).tolist() == [0.5]
    assert shares(np.float32([[1, 0.25, 0, 0.75]])).tolist() == [1]
    # 2^-30 of the largest counts as nothing: of a sum of 2 - 2^-24, the mean is less than 2^-7
    row = np.zeros((1, 256), np.float32)
    row[0, :66] = [1, 1 - 2.0**-24, *np.full(64, 2.0**-30)]
    assert shares(row).tolist() == [128]


def test_divisors_are_squared_in_float64() -> None:
    grid = Grid.of(QuantSpec("int4", PerTensor()), DTYPES["float32"], 3.0)
    scale = np.float32([1 / 3, 1e-30, 3e38])
    with np.errstate(over="ignore"):
        divisor = (scale * np.float32(3)).astype(float)
    assert squared(scale, grid).tolist() == (divisor**2).tolist() == [1, divisor[1] ** 2, np.inf]


@pytest.mark.parametrize("options", [{}, {"symmetric": False}], ids=str)
def test_every_group_of_a_tensor_is_searched_with_its_weights(options: dict[str, Any]) -> None:
    groups, kind = values("skewed")[:8], DTYPES["float32"]
    groups[2] = values("huge")[0] * np.float32(4)  # which keeps the scale that it begins with
    weights = np.random.default_rng(14).random(groups.shape).astype(np.float32) ** 4
    spec = QuantSpec("int4", PerAxis(1), method="mse", scale_dtype="float32", **options)
    low, high = groups.min(axis=1).astype(float), groups.max(axis=1).astype(float)
    first = scales.from_ranges(low, high, spec, kind, over=0.5)
    scale, zero = scales.choose(groups.T, spec, kind, 0.5, weights.T)
    wanted = search(groups, *scales.single(*first), spec, kind, 0.5, weights)
    is_free = np.arange(8) != 2
    assert scale[is_free].tolist() == wanted[0][is_free].tolist()
    assert scale[2] == first[0][2] != wanted[0][2]
    if zero is not None:
        assert zero[is_free].astype(float).tolist() == wanted[1][is_free].tolist()
        assert first[1] is not None
        assert zero[2] == first[1][2]
    unweighted, _ = scales.choose(groups.T, spec, kind, 0.5)
    assert (scale != unweighted)[is_free].all()


@pytest.mark.parametrize(
    ("dtype", "options", "numbers"),
    [
        ("int4", {}, (-8, 7, 0, 0)), ("uint4", {}, (0, 15, 0, 0)),
        ("int8", {"narrow_range": True}, (-127, 127, 0, 0)), ("float4e2m1", {}, (-6, 6, 1, 0)),
        ("float6e3m2", {}, (-28, 28, 2, -2)), ("float8e4m3fn", {}, (-448, 448, 3, -6)),
        ("float8e5m2", {}, (-57344, 57344, 2, -14)),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_a_grid_by_hand(
    dtype: str, options: dict[str, Any], numbers: tuple[int, ...]
) -> None:
    grid = Grid.of(QuantSpec(dtype, PerTensor(), **options), DTYPES["float32"], 1.0)
    assert (grid.lowest, grid.highest, grid.mantissa, grid.exponent) == numbers


def test_proposals_by_hand() -> None:
    grid = Grid.of(QuantSpec("uint4", PerTensor()), DTYPES["float32"], 1.0)
    zeros = np.array([0, 15, 7], np.float32)
    plan = [(0, 0), (OCTAVE, -2), (-OCTAVE, 1)]
    scale, zero = proposed(np.array([1, 2, 0.5], np.float32), zeros, plan, grid)
    assert scale.tolist() == [[1, 2, 0.5], [2, 4, 1], [0.5, 1, 0.25]]
    assert zero.tolist() == [[0, 0, 1], [15, 13, 15], [7, 5, 8]]


@pytest.mark.parametrize(
    ("name", "ends"),
    [("float32", [2.0**-149, 2.0**128 - 2.0**104]), ("bfloat16", [2.0**-133, 255 * 2.0**120]),
     ("float16", [2.0**-24, 65504]), ("float8e4m3fn", [2.0**-9, 448]),
     ("float8e8m0", [2.0**-127, 2.0**127])],
)  # fmt: skip
def test_proposals_end_where_scales_do(name: str, ends: list[float]) -> None:
    grid = Grid.of(QuantSpec("int4", PerTensor()), DTYPES[name], 1.0)
    every = np.float32([ends, ends, ends])
    plan = [(0, 0), (40 * OCTAVE, 0), (-40 * OCTAVE, 0), (300 * OCTAVE, 0), (-300 * OCTAVE, 0)]
    scale, _ = proposed(every.reshape(-1), np.zeros(6, np.float32), plan, grid)
    assert scale[:, 0].tolist() == ends * 3
    assert scale[1, 1:].tolist()[::2] == [ends[1]] * 2
    assert scale[0, 2:].tolist()[::2] == [ends[0]] * 2


def test_a_divisor_of_zero_has_an_infinite_reciprocal() -> None:
    grid = Grid.of(QuantSpec("int4", PerTensor()), DTYPES["float32"], 2.0**-120)
    found = bounds(np.float32([2.0**-40, 1]), np.float32([0, 0]), grid)
    assert found.tolist() == [[np.inf, 2.0**120], [-8, -8], [7, 7]]

"""Figures of a tensor: the stated order of summation, cuts, merging, and what is undefined."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qtool.stats import CHUNK, LANES, Accumulator, Stats, exceeds, unravel

Array = NDArray[Any]

SIZES = [0, 1, 15, 16, 17, 31, 4095, 4096, 4097, 4111, 4112, 8191, 8192, 12301]


def accumulate(
    x: Array, v: Array, x_hat: Array, cuts: list[int], weights: Array | None = None
) -> Stats:
    """The Stats of x, given in pieces between the cuts."""
    accumulator = Accumulator(-128, 127, weighted=weights is not None)
    edges = [0, *sorted(cuts), x.size]
    for start, stop in pairwise(edges):
        w = None if weights is None else weights[start:stop]
        accumulator.update(x[start:stop], v[start:stop], x_hat[start:stop], w)
    return accumulator.finish()


def summed_in_order(terms: list[float]) -> float:
    """The sum as the module states it: 16 lanes in a chunk of 4096, folded by halves, chunks in
    order, every addition in float64."""
    total = 0.0
    for start in range(0, len(terms), 4096):
        lanes = [0.0] * 16
        for i, term in enumerate(terms[start : start + 4096]):
            lanes[i % 16] += term
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        total += lanes[0]
    return total


def as_tuple(stats: Stats) -> tuple[Any, ...]:
    """All that two equal Stats share, sums by their bits."""
    arrays = ("sums", "weighted")
    scalars = [getattr(stats, name) for name in Stats.__slots__ if name not in arrays]
    weighted = None if stats.weighted is None else stats.weighted.tobytes()
    return (*map(repr, scalars), stats.sums.tobytes(), weighted)


def example(size: int, seed: int, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(seed)
    x = (random.normal(size=size) * 10.0 ** random.integers(-6, 6, size)).astype(dtype)
    v = np.rint(x.astype(np.float64))
    x_hat = np.clip(v, -128, 127).astype(np.float32)
    return x, v, x_hat


def test_chunks_and_lanes_have_their_stated_sizes() -> None:
    assert (CHUNK, LANES) == (4096, 16)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_added_in_the_stated_order(size: int) -> None:
    x, v, x_hat = example(size, seed=size)
    sums = accumulate(x, v, x_hat, []).sums
    pairs = [(float(a), float(b)) for a, b in zip(x, x_hat, strict=True)]
    wanted = [
        summed_in_order([a * a for a, _ in pairs]),
        summed_in_order([(b - a) * (b - a) for a, b in pairs]),
        summed_in_order([b - a for a, b in pairs]),
        summed_in_order([a * b for a, b in pairs]),
        summed_in_order([b * b for _, b in pairs]),
    ]
    assert [s.hex() for s in sums.tolist()] == [s.hex() for s in wanted]


@pytest.mark.parametrize("cuts", [[], [100, 4097, 4098]], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_weighted_sums_are_added_in_the_stated_order(size: int, cuts: list[int]) -> None:
    x, v, x_hat = example(size, seed=size)
    x[::97], x[3::89] = np.nan, np.inf
    w = np.random.default_rng(size).lognormal(size=size).astype(np.float32)
    weighted = accumulate(x, v, x_hat, [min(c, size) for c in cuts], w).weighted
    assert weighted is not None
    zero = (0.0, 0.0, 0.0)
    terms = [
        (float(c), float(a), float(b)) if math.isfinite(a) else zero
        for a, b, c in zip(x, x_hat, w, strict=True)
    ]
    wanted = [
        summed_in_order([c for c, _, _ in terms]),
        summed_in_order([c * (a * a) for c, a, _ in terms]),
        summed_in_order([c * ((b - a) * (b - a)) for c, a, b in terms]),
    ]
    assert [s.hex() for s in weighted.tolist()] == [s.hex() for s in wanted]


def test_weighted_figures_by_hand() -> None:
    x, x_hat = np.array([[1.25], [-2]], np.float32), np.array([[1], [-2]], np.float32)
    accumulator = Accumulator(-128, 127, weighted=True)
    accumulator.update(x, np.rint(x), x_hat, np.array([[4], [1]], np.int8))
    figures = accumulator.finish().figures()
    assert figures["weighted_mse"] == 0.25 / 5
    assert figures["weighted_relative_error"] == math.sqrt(0.25 / 10.25)
    assert figures["weighted_sqnr_db"] == 10 * math.log10(10.25 / 0.25)


def test_without_weights_there_are_no_weighted_figures() -> None:
    accumulator = Accumulator(-128, 127)
    accumulator.update(*example(100, seed=3))
    stats = accumulator.finish()
    assert stats.weighted is None
    weighted = {k: v for k, v in stats.figures().items() if k.startswith("weighted")}
    assert weighted == {
        "weighted_mse": None,
        "weighted_relative_error": None,
        "weighted_sqnr_db": None,
    }


@pytest.mark.parametrize("size", [5, 16, 4097, 12301])
@pytest.mark.parametrize("seed", range(6))
def test_the_figures_do_not_depend_on_where_a_tensor_is_cut(size: int, seed: int) -> None:
    x, v, x_hat = example(size, seed)
    x[::97], x[3::89] = np.nan, -np.inf
    random = np.random.default_rng(seed)
    cuts = random.integers(0, size + 1, random.integers(0, 40)).tolist()
    assert as_tuple(accumulate(x, v, x_hat, cuts)) == as_tuple(accumulate(x, v, x_hat, []))


@settings(max_examples=80)
@given(st.integers(0, 9000), st.lists(st.integers(0, 9000), max_size=12))
def test_no_cut_changes_a_bit(size: int, cuts: list[int]) -> None:
    x, v, x_hat = example(size, seed=7)
    whole = accumulate(x, v, x_hat, [])
    assert as_tuple(accumulate(x, v, x_hat, [min(c, size) for c in cuts])) == as_tuple(whole)


def test_single_elements_give_the_bits_of_the_whole() -> None:
    x, v, x_hat = example(4130, seed=1)
    whole = accumulate(x, v, x_hat, [])
    assert as_tuple(accumulate(x, v, x_hat, list(range(4130)))) == as_tuple(whole)


def test_tensors_merge_in_order() -> None:
    parts = [example(size, seed) for seed, size in enumerate([40, 5000, 1, 300])]
    all_stats = [accumulate(*part, []) for part in parts]
    total = Stats()
    for stats in all_stats:
        total.merge(stats)
    assert total.elements == 5341
    assert total.clipped_high == sum(s.clipped_high for s in all_stats)
    assert (total.min, total.max) == (min(s.min for s in all_stats), max(s.max for s in all_stats))
    sums = [0.0] * 5
    for stats in all_stats:
        sums = [a + b for a, b in zip(sums, stats.sums.tolist(), strict=True)]
    assert total.sums.tolist() == sums
    errors = np.concatenate([abs(x_hat - x.astype(np.float64)) for x, _, x_hat in parts])
    assert total.max_abs_error == errors.max()
    assert total.max_abs_error_at == errors.argmax()


EMPTY, PLAIN = Stats(), Stats(elements=1)
ONE, TWO = (Stats(elements=1, weighted=np.array([k, 2.0 * k, 3.0])) for k in (1.0, 2.0))


@pytest.mark.parametrize(
    ("parts", "weighted"),
    [
        ([], None),
        ([ONE], [1.0, 2.0, 3.0]),
        ([ONE, TWO], [3.0, 6.0, 6.0]),
        ([EMPTY, ONE, EMPTY, TWO, EMPTY], [3.0, 6.0, 6.0]),
        ([PLAIN], None),
        ([PLAIN, ONE], None),
        ([ONE, PLAIN], None),
        ([ONE, PLAIN, TWO], None),
    ],
)
def test_weighted_sums_of_tensors_that_all_have_weights_merge(
    parts: list[Stats], weighted: list[float] | None
) -> None:
    total = Stats()
    for part in parts:
        total.merge(part)
    assert (None if total.weighted is None else total.weighted.tolist()) == weighted
    assert total.elements == sum(part.elements for part in parts)


def test_infinite_sums_merge_without_a_warning() -> None:
    total = Stats(sums=np.array([1, np.inf, np.inf, -np.inf, 1]))
    total.merge(Stats(sums=np.array([2, np.inf, -np.inf, np.inf, 0])))
    assert repr(total.sums.tolist()) == "[3.0, inf, nan, nan, 1.0]"


def test_stats_come_back_from_json_to_the_last_bit() -> None:
    x, v, x_hat = example(5000, seed=2)
    x[7], x[8], x[9] = np.nan, np.inf, 0
    weights = np.random.default_rng(2).lognormal(size=5000)
    for stats in (
        accumulate(x, v, x_hat, [], weights),
        accumulate(x, v, x_hat, []),
        accumulate(x[:3], v[:3], np.full(3, np.nan, np.float32), []),
        Stats(),
    ):
        text = json.dumps(stats.to_json())
        back = Stats.from_json(json.loads(text))
        assert as_tuple(back) == as_tuple(stats)
        assert (back.sums.dtype, json.dumps(back.to_json())) == (np.float64, text)


def test_json_of_stats_by_hand() -> None:
    stats = Stats(
        elements=9,
        nan_count=1,
        inf_count=2,
        zero_count=3,
        clipped_low=4,
        clipped_high=5,
        flushed_to_zero=6,
        min=-0.1,
        max=3.0,
        max_abs_error=math.nan,
        max_abs_error_at=7,
        sums=np.array([0.1, 0, -1, math.inf, 2]),
        weighted=np.array([1, 0.5, 0.25]),
    )
    assert stats.to_json() == {
        "elements": 9,
        "nan_count": 1,
        "inf_count": 2,
        "zero_count": 3,
        "clipped_low": 4,
        "clipped_high": 5,
        "flushed_to_zero": 6,
        "min": "-0x1.999999999999ap-4",
        "max": "0x1.8000000000000p+1",
        "max_abs_error": "nan",
        "max_abs_error_at": 7,
        "sums": [
            "0x1.999999999999ap-4",
            "0x0.0p+0",
            "-0x1.0000000000000p+0",
            "inf",
            "0x1.0000000000000p+1",
        ],
        "weighted": ["0x1.0000000000000p+0", "0x1.0000000000000p-1", "0x1.0000000000000p-2"],
    }


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [1, 2, 3, 4]], ids=str)
def test_the_first_of_equal_errors_is_the_one_that_is_named(cuts: list[int]) -> None:
    x = np.array([0.0, 1.5, -1.5, 2.5, 0.25], np.float32)
    v = np.rint(x.astype(np.float64))
    stats = accumulate(x, v, v.astype(np.float32), cuts)
    assert (stats.max_abs_error, stats.max_abs_error_at) == (0.5, 1)


def test_an_exact_tensor_names_its_first_finite_element() -> None:
    x = np.array([np.nan, 1, 2], np.float32)
    stats = accumulate(x, x.astype(np.float64), np.array([0, 1, 2], np.float32), [])
    assert (stats.max_abs_error, stats.max_abs_error_at) == (0.0, 1)


@pytest.mark.parametrize(
    ("x", "x_hat", "figures"),
    [
        pytest.param([0, 0], [0, 0], {
            "mse": 0.0, "rmse": 0.0, "max_abs_error": 0.0, "mean_error": 0.0, "sqnr_db": None,
            "cosine_similarity": None, "relative_error": None, "zero_count": 2,
        }, id="a-zero-signal"),
        pytest.param([1, -2], [1, -2], {
            "mse": 0.0, "max_abs_error": 0.0, "sqnr_db": None, "cosine_similarity": 1.0,
            "relative_error": 0.0, "min": -2.0, "max": 1.0, "absmax": 2.0,
        }, id="an-exact-result"),
        pytest.param([1.25, -2.0], [1, -2], {
            "mse": 0.03125, "max_abs_error": 0.25, "mean_error": -0.125,
            "sqnr_db": 10 * math.log10(5.5625 / 0.0625), "rmse": math.sqrt(0.03125),
            "relative_error": math.sqrt(0.0625 / 5.5625),
            "cosine_similarity": 5.25 / math.sqrt(5.5625 * 5),
        }, id="an-error-of-a-quarter"),
        pytest.param([0.25, 0.25], [0, 0], {
            "mse": 0.0625, "sqnr_db": 0.0, "cosine_similarity": None, "relative_error": 1.0,
            "flushed_to_zero": 2, "zero_count": 0,
        }, id="all-flushed"),
        pytest.param([0, 0], [1, 1], {
            "mse": 1.0, "sqnr_db": None, "relative_error": None, "cosine_similarity": None,
            "mean_error": 1.0, "max_abs_error": 1.0,
        }, id="only-error"),
        pytest.param([], [], {
            "elements": 0, "mse": None, "rmse": None, "mean_error": None, "max_abs_error": None,
            "sqnr_db": None, "cosine_similarity": None, "relative_error": None, "min": None,
            "max": None, "absmax": None, "clipped": 0, "clipped_fraction": None,
        }, id="nothing"),
        pytest.param([math.nan, math.inf, -math.inf], [0, 127, -128], {
            "elements": 3, "nan_count": 1, "inf_count": 2, "zero_count": 0, "mse": None,
            "min": None, "max": None, "absmax": None, "sqnr_db": None, "max_abs_error": None,
            "clipped": 2, "clipped_low": 1, "clipped_high": 1, "clipped_fraction": 2 / 3,
            "flushed_to_zero": 0,
        }, id="nothing-finite"),
        pytest.param([1.25, math.nan, math.inf, -2.0], [1, 0, 127, -2], {
            "elements": 4, "nan_count": 1, "inf_count": 1, "mse": 0.03125, "max_abs_error": 0.25,
            "min": -2.0, "max": 1.25, "clipped_high": 1, "clipped_fraction": 0.25,
        }, id="nonfinite-left-out"),
        pytest.param([1, 1e9], [1, math.nan], {
            "mse": None, "rmse": None, "mean_error": None, "max_abs_error": None, "sqnr_db": None,
            "cosine_similarity": None, "relative_error": None, "max": 1e9,
        }, id="a-code-that-is-nan"),
        pytest.param([1e9, -1e9], [math.inf, -math.inf], {
            "mse": None, "mean_error": None, "max_abs_error": None, "relative_error": None,
        }, id="codes-of-both-infinities"),
    ],
)  # fmt: skip
def test_figures_by_hand(x: list[float], x_hat: list[float], figures: dict[str, Any]) -> None:
    values = np.array(x, np.float32)
    v = np.rint(values.astype(np.float64))
    for cuts in ([], list(range(len(x)))):
        found = accumulate(values, v, np.array(x_hat, np.float32), cuts).figures()
        assert {name: found[name] for name in figures} == figures


def test_the_quarter_error_has_its_known_signal_to_noise_ratio() -> None:
    x = np.array([1.25, -2], np.float32)
    figures = accumulate(
        x, np.rint(x.astype(np.float64)), np.array([1, -2], np.float32), []
    ).figures()
    assert figures["sqnr_db"] == pytest.approx(19.49390006644913, rel=1e-15)


def test_values_count_as_clipped_only_beyond_the_range() -> None:
    v = np.array([-129, -128, -127, 127, 128, math.inf, -math.inf, math.nan])
    x = np.zeros(8, np.float32)
    stats = accumulate(x, v, x, [])
    assert (stats.clipped_low, stats.clipped_high) == (2, 2)


@pytest.mark.parametrize(
    ("x", "nan", "inf"),
    [
        pytest.param(
            np.array([0x7D01, 0x3C00, 0xFC00], np.uint16).view(np.float16),
            1,
            1,
            id="float16-signalling",
        ),
        pytest.param(
            np.array([0x7F81, 0x3F80, 0x7F80], np.uint16).view(ml_dtypes.bfloat16),
            1,
            1,
            id="bfloat16-signalling",
        ),
        pytest.param(
            np.array([0x7F800001, 0x3F800000, 0x7F800000], np.uint32).view(np.float32),
            1,
            1,
            id="float32-signalling",
        ),
        pytest.param(
            np.array([0x7FF0000000000001, 0x3FF0000000000000, 0x7FF0000000000000], np.uint64).view(
                np.float64
            ),
            1,
            1,
            id="float64-signalling",
        ),
        pytest.param(np.array([1e300, 1.0, 3.5e38]), 0, 2, id="float64-beyond-float32"),
        pytest.param(np.array([2**31 - 1, 1, -(2**31)], np.int32), 0, 0, id="int32"),
    ],
)
def test_every_source_type_is_counted_without_a_warning(x: Array, nan: int, inf: int) -> None:
    stats = accumulate(x, np.zeros(3), np.ones(3, np.float32), [])
    assert (stats.nan_count, stats.inf_count) == (nan, inf)
    assert stats.sums[4] == 3 - nan - inf


def test_errors_are_against_the_original_values() -> None:
    for x in (np.array([1 + 2.0**-40]), np.array([2**24 + 1], np.int32)):
        x_hat = x.astype(np.float32)
        stats = accumulate(x, x.astype(np.float64), x_hat, [])
        assert stats.max_abs_error == abs(float(x[0]) - float(x_hat[0])) > 0


@pytest.mark.parametrize("values", [[-0.0, 0.0], [0.0, -0.0], [-0.0]], ids=str)
def test_extremes_have_no_negative_zero(values: list[float]) -> None:
    x = np.array(values, np.float32)
    stats = accumulate(x, x.astype(np.float64), x, [])
    assert (math.copysign(1, stats.min), math.copysign(1, stats.max)) == (1, 1)
    assert stats.zero_count == len(values)


def test_nan_is_the_largest_error_and_the_first_one_stays() -> None:
    assert exceeds(math.nan, math.inf)
    assert not exceeds(math.nan, math.nan)
    assert not exceeds(math.inf, math.nan)
    assert exceeds(1.0, 0.5)
    assert not exceeds(1.0, 1.0)
    x = np.zeros(5, np.float32)
    x_hat = np.array([1, np.inf, np.nan, 5, np.nan], np.float32)
    for cuts in ([], [1, 2, 3, 4]):
        assert accumulate(x, np.zeros(5), x_hat, cuts).max_abs_error_at == 2


@pytest.mark.parametrize(
    ("index", "shape", "expected"),
    [(None, (3,), None), (0, (), []), (5, (2, 3), [1, 2]), (7, (2, 2, 2), [1, 1, 1])],
)
def test_an_index_is_told_axis_by_axis(
    index: int | None, shape: tuple[int, ...], expected: list[int] | None
) -> None:
    assert unravel(index, shape) == expected

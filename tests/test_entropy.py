"""Ranges of least divergence, held against onnxruntime's calibrator and the algorithm in a loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector

import qtool
from qtool.dtypes import DTYPES
from qtool.errors import SpecError
from qtool.scales import entropy
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, Tiled

Array = NDArray[Any]

COLLECTOR = HistogramCollector("entropy", False, 128, 128, 99.99, "same")


def divergences(counts: list[int], levels: int) -> dict[int, float]:
    """What onnxruntime's get_entropy_threshold computes in float32, for every step from the middle,
    in exact sums of float64."""
    bins, middle, found = len(counts), len(counts) // 2, {}
    for step in range(levels // 2, middle + 1):
        start, end = middle - step, min(middle + step + 1, bins)
        inside = counts[start:end]
        p = list(inside)
        p[0] += sum(counts[:start])
        p[-1] += sum(counts[end:])
        run = len(inside) // levels
        sums = [sum(inside[i * run : (i + 1) * run]) for i in range(levels)]
        sums[-1] += sum(inside[levels * run :])
        q = [0] * len(p)
        for i, total in enumerate(sums):
            filled = sum(v != 0 for v in p[i * run : (i + 1) * run])
            if filled:
                q[i * run : (i + 1) * run] = [int(total / filled)] * run
        if not any(q):
            found[step] = math.inf
            continue
        smooth = []
        for values in (p, q):
            empty = values.count(0)
            share = 0.0001 * empty / (len(values) - empty)
            moved = [v - share if v else 0.0001 for v in values]
            total = math.fsum(moved)
            smooth.append([v / total for v in moved])
        found[step] = math.fsum(a * math.log(a / b) for a, b in zip(*smooth, strict=True))
    return found


DATA = {
    "normal": lambda r, n: r.standard_normal(n),
    "heavy tails": lambda r, n: r.standard_t(3, n),
    "outlier": lambda r, n: np.append(r.standard_normal(n - 1), 60),
    "rectified": lambda r, n: np.maximum(r.standard_normal(n), 0),
    "few values": lambda r, n: r.integers(-3, 4, n).astype(float),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("n", "bins", "levels"), [(300, 129, 16), (20000, 257, 32), (900, 200, 7)])
def test_thresholds_are_those_of_least_divergence_and_onnxruntimes(
    kind: str, n: int, bins: int, levels: int
) -> None:
    rng = np.random.default_rng(n)
    groups = [DATA[kind](rng, n).astype(np.float32) for _ in range(4)]
    most = [np.abs(x).max() for x in groups]
    pairs = zip(groups, most, strict=True)
    histograms = [np.histogram(x, bins, range=(-t, t)) for x, t in pairs]
    steps = entropy.thresholds(np.stack([counts for counts, _ in histograms]), levels)
    for x, t, (counts, edges), step in zip(groups, most, histograms, steps, strict=True):
        exact = divergences(counts.tolist(), levels)
        best = min(exact.values())
        assert exact[int(step)] <= best * (1 + 1e-12) + 1e-14
        given = (counts, edges.astype(np.float32), -t, t)
        low, _ = COLLECTOR.get_entropy_threshold(given, levels)
        theirs = bins // 2 - int(np.argmin(np.abs(edges - low)))
        assert exact[theirs] <= best + 3e-6  # what float32 sums can tell apart
        clear = sorted(exact.values())[1] > best + 6e-6
        assert step == theirs or not clear
        assert len(x) == counts.sum()


def test_groups_have_the_thresholds_that_they_have_alone_the_first_of_equal_ones() -> None:
    one_bin, ends, tails = np.zeros((3, 65), np.int64)
    one_bin[32] = 100  # no divergence, whatever the threshold
    ends[[0, 64]] = 50  # within all but the last threshold there is nothing
    tails[20:45], tails[:20], tails[45:] = 40, 1, 3
    together = entropy.thresholds(np.stack([one_bin, ends, tails]), 8)
    alone = [int(entropy.thresholds(counts[None], 8)[0]) for counts in (one_bin, ends, tails)]
    assert together.tolist() == alone
    for counts, step in zip((one_bin, ends, tails), alone, strict=True):
        exact = divergences(counts.tolist(), 8)
        assert step == min(exact, key=lambda s: (round(exact[s], 12), s))
    assert alone[:2] == [4, 32]


def test_thresholds_of_any_histograms_have_the_least_divergence() -> None:
    random = np.random.default_rng(5)
    shape = random.exponential(size=(200, 33)) ** random.uniform(0, 4, (200, 1))
    counts = random.poisson(shape * random.uniform(0.5, 20, (200, 1)))
    counts[:, 16] += 1
    steps = entropy.thresholds(counts, 8)
    for row, step in zip(counts.tolist(), steps.tolist(), strict=True):
        exact = divergences(row, 8)
        assert exact[step] <= min(exact.values()) * (1 + 1e-12) + 1e-14
    assert len(set(steps.tolist())) > 8


def test_the_divergence_of_smoothed_counts() -> None:
    p = np.array([[4, 0, 2, 1], [1, 1, 0, 0], [4, 0, 0, 0], [2, 0, 1, 0]])
    q = np.array([[3, 0, 3, 1], [2, 0, 1, 0], [2, 0, 1, 0], [0, 0, 0, 0]])
    found = entropy._divergence(p, q).tolist()
    e, third = 1e-4, 1e-4 / 3  # every empty one takes e from the others in equal parts
    smooth = [
        ([4 - third, e, 2 - third, 1 - third], [3 - third, e, 3 - third, 1 - third]),
        ([1 - e, 1 - e, e, e], [2 - e, e, 1 - e, e]),
        ([4 - 3 * e, e, e, e], [2 - e, e, 1 - e, e]),
    ]
    for (above, below), divergence in zip(smooth, found[:3], strict=True):
        a, b = math.fsum(above), math.fsum(below)
        terms = [x / a * math.log((x / a) / (y / b)) for x, y in zip(above, below, strict=True)]
        assert divergence == pytest.approx(math.fsum(terms), rel=1e-12)
    assert found[3] == math.inf


def test_most_choices_are_clear_and_the_same() -> None:
    same = 0
    for seed in range(60):
        x = np.random.default_rng(seed).standard_normal(20000).astype(np.float32)
        t = np.abs(x).max()
        counts, edges = np.histogram(x, 257, range=(-t, t))
        low, _ = COLLECTOR.get_entropy_threshold((counts, edges.astype(np.float32), -t, t), 32)
        [step] = entropy.thresholds(counts[None], 32)
        same += edges.astype(np.float32)[128 - step] == low
    assert same >= 59


def test_ranges_are_thresholds_as_far_as_values_reach() -> None:
    rng = np.random.default_rng(1)
    x = np.stack([rng.standard_t(3, 3000), np.abs(rng.standard_t(3, 3000))]).astype(np.float32)
    low, high = entropy.ranges(x, 16)
    for values, lowest, highest in zip(x, low, high, strict=True):
        t = float(np.abs(values).max())
        bins = 16 * 16 + 1
        place = [min(int((v / t + 1) * (bins / 2)), bins - 1) for v in values.tolist()]
        exact = divergences(np.bincount(place, minlength=bins).tolist(), 16)
        step = min(exact, key=lambda s: (exact[s], s))
        edge = t * ((2 * step + 1) / bins)
        assert lowest == max(float(values.min()), -edge)
        assert highest == min(float(values.max()), edge)
        assert highest < values.max()  # tails are cut


def test_a_range_goes_with_its_values() -> None:
    x = np.random.default_rng(2).standard_t(4, (5, 700)).astype(np.float32)
    low, high = entropy.ranges(x, 16)
    alone = [entropy.ranges(row[None], 16) for row in x]
    assert np.array_equal(low, [one[0][0] for one in alone])
    assert np.array_equal(high, [one[1][0] for one in alone])
    scaled = entropy.ranges(x * np.float32(2.0**-120), 16)
    assert np.array_equal(scaled[1], high * 2.0**-120)
    padded = np.concatenate([x, np.full((5, 9), np.nan, np.float32)], axis=1)
    assert np.array_equal(entropy.ranges(padded, 16), (low, high))


def test_groups_without_a_distribution_keep_their_range() -> None:
    x = np.array([[0, 0, 0], [np.nan] * 3, [5, 5, 5], [0, 3, -1]], np.float32)
    low, high = entropy.ranges(x, 256)
    assert low.tolist() == [0, 0, 5, -1]
    assert high.tolist() == [0, 0, 5, 3]
    assert [a.shape for a in entropy.ranges(np.empty((2, 0), np.float32), 4)] == [(2,), (2,)]
    same = entropy.ranges(np.full((1, 300), 5, np.float32), 16)
    assert [float(end[0]) for end in same] == [5, 5]
    few = np.random.default_rng(3).standard_t(3, (1, 256)).astype(np.float32)
    assert [end[0] for end in entropy.ranges(few, 16)] == [few.min(), few.max()]
    assert entropy.ranges(np.tile(few, 2), 16)[1][0] < few.max()
    enough = np.append(few, few[:, :1], axis=1)  # as many values as bins
    assert entropy.ranges(enough, 16)[1][0] < few.max()


@pytest.mark.parametrize("times", [1, 20])
def test_values_are_counted_in_equal_bins(times: int) -> None:
    x = np.float32([[-1, -0.5, 0, 0.5, 1], [0, 0, np.nan, 2, -2], [0, 0, 0, 0, 0]])
    counts = np.ones((3, 5), np.int64)
    entropy.add_histograms(counts, np.tile(x, times), np.float64([1, 2, 0]))
    wanted = np.array([[1, 1, 1, 1, 1], [1, 0, 2, 0, 1], [0, 0, 5, 0, 0]])
    assert (counts - 1).tolist() == (wanted * times).tolist()


def test_levels_are_the_codes_of_a_type() -> None:
    found = {name: entropy.levels_of(DTYPES[name]) for name in ("uint2", "int4", "uint8", "int16")}
    assert found == {"uint2": 4, "int4": 16, "uint8": 256, "int16": 256}


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis(0), PerAxis(1), Blocked(1, 900), Tiled((30, 40))]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_granularity_has_the_ranges_of_its_groups(
    granularity: Granularity, symmetric: bool
) -> None:
    x = np.random.default_rng(8).standard_t(3, (70, 1000)).astype(np.float32)
    x[3, 5] = np.inf
    spec = QuantSpec("int4", granularity, method="entropy", symmetric=symmetric, nonfinite="allow")
    found = qtool.quantize(x, spec)
    numbers = np.where(np.isfinite(x), x, np.nan)
    axis = getattr(granularity, "axis", 0)
    groups = {
        PerTensor: [numbers],
        PerAxis: list(np.moveaxis(numbers, axis, 0)),
        Blocked: [part for row in numbers for part in (row[:900], row[900:])],
        Tiled: [numbers[r : r + 30, c : c + 40] for r in (0, 30, 60) for c in range(0, 1000, 40)],
    }  # fmt: skip
    scales = []
    for group in groups[type(granularity)]:
        [low], [high] = entropy.ranges(group.reshape(1, -1), 16)
        scales.append(max(-low, high) / 7 if symmetric else (max(high, 0) - min(low, 0)) / 15)
    assert found.scale.shape == granularity.scale_shape(x.shape)
    assert found.scale.reshape(-1).tobytes() == np.float32(scales).tobytes()
    assert (found.zero_point is None) == symmetric


def test_it_is_for_integers_and_not_for_dynamic_quantization() -> None:
    with pytest.raises(SpecError, match="method: entropy needs codes in equal steps"):
        QuantSpec("float8e4m3fn", PerTensor(), method="entropy")
    with pytest.raises(SpecError, match="DynamicQuantizeLinear itself says how"):
        QuantSpec("uint8", PerTensor(), method="entropy", semantics="dynamic")

"""Ranges of values that come in pieces: those of the same values at once, and NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.scales import entropy, streamed
from qtool.scales.ranges import ranges
from qtool.spec import PerAxis, PerTensor, QuantSpec

Array = NDArray[Any]

RNG = np.random.default_rng(11)
WILD = RNG.integers(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32)
DATA = {
    "normal": RNG.standard_normal((7, 5, 40), np.float32),
    "ties": RNG.integers(-2, 3, (9, 4, 30)).astype(np.float32),
    "zeros": np.array([0.0, -0.0] * 60, np.float32).reshape(4, 3, 10),
    "every exponent": np.where(np.isfinite(WILD), WILD, np.float32(1)).reshape(20, 2, 100),
    "subnormal": (RNG.standard_normal((3, 3, 33)) * 1e-42).astype(np.float32),
    "one value": RNG.standard_normal((1, 4, 1), np.float32),
    "positive": np.abs(RNG.standard_normal((6, 3, 50), np.float32)),
    "not finite": np.where(
        RNG.random((8, 3, 20)) < 0.2, np.float32([np.nan, np.inf, -np.inf, 1])[:, None, None, None],
        RNG.standard_normal((4, 8, 3, 20)),
    ).astype(np.float32).reshape(32, 3, 20),
    "a group without numbers": np.stack(
        [np.full((5, 6), np.nan), RNG.standard_normal((5, 6))], axis=1
    ).astype(np.float32),
}  # fmt: skip


def pieces_of(x: Array) -> streamed.Pieces:
    """Rows two by two, then the last row group by group, each in two parts."""

    def pieces() -> Iterator[streamed.Piece]:
        for start in range(0, len(x) - 1, 2):
            yield 0, x[start : min(start + 2, len(x) - 1)]
        for group in range(x.shape[1]):
            for part in np.array_split(x[-1:, group : group + 1], 2, axis=2):
                if part.size:
                    yield group, part

    return pieces


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # every exponent: differences overflow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["percentile:99.9", "percentile:50", "percentile:100",
                                    "percentile:12.5", "entropy"])  # fmt: skip
@pytest.mark.parametrize("kind", DATA)
def test_pieces_have_the_range_of_the_whole(kind: str, method: str, symmetric: bool) -> None:
    x = DATA[kind]
    spec = QuantSpec("int4", PerAxis(1), symmetric=symmetric, method=method)
    found = streamed.ranges(pieces_of(x), x.shape[1], spec)
    if method == "entropy":
        rows = np.where(np.isfinite(x), x, np.nan).swapaxes(0, 1).reshape(x.shape[1], -1)
        expected = entropy.ranges(rows.astype(np.float32), 16)
    else:
        expected = ranges(x, spec)
    for ends, of_whole in zip(found, expected, strict=True):
        assert ends.dtype == np.float64
        assert np.array_equal(ends, of_whole)


def test_entropy_cuts_the_tails_of_a_stream() -> None:
    x = np.random.default_rng(0).standard_t(3, (40, 1, 100)).astype(np.float32)
    spec = QuantSpec("uint4", PerTensor(), method="entropy")
    low, high = streamed.ranges(pieces_of(x), 1, spec)
    assert x.min() < low[0] < 0 < high[0] < x.max()


@pytest.mark.parametrize("groups", [1, 3, 40])
@pytest.mark.parametrize("counters", [1 << 23, 1 << 16, 1 << 9])  # for 16, 8 and 4 bits of 40
def test_order_statistics_are_those_of_sorted_values(
    groups: int, counters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_COUNTERS", counters)
    x = np.random.default_rng(groups).standard_normal((2, groups, 9), np.float32)
    x[0, 0, :4] = [0.0, -0.0, np.inf, np.nan]
    ordered = np.sort(x.swapaxes(0, 1).reshape(groups, -1), axis=1)
    ranks = np.array([0, 3, 4, 15])[:, None].repeat(groups, axis=1)
    found = streamed.order_statistics(pieces_of(x), ranks)
    assert np.array_equal(found, np.take_along_axis(ordered, ranks.T, axis=1).T)


def test_percentiles_are_numpys_to_the_last_bit() -> None:
    x = np.random.default_rng(3).standard_normal((3, 1, 1001), np.float32)
    percents = [0.0, 0.1, 33.3, 50.0, 99.99, 100.0]
    found = streamed.percentiles(pieces_of(x), np.array([x.size]), percents)
    expected = np.percentile(x.astype(np.float64), percents)
    assert found[:, 0].tobytes() == expected.tobytes()
    found = streamed.percentiles(pieces_of(x), np.array([x.size]), percents, magnitudes=True)
    expected = np.percentile(np.abs(x).astype(np.float64), percents)
    assert found[:, 0].tobytes() == expected.tobytes()


def test_percentiles_of_one_value_and_halfway_between_two() -> None:
    random = np.random.default_rng(4)
    x = random.standard_normal((2, 1000, 1), np.float32)
    x[1] *= np.exp2(random.integers(20, 60, (1000, 1))).astype(np.float32)  # not exact in float64
    count = np.full(1000, 2)
    found = streamed.percentiles(pieces_of(x), count, [50.0])
    assert found[0].tobytes() == np.percentile(x[:, :, 0].astype(float), 50, axis=0).tobytes()
    one = np.full((1, 1, 1), 3.5, np.float32)
    found = streamed.percentiles(lambda: iter([(0, one)]), np.array([1]), [0.0, 50.0, 100.0])
    assert found.tolist() == [[3.5]] * 3

"""Clipping and error figures, summed chunk by chunk in an order that no tiling can change.

The elements of a tensor, in C order, form chunks of CHUNK. Within a chunk, element i goes to lane
i mod LANES, each lane is summed in order, and the lanes are folded by halves. Chunk sums are added
in index order. All sums are float64, without fused multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.kernels import CHUNK, LANES
from qtool.spec import Shape

Array = NDArray[Any]

_EXACT = Context(prec=20)  # libm's logarithms are not the same on every processor
_SUMS, _WEIGHTED = 5, 3  # how many there are


@dataclass(slots=True)
class Stats:
    """Counts, extremes and sums over elements x and their reconstruction x_hat.

    Non-finite x are counted and left out of extremes and sums.
    sums: of x^2, e^2, e, x * x_hat and x_hat^2, where e = x_hat - x.
    weighted: sums of w, w x^2 and w e^2; None where some elements have no weights w.
    max_abs_error_at: index in C order of the first element of largest |e|.
    """

    elements: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    flushed_to_zero: int = 0
    min: float = math.inf
    max: float = -math.inf
    max_abs_error: float = -1.0
    max_abs_error_at: int | None = None
    sums: Array = field(default_factory=lambda: np.zeros(_SUMS))
    weighted: Array | None = None

    def merge(self, other: Stats) -> None:
        """Add the elements of other, which come after these."""
        if not self.elements:
            self.weighted = other.weighted
        elif other.elements and self.weighted is not None:
            self.weighted = None if other.weighted is None else self.weighted + other.weighted
        at = other.max_abs_error_at
        if at is not None and exceeds(other.max_abs_error, self.max_abs_error):
            self.max_abs_error, self.max_abs_error_at = other.max_abs_error, self.elements + at
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        with np.errstate(invalid="ignore"):  # Inf - Inf
            self.sums = self.sums + other.sums

    def figures(self) -> dict[str, Any]:
        """The figures under their names in the report; undefined ones are None.

        mse = sum(e^2) / n, rmse = sqrt(mse), mean_error = sum(e) / n over the n finite elements;
        relative_error = ||e|| / ||x||, sqnr_db = 10 log10(sum(x^2) / sum(e^2)), None where either
        sum is 0; cosine_similarity = <x, x_hat> / (||x|| ||x_hat||). weighted_mse = sum(w e^2) /
        sum(w), and so on.
        """
        xx, ee, e, xy, yy = (float(value) for value in self.sums)
        n = self.elements - self.nan_count - self.inf_count
        clipped = self.clipped_low + self.clipped_high
        mse = _ratio(ee, n)
        figures = {name: getattr(self, name) for name in _COUNTS}
        figures |= {
            "clipped": clipped,
            "clipped_fraction": _ratio(clipped, self.elements),
            "min": self.min if n else None,
            "max": self.max if n else None,
            "absmax": max(abs(self.min), abs(self.max)) if n else None,
            "mse": mse,
            "rmse": _root(mse),
            "mean_error": _ratio(e, n),
            "max_abs_error": _finite(self.max_abs_error) if n else None,
            "sqnr_db": decibels(xx, ee),
            "cosine_similarity": _ratio(xy, math.sqrt(xx * yy)),
            "relative_error": _root(_ratio(ee, xx)),
        }
        w, wxx, wee = (0.0,) * 3 if self.weighted is None else map(float, self.weighted)
        return figures | {
            "weighted_mse": _ratio(wee, w),
            "weighted_relative_error": _root(_ratio(wee, wxx)),
            "weighted_sqnr_db": decibels(wxx, wee),
        }

    def to_json(self) -> dict[str, Any]:
        """All of it, to the last bit, as plain data; floats as text in base 16."""
        extremes = {name: getattr(self, name).hex() for name in _EXTREMES}
        counts = {name: getattr(self, name) for name in _COUNTS}
        sums = {
            "sums": _to_text(self.sums),
            "weighted": None if self.weighted is None else _to_text(self.weighted),
        }
        return counts | extremes | {"max_abs_error_at": self.max_abs_error_at, **sums}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Stats:
        """What to_json() has given."""
        extremes = {name: float.fromhex(fields[name]) for name in _EXTREMES}
        sums = {"sums": _from_text(fields["sums"])}
        if fields["weighted"] is not None:
            sums["weighted"] = _from_text(fields["weighted"])
        return cls(**{**fields, **extremes, **sums})


def _to_text(values: Array) -> list[str]:
    return [float(value).hex() for value in values]


def _from_text(values: Sequence[str]) -> Array:
    return np.array([float.fromhex(value) for value in values])


_EXTREMES = ("min", "max", "max_abs_error")
_COUNTS = (
    "elements",
    "nan_count",
    "inf_count",
    "zero_count",
    "clipped_low",
    "clipped_high",
    "flushed_to_zero",
)


class Accumulator:
    """Builds the Stats of one tensor from windows of its elements, given in C order."""

    def __init__(self, qmin: float, qmax: float, *, weighted: bool = False) -> None:
        self._qmin, self._qmax = qmin, qmax
        self._stats = Stats()
        self._sums = np.zeros(_SUMS + _WEIGHTED * weighted)
        self._lanes = np.zeros((self._sums.size, LANES))

    def update(self, x: Array, v: Array, x_hat: Array, weights: Array | None = None) -> None:
        """Add the next elements: x as in the source, v their rounded values before saturation,
        x_hat their reconstruction in float32, and their weights, if they have any."""
        # Signalling NaN, float64 beyond float32 and infinite sums are figures here, not faults.
        with np.errstate(all="ignore"):
            values = x.ravel().astype(np.float64)
            estimate = x_hat.ravel().astype(np.float64)
            finite = np.isfinite(x.ravel().astype(np.float32, copy=False))
            window = _window(values, finite, v.ravel(), estimate, self._qmin, self._qmax)
            w = None if weights is None else weights.ravel().astype(np.float64)
            if not finite.all():
                values, estimate = np.where(finite, values, 0.0), np.where(finite, estimate, 0.0)
                w = None if w is None else np.where(finite, w, 0.0)
            self._add_sums(values, estimate, w)
        self._stats.merge(window)

    def finish(self) -> Stats:
        """The figures of everything added."""
        with np.errstate(invalid="ignore"):  # Inf - Inf
            sums = self._sums + _fold(self._lanes)
        self._stats.sums = sums[:_SUMS]
        self._stats.weighted = sums[_SUMS:] if sums.size > _SUMS else None
        return self._stats

    def _add_sums(self, x: Array, x_hat: Array, w: Array | None) -> None:
        start = self._stats.elements % CHUNK
        chunks = (start + x.size) // CHUNK
        rows = -(-(start + x.size) // LANES)
        terms = np.zeros((self._sums.size, rows * LANES))
        # the lanes carried over from the unfinished chunk take the place of its first row: a lane
        # that new elements reach in that row holds 0 so far
        carried = min(start, LANES)
        terms[:, :carried] = self._lanes[:, :carried]
        new = terms[:, start : start + x.size]
        error = np.subtract(x_hat, x, out=new[2])
        np.multiply(x, x, out=new[0])
        np.multiply(error, error, out=new[1])
        np.multiply(x, x_hat, out=new[3])
        np.multiply(x_hat, x_hat, out=new[4])
        if w is not None:
            new[5] = w
            np.multiply(w, new[0], out=new[6])
            np.multiply(w, new[1], out=new[7])
        whole = terms[:, : chunks * CHUNK].reshape(len(terms), chunks, CHUNK // LANES, LANES)
        folded = _fold(np.add.reduce(whole, axis=2))
        running = np.concatenate([self._sums[:, None], folded], axis=1)
        self._sums = np.add.accumulate(running, axis=1)[:, -1]
        rest = terms[:, chunks * CHUNK :].reshape(len(terms), -1, LANES)
        self._lanes = np.add.reduce(rest, axis=1)


def _window(x: Array, finite: Array, v: Array, x_hat: Array, qmin: float, qmax: float) -> Stats:
    """Counts and extremes of one window, all in float64; the sums stay 0."""
    stats = Stats(elements=x.size)
    if not x.size:
        return stats
    error = np.abs(x_hat - x)
    x_finite = x
    if not finite.all():
        stats.nan_count = int(np.isnan(x).sum())
        stats.inf_count = x.size - int(finite.sum()) - stats.nan_count
        error = np.where(finite, error, -1.0)
        x_finite = x[finite]
    if x_finite.size:
        # + 0.0: which of 0.0 and -0.0 NumPy takes for the smaller one depends on the machine
        stats.min, stats.max = float(x_finite.min()) + 0.0, float(x_finite.max()) + 0.0
        stats.max_abs_error_at = int(np.argmax(error))
        stats.max_abs_error = float(error[stats.max_abs_error_at])
    is_zero = x == 0
    stats.zero_count = int(np.count_nonzero(is_zero))
    stats.flushed_to_zero = int(np.count_nonzero((x_hat == 0) & ~is_zero & finite))
    stats.clipped_low = int(np.count_nonzero(v < qmin))
    stats.clipped_high = int(np.count_nonzero(v > qmax))
    return stats


def _fold(lanes: Array) -> Array:
    """The sum over the last axis, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


def exceeds(new: float, old: float) -> bool:
    """Whether an error is larger than another; NaN is the largest."""
    return new > old or (math.isnan(new) and not math.isnan(old))


def decibels(signal: float, noise: float) -> float | None:
    """The ratio of two sums of squares; None where one of them is 0 or not finite."""
    if not _positive(signal) or not _positive(noise):
        return None
    return 10 * float(_EXACT.log10(Decimal(signal / noise)))


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _ratio(numerator: float, denominator: float) -> float | None:
    if not math.isfinite(numerator) or not _positive(denominator):
        return None
    return numerator / denominator


def unravel(index: int | None, shape: Shape) -> list[int] | None:
    """An index in C order as one index per axis."""
    return None if index is None else [int(i) for i in np.unravel_index(index, shape)]

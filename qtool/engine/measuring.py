"""Figures of a tensor and of what it became, from stored values alone, in pieces of bounded size.

The same figures, to the last bit, as those of the quantization that made the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops, rounding
from qtool.dtypes import DType
from qtool.engine.plain import BOX
from qtool.engine.restore_plain import read_codes
from qtool.engine.tiling import tile_size
from qtool.kernels.geometry import layout
from qtool.pool import buffer, in_order
from qtool.spec import QuantSpec, Reader
from qtool.stats import Accumulator, Stats
from qtool.tensor import Codes, operator_scale

Array = NDArray[Any]
Moved = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """stats: clipping and error. lost, first_lost: how many values are not finite any more, and the
    number of the first of them, in C order."""

    stats: Stats
    lost: int = 0
    first_lost: int | None = None


def measure(
    read: Reader,
    source: DType,
    codes: Codes,
    spec: QuantSpec | None,
    *,
    compiled: bool,
    jobs: int,
    moved: Moved,
) -> Measured:
    """The figures of a tensor whose codes are stored.

    read, source: its elements and their type. spec: how x becomes a code, with its precision; what
    lies outside of its range counts as clipped. None: nothing is counted.
    compiled: with kernels, for codes that engine.can_stream() would make. moved: told how many
    bytes of source more are done.
    """
    if compiled and spec is not None:
        stats = _requantized(read, source, codes, spec, jobs)
        if stats is not None:
            moved(math.prod(codes.shape) * source.numpy.itemsize)
            return Measured(stats)
    scale = operator_scale(codes.scale, codes.global_scale).reshape(-1)
    zero, bias = (None if v is None else v.reshape(-1) for v in (codes.zero_point, codes.bias))
    groups = layout(codes.shape, codes.granularity)

    def window(x: Array, start: int) -> tuple[Array, Array | None]:
        group = _groups(groups, start, x.size)
        s, z, b = (v if v is None else v[group] for v in (scale, zero, bias))
        assert s is not None
        y = read_codes(codes, start, x.size)
        x_hat = rounding.estimated(y, s, z, b, codes.dtype)
        if spec is None:
            return x_hat, None
        single = x if source.is_integer else ops.cast(x, ops.FLOAT32)
        return x_hat, rounding.unbounded(single, s, z, spec, spec.precision or ops.FLOAT32)

    limits = (spec.qmin, spec.dtype.qmax) if spec else (-math.inf, math.inf)
    return _summed(read, source, math.prod(codes.shape), window, limits, jobs, moved)


def measure_floats(
    read: Reader, source: DType, read_hat: Reader, dtype: DType, size: int, jobs: int, moved: Moved
) -> Measured:
    """The figures of a tensor of that size that was converted to a float type."""

    def window(x: Array, start: int) -> tuple[Array, None]:
        x_hat = np.empty(x.size, dtype.numpy)
        read_hat(start, x_hat)
        return ops.cast(x_hat, ops.FLOAT32), None

    return _summed(read, source, size, window, (-math.inf, math.inf), jobs, moved)


def _requantized(
    read: Reader, source: DType, codes: Codes, spec: QuantSpec, jobs: int
) -> Stats | None:
    """The figures that quantizing again gives, if it gives the stored codes and finite values."""
    from qtool.engine.tally import Groups, Tally
    from qtool.kernels.tensor import TileFigures, TileQuantizer

    size, bits = math.prod(codes.shape), codes.dtype.bits
    width, step = bits if codes.is_packed else max(bits, 8), tile_size(size, jobs)
    groups = Groups.of(codes.scale, codes.zero_point, over=codes.global_scale)
    quantizer, tally = TileQuantizer(codes.shape, source, spec), Tally()

    def tile(start: int) -> TileFigures | None:
        count = min(step, size - start)
        values = buffer("raw", source.numpy, count)
        read(start, values)
        stored, made = (buffer(n, np.dtype("u1"), -(-count * width // 8)) for n in ("held", "made"))
        codes.read(start * width // 8, stored)
        figures = quantizer.quantize(values, groups.divisor, groups.offset, start, 0, width, made)
        return figures if np.array_equal(stored, made) else None

    def take(figures: TileFigures | None) -> None:
        if figures is None:
            raise _OtherCodesError
        tally.add(figures, groups.part(0, 0))

    try:
        in_order(tile, range(0, size, step), jobs, take)
    except _OtherCodesError:
        return None
    tally.merge()
    return tally.stats if np.isfinite(tally.stats.sums).all() else None


class _OtherCodesError(Exception):
    """The stored codes are not the nearest ones."""


def _summed(
    read: Reader,
    source: DType,
    size: int,
    window: Callable[[Array, int], tuple[Array, Array | None]],
    limits: tuple[float, float],
    jobs: int,
    moved: Moved,
) -> Measured:
    """The figures of all windows. window: what the elements from a number on became, and, if it is
    known, their codes before saturation, which clips outside of the limits."""
    figures = Accumulator(*limits)
    lost: list[tuple[int, int]] = []  # first and number, of each window

    def work(start: int) -> tuple[int, Array, Array, Array]:
        x = np.empty(min(BOX, size - start), source.numpy)
        read(start, x)
        x_hat, v = window(x, start)
        return start, x, np.zeros(x.size) if v is None else v, x_hat

    def take(found: tuple[int, Array, Array, Array]) -> None:
        start, x, v, x_hat = found
        figures.update(x, v, x_hat)
        if not np.isfinite(x_hat).all():
            bad = np.flatnonzero(np.isfinite(ops.cast(x, ops.FLOAT32)) & ~np.isfinite(x_hat))
            lost.extend([(start + int(bad[0]), bad.size)] if bad.size else [])
        moved(x.nbytes)

    in_order(work, range(0, size, BOX), jobs, take)
    return Measured(figures.finish(), sum(count for _, count in lost), lost[0][0] if lost else None)


def _groups(groups: Array, start: int, count: int) -> Array:
    """The number of the group of each of the elements from number start on; see layout()."""
    size, inner, block, outer_stride, block_stride, inner_stride, rows, band = groups.tolist()
    line, c = np.divmod(np.arange(start, start + count), inner)
    a, d = np.divmod(line, size)
    above = a if rows == 1 else a // band * -(-band // rows) + a % band // rows
    return np.asarray(above * outer_stride + d // block * block_stride + c * inner_stride)

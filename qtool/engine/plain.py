"""Quantizes one tensor in memory with the operators themselves, in boxes of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops, rounding, scales
from qtool.engine import global_scale
from qtool.engine.request import SOURCES, Request
from qtool.errors import TensorError
from qtool.spec import Blocked, Granularity, Shape, Tiled, folded
from qtool.stats import Accumulator
from qtool.tensor import QuantizedTensor, bias_of, operator_scale

Array = NDArray[Any]

BOX = 1 << 16  # elements: their float64 temporaries stay in the L2 cache


def quantize(x: Array, asked: Request, jobs: int = 0) -> QuantizedTensor:
    """The tensor x, in C order, as asked. Raises TensorError as engine.quantize().

    jobs: threads of kernels that search for scales by weighted errors; 0: without kernels.
    """
    spec = asked.spec
    single = x if asked.source.is_integer else ops.cast(x, ops.FLOAT32)
    if spec.nonfinite == "error" or spec.semantics == "dynamic":
        _check_finite(x, single, asked)
    scale, zero, over = parameters(x, single, asked, jobs)
    return measured(x, single, scale, zero, asked, over)


def parameters(
    x: Array, single: Array, asked: Request, jobs: int = 0
) -> tuple[Array, Array | None, float | None]:
    """The scale, zero point and global scale: as given, or chosen for x, which is single in
    float32. jobs: see quantize()."""
    if asked.given is not None:
        return *asked.given, None
    with naming(asked.name):
        over = _global_scale(single, asked) if asked.spec.global_scale else None
        scale, zero = _chosen(x, ops.cast(single, ops.FLOAT32), asked, over or 1.0, jobs)
    divisor = ops.cast(operator_scale(scale, over), asked.precision)
    ops.check_scale(divisor, f"scale of {asked.name}")
    return scale, zero, over


def _chosen(
    x: Array, single: Array, asked: Request, over: float, jobs: int
) -> tuple[Array, Array | None]:
    """Scale and zero point of x, which is single in float32."""
    if jobs and x.size and asked.source.name in SOURCES and asked.weights is not None:
        from qtool.engine import searching

        return searching.weighted(x, single, asked, jobs, over)
    return scales.choose(single, asked.spec, asked.storage, over, asked.weights, compiled=jobs > 0)


def _global_scale(single: Array, asked: Request) -> float:
    absmax = asked.absmax
    if absmax is None:
        finite = np.isfinite(single)
        absmax = float(np.max(np.abs(single), where=finite, initial=0.0))
    if not absmax:  # zeros, or no elements, which have no groups
        return 1.0
    granularity, weights = asked.spec.granularity, asked.weights
    groups = scales.grouped(ops.cast(single, ops.FLOAT32), granularity)
    shares = None if weights is None else scales.grouped(weights, granularity)

    def cost(over: float, _: range, numbers: range) -> float:
        part = slice(numbers.start, numbers.stop)
        w = None if shares is None else shares[part]
        return scales.cost(groups[part], asked.spec, asked.storage, over, w)

    return global_scale.chosen(asked, absmax, cost)


def measured(
    x: Array,
    single: Array,
    scale: Array,
    zero: Array | None,
    asked: Request,
    over: float | None,
    chosen: Array | None = None,
) -> QuantizedTensor:
    """Codes and figures, box by box in C order, so that temporaries stay small.

    single: x in float32. chosen: the codes, in place of the nearest ones.
    """
    spec = asked.spec
    dtype = spec.dtype
    y = np.empty(x.shape, dtype.numpy) if chosen is None else chosen
    figures = Accumulator(spec.qmin, dtype.qmax, weighted=asked.weights is not None)
    shape = folded(x.shape, spec.granularity)
    source, original, codes = single.reshape(shape), x.reshape(shape), y.reshape(shape)
    weights = None if asked.weights is None else asked.weights.reshape(shape)
    groups = Groups(x.shape, spec.granularity)
    divisor = operator_scale(scale, over)
    bias = bias_of(scale, zero, dtype) if spec.bias else None
    for box in _boxes(shape):
        s = groups.of(divisor, box)
        z = None if zero is None else groups.of(zero, box)
        if chosen is None:
            v, codes[box] = rounding.codes_of(source[box], s, z, spec, asked.precision)
        else:
            v = codes[box].astype(np.float64)
        b = None if bias is None else groups.of(bias, box)
        w = None if weights is None else weights[box]
        figures.update(original[box], v, rounding.estimated(codes[box], s, z, b, dtype), w)
    return QuantizedTensor(y, scale, zero, spec, figures.finish(), asked.precision, over)


class Groups:
    """Finds the scale or zero point of every element of a box, of a tensor that is folded()."""

    def __init__(self, shape: Shape, granularity: Granularity) -> None:
        outer, size, inner = folded(shape, granularity)
        self._row = np.arange(outer) if isinstance(granularity, Blocked) else np.zeros(outer, int)
        block = granularity.block_size if isinstance(granularity, Blocked) else 1
        if isinstance(granularity, Tiled):
            bands = -(-shape[-2] // granularity.rows)
            row = np.arange(outer)
            self._row = row // shape[-2] * bands + row % shape[-2] // granularity.rows
            block = granularity.columns
        self._blocked = isinstance(granularity, Blocked | Tiled)
        self._inner = inner if self._blocked else 1
        self._index = np.arange(size) // block  # of the group, along the axis

    def of(self, values: Array, box: tuple[slice, slice, slice]) -> Array:
        """values of the granularity's scale shape, broadcastable to the box."""
        if values.ndim == 0:
            return values
        rows, along, inner = box
        if not self._blocked:
            return values.reshape(1, -1, 1)[:, along]
        groups = values.reshape(-1, self._index[-1] + 1, self._inner)
        return groups[self._row[rows], :, inner].take(self._index[along], axis=1)


def _boxes(shape: Shape) -> Iterator[tuple[slice, slice, slice]]:
    """The whole shape in contiguous pieces of about BOX elements, in C order."""
    outer, size, inner = shape
    if 0 in shape:
        return
    everything = slice(None)
    if size * inner <= BOX:
        for rows in _runs(outer, BOX // (size * inner)):
            yield rows, everything, everything
    elif inner <= BOX:
        for row in _runs(outer, 1):
            for along in _runs(size, BOX // inner):
                yield row, along, everything
    else:
        for row in _runs(outer, 1):
            for along in _runs(size, 1):
                for piece in _runs(inner, BOX):
                    yield row, along, piece


def _runs(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _check_finite(x: Array, single: Array, asked: Request) -> None:
    if single.dtype.kind == "i" or np.isfinite(single).all():
        return
    bad = ~np.isfinite(single)
    first = int(np.argmax(bad))
    raise nonfinite_error(asked, first, x.reshape(-1)[first], int(bad.sum()))


def nonfinite_error(asked: Request, first: int, value: Any, bad: int) -> TensorError:
    """What is wrong with a tensor of which `bad` values are not finite in float32.

    first, value: the number of the first of them, in C order, and itself.
    """
    index = [int(i) for i in np.unravel_index(first, asked.shape)]
    count = math.prod(asked.shape)
    many = f"{count} value" + "s" * (count != 1)
    rule = f"{bad} of {many} {'is' if bad == 1 else 'are'} not finite"
    return TensorError(
        f"tensor {asked.name}",
        f"{value} at {index}: {rule}{' in float32' if math.isfinite(value) else ''}",
        "mend the weights"
        + ("" if asked.spec.semantics == "dynamic" else ", or use --nonfinite allow to saturate"),
    )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let an operator's TensorError, which knows no names, name the tensor."""
    try:
        yield
    except TensorError as error:
        raise TensorError(f"tensor {name}", error.rule, error.remedy) from None

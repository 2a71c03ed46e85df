"""What became of every tensor of a file in another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import engine, ops, report
from qtool.dtypes import DType
from qtool.engine import measuring
from qtool.engine.measuring import Measured
from qtool.jobs.progress import Progress
from qtool.jobs.verify_recipe import spec_of
from qtool.jobs.verify_side import Side, Weight
from qtool.ops import SOURCES
from qtool.recipe import SOURCE_FLOATS, Recipe
from qtool.spec import PerTensor, QuantSpec, TensorInfo, describe
from qtool.stats import Stats, unravel
from qtool.tensor import Codes, operator_scale

Array = NDArray[Any]

_PIECE = 1 << 18  # elements that are compared at once
_CLIPPED = ("clipped", "clipped_low", "clipped_high", "clipped_fraction")
# What files do not say of a tensor.
_UNKNOWN = ("mx_rule", "rounding", "output_error", "output_error_nearest")


class Comparison:
    """Follows the tensors of one file into another, and measures what they became.

    recipe: how the codes came about, as far as it is known.
    records: of the quantized and converted tensors, with their figures. kept: the names of those
    that are what they were. problems: what is wrong, by tensor.
    """

    def __init__(
        self, original: Side, quantized: Side, recipe: Recipe | None, progress: Progress, jobs: int
    ) -> None:
        self._original, self._quantized = original, quantized
        self._recipe, self._progress, self._jobs = recipe, progress, jobs
        self._kernels_pay = False
        self.records: list[tuple[dict[str, Any], Stats]] = []
        self.kept: list[str] = []
        self.problems: list[tuple[str, str]] = []

    def run(self) -> None:
        """Compare all of it."""
        names = self._original.names
        renamed = _bare(self._original, self._quantized)
        infos = [self._original.info(n) for n in names if n not in self._original.faults]
        sizes = [i.size for i in infos if self._quantized.weight(renamed.get(i.name, i.name))]
        self._kernels_pay = engine.kernels_pay(sum(sizes))
        self._progress.begin(len(infos), sum(info.nbytes for info in infos))
        self.problems += [(name, f"ORIGINAL: {w}") for name, w in self._original.faults.items()]
        for info in infos:
            self._follow(info, renamed.get(info.name, info.name))
            self._progress.finish(info.name)
        known = {renamed.get(name, name) for name in names}
        for name in self._quantized.names:
            if name not in known and name not in self._quantized.helpers:
                self.problems.append((name, "is no tensor of ORIGINAL"))

    def _follow(self, info: TensorInfo, name: str) -> None:
        """One tensor, which goes by that name in the other file."""
        problem, moved = None, info.nbytes
        weight = self._quantized.weight(name, info)
        found = self._quantized.infos.get(name)
        shape = found.shape if found else weight.stored.shape if weight else info.shape
        if name in self._quantized.faults:
            problem = self._quantized.faults[name]
        elif weight is None and found is None:
            problem = "is missing"
        elif shape != info.shape:
            problem = f"its shape is {list(shape)}, it was {list(info.shape)}"
        elif weight is not None and info.dtype in SOURCES:
            self._add_quantized(info, weight)
            moved = 0
        elif found is not None and found.dtype == info.dtype:
            problem = self._difference(info, name)
            self.kept += [] if problem else [info.name]
        elif found is not None and {found.dtype, info.dtype} <= {*SOURCE_FLOATS}:
            self._add_converted(info, found)
            moved = 0
        else:
            after = found.dtype if found else weight.stored.dtype if weight else None
            problem = f"is {after}, it was {info.dtype}"
        if problem is not None:
            self.problems.append((info.name, problem))
        self._progress.advance(moved)

    def _add_quantized(self, info: TensorInfo, weight: Weight) -> None:
        spec = spec_of(info.name, weight.stored, self._recipe)
        with weight.codes() as codes, self._original.reading(info.name) as read:
            fault = _scale_fault(codes)
            if fault is not None:
                self.problems.append((info.name, fault))
                spec = None
            measured = measuring.measure(
                read, info.dtype, codes, spec, compiled=self._compiled(info, codes, spec),
                jobs=self._jobs, moved=self._progress.advance,
            )  # fmt: skip
            how = _described(codes, weight, spec)
        self._add(info, how, measured, weight.nbytes, is_clipped=spec is not None, fault=fault)

    def _add_converted(self, info: TensorInfo, found: TensorInfo) -> None:
        with (
            self._original.reading(info.name) as read,
            self._quantized.reading(found.name) as read_hat,
        ):
            measured = measuring.measure_floats(
                read, info.dtype, read_hat, found.dtype, info.size, self._jobs,
                self._progress.advance,
            )  # fmt: skip
        how = _how(found.dtype, None) | {"num_scales": 0}
        self._add(info, how, measured, found.nbytes, is_clipped=True)

    def _add(
        self,
        info: TensorInfo,
        how: Mapping[str, Any],
        measured: Measured,
        nbytes: int,
        *,
        is_clipped: bool,
        fault: str | None = None,
    ) -> None:
        """The record of a tensor. is_clipped: whether it is known what is. fault: of the scale."""
        record = report.tensor_record(info, how, measured.stats, nbytes)
        if not is_clipped:
            record |= dict.fromkeys(_CLIPPED)
        if measured.first_lost is not None and fault is None:
            at = unravel(measured.first_lost, info.shape)
            rule = f"{measured.lost} of {info.size} values are not finite any more, first at {at}"
            self.problems.append((info.name, rule))
        self.records.append((record, measured.stats))

    def _compiled(self, info: TensorInfo, codes: Codes, spec: QuantSpec | None) -> bool:
        """Whether kernels can measure a tensor, and it pays; they are loaded then."""
        if spec is None or not self._kernels_pay or info.size < engine.TILES_PAY:
            return False
        given = (codes.scale, codes.zero_point)
        if not engine.can_stream(engine.Request(info.name, info.shape, info.dtype, spec, given)):
            return False
        from qtool.kernels import machine

        machine.load(self._progress.note)
        return True

    def _difference(self, info: TensorInfo, name: str) -> str | None:
        """How the bytes of a tensor differ that should be the same, or that it holds NaN; None:
        neither."""
        count, first, has_nan = 0, -1, False
        with (
            self._original.reading(info.name) as read,
            self._quantized.reading(name) as read_other,
        ):
            for start in range(0, info.size, _PIECE):
                pair = [np.empty(min(_PIECE, info.size - start), info.dtype.numpy) for _ in "ab"]
                read(start, pair[0])
                read_other(start, pair[1])
                differ = _different(*pair)
                if differ.size and not count:
                    first = start + int(differ[0])
                    values = [x[differ[0]] for x in pair]
                count += differ.size
                if info.dtype in SOURCE_FLOATS:
                    has_nan |= bool(np.isnan(ops.cast(pair[1], ops.FLOAT32)).any())
        if not count:
            return "holds NaN" if has_nan else None
        at = unravel(first, info.shape)
        was = f"{values[0]}, it is {values[1]}"
        return f"{count} of {info.size} values changed though it is not quantized: {at} was {was}"


def _different(a: Array, b: Array) -> Array:
    """The numbers of the elements whose bytes differ."""
    one, other = a.view(np.uint8), b.view(np.uint8)
    if np.array_equal(one, other):
        return np.empty(0, np.intp)
    return np.flatnonzero((one != other).reshape(a.size, -1).any(axis=1))


def _bare(original: Side, quantized: Side) -> dict[str, str]:
    """What the tensor of an array file, whose name is the file's, goes by in the other file."""
    pair = original.names, quantized.names
    if [len(names) for names in pair] != [1, 1]:
        return {}
    if "npy" in (original.source.container, quantized.source.container):
        return {pair[0][0]: pair[1][0]}
    return {}


def _scale_fault(codes: Codes) -> str | None:
    """What is wrong with the first scale that nothing can be multiplied by."""
    over = codes.global_scale
    if over is not None and not (math.isfinite(over) and over):
        return f"its global scale is {over}"
    values = ops.cast(codes.scale, ops.FLOAT32)
    bad = np.flatnonzero(~np.isfinite(values) | (values == 0))
    if not bad.size:
        return None
    at = unravel(int(bad[0]), values.shape)
    value = values.reshape(-1)[bad[0]]
    return f"its scale is {value} at {at}, {bad.size} of {values.size} are zero or not finite"


def _described(codes: Codes, weight: Weight, spec: QuantSpec | None) -> dict[str, Any]:
    """How a tensor is quantized, under the names of the report."""
    stored = weight.stored
    scale = ops.cast(operator_scale(codes.scale, codes.global_scale), ops.FLOAT64)
    finite = scale.size and bool(np.isfinite(scale).all())
    low, high = (float(scale.min()), float(scale.max())) if finite else (None, None)
    return _how(stored.dtype, describe(stored.granularity)) | {
        "precision": spec.precision.name if spec and spec.precision else None,
        "scale_dtype": stored.scale_dtype.name,
        "num_scales": codes.scale.size,
        "scale_min": low,
        "scale_max": high,
        "global_scale": weight.global_scale or codes.global_scale,
        "zero_point": stored.zero_point,
    }


def _how(dtype: DType, granularity: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tensor of that type, nothing else known."""
    nowhere = dict.fromkeys(describe(PerTensor()))
    rest = ("precision", "scale_dtype", "scale_min", "scale_max", "global_scale", *_UNKNOWN)
    return {
        "dtype": dtype.name,
        **(granularity or nowhere),
        **dict.fromkeys(rest),
        "zero_point": False,
    }

"""The outputs of two ONNX models on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.errors import UsageError
from qtool.formats import Source
from qtool.jobs.samples import Samples
from qtool.runtime import Input, Session

Array = NDArray[Any]

_SEED = 0
# Totals of a report, each the worst of all outputs.
_WORST = {
    "outputs_relative_error": max,
    "outputs_max_abs_error": max,
    "outputs_cosine_similarity": min,
    "outputs_argmax_agreement": min,
}


@dataclass(slots=True)
class _Output:
    """Sums over the values a of one output and b of the other model's, where a is finite."""

    name: str
    runs: int = 0
    elements: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    ee: float = 0.0
    largest: float = 0.0
    rows: int = 0
    agreeing: int = 0
    problem: str | None = None

    def add(self, a: Array, b: Array) -> None:
        """One more run."""
        self.runs += 1
        if a.shape != b.shape:
            shapes = f"its shape is {list(b.shape)}, it was {list(a.shape)}"
            self.problem = self.problem or f"output {self.name}: {shapes} (run {self.runs})"
            return
        one, other = (ops.cast(x, ops.FLOAT64) for x in (a, b))
        finite = np.isfinite(one)
        if np.isnan(one).any():
            text = f"{np.isnan(one).sum()} of {a.size} values are NaN in ORIGINAL too"
            self.problem = self.problem or f"output {self.name}: {text} (run {self.runs})"
        bad = np.argwhere(finite & ~np.isfinite(other))
        if bad.size:
            count = f"{len(bad)} of {b.size} values are not finite any more"
            at = f"first at {bad[0].tolist()} of run {self.runs}"
            self.problem = self.problem or f"output {self.name}: {count}, {at}"
        if a.ndim > 1 and a.shape[-1] > 1 and a.size and a.dtype.kind not in "iub":
            same = (one.argmax(axis=-1) == other.argmax(axis=-1))[finite.all(axis=-1)]
            self.rows, self.agreeing = self.rows + same.size, self.agreeing + int(same.sum())
        x, y = one[finite], other[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            error = y - x
            self.elements += x.size
            self.aa += float((x * x).sum())
            self.bb += float((y * y).sum())
            self.ab += float((x * y).sum())
            self.ee += float((error * error).sum())
            self.largest = max(self.largest, float(np.abs(error).max(initial=0)))

    def figures(self) -> dict[str, Any]:
        """relative_error: ||b - a|| / ||a||; argmax_agreement: how often both have the largest
        value of the last axis in the same place; None for outputs of rank 1, and for integers."""
        return {
            "name": self.name,
            "runs": self.runs,
            "elements": self.elements,
            "relative_error": _root(_ratio(self.ee, self.aa)),
            "max_abs_error": self.largest if math.isfinite(self.largest) else None,
            "cosine_similarity": _ratio(self.ab, math.sqrt(self.aa) * math.sqrt(self.bb)),
            "argmax_agreement": self.agreeing / self.rows if self.rows else None,
        }


@dataclass(frozen=True, slots=True)
class Outputs:
    """outputs: their figures. problems: what is wrong. warnings: what was made up."""

    outputs: Sequence[dict[str, Any]]
    problems: Sequence[str]
    warnings: Sequence[str]

    def totals(self) -> dict[str, float | None]:
        """The worst of every figure."""
        found = {}
        for name, worst in _WORST.items():
            values = [output[name.removeprefix("outputs_")] for output in self.outputs]
            values = [value for value in values if value is not None]
            found[name] = worst(values) if values else None
        return found


def compare(
    original: Source,
    quantized: Source,
    samples: str | Path | None,
    count: int | None,
    threads: int,
) -> Outputs:
    """Run both models, and compare every output of the first one.

    samples: a file, see Samples; None: `count` random inputs, standard normal, 0 or 1 for integers
        of more than 8 bits, any value for others; sizes that a model leaves open are 1.
    Raises UsageError for files that are no models, QtoolError where onnxruntime cannot run one.
    """
    option = "--random" if samples is None else "--run"
    for source in (original, quantized):
        if source.container != "onnx":
            raise UsageError(option, f"{source.path} is no model that runs", "it is for ONNX")
    first, second = (_session(source, threads) for source in (original, quantized))
    wanted, given = ({i.name: i for i in session.inputs} for session in (first, second))
    if wanted != given:
        differing = sorted(n for n in {*wanted, *given} if wanted.get(n) != given.get(n))
        return Outputs([], [f"input {differing[0]} is not what it was"], [])
    missing = [name for name in first.outputs if name not in second.outputs]
    problems = [f"output {name} is missing" for name in missing]
    found = [_Output(name) for name in first.outputs if name not in missing]
    if not found:  # onnxruntime takes no names for all names
        return Outputs([], problems, [])
    if samples is None:
        runs, warnings = _random(first.inputs, count or 0), _open_sizes(first.inputs)
    else:
        runs, warnings = Samples([samples], first.inputs, 1).runs(), []
    names = [output.name for output in found]
    for feeds in runs:
        pairs = zip(found, first.run(feeds, names), second.run(feeds, names), strict=True)
        for output, a, b in pairs:
            output.add(a, b)
    problems += [output.problem for output in found if output.problem]
    return Outputs([output.figures() for output in found], problems, warnings)


def _session(source: Source, threads: int) -> Session:
    path = source.path
    return Session(path.read_bytes(), path.parent, str(path), threads)


def _random(inputs: Sequence[Input], count: int) -> Iterator[Mapping[str, Array]]:
    generator = np.random.default_rng(_SEED)
    for _ in range(count):
        yield {wanted.name: _values(wanted, generator) for wanted in inputs}


def _values(wanted: Input, generator: np.random.Generator) -> Array:
    shape, dtype = [1 if size is None else size for size in wanted.shape], wanted.dtype
    if dtype.kind == "f":
        return np.asarray(generator.standard_normal(shape)).astype(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 1:
        limits = np.iinfo(dtype)
        return np.asarray(generator.integers(limits.min, limits.max + 1, shape)).astype(dtype)
    return np.asarray(generator.integers(0, 2, shape)).astype(dtype)


def _open_sizes(inputs: Sequence[Input]) -> list[str]:
    names = [wanted.name for wanted in inputs if None in wanted.shape]
    if not names:
        return []
    return [f"random inputs have size 1 where the model leaves it open: {', '.join(names)}"]


def _ratio(a: float, b: float) -> float | None:
    return a / b if math.isfinite(a) and math.isfinite(b) and b > 0 else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)

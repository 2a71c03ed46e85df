"""The inputs of a model for one run after another, from files of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SpecError
from qtool.formats import Source
from qtool.jobs import streams
from qtool.runtime import Input
from qtool.spec import Reader, TensorInfo

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Feed:
    """The array of one input; step: how many along its first axis a run takes, 0: all of it."""

    thing: str
    wanted: Input
    info: TensorInfo
    step: int

    @property
    def has_runs(self) -> bool:
        """Whether the first axis is that of the runs."""
        return len(self.info.shape) > len(self.wanted.shape)

    @property
    def runs(self) -> int | None:
        """How many runs the array is enough for; None: for any number."""
        return -(-self.info.shape[0] // self.step) if self.step else None

    def part(self, read: Reader, run: int) -> Array:
        """What a run is given."""
        shape = self.info.shape
        start = run * self.step
        if self.step:
            shape = (min(self.step, shape[0] - start), *shape[1:])
        found = np.empty(shape, self.info.dtype.numpy)
        read(start * math.prod(shape[1:]), found.reshape(-1))
        return self._cast(found[0, ...] if self.has_runs else found)

    def _cast(self, found: Array) -> Array:
        """The values in the input's type; integers stay what they are."""
        wanted = self.wanted.dtype
        cast = found.astype(wanted) if np.can_cast(found.dtype, wanted, "same_kind") else None
        if cast is None or (wanted.kind in "iu" and not np.array_equal(cast, found)):
            rule = f"{found.dtype} values, the model takes {wanted}"
            raise SpecError(self.thing, rule, "save them in that type")
        return cast


class Samples:
    """Files of arrays named like a model's inputs; of one input, a .npy too. Other arrays in them
    are not looked at.

    An array with one axis more than its input holds one run after another along its first axis. An
    array with the input's axes holds samples along the first one, of which a run takes as many as
    the model's own first axis has, or else `batch`, the last run what is left. What has no axes
    goes into every run.

    Raises SpecError where an array is missing or does not fit.
    """

    def __init__(self, files: Sequence[str | Path], inputs: Sequence[Input], batch: int) -> None:
        self._files = files
        self._inputs = inputs
        self._batch = batch
        for file in files:  # what does not fit shows before the first run
            with streams.opened(file) as source:
                self._feeds(source)

    def runs(self) -> Iterator[dict[str, Array]]:
        """What every run of the model is given."""
        for file in self._files:
            with streams.opened(file) as source, ExitStack() as stack:
                feeds, count = self._feeds(source)
                readers = [stack.enter_context(source.reading(feed.info.name)) for feed in feeds]
                for run in range(count):
                    pairs = zip(feeds, readers, strict=True)
                    yield {feed.wanted.name: feed.part(read, run) for feed, read in pairs}

    def _feeds(self, source: Source) -> tuple[list[_Feed], int]:
        """The array of every input, and the number of runs that they are enough for."""
        path = str(source.path)
        arrays = [(wanted, self._array(wanted, source)) for wanted in self._inputs]
        alike = [(w, i) for w, i in arrays if w.shape and len(w.shape) == len(i.shape)]
        fixed = {w.shape[0] for w, _ in alike if w.shape[0] is not None}
        if len(fixed) > 1:
            sizes = " and ".join(map(str, sorted(fixed)))
            rule = f"one run of the model takes {sizes} along first axes"
            raise SpecError(path, rule, "give every array an axis of runs in front")
        size = next(iter(fixed), self._batch)
        feeds = [self._feed(w, i, path, size, is_fixed=bool(fixed)) for w, i in arrays]
        counts = {feed.runs for feed in feeds if feed.runs is not None}
        if len(counts) > 1 or counts == {0}:
            numbers = " and ".join(map(str, sorted(filter(None, counts)))) or "no"
            remedy = "give all inputs the same number of samples"
            raise SpecError(path, f"its arrays are enough for {numbers} runs", remedy)
        return feeds, next(iter(counts), 1)

    def _array(self, wanted: Input, source: Source) -> TensorInfo:
        found = {info.name: info for info in source.infos()}
        if source.container == "npy" and len(self._inputs) == 1:
            return source.infos()[0]
        if wanted.name not in found:
            names = ", ".join(each.name for each in self._inputs)
            rule = f"has no array {wanted.name!r}"
            raise SpecError(str(source.path), rule, f"the model's inputs are {names}")
        return found[wanted.name]

    def _feed(
        self, wanted: Input, info: TensorInfo, path: str, size: int, *, is_fixed: bool
    ) -> _Feed:
        thing = f"{path}: array {info.name!r}"
        extra = len(info.shape) - len(wanted.shape)
        sizes = zip(info.shape[1:], wanted.shape[1 - extra :], strict=True)
        if extra not in (0, 1) or any(fixed not in (None, n) for n, fixed in sizes):
            shape = ", ".join("?" if n is None else str(n) for n in wanted.shape)
            raise SpecError(
                thing,
                f"shape {info.shape} does not fit input {wanted.name} of shape ({shape})",
                "give samples along the first axis, or runs along one more in front",
            )
        if extra or not wanted.shape:
            return _Feed(thing, wanted, info, extra)
        if is_fixed and info.shape[0] % size:
            rule = f"{info.shape[0]} samples are no whole runs of {size}, which the model takes"
            raise SpecError(thing, rule, "leave some out or add some")
        return _Feed(thing, wanted, info, size)

"""Quantizes a source in several ways, one after the other, for the figures alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from qtool import engine
from qtool.errors import QtoolError
from qtool.formats import Source
from qtool.formats.checkpoint import CheckpointSource
from qtool.jobs import quantize, quantize_folder, recipes, screening
from qtool.jobs.combinations import Combination
from qtool.jobs.nbits import NBits
from qtool.jobs.outcomes import Outcome
from qtool.jobs.progress import Part, Progress
from qtool.jobs.tensors import Job
from qtool.layouts import Layout, nbits
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe, words


@dataclass(frozen=True)
class Trial:
    """A combination that can be quantized: its words for this source, and what they mean."""

    words: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    plan: Sequence[Planned]

    @property
    def effort(self) -> int:
        """See engine.work()."""
        return sum(engine.work(p.spec, p.info.size) for p in self.plan if p.spec is not None)


class Sweep:
    """The trials on one source, which stays open.

    shared: options of quantize_file for all of them, by name. paths: files that they name.
    """

    def __init__(self, source: Source, shared: Mapping[str, Any], jobs: int) -> None:
        self._shared, self._jobs = shared, jobs
        requantize = bool(shared["requantize"])
        self._readable = screening.readable(source, requantize=requantize)
        if isinstance(source, CheckpointSource) and not requantize:
            quantize_folder.check_config(source)
        self._source = source
        self._is_bare = source.container == "npy"
        words = {"importance": shared["importance"]} if shared["importance"] else {}
        self._importance = quantize.weighing(Recipe({}, options=words))
        self._weighted = quantize.weighted(self._importance, self._readable)
        self.paths: list[Path] = self._importance.paths if self._importance else []

    def trials(self, asked: Sequence[Combination]) -> tuple[list[Trial], list[dict[str, Any]]]:
        """The combinations that can be quantized, and, with the reason, those that cannot.

        Raises QtoolError where there are none of the first.
        """
        trials: list[Trial] = []
        errors: list[tuple[Combination, QtoolError]] = []
        for one in asked:
            try:
                trials.append(self._trial(one))
            except QtoolError as error:
                errors.append((one, error))
        if trials:
            return trials, [c.described() | {"reason": self._reason(e)} for c, e in errors]
        if len({str(error) for _, error in errors}) == 1:
            raise errors[0][1]
        reasons = [f"{words.phrase(c.words)}: {self._reason(e)}" for c, e in errors]
        more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
        rule = "no combination can be quantized: " + "; ".join([*reasons[:3], *more])
        raise QtoolError(str(self._source.path), rule)

    def warnings(self, trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> list[str]:
        """What the user should know although there is a result."""
        of_weights = [self._importance.warnings(t.plan) for t in trials if self._importance]
        stats = {record["name"]: found for one in outcomes for record, found in one.tensors}
        found = [
            *screening.idle(trials[0].recipe, trials[0].plan),
            *(warning for warnings in of_weights for warning in warnings),
            *screening.nonfinite_warnings(stats.values()),
        ]
        return list(dict.fromkeys(found))

    def _trial(self, one: Combination) -> Trial:
        """Raises QtoolError as quantize_file does with these options."""
        said = one.words_for(bare=self._is_bare, axis=self._shared["axis"])
        recipe = recipes.asked(**{**self._shared, **said})
        container = "onnx" if self._source.container == "onnx" else "safetensors"
        layout = quantize.chosen_layout(self._shared["layout"], container, recipe)
        recipe = replace(
            recipe, bare=self._is_bare, left_alone=layout.left_alone,
            silent=container == "onnx", weighted=self._weighted,
        )  # fmt: skip
        if self._shared["layout"] == nbits.NAME:
            plan = NBits(None).plan(cast("Any", self._readable), recipe)
        else:
            plan = make_plan(screening.marked(self._readable), recipe, None, layout)
        if self._importance is not None:
            self._importance.check(plan)
        screening.check_something(plan, recipe, self._source)
        screening.check_kinds(plan, layout, container)
        return Trial(said, recipe, layout, plan)

    def _reason(self, error: QtoolError) -> str:
        """Why a combination is left out; the source is what all are about."""
        is_source = error.thing == str(self._source.path)
        return error.rule if is_source else f"{error.thing}: {error.rule}"

    def outcomes(self, trials: Sequence[Trial], progress: Progress) -> list[Outcome]:
        """What comes of every trial."""
        sizes = [p.info.nbytes for trial in trials for p in trial.plan if p.spec is not None]
        progress.begin(len(sizes), sum(sizes))
        if any(engine.kernels_pay(trial.effort) for trial in trials):
            from qtool.kernels import machine

            machine.load(progress.note)  # the first trial is not to take longer for that
        return [self._outcome(trial, Part(progress)) for trial in trials]

    def _outcome(self, trial: Trial, progress: Progress) -> Outcome:
        started = time.perf_counter()
        job = Job(
            self._readable, trial.plan, None, trial.layout, progress, self._jobs,
            importance=self._importance,
        )  # fmt: skip
        job.measured()
        return Outcome(trial.words, trial.plan, job.records, time.perf_counter() - started)

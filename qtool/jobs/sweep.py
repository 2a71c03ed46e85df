"""Quantizes a source in several ways, one after the other, for the figures alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool import engine
from qtool.errors import QtoolError
from qtool.formats import Source
from qtool.formats.checkpoint import CheckpointSource
from qtool.jobs import planning, quantize_folder, quantize_shard, recipes, screening
from qtool.jobs.combinations import Combination
from qtool.jobs.command import Command
from qtool.jobs.nbits import NBits
from qtool.jobs.outcomes import Outcome
from qtool.jobs.progress import Part, Progress, Silent
from qtool.jobs.tensors import Job
from qtool.layouts import Layout, nbits
from qtool.layouts.provenance import Provenance
from qtool.plan import Planned
from qtool.recipe import Recipe, words


@dataclass(frozen=True)
class Trial:
    """A combination that can be quantized: its words for this source, and what they mean.

    file_bytes: of the file, or of the shards, that `qtool quantize` would write."""

    words: Mapping[str, Any]
    command: Command
    recipe: Recipe
    layout: Layout
    plan: Sequence[Planned]
    file_bytes: int = 0

    @property
    def effort(self) -> int:
        """See engine.work()."""
        return sum(engine.work(p.spec, p.info.size) for p in self.plan if p.spec is not None)


class Sweep:
    """The trials on one source, which stays open; src: what the user calls it.

    shared: options of quantize_file for all of them, by name.
    """

    def __init__(
        self, src: str | Path, source: Source, shared: Mapping[str, Any], jobs: int | None
    ) -> None:
        self._src, self._source, self._shared, self._jobs = src, source, shared, jobs
        requantize = bool(shared["requantize"])
        self._readable = screening.readable(source, requantize=requantize)
        if isinstance(source, CheckpointSource) and not requantize:
            quantize_folder.check_config(source)
        self._is_bare = source.container == "npy"
        self._container = "onnx" if source.container == "onnx" else "safetensors"

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
        stats = {record["name"]: found for one in outcomes for record, found in one.tensors}
        found = screening.idle(trials[0].recipe, trials[0].plan)
        for trial in trials:
            found += planning.warnings(trial.command, trial.plan)
        return list(dict.fromkeys(found + screening.nonfinite_warnings(stats.values())))

    def _trial(self, one: Combination) -> Trial:
        """Raises QtoolError as quantize_file does with these options, before any work."""
        said = one.words_for(bare=self._is_bare, axis=self._shared["axis"])
        recipe = recipes.asked(**{**self._shared, **said})
        graph = NBits(None) if self._shared["layout"] == nbits.NAME else None
        command = Command(
            "quantize", self._src, None, recipe, recipe.tag, jobs=self._jobs, graph=graph
        )
        layout = planning.chosen_layout(self._shared["layout"], self._container, recipe)
        recipe = replace(
            recipe, bare=self._is_bare, left_alone=layout.left_alone,
            silent=self._container == "onnx",
            weighted=command.weighted([info.name for info in self._readable.infos()]),
        )  # fmt: skip
        plan = planning.plan_of(command, self._readable, layout, recipe)
        screening.check_something(plan, recipe, self._source, remedy=None)
        screening.check_kinds(plan, layout, self._container)
        trial = Trial(said, command, recipe, layout, plan)
        return replace(trial, file_bytes=self._file_bytes(trial))

    def _file_bytes(self, trial: Trial) -> int:
        """Bytes that `qtool quantize` would write."""
        command, source = trial.command, self._source
        if isinstance(source, CheckpointSource):
            made_by = Provenance(recipes.text_of(trial.recipe))
            works = quantize_shard.works_of(command, source, trial.plan, trial.layout, made_by)
            return quantize_shard.bytes_of(source, works)
        path = Path(f"{source.path.stem}.{command.tag}.{self._container}")
        return self._job(trial, Silent()).nbytes(path, self._container, external_data=False)

    def _job(self, trial: Trial, progress: Progress) -> Job:
        return Job(
            self._readable, trial.plan, None, trial.layout, progress, trial.command.threads,
            graph=trial.command.graph, importance=trial.command.importance,
            provenance=Provenance(recipes.text_of(trial.recipe)),
        )  # fmt: skip

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
        job = self._job(trial, progress)
        job.measured()
        seconds = time.perf_counter() - started
        return Outcome(trial.words, trial.plan, trial.file_bytes, job.records, seconds)

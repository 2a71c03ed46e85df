"""qtool quantize and qtool dynamic of one file."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from functools import partial as bound
from pathlib import Path
from typing import Any

from qtool import report
from qtool.errors import OutputError, UsageError
from qtool.formats import Source
from qtool.jobs import hashing, planning, recipes, screening, streams, terms
from qtool.jobs.command import Command
from qtool.jobs.hashing import Sums
from qtool.jobs.mixing import Mixture, mixed
from qtool.jobs.recipes import Keeping
from qtool.jobs.settings import settings
from qtool.jobs.streams import ReportFile
from qtool.jobs.tensors import Job
from qtool.jobs.unmet import kept_with_nan
from qtool.layouts import native
from qtool.layouts.provenance import Provenance
from qtool.report import Report


def quantize_single(command: Command) -> Report:
    """Quantize the file command.src into command.dst; see quantize_file."""
    command.division.check_unused(command.src)
    started = time.perf_counter()
    with (
        streams.opened(command.src, command.recipe.options.get("source_dtype")) as source,
        Sums(wanted=command.hashes) as sums,
    ):
        sums.add(streams.source_names(command.src, source))
        if command.given is not None and source.container == "npy":
            given = command.given.for_array(source.infos()[0].name)
            command = replace(command, given=given)
        places = _Places.of(command, source)
        work = _prepared(command, source, places, sums, started)
        places.keeping.keep(work.mixture.recipe)
        external_data = command.recipe.options.get("external_data", False)
        if command.dry_run:
            made = work.planned(external_data=external_data)
            if command.report_to:
                places.report.write(made)
            terms.check(made)
            return made
        with streams.placed(places.name, f"{source.path.stem}.{places.container}") as path:
            accept = work.accept if command.terms.asked or command.hashes else None
            work.job.write(
                path, places.container, external_data=external_data, force=command.force,
                accept=accept,
            )  # fmt: skip
            output = streams.written(path, places.name, places.container)
            names = streams.output_names(path, output)
            made = work.judged(output, hashing.of_files(names, wanted=command.hashes))
    places.report.write(made)
    return made


@dataclass(frozen=True)
class _Places:
    """Where the output, its report and its recipe go, checked to be writable; in a dry run what
    is against that is a warning."""

    name: str
    container: str
    report: ReportFile
    keeping: Keeping
    warnings: list[str]

    @classmethod
    def of(cls, command: Command, source: Source) -> _Places:
        default = "onnx" if source.container == "onnx" else "safetensors"
        to = command.recipe.options.get("to")
        name, container = streams.target(command.src, command.dst, to, default, command.tag)
        if container != "onnx":
            _check_onnx_alone(command, source, container)
        sources = streams.source_files(command.src, source) + command.inputs
        warnings = []
        try:
            streams.check_target(sources, name, force=command.force)
        except OutputError as error:
            if not command.dry_run:
                raise
            warnings.append(str(error))
        path = streams.report_path(command.report_to, name)
        report_file = ReportFile(path, [*sources, Path(name)], force=command.force)
        taken = [*sources, Path(name), *([path] if path else [])]
        keeping = Keeping(command.save_recipe, taken, force=command.force)
        return cls(name, container, report_file, keeping, warnings)


def _check_onnx_alone(command: Command, source: Source, container: str) -> None:
    """Refuse options of ONNX models."""
    if command.recipe.options.get("external_data", False):
        raise UsageError("--external-data", f"{container} has none", "it is for ONNX models")
    if command.graph is not None:
        rule = f"{source.container} has no graph"
        raise UsageError(command.graph.option, rule, "it is for ONNX models")


@dataclass(frozen=True)
class _Work:
    """What is to be done, and what is said of it. readable: the source, dequantized. sums: of the
    source's files."""

    command: Command
    source: Source
    readable: Source
    places: _Places
    mixture: Mixture
    job: Job
    sums: Sums
    started: float

    def accept(self, nbytes: int) -> None:
        """Raise GateError where the output, of that many bytes, must not appear, and FormatError
        where the source has changed."""
        terms.check(self.judged(self._output(nbytes)), self.places.report)

    def judged(self, output: dict[str, Any], files: list[hashing.Entry] | None = None) -> Report:
        """The report on what has been written. files: those of the output."""
        made = report.build(
            **self._said(output | {"files": files}),
            tensors=self.job.records,
            skipped=[(p.info.name, p.reason) for p in self.mixture.plan if p.reason is not None],
            warnings=self._warnings()
            + screening.nonfinite_warnings(stats for _, stats in self.job.records),
        )
        return self.command.terms.judged(made, self.mixture, self._with_nan)

    @cached_property
    def _with_nan(self) -> list[str]:
        if not self.command.terms.strict:
            return []
        return kept_with_nan(self.readable, self.mixture.plan)

    def planned(self, *, external_data: bool) -> Report:
        """The report on what would be written."""
        name = self.places.name
        path = Path(f"{self.source.path.stem}.{self.places.container}" if name == "-" else name)
        nbytes = self.job.nbytes(path, self.places.container, external_data=external_data)
        made = report.build_planned(
            **self._said(self._output(nbytes) | {"files": None}),
            tensors=planning.records(self.mixture.plan),
            skipped=planning.skipped(self.mixture.plan),
            warnings=[*self.places.warnings, *self._warnings()],
        )
        return self.command.terms.judged(made, self.mixture)

    def _said(self, output: dict[str, Any]) -> dict[str, Any]:
        command, recipe = self.command, self.mixture.recipe
        own = command.graph.settings if command.graph else {}
        second_order = command.second_order
        return {
            "command": command.name,
            "source": {
                "name": str(command.src),
                "container": self.source.container,
                "bytes": self.source.nbytes,
                "tensors": len(self.mixture.plan),
                "files": self.sums.entries(),
            },
            "output": output,
            "settings": settings(recipe, command.given, self.mixture.said, second_order) | own,
            "recipe": recipes.text_of(recipe),
            "seconds": time.perf_counter() - self.started,
        }

    def _output(self, nbytes: int) -> dict[str, Any]:
        name, container = self.places.name, self.places.container
        return {"name": name, "container": container, "bytes": nbytes, "external_data": None}

    def _warnings(self) -> list[str]:
        command, plan = self.command, self.mixture.plan
        found = screening.warnings(self.mixture.recipe, plan, self.places.container, self.readable)
        return found + planning.warnings(command, plan)


def _prepared(
    command: Command, source: Source, places: _Places, sums: Sums, started: float
) -> _Work:
    """The work, planned and checked from headers alone, but for mixed precision."""
    asked, container = command.recipe, places.container
    layout = asked.options.get("layout")
    spelled = planning.chosen_layout(layout, container, asked)
    readable = screening.readable(source, requantize=command.requantize)
    recipe = replace(
        asked, bare=source.container == "npy", left_alone=spelled.left_alone,
        silent=container == "onnx",  # where a preset's activations cannot be told
        weighted=command.weighted([info.name for info in readable.infos()]),
    )  # fmt: skip
    mixture = mixed(
        readable, recipe, bound(planning.plan_of, command, readable, spelled), spelled,
        layout or ("qdq" if container == "onnx" else native.name),
        command.threads, command.progress, command.importance,
    )  # fmt: skip
    plan = mixture.plan
    if not command.terms.strict:
        screening.check_something(plan, mixture.recipe, source)
    screening.check_room(plan, places.name, container)
    screening.check_kinds(plan, spelled, container)
    if command.second_order is not None:
        command.second_order.check(plan)
    job = Job(
        readable, plan, command.given, spelled, command.progress, command.threads,
        graph=command.graph, second_order=command.second_order, importance=command.importance,
        provenance=Provenance(recipes.text_of(mixture.recipe)),
    )  # fmt: skip
    return _Work(command, source, readable, places, mixture, job, sums, started)

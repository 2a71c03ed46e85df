"""qtool quantize and qtool dynamic of a checkpoint folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial as bound
from pathlib import Path
from typing import Any, cast

from qtool import __version__, report
from qtool.errors import FormatError, OutputError, UsageError
from qtool.formats import Source
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, CheckpointSource
from qtool.formats.folders import Partial
from qtool.jobs import (
    folder,
    folder_files,
    planning,
    quantize_shard,
    recipes,
    screening,
    streams,
    terms,
)
from qtool.jobs.command import Command
from qtool.jobs.folder import Run
from qtool.jobs.mixing import Mixture, mixed
from qtool.jobs.quantize_shard import QuantizeShard
from qtool.jobs.recipes import Keeping
from qtool.jobs.settings import settings as choices
from qtool.jobs.shards import Record
from qtool.jobs.streams import ReportFile
from qtool.jobs.unmet import kept_with_nan
from qtool.layouts import Layout
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.provenance import Provenance
from qtool.layouts.stored import Stored
from qtool.plan import Planned
from qtool.report import Report
from qtool.stats import Stats


def quantize_folder(command: Command) -> Report:
    """Quantize every shard of the folder command.src; see quantize_file. With a slice: those shards
    alone, and a report on them that is not written."""
    started = time.perf_counter()
    division = command.division
    if division.slice is not None:
        _check_slice(command)
    partial = Partial(folder.target(command.src, command.dst, command.tag))
    with ExitStack() as stack:
        dtype = command.recipe.options.get("source_dtype")
        source = cast(CheckpointSource, stack.enter_context(streams.opened(command.src, dtype)))
        sums = stack.enter_context(folder_files.beside(source, wanted=command.hashes))
        places = _Places.of(command, partial)
        spelled, readable, mixture = _planned(command, source)
        places.keeping.keep(mixture.recipe)
        made_by = Provenance(recipes.text_of(mixture.recipe))
        works = quantize_shard.works_of(command, source, mixture.plan, spelled, made_by)
        if command.dry_run:
            return _dry(command, source, partial, works, mixture, readable, places, started)
        works = quantize_shard.with_shared_absmax(source, works, command.threads)
        settings = choices(mixture.recipe, command.given, mixture.said, command.second_order)
        run = Run(
            command.name, __version__, str(command.src), str(Path(command.src).absolute()),
            settings, made_by.recipe, {name: work.key(settings) for name, work in works.items()},
            _warnings(command, source, mixture, readable),
            _documents(mixture.plan, spelled, readable), command.hashes,
        )  # fmt: skip
        with_nan = kept_with_nan(readable, mixture.plan) if command.terms.strict else []
        judged = bound(command.terms.judged, mixture=mixture, with_nan=with_nan)
        result = bound(report_of, started=started, judged=judged)
        with folder.building(partial, run, division):
            records = folder.build(run, works, partial, division, command.jobs, command.progress)
            if division.slice is not None:
                made = folder.described(run, Path(partial.name), records, result)
                terms.check(made)
                return made
            return folder.conclude(
                run, source, partial, records, result, places.report, sums, force=command.force
            )


@dataclass(frozen=True)
class _Places:
    """Where the report and the recipe go, checked to be writable, as the target is; in a dry run
    what is against that one is a warning."""

    report: ReportFile
    keeping: Keeping
    warnings: list[str]

    @classmethod
    def of(cls, command: Command, partial: Partial) -> _Places:
        sources = [Path(command.src), *command.inputs]
        warnings = []
        try:
            folder.check(partial, sources, command.division, force=command.force)
        except OutputError as error:
            if not command.dry_run:
                raise
            warnings.append(str(error))
        path = folder.report_path(command.report_to, partial)
        report_file = ReportFile(path, [*sources, partial.dst], force=command.force)
        taken = [*sources, partial.dst, path]
        keeping = Keeping(command.save_recipe, taken, force=command.force)
        return cls(report_file, keeping, warnings)


def _check_slice(command: Command) -> None:
    """Refuse what is not for a slice."""
    if command.report_to is not None and not command.dry_run:
        raise UsageError("--report", "a slice has none", "give it to `qtool finish`")
    if command.terms.gates:
        raise UsageError("--fail-if", "a slice is not judged", "give it to `qtool finish`")


def _planned(command: Command, source: CheckpointSource) -> tuple[Layout, Source, Mixture]:
    """The layout, the source as it is read, and the plan; checked from headers alone, but for
    mixed precision."""
    asked = command.recipe
    spelled = planning.chosen_layout(asked.options.get("layout"), "safetensors", asked)
    readable = screening.readable(source, requantize=command.requantize)
    if not command.requantize:
        check_config(source)
    weighted = command.weighted([info.name for info in readable.infos()])
    recipe = replace(asked, left_alone=spelled.left_alone, weighted=weighted)
    mixture = mixed(
        readable, recipe, bound(planning.plan_of, command, readable, spelled), spelled,
        spelled.name, command.threads, command.progress, command.importance,
    )  # fmt: skip
    if not command.terms.strict:
        screening.check_something(mixture.plan, mixture.recipe, source)
    screening.check_kinds(mixture.plan, spelled, source.container)
    _check_names(mixture.plan)
    if command.second_order is not None:
        command.second_order.check(mixture.plan)
    return spelled, readable, mixture


def _warnings(
    command: Command, source: CheckpointSource, mixture: Mixture, readable: Source
) -> list[str]:
    """What the user should know, but for what values are like."""
    found = screening.warnings(mixture.recipe, mixture.plan, source.container, readable)
    return found + planning.warnings(command, mixture.plan) + _left_out(source)


def _dry(
    command: Command,
    source: CheckpointSource,
    partial: Partial,
    works: Mapping[str, QuantizeShard],
    mixture: Mixture,
    readable: Source,
    places: _Places,
    started: float,
) -> Report:
    """The report on what would be written. Raises GateError where it fails."""
    wanted = {name: works[name] for name in command.division.of_names(list(works))}
    nbytes = quantize_shard.bytes_of(source, wanted)
    made = report.build_planned(
        command.name,
        {"name": str(command.src), "container": "checkpoint", "bytes": source.nbytes,
         "tensors": len(mixture.plan), "files": None},
        {"name": str(partial.dst), "container": "checkpoint", "bytes": nbytes,
         "external_data": None, "files": None},
        choices(mixture.recipe, command.given, mixture.said, command.second_order),
        recipes.text_of(mixture.recipe),
        planning.records(mixture.plan),
        planning.skipped(mixture.plan),
        [*places.warnings, *_warnings(command, source, mixture, readable)],
        time.perf_counter() - started,
    )  # fmt: skip
    judged = command.terms.judged(made, mixture)
    if command.report_to:
        places.report.write(judged)
    terms.check(judged)
    return judged


def report_of(
    run: Run,
    source: dict[str, Any],
    output: dict[str, Any],
    records: Sequence[Record],
    *,
    started: float,
    judged: Callable[[Report], Report],
) -> Report:
    """The Report on these shards. started: when the command began, by time.perf_counter().
    judged: says of it what terms say."""
    found = [tensor for record in records for tensor in record.findings["tensors"]]
    skipped = [(n, reason) for record in records for n, reason in record.findings["skipped"]]
    tensors = [
        ({k: v for k, v in tensor.items() if k != "stats"}, Stats.from_json(tensor["stats"]))
        for tensor in found
    ]
    files = folder_files.of_source(records, [], run.source) if run.hashes else None
    made = report.build(
        run.command,
        source | {"tensors": len(tensors) + len(skipped), "files": files},
        output | {"files": None},
        run.settings,
        run.recipe,
        tensors,
        skipped,
        run.warnings + screening.nonfinite_warnings(stats for _, stats in tensors),
        time.perf_counter() - started,
    )
    return judged(made)


def check_config(source: CheckpointSource) -> None:
    """Refuse a configuration that would tell readers of another quantization."""
    for key in ("quantization_config", "quantization"):
        if source.config.get(key) is not None:
            raise FormatError(
                str(source.path / CONFIG),
                f"its {key} says that the weights are quantized already",
                "dequantize them first, or remove the entry",
            )


def _documents(
    plan: Sequence[Planned], layout: Layout, readable: Source
) -> dict[str, dict[str, Any] | None]:
    """What the layout has JSON files say, in place of what the source's layout does."""
    kept: Mapping[str, Stored] = {}
    documents: dict[str, dict[str, Any] | None] = {}
    if isinstance(readable, DequantizedSource):
        kept = readable.tensors
        documents = folder.without(readable.layout, kept)
    how = {p.info.name: p.stored or kept.get(p.info.name) for p in plan}
    tensors = {name: stored for name, stored in how.items() if stored is not None}
    others = [p.info.name for p in plan if p.info.name not in tensors and len(p.info.shape) == 2]
    said = layout.documents(tensors, others) if tensors else {}
    return documents | {name: (documents.get(name) or {}) | found for name, found in said.items()}


def _check_names(plan: Sequence[Planned]) -> None:
    """Refuse w.scale in one shard beside a w that is quantized in another."""
    taken: dict[str, str] = {}
    for planned in plan:
        for entry in planned.entries:
            if entry.name in taken:
                one, other = sorted({planned.info.name, taken[entry.name], entry.name})[:2]
                quantized = one if entry.name != one else other
                raise OutputError(
                    f"tensor {entry.name}",
                    f"its name is needed for parameters of {quantized}",
                    f"rename it in the source, or use --exclude '{quantized}'",
                )
            taken[entry.name] = planned.info.name


def _left_out(source: CheckpointSource) -> list[str]:
    """A warning about what the source's folder has and the output's will not."""
    paths = others(source.path, source.shards).left_out
    if not paths:
        return []
    shown = [*paths[:5], *([f"{len(paths) - 5} more"] if len(paths) > 5 else [])]
    return [f"left out, as other copies of the weights or leftovers: {', '.join(shown)}"]

"""qtool quantize and qtool dynamic of a checkpoint folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import __version__, engine, formats, report
from qtool.errors import FormatError, OutputError, UsageError
from qtool.formats import Source
from qtool.formats.carried import others
from qtool.formats.checkpoint import CONFIG, CheckpointSource
from qtool.formats.folders import Partial
from qtool.jobs import folder, fusing, quantize, screening, streams
from qtool.jobs.division import Division
from qtool.jobs.folder import Run
from qtool.jobs.given import Given
from qtool.jobs.mixing import mixed
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.quantize_shard import QuantizeShard
from qtool.jobs.recipes import Keeping
from qtool.jobs.settings import settings as choices
from qtool.jobs.shards import Record
from qtool.layouts import Layout
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.stored import Stored
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe
from qtool.report import Report
from qtool.stats import Stats

if TYPE_CHECKING:
    from qtool.jobs.importance import Importance
    from qtool.jobs.second_order import SecondOrder


def quantize_folder(
    command: str,
    src: str | Path,
    dst: str | Path | None,
    recipe: Recipe,
    given: Given | None,
    *,
    tag: str,
    report_to: str | Path | None,
    save_recipe: str | Path | None,
    division: Division,
    jobs: int | None,
    force: bool,
    progress: Progress | None,
    second_order: SecondOrder | None = None,
) -> Report:
    """Quantize every shard of a folder; see quantize.run. With a slice: those shards alone, and
    a report on them that is not written."""
    started = time.perf_counter()
    if division.slice is not None and report_to is not None:
        raise UsageError("--report", "a slice has none", "give it to `qtool finish`")
    partial = Partial(folder.target(src, dst, tag))
    layout, requantize = recipe.options.get("layout"), recipe.options.get("requantize", False)
    with streams.opened(src, recipe.options.get("source_dtype")) as opened:
        source = cast(CheckpointSource, opened)
        importance = quantize.weighing(recipe)
        sources = [Path(src), *(given.paths if given else [])]
        sources += second_order.paths if second_order else []
        sources += importance.paths if importance else []
        folder.check(partial, sources, division, force=force)
        report_path = folder.report_path(report_to, partial)
        streams.check_report(report_path, [*sources, partial.dst], force=force)
        keeping = Keeping(save_recipe, [*sources, partial.dst, report_path], force=force)
        spelled = quantize.chosen_layout(layout, "safetensors", recipe)
        readable = screening.readable(source, requantize=requantize)
        if not requantize:
            _check_config(source)
        weighted = quantize.weighted(importance, readable)
        recipe = replace(recipe, left_alone=spelled.left_alone, weighted=weighted)
        threads = jobs or engine.default_jobs()
        mixture = mixed(
            readable, recipe, bound(_plan, readable, given, spelled, importance), spelled,
            spelled.name, threads, progress or Silent(), importance,
        )  # fmt: skip
        recipe, plan = mixture.recipe, mixture.plan
        screening.check_something(plan, recipe, source)
        screening.check_kinds(plan, spelled, source.container)
        _check_names(plan)
        if second_order is not None:
            second_order.check(plan)
        keeping.keep(recipe)
        works = _works(source, plan, spelled, given, second_order, importance, threads)
        settings = choices(recipe, given, mixture.said, second_order)
        warnings = screening.warnings(recipe, plan, source.container, readable)
        warnings += second_order.warnings(plan) if second_order else []
        warnings += importance.warnings(plan) if importance else []
        run = Run(
            command, __version__, str(src), str(Path(src).absolute()), settings,
            {name: work.key(settings) for name, work in works.items()},
            warnings + _left_out(source), _documents(plan, spelled, readable),
        )  # fmt: skip
        result = bound(report_of, started=started)
        with folder.building(partial, run, division):
            records = folder.build(run, works, partial, division, jobs, progress or Silent())
            if division.slice is not None:
                return folder.described(run, partial.path, records, result)
            return folder.conclude(run, source, partial, records, result, report_path)


def _plan(
    source: Source,
    given: Given | None,
    layout: Layout,
    importance: Importance | None,
    recipe: Recipe,
) -> list[Planned]:
    """The fate of every tensor."""
    header = None if given is None else given.header
    plan = make_plan(screening.marked(source), recipe, header, layout)
    if importance is not None:
        importance.check(plan)
    return plan


def report_of(
    run: Run,
    source: dict[str, Any],
    output: dict[str, Any],
    records: Sequence[Record],
    *,
    started: float,
) -> Report:
    """The Report on these shards. started: when the command began, by time.perf_counter()."""
    found = [tensor for record in records for tensor in record.findings["tensors"]]
    skipped = [(n, reason) for record in records for n, reason in record.findings["skipped"]]
    tensors = [
        ({k: v for k, v in tensor.items() if k != "stats"}, Stats.from_json(tensor["stats"]))
        for tensor in found
    ]
    return report.build(
        run.command,
        source | {"tensors": len(tensors) + len(skipped)},
        output,
        run.settings,
        tensors,
        skipped,
        run.warnings + screening.nonfinite_warnings(stats for _, stats in tensors),
        time.perf_counter() - started,
    )


def _works(
    source: CheckpointSource,
    plan: Sequence[Planned],
    layout: Layout,
    given: Given | None,
    second_order: SecondOrder | None,
    importance: Importance | None,
    jobs: int,
) -> dict[str, QuantizeShard]:
    """The work on each shard."""
    planned = {p.info.name: replace(p, parts=()) for p in plan}
    works = {}
    for name, shard in source.shards.items():
        with closing(formats.open(shard.path)) as opened:
            names = [info.name for info in screening.readable(opened, requantize=True).infos()]
        own = tuple(planned[name] for name in names)
        part = None if given is None else given.part(names)
        works[name] = QuantizeShard(own, layout.name, part, {}, second_order, importance)
    absmax = _shared_absmax(source, works, jobs)
    return {name: replace(work, absmax=absmax[name]) for name, work in works.items()}


def _shared_absmax(
    source: CheckpointSource, works: Mapping[str, QuantizeShard], jobs: int
) -> dict[str, dict[str, float]]:
    """For each shard the magnitudes that its tensors share with those of other shards."""
    files = {
        p.info.name: name
        for name, work in works.items()
        for p in work.plan
        if p.stored is not None and p.stored.global_scale
    }
    names = set(fusing.fused_across(files))
    found: dict[str, float] = {}
    for name, work in works.items():
        with closing(formats.open(source.shards[name].path)) as opened:
            found |= work.largest(opened, names, jobs)
    shared = fusing.shared(found)
    return {n: {k: v for k, v in shared.items() if files[k] == n} for n in works}


def _check_config(source: CheckpointSource) -> None:
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

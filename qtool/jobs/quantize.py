"""qtool quantize: every selected tensor of a file, and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING, cast

from qtool import engine, report
from qtool.dtypes import DTypeLike
from qtool.errors import UsageError
from qtool.formats import Source
from qtool.jobs import recipes, screening, streams
from qtool.jobs.activations import Words, listed
from qtool.jobs.division import Division
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.mixing import mixed
from qtool.jobs.nbits import NBits
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.recipes import Keeping
from qtool.jobs.settings import settings
from qtool.jobs.tensors import Job, OnnxLayout
from qtool.layouts import LAYOUTS, ONNX_LAYOUTS, Layout, native, nbits
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe
from qtool.report import Report

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.jobs.importance import Importance
    from qtool.jobs.second_order import SecondOrder


def quantize_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis: int | None = None,
    block_size: int | None = None,
    tile: tuple[int, int] | None = None,
    preset: str | None = None,
    symmetric: bool | None = None,
    method: str | None = None,
    scale: GivenValue | None = None,
    zero_point: GivenValue | None = None,
    scale_dtype: DTypeLike | None = None,
    global_scale: bool | None = None,
    mx_rule: str | None = None,
    precision: DTypeLike | None = None,
    saturate: bool | None = None,
    nonfinite: str | None = None,
    semantics: str | None = None,
    narrow_range: bool | None = None,
    negative_scale: bool | None = None,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[str] = (),
    recipe: str | Path | None = None,
    target_bits: float | None = None,
    target_sqnr: float | None = None,
    candidates: Sequence[str] = (),
    save_recipe: str | Path | None = None,
    importance: Words = None,
    layout: str | None = None,
    dynamic_activations: bool | None = None,
    hessian: Words = None,
    activations: Words = None,
    damping: float | None = None,
    act_order: bool | None = None,
    to: str | None = None,
    external_data: bool = False,
    requantize: bool = False,
    allow_empty: bool = False,
    report: str | Path | None = None,
    resume: bool = False,
    shards: str | None = None,
    scheduler: str | Executor | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize a .npy, .npz, .safetensors or ONNX file, or a checkpoint folder; the arguments are
    the command line's.

    src, dst: file names, "-" for standard input and output. dst None: STEM.DTYPE.CONTAINER beside
        src, or FOLDER-DTYPE. report: where its JSON goes; None: STEM.report.json beside a named
        dst.
    dtype ... negative_scale: see QuantSpec; None: its default. axis, block_size, tile: see Choice.
        scale, zero_point: see Given. preset: gives those of them that are None, see presets.
    rules: such as "*.mlp.*: dtype=int8, block_size=64", for the tensors of a pattern; see Recipe.
    recipe: TOML with the same words; see recipe.toml. Arguments take precedence.
    target_bits, target_sqnr, candidates: the type and blocks of each tensor are chosen; see Target.
    save_recipe: where the recipe goes that says all of this, and what was chosen.
    importance: files of weights of errors, see Importance; their tensors are quantized by a search
        for the least weighted error.
    layout: how quantized tensors are spelled, see layouts; None: "native", or "qdq" in ONNX.
    dynamic_activations: readers are to quantize activations too, where the layout can say it.
    hessian, activations: what is known of the inputs of layers, for second-order rounding of their
        weights; see SecondOrder. damping: None: 0.01. act_order: None: True.
    resume, shards, scheduler: see Division; a slice's Report is on its own shards and not written.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns the Report. Raises QtoolError; dst is then as it was.
    """
    asked = recipes.asked(
        recipe=recipe, rules=rules, include=include, exclude=exclude,
        dtype=dtype, preset=preset, axis=axis, block_size=block_size, tile=tile,
        symmetric=symmetric, method=method, scale=scale, zero_point=zero_point,
        scale_dtype=scale_dtype, global_scale=global_scale, mx_rule=mx_rule,
        precision=precision, saturate=saturate, nonfinite=nonfinite, semantics=semantics,
        narrow_range=narrow_range, negative_scale=negative_scale, source_dtype=source_dtype,
        layout=layout, dynamic_activations=dynamic_activations, hessian=listed(hessian),
        activations=listed(activations), damping=damping, act_order=act_order, to=to,
        external_data=external_data, requantize=requantize, allow_empty=allow_empty,
        target_bits=target_bits, target_sqnr=target_sqnr, candidates=list(candidates),
        importance=listed(importance),
    )  # fmt: skip
    given = _given(asked)
    return run(
        "quantize",
        src,
        dst,
        asked,
        given,
        tag=asked.tag,
        report_to=report,
        save_recipe=save_recipe,
        division=Division.of(resume=resume, shards=shards, scheduler=scheduler),
        jobs=jobs,
        force=force,
        progress=progress,
        graph=NBits(given) if asked.options.get("layout") == nbits.NAME else None,
        second_order=_second_order(asked),
    )


def _given(recipe: Recipe) -> Given | None:
    """The scales that the recipe gives."""
    scale, zero_point = (recipe.options.get(name) for name in ("scale", "zero_point"))
    if scale is None:
        return None
    return Given(scale, zero_point, recipe.words.get("scale_dtype"))


def _second_order(recipe: Recipe) -> SecondOrder | None:
    """What rounds weights by the inputs of their layers; None where the recipe gives none."""
    names = ("hessian", "activations", "damping", "act_order")
    if not any(name in recipe.options for name in names):
        return None
    if recipe.options.get("target_sqnr") is not None:
        raise UsageError(
            "--target-sqnr",
            "second-order rounding gives up weights' errors for outputs'",
            "use --target-bits, or leave --hessian and --activations out",
        )
    from qtool.jobs.second_order import SecondOrder

    return SecondOrder.of(*(recipe.options.get(name) for name in names))


def run(
    command: str,
    src: str | Path,
    dst: str | Path | None,
    recipe: Recipe,
    given: Given | None,
    *,
    tag: str,
    report_to: str | Path | None,
    division: Division,
    jobs: int | None,
    force: bool,
    progress: Progress | None,
    save_recipe: str | Path | None = None,
    graph: OnnxLayout | None = None,
    second_order: SecondOrder | None = None,
) -> Report:
    """Quantize src into dst by recipe; see quantize_file.

    tag: part of the default name. graph: how weights are spelled in ONNX models, where not by
    DequantizeLinear. second_order: rounds the weights that it knows.
    """
    options = recipe.options
    to, external_data = options.get("to"), options.get("external_data", False)
    if Path(src).is_dir():
        from qtool.jobs.quantize_folder import quantize_folder

        streams.check_folder(to, external_data=external_data)
        if graph is not None:
            raise UsageError(graph.option, "a checkpoint has no graph", "it is for ONNX models")
        return quantize_folder(
            command, src, dst, recipe, given, tag=tag, report_to=report_to, division=division,
            jobs=jobs, force=force, progress=progress, save_recipe=save_recipe,
            second_order=second_order,
        )  # fmt: skip
    division.check_unused(src)
    started = time.perf_counter()
    with streams.opened(src, options.get("source_dtype")) as source:
        native_default = "onnx" if source.container == "onnx" else "safetensors"
        name, container = streams.target(src, dst, to, native_default, tag)
        if container != "onnx":
            _check_onnx_alone(source, container, graph, external_data=external_data)
        importance = weighing(recipe)
        sources = streams.source_files(src, source) + (given.paths if given else [])
        sources += second_order.paths if second_order else []
        sources += importance.paths if importance else []
        streams.check_target(sources, name, force=force)
        report_path = streams.report_path(report_to, name)
        streams.check_report(report_path, [*sources, Path(name)], force=force)
        written_files = [*sources, Path(name), *([report_path] if report_path else [])]
        keeping = Keeping(save_recipe, written_files, force=force)
        spelled = chosen_layout(options.get("layout"), container, recipe)
        readable = screening.readable(source, requantize=options.get("requantize", False))
        if given is not None and source.container == "npy":
            given = given.for_array(source.infos()[0].name)
        recipe = replace(
            recipe, bare=source.container == "npy", left_alone=spelled.left_alone,
            silent=container == "onnx",  # where a preset's activations cannot be told
            weighted=weighted(importance, readable),
        )  # fmt: skip
        threads = jobs or engine.default_jobs()
        mixture = mixed(
            readable, recipe, bound(_plan, readable, given, spelled, graph, importance), spelled,
            options.get("layout") or ("qdq" if container == "onnx" else native.name),
            threads, progress or Silent(), importance,
        )  # fmt: skip
        recipe, plan = mixture.recipe, mixture.plan
        screening.check_something(plan, recipe, source)
        screening.check_room(plan, name, container)
        screening.check_kinds(plan, spelled, container)
        if second_order is not None:
            second_order.check(plan)
        keeping.keep(recipe)
        job = Job(
            readable, plan, given, spelled, progress, threads, graph=graph,
            second_order=second_order, importance=importance,
        )  # fmt: skip
        with streams.placed(name, f"{source.path.stem}.{container}") as path:
            job.write(path, container, external_data=external_data)
            written = streams.written(path, name, container)
        result = report.build(
            command,
            {
                "name": str(src),
                "container": source.container,
                "bytes": source.nbytes,
                "tensors": len(plan),
            },
            written,
            settings(recipe, given, mixture.said, second_order) | (graph.settings if graph else {}),
            job.records,
            [(p.info.name, p.reason) for p in plan if p.reason is not None],
            screening.warnings(recipe, plan, container, readable)
            + (second_order.warnings(plan) if second_order else [])
            + (importance.warnings(plan) if importance else [])
            + screening.nonfinite_warnings(stats for _, stats in job.records),
            time.perf_counter() - started,
        )
    streams.write_report(result, report_path)
    return result


def _plan(
    source: Source,
    given: Given | None,
    layout: Layout,
    graph: OnnxLayout | None,
    importance: Importance | None,
    recipe: Recipe,
) -> list[Planned]:
    """The fate of every tensor."""
    if graph is not None:
        plan = graph.plan(cast("OnnxSource", source), recipe)
    else:
        header = None if given is None else given.header
        plan = make_plan(screening.marked(source), recipe, header, layout)
    if importance is not None:
        importance.check(plan)
    return plan


def weighing(recipe: Recipe) -> Importance | None:
    """The weights of errors that the recipe names; None where it names none."""
    if not (words := recipe.options.get("importance")):
        return None
    from qtool.jobs.importance import Importance

    return Importance(words)


def weighted(importance: Importance | None, source: Source) -> frozenset[str]:
    """The tensors of a source that have weights of errors."""
    return importance.named([i.name for i in source.infos()]) if importance else frozenset()


def _check_onnx_alone(
    source: Source, container: str, graph: OnnxLayout | None, *, external_data: bool
) -> None:
    """Refuse options of ONNX models."""
    if external_data:
        raise UsageError("--external-data", f"{container} has none", "it is for ONNX models")
    if graph is not None:
        raise UsageError(graph.option, f"{source.container} has no graph", "it is for ONNX models")


def chosen_layout(name: str | None, container: str, recipe: Recipe) -> Layout:
    """The layout of that name. Raises UsageError where it does not fit what is asked for."""
    if container == "onnx":
        if name not in (None, *ONNX_LAYOUTS):
            rule = f"{name} cannot be written to ONNX"
            raise UsageError("--layout", rule, "use " + " or ".join(ONNX_LAYOUTS))
        if recipe.gives_activations:
            rule = "ONNX says it by operators in the graph"
            raise UsageError("--dynamic-activations", rule, "use `qtool dynamic --graph`")
        return native
    if name in ONNX_LAYOUTS:
        raise UsageError("--layout", f"{name} is for ONNX models, not {container}")
    if name is not None and name not in LAYOUTS:
        raise UsageError("--layout", f"{name!r} is unknown", "use " + ", ".join(LAYOUTS))
    layout = LAYOUTS[name or native.name]
    if layout is not native and container != "safetensors":
        raise UsageError("--layout", f"{name} is for .safetensors, not {container}")
    return layout

"""qtool quantize: every selected tensor of a file, and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import engine, report
from qtool.dtypes import DType, DTypeLike
from qtool.errors import UsageError, usage_errors
from qtool.formats import Source
from qtool.jobs import screening, streams
from qtool.jobs.division import Division
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.nbits import NBits
from qtool.jobs.progress import Progress
from qtool.jobs.tensors import Job, OnnxLayout
from qtool.layouts import LAYOUTS, ONNX_LAYOUTS, Layout, native, nbits
from qtool.plan import make_plan
from qtool.presets import expanded
from qtool.recipe import Recipe
from qtool.report import Report
from qtool.spec import Blocked, PerTensor, QuantSpec, Tiled

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


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
    saturate: bool = True,
    nonfinite: str = "error",
    semantics: str = "onnx",
    narrow_range: bool = False,
    negative_scale: bool = False,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    layout: str | None = None,
    dynamic_activations: bool | None = None,
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
    dtype ... negative_scale: see QuantSpec. axis, block_size, tile: see Recipe. scale, zero_point:
        see Given. preset: gives those of them that are None, see presets.
    layout: how quantized tensors are spelled, see layouts; None: "native", or "qdq" in ONNX.
    dynamic_activations: readers are to quantize activations too, where the layout can say it.
    resume, shards, scheduler: see Division; a slice's Report is on its own shards and not written.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns the Report. Raises QtoolError; dst is then as it was.
    """
    _check_usage(scale, zero_point, method, symmetric, block_size)
    options = expanded(
        preset,
        {
            "dtype": dtype, "axis": axis, "block_size": block_size, "tile": tile,
            "symmetric": symmetric, "method": method, "scale_dtype": scale_dtype,
            "global_scale": global_scale, "dynamic_activations": dynamic_activations,
        },
    )  # fmt: skip
    recipe = _recipe(
        options, mx_rule=mx_rule, precision=precision, saturate=saturate,
        narrow_range=narrow_range, semantics=semantics, nonfinite=nonfinite,
        negative_scale=negative_scale,
    )  # fmt: skip
    recipe = replace(recipe, include=tuple(include), exclude=tuple(exclude), preset=preset)
    given = None if scale is None else Given(scale, zero_point, scale_dtype)
    return run(
        "quantize",
        src,
        dst,
        recipe,
        given,
        tag=preset or recipe.spec.dtype.name,
        layout=layout,
        source_dtype=source_dtype,
        to=to,
        external_data=external_data,
        requantize=requantize,
        allow_empty=allow_empty,
        report_to=report,
        division=Division.of(resume=resume, shards=shards, scheduler=scheduler),
        jobs=jobs,
        force=force,
        progress=progress,
        graph=NBits(recipe, given) if layout == nbits.NAME else None,
    )


def _recipe(options: dict[str, Any], **choices: Any) -> Recipe:
    """What options, those of a preset among them, mean for every tensor."""
    axis, block_size, tile = (options[name] for name in ("axis", "block_size", "tile"))
    if options["dtype"] is None:
        raise UsageError("--dtype", "no type to quantize to", "give one, or a --preset")
    if tile is not None and (axis is not None or block_size is not None):
        raise UsageError("--tile", "replaces --axis and --block-size", "leave one of them out")
    with usage_errors():
        spec = QuantSpec(
            options["dtype"], PerTensor(), symmetric=options["symmetric"],
            method=options["method"], scale_dtype=options["scale_dtype"],
            global_scale=bool(options["global_scale"]), **choices,
        )  # fmt: skip
        # contradictions show before a file is read
        if block_size is not None:
            spec.at(Blocked(0, block_size))
        if tile is not None:
            spec.at(Tiled(tile))
    activations = bool(options["dynamic_activations"])
    return Recipe(spec, axis, block_size, tile, activations=activations)


def run(
    command: str,
    src: str | Path,
    dst: str | Path | None,
    recipe: Recipe,
    given: Given | None,
    *,
    tag: str,
    layout: str | None = None,
    source_dtype: DTypeLike | None,
    to: str | None,
    external_data: bool,
    requantize: bool,
    allow_empty: bool,
    report_to: str | Path | None,
    division: Division,
    jobs: int | None,
    force: bool,
    progress: Progress | None,
    graph: OnnxLayout | None = None,
) -> Report:
    """Quantize src into dst by recipe; see quantize_file.

    tag: part of the default name. graph: how weights are spelled in ONNX models, where not by
    DequantizeLinear.
    """
    if Path(src).is_dir():
        from qtool.jobs.quantize_folder import quantize_folder

        streams.check_folder(to, external_data=external_data)
        if graph is not None:
            raise UsageError(graph.option, "a checkpoint has no graph", "it is for ONNX models")
        return quantize_folder(
            command, src, dst, recipe, given, tag=tag, layout=layout, source_dtype=source_dtype,
            requantize=requantize, allow_empty=allow_empty, report_to=report_to,
            division=division, jobs=jobs, force=force, progress=progress,
        )  # fmt: skip
    division.check_unused(src)
    started = time.perf_counter()
    with streams.opened(src, source_dtype) as source:
        native_default = "onnx" if source.container == "onnx" else "safetensors"
        name, container = streams.target(src, dst, to, native_default, tag)
        if container != "onnx":
            _check_onnx_alone(source, container, graph, external_data=external_data)
        sources = streams.source_files(src, source) + (given.paths if given else [])
        streams.check_target(sources, name, force=force)
        report_path = streams.report_path(report_to, name)
        streams.check_report(report_path, [*sources, Path(name)], force=force)
        spelled = chosen_layout(layout, container, recipe)
        readable = screening.readable(source, requantize=requantize)
        # a preset's activations are told where the file can say it
        activations = recipe.activations and container != "onnx"
        recipe = replace(
            recipe, bare=source.container == "npy", left_alone=spelled.left_alone,
            activations=activations,
        )  # fmt: skip
        if graph is None:
            header = None if given is None else given.header
            plan = make_plan(screening.marked(readable), recipe, header, spelled)
        else:
            plan = graph.plan(cast("OnnxSource", readable), recipe)
        screening.check_something(plan, recipe, source, allow_empty=allow_empty)
        screening.check_room(plan, name, container)
        threads = jobs or engine.default_jobs()
        job = Job(readable, plan, given, spelled, progress, threads, graph=graph)
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
            settings(recipe, given, layout, requantize=requantize)
            | (graph.settings if graph else {}),
            job.records,
            [(p.info.name, p.reason) for p in plan if p.reason is not None],
            screening.warnings(recipe, plan, container, readable)
            + screening.nonfinite_warnings(stats for _, stats in job.records),
            time.perf_counter() - started,
        )
    streams.write_report(result, report_path)
    return result


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
        if recipe.tile is not None:
            raise UsageError("--tile", "ONNX has no word for tiles", "use --block-size")
        if recipe.activations and recipe.preset is None:
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


def _check_usage(
    scale: GivenValue | None,
    zero_point: GivenValue | None,
    method: str | None,
    symmetric: bool | None,
    block_size: int | None,
) -> None:
    """Refuse arguments that contradict each other."""
    if zero_point is not None and scale is None:
        raise UsageError("--zero-point", "given without --scale", "give both")
    if scale is not None and (method is not None or symmetric is not None):
        raise UsageError("--scale", "replaces --method and --symmetric", "leave one of them out")
    if block_size is not None and block_size < 1:
        raise UsageError("--block-size", f"{block_size} is not positive", "use for example 32")


def settings(
    recipe: Recipe, given: Given | None, layout: str | None, *, requantize: bool
) -> dict[str, Any]:
    """The choices that decide the output, for the report."""
    choices = {f.name: getattr(recipe.spec, f.name) for f in fields(recipe.spec)}
    del choices["granularity"], choices["bias"]  # these are the tensors'
    if given is not None:
        choices |= {"method": "given", "symmetric": None}
    named = {k: v.name if isinstance(v, DType) else v for k, v in choices.items()}
    return named | {
        "preset": recipe.preset,
        "axis": recipe.axis,
        "block_size": recipe.block_size,
        "tile": None if recipe.tile is None else list(recipe.tile),
        "layout": layout,
        "dynamic_activations": recipe.activations,
        "include": list(recipe.include),
        "exclude": list(recipe.exclude),
        "requantize": requantize,
        "graph": None,
    }

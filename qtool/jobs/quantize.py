"""qtool quantize: every selected tensor of a file, and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from qtool import engine, report
from qtool.dtypes import DType, DTypeLike
from qtool.errors import UsageError, usage_errors
from qtool.formats import Source, files
from qtool.jobs import screening, streams
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.progress import Progress, Silent
from qtool.layouts import native
from qtool.layouts.dequantized import DequantizedSource
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe
from qtool.report import Report
from qtool.spec import Blocked, PerTensor, QuantSpec
from qtool.stats import Stats
from qtool.tensor import Outcome, QuantizedTensor, Target

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


class Writer(Protocol):
    """Takes quantized tensors one by one."""

    def add(self, name: str, tensor: QuantizedTensor) -> object: ...

    def target(self, name: str) -> AbstractContextManager[Target]: ...


def quantize_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    method: str | None = None,
    scale: GivenValue | None = None,
    zero_point: GivenValue | None = None,
    scale_dtype: DTypeLike | None = None,
    precision: DTypeLike | None = None,
    saturate: bool = True,
    nonfinite: str = "error",
    semantics: str = "onnx",
    narrow_range: bool = False,
    negative_scale: bool = False,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    to: str | None = None,
    external_data: bool = False,
    requantize: bool = False,
    allow_empty: bool = False,
    report: str | Path | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize a .npy, .npz, .safetensors or ONNX file; the arguments are the command line's.

    src, dst: file names, "-" for standard input and output. dst None: STEM.DTYPE.CONTAINER beside
        src. report: where its JSON goes; None: STEM.report.json beside a named dst.
    dtype ... negative_scale: see QuantSpec. axis, block_size: see Recipe. scale, zero_point: see
        Given.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns the Report. Raises QtoolError; dst is then as it was.
    """
    _check_usage(scale, zero_point, method, symmetric, block_size)
    with usage_errors():
        spec = QuantSpec(
            dtype, PerTensor(), symmetric=symmetric, method=method, scale_dtype=scale_dtype,
            precision=precision, saturate=saturate, narrow_range=narrow_range,
            semantics=semantics, nonfinite=nonfinite, negative_scale=negative_scale,
        )  # fmt: skip
        if block_size is not None:
            spec.at(Blocked(0, block_size))  # contradictions show before a file is read
    recipe = Recipe(spec, axis, block_size, tuple(include), tuple(exclude))
    given = None if scale is None else Given(scale, zero_point, scale_dtype)
    return run(
        "quantize",
        src,
        dst,
        recipe,
        given,
        tag=spec.dtype.name,
        source_dtype=source_dtype,
        to=to,
        external_data=external_data,
        requantize=requantize,
        allow_empty=allow_empty,
        report_to=report,
        jobs=jobs,
        force=force,
        progress=progress,
    )


def run(
    command: str,
    src: str | Path,
    dst: str | Path | None,
    recipe: Recipe,
    given: Given | None,
    *,
    tag: str,
    source_dtype: DTypeLike | None,
    to: str | None,
    external_data: bool,
    requantize: bool,
    allow_empty: bool,
    report_to: str | Path | None,
    jobs: int | None,
    force: bool,
    progress: Progress | None,
) -> Report:
    """Quantize src into dst by recipe; see quantize_file. tag: part of the default name."""
    started = time.perf_counter()
    with streams.opened(src, source_dtype) as source:
        bare = source.container == "npy"
        native_default = "onnx" if source.container == "onnx" else "safetensors"
        name, container = streams.target(src, dst, to, native_default, tag)
        if external_data and container != "onnx":
            raise UsageError("--external-data", f"{container} has none", "it is for ONNX models")
        sources = streams.source_files(src, source) + (given.paths if given else [])
        streams.check_target(sources, name, force=force)
        report_path = streams.report_path(report_to, name)
        streams.check_report(report_path, [*sources, Path(name)], force=force)
        readable = screening.readable(source, requantize=requantize)
        plan = make_plan(
            screening.marked(readable),
            replace(recipe, bare=bare),
            None if given is None else given.header,
        )
        screening.check_something(plan, recipe, source, allow_empty=allow_empty)
        screening.check_room(plan, name, container)
        job = _Job(readable, plan, given, progress, jobs or engine.default_jobs())
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
            _settings(recipe, given, requantize=requantize),
            job.records,
            [(p.info.name, p.reason) for p in plan if p.reason is not None],
            screening.warnings(recipe, plan, container, readable)
            + screening.nonfinite_warnings(stats for _, stats in job.records),
            time.perf_counter() - started,
        )
    streams.write_report(result, report_path)
    return result


class _Job:
    """Quantizes what the plan says and writes the file."""

    def __init__(
        self,
        source: Source,
        plan: Sequence[Planned],
        given: Given | None,
        progress: Progress | None,
        jobs: int,
    ) -> None:
        self._source = source
        self._plan = plan
        self._given = given
        self._progress = progress or Silent()
        self._jobs = jobs
        self.records: list[tuple[dict[str, Any], Stats]] = []

    def write(self, path: Path, container: str, *, external_data: bool) -> None:
        """Write the output to path, whole or not at all."""
        if container == "onnx":
            self._write_onnx(path, external_data=external_data)
            return
        quantized = {p.info.name: p for p in self._plan if p.spec is not None}
        tensors = {
            name: native.Stored(p.spec.dtype, p.info.shape, p.spec.granularity, p.scale_dtype,
                                p.info.dtype)
            for name, p in quantized.items()
            if p.spec is not None and p.scale_dtype is not None
        }  # fmt: skip
        original, kept = self._source, {}
        copied = {p.info.name: p.entries for p in self._plan if p.spec is None}
        if isinstance(self._source, DequantizedSource):
            original = self._source.original
            kept = {k: v for k, v in self._source.tensors.items() if k in copied}
            copied |= {name: self._source.parts(name) for name in kept}
        with (
            files.replacing(path) as temporary,
            streams.named(temporary, str(path)),
            native.Writer(
                container,
                temporary,
                [entry for p in quantized.values() for entry in p.entries],
                [entry for entries in copied.values() for entry in entries],
                tensors=tensors,
                kept=kept,
                source=original,
            ) as writer,
        ):
            self._quantize_into(writer)
            writer.copy_rest()

    def _write_onnx(self, path: Path, *, external_data: bool) -> None:
        from qtool.layouts.onnx_qdq import OnnxQdq, Weight

        weights = {
            p.info.name: Weight(p.spec, p.scale_dtype, has_zero_point=len(p.entries) > 2)
            for p in self._plan
            if p.spec is not None and p.scale_dtype is not None
        }
        source = cast("OnnxSource", self._source)
        with OnnxQdq(source, weights, path, external_data=external_data) as writer:
            self._quantize_into(writer)

    def _quantize_into(self, writer: Writer) -> None:
        quantized = [(p, p.spec) for p in self._plan if p.spec is not None]
        self._progress.begin(len(quantized), sum(p.info.nbytes for p, _ in quantized))
        kernels_pay = engine.kernels_pay(sum(p.info.size for p, _ in quantized))
        for planned, spec in quantized:
            info = planned.info
            given = (self._given and self._given.of(info.name)) or (None, None)
            asked = engine.request(info.name, info.shape, info.dtype, spec, *given)
            if kernels_pay and info.size >= engine.TILES_PAY and engine.can_stream(asked):
                outcome = self._stream(asked, writer)
            else:
                tensor = engine.plain.quantize(self._source.read(info.name), asked)
                writer.add(info.name, tensor)
                outcome = tensor.outcome
                self._progress.advance(info.nbytes)
            record = report.tensor_record(
                info, outcome.describe(), outcome.stats, planned.bytes_after
            )
            self.records.append((record, outcome.stats))
            self._progress.finish(info.name)

    def _stream(self, asked: engine.Request, writer: Writer) -> Outcome:
        from qtool.engine.stream import Stream
        from qtool.kernels import machine

        machine.load(self._progress.note)
        with (
            self._source.reading(asked.name) as read,
            writer.target(asked.name) as target,
        ):
            return Stream(read, asked, self._jobs, self._progress.advance).quantize(target)


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


def _settings(recipe: Recipe, given: Given | None, *, requantize: bool) -> dict[str, Any]:
    """The choices that decide the output, for the report."""
    choices = {f.name: getattr(recipe.spec, f.name) for f in fields(recipe.spec)}
    del choices["granularity"]
    if given is not None:
        choices |= {"method": "given", "symmetric": None}
    named = {k: v.name if isinstance(v, DType) else v for k, v in choices.items()}
    return named | {
        "axis": recipe.axis,
        "block_size": recipe.block_size,
        "include": list(recipe.include),
        "exclude": list(recipe.exclude),
        "requantize": requantize,
    }

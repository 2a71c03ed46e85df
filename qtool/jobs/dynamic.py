"""qtool dynamic: DynamicQuantizeLinear of the tensors of a file, or of a model's activations."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from qtool.dtypes import DTYPES, DTypeLike, resolve
from qtool.errors import UsageError, usage_errors
from qtool.jobs.command import Command
from qtool.jobs.division import Division
from qtool.jobs.integer_graph import IntegerGraph
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.quantize import run
from qtool.jobs.terms import Terms
from qtool.recipe import effective
from qtool.report import Report

_TARGETS = (DTYPES["uint8"], DTYPES["int8"])


def dynamic_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    graph: bool = False,
    per_tensor: bool = False,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    to: str | None = None,
    external_data: bool = False,
    requantize: bool = False,
    allow_empty: bool = False,
    report: str | Path | None = None,
    fail_if: Sequence[str] = (),
    baseline: str | Path | None = None,
    strict: bool = False,
    dry_run: bool = False,
    hash: bool = False,
    resume: bool = False,
    shards: str | None = None,
    scheduler: str | Executor | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """DynamicQuantizeLinear of an array, or of each float tensor of a file, whatever its rank; or
    of what MatMul, Gemm and Conv of an ONNX model read.

    graph: put DynamicQuantizeLinear into the model, with MatMulInteger and ConvInteger of weights
        that are quantized beforehand: their figures are the report's. per_tensor: one scale per
        weight, in place of one per output channel.
    dtype: without graph uint8 (default), or int8 with [-127, 127]; with graph that of the weights,
        int8 (default) or uint8.
    Other arguments, result and errors as quantize_file; dst None: STEM.dynamic.CONTAINER beside
    src.
    """
    if per_tensor and not graph:
        raise UsageError(
            "--per-tensor", "is for --graph", "leave it out: there is one scale anyway"
        )
    with usage_errors():
        target = resolve(dtype or ("int8" if graph else "uint8"), "dtype", _TARGETS)
    if not target.is_target:
        rule = f"DynamicQuantizeLinear does not produce {target}"
        raise UsageError("--dtype", rule, "use uint8 or int8")
    words = {"dtype": target.name} | (
        {"scale_dtype": "float32"} if graph else {"semantics": "dynamic"}
    )
    recipe = effective(
        include=include, exclude=exclude, source_dtype=source_dtype, to=to,
        external_data=external_data, requantize=requantize, allow_empty=allow_empty, graph=graph,
        per_tensor=per_tensor, **words,
    )  # fmt: skip
    recipe = replace(recipe, all_ranks=not graph)
    recipe.check(typed_later=False)
    if target.name not in ("int8", "uint8"):
        raise UsageError("--dtype", f"{target} has no MatMulInteger", "use int8 or uint8")
    return run(
        Command(
            "dynamic", src, dst, recipe, "dynamic",
            report_to=report,
            division=Division.of(resume=resume, shards=shards, scheduler=scheduler),
            jobs=jobs, force=force, progress=progress or Silent(),
            graph=IntegerGraph(per_tensor=per_tensor) if graph else None,
            terms=Terms.of(fail_if, baseline, strict=strict), dry_run=dry_run, hashes=hash,
        )
    )  # fmt: skip

"""qtool dynamic: DynamicQuantizeLinear of every float tensor of a file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from qtool.dtypes import DTypeLike
from qtool.errors import usage_errors
from qtool.jobs.division import Division
from qtool.jobs.progress import Progress
from qtool.jobs.quantize import run
from qtool.recipe import Recipe
from qtool.report import Report
from qtool.spec import PerTensor, QuantSpec


def dynamic_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike = "uint8",
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
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
    """DynamicQuantizeLinear of an array, or of each float tensor of a file, whatever its rank.

    dtype: uint8, or int8 with [-127, 127]. Other arguments, result and errors as quantize_file;
    dst None: STEM.dynamic.CONTAINER beside src.
    """
    with usage_errors():
        spec = QuantSpec(dtype, PerTensor(), semantics="dynamic")
    recipe = Recipe(spec, include=tuple(include), exclude=tuple(exclude), all_ranks=True)
    return run(
        "dynamic",
        src,
        dst,
        recipe,
        None,
        tag="dynamic",
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
    )

"""qtool dequantize of a checkpoint folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial as bound
from pathlib import Path
from typing import Any, cast

from qtool import __version__, formats
from qtool.dtypes import DType, DTypeLike
from qtool.formats import Source
from qtool.formats.carried import others
from qtool.formats.checkpoint import CheckpointSource
from qtool.formats.folders import Partial
from qtool.jobs import dequantize, fingerprint, folder, streams
from qtool.jobs.division import Division
from qtool.jobs.folder import Run
from qtool.jobs.hashing import Sums
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.shards import Record
from qtool.layouts.metadata import read_metadata


@dataclass(frozen=True)
class DequantizeShard:
    """The work on one shard. output: type of the tensors; size: see Work."""

    output: DType
    size: tuple[int, int]

    def write(self, source: Source, target: Path, jobs: int, progress: Progress) -> dict[str, Any]:
        done = dequantize.write(source, self.output, target, jobs, progress)
        return {"tensors": dequantize.described(done, self.output)}


def dequantize_folder(
    src: str | Path,
    dst: str | Path | None,
    output: DType,
    *,
    source_dtype: DTypeLike | None,
    resume: bool,
    jobs: int | None,
    force: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """Dequantize every shard of a folder; see dequantize_file."""
    started = time.perf_counter()
    partial = Partial(folder.target(src, dst, output.name))
    division = Division(resume)
    with streams.opened(src, source_dtype) as opened:
        source = cast(CheckpointSource, opened)
        folder.check(partial, [source.path], division, force=force)
        dequantize.check_quantized(source)
        others(source.path, source.shards)
        settings = {"dtype": output.name}
        described = read_metadata(source)
        key = fingerprint.of_words([json.dumps(settings).encode()])
        run = Run(
            "dequantize", __version__, str(src), str(Path(src).absolute()), settings, "",
            dict.fromkeys(source.shards, key), [],
            folder.without(described.layout, described.tensors),
        )  # fmt: skip
        works = {name: DequantizeShard(output, size) for name, size in _sizes(source, output)}
        result = bound(_result, started=started)
        report = streams.ReportFile(None, [], force=force)
        with folder.building(partial, run, division):
            records = folder.build(run, works, partial, division, jobs, progress or Silent())
            return folder.conclude(
                run, source, partial, records, result, report, Sums(wanted=False), force=force
            )


def _sizes(source: CheckpointSource, output: DType) -> list[tuple[str, tuple[int, int]]]:
    """How many tensors of each shard are quantized, and their bytes as floats."""
    sizes = []
    for name, shard in source.shards.items():
        with closing(formats.open(shard.path)) as opened:
            stored = read_metadata(opened).tensors.values()
            nbytes = sum(output.nbytes(math.prod(s.shape)) for s in stored)
            sizes.append((name, (len(stored), nbytes)))
    return sizes


def _result(
    run: Run,
    source: dict[str, Any],
    output: dict[str, Any],
    records: Sequence[Record],
    *,
    started: float,
) -> dict[str, Any]:
    return {
        "command": run.command,
        "source": source,
        "output": output,
        "tensors": [tensor for record in records for tensor in record.findings["tensors"]],
        "seconds": round(time.perf_counter() - started, 6),
    }

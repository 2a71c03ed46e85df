"""qtool finish: the folder of shards that several processes have made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any, cast

from qtool import __version__, engine
from qtool.errors import OutputError
from qtool.formats import folders
from qtool.formats.checkpoint import CheckpointSource
from qtool.formats.folders import Partial
from qtool.jobs import folder, folder_files, shards, streams
from qtool.jobs.folder import Run
from qtool.jobs.quantize_folder import report_of
from qtool.jobs.shards import Record
from qtool.jobs.terms import Terms


def finish_folder(
    dst: str | Path,
    *,
    report: str | Path | None = None,
    fail_if: Sequence[str] = (),
    baseline: str | Path | None = None,
    jobs: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Check every shard in DST.partial, complete the folder and let it appear as dst.

    report, fail_if, baseline, jobs, force: as in quantize_file. Returns the Report.
    Raises GateError where the result fails; the shards are kept then.
    Raises QtoolError where a shard is missing, or is not that of the source, settings and version
    that the slices were begun with; nothing is lost then.
    """
    started = time.perf_counter()
    terms = Terms.of(fail_if, baseline, strict=False)
    partial = Partial(dst)
    if not partial.is_started and partial.dst.is_dir():
        rule = "is complete already, or was not begun in slices"
        raise OutputError(str(partial.dst), rule, "there is nothing to finish")
    if not partial.is_started:
        raise OutputError(
            partial.name, "has no shards", "make them by `qtool quantize --shards K/N`"
        )
    with partial.held():
        run = Run.load(partial.run)
        if run.version != __version__:
            rule = f"is made by qtool {run.version}, this is {__version__}"
            raise OutputError(partial.name, rule, "finish it with that one")
        if run.command == "dequantize":
            raise OutputError(
                partial.name, "is of a run without slices", "go on with it by --resume"
            )
        with (
            streams.opened(run.path) as opened,
            folder_files.beside(cast(CheckpointSource, opened), wanted=run.hashes) as sums,
        ):
            source = cast(CheckpointSource, opened)
            if not partial.is_published:
                folders.check_target(partial.dst, source.path, force=force)
            report_path = folder.report_path(report, partial)
            others = [source.path, partial.dst]
            report_file = streams.ReportFile(report_path, others, force=force)
            records = _records(run, source, partial, jobs or engine.default_jobs())
            result = bound(report_of, started=started, judged=terms.judged)
            return folder.conclude(
                run, source, partial, records, result, report_file, sums, force=force
            )


def _records(run: Run, source: CheckpointSource, partial: Partial, jobs: int) -> list[Record]:
    """The records of all shards, each proven complete."""
    if list(source.shards) != list(run.keys):
        rule = "has other shards than those that were begun with"
        raise OutputError(str(source.path), rule, f"remove {partial.name} and begin anew")
    found = {
        name: shards.proven(place, jobs, hashes=run.hashes)
        for name, place in run.places(partial).items()
    }
    missing = [name for name, record in found.items() if record is None]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        rule = f"lacks {missing[0]}{more}, or it is not proven complete"
        raise OutputError(partial.name, rule, "run the slices that are left, then finish")
    return [record for record in found.values() if record is not None]

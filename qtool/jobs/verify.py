"""qtool verify: a quantized file beside its original, from the two files alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from qtool import engine, report
from qtool.dtypes import DTypeLike
from qtool.errors import GateError, UsageError
from qtool.formats import Source
from qtool.jobs import screening, streams
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.verify_recipe import provenance, recipe_of
from qtool.jobs.verify_report import Reference, reference
from qtool.jobs.verify_side import Side, side_of
from qtool.jobs.verify_tensors import Comparison
from qtool.report import Report


def verify_file(
    original: str | Path,
    quantized: str | Path,
    *,
    against: str | Path | None = None,
    alone: bool = False,
    report: str | Path | None = None,
    fail_if: Sequence[str] = (),
    baseline: str | Path | None = None,
    run: str | Path | None = None,
    random: int | None = None,
    source_dtype: DTypeLike | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """What a quantized file cost, and what is wrong with it, from it and its original.

    original, quantized: files or folders of any container and layout that qtool reads; one of them
        may be "-".
    against: the report of `quantize` that must agree; None: the one beside quantized, where it is
        there. alone: no report at all.
    report: where the Report goes as JSON; None: nowhere.
    fail_if, baseline: see report.gates.
    run, random: of ONNX models: samples, or how many random ones, to compare outputs on; see
        verify_outputs.
    source_dtype, jobs: as in quantize_file.
    Returns the Report: its "tensors" and "totals" are those of `quantize`; "problems" is empty.
    Raises GateError, which has the Report, where there are problems or a gate failed; QtoolError
    where a file cannot be read.
    """
    started = time.perf_counter()
    _check_usage(original, quantized, against, run, random, alone=alone)
    with ExitStack() as stack:
        source = stack.enter_context(streams.opened(original, source_dtype))
        output = stack.enter_context(streams.opened(quantized))
        path = None if report is None else streams.report_path(report, str(quantized))
        read = [*streams.source_files(original, source), *streams.source_files(quantized, output)]
        known = None if alone else reference(against, quantized)
        streams.check_report(path, [*read, *([known.path] if known else [])], force=force)
        result = _verified(
            source, output, str(original), str(quantized), known, progress or Silent(),
            jobs or engine.default_jobs(),
        )  # fmt: skip
    result["seconds"] = round(time.perf_counter() - started, 6)
    streams.write_report(result, path)
    _raise(result)
    return result


def _check_usage(
    original: str | Path,
    quantized: str | Path,
    against: str | Path | None,
    run: str | Path | None,
    random: int | None,
    *,
    alone: bool,
) -> None:
    """Refuse options that contradict each other."""
    if str(original) == str(quantized) == streams.STANDARD:
        raise UsageError("-", "standard input is one file", "name the other one")
    if alone and against is not None:
        raise UsageError("--against", "contradicts --alone", "leave one of them out")
    if run is not None and random is not None:
        raise UsageError("--run", "replaces --random", "leave one of them out")


def _verified(
    source: Source,
    output: Source,
    original: str,
    quantized: str,
    known: Reference | None,
    progress: Progress,
    jobs: int,
) -> Report:
    """The Report of what the files hold."""
    before = side_of(source)
    after = side_of(output, others=before.names)
    made = provenance(output)
    text = made["recipe"] if made and made["recipe"] else known and known.recipe
    recipe, fault = recipe_of(text, quantized)
    comparison = Comparison(before, after, recipe, progress, jobs)
    comparison.run()
    problems: list[tuple[str | None, str]] = [*([(None, fault)] if fault else [])]
    problems += comparison.problems
    if known is not None:
        problems += known.differences(comparison, before, after, made)
    built = report.build(
        "verify",
        {
            "name": original,
            "container": source.container,
            "bytes": source.nbytes,
            "tensors": len(before.names),
        },
        _output(output, quantized),
        {},
        comparison.records,
        [(name, "kept") for name in comparison.kept],
        screening.nonfinite_warnings(stats for _, stats in comparison.records),
        0,
    )
    built["totals"]["problems"] = len(problems)
    return built | {
        "problems": [{"tensor": name, "problem": problem} for name, problem in problems],
        "checks": {"report": known and str(known.path), "provenance": made},
        "outputs": [],
    }


def _output(source: Source, name: str) -> dict[str, Any]:
    """A report's "output" of a file that is there."""
    external = None
    if source.container == "onnx":
        from qtool.formats.onnx import OnnxSource

        files = sorted(cast(OnnxSource, source).external_files)
        external = next((file.name for file in files), None)
    return {
        "name": name,
        "container": source.container,
        "bytes": source.nbytes,
        "external_data": external,
    }


def _raise(result: Report) -> None:
    """Raise GateError where there is something wrong."""
    lines = [
        f"{'tensor ' + p['tensor'] if p['tensor'] else result['output']['name']}: {p['problem']}"
        for p in result["problems"]
    ]
    if lines:
        *others, last = lines
        thing, _, rule = last.partition(": ")
        raise GateError(thing, rule, report=result, others=others)

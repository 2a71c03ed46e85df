"""qtool verify: a quantized file beside its original, from the two files alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qtool import engine, report
from qtool.dtypes import DTypeLike
from qtool.errors import FormatError, UsageError
from qtool.formats import Source
from qtool.jobs import screening, streams, verify_config, verify_graph, verify_outputs
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.terms import Terms, check
from qtool.jobs.verify_recipe import recipe_of
from qtool.jobs.verify_report import Reference, reference
from qtool.jobs.verify_side import side_of
from qtool.jobs.verify_tensors import Comparison
from qtool.layouts.metadata import read_metadata
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

    original, quantized: files or folders of any container and layout that qtool reads; one of them,
        or of them and run, may be "-".
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
    terms = Terms.of(fail_if, baseline, strict=False)
    threads, progress = jobs or engine.default_jobs(), progress or Silent()
    with ExitStack() as stack:
        source = stack.enter_context(streams.opened(original, source_dtype))
        output = stack.enter_context(streams.opened(quantized))
        known = None if alone else reference(against, quantized)
        path = None if report is None else streams.report_path(report, str(quantized))
        read = [*streams.source_files(original, source), *streams.source_files(quantized, output)]
        read += [known.path] if known else []
        report_file = streams.ReportFile(path, read, force=force)
        files = _Files(source, output, str(original), str(quantized), known)
        found = files.compared(progress, threads)
        if run is not None or random is not None:
            samples = None if run is None else stack.enter_context(streams.kept(run))
            outputs = verify_outputs.compare(source, output, samples, random, threads)
            files.add_outputs(found, outputs)
    found["checks"] |= {"run": None if run is None else str(run), "random": random}
    found["seconds"] = round(time.perf_counter() - started, 6)
    judged = terms.judged(found)
    check(judged, report_file)
    report_file.write(judged)
    return judged


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
    streams.check_once(original, quantized, run)
    if alone and against is not None:
        raise UsageError("--against", "contradicts --alone", "leave one of them out")
    if run is not None and random is not None:
        raise UsageError("--run", "replaces --random", "leave one of them out")
    if random is not None and random < 1:
        raise UsageError("--random", f"{random} is not positive", "use for example 4")


@dataclass(frozen=True)
class _Files:
    """The two files, what the user calls them, and the report that must agree."""

    source: Source
    output: Source
    original: str
    quantized: str
    known: Reference | None

    def compared(self, progress: Progress, jobs: int) -> Report:
        """The Report of what they hold."""
        source, known = self.source, self.known
        before = side_of(source)
        after = side_of(self.output, others=before.names)
        if before.is_quantized and not after.is_quantized:
            rule = f"is quantized, {self.quantized} is not"
            raise FormatError(self.original, rule, "give the original first")
        made = read_metadata(self.output).provenance
        text = made.recipe if made else None if known is None else known.recipe
        recipe, fault = recipe_of(text, self.quantized)
        comparison = Comparison(before, after, recipe, progress, jobs)
        comparison.run()
        problems: list[tuple[str | None, str]] = [(None, fault)] if fault else []
        problems += comparison.problems
        problems += [(None, text) for text in verify_graph.differences(source, self.output)]
        if not before.is_quantized:
            told = verify_config.differences(before.infos, self.output)
            problems += [(None, text) for text in told]
        expected = made is None if known is None else known.report["tensors"]
        if expected and not comparison.records and not comparison.problems:
            problems.append((None, "nothing in it is quantized"))
        built = report.build(
            "verify",
            {
                "name": self.original,
                "container": source.container,
                "bytes": source.nbytes,
                "tensors": len(before.names),
                "files": None,
            },
            _output(self.output, self.quantized),
            None,
            text,
            comparison.records,
            [(name, "kept") for name in comparison.kept],
            screening.nonfinite_warnings(stats for _, stats in comparison.records),
            0,
        )
        if known is not None:
            problems += known.differences(comparison, before, after, made, built["totals"])
            problems += known.changed(self.source, self.output)
        return built | {
            "problems": [{"tensor": name, "problem": problem} for name, problem in problems],
            "checks": {
                "report": None if known is None else str(known.path),
                "provenance": made and made.to_json(),
            },
        }

    def add_outputs(self, found: Report, outputs: verify_outputs.Outputs) -> None:
        """Say in the Report how outputs differ."""
        found["outputs"] = list(outputs.outputs)
        found["totals"] |= outputs.totals()
        found["warnings"] += outputs.warnings
        found["problems"] += [{"tensor": None, "problem": text} for text in outputs.problems]


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
        "files": None,
    }

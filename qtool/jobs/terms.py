"""What a result must hold before it is put in place: gates, and what --strict wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import GateError, UsageError
from qtool.jobs.mixing import Mixture
from qtool.jobs.streams import ReportFile
from qtool.jobs.unmet import unmet
from qtool.report import Report

if TYPE_CHECKING:
    from qtool.report.gates import Gate

# The figures that a plan has already.
_PLANNED = {
    "bits_per_weight", "bits_per_weight_before", "bytes_after", "bytes_before", "elements",
    "file_bytes_after", "file_bytes_before", "num_scales", "skipped", "tensors",
}  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """gates: what makes the result fail. baseline: the report that they compare it with.
    strict: it fails too where a tensor is not quantized as asked."""

    gates: Sequence[Gate] = ()
    baseline: Report | None = None
    strict: bool = False

    @classmethod
    def of(cls, fail_if: Sequence[str], baseline: str | Path | None, *, strict: bool) -> Terms:
        """From the options of the command line. Raises UsageError, and FormatError for a baseline
        that is no report."""
        if not fail_if:
            if baseline is not None:
                rule = "nothing is compared with it"
                remedy = "add for example --fail-if 'sqnr_db worse by 0.5'"
                raise UsageError("--baseline", rule, remedy)
            return cls(strict=strict)
        from qtool.report.document import read_report
        from qtool.report.gates import Gate

        fail_if = [fail_if] if isinstance(fail_if, str) else fail_if
        gates = [Gate.parse(text) for text in fail_if]
        comparing = [gate.text for gate in gates if gate.needs_baseline]
        if comparing and baseline is None:
            rule = f"{comparing[0]!r} compares with an earlier report"
            raise UsageError("--fail-if", rule, "give it by --baseline")
        if baseline is not None and not comparing:
            rule = "no --fail-if compares with it"
            raise UsageError("--baseline", rule, "write for example 'sqnr_db worse by 0.5'")
        return cls(gates, None if baseline is None else read_report(Path(baseline)), strict)

    @property
    def asked(self) -> bool:
        """Whether there is anything that a result must hold."""
        return bool(self.gates) or self.strict

    def check_planned(self) -> None:
        """Refuse gates on what a dry run cannot know."""
        for gate in self.gates:
            for figure in sorted({f.removeprefix("total.") for f in gate.figures} - _PLANNED):
                rule = f"a dry run measures no {figure}"
                raise UsageError(f"--fail-if {gate.text!r}", rule, "leave --dry-run out")

    def judged(
        self, report: Report, mixture: Mixture | None = None, with_nan: Sequence[str] = ()
    ) -> Report:
        """The report with what is to be said of it under "gates" and "strict".

        mixture: what was asked for; None: nothing is known of it, and strict is not to be judged.
        with_nan: see unmet.
        """
        entries: list[dict[str, Any]] = []
        if self.gates:
            from qtool.report.gates import judge

            entries = judge(self.gates, report, self.baseline)
        strict = None
        if self.strict and mixture is not None:
            failed = [
                {"tensor": name, "reason": reason}
                for name, reason in unmet(mixture.recipe, mixture.plan, report["tensors"], with_nan)
            ]
            strict = {"passed": not failed, "failed": failed}
        return report | {"gates": entries, "strict": strict}


def check(report: Report, file: ReportFile | None = None) -> None:
    """Raise GateError where the judged report fails, once it is written to its file."""
    lines = _lines(report)
    if lines:
        if file is not None:
            file.write(report)
        raise GateError(*lines[0], report=report, others=[": ".join(line) for line in lines[1:]])


def _lines(report: Report) -> list[tuple[str, str]]:
    """One for each failure: the thing and the rule."""
    output = report["output"]["name"]
    lines = [(_thing(p["tensor"], output), p["problem"]) for p in report.get("problems", ())]
    if report.get("gates"):
        from qtool.report.gates import failure_lines

        lines += failure_lines(report["gates"])
    if report.get("strict") is not None:
        lines += [
            (_thing(f["tensor"], report["source"]["name"]), f"{f['reason']} (--strict)")
            for f in report["strict"]["failed"]
        ]
    return lines


def _thing(tensor: str | None, file: str) -> str:
    """What to call a tensor, whose name may be empty; None: the whole file."""
    return file if tensor is None else tensor or "''"

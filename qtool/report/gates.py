"""Gates: expressions that no tensor of a report, and no total of it, may fulfil."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qtool.errors import UsageError
from qtool.recipe import Patterns, unmatched
from qtool.report.expression import parse
from qtool.report.figures import EMPTY, Record, Undefined
from qtool.report.tokens import OPTION, fault, shown
from qtool.report.tree import Number, Operand, Truth, Worse, leaves
from qtool.report.verdict import Case, Verdict, verdict

_PATTERN = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^\s,"']+))\s*(?:(,)|\Z)""")


@dataclass(frozen=True)
class Gate:
    """What makes a run fail, as `sqnr_db < 20 on lm_head*`.

    patterns: of the tensors that it is about; none: of all.
    """

    text: str
    tree: Truth
    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Gate:
        """The gate that a text describes; the language is in qtool.report.expression. Raises
        UsageError, which points at the place."""
        tree, end = parse(text)
        gate = cls(text, tree, () if end is None else tuple(_patterns(text, end)))
        if gate.patterns and gate.is_of_totals:
            rule = "figures of all tensors together have no 'on'"
            raise fault(text, end or 0, rule, "leave it out, or the 'total.'")
        return gate

    @cached_property
    def operands(self) -> tuple[Operand | Worse, ...]:
        """The figures, and those compared with the baseline, in the order of the text."""
        return tuple(leaf for leaf in leaves(self.tree) if not isinstance(leaf, Number))

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures that it needs, each once: sqnr_db, total.bits_per_weight."""
        return tuple(dict.fromkeys(_operand(leaf).key for leaf in self.operands))

    @property
    def needs_baseline(self) -> bool:
        """Whether it compares with an earlier report."""
        return any(isinstance(leaf, Worse) for leaf in self.operands)

    @property
    def is_of_totals(self) -> bool:
        """Whether it is judged once, and not tensor by tensor."""
        return all(_operand(leaf).of_totals for leaf in self.operands)

    @cached_property
    def _matcher(self) -> Patterns:
        return Patterns(self.patterns)

    def selects(self, name: str) -> bool:
        """Whether it is about the tensor of that name."""
        return not self.patterns or self._matcher.match(name)


def judge(
    gates: Iterable[Gate], report: Mapping[str, Any], baseline: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """What the gates say of a report, one entry each, as report["gates"] holds it.

    A gate fails where its expression holds, where that hangs on a figure that is undefined by the
    values' fault, and where it finds nothing to check. It passes where that hangs on a tensor that
    is exact or empty, or on what was not measured; those are listed. Raises UsageError for a gate
    that needs a baseline where there is none.
    """
    return [_judged(gate, report, baseline) for gate in gates]


def failure_lines(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What has failed in judge()'s entries, as the thing and the rule of an error each:
    ("fc1.weight", "sqnr_db is 18.2, fails 'sqnr_db < 20'")."""
    return [_failure(entry["expression"], f) for entry in entries for f in entry["failed"]]


def _phrases(figures: Mapping[str, float | None]) -> list[str]:
    """The figures of a failure in words: sqnr_db is 18.2 (19.4 in the baseline)."""
    found = []
    for key, value in figures.items():
        if not key.startswith("baseline."):
            before = figures.get(f"baseline.{key}")
            was = "" if before is None else f" ({_number(before)} in the baseline)"
            is_now = "undefined" if value is None else _number(value)
            found.append(f"{key} is {is_now}{was}")
    return found


def _judged(
    gate: Gate, report: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> dict[str, Any]:
    if baseline is None and gate.needs_baseline:
        rule = f"{shown(gate.text)}: compares with a baseline, and there is none"
        raise UsageError(OPTION, rule, "give an earlier report with --baseline")
    totals = report["totals"]
    old_totals = None if baseline is None else baseline["totals"]
    old = {} if baseline is None else {record["name"]: record for record in baseline["tensors"]}
    cases = {None: Case(None, totals, None, old_totals)}
    failed: list[dict[str, Any]] = []
    undefined: list[dict[str, Any]] = []
    if not gate.is_of_totals:
        records = [record for record in report["tensors"] if gate.selects(record["name"])]
        cases = {r["name"]: Case(r, totals, old.get(r["name"]), old_totals) for r in records}
        failed += _unchecked(gate, report, list(cases.values()))
        failed += _gone(gate, report, old)
    for name, case in cases.items():
        found = verdict(gate.tree, case)
        failed += _failed(name, found)
        undefined += _undefined(name, found)
    return {
        "expression": gate.text,
        "passed": not failed,
        "failed": failed,
        "undefined": undefined,
    }


def _unchecked(
    gate: Gate, report: Mapping[str, Any], cases: Sequence[Case]
) -> Iterator[dict[str, Any]]:
    """Failures for want of anything to check."""
    names = [record["name"] for record in report["tensors"]]
    if not names:
        yield _entry(None, "no tensor was quantized")
        return
    for pattern in unmatched(gate.patterns, names):
        yield _entry(None, f"{pattern!r} matches no quantized tensor")
    for leaf in dict.fromkeys(gate.operands):
        states = [state for state in (case.state(leaf) for case in cases) if state != EMPTY]
        voids = [s.why for s in states if isinstance(s, Undefined) and s.is_void]
        if _operand(leaf).of_totals or not states or len(voids) < len(states):
            continue
        key = _operand(leaf).key
        whys = " or ".join(dict.fromkeys(voids))
        is_figure = isinstance(leaf, Operand)
        yield _entry(None, f"no tensor has {key}" if is_figure else f"{key} of no tensor: {whys}")


def _gone(
    gate: Gate, report: Mapping[str, Any], old: Mapping[str, Record]
) -> Iterator[dict[str, Any]]:
    """Failures of tensors that only the baseline has."""
    if any(isinstance(leaf, Worse) and not leaf.operand.of_totals for leaf in gate.operands):
        names = {record["name"] for record in report["tensors"]}
        for name in old:
            if name not in names and gate.selects(name):
                yield _entry(name, "not quantized any more")


def _failed(name: str | None, found: Verdict) -> Iterator[dict[str, Any]]:
    findings = [f for f in found.because if found.holds or _faults(f.undefined)]
    if found.holds is False or not findings:
        return
    figures = {key: value for f in findings for key, value in f.figures.items()}
    limits = [("not " if f.is_negated else "") + f.text for f in findings]
    reasons = [f.reason for f in findings if f.reason]
    reasons += [why for f in findings for why in _faults(f.undefined)]
    reason = ", ".join(dict.fromkeys(reasons)) or None
    yield _entry(name, reason, figures, " and ".join(dict.fromkeys(limits)))


def _undefined(name: str | None, found: Verdict) -> list[dict[str, Any]]:
    if found.holds is not None or any(_faults(f.undefined) for f in found.because):
        return []
    whys = {key: u.why for f in found.because for key, u in f.undefined.items()}
    return [{"tensor": name, "figure": key, "why": why} for key, why in whys.items()]


def _faults(undefined: Mapping[str, Undefined]) -> list[str]:
    return [u.why for u in undefined.values() if u.fails]


def _entry(
    name: str | None,
    reason: str | None,
    figures: Mapping[str, float | None] | None = None,
    limit: str | None = None,
) -> dict[str, Any]:
    return {"tensor": name, "figures": dict(figures or {}), "limit": limit, "reason": reason}


def _failure(expression: str, failed: Mapping[str, Any]) -> tuple[str, str]:
    tensor, limit, reason = failed["tensor"], failed["limit"], failed["reason"]
    if limit is None and tensor is None:
        return OPTION, f"{shown(expression)}: {reason}"
    if limit is None:
        return tensor or "''", f"{reason}, fails {expression!r}"
    why = f" ({reason})" if reason else ""
    figures = " and ".join(_phrases(failed["figures"]))
    if tensor is None:
        return "totals", f"{figures.replace('total.', '')}{why}, fails {limit!r}"
    return tensor or "''", f"{figures}{why}, fails {limit!r}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else format(value, ".10g")


def _operand(leaf: Operand | Worse) -> Operand:
    return leaf if isinstance(leaf, Operand) else leaf.operand


def _patterns(text: str, at: int) -> Iterator[str]:
    """The patterns from an index of the text on."""
    more = True
    while more:
        match = _PATTERN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            remedy = "put one with spaces, commas or quotes in quotes"
            raise fault(text, at, "a pattern is wanted", remedy)
        pattern = match[1] or match[2] or match[3]
        try:
            Patterns([pattern]).match("")
        except UsageError as error:
            raise fault(text, match.start(), f"{error.thing} {error.rule}") from None
        yield pattern
        at, more = match.end(), match[4] is not None

"""Whether an expression holds for a tensor, or for all together, and because of what.

The logic has three values, Kleene's: a comparison with an undefined figure neither holds nor does
not, its negation likewise; `and` and `or` are known where the operands that are known decide. So no
`not` makes a pass of an undefined figure, nor a failure. Source: S. C. Kleene, Introduction to
Metamathematics, section 64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from qtool.report.figures import EMPTY, EXACT, FIGURES, HIGHER, Record, Undefined, is_exact, value
from qtool.report.tree import (
    Arithmetic,
    Both,
    Comparison,
    Not,
    Number,
    Operand,
    Quantity,
    Truth,
    Worse,
    leaves,
)

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_NO_TENSOR = Undefined("no tensor was quantized", fails=True)
_NOT_FINITE = Undefined("a quotient by 0, or beyond float64", fails=True)


@dataclass(frozen=True)
class Finding:
    """A comparison of a verdict: as written, its figures, and the undefined ones among them.

    is_negated: it counts because it does not hold. reason: where it holds without two values.
    """

    text: str
    figures: Mapping[str, float | None]
    undefined: Mapping[str, Undefined] = field(default_factory=dict)
    is_negated: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """holds: None where it hangs on undefined figures. because: the comparisons that decide it."""

    holds: bool | None
    because: tuple[Finding, ...]


@dataclass(frozen=True)
class Case:
    """What an expression is judged on: a tensor's record (None: totals alone) and the totals, and
    the same of the baseline, where there is one."""

    record: Record | None
    totals: Record
    old_record: Record | None = None
    old_totals: Record | None = None

    def value(self, operand: Operand) -> float | Undefined:
        """A figure."""
        if not operand.of_totals:
            return value(self.record or {}, operand.name)
        return _of_totals(value(self.totals, operand.name), self.totals)

    def worse(self, node: Worse) -> tuple[bool | Undefined, float | None, float | None]:
        """Whether a figure is worse than the baseline's; both figures, None where undefined."""
        is_total, name = node.operand.of_totals, node.operand.name
        old = self.old_totals if is_total else self.old_record
        now = self.value(node.operand)
        if isinstance(now, Undefined) and (now.fails or old is not None):
            return now, None, None
        if old is None or isinstance(now, Undefined):
            return Undefined("not in the baseline", is_void=True), _plain(now), None
        before = value(old, name)
        if before == EXACT:
            new = self.totals if is_total else self.record or {}
            return not is_exact(new, name), now, None
        if isinstance(before, Undefined):
            why = f"{before.why} in the baseline"
            return Undefined(why, fails=is_total, is_void=True), now, None
        loss = now - before if FIGURES[name].worse == HIGHER else before - now
        return loss > (node.by * abs(before) if node.is_share else node.by), now, before

    def state(self, node: Operand | Worse) -> float | Undefined:
        """What is known of a figure, or of its comparison with the baseline."""
        return self.value(node) if isinstance(node, Operand) else self.worse(node)[0]


def verdict(node: Truth, case: Case) -> Verdict:
    """What a truth is in a case."""
    match node:
        case Not(truth):
            found = verdict(truth, case)
            negated = tuple(replace(f, is_negated=not f.is_negated) for f in found.because)
            return Verdict(None if found.holds is None else not found.holds, negated)
        case Both(word, left, right):
            return _joined(word == "or", verdict(left, case), verdict(right, case))
        case Worse():
            return _worse(node, case)
        case Comparison():
            return _compared(node, case)


def _joined(dominant: bool, left: Verdict, right: Verdict) -> Verdict:
    """`or` where True is dominant, `and` where False is."""
    for holds in (dominant, None, not dominant):
        decisive = [v for v in (left, right) if v.holds is holds]
        if decisive:
            break
    return Verdict(holds, tuple(finding for v in decisive for finding in v.because))


def _worse(node: Worse, case: Case) -> Verdict:
    worse, now, before = case.worse(node)
    key = node.operand.key
    figures = {key: now, f"baseline.{key}": before}
    if isinstance(worse, Undefined):
        return Verdict(None, (Finding(node.text, figures, {key: worse}),))
    reason = "exact in the baseline" if worse and before is None else None
    return Verdict(worse, (Finding(node.text, figures, reason=reason),))


def _compared(node: Comparison, case: Case) -> Verdict:
    operands = [leaf for leaf in leaves(node) if isinstance(leaf, Operand)]
    values = {operand.key: case.value(operand) for operand in operands}
    figures = {key: _plain(found) for key, found in values.items()}
    undefined = {key: found for key, found in values.items() if isinstance(found, Undefined)}
    if not undefined:
        known = {key: float(found) for key, found in figures.items() if found is not None}
        left, right = _result(node.left, known), _result(node.right, known)
        if math.isfinite(left) and math.isfinite(right):
            holds = _COMPARE[node.sign](left, right)
            return Verdict(holds, (Finding(node.text, figures),))
        undefined = {node.text: _no_result(left, right, case)}
    return Verdict(None, (Finding(node.text, figures, undefined),))


def _result(node: Quantity, known: Mapping[str, float]) -> float:
    """A quantity in float64; a quotient by 0 is infinite, and 0 / 0 NaN."""
    match node:
        case Number():
            return node.value
        case Operand():
            return known[node.key]
        case Arithmetic():
            left, right = _result(node.left, known), _result(node.right, known)
            match node.sign:
                case "+":
                    return left + right
                case "-":
                    return left - right
                case "*":
                    return left * right
            if right == 0:
                return math.nan if left == 0 else math.inf
            return left / right


def _no_result(left: float, right: float, case: Case) -> Undefined:
    """Why a side has no finite value: 0 / 0 is to be expected where there are no errors."""
    record = case.totals if case.record is None else case.record
    if math.isinf(left) or math.isinf(right):
        return _NOT_FINITE
    if record.get("elements") == 0:
        return EMPTY
    return EXACT if is_exact(record, "mse") else _NOT_FINITE


def _of_totals(found: float | Undefined, totals: Record) -> float | Undefined:
    """A figure of totals: one that is not measured, or of no tensor, leaves nothing to judge."""
    if not isinstance(found, Undefined):
        return found
    if found is EMPTY and totals.get("tensors") == 0:
        return _NO_TENSOR
    return replace(found, fails=True) if found.is_void else found


def _plain(found: float | Undefined) -> float | None:
    return None if isinstance(found, Undefined) else found

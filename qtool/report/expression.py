"""What a gate's expression says, as a tree.

    expression: truth [`on` patterns]      truth: comparisons with `not`, `and`, `or`, parentheses
    comparison: sum (< <= > >= == !=) sum | figure `worse by` number
    sum: numbers and figures with + - * / and parentheses

`not` binds closer than `and`, and `and` closer than `or`. A number may have the unit of a figure
that it stands beside (dB; B, kB, MB, GB, TB in thousands), or % for hundredths. A figure is one of
a tensor, or with `total.` before it one of all together.
"""

from __future__ import annotations

import math

from qtool.errors import UsageError, nearest
from qtool.report.figures import FIGURES, NO_NUMBERS
from qtool.report.tokens import Token, fault, tokens
from qtool.report.tree import (
    QUANTITIES,
    TOTAL,
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

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
# how close an operator binds
_POWERS = {
    "or": 1, "and": 2, **dict.fromkeys((*_COMPARISONS, "worse"), 4),
    "+": 5, "-": 5, "*": 6, "/": 6,
}  # fmt: skip
_NOT, _NEGATIVE = 3, 7
_RESERVED = {*_POWERS, "not"}
# the dimension of a unit, and its power of ten
_UNITS = {
    "%": ("", -2), "dB": ("dB", 0),
    "B": ("B", 0), "kB": ("B", 3), "MB": ("B", 6), "GB": ("B", 9), "TB": ("B", 12),
}  # fmt: skip


def parse(text: str) -> tuple[Truth, int | None]:
    """The tree, and where the patterns after `on` begin. Raises UsageError."""
    parser = _Parser(text)
    start = parser.token.start
    tree = parser.tree(0)
    end = parser.token
    if end.kind != "end":
        raise parser.wanted("an operator or the end")
    return parser.as_truth(tree, start), end.end if end.text == "on" else None


class _Parser:
    """Precedence climbing. Its depth is bounded by the number of tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens(text)
        self._at = 0

    @property
    def token(self) -> Token:
        """The next one."""
        return self._tokens[self._at]

    def wanted(self, what: str) -> UsageError:
        """The error of a token that cannot stand where it does."""
        found = repr(self.token.text) if self.token.text else "the end"
        return fault(self._text, self.token.start, f"{what} is wanted, not {found}")

    def as_truth(self, found: Truth | Quantity, start: int) -> Truth:
        """What was found at an index, which must be a truth."""
        if isinstance(found, QUANTITIES):
            raise fault(self._text, start, "a comparison is wanted", "write sqnr_db < 20")
        return found

    def _truth(self, power: int) -> Truth:
        start = self.token.start
        return self.as_truth(self.tree(power), start)

    def _quantity(self, power: int) -> Quantity:
        start = self.token.start
        return self._as_quantity(self.tree(power), start)

    def _as_quantity(self, found: Truth | Quantity, start: int) -> Quantity:
        if isinstance(found, QUANTITIES):
            return found
        rule = "a figure or a number is wanted, not a comparison"
        raise fault(self._text, start, rule, "join comparisons with 'and'")

    def tree(self, power: int) -> Truth | Quantity:
        """What operators that bind closer than power hold together."""
        start = self.token.start
        left = self._first()
        while _POWERS.get(self.token.text, 0) > power:
            sign = self._next().text
            if sign in ("and", "or"):
                left = Both(sign, self.as_truth(left, start), self._truth(_POWERS[sign]))
                continue
            quantity = self._as_quantity(left, start)
            if sign == "worse":
                left = self._worse(quantity, start)
                continue
            right = self._quantity(_POWERS[sign])
            if sign in _COMPARISONS:
                left = self._comparison(sign, quantity, right, start)
            else:
                left = Arithmetic(sign, quantity, right)
        return left

    def _first(self) -> Truth | Quantity:
        """What no operator comes before."""
        token = self._next()
        if token.text == "(":
            inner = self.tree(0)
            if self.token.text != ")":
                raise self.wanted("')'")
            self._next()
            return inner
        if token.text == "not":
            return Not(self._truth(_NOT))
        if token.text == "-":
            return Arithmetic("-", Number(0.0, "", token.start), self._quantity(_NEGATIVE))
        if token.kind == "number":
            return self._number(token)
        if token.kind == "word" and token.text not in _RESERVED:
            return _operand(self._text, token)
        self._at -= token.kind != "end"
        raise self.wanted("a figure or a number")

    def _number(self, token: Token) -> Number:
        unit = ""
        if self.token.text == "%" or (
            self.token.kind == "word" and self.token.text not in _RESERVED
        ):
            unit = self.token.text
            if unit not in _UNITS:
                remedy = "use " + ", ".join(_UNITS)
                raise fault(self._text, self.token.start, f"there is no unit {unit!r}", remedy)
            self._next()
        shift = _UNITS[unit][1] if unit else 0
        value = float(f"{token.mantissa}e{token.exponent + shift}")
        if math.isinf(value):
            raise fault(self._text, token.start, f"{token.text} is too large")
        return Number(value, unit, token.start)

    def _comparison(self, sign: str, left: Quantity, right: Quantity, start: int) -> Comparison:
        found = Comparison(sign, left, right, self._since(start))
        operands = [leaf for leaf in leaves(found) if isinstance(leaf, Operand)]
        if not operands:
            raise fault(self._text, start, f"{found.text!r} compares no figure")
        for leaf in leaves(found):
            if isinstance(leaf, Number):
                self._check_unit(leaf, operands)
        for number, operand in ((left, right), (right, left)):
            if isinstance(number, Number) and number.unit == "%" and isinstance(operand, Operand):
                self._check_share(number, operand)
        return found

    def _check_share(self, number: Number, operand: Operand) -> None:
        """Refuse hundredths of dB and bytes: sqnr_db < 20% is not what is meant."""
        if FIGURES[operand.name].unit:
            raise self._wrong_unit(number, [operand])

    def _worse(self, operand: Quantity, start: int) -> Worse:
        if not isinstance(operand, Operand):
            raise fault(self._text, start, "'worse by' is said of a single figure")
        if FIGURES[operand.name].worse is None:
            rule = f"{operand.name} has no direction that is worse"
            raise fault(self._text, start, rule, "use one of error or size, such as sqnr_db")
        if self.token.text != "by":
            raise self.wanted("'by'")
        self._next()
        if self.token.kind != "number":
            raise self.wanted("a number from 0 on")
        number = self._number(self._next())
        self._check_unit(number, [operand])
        return Worse(operand, number.value, number.unit == "%", self._since(start))

    def _check_unit(self, number: Number, operands: list[Operand]) -> None:
        dimension = _UNITS[number.unit][0] if number.unit else ""
        if dimension and dimension not in {FIGURES[operand.name].unit for operand in operands}:
            raise self._wrong_unit(number, operands)

    def _wrong_unit(self, number: Number, operands: list[Operand]) -> UsageError:
        rule = f"{operands[0].name} is not in {number.unit}"
        return fault(self._text, number.start, rule, "leave the unit out")

    def _since(self, start: int) -> str:
        return " ".join(self._text[start : self._tokens[self._at - 1].end].split())

    def _next(self) -> Token:
        token = self.token
        self._at += token.kind != "end"
        return token


def _operand(text: str, token: Token) -> Operand:
    head, dot, name = token.text.rpartition(".")
    if dot and head not in (TOTAL, "totals"):
        rule = f"{head!r} has no figures"
        raise fault(text, token.start, rule, f"write {TOTAL}.{name} or {name}")
    place = "totals" if dot else "tensors"
    figure = FIGURES.get(name)
    if figure is None:
        allowed = [known for known, row in FIGURES.items() if place in row.places]
        raise _unknown(text, token, name, allowed)
    if place not in figure.places:
        rule = f"{name} is a figure of {'one tensor' if dot else 'all tensors together'}"
        raise fault(text, token.start, rule, f"write {name if dot else f'{TOTAL}.{name}'}")
    return Operand(name, of_totals=bool(dot))


def _unknown(text: str, token: Token, name: str, allowed: list[str]) -> UsageError:
    if name in NO_NUMBERS:
        remedy = "choose tensors by their names with 'on PATTERN'"
        return fault(text, token.start, f"{name} is no number", remedy)
    remedy = nearest(name, allowed, "use a number of a report, such as sqnr_db")
    return fault(text, token.start, f"there is no figure {name!r}", remedy)

"""The tree of a gate's expression: truths over quantities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Number:
    """A number. unit: as written. start: its index in the text."""

    value: float
    unit: str
    start: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A figure of a tensor, or of the totals."""

    name: str
    of_totals: bool

    @property
    def key(self) -> str:
        """The figure as one writes it."""
        return f"{TOTAL}.{self.name}" if self.of_totals else self.name


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """left sign right; 0 - right for a minus before a number."""

    sign: str
    left: Quantity
    right: Quantity


@dataclass(frozen=True, slots=True)
class Comparison:
    """left sign right. text: as written."""

    sign: str
    left: Quantity
    right: Quantity
    text: str


@dataclass(frozen=True, slots=True)
class Worse:
    """A figure that is worse than the baseline's by more than a number, or than that share of
    it."""

    operand: Operand
    by: float
    is_share: bool
    text: str


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of a truth."""

    truth: Truth


@dataclass(frozen=True, slots=True)
class Both:
    """left and right, or left or right."""

    word: str
    left: Truth
    right: Truth


Quantity = Number | Operand | Arithmetic
Truth = Comparison | Worse | Not | Both
QUANTITIES = (Number, Operand, Arithmetic)


def leaves(node: Truth | Quantity) -> Iterator[Number | Operand | Worse]:
    """The numbers and figures of a tree, in the order of the text."""
    match node:
        case Not(truth):
            yield from leaves(truth)
        case Both() | Comparison() | Arithmetic():
            yield from leaves(node.left)
            yield from leaves(node.right)
        case _:
            yield node

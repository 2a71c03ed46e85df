"""The errors that qtool raises: each names the thing, the rule it breaks and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class QtoolError(ValueError):
    """Something that cannot be done: ``thing: rule; remedy``.

    thing: the input, tensor, option or file at fault.
    rule: what is wrong with it, values included.
    remedy: what would be right, where the rule does not say so already.
    """

    def __init__(self, thing: str, rule: str, remedy: str | None = None) -> None:
        self.thing = thing
        self.rule = rule
        self.remedy = remedy
        super().__init__(f"{thing}: {rule}" + (f"; {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[QtoolError], tuple[str, str, str | None]]:
        """How it comes out of another process."""
        return type(self), (self.thing, self.rule, self.remedy)


class SpecError(QtoolError):
    """An argument or a combination of arguments that the standard or qtool does not allow."""


class FormatError(QtoolError):
    """A file that is not what its container requires."""


class TensorError(QtoolError):
    """A tensor whose values cannot be quantized as asked."""


class OutputError(QtoolError):
    """A target that cannot or must not be written."""


class UsageError(SpecError):
    """Options that contradict each other; the command line exits with 2."""


class GateError(QtoolError):
    """A result that does not hold what was asked for; the command line exits with 3.

    report: what was found. others: further failures of the same run, one line each.
    """

    def __init__(
        self,
        thing: str,
        rule: str,
        remedy: str | None = None,
        *,
        report: dict[str, Any],
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(thing, rule, remedy)
        self.report = report
        self.others = tuple(others)


def nearest(word: object, allowed: Iterable[str], otherwise: str | None = None) -> str:
    """The remedy for a word that there is not: the nearest right ones, or else what is said
    otherwise, or all of them."""
    import difflib  # not for every start

    allowed = list(allowed)
    for spelling in (str(word), str(word).lower()):
        for best in difflib.get_close_matches(spelling, allowed, 1, 0.55):
            cutoff = 0.85 * difflib.SequenceMatcher(None, best, spelling).ratio()
            *others, last = difflib.get_close_matches(spelling, allowed, 3, cutoff)
            return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return otherwise or f"use {', '.join(allowed)}"


def unreadable(error: ValueError | RecursionError) -> str:
    """What is wrong with a text that is no UTF-8, JSON or TOML, without Python's words for it."""
    import json

    if isinstance(error, UnicodeDecodeError):
        return f"its byte {error.start} is no UTF-8"
    if isinstance(error, json.JSONDecodeError):
        said = error.msg[:1].lower() + error.msg[1:]
        return f"{said} at line {error.lineno}, column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "set_int_max_str_digits" in str(error):
        return "a number in it has too many digits"
    return str(error)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a SpecError about options alone, no file read yet, into a UsageError."""
    try:
        yield
    except SpecError as error:
        raise UsageError(error.thing, error.rule, error.remedy) from None

"""The words and signs of a gate's expression, and the errors that point at them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qtool.errors import UsageError

OPTION = "--fail-if"
_MOST_CHARACTERS, _MOST_TOKENS, _SHOWN = 1000, 200, 60
_TOKEN = re.compile(
    r"(?P<number>(?P<mantissa>[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+))?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r"|(?P<sign><=|>=|==|!=|[-+*/<>()%])"
)
_MEANT = {
    "=": "use ==", "&": "use and", "|": "use or", "!": "use not or !=", "~": "use not",
    "\N{LESS-THAN OR EQUAL TO}": "use <=", "\N{GREATER-THAN OR EQUAL TO}": "use >=",
    ",": "several patterns stand behind 'on'",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """kind: number, word, sign, or end. start, end: where it stands in the text.

    mantissa, exponent: of a number.
    """

    kind: str
    text: str
    start: int
    end: int
    mantissa: str = ""
    exponent: int = 0


def tokens(text: str) -> list[Token]:
    """The tokens up to the word `on`, or to the end, which is the last one. Raises UsageError."""
    if len(text) > _MOST_CHARACTERS:
        raise too_long(text)
    found: list[Token] = []
    at = 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        if at == len(text):
            return [*found, Token("end", "", at, at)]
        match = _TOKEN.match(text, at)
        if match is None:
            raise fault(text, at, f"{text[at]!r} has no meaning", _MEANT.get(text[at]))
        if match[0] == "on":
            return [*found, Token("end", "on", at, match.end())]
        found.append(_token(match))
        at = match.end()
        if len(found) > _MOST_TOKENS:
            raise too_long(text)


def _token(match: re.Match[str]) -> Token:
    kind = "number" if match["number"] else match.lastgroup or ""
    exponent = int(match["exponent"] or 0)
    return Token(kind, match[0], match.start(), match.end(), match["mantissa"] or "", exponent)


def fault(text: str, at: int, rule: str, remedy: str | None = None) -> UsageError:
    """The error of what stands at an index of the text."""
    return UsageError(OPTION, f"{shown(text)}: {rule} at column {at + 1}", remedy)


def too_long(text: str) -> UsageError:
    """The error of a text that no person has written."""
    most = f"more than {_MOST_CHARACTERS} characters or {_MOST_TOKENS} words and signs"
    return UsageError(OPTION, f"{shown(text)}: has {most}", f"use several {OPTION}")


def shown(text: str) -> str:
    """The text in an error message, on one line."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}")

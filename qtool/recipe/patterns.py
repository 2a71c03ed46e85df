"""Patterns of tensors' names."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache

from qtool.errors import UsageError

_REGULAR = "re:"


class Patterns:
    """Globs over whole names (`*` matches any characters), or, after "re:", regular expressions
    that are searched for in them."""

    def __init__(self, patterns: Iterable[str]) -> None:
        names = {pattern: _name(pattern) for pattern in patterns}
        self._names = {name for name in names.values() if name is not None}
        self._others = [pattern for pattern, name in names.items() if name is None]

    def match(self, name: str) -> bool:
        """Whether one of them matches the name. Raises UsageError for what is no pattern."""
        return name in self._names or any(_compiled(p).search(name) for p in self._others)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The patterns that match none of the names."""
    held = set(names)
    return [
        pattern
        for pattern in patterns
        if _name(pattern) not in held and not any(map(Patterns([pattern]).match, names))
    ]


def escaped(name: str) -> str:
    """The glob that matches this name alone."""
    text = re.sub(r"[*?[]", r"[\g<0>]", name)
    return f"[r]{text[1:]}" if text.startswith(_REGULAR) else text


def _name(pattern: str) -> str | None:
    """The only name that a pattern matches, if that is plain."""
    name = re.sub(r"\[([*?[])\]", r"\1", pattern)
    return name if escaped(name) == pattern else None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(_REGULAR):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return re.compile(pattern[3:])  # where [[ may once mean something else
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"is not a regular expression ({error})"
        raise UsageError(f"pattern {pattern!r}", rule, "see Python's re") from error

"""Patterns of tensors' names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import cache

from qtool.errors import UsageError

_REGULAR = "re:"


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns matches the name."""
    literals, others = _sorted(tuple(patterns))
    return name in literals or any(_compiled(pattern).search(name) for pattern in others)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The patterns that match none of the names."""
    held = set(names)
    return [
        pattern
        for pattern in patterns
        if _name(pattern) not in held and not any(matches([pattern], name) for name in names)
    ]


def escaped(name: str) -> str:
    """The glob that matches this name alone."""
    text = re.sub(r"[*?[]", r"[\g<0>]", name)
    return f"[r]{text[1:]}" if text.startswith(_REGULAR) else text


@cache
def _sorted(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names that patterns stand for literally, and the other patterns."""
    names = {pattern: _name(pattern) for pattern in patterns}
    literals = frozenset(name for name in names.values() if name is not None)
    return literals, tuple(pattern for pattern, name in names.items() if name is None)


def _name(pattern: str) -> str | None:
    """The only name that a pattern matches, if that is plain."""
    name = re.sub(r"\[([*?[])\]", r"\1", pattern)
    return name if escaped(name) == pattern else None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A glob over the whole name (`*` matches any characters), or, after "re:", a regular
    expression that is searched for in it."""
    if not pattern.startswith(_REGULAR):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"is not a regular expression ({error})"
        raise UsageError(f"pattern {pattern!r}", rule, "see Python's re") from error

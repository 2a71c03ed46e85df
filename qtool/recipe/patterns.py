"""Patterns of tensors' names."""

from __future__ import annotations

import fnmatch
import re
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

from qtool.errors import QtoolError, UsageError

_REGULAR = "re:"
_SECONDS = 5.0  # that one name may take
_REPEATS = re.compile(r"[*+?{|]")  # without which a search is short
_OPEN = 100


class Patterns:
    """Globs over whole names (`*` matches any characters), or, after "re:", regular expressions
    that are searched for in them."""

    def __init__(self, patterns: Iterable[str]) -> None:
        names = {pattern: _name(pattern) for pattern in patterns}
        self._names = {name for name in names.values() if name is not None}
        self._others = [pattern for pattern, name in names.items() if name is None]

    def match(self, name: str) -> bool:
        """Whether one of them matches the name. Raises UsageError for what is no pattern,
        QtoolError for one that takes too long, as far as a main thread can tell."""
        return name in self._names or any(_found(p, name) for p in self._others)


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


def _found(pattern: str, name: str) -> bool:
    compiled = _compiled(pattern)
    if not pattern.startswith(_REGULAR) or not _REPEATS.search(pattern):
        return compiled.search(name) is not None
    with _limited(pattern):
        return compiled.search(name) is not None


@contextmanager
def _limited(pattern: str) -> Iterator[None]:
    """Let a search end with an error where it takes too long: for some patterns, which a file may
    hold, time doubles with every character. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> NoReturn:
        rule = f"takes more than {_SECONDS:g} seconds for one name"
        raise QtoolError(f"pattern {pattern!r}", rule, "write it without repeats of repeats")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(_REGULAR):
        if pattern.count("[", pattern.rfind("]") + 1) > _OPEN:  # each searches for its end
            rule = f"has more than {_OPEN} [ that no ] closes"
            raise UsageError(f"pattern {pattern[:40]!r}...", rule, "write [[] for a [")
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return re.compile(pattern[3:])  # where [[ may once mean something else
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"is not a regular expression ({error})"
        raise UsageError(f"pattern {pattern!r}", rule, "see Python's re") from error

"""Rules: what holds for the tensors of a pattern, beside what holds for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qtool.errors import UsageError
from qtool.recipe.patterns import Patterns
from qtool.recipe.words import WORDS, Words, checked, parsed, phrase, plain, unknown

_SKIP = "skip"


@dataclass(frozen=True)
class Rule:
    """Words for the tensors whose name one of the patterns matches; skip: they are left alone."""

    patterns: Sequence[str]
    words: Words
    skip: bool = False

    @classmethod
    def parse(cls, text: str) -> Rule:
        """'PATTERN: dtype=int8, block_size=64' or 'PATTERN: skip'; the pattern ends at the last
        colon that a space follows. Raises UsageError."""
        thing = f"rule {text!r}"
        pattern, colon, words = text.rpartition(": ")
        if not colon or not pattern.strip() or not words.strip():
            rule = "is no pattern and words with a colon and a space between them"
            raise UsageError(thing, rule, "write for example '*.mlp.*: dtype=int8'")
        return cls._of([pattern.strip()], parsed(words, thing), thing)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], thing: str) -> Rule:
        """A rule of a recipe. Raises UsageError."""
        words = dict(table)
        patterns = words.pop("pattern", None)
        patterns = [patterns] if isinstance(patterns, str) else patterns
        is_list = isinstance(patterns, list) and patterns
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise UsageError(thing, "has no pattern", "give a text, or a list of them")
        return cls._of(patterns, words, f"{thing}, {patterns[0]!r}")

    @classmethod
    def _of(cls, patterns: Sequence[str], words: dict[str, Any], thing: str) -> Rule:
        for name in words:
            if name not in (*WORDS, _SKIP):
                raise unknown(name, [*WORDS, _SKIP], thing)
        skip = words.pop(_SKIP, False)
        if skip is not False and (skip is not True or words):
            raise UsageError(thing, "skip takes no value and no other words", "write it alone")
        if not skip and not words:
            raise UsageError(thing, "says nothing", "give words such as dtype=int8, or skip")
        return cls(tuple(patterns), checked(words, thing), skip=skip)

    def matches(self, name: str) -> bool:
        """Whether the rule is about the tensor of that name."""
        return self._matcher.match(name)

    @cached_property
    def _matcher(self) -> Patterns:
        return Patterns(self.patterns)

    def described(self) -> dict[str, Any]:
        """The rule in a report."""
        words = _SKIP if self.skip else phrase(self.words)
        return {"patterns": list(self.patterns), "words": words}

    def to_table(self) -> dict[str, Any]:
        """The rule in a recipe."""
        [*patterns] = self.patterns
        said = {_SKIP: True} if self.skip else {k: plain(v) for k, v in self.words.items()}
        return {"pattern": patterns[0] if len(patterns) == 1 else patterns, **said}

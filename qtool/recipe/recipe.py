"""Which tensor is quantized, and how: the command line's choices applied to one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from qtool.dtypes import DTYPES
from qtool.errors import SpecError, UsageError, usage_errors
from qtool.recipe.choice import Choice
from qtool.recipe.patterns import Patterns, escaped
from qtool.recipe.rule import Rule
from qtool.recipe.words import Words, over
from qtool.spec import SEARCHES, QuantSpec, TensorInfo

SOURCE_FLOATS = tuple(DTYPES[n] for n in ("float16", "bfloat16", "float32", "float64"))


@dataclass(frozen=True)
class Recipe:
    """What the user asks for, and what the source and the layout make of it.

    words: how every tensor is quantized; see words.WORDS. rules: how those of a pattern are,
        besides; later ones win, word by word, and one with words takes back an earlier skip.
    include, exclude: patterns of tensor names: globs, or regular expressions after "re:".
    options: all else that decides the output, under the names of quantize_file's arguments.
    left_alone: patterns of tensors that the layout's readers want unquantized; include overrides
        them.
    bare: the source is a single array, quantized whatever its rank, type and size.
    all_ranks: scalars and vectors too (DynamicQuantizeLinear).
    silent: the output has no word for activations.
    weighted: names of tensors whose errors are weighted, which are quantized by a search.
    """

    words: Words
    rules: Sequence[Rule] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    left_alone: Sequence[str] = ()
    bare: bool = False
    all_ranks: bool = False
    silent: bool = False
    weighted: Collection[str] = ()

    def check(self, *, typed_later: bool) -> None:
        """Refuse contradictions among the words for every tensor, and words that give no tensor a
        type, unless others will. Raises UsageError."""
        with usage_errors():
            has_type = typed_later or self.default is not None
        typed = {"dtype", "preset"}
        if not has_type and not any(typed & rule.words.keys() for rule in self.rules):
            raise UsageError("--dtype", "no type to quantize to", "give one, or a --preset")

    @property
    def default(self) -> Choice | None:
        """How tensors are quantized that no rule is about; None: not at all."""
        return _choice(tuple(self.words.items()))

    @property
    def preset(self) -> str | None:
        """The name of the options that the words come from."""
        return self.words.get("preset")

    @property
    def tag(self) -> str:
        """What the output is named after: the preset, or the type, or "mixed"."""
        default = self.default
        return self.preset or ("mixed" if default is None else default.spec.dtype.name)

    @property
    def gives_activations(self) -> bool:
        """Whether dynamic_activations is asked for by its own name."""
        asked = [self.words, *(rule.words for rule in self.rules)]
        return any(words.get("dynamic_activations") for words in asked)

    def reason_against(self, info: TensorInfo) -> str | None:
        """Why a tensor is left alone, from its header; None if it is to be quantized."""
        if self.include and not _matches(self.include, info.name):
            return "not included"
        if _matches(self.exclude, info.name):
            return "excluded"
        if self._skipped(info.name):
            return "skipped by a rule"
        if not self.include and _matches(self.left_alone, info.name):
            return "left alone by custom of the layout; --include '*' takes it too"
        if info.obstacle is not None:
            return info.obstacle
        if not self.bare and info.dtype not in SOURCE_FLOATS:
            return f"{info.dtype} is no source type"
        if not self.bare and len(info.shape) < 2 and not self.all_ranks:
            return "rank below 2"
        return "no rule gives it a type" if self.choice(info.name) is None else None

    def choice(self, name: str) -> Choice | None:
        """How the tensor of that name is quantized; None where nothing gives it a type.

        Raises UsageError for rules that contradict each other, or the tensor's weights.
        """
        rules = [rule for rule in self.rules if rule.words and rule.matches(name)]
        words = dict(self.words)
        for rule in rules:
            words = over(rule.words, words)
        if name in self.weighted:
            return _searched(words, name)
        if not rules:
            return self.default
        try:
            return _choice(tuple(words.items()))
        except SpecError as error:
            thing = f"rule {rules[-1].patterns[0]!r}"
            raise UsageError(thing, f"{error.thing}: {error.rule}", error.remedy) from error

    def spec_for(self, info: TensorInfo) -> QuantSpec:
        """The spec of a tensor that nothing is against, its axis counted from the front."""
        choice = self.choice(info.name)
        assert choice is not None
        return choice.spec_for(info, bare=self.bare)

    def activations_for(self, name: str) -> bool:
        """Whether readers are to quantize the activations that a tensor is multiplied with."""
        choice = self.choice(name)
        return choice is not None and choice.activations and not self.silent

    def demands(self, info: TensorInfo) -> bool:
        """Whether include or a rule is about a tensor so plainly that it is to be quantized: by
        its whole name, or by a pattern where it is a weight. What is excluded or skipped is not."""
        name = info.name
        if _matches(self.exclude, name) or self._skipped(name):
            return False
        if self.include and not _matches(self.include, name):
            return False
        of_rules = [p for rule in self.rules if not rule.skip for p in rule.patterns]
        patterns = [*self.include, *of_rules]
        if escaped(name) in patterns:
            return True
        is_weight = info.dtype in SOURCE_FLOATS and len(info.shape) > 1
        return is_weight and _matches(patterns, name)

    def _skipped(self, name: str) -> bool:
        last = next((rule for rule in reversed(self.rules) if rule.matches(name)), None)
        return last is not None and last.skip


def _searched(words: Words, name: str) -> Choice | None:
    """How a tensor is quantized whose errors are weighted. Raises UsageError."""
    method = words.get("method")
    if method is not None and method not in SEARCHES:
        rule = f"{method} follows the range of {name} alone"
        raise UsageError("--importance", rule, "use --method " + " or ".join(SEARCHES))
    try:
        return _choice(tuple({**words, "method": method or SEARCHES[0]}.items()))
    except SpecError as error:
        rule = f"of {name} needs method {method or SEARCHES[0]}: {error.thing}: {error.rule}"
        raise UsageError("--importance", rule, "leave one of them out") from error


def _matches(patterns: Sequence[str], name: str) -> bool:
    return _patterns(tuple(patterns)).match(name)


@cache
def _patterns(patterns: tuple[str, ...]) -> Patterns:
    return Patterns(patterns)


@cache
def _choice(words: tuple[tuple[str, Any], ...]) -> Choice | None:
    return Choice.of(dict(words))

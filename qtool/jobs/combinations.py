"""What `qtool compare` tries: types, sizes of blocks and methods, each with each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qtool.dtypes import DTYPES
from qtool.errors import SpecError, UsageError
from qtool.jobs.target import candidates_of
from qtool.recipe import WORDS, Words, words
from qtool.spec.methods import symmetry

# Names with commas between them, or a sequence of names.
Names = str | Sequence[str | int]

AXIS, TENSOR = "axis", "tensor"
TYPES = "int8,int4,float8e4m3fn"
_SIZES = (None, 128, 32)  # None: one scale per output channel, or per array


@dataclass(frozen=True)
class Combination:
    """One way to quantize, in the words of a rule.

    sharing: AXIS or TENSOR: which elements share a scale, where that is asked for by name.
    """

    words: Words
    sharing: str | None = None

    def words_for(self, *, bare: bool, axis: int | None) -> dict[str, Any]:
        """The words for a source; bare: an array alone. axis: as given for all combinations.

        Raises UsageError where `qtool quantize` has no such option.
        """
        if self.sharing == TENSOR and not bare:
            rule = "`qtool quantize` has one scale per tensor for a bare array alone"
            raise UsageError("--block-sizes tensor", rule)
        if self.sharing == TENSOR and axis is not None:
            raise UsageError("--axis", "means one scale per index along it, not per tensor")
        is_first = self.sharing == AXIS and bare and axis is None
        return {**self.words, **({"axis": 0} if is_first else {})}

    def described(self) -> dict[str, Any]:
        """What is asked for, as plain data."""
        named = {key: self.words.get(key) for key in ("preset", "dtype", "block_size", "method")}
        if self.sharing is not None:
            named["block_size"] = self.sharing
        return {"words": words.phrase(self.words), **named}


def combinations(
    dtypes: Names, block_sizes: Names, methods: Names, presets: Names, candidates: Sequence[str]
) -> list[Combination]:
    """Types with sizes of blocks, then presets, then candidates; each with every method, but for
    candidates that say their own.

    Raises UsageError for a word that there is not, with the nearest right one.
    """
    types = _known("dtypes", dtypes)
    named = _known("presets", presets)
    ways = [Combination(one) for one in candidates_of(candidates)]
    sizes = [_size(text) for text in items_of(block_sizes)] or _SIZES
    if not (types or named or ways):
        types = items_of(TYPES)
    if block_sizes and not types:
        rule = "presets and candidates say how long their blocks are"
        raise UsageError("--block-sizes", rule, "give --dtypes too, or leave it out")
    found = [_typed(dtype, size) for dtype in types for size in sizes]
    found += [Combination({"preset": name}) for name in named] + ways
    return _unique(_by_methods(found, [_method(text) for text in items_of(methods)]))


def _by_methods(found: Iterable[Combination], methods: Sequence[str]) -> list[Combination]:
    """Each with every method."""
    return [
        replace(one, words={**one.words, **({"method": method} if method else {})})
        for one in found
        for method in (methods if methods and "method" not in one.words else [None])
    ]


def _unique(found: Iterable[Combination]) -> list[Combination]:
    kept: list[Combination] = []
    for one in found:
        if one not in kept:
            kept.append(one)
    return kept


def _typed(dtype: str, size: int | str | None) -> Combination:
    if isinstance(size, str):
        return Combination({"dtype": dtype}, size)
    return Combination({"dtype": dtype, **({} if size is None else {"block_size": size})})


def items_of(names: Names) -> list[str]:
    """The names, one by one."""
    parts = [names] if isinstance(names, str) else [str(name) for name in names]
    return [item.strip() for part in parts for item in part.split(",")]


def _known(option: str, names: Names) -> list[str]:
    """The names, all of them values of the word that the option is about."""
    allowed = WORDS[option[:-1]]
    assert isinstance(allowed, tuple)
    items = items_of(names)
    for item in items:
        if item not in allowed:
            raise words.unknown(item, allowed, f"--{option}")
    return items


def _size(text: str) -> int | str:
    if text in (AXIS, TENSOR):
        return text
    if text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0:
        return int(text)
    raise words.unknown(text, (AXIS, TENSOR, "a whole number such as 32"), "--block-sizes")


def _method(text: str) -> str:
    allowed = WORDS["method"]
    assert isinstance(allowed, tuple)
    if text not in allowed and not text.startswith("percentile:"):
        raise words.unknown(text, allowed, "--methods")
    try:
        symmetry(DTYPES["int8"], None, text, "onnx")  # which knows what a percentile is
    except SpecError as error:
        raise UsageError("--methods", error.rule, error.remedy) from None
    return text

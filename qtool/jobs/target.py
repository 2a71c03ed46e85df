"""What mixed precision aims at, and the candidates that it chooses from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from qtool.errors import UsageError
from qtool.layouts import compressed_tensors, mlx, native, nbits
from qtool.presets import PRESETS
from qtool.recipe import WORDS, Recipe, Words, words

KEYS = ("target_bits", "target_sqnr", "candidates")
_SHORT = "int4:16,int4:32,int4:128,uint4:16,uint4:32,uint4:64,uint4:128,int8:32,int8:128"
_GROUPS = "int2:32,int4:32,int4:128,uint4:32,uint4:64,uint4:128,int8:64,int8:128"
# Where none are given, those that the layout can write, on any runtime of its own.
DEFAULTS = {
    native.name: f"int2:32,{_SHORT}",
    "qdq": _SHORT,
    nbits.NAME: f"int2:32,{_SHORT}",
    compressed_tensors.name: "int4:32,int4:64,int4:128,int8:32,int8:128",
    mlx.name: _GROUPS,
}


@dataclass(frozen=True)
class Target:
    """bits: the most bits per weight over all quantized tensors, scales and zero points included;
    sqnr: the least signal to noise ratio over them, in dB. One of them is None.

    candidates: words to choose from for each tensor; none: those of the layout.
    """

    bits: float | None
    sqnr: float | None
    candidates: Sequence[Words]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Target | None:
        """What the options KEYS mean; None where none of them is given. Raises UsageError."""
        bits, sqnr, candidates = (options.get(key) for key in KEYS)
        if bits is None and sqnr is None:
            if candidates is not None:
                rule = "are chosen from for a --target-bits or --target-sqnr"
                raise UsageError("--candidates", rule, "give one")
            return None
        if bits is not None and sqnr is not None:
            raise UsageError("--target-bits", "contradicts --target-sqnr", "leave one of them out")
        for option, value in (("--target-bits", bits), ("--target-sqnr", sqnr)):
            if value is not None and not (math.isfinite(value) and (value > 0 or bits is None)):
                rule = f"{value} is not {'finite' if bits is None else 'above 0'}"
                raise UsageError(option, rule, "use for example 4.5")
        return cls(bits, sqnr, candidates_of(candidates or ()))

    def for_layout(self, name: str, recipe: Recipe) -> list[Words]:
        """The candidates for a layout. Raises UsageError where none are known, or where options
        say already what candidates say."""
        candidates = self.candidates
        if not candidates:
            if name not in DEFAULTS:
                rule = f"{name} takes no weights of several kinds in one model"
                raise UsageError("--layout", rule, f"use {', '.join(DEFAULTS)}")
            candidates = candidates_of([DEFAULTS[name]])
        typed = {"dtype", "preset"}
        for key in ("dtype", "preset"):
            if key in recipe.words and all(typed & one.keys() for one in candidates):
                raise UsageError(f"--{key}", "the candidates say the type", "leave it out")
        if "block_size" in recipe.words and all("block_size" in one for one in candidates):
            rule = "the candidates say how long blocks are"
            raise UsageError("--block-size", rule, "leave it out, or use --candidates int4,int8")
        return list(candidates)


def candidates_of(texts: Sequence[str]) -> list[Words]:
    """'int4:32,int8' (types with sizes of blocks) or the words of a rule; each list in turn."""
    found: list[Words] = []
    for text in texts:
        thing = f"candidate {text!r}"
        if "=" in text:
            made: list[Words] = [words.checked(words.parsed(text, thing), thing)]
        else:
            made = [_short(part.strip(), thing) for part in text.split(",")]
        found += [one for one in made if one not in found]
    return found


def _short(text: str, thing: str) -> Words:
    dtype, colon, size = text.partition(":")
    if dtype in PRESETS and dtype not in cast("tuple[str, ...]", WORDS["dtype"]):
        raise UsageError(thing, f"{dtype} is a preset", f"give it by --candidates preset={dtype}")
    given = {"dtype": dtype} | ({"block_size": size} if colon else {})
    return words.checked(given, thing)

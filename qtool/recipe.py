"""Which tensor is quantized, and how: the command line's choices applied to one tensor."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from qtool.dtypes import DTYPES
from qtool.errors import SpecError, UsageError
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, TensorInfo, Tiled

SOURCE_FLOATS = tuple(DTYPES[n] for n in ("float16", "bfloat16", "float32", "float64"))


@dataclass(frozen=True)
class Recipe:
    """One choice for every tensor that include and exclude let through.

    spec: the target type and all other choices; its granularity is replaced by granularity().
    axis, block_size, tile: as given, None where not.
    left_alone: patterns of tensors that the layout's readers want unquantized; include overrides
        them.
    activations: readers are to quantize activations while running.
    preset: the name of the options that the rest came from.
    include, exclude: patterns of tensor names: globs, or regular expressions after "re:".
    bare: the source is a single array, quantized whatever its rank, type and size.
    all_ranks: scalars and vectors too (DynamicQuantizeLinear).
    """

    spec: QuantSpec
    axis: int | None = None
    block_size: int | None = None
    tile: tuple[int, int] | None = None
    include: Sequence[str] = field(default=())
    exclude: Sequence[str] = field(default=())
    bare: bool = False
    all_ranks: bool = False
    left_alone: Sequence[str] = ()
    activations: bool = False
    preset: str | None = None

    def reason_against(self, info: TensorInfo) -> str | None:
        """Why a tensor is left alone, from its header; None if it is to be quantized."""
        if self.include and not _matches(self.include, info.name):
            return "not included"
        if _matches(self.exclude, info.name):
            return "excluded"
        if not self.include and _matches(self.left_alone, info.name):
            return "left alone by custom of the layout; --include '*' takes it too"
        if info.obstacle is not None:
            return info.obstacle
        if self.bare:
            return None
        if info.dtype not in SOURCE_FLOATS:
            return f"{info.dtype} is no source type"
        if len(info.shape) < 2 and not self.all_ranks:
            return "rank below 2"
        return None

    def spec_for(self, info: TensorInfo) -> QuantSpec:
        """The spec of a tensor, its axis counted from the front."""
        try:
            return self.spec.at(self.granularity(info).resolve(info.shape))
        except SpecError as error:
            raise SpecError(f"tensor {info.name}", str(error)) from error

    def granularity(self, info: TensorInfo) -> Granularity:
        """Blocks along the reduced axis, or one scale per output channel; per tensor for a bare
        array."""
        if self.spec.semantics == "dynamic":
            return PerTensor()
        if self.tile is not None:
            return Tiled(self.tile)
        rank = len(info.shape)
        if self.block_size is not None:
            default = rank - 1 if self.bare or rank <= 2 else 1
            return Blocked(_first(self.axis, info.reduced_axis, default), self.block_size)
        if self.bare and self.axis is None:
            return PerTensor()
        return PerAxis(_first(self.axis, info.output_axis, 0))


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(_compiled(pattern).search(name) for pattern in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A glob over the whole name (`*` matches any characters), or, after "re:", a regular
    expression that is searched for in it."""
    if not pattern.startswith("re:"):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"is not a regular expression ({error})"
        raise UsageError(f"pattern {pattern!r}", rule, "see Python's re") from error


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The patterns that match none of the names."""
    return [p for p in patterns if not any(_matches([p], name) for name in names)]

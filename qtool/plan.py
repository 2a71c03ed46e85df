"""The fate of every tensor of a source, made from its header alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qtool.dtypes import DType
from qtool.formats import Entry
from qtool.layouts import native
from qtool.recipe import Recipe
from qtool.spec import QuantSpec, TensorInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor: how it is quantized (spec, scale_dtype), or the reason why it is not.

    entries: what it is stored as.
    """

    info: TensorInfo
    entries: Sequence[Entry]
    spec: QuantSpec | None = None
    scale_dtype: DType | None = None
    reason: str | None = None

    @property
    def bytes_after(self) -> int:
        """Bytes of its entries: codes, scale and zero point, or the tensor as it was."""
        return sum(entry.nbytes for entry in self.entries)


# Of a tensor's name: the type of its given scale (None for a plain number) and whether a zero
# point comes with it; or None where no scale is given for it.
Given = Callable[[str], tuple[DType | None, bool] | None]


def make_plan(
    infos: Iterable[TensorInfo], recipe: Recipe, given: Given | None = None
) -> list[Planned]:
    """One Planned per tensor, in the order of the source.

    given: says which scales are given; None: qtool chooses them.
    Raises SpecError where recipe does not fit a tensor.
    """
    return [_planned(info, recipe, given) for info in infos]


def _planned(info: TensorInfo, recipe: Recipe, given: Given | None) -> Planned:
    copied = [Entry(info.name, info.dtype, info.shape)]
    reason = recipe.reason_against(info)
    parameters: tuple[DType | None, bool] | None = None
    if reason is None and given is not None:
        parameters = given(info.name)
        reason = "no scale is given for it" if parameters is None else None
    if reason is not None:
        return Planned(info, copied, reason=reason)
    spec = recipe.spec_for(info)
    scale_given, has_zero_point = parameters or (None, spec.has_zero_point)
    scale_dtype = spec.storage_dtype(info.dtype, scale_given)
    entries = native.entries(info.name, info.shape, spec, scale_dtype, zero_point=has_zero_point)
    planned = Planned(info, entries, spec, scale_dtype)
    if not recipe.bare and not recipe.all_ranks and planned.bytes_after >= info.nbytes:
        return Planned(info, copied, reason=f"would not get smaller as {spec.dtype}")
    return planned

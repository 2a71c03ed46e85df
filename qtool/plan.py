"""The fate of every tensor of a source, made from its header alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qtool.dtypes import DType
from qtool.formats import Entry
from qtool.layouts import Layout, native
from qtool.layouts.stored import Part, Stored
from qtool.recipe import Recipe
from qtool.spec import QuantSpec, TensorInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor: how it is quantized and stored, or the reason why it is not.

    parts: what a quantized one is made of in the file.
    is_fallback: it was chosen for quantization, which what is asked for then could not do.
    """

    info: TensorInfo
    spec: QuantSpec | None = None
    stored: Stored | None = None
    parts: Sequence[Part] = ()
    reason: str | None = None
    is_fallback: bool = False

    @property
    def entries(self) -> list[Entry]:
        """What it is stored as."""
        if self.spec is None:
            return [Entry(self.info.name, self.info.dtype, self.info.shape)]
        return [part.entry for part in self.parts]

    @property
    def bytes_after(self) -> int:
        """Bytes of its entries: codes, scale and zero point, or the tensor as it was."""
        return sum(entry.nbytes for entry in self.entries)


# Of a tensor's name: the type of its given scale (None for a plain number) and whether a zero
# point comes with it; or None where no scale is given for it.
Given = Callable[[str], tuple[DType | None, bool] | None]


def make_plan(
    infos: Iterable[TensorInfo],
    recipe: Recipe,
    given: Given | None = None,
    layout: Layout = native,
) -> list[Planned]:
    """One Planned per tensor, in the order of the source.

    given: says which scales are given; None: qtool chooses them.
    Raises SpecError where recipe does not fit a tensor.
    """
    return [_planned(info, recipe, given, layout) for info in infos]


def _planned(info: TensorInfo, recipe: Recipe, given: Given | None, layout: Layout) -> Planned:
    reason = recipe.reason_against(info)
    parameters: tuple[DType | None, bool] | None = None
    if reason is None and given is not None:
        parameters = given(info.name)
        if parameters is None:
            return Planned(info, reason="no scale is given for it", is_fallback=True)
    if reason is not None:
        return Planned(info, reason=reason)
    spec = recipe.spec_for(info)
    scale_given, has_zero_point = parameters or (None, spec.has_zero_point)
    spec = layout.adapted(spec, spec.storage_dtype(info.dtype, scale_given))
    scale_dtype = spec.storage_dtype(info.dtype, scale_given)
    stored = Stored.of(
        spec, info.shape, scale_dtype, info.dtype,
        zero_point=has_zero_point, activations=recipe.activations_for(info.name),
    )  # fmt: skip
    reason = layout.obstacle(info, stored)
    if reason is not None:
        return Planned(info, reason=reason, is_fallback=True)
    planned = Planned(info, spec, stored, layout.parts(info.name, stored))
    if not recipe.bare and not recipe.all_ranks and planned.bytes_after >= info.nbytes:
        rule = f"would not get smaller as {spec.dtype}"
        return Planned(info, reason=rule, is_fallback=True)
    return planned

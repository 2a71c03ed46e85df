"""How onnxruntime's operators on blocks of codes come to be chosen by --layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.jobs import screening
from qtool.jobs.given import Given
from qtool.jobs.tensors import Taker
from qtool.layouts import nbits
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


class NBits:
    """Weights in MatMulNBits and GatherBlockQuantized: an OnnxLayout of jobs.tensors.

    Raises UsageError where the operators do not take what recipe asks for.
    """

    option = "--layout"

    def __init__(self, recipe: Recipe, given: Given | None) -> None:
        self.settings: dict[str, Any] = {}
        nbits.check(recipe.spec.dtype, recipe.block_size, recipe.axis, recipe.spec.scale_dtype)
        self._given = given

    def plan(self, source: OnnxSource, recipe: Recipe) -> list[Planned]:
        """The fate of every tensor of the model."""
        from qtool.layouts.onnx_nbits_uses import NBitsLayout

        header = None if self._given is None else self._given.header
        layout = NBitsLayout(source, recipe.spec)
        return make_plan(screening.marked(source), recipe, header, layout)

    def writer(
        self, source: OnnxSource, plan: Sequence[Planned], path: Path, *, external_data: bool
    ) -> AbstractContextManager[Taker]:
        """Writes the model to path."""
        from qtool.layouts.onnx_matmul_nbits import OnnxMatMulNBits
        from qtool.layouts.onnx_weight import Weight

        weights = {
            p.info.name: Weight(p.spec, p.stored.scale_dtype, has_zero_point=p.stored.zero_point)
            for p in plan
            if p.spec is not None and p.stored is not None
        }
        return OnnxMatMulNBits(source, weights, path, external_data=external_data)

"""How onnxruntime's operators on blocks of codes come to be chosen by --layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.jobs import screening
from qtool.jobs.given import Given
from qtool.jobs.tensors import Output
from qtool.layouts import nbits
from qtool.layouts.provenance import Provenance
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


class NBits:
    """Weights in MatMulNBits and GatherBlockQuantized: an OnnxLayout of jobs.tensors."""

    option = "--layout"

    def __init__(self, given: Given | None) -> None:
        self.settings: dict[str, Any] = {}
        self._given = given

    def plan(self, source: OnnxSource, recipe: Recipe) -> list[Planned]:
        """The fate of every tensor of the model.

        Raises UsageError where the operators do not take what recipe asks for.
        """
        from qtool.layouts.onnx_nbits_uses import NBitsLayout

        header = None if self._given is None else self._given.header
        infos = screening.marked(source)
        chosen = {info.name: recipe.choice(info.name) for info in infos}
        for choice in dict.fromkeys([recipe.default, *chosen.values()]):
            if choice is not None:
                spec = choice.spec
                nbits.check(spec.dtype, choice.block_size, choice.axis, spec.scale_dtype)
        specs = {name: choice.spec for name, choice in chosen.items() if choice is not None}
        return make_plan(infos, recipe, header, NBitsLayout(source, specs.__getitem__))

    def writer(
        self,
        source: OnnxSource,
        plan: Sequence[Planned],
        path: Path,
        *,
        external_data: bool,
        force: bool,
        provenance: Provenance | None,
    ) -> Output:
        """Writes the model to path."""
        from qtool.layouts.onnx_matmul_nbits import OnnxMatMulNBits
        from qtool.layouts.onnx_weight import Weight

        weights = {
            p.info.name: Weight(p.spec, p.stored.scale_dtype, has_zero_point=p.stored.zero_point)
            for p in plan
            if p.spec is not None and p.stored is not None
        }
        return OnnxMatMulNBits(
            source, weights, path, external_data=external_data, force=force, provenance=provenance
        )

"""qtool dynamic --graph: which weights of an ONNX model integer operators multiply by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.formats import Entry
from qtool.jobs import screening
from qtool.jobs.tensors import Output
from qtool.layouts.provenance import Provenance
from qtool.layouts.stored import Part, Stored
from qtool.plan import Planned
from qtool.recipe import Recipe
from qtool.spec import TensorInfo

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.layouts.onnx_dynamic import IntegerWeight


class IntegerGraph:
    """DynamicQuantizeLinear with MatMulInteger and ConvInteger; see jobs.tensors.OnnxLayout.

    per_tensor: one scale per weight, in place of one per output channel.
    """

    option = "--graph"

    def __init__(self, *, per_tensor: bool) -> None:
        self._per_tensor = per_tensor
        self.settings: dict[str, Any] = {"graph": "per_tensor" if per_tensor else "per_axis"}

    def plan(self, source: OnnxSource, recipe: Recipe) -> list[Planned]:
        """The fate of every tensor: those that MatMul, Gemm and Conv multiply by are quantized."""
        from qtool.layouts.onnx_dynamic import integer_weight
        from qtool.layouts.onnx_products import Product, products

        found, chosen = products(source), recipe.default
        assert chosen is not None
        plan = []
        for info in screening.marked(source):
            product = found.get(info.name)
            reason = recipe.reason_against(info)
            if reason is None and isinstance(product, Product):
                weight = integer_weight(product, chosen.spec.dtype, per_tensor=self._per_tensor)
                plan.append(_planned(info, weight))
            else:
                plan.append(Planned(info, reason=reason or str(product)))
        return plan

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
        from qtool.layouts.onnx_dynamic import IntegerWeight, OnnxDynamic
        from qtool.layouts.onnx_products import Product, products

        found = products(source)
        weights = {}
        for planned in plan:
            product = found.get(planned.info.name)
            if planned.spec is not None and isinstance(product, Product):
                weights[planned.info.name] = IntegerWeight(product, planned.spec)
        return OnnxDynamic(
            source, weights, path, external_data=external_data, force=force, provenance=provenance
        )


def _planned(info: TensorInfo, weight: IntegerWeight) -> Planned:
    """A weight, quantized where that makes it smaller."""
    spec = weight.spec
    parts = [
        Part(Entry(f"{info.name}_{part}", dtype, shape), "codes" if part == "quantized" else part)
        for part, (dtype, shape) in weight.parts.items()
    ]
    scale_dtype = weight.parts["scale"][0]
    stored = Stored.of(
        spec, info.shape, scale_dtype, info.dtype, zero_point=spec.has_zero_point, activations=True
    )
    planned = Planned(info, spec, stored, parts)
    if planned.bytes_after >= info.nbytes:
        rule = f"would not get smaller as {spec.dtype}"
        return Planned(info, reason=rule, is_fallback=True)
    return planned

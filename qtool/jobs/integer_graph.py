"""qtool dynamic --graph: which weights of an ONNX model integer operators multiply by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.formats import Entry
from qtool.jobs import screening
from qtool.jobs.quantize import Writer
from qtool.plan import Planned
from qtool.recipe import Recipe

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


class IntegerGraph:
    """DynamicQuantizeLinear with MatMulInteger and ConvInteger; see jobs.quantize.OnnxLayout.

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

        found = products(source)
        plan = []
        for info in screening.marked(source):
            product = found.get(info.name)
            entries = [Entry(info.name, info.dtype, info.shape)]
            reason = recipe.reason_against(info)
            if not isinstance(product, Product):
                plan.append(Planned(info, entries, reason=reason or product))
                continue
            weight = integer_weight(product, recipe.spec.dtype, per_tensor=self._per_tensor)
            parts = [
                Entry(f"{info.name}_{part}", dtype, shape)
                for part, (dtype, shape) in weight.parts.items()
            ]
            if reason is None and sum(part.nbytes for part in parts) >= info.nbytes:
                reason = f"would not get smaller as {weight.spec.dtype}"
            if reason is not None:
                plan.append(Planned(info, entries, reason=reason))
            else:
                plan.append(Planned(info, parts, weight.spec, weight.spec.scale_dtype))
        return plan

    def writer(
        self, source: OnnxSource, plan: Sequence[Planned], path: Path, *, external_data: bool
    ) -> AbstractContextManager[Writer]:
        """Writes the model to path."""
        from qtool.layouts.onnx_dynamic import IntegerWeight, OnnxDynamic
        from qtool.layouts.onnx_products import Product, products

        found = products(source)
        weights = {}
        for planned in plan:
            product = found.get(planned.info.name)
            if planned.spec is not None and isinstance(product, Product):
                weights[planned.info.name] = IntegerWeight(product, planned.spec)
        return OnnxDynamic(source, weights, path, external_data=external_data)

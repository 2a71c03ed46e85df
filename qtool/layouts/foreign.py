"""Recognises tensors that other tools have quantized already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qtool.dtypes import DType
from qtool.spec import TensorInfo

# tool, what the codes' name ends with, endings of the parameters beside them; the first is always
# there. Sources: the savers of compressed-tensors, GPTQModel, AutoAWQ, MLX, ComfyUI, bitsandbytes.
_LAYOUTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("compressed-tensors", ".weight_packed",
     (".weight_scale", ".weight_zero_point", ".weight_global_scale", ".weight_shape",
      ".weight_g_idx", ".input_scale", ".input_global_scale")),
    ("compressed-tensors or ModelOpt", ".weight",
     (".weight_scale", ".weight_scale_2", ".weight_zero_point", ".input_scale", ".output_scale")),
    ("block float8", ".weight", (".weight_scale_inv", ".input_scale")),
    ("GPTQ or AWQ", ".qweight", (".scales", ".qzeros", ".g_idx")),
    ("MLX", ".weight", (".scales", ".biases")),
    ("ComfyUI", ".weight", (".scale_weight", ".scale_input", ".comfy_quant")),
    ("bitsandbytes", ".weight",
     (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map",
      ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")),
    ("bitsandbytes", ".weight", (".SCB", ".weight_format")),
    ("qtool, without its metadata", "", (".scale", ".zero_point", ".global_scale")),
)  # fmt: skip


def recognise(infos: Iterable[TensorInfo]) -> dict[str, str]:
    """The tool whose quantized tensors and parameters these are, by tensor name.

    Codes count as such in an integer type or one of 8 bits and fewer, beside their scale.
    """
    by_name: Mapping[str, TensorInfo] = {info.name: info for info in infos}
    found: dict[str, str] = {}
    for name, info in by_name.items():
        if not _holds_codes(info.dtype):
            continue
        for tool, codes, parameters in _LAYOUTS:
            base = name.removesuffix(codes)
            if name.endswith(codes) and base + parameters[0] in by_name:
                parts = [name, *(base + parameter for parameter in parameters)]
                found |= {part: tool for part in parts if part in by_name and part not in found}
    return found


def _holds_codes(dtype: DType) -> bool:
    return dtype.is_integer or dtype.is_small_float

"""The ways in which other tools spell quantized weights, one row each; the first that fits counts.

Sources: the savers of compressed-tensors 0.20, ModelOpt 0.47, MLX 0.32, GPTQModel, AutoAWQ, ComfyUI
and bitsandbytes 0.49; vLLM's MARLIN_SUPPORTED_GROUP_SIZES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qtool.layouts.foreign_layout import INPUTS, Candidate, Layout

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_FLOAT8 = ("float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz")
_POWERS = ("uint8", "float8e8m0")
_MARLIN = ((32, 64, 128), "vLLM's Marlin kernels take")
_NVFP4, _MX = ((16,), "NVFP4 has"), ((32,), "MX has")


def _is_comfy(candidate: Candidate) -> bool:
    return candidate.get(".comfy_quant") is not None or candidate.config.method == "comfyui"


def _is_modelopt(candidate: Candidate) -> bool:
    """Its scales are scalars, vectors or (rows, 1, columns, 1); compressed-tensors' are (1,) or
    matrices."""
    scale = candidate.get(".weight_scale")
    unlike = scale is not None and scale.shape != (1,) and len(scale.shape) != 2
    return unlike or candidate.config.method == "modelopt"


def _is_gptq(candidate: Candidate, version: str) -> bool:
    said = candidate.config.checkpoint_format == "gptq_v2"
    plain = candidate.columns(".qweight") == candidate.columns(".scales")
    return plain and said == (version == "v2")


def _bits_per_scale(codes: str, scale: str, bits: int) -> Callable[[Candidate], bool]:
    """Whether that many bits of a row of codes share a scale."""

    def when(candidate: Candidate) -> bool:
        info = candidate.get(codes)
        found = 0 if info is None else candidate.columns(codes) * info.dtype.bits
        return found > 0 and found == bits * candidate.columns(scale)

    return when


_comfy = partial(
    Layout, "ComfyUI", methods=("comfyui",), extras=(*INPUTS, ".comfy_quant"), when=_is_comfy
)
_compressed = partial(Layout, "compressed-tensors", methods=("compressed-tensors",))
_packed = partial(_compressed, packed=1, extras=(*INPUTS, ".weight_shape"))
_gptq = partial(
    Layout, "GPTQ", codes=(".qweight", ("int32",)), scale=(".scales", _FLOATS), dtype="uint",
    zero_point=".qzeros", needs=(".qzeros",), extras=(".g_idx",), packed=0, transposed=True,
    methods=("gptq",), blocks=_MARLIN,
)  # fmt: skip
_mlx = partial(
    Layout, "MLX", codes=(".weight", ("uint32",)), packed=1, extras=(), methods=("mlx",)
)  # fmt: skip
_bits_and_bytes = partial(
    Layout, "bitsandbytes", codes=(".weight", ("uint8",)),
    scale=(".weight.absmax", ("float32", "uint8")), equation="quant_map[code] * absmax",
    extras=(".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
    methods=("bitsandbytes",),
)  # fmt: skip

_WEIGHT, _PACKED = ".weight", ".weight_packed"
_SCALE = ".weight_scale"

LAYOUTS: tuple[Layout, ...] = (
    _comfy("nvfp4", (_WEIGHT, ("uint8",)), (_SCALE, ("float8e4m3fn", "uint8")), "float4e2m1",
           "code * scale * weight_scale_2", needs=(".weight_scale_2",), packed=1, block_size=16,
           scale_dtype="float8e4m3fn"),
    _comfy("mxfp8", (_WEIGHT, _FLOAT8), (_SCALE, _POWERS), block_size=32,
           scale_dtype="float8e8m0"),
    _comfy("float8", (_WEIGHT, _FLOAT8), (_SCALE, _FLOATS)),
    _comfy("int8", (_WEIGHT, ("int8",)), (_SCALE, _FLOATS)),
    Layout("ComfyUI", "scaled float8", (_WEIGHT, _FLOAT8), (".scale_weight", _FLOATS),
           extras=(".scale_input",)),
    Layout("ModelOpt", "nvfp4", (_WEIGHT, ("uint8",)), (_SCALE, ("float8e4m3fn",)), "float4e2m1",
           "code * scale * weight_scale_2", needs=(".weight_scale_2",), packed=1,
           methods=("modelopt",), blocks=_NVFP4),
    Layout("ModelOpt", "float8", (_WEIGHT, _FLOAT8), (_SCALE, _FLOATS), methods=("modelopt",),
           when=_is_modelopt),
    _compressed("mxfp8-quantized", (_WEIGHT, _FLOAT8), (_SCALE, _POWERS),
                scale_dtype="float8e8m0", blocks=_MX),
    _compressed("float-quantized", (_WEIGHT, _FLOAT8), (_SCALE, _FLOATS)),
    _compressed("int-quantized", (_WEIGHT, ("int8",)), (_SCALE, _FLOATS),
                zero_point=".weight_zero_point", shifted="(code - zero_point) * scale"),
    _packed("nvfp4-pack-quantized", (_PACKED, ("uint8",)), (_SCALE, ("float8e4m3fn",)),
            "float4e2m1", "code * scale / weight_global_scale", needs=(".weight_global_scale",),
            blocks=_NVFP4),
    _packed("mxfp4-pack-quantized", (_PACKED, ("uint8",)), (_SCALE, _POWERS), "float4e2m1",
            when=_bits_per_scale(_PACKED, _SCALE, 4 * 32), scale_dtype="float8e8m0", blocks=_MX),
    _packed("mxfp6-pack-quantized", (_PACKED, ("uint8",)), (_SCALE, _POWERS), "float6e2m3",
            when=_bits_per_scale(_PACKED, _SCALE, 6 * 32), scale_dtype="float8e8m0", blocks=_MX),
    _packed("pack-quantized", (_PACKED, ("int32",)), (_SCALE, _FLOATS), "int",
            "(code - {middle}) * scale", ".weight_zero_point", "(code - zero_point) * scale",
            extras=(*INPUTS, ".weight_shape", ".weight_g_idx"), blocks=_MARLIN),
    Layout("float8", "", (_WEIGHT, _FLOAT8), (_SCALE, _FLOATS), methods=("fp8",)),
    Layout("block float8", "", (_WEIGHT, _FLOAT8), (".weight_scale_inv", _FLOATS),
           equation="code * weight_scale_inv", methods=("fp8",)),
    _gptq("v1", equation="(code - qzeros - 1) * scale", when=partial(_is_gptq, version="v1")),
    _gptq("v2", equation="(code - qzeros) * scale", when=partial(_is_gptq, version="v2")),
    Layout("AWQ", "", (".qweight", ("int32",)), (".scales", _FLOATS), "uint",
           "(code - qzeros) * scale", ".qzeros", needs=(".qzeros",), extras=(), packed=1,
           transposed=True, methods=("awq",), blocks=_MARLIN),
    _mlx("affine", scale=(".scales", _FLOATS), dtype="uint", equation="code * scale + bias",
         needs=(".biases",), blocks=((32, 64, 128), "MLX takes")),
    _mlx("mxfp4", scale=(".scales", ("uint8",)), dtype="float4e2m1",
         when=_bits_per_scale(_WEIGHT, ".scales", 4 * 32), scale_dtype="float8e8m0"),
    _mlx("nvfp4", scale=(".scales", ("uint8",)), dtype="float4e2m1", extras=(".global_scale",),
         when=_bits_per_scale(_WEIGHT, ".scales", 4 * 16), scale_dtype="float8e4m3fn"),
    _mlx("mxfp8", scale=(".scales", ("uint8",)), dtype="float8e4m3fn",
         when=_bits_per_scale(_WEIGHT, ".scales", 8 * 32), scale_dtype="float8e8m0"),
    _bits_and_bytes("nf4", dtype="nf4", needs=(".weight.quant_state.bitsandbytes__nf4",)),
    _bits_and_bytes("fp4", dtype="fp4", needs=(".weight.quant_state.bitsandbytes__fp4",)),
    Layout("bitsandbytes", "int8", (_WEIGHT, ("int8",)), (".SCB", ("float32",)),
           equation="code * SCB / 127", extras=(".weight_format",), methods=("bitsandbytes",)),
    # What nobody is known to write so, but can be nothing but codes beside their scales.
    Layout("compressed-tensors", "", (_PACKED, ()), (_SCALE, ()), "?", ""),
    Layout("compressed-tensors or ModelOpt", "", (_WEIGHT, ()), (_SCALE, ()), "?", ""),
    Layout("GPTQ or AWQ", "", (".qweight", ()), (".scales", ()), "?", ""),
    Layout("MLX", "", (_WEIGHT, ()), (".scales", ()), "?", ""),
    _bits_and_bytes("", dtype="?"),
    Layout("qtool, without its metadata", "", ("", ()), (".scale", ()), "?",
           zero_point=".zero_point", shifted="(code - zero_point) * scale",
           extras=(".global_scale",)),
)  # fmt: skip

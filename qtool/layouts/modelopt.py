"""The layout of NVIDIA ModelOpt, which vLLM, SGLang and TensorRT-LLM load.

Source: nvidia-modelopt 0.47, its export of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qtool.dtypes import DTYPES, DType
from qtool.errors import UsageError
from qtool.formats import Entry
from qtool.layouts import compressed_tensors
from qtool.layouts.stored import Part, Stored
from qtool.spec import Blocked, PerAxis, QuantSpec, TensorInfo

name = "modelopt"
left_alone = compressed_tensors.left_alone
fuses, mixes = True, False

_WEIGHT = ".weight"
_NVFP4, _FP8 = "W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"


def _algorithm(stored: Stored) -> str:
    """ModelOpt's name for how a tensor is quantized. Raises UsageError where there is none."""
    way = (stored.dtype.name, stored.scale_dtype.name, stored.granularity, stored.activations)
    if stored.global_scale and way == ("float4e2m1", "float8e4m3fn", Blocked(1, 16), False):
        return _NVFP4
    if way == ("float8e4m3fn", "float32", PerAxis(0), True) and not stored.zero_point:
        return _FP8
    raise UsageError(
        f"--layout {name}",
        f"it has no word for {stored.words}",
        "use --preset nvfp4 or fp8 alone",
    )


def adapted(spec: QuantSpec, storage: DType) -> QuantSpec:
    """The spec with float32 scales of float8 weights."""
    if spec.dtype.name == "float8e4m3fn" and spec.scale_dtype is None:
        return replace(spec, scale_dtype=DTYPES["float32"])
    return spec


def obstacle(info: TensorInfo, stored: Stored) -> str | None:
    """Why a tensor cannot be stored so, or None. Raises UsageError where none can."""
    if len(info.shape) != 2 or not info.name.endswith(_WEIGHT):
        return f"no weight of a linear layer, which {name} is for"
    if _algorithm(stored) == _NVFP4 and info.shape[1] % 16:
        return f"{name} needs rows of whole blocks of 16, not of {info.shape[1]}"
    return None


def parts(tensor: str, stored: Stored) -> list[Part]:
    """What a quantized tensor is made of."""
    base = tensor.removesuffix(_WEIGHT)
    rows, columns = stored.shape
    codes, scale = Entry(tensor, stored.dtype, stored.shape), f"{base}.weight_scale"
    if _algorithm(stored) == _FP8:
        return [Part(codes, "codes"), Part(Entry(scale, stored.scale_dtype, (rows,)), "scale")]
    return [
        Part(Entry(tensor, DTYPES["uint8"], (rows, columns // 2)), "codes"),
        Part(Entry(scale, stored.scale_dtype, stored.scale_shape), "scale"),
        Part(Entry(f"{base}.weight_scale_2", DTYPES["float32"], ()), "global_scale"),
    ]


def reserved(tensor: str) -> list[str]:
    """Names that readers take for parts of a quantized tensor."""
    return [f"{tensor}_scale", f"{tensor}_scale_2"]


def documents(tensors: Mapping[str, Stored], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """hf_quant_config.json, and the same in config.json's quantization_config."""
    algorithm = _algorithm(next(iter(tensors.values())))
    modules = {other.removesuffix(_WEIGHT) for other in others if other.endswith(_WEIGHT)}
    left = sorted(modules if "lm_head.weight" in tensors else modules | {"lm_head"})
    group_size = {"group_size": 16} if algorithm == _NVFP4 else {}
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **group_size}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", **group_size}
    groups = {"config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
    return {
        "hf_quant_config.json": {"quantization": {**quantization, "exclude_modules": left}},
        "config.json": {
            "quantization_config": {
                **(groups if group_size else {}),
                "ignore": left,
                "quant_algo": algorithm,
                "quant_method": "modelopt",
            }
        },
    }

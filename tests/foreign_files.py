"""Files as other tools write them, built from known codes by the descriptions of their formats.

Codes, scales and zero points are random; a weight is what they stand for, [32, 256].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from command import Array
from safetensors.numpy import save_file

OUT, IN = 32, 256
RNG = np.random.default_rng(53)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([FP4, -FP4])


@dataclass(frozen=True)
class Foreign:
    """Tensors of a file, the JSON documents beside it, and what is known of the weight.

    known: what inspect must say of it. values: of the names in the equation, each spread over the
    weight; weight: what the equation gives.
    """

    tensors: Mapping[str, Array]
    known: Mapping[str, Any]
    values: Mapping[str, Any]
    weight: Array
    documents: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write the file and the documents."""
        for name, content in self.documents.items():
            (folder / name).write_text(json.dumps(content))
        others = {"norm.weight": np.ones(IN, np.float32), "ids": np.arange(3)}
        tensors = {k: np.array(v, order="C") for k, v in {**self.tensors, **others}.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"


def packed(codes: Array, bits: int, dtype: Any, axis: int = -1) -> Array:
    """Codes along an axis as a stream of bits, the lowest first, in words of dtype."""
    moved = np.moveaxis(codes, axis, -1).astype(np.uint8)
    stream = np.unpackbits(moved[..., None], axis=-1, bitorder="little")[..., :bits]
    data = np.packbits(stream.reshape(*moved.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(np.moveaxis(data.view(dtype), -1, axis))


def spread(values: Array, rows: int = 1, columns: int = 1) -> Array:
    """Each value for its block of rows and columns of the weight."""
    wide = np.asarray(values, np.float64)
    wide = wide.reshape(1, 1) if wide.size == 1 else wide
    wide = np.repeat(np.repeat(wide, rows, 0), columns, 1)
    return np.broadcast_to(wide, (OUT, IN))


def scales(*shape: int, dtype: Any = np.float16) -> Array:
    return (2.0 ** RNG.integers(-6, 0, shape) * 1.5).astype(dtype)


def unsigned(bits: int, *shape: int) -> Array:
    return RNG.integers(0, 1 << bits, shape)


def config(**content: Any) -> dict[str, Any]:
    return {"config.json": {"model_type": "llama", "quantization_config": content}}


def blocked(dtype: str, size: int, **known: Any) -> dict[str, Any]:
    return {"dtype": dtype, "granularity": "blocked", "axis": 1, "block_size": size, **known}


def pack_quantized(bits: int = 4, group: int = 64, *, zero: bool = False) -> Foreign:
    codes, scale = unsigned(bits, OUT, IN), scales(OUT, IN // group)
    zeros = unsigned(bits, OUT, IN // group)
    tensors = {"a.weight_packed": packed(codes, bits, np.int32), "a.weight_scale": scale,
               "a.weight_shape": np.array([OUT, IN])}  # fmt: skip
    values = {"code": codes, "scale": spread(scale, 1, group)}
    middle: Any = 1 << (bits - 1)
    if zero:
        tensors["a.weight_zero_point"] = packed(zeros, bits, np.int32, axis=0)
        values["zero_point"] = middle = spread(zeros, 1, group)
    return Foreign(tensors, blocked(f"int{bits}", group, layout="compressed-tensors "
                   "pack-quantized", scale_dtype="float16", zero_point=zero), values,
                   (codes - middle) * spread(scale, 1, group))  # fmt: skip


def int_quantized() -> Foreign:
    codes, scale = RNG.integers(-128, 128, (OUT, IN)), scales(OUT, 1)
    zeros = RNG.integers(-9, 9, (OUT, 1))
    return Foreign(
        {"a.weight": codes.astype(np.int8), "a.weight_scale": scale,
         "a.weight_zero_point": zeros.astype(np.int8)},
        {"layout": "compressed-tensors int-quantized", "dtype": "int8", "granularity": "per_axis",
         "axis": 0, "zero_point": True},
        {"code": codes, "zero_point": spread(zeros), "scale": spread(scale)},
        (codes - zeros) * spread(scale),
    )  # fmt: skip


def float_quantized(
    layout: str, known: Mapping[str, Any], scale: Array, rows: int = 1, columns: int = 1,
    ending: str = ".weight_scale", **fields: Any,
) -> Foreign:  # fmt: skip
    """float8e4m3fn weights with any scales."""
    codes = RNG.normal(size=(OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    wide = codes.astype(np.float64)
    matrix = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    factor = spread(matrix, rows, columns)
    named = "weight_scale_inv" if ending.endswith("inv") else "scale"
    tensors = {"a.weight": codes, f"a{ending}": scale, **fields.pop("tensors", {})}
    return Foreign(tensors, {"layout": layout, "dtype": "float8e4m3fn", **known},
                   {"code": wide, named: factor}, wide * factor, **fields)  # fmt: skip


def fp4(
    layout: str, group: int, codes_name: str, scale: Array, dtype: Any = np.uint8, *,
    over: tuple[str, float] | None = None, scale_dtype: str, scale_name: str = ".weight_scale",
    tensors: Mapping[str, Array] | None = None,
) -> Foreign:  # fmt: skip
    """float4e2m1 weights; over: ending and value of a second scale."""
    codes = unsigned(4, OUT, IN)
    kind = ml_dtypes.float8_e8m0fnu if scale_dtype == "float8e8m0" else ml_dtypes.float8_e4m3fn
    factor = spread(scale.view(kind).astype(np.float64), 1, group)
    named: dict[str, Any] = {"code": E2M1[codes].astype(np.float64), "scale": factor}
    weight = named["code"] * factor
    stored = {f"a{codes_name}": packed(codes, 4, dtype), f"a{scale_name}": scale}
    if over is not None:
        ending, value = over
        stored[f"a{ending}"] = np.array([value] if "global" in ending else value, np.float32)
        named[ending[1:]] = value
        weight = weight / value if "global" in ending else weight * value
    known = blocked("float4e2m1", group, layout=layout, scale_dtype=scale_dtype, zero_point=False)
    return Foreign({**stored, **(tensors or {})}, known, named, weight)


def e4m3(*shape: int) -> Array:
    return scales(*shape, dtype=ml_dtypes.float8_e4m3fn)


def powers(*shape: int) -> Array:
    return RNG.integers(120, 130, shape).astype(np.uint8)


def gptq(bits: int = 4, group: int = 32, *, version: str | None = None) -> Foreign:
    codes, scale = unsigned(bits, OUT, IN), scales(IN // group, OUT)
    zeros = RNG.integers(0, (1 << bits) - 1, (IN // group, OUT))  # as they are stored
    less_one = version != "gptq_v2"
    said = {"quant_method": "gptq", "bits": bits, "group_size": group}
    if version is not None:
        said["checkpoint_format"] = version
    zero, factor = spread(zeros.T, 1, group), spread(scale.T, 1, group)
    return Foreign(
        {"a.qweight": packed(codes.T, bits, np.int32, axis=0),
         "a.qzeros": packed(zeros, bits, np.int32), "a.scales": scale,
         "a.g_idx": (np.arange(IN) // group).astype(np.int32)},
        blocked(f"uint{bits}", group, layout="GPTQ v1" if less_one else "GPTQ v2",
                scale_dtype="float16", zero_point=True),
        {"code": codes, "qzeros": zero, "scale": factor},
        (codes - (zero + less_one)) * factor,
        config(**said) if version is not None else {},
    )  # fmt: skip


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int = 128) -> Foreign:
    codes, scale = unsigned(4, OUT, IN), scales(IN // group, OUT)
    zeros = unsigned(4, IN // group, OUT)
    mixed = [values.reshape(-1, OUT // 8, 8)[:, :, AWQ_ORDER].reshape(-1, OUT)
             for values in (codes.T, zeros)]  # fmt: skip
    zero, factor = spread(zeros.T, 1, group), spread(scale.T, 1, group)
    return Foreign(
        {"a.qweight": packed(mixed[0], 4, np.int32), "a.qzeros": packed(mixed[1], 4, np.int32),
         "a.scales": scale},
        blocked("uint4", group, layout="AWQ", scale_dtype="float16", zero_point=True),
        {"code": codes, "qzeros": zero, "scale": factor},
        (codes - zero) * factor,
        config(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True),
    )  # fmt: skip


def mlx(bits: int, group: int = 64, **said: Any) -> Foreign:
    codes, scale = unsigned(bits, OUT, IN), scales(OUT, IN // group, dtype=ml_dtypes.bfloat16)
    bias = scales(OUT, IN // group, dtype=ml_dtypes.bfloat16)
    named = {"code": codes, "scale": spread(scale, 1, group), "bias": spread(bias, 1, group)}
    document = {"config.json": {"quantization": {"group_size": group, "bits": bits, **said}}}
    return Foreign(
        {"a.weight": packed(codes, bits, np.uint32), "a.scales": scale, "a.biases": bias},
        blocked(f"uint{bits}", group, layout="MLX affine", scale_dtype="bfloat16",
                zero_point=False),
        named, codes * named["scale"] + named["bias"], document,
    )  # fmt: skip


def nf4(block: int = 64) -> Foreign:
    codes, absmax = unsigned(4, OUT, IN), scales(OUT * IN // block, dtype=np.float32)
    table = np.linspace(-1, 1, 16).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [OUT, IN]}
    flat = codes.reshape(-1, 2)
    factor = np.repeat(absmax.astype(np.float64), block).reshape(OUT, IN)
    return Foreign(
        {"a.weight": (flat[:, :1] << 4 | flat[:, 1:]).astype(np.uint8),
         "a.weight.absmax": absmax, "a.weight.quant_map": table,
         "a.weight.quant_state.bitsandbytes__nf4":
             np.frombuffer(json.dumps(state).encode(), np.uint8)},
        blocked("nf4", block, layout="bitsandbytes nf4", scale_dtype="float32"),
        {"code": codes, "quant_map": table.astype(np.float64), "absmax": factor},
        table[codes].astype(np.float64) * factor,
    )  # fmt: skip


def llm_int8() -> Foreign:
    codes, largest = RNG.integers(-127, 128, (OUT, IN)), scales(OUT, dtype=np.float32)
    wide = largest.astype(np.float64)[:, None]
    return Foreign(
        {"a.weight": codes.astype(np.int8), "a.SCB": largest, "a.weight_format": np.uint8(0)},
        {"layout": "bitsandbytes int8", "dtype": "int8", "granularity": "per_axis", "axis": 0},
        {"code": codes, "SCB": wide}, codes * wide / 127,
    )  # fmt: skip


def note(**content: Any) -> dict[str, Array]:
    """ComfyUI's tensor of JSON."""
    return {"a.comfy_quant": np.frombuffer(json.dumps(content).encode(), np.uint8)}


CT, CFG = "compressed-tensors", {"granularity": "blocked", "axis": 1, "block_size": 32}
PER_TENSOR: dict[str, Any] = {"granularity": "per_tensor", "axis": None, "block_size": None}
TILED = {"granularity": "tiled", "tile": [8, 128]}
MODELOPT = {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}

FILES: dict[str, Callable[[], Foreign]] = {
    "ct-int4": pack_quantized,
    "ct-int4-zero-point": lambda: pack_quantized(zero=True),
    "ct-int8": lambda: pack_quantized(8, 128),
    "ct-int2": lambda: pack_quantized(2, 32),
    "ct-int-quantized": int_quantized,
    "ct-float-tensor": lambda: float_quantized(
        f"{CT} float-quantized", PER_TENSOR, scales(1, dtype=ml_dtypes.bfloat16)),
    "ct-float-channel": lambda: float_quantized(
        f"{CT} float-quantized", {"granularity": "per_axis", "axis": 0}, scales(OUT, 1)),
    "ct-float-block": lambda: float_quantized(
        f"{CT} float-quantized", TILED, scales(4, 2), 8, 128),
    "ct-nvfp4": lambda: fp4(
        f"{CT} nvfp4-pack-quantized", 16, ".weight_packed", e4m3(OUT, IN // 16),
        over=(".weight_global_scale", 448.0), scale_dtype="float8e4m3fn"),
    "ct-mxfp4": lambda: fp4(
        f"{CT} mxfp4-pack-quantized", 32, ".weight_packed", powers(OUT, IN // 32),
        scale_dtype="float8e8m0"),
    "ct-mxfp8": lambda: float_quantized_by_powers(f"{CT} mxfp8-quantized"),
    "modelopt-nvfp4": lambda: fp4(
        "ModelOpt nvfp4", 16, ".weight", e4m3(OUT, IN // 16), over=(".weight_scale_2", 0.125),
        scale_dtype="float8e4m3fn", tensors={"a.input_scale": np.float32(1)}),
    "modelopt-fp8": lambda: float_quantized(
        "ModelOpt float8", PER_TENSOR, np.array(0.25, np.float32), documents=MODELOPT,
        tensors={"a.input_scale": np.float32(1)}),
    "modelopt-fp8-channel": lambda: float_quantized(
        "ModelOpt float8", {"granularity": "per_axis", "axis": 0}, scales(OUT, dtype=np.float32)),
    "vllm-fp8": lambda: float_quantized(
        "float8", PER_TENSOR, scales(1, dtype=np.float32), documents=config(quant_method="fp8")),
    "block-fp8": lambda: float_quantized(
        "block float8", TILED, scales(4, 2, dtype=np.float32), 8, 128, ".weight_scale_inv",
        documents=config(quant_method="fp8", weight_block_size=[8, 128])),
    "comfyui-scaled": lambda: float_quantized(
        "ComfyUI scaled float8", PER_TENSOR, np.array(0.25, np.float32), ending=".scale_weight",
        tensors={"a.scale_input": np.float32(1),
                 "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn)}),
    "comfyui-fp8": lambda: float_quantized(
        "ComfyUI float8", PER_TENSOR, np.array(0.25, np.float32),
        tensors=note(format="float8_e4m3fn")),
    "gptq": gptq,
    "gptq-v1": lambda: gptq(8, 128, version="gptq"),
    "gptq-v2": lambda: gptq(2, 64, version="gptq_v2"),
    "awq": awq,
    "mlx-2": lambda: mlx(2, 128),
    "mlx-4": lambda: mlx(4),
    "mlx-8": lambda: mlx(8, 32, mode="affine"),
    "mlx-mxfp4": lambda: fp4("MLX mxfp4", 32, ".weight", powers(OUT, IN // 32), np.uint32,
                             scale_name=".scales", scale_dtype="float8e8m0"),
    "mlx-nvfp4": lambda: fp4("MLX nvfp4", 16, ".weight", e4m3(OUT, IN // 16).view(np.uint8),
                             np.uint32, scale_name=".scales", scale_dtype="float8e4m3fn"),
    "bitsandbytes-nf4": nf4,
    "bitsandbytes-int8": llm_int8,
}  # fmt: skip


def float_quantized_by_powers(layout: str) -> Foreign:
    """float8e4m3fn weights with biased exponents for scales."""
    codes = RNG.normal(size=(OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scale = powers(OUT, IN // 32)
    factor = spread(2.0 ** (scale.astype(np.float64) - 127), 1, 32)
    wide = codes.astype(np.float64)
    return Foreign({"a.weight": codes, "a.weight_scale": scale},
                   {"layout": layout, "dtype": "float8e4m3fn", "scale_dtype": "float8e8m0", **CFG},
                   {"code": wide, "scale": factor}, wide * factor)  # fmt: skip

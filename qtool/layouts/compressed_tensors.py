"""The layout of the compressed-tensors package, which vLLM and transformers load.

Source: compressed-tensors 0.20, its compressors and QuantizationConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import UsageError
from qtool.formats import Entry
from qtool.layouts.stored import Part, Recode, Stored, constant, flipped
from qtool.packing import pack, unpack
from qtool.spec import Blocked, PerAxis, PerTensor, QuantSpec, Shape, TensorInfo, Tiled

Array = NDArray[Any]

name = "compressed-tensors"
left_alone: Sequence[str] = (
    "*lm_head*", "*embed*", "*.wte.*", "*.wpe.*", "*.gate.weight", "*router*",
)  # fmt: skip
fuses, mixes = True, True

_WEIGHT = ".weight"
_PARTS = ("packed", "scale", "shape", "zero_point", "global_scale", "g_idx")
_INT32, _INT64, _UINT8, _FLOAT32 = (DTYPES[n] for n in ("int32", "int64", "uint8", "float32"))
_FLOATS = ("float32", "float16", "bfloat16")
_WHOLE = (PerTensor, PerAxis)


@dataclass(frozen=True)
class _Format:
    """One of the package's formats, under its own name, and the weights that it is for.

    activations: whether its readers quantize activations while running; None: they need not.
    block_size: the only one that its readers know.
    """

    name: str
    dtypes: tuple[str, ...]
    scales: tuple[str, ...]
    granularities: tuple[type, ...]
    activations: bool | None
    block_size: int | None = None


_FORMATS = (
    _Format("int-quantized", ("int8",), _FLOATS, _WHOLE, True),
    _Format("pack-quantized", ("int2", "int4", "int8"), _FLOATS, (*_WHOLE, Blocked), False),
    _Format("float-quantized", ("float8e4m3fn",), _FLOATS, (*_WHOLE, Tiled), True),
    _Format("naive-quantized", ("float8e4m3fn",), _FLOATS, (*_WHOLE, Tiled), False),
    _Format("nvfp4-pack-quantized", ("float4e2m1",), ("float8e4m3fn",), (Blocked,), False, 16),
    _Format("mxfp4-pack-quantized", ("float4e2m1",), ("float8e8m0",), (Blocked,), None, 32),
    _Format("mxfp6-pack-quantized", ("float6e2m3",), ("float8e8m0",), (Blocked,), None, 32),
    _Format("mxfp8-quantized", ("float8e4m3fn",), ("float8e8m0",), (Blocked,), None, 32),
)


def _format(stored: Stored) -> _Format:
    """The format that a tensor is stored in. Raises UsageError where there is none."""
    granularity = stored.granularity
    attributes = granularity.attributes
    for found in _FORMATS:
        fits = (
            stored.dtype.name in found.dtypes
            and stored.scale_dtype.name in found.scales
            and isinstance(granularity, found.granularities)
            and found.activations in (None, stored.activations)
            and found.block_size in (None, attributes.get("block_size"))
            and stored.global_scale == found.name.startswith("nvfp4")
            and (stored.dtype.is_integer or not stored.zero_point)
            and attributes.get("axis") in (None, 1 if "block_size" in attributes else 0)
        )
        if fits:
            return found
    raise UsageError(
        f"--layout {name}",
        f"it has no format for {stored.words}",
        "use a --preset alone, such as w4a16, w8a16, int8, fp8, nvfp4 or mxfp4",
    )


def adapted(spec: QuantSpec, storage: DType) -> QuantSpec:
    """The spec as it is: any type of scales will do."""
    return spec


def obstacle(info: TensorInfo, stored: Stored) -> str | None:
    """Why a tensor cannot be stored so, or None. Raises UsageError where none can."""
    if len(info.shape) != 2 or not info.name.endswith(_WEIGHT):
        return f"no weight of a linear layer, which {name} is for"
    _format(stored)
    granularity = stored.granularity
    block_size = granularity.attributes.get("block_size", 1)
    if isinstance(granularity, Tiled) and stored.activations:
        block_size = granularity.columns
    if info.shape[1] % block_size:
        return f"{name} needs rows of whole blocks of {block_size}, not of {info.shape[1]}"
    return None


def parts(tensor: str, stored: Stored) -> list[Part]:
    """What a quantized tensor is made of."""
    found, base = _format(stored), tensor.removesuffix(_WEIGHT)
    scale_dtype = _UINT8 if stored.scale_dtype.name == "float8e8m0" else stored.scale_dtype
    made = [
        _codes(found, base, stored),
        Part(Entry(f"{base}.weight_scale", scale_dtype, _scale_shape(stored)), "scale"),
    ]
    if found.name == "pack-quantized":
        made.append(constant(Entry(f"{base}.weight_shape", _INT64, (2,)), stored.shape))
    if stored.zero_point:
        made.append(_zero_point(found, f"{base}.weight_zero_point", stored))
    if stored.global_scale:
        entry = Entry(f"{base}.weight_global_scale", _FLOAT32, (1,))
        made.append(Part(entry, "global_scale", _reciprocal, _reciprocal))
    return made


def _codes(found: _Format, base: str, stored: Stored) -> Part:
    rows, columns = stored.shape
    bits = stored.dtype.bits
    if "pack" not in found.name:
        return Part(Entry(f"{base}.weight", stored.dtype, stored.shape), "codes")
    if found.name != "pack-quantized":
        entry = Entry(f"{base}.weight_packed", _UINT8, (rows, columns * bits // 8))
        return Part(entry, "codes")
    entry = Entry(f"{base}.weight_packed", _INT32, (rows, -(-columns * bits // 32)))
    if columns * bits % 32 == 0:
        return Part(entry, "codes", flipped(bits), flipped(bits))
    return Part(entry, "codes", *_words(stored.dtype, stored.shape), whole=True)


def _zero_point(found: _Format, part: str, stored: Stored) -> Part:
    shape = _scale_shape(stored)
    if found.name != "pack-quantized":
        return Part(Entry(part, stored.dtype, shape), "zero_point")
    groups = shape[1] if len(shape) == 2 else 1
    columns = (shape[0], groups)
    entry = Entry(part, _INT32, (-(-shape[0] * stored.dtype.bits // 32), groups))
    to_words, from_words = _words(stored.dtype, columns[::-1])

    def encode(data: Array) -> Array:
        codes = unpack(data, stored.dtype, columns)
        words = to_words(pack(codes.T, stored.dtype)).view(np.int32).reshape(groups, -1)
        return np.ascontiguousarray(words.T).view(np.uint8).reshape(-1)

    def decode(data: Array) -> Array:
        words = np.ascontiguousarray(data.view(np.int32).reshape(-1, groups).T)
        codes = unpack(from_words(words.reshape(-1).view(np.uint8)), stored.dtype, columns[::-1])
        return pack(codes.T, stored.dtype)

    return Part(entry, "zero_point", encode, decode, whole=True)


def _words(dtype: DType, shape: Shape) -> tuple[Recode, Recode]:
    """Signed codes of that shape, packed, to rows of whole 32-bit words of unsigned ones; back."""
    rows, columns = shape
    flip = flipped(dtype.bits)
    padded = -(-columns * dtype.bits // 32) * 32 // dtype.bits

    def encode(data: Array) -> Array:
        codes = unpack(data, dtype, shape).view(np.uint8)
        # what is behind a row's end is 0, as unsigned codes
        wide = np.full((rows, padded), 1 << (dtype.bits - 1), np.uint8)
        wide[:, :columns] = codes
        return flip(pack(wide, dtype))

    def decode(data: Array) -> Array:
        return pack(unpack(flip(data), dtype, (rows, padded))[:, :columns], dtype)

    return encode, decode


def _reciprocal(data: Array) -> Array:
    return (np.float32(1) / data.view(np.float32)).view(np.uint8)


def _scale_shape(stored: Stored) -> Shape:
    shape = stored.scale_shape
    return shape if len(shape) == 2 else (*shape, 1)


def reserved(tensor: str) -> list[str]:
    """Names that readers take for parts of a quantized tensor."""
    return [f"{tensor}_{part}" for part in _PARTS]


def documents(tensors: Mapping[str, Stored], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """config.json's quantization_config.

    One group of all Linear modules where they are quantized alike, else groups of named modules.
    """
    groups: dict[str, list[str]] = {}
    for tensor, stored in tensors.items():
        text = json.dumps(_group(stored))
        groups.setdefault(text, []).append(tensor.removesuffix(_WEIGHT))
    modules = {other.removesuffix(_WEIGHT) for other in others if other.endswith(_WEIGHT)}
    if "lm_head.weight" not in tensors:
        modules.add("lm_head")  # tied to the embeddings, it is in no file
    made = {}
    for i, (text, members) in enumerate(groups.items()):
        targets = ["Linear"] if len(groups) == 1 else sorted(members)
        made[f"group_{i}"] = {"targets": targets, **json.loads(text)}
    formats = {group["format"] for group in made.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": sorted(modules),
        "config_groups": made,
    }
    return {"config.json": {"quantization_config": config}}


def _group(stored: Stored) -> dict[str, Any]:
    """The package's words for how a weight, and its inputs, are quantized."""
    found, granularity = _format(stored), stored.granularity
    kind = {"num_bits": stored.dtype.bits, "type": "int" if stored.dtype.is_integer else "float"}
    weights: dict[str, Any] = {**kind, "symmetric": not stored.zero_point, "dynamic": False}
    inputs: dict[str, Any] = {**kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    if isinstance(granularity, Tiled):
        weights |= {"strategy": "block", "block_structure": list(granularity.shape)}
        inputs |= {"strategy": "group", "group_size": granularity.columns}
    elif isinstance(granularity, Blocked):
        strategy = "tensor_group" if stored.global_scale else "group"
        weights |= {"strategy": strategy, "group_size": granularity.block_size}
        inputs |= {"strategy": strategy, "group_size": granularity.block_size}
    else:
        weights["strategy"] = "channel" if isinstance(granularity, PerAxis) else "tensor"
    storage = {"float8e4m3fn": "torch.float8_e4m3fn", "float8e8m0": "torch.uint8"}
    if stored.scale_dtype.name in storage:
        weights["scale_dtype"] = inputs["scale_dtype"] = storage[stored.scale_dtype.name]
    return {
        "format": found.name,
        "weights": weights,
        "input_activations": inputs if stored.activations else None,
        "output_activations": None,
    }

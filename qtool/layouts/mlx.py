"""The layout of MLX, which mlx-lm loads: affine codes of 2, 4 and 8 bits, and mxfp4.

Source: mlx 0.32, mx.quantize and mx.dequantize; mlx-lm 0.32 for config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.dtypes import DTYPES, DType
from qtool.errors import TensorError, UsageError
from qtool.formats import Entry
from qtool.layouts.stored import Part, Stored, flipped, unchanged
from qtool.packing import pack, unpack
from qtool.spec import Blocked, QuantSpec, TensorInfo

Array = NDArray[Any]

name = "mlx"
left_alone: Sequence[str] = ()
fuses, mixes = False, True

_WEIGHT = ".weight"
_AFFINE, _MXFP4 = "affine", "mxfp4"
_GROUPS = (32, 64, 128)
_UINT32, _UINT8 = DTYPES["uint32"], DTYPES["uint8"]


def _mode(stored: Stored) -> str:
    """MLX's name for how a tensor is quantized. Raises UsageError where there is none."""
    granularity, dtype = stored.granularity, stored.dtype
    block_size = granularity.block_size if isinstance(granularity, Blocked) else 0
    along_rows = granularity.attributes.get("axis") == 1 and not stored.activations
    is_float = stored.scale_dtype.name in ("float32", "float16", "bfloat16")
    if along_rows and is_float and dtype.is_integer and dtype.bits <= 8 and block_size in _GROUPS:
        return _AFFINE
    mx = (dtype.name, stored.scale_dtype.name, block_size) == ("float4e2m1", "float8e8m0", 32)
    if along_rows and mx and not stored.zero_point:
        return _MXFP4
    raise UsageError(
        f"--layout {name}",
        f"it has no mode for {stored.words}",
        "use --block-size 32, 64 or 128 with integers of 2, 4 or 8 bits, or --preset mxfp4",
    )


def adapted(spec: QuantSpec, storage: DType) -> QuantSpec:
    """The spec with a bias for the zero point, where that makes a difference."""
    is_rounded = spec.dtype.is_integer and storage.bits == 32
    return replace(spec, bias=spec.has_zero_point or is_rounded)


def obstacle(info: TensorInfo, stored: Stored) -> str | None:
    """Why a tensor cannot be stored so, or None. Raises UsageError where none can."""
    if len(info.shape) != 2 or not info.name.endswith(_WEIGHT):
        return f"no weight of a linear layer or embedding, which {name} is for"
    _mode(stored)
    block_size = stored.granularity.attributes["block_size"]
    if info.shape[1] % block_size:
        return f"{name} needs rows of whole blocks of {block_size}, not of {info.shape[1]}"
    return None


def parts(tensor: str, stored: Stored) -> list[Part]:
    """What a quantized tensor is made of: x = code * scale + bias, bias = -zero_point * scale."""
    base = tensor.removesuffix(_WEIGHT)
    rows, columns = stored.shape
    dtype, storage = stored.dtype, stored.scale_dtype
    entry = Entry(tensor, _UINT32, (rows, columns * dtype.bits // 32))
    recode = flipped(dtype.bits) if dtype.kind == "int" else unchanged
    codes = Part(entry, "codes", recode, recode)
    affine = _mode(stored) == _AFFINE
    entry = Entry(f"{base}.scales", storage if affine else _UINT8, stored.scale_shape)
    made = [codes, Part(entry, "scale")]
    entry = Entry(f"{base}.biases", storage, stored.scale_shape)
    if stored.zero_point:
        recodes = _biases(dtype, storage)
        made.append(Part(entry, "zero_point", *recodes, whole=True, with_scale=True))
    elif affine:
        made.append(Part(entry, "scale", lambda scale: _bias(_middle(dtype), scale, storage)))
    return made


def _middle(dtype: DType) -> int:
    """The unsigned code that a signed type's 0 is stored as."""
    return 1 << (dtype.bits - 1) if dtype.kind == "int" else 0


def _bias(zero: Array | int, scale: Array, storage: DType) -> Array:
    """-zero * scale, for zero points among unsigned codes, in the scale's type."""
    product = -np.float32(zero) * scale.view(storage.numpy).astype(np.float32)
    bias = ops.cast(product, storage)
    if not np.isfinite(bias).all():
        raise TensorError(
            "biases", f"-zero_point * scale overflows {storage}", "use --scale-dtype float32"
        )
    return bias.view(np.uint8)


def _biases(dtype: DType, storage: DType) -> tuple[Any, Any]:
    """From packed zero points, and the scale, to biases; back."""
    middle = _middle(dtype)

    def encode(data: Array, scale: Array) -> Array:
        zero = unpack(data, dtype, (scale.size // storage.numpy.itemsize,))
        return _bias(zero.astype(np.int32) + middle, scale, storage)

    def decode(data: Array, scale: Array) -> Array:
        bias, s = (part.view(storage.numpy).astype(np.float64) for part in (data, scale))
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = np.nan_to_num(np.rint(-bias / s)) - middle
        return pack(zero.clip(dtype.qmin, dtype.qmax).astype(dtype.numpy), dtype)

    return encode, decode


def reserved(tensor: str) -> list[str]:
    """Names that readers take for parts of a quantized tensor."""
    base = tensor.removesuffix(_WEIGHT)
    return [f"{base}.scales", f"{base}.biases"]


def documents(tensors: Mapping[str, Stored], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """config.json's quantization, and quantization_config with the same in it; modules that are
    quantized in another way than most have an entry of their own."""
    ways: dict[str, tuple[tuple[str, Any], ...]] = {}
    for tensor, stored in tensors.items():
        way = {
            "group_size": stored.granularity.attributes["block_size"],
            "bits": stored.dtype.bits,
            "mode": _mode(stored),
        }
        ways[tensor.removesuffix(_WEIGHT)] = tuple(way.items())
    usual = Counter(ways.values()).most_common(1)[0][0]
    special = {module: dict(way) for module, way in ways.items() if way != usual}
    both = {**dict(usual), **special}
    return {"config.json": {"quantization": both, "quantization_config": both}}

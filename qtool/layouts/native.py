"""qtool's own layout: NAME, NAME.scale, NAME.zero_point and NAME.global_scale.

NAME holds the codes: in a type of the container, or, below 8 bits and for float4 and float6,
packed as ONNX packs them in a uint8 vector; so does NAME.zero_point, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.dtypes import DTYPES, DType
from qtool.formats import Entry
from qtool.layouts.stored import Part, Stored, codes_entry
from qtool.spec import QuantSpec, TensorInfo

name = "native"
left_alone: Sequence[str] = ()
fuses, mixes = False, True


def adapted(spec: QuantSpec, storage: DType) -> QuantSpec:
    """The spec as it is: any type of scales will do."""
    return spec


def obstacle(info: TensorInfo, stored: Stored) -> str | None:
    """Why a tensor cannot be stored so: it always can."""
    return None


def parts(tensor: str, stored: Stored) -> list[Part]:
    """What a quantized tensor is made of."""
    scale = Entry(f"{tensor}.scale", stored.scale_dtype, stored.scale_shape)
    made = [
        Part(codes_entry(tensor, stored.dtype, stored.shape), "codes"),
        Part(scale, "scale"),
    ]
    if stored.zero_point:
        entry = codes_entry(f"{tensor}.zero_point", stored.dtype, stored.scale_shape)
        made.append(Part(entry, "zero_point"))
    if stored.global_scale:
        entry = Entry(f"{tensor}.global_scale", DTYPES["float32"], ())
        made.append(Part(entry, "global_scale"))
    return made


def reserved(tensor: str) -> list[str]:
    """Names that readers take for parts of a quantized tensor."""
    return [f"{tensor}.{part}" for part in ("scale", "zero_point", "global_scale")]


def documents(tensors: Mapping[str, Stored], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What a checkpoint's JSON files say of it: nothing."""
    return {}

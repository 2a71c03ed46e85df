"""oneDNN's Quantize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool.dtypes import DTYPES, DType, DTypeLike, names, resolve
from qtool.errors import SpecError
from qtool.ops.arithmetic import (
    FLOAT32,
    cast,
    check_scale,
    float32_source,
    rounded_onednn,
    saturate_cast,
)
from qtool.spec import normalize_axis

Array = NDArray[Any]


def onednn_quantize(
    src: ArrayLike,
    scales: Sequence[float] | ArrayLike,
    zps: Sequence[int] | ArrayLike | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
    dst: DTypeLike = "u8",
) -> Array:
    """dst = saturate(round_half_even(src / scale + zp)) in float32: zp comes before the rounding.

    src: (..., C, ...) float32; float64 is rounded, float16 and bfloat16 are widened.
    scales, zps: one value for qtype "per_tensor", C values along axis in [-r, r-1] for
        "per_channel". zps: integers, zero if omitted, not allowed for float8.
    dst: "u8", "s8", "f8_e4m3", "f8_e5m2", or the ONNX name, code or NumPy type of the same.

    Raises SpecError naming the argument. Source: oneDNN Graph API, operation Quantize.
    """
    x = float32_source(np.asarray(src), "src")
    dtype = _destination(dst)
    if qtype not in ("per_tensor", "per_channel"):
        raise SpecError("qtype", f"{qtype!r} is unknown", "use per_tensor or per_channel")
    channels, shape = 1, [1] * x.ndim
    if qtype == "per_channel":
        axis = normalize_axis(axis, x.ndim)
        channels = shape[axis] = x.shape[axis]
    scale = cast(_list(scales, channels, "scales"), FLOAT32)
    check_scale(scale, "scales")
    zero = None if zps is None else _zero_points(zps, channels, dtype).reshape(shape)
    return saturate_cast(rounded_onednn(x, scale.reshape(shape), zero, dtype), zero, dtype)


def _destination(dst: DTypeLike) -> DType:
    aliases = {d.onednn: d for d in DTYPES.values() if d.onednn and d.is_target}
    dtype = aliases.get(str(dst)) or resolve(dst, "dst", [*aliases.values()])
    if dtype not in aliases.values():
        raise SpecError("dst", f"oneDNN Quantize does not produce {dst}", "use " + names(aliases))
    return dtype


def _zero_points(zps: Any, channels: int, dtype: DType) -> Array:
    if dtype.kind == "float":
        raise SpecError("zps", f"not supported for {dtype.onednn}", "leave it out")
    zero = _list(zps, channels, "zps")
    if zero.size and not np.issubdtype(zero.dtype, np.integer):
        raise SpecError("zps", f"{zero.dtype} values", "use integers")
    return zero


def _list(values: Any, channels: int, thing: str) -> Array:
    array = np.asarray(values)
    if array.size != channels:
        raise SpecError(thing, f"{array.size} values", f"exactly {channels} are needed")
    return array

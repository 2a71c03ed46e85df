"""The layouts of other runtimes read with NumPy alone, from what their formats say.

Each reader gives a module's weight in float32, rounded as its runtime would before it casts.
Sources: compressed-tensors 0.20, nvidia-modelopt 0.47, mlx 0.32: their compressors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Held = Mapping[str, Array]

FLOAT4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def stream(rows: Array, bits: int, columns: int) -> Array:
    """Unsigned codes: element i of a row in bits [i * bits, i * bits + bits) of its bytes."""
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1)
    every = np.unpackbits(flat, axis=1, bitorder="little")[:, : columns * bits]
    assert not np.unpackbits(flat, axis=1, bitorder="little")[:, columns * bits :].any()
    return every.reshape(rows.shape[0], columns, bits) @ (1 << np.arange(bits))


def float4(rows: Array, columns: int) -> Array:
    """Sign, then the place in the table."""
    codes = stream(rows, 4, columns)
    return np.where(codes & 8, -FLOAT4[codes & 7], FLOAT4[codes & 7])


def float6e2m3(rows: Array, columns: int) -> Array:
    codes = stream(rows, 6, columns)
    exponent, mantissa = codes >> 3 & 3, codes & 7
    size = np.where(exponent == 0, mantissa / 8, (8 + mantissa) * 2.0 ** (exponent - 4.0))
    return np.where(codes & 32, -size, size).astype(np.float32)


def power(exponents: Array) -> Array:
    """Scales of the mx formats: 2^(e - 127)."""
    assert exponents.dtype == np.uint8
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def spread(values: Array, shape: tuple[int, ...]) -> Array:
    """The value of every element's group: one for all, or whole groups in each row."""
    if values.shape == (1,):
        return np.broadcast_to(values, shape)
    assert values.shape[0] == shape[0]
    assert shape[1] % values.shape[1] == 0
    return values.repeat(shape[1] // values.shape[1], axis=1)


def tiles(values: Array, shape: tuple[int, ...], size: int) -> Array:
    """The value of every element's square tile; those at the edges may be smaller."""
    assert values.shape == (-(-shape[0] // size), -(-shape[1] // size))
    return values.repeat(size, axis=0).repeat(size, axis=1)[: shape[0], : shape[1]]


def compressed_tensors(held: Held, name: str, how: str, bits: int) -> Array:
    """A module of the compressed-tensors package, in the format of that name; "... 128": with
    square blocks."""
    stored = held[f"{name}.weight_scale"]
    if how.startswith("mx"):
        codes = _mx_codes(held, name, how)
        return codes * spread(power(stored), codes.shape)
    if how == "nvfp4-pack-quantized":
        packed = held[f"{name}.weight_packed"]
        codes = float4(packed, packed.shape[1] * 2)
        scale = stored.astype(np.float32) / held[f"{name}.weight_global_scale"]
        return codes * spread(scale, codes.shape)
    if how == "pack-quantized":
        codes = _packed(held, name, bits)
    else:
        codes = held[f"{name}.weight"].astype(np.float32)
        if f"{name}.weight_zero_point" in held:
            codes = codes - held[f"{name}.weight_zero_point"].astype(np.float32)
    scale = stored.astype(np.float32)
    if how.endswith(" 128"):
        return codes * tiles(scale, codes.shape, 128)
    return codes * spread(scale, codes.shape)


def _mx_codes(held: Held, name: str, how: str) -> Array:
    if how == "mxfp8-quantized":
        codes = held[f"{name}.weight"]
        assert codes.dtype == ml_dtypes.float8_e4m3fn
        return codes.astype(np.float32)
    packed = held[f"{name}.weight_packed"]
    if how == "mxfp4-pack-quantized":
        return float4(packed, packed.shape[1] * 2)
    return float6e2m3(packed, packed.shape[1] * 8 // 6)


def _packed(held: Held, name: str, bits: int) -> Array:
    """Codes of 32-bit words, less their zero points, which are packed along the rows."""
    packed, shape = held[f"{name}.weight_packed"], held[f"{name}.weight_shape"]
    assert (packed.dtype, shape.dtype) == (np.int32, np.int64)
    rows, columns = shape.tolist()
    middle = 1 << (bits - 1)
    codes = stream(packed, bits, columns) - middle
    zero = held.get(f"{name}.weight_zero_point")
    if zero is not None:
        assert zero.dtype == np.int32
        points = stream(zero.T, bits, rows).T - middle
        codes = codes - spread(points, (rows, columns))
    return codes.astype(np.float32)


def modelopt(held: Held, name: str, how: str, bits: int) -> Array:
    """A module of ModelOpt, quantized by the algorithm of that name."""
    scale = held[f"{name}.weight_scale"].astype(np.float32)
    if how == "FP8_PER_CHANNEL_PER_TOKEN":
        return held[f"{name}.weight"].astype(np.float32) * scale[:, None]
    packed, over = held[f"{name}.weight"], held[f"{name}.weight_scale_2"]
    assert (packed.dtype, over.dtype, over.shape) == (np.uint8, np.float32, ())
    codes = float4(packed, packed.shape[1] * 2)
    return codes * spread(scale * over, codes.shape)


def mlx(held: Held, name: str, how: str, bits: int) -> Array:
    """A module of MLX in that mode: the product and the sum are rounded one after the other."""
    packed, stored = held[f"{name}.weight"], held[f"{name}.scales"]
    assert packed.dtype == np.uint32
    columns = packed.shape[1] * 32 // bits
    if how == "mxfp4":
        assert f"{name}.biases" not in held
        return float4(packed, columns) * spread(power(stored), (len(packed), columns))
    codes, bias = stream(packed, bits, columns).astype(np.float32), held[f"{name}.biases"]
    assert bias.dtype == stored.dtype
    scale, bias = (spread(v.astype(np.float32), codes.shape) for v in (stored, bias))
    return codes * scale + bias

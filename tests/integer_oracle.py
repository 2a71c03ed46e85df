"""Dynamic quantization in plain NumPy, for what `qtool dynamic --graph` writes.

Everything is done in the order of the standard's formulas: integers exactly, floats in float32.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from command import initializers, ok
from numpy.typing import NDArray
from onnx import ModelProto
from onnx_jobs import RNG
from onnx_models import check, save
from onnxruntime.quantization import QuantType, quantize_dynamic

Array = NDArray[Any]


def sparse(*shape: int, axis: int) -> Array:
    """A weight whose every second value along the axis that is summed over is zero.

    CPUs without VNNI add neighbouring products of uint8 and int8 in 16 bits, which may overflow.
    """
    values = RNG.normal(size=shape).astype(np.float32)
    moved = np.moveaxis(values, axis, 0)
    moved[1::2] = 0
    return values


def converted(made: ModelProto, folder: Path, *options: str) -> tuple[ModelProto, dict[str, Array]]:
    """The model after `dynamic --graph`, checked in full, and its initializers."""
    source = save(made, folder / "m.onnx")
    ok("dynamic", source, "--graph", "-o", folder / "out.onnx", *options, "-q")
    return check(folder / "out.onnx"), initializers(folder / "out.onnx")


def operators(made: ModelProto) -> list[str]:
    return [node.op_type for node in made.graph.node]


def same(actual: Array, expected: Array) -> None:
    """Equal in type, shape and every bit of the values."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def dynamic(x: Array) -> tuple[Array, np.float32, int]:
    """DynamicQuantizeLinear: codes as int64, scale, zero point."""
    x = x.astype(np.float32)
    low, high = np.minimum(x.min(), np.float32(0)), np.maximum(x.max(), np.float32(0))
    scale = np.float32((high - low) / np.float32(255))
    zero = int(np.clip(np.rint(-low / scale), 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.int64), scale, zero


def codes_of(
    w: Array, dtype: str, channels: int | None, *, shifted: bool = False
) -> tuple[Array, Array, Array]:
    """Codes, scale and zero point of a weight, all but the codes broadcastable to it.

    channels: the axis of the output channels, or None for one scale. shifted: over [min, max]
    with zero included, else centred on zero, which is code 128 of uint8.
    """
    axes = tuple(a for a in range(w.ndim) if a != channels)
    low, high = (np.asarray(f(w, axis=axes, keepdims=True), np.float64) for f in (np.min, np.max))
    if shifted:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = ((high - low) / 255).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 0, 255)
    else:
        scale = (np.maximum(-low, high) / 127).astype(np.float32)
        zero = np.full_like(low, 128 if dtype == "uint8" else 0)
    scale = np.where(scale == 0, np.float32(1), scale)  # channels of zeros
    limits = np.iinfo(dtype)
    codes = np.clip(np.rint(w / scale) + zero, limits.min, limits.max)
    return codes.astype(np.int64), scale, zero.astype(np.int64)


def conv(
    x: Array,
    w: Array,
    *,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    dilations: list[int] | None = None,
    group: int = 1,
) -> Array:
    """Conv of integers, exactly: x (N, C, ...), w (M, C / group, ...)."""
    rank = x.ndim - 2
    pads, strides, dilations = (
        pads or [0] * 2 * rank,
        strides or [1] * rank,
        dilations or [1] * rank,
    )
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    reach = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
    sizes = [(n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, strides, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *sizes), np.int64)
    inputs, outputs = w.shape[1], w.shape[0] // group
    for place in itertools.product(*map(range, w.shape[2:])):
        window = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilations, sizes, strides, strict=True)
        )
        for g in range(group):
            own = slice(g * outputs, (g + 1) * outputs)
            part: Any = (slice(None), slice(g * inputs, (g + 1) * inputs), *window)
            kernel: Any = (own, slice(None), *place)
            y[:, own] += np.einsum("nc...,mc->nm...", x[part], w[kernel])
    return y


def product(x: Array, codes: Array, scale: Array, zero: Array, **attributes: Any) -> Array:
    """The scaled product with a weight. attributes: of Conv; without any it is MatMul's."""
    x_codes, x_scale, x_zero = dynamic(x)
    multiply = conv if attributes else np.matmul
    total = multiply(x_codes - x_zero, codes - zero, **attributes)
    return total.astype(np.int32).astype(np.float32) * (x_scale * scale)


def by_onnxruntime(source: Path, target: Path, dtype: str, *, per_channel: bool) -> Path:
    """What onnxruntime's own quantizer makes of MatMul, Gemm and Conv of a model."""
    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=["MatMul", "Conv"],  # Gemm becomes MatMul
        per_channel=per_channel,
        weight_type=QuantType.QInt8 if dtype == "int8" else QuantType.QUInt8,
    )
    return target


def optimized(path: Path, folder: Path) -> list[str]:
    """The operators that onnxruntime makes of a model when it loads it, sorted."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options)
    return sorted(operators(onnx.load(options.optimized_model_filepath)))


def relative_error(actual: list[Array], expected: list[Array]) -> float:
    """||actual - expected|| / ||expected|| over all outputs."""
    found, wanted = (
        np.concatenate([np.asarray(y, np.float64).reshape(-1) for y in outputs])
        for outputs in (actual, expected)
    )
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

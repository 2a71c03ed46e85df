"""What other tools make of a matrix: each function quantizes it and gives back what they would
compute with. x: float32 (rows, inputs), the inputs a multiple of the block; returns x's shape.

Packages are imported where they are used; the extra `peers` has them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def gguf(x: Matrix, name: str) -> Matrix:
    """gguf-py's quantize and dequantize."""
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[name]
    with np.errstate(all="ignore"):  # it divides by the scales of zeros
        return np.asarray(quants.dequantize(quants.quantize(x, kind), kind))


def onnxruntime_default(x: Matrix, block: int, symmetric: bool) -> Matrix:
    """MatMulNBitsQuantizer's DEFAULT: its C++ kernel of 4-bit codes, float32 scales."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=symmetric, bits=4)
    weight = np.ascontiguousarray(x.T)  # MatMul's: (inputs, rows)
    packed, scale, zero = DefaultWeightOnlyQuantizer(config).qbits_block_quant(weight)
    blocks = x.shape[1] // block
    codes = _nibbles(packed).reshape(len(x), blocks, block)
    zeros = 8 if symmetric else _nibbles(zero).reshape(len(x), -1)[:, :blocks, None]
    return ((codes - zeros) * scale.reshape(len(x), blocks, 1)).reshape(x.shape)


def onnxruntime_k_quant(x: Matrix, block: int) -> Matrix:
    """MatMulNBitsQuantizer's k_quant: a weighted search over scales, zero points of 4 bits."""
    from onnxruntime.quantization.neural_compressor import weight_only

    with np.errstate(all="ignore"):  # it divides by the ranges of constant blocks
        codes, scale, zero = weight_only.quant_tensor_k_quant_cpu(x, 4, block)
    return ((codes - zero) * scale.astype(np.float32)).reshape(x.shape)


def onnxruntime_hqq(x: Matrix, block: int) -> Matrix:
    """MatMulNBitsQuantizer's HQQ: zero points are floats, here in float16 like the scales."""
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        HQQWeightOnlyQuantConfig,
        HQQWeightOnlyQuantizer,
    )

    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=block, bits=4))
    parts = quantizer.quantize_internal(torch.from_numpy(x), bits=4, group_size=block)
    codes, scale, zero = (part.numpy() for part in parts)
    scale, zero = (part.astype(np.float16).astype(np.float32)[..., None] for part in (scale, zero))
    codes = codes.reshape(len(x), -1, block)
    return ((codes - zero) * scale).reshape(x.shape)


def compressed_tensors(x: Matrix, preset: str, block: int) -> Matrix:
    """calculate_qparams of the blocks' ranges, as a checkpoint's observer calls it, and
    fake_quantize. Scales in bfloat16, where the preset does not say."""
    import torch
    from compressed_tensors.quantization import fake_quantize, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = preset_name_to_scheme(preset, ["Linear"]).weights
    assert weights is not None
    args = weights.model_copy(update={"group_size": block})
    tensor = torch.from_numpy(x)
    blocks = tensor.unflatten(-1, (-1, block))
    low, high = blocks.amin(-1), blocks.amax(-1)
    over = generate_gparam(tensor.min(), tensor.max()) if preset.startswith("NVFP4") else None
    scale, zero = calculate_qparams(low, high, args, over)
    if args.scale_dtype is None:
        scale = scale.bfloat16().float()
    restored: Matrix = fake_quantize(tensor, scale, zero, args, global_scale=over).numpy()
    return restored


def modelopt(x: Matrix, name: str) -> Matrix:
    """ModelOpt's NVFP4QTensor or MXFP4QTensor, which its export uses."""
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    tensor = torch.from_numpy(x)
    if name == "NVFP4":
        codes, scale, over = NVFP4QTensor.quantize(tensor, 16)
        restored = codes.dequantize(scale=scale, double_scale=over, block_sizes={-1: 16})
    else:
        codes, scale = MXFP4QTensor.quantize(tensor, 32)
        restored = codes.dequantize(scale=scale, block_sizes={-1: 32})
    return np.asarray(restored.numpy())


def mlx(x: Matrix, mode: str, block: int, bits: int = 4) -> Matrix:
    """mx.quantize. affine: scales and biases in float16."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        weight = mx.array(x).astype(mx.float16 if mode == "affine" else mx.float32)
        parts = mx.quantize(weight, group_size=block, bits=bits, mode=mode)
        parts = [part.astype(mx.float32) if part.dtype == mx.float16 else part for part in parts]
        restored = mx.dequantize(*parts, group_size=block, bits=bits, mode=mode)
        return np.array(restored.astype(mx.float32))


def quanto(x: Matrix, block: int, *, zero_points: bool) -> Matrix:
    """optimum-quanto's qint4 with zero points of 4 bits, or with shifts of the type of the scales,
    which is float16 here."""
    import torch
    from optimum.quanto import MaxOptimizer, qint4

    tensor = torch.from_numpy(x)
    scale, shift = MaxOptimizer()(tensor, qint4, 0, block, zeropoint=zero_points)
    scale = scale.half().float()
    shift = shift if zero_points else shift.half().float()
    codes = torch.ops.quanto.quantize_affine(tensor, 4, 0, block, scale, shift).float()
    restored = (codes - shift) * scale if zero_points else codes * scale - shift
    return np.asarray(restored.numpy().reshape(x.shape))


def llm_compressor_mse(x: Matrix, block: int) -> Matrix:
    """llm-compressor 0.14's memoryless_mse observer for w4a16, in NumPy: of the ranges 1, .99 ...
    .81 times the block's, the one of least sum |x - x_hat|^2.4; it stops after five steps
    that no block gained by. scale = range / 7.5, stored in bfloat16."""
    blocks = x.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    best = np.full(largest.shape, np.inf, np.float32)
    chosen = largest.copy()
    idle = 0
    for i in range(20):
        scale = largest * np.float32(1 - i / 100) / np.float32(7.5)
        error = np.abs(_int4(blocks, scale) - blocks) ** np.float32(2.4)
        total = error.sum(axis=1, keepdims=True)
        gained = total < best
        best, chosen = np.where(gained, total, best), np.where(gained, scale * 7.5, chosen)
        idle = 0 if gained.any() else idle + 1
        if idle == 5:
            break
    scale = (chosen / np.float32(7.5)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return _int4(blocks, scale).reshape(x.shape)


def llm_compressor_nvfp4(x: Matrix) -> Matrix:
    """llm-compressor 0.14's nvfp4_expanded_mse observer, in NumPy: 111 ranges from 1.8 to 0.8 times
    the block's, compared with scales that are not yet rounded, by sum |x - x_hat|^2.4."""
    blocks = x.reshape(-1, 16)
    largest = np.abs(blocks).max(axis=1, keepdims=True) * np.float32(1.8)
    best, chosen = np.full(largest.shape, np.inf, np.float32), largest / np.float32(6)
    for i in range(int((1 - 0.8 / 1.8) * 200)):
        scale = largest * np.float32(1 - i / 200) / np.float32(6)
        error = np.abs(_e2m1(blocks, scale) - blocks) ** np.float32(2.4)
        total = error.sum(axis=1, keepdims=True)
        gained = total < best
        best, chosen = np.where(gained, total, best), np.where(gained, scale, chosen)
    over = np.float32(448 * 6) / np.abs(x).max()
    stored = np.clip(chosen * over, 2.0**-9, 448).astype(E4M3).astype(np.float32)
    return _e2m1(blocks, stored / over).reshape(x.shape)


def modelopt_nvfp4_sweep(x: Matrix) -> Matrix:
    """ModelOpt's NVFP4MSECalibrator, in NumPy: for every block the best of all 126 positive
    float8e4m3fn scales under the tensor's absmax / (448 * 6)."""
    blocks = x.reshape(-1, 16)
    over = np.abs(x).max() / np.float32(448 * 6)
    best = np.full((len(blocks), 1), np.inf, np.float32)
    chosen = np.ones_like(best)
    for code in range(1, 127):
        scale = np.uint8(code).view(E4M3).astype(np.float32) * over
        error = _e2m1(blocks, scale) - blocks
        total = np.einsum("ij,ij->i", error, error)[:, None]
        chosen, best = np.where(total < best, scale, chosen), np.minimum(total, best)
    return _e2m1(blocks, chosen).reshape(x.shape)


def bitsandbytes_nf4(x: Matrix, block: int) -> Matrix:
    """bitsandbytes' nf4 (Dettmers et al. 2023), in NumPy: the nearest of 16 quantiles of the normal
    distribution times the block's absmax, a float32."""
    blocks = x.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    codes = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, blocks / largest)
    return np.asarray((NF4[codes] * largest).reshape(x.shape))


def _nibbles(packed: Matrix) -> Matrix:
    """Low half first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int8)


def _int4(x: Matrix, scale: Matrix) -> Matrix:
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint(x / scale), -8, 7) * scale


def _e2m1(x: Matrix, scale: Any) -> Matrix:
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.clip(x / scale, -6, 6).astype(E2M1).astype(np.float32) * scale

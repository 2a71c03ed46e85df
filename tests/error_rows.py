"""Which options of qtool stand beside which peer in the comparison of errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import peers
from numpy.typing import NDArray

import qtool
from qtool.dtypes import resolve

Matrix = NDArray[Any]
WORDS = {
    "symmetric": "asymmetric",
    "negative_scale": "negative",
    "bias": "bias",
    "global_scale": "global",
}


@dataclass(frozen=True)
class Row:
    """A peer, and the options of qtool that give the same freedoms in as many bits or fewer.

    bits: per weight, of the peer's scales and zero points too; the one scale of a tensor aside.
    marked: computed by a NumPy version of the peer that stands in tests/peers.py.
    """

    peer: str
    bits: float
    run: partial[Matrix]
    dtype: str
    block: int
    scale: str
    options: dict[str, Any] = field(default_factory=dict)
    marked: bool = False

    def restored(self, x: Matrix, method: str) -> Matrix:
        """What qtool makes of x, by a method."""
        spec = qtool.QuantSpec(
            self.dtype,
            qtool.Blocked(axis=1, block_size=self.block),
            scale_dtype=self.scale,
            method=method,
            **self.options,
        )
        return qtool.quantize(x, spec).dequantize()

    @property
    def words(self) -> str:
        """qtool's side, as its options say it."""
        flags = [self.scale, *(word for key, word in WORDS.items() if key in self.options)]
        return f"{self.dtype} /{self.block} " + ", ".join(flags)

    @property
    def own_bits(self) -> float:
        """Bits per weight of qtool's side."""
        width, scale = resolve(self.dtype).bits, resolve(self.scale).bits
        offset = 0 if self.options.get("symmetric", True) else width
        if self.options.get("bias"):
            offset = scale
        return width + (scale + offset) / self.block


def _row(peer: str, bits: float, run: partial[Matrix], own: str, **options: Any) -> Row:
    """own: "int4 32 float16"."""
    dtype, block, scale = own.split()
    marked = options.pop("marked", False)
    return Row(peer, bits, run, dtype, int(block), scale, options, marked)


def _rows() -> Iterator[Row]:
    signed = {"negative_scale": True}
    offset = {"symmetric": False}
    nvfp4 = {"global_scale": True}
    gguf = partial(partial, peers.gguf)
    yield _row("gguf Q4_0", 4.5, gguf(name="Q4_0"), "int4 32 float16", **signed)
    yield _row("gguf Q4_1", 5.0, gguf(name="Q4_1"), "uint4 32 float16", **offset)
    yield _row("gguf Q8_0", 8.5, gguf(name="Q8_0"), "int8 32 float16")
    yield _row("gguf MXFP4", 4.25, gguf(name="MXFP4"), "float4e2m1 32 float8e8m0")
    for block in (32, 128):
        run = partial(peers.onnxruntime_default, block=block)
        yield _row(f"onnxruntime, symmetric, {block}", 4 + 32 / block, partial(run, symmetric=True),
                   f"int4 {block} float32", **signed)  # fmt: skip
        yield _row(f"onnxruntime, asymmetric, {block}", 4 + 36 / block,
                   partial(run, symmetric=False), f"uint4 {block} float32", **offset)  # fmt: skip
        yield _row(f"onnxruntime, k_quant, {block}", 4 + 36 / block,
                   partial(peers.onnxruntime_k_quant, block=block),
                   f"uint4 {block} float32", **offset)  # fmt: skip
    yield _row("onnxruntime, HQQ, 64", 4.5, partial(peers.onnxruntime_hqq, block=64),
               "int4 32 float16", **signed)  # fmt: skip
    for block in (32, 128):
        yield _row(f"compressed-tensors w4a16, {block}", 4 + 16 / block,
                   partial(peers.compressed_tensors, preset="W4A16", block=block),
                   f"int4 {block} bfloat16")  # fmt: skip
    yield _row("compressed-tensors w4a16-asym", 4 + 20 / 128,
               partial(peers.compressed_tensors, preset="W4A16_ASYM", block=128),
               "uint4 128 bfloat16", **offset)  # fmt: skip
    yield _row("compressed-tensors nvfp4", 4.5,
               partial(peers.compressed_tensors, preset="NVFP4A16", block=16),
               "float4e2m1 16 float8e4m3fn", **nvfp4)  # fmt: skip
    yield _row("compressed-tensors mxfp4", 4.25,
               partial(peers.compressed_tensors, preset="MXFP4A16", block=32),
               "float4e2m1 32 float8e8m0")  # fmt: skip
    for block in (32, 128):
        yield _row(f"llm-compressor w4a16, mse, {block}", 4 + 16 / block,
                   partial(peers.llm_compressor_mse, block=block),
                   f"int4 {block} bfloat16", marked=True)  # fmt: skip
    yield _row("llm-compressor nvfp4, mse", 4.5, partial(peers.llm_compressor_nvfp4),
               "float4e2m1 16 float8e4m3fn", marked=True, **nvfp4)  # fmt: skip
    yield _row("ModelOpt nvfp4", 4.5, partial(peers.modelopt, name="NVFP4"),
               "float4e2m1 16 float8e4m3fn", **nvfp4)  # fmt: skip
    yield _row("ModelOpt nvfp4, sweep", 4.5, partial(peers.modelopt_nvfp4_sweep),
               "float4e2m1 16 float8e4m3fn", marked=True, **nvfp4)  # fmt: skip
    yield _row("ModelOpt mxfp4", 4.25, partial(peers.modelopt, name="MXFP4"),
               "float4e2m1 32 float8e8m0")  # fmt: skip
    for block in (32, 64):
        yield _row(f"MLX affine, {block}", 4 + 32 / block,
                   partial(peers.mlx, mode="affine", block=block),
                   f"uint4 {block} float16", bias=True, **offset)  # fmt: skip
    yield _row("MLX mxfp4", 4.25, partial(peers.mlx, mode="mxfp4", block=32),
               "float4e2m1 32 float8e8m0")  # fmt: skip
    yield _row("MLX nvfp4", 4.5, partial(peers.mlx, mode="nvfp4", block=16),
               "float4e2m1 16 float8e4m3fn")  # fmt: skip
    for block in (32, 128):
        yield _row(f"optimum-quanto, zero points, {block}", 4 + 20 / block,
                   partial(peers.quanto, block=block, zero_points=True),
                   f"uint4 {block} float16", **offset)  # fmt: skip
    yield _row("optimum-quanto, shifts, 64", 4.5,
               partial(peers.quanto, block=64, zero_points=False),
               "int4 32 float16", **signed)  # fmt: skip
    yield _row("bitsandbytes nf4, 64", 4.5, partial(peers.bitsandbytes_nf4, block=64),
               "int4 32 float16", marked=True, **signed)  # fmt: skip


ROWS = tuple(_rows())


def relative_error(xs: list[Matrix], restore: Callable[[Matrix], Matrix]) -> float:
    """sqrt(sum (x - x_hat)^2 / sum x^2) over all of xs."""
    wrong = whole = 0.0
    for x in xs:
        restored = restore(x)
        for part, back in zip(x, restored, strict=True):
            difference = back.astype(np.float64) - part
            wrong += float(difference @ difference)
            part = part.astype(np.float64)
            whole += float(part @ part)
    return math.sqrt(wrong / whole)


def errors(row: Row, xs: list[Matrix], methods: Iterable[str]) -> list[float]:
    """The peer's error and qtool's by each method, over the matrices whose rows are whole blocks
    of both; nothing where there are none."""
    whole = math.lcm(row.block, row.run.keywords.get("block", 1))
    xs = [x for x in xs if x.shape[1] % whole == 0]
    if not xs:
        return []
    ours = [relative_error(xs, partial(row.restored, method=method)) for method in methods]
    return [relative_error(xs, row.run), *ours]

"""How com.microsoft's MatMulNBits and GatherBlockQuantized store a weight.

MatMulNBits multiplies by W of [K, N], in blocks along K. B, uint8 of
[N, blocks, block_size * bits / 8], has the codes of one column after the other, the first one in
the lowest bits; those behind K are the zero point's and stand for 0. scales: [N, blocks], of W's
type. zero_points: uint8 [N, ceil(blocks * bits / 8)]; 2^(bits-1) where there are none. Codes of
signed types are stored with 2^(bits-1) added.

GatherBlockQuantized reads rows of W of [..., D], in blocks along D. data and zero_points are int4
or uint4, 0 where there are none; or else uint8 as above, rows of data not padded to blocks.
Source: onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from qtool.dtypes import DTYPES, DType
from qtool.errors import UsageError
from qtool.spec import Blocked, QuantSpec, Shape

NAME = "matmul-nbits"
DOMAIN, MATMUL, GATHER = "com.microsoft", "MatMulNBits", "GatherBlockQuantized"
BITS = (2, 4, 8)
_UINT8 = DTYPES["uint8"]
_SMALLEST_BLOCK = 16
# What onnxruntime's CPU execution provider takes of 2-bit codes.
_LARGEST_2_BIT_BLOCK = 256


class Form(Enum):
    """Whose operand a weight is: a MatMul's, [K, N]; a Gemm's that is transposed, [N, K]; or a
    Gather's."""

    COLUMNS = "columns"
    ROWS = "rows"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a weight is stored as; its suffix is the one that onnxruntime gives it."""

    suffix: str
    dtype: DType
    shape: Shape


def check(dtype: DType, block_size: int | None, axis: int | None, scale_dtype: object) -> None:
    """Refuse what the operators have no place for. Raises UsageError."""
    if not (dtype.is_integer and dtype.bits in BITS):
        allowed = [d.name for d in DTYPES.values() if d.is_target and d.is_integer]
        allowed = [name for name in allowed if DTYPES[name].bits in BITS]
        raise UsageError(
            "--layout", f"MatMulNBits holds no {dtype} codes", "use " + ", ".join(allowed)
        )
    if block_size is None:
        raise UsageError(
            "--layout", "MatMulNBits has blocks", "give their size, for example --block-size 32"
        )
    if block_size < _SMALLEST_BLOCK or block_size & (block_size - 1) or block_size >= 1 << 31:
        raise UsageError(
            "--block-size",
            f"{block_size} is no block size of MatMulNBits",
            f"use a power of two from {_SMALLEST_BLOCK} on",
        )
    if dtype.bits == 2 and block_size > _LARGEST_2_BIT_BLOCK:
        raise UsageError(
            "--block-size",
            f"onnxruntime takes no {block_size} codes of 2 bits in a block",
            f"use {_LARGEST_2_BIT_BLOCK} or less",
        )
    if axis is not None:
        raise UsageError("--axis", "MatMulNBits has blocks along the axis that it sums over",
                         "leave it out")  # fmt: skip
    if scale_dtype is not None:
        raise UsageError("--scale-dtype", "MatMulNBits has scales of the weight's own type",
                         "leave it out")  # fmt: skip


class Storage:
    """How one weight is stored in one form.

    shape: of the weight. spec: its blocks lie along the axis of the form. has_zero_point: whether
    it is quantized with a zero point; without, that is 0.

    count, depth, blocks: N, K and the number of blocks along K.
    flip: what is added to codes. zero_point: what all of the weight's are, so stored; None: they
    differ. parts: the codes, the scales and, unless the operator takes zero_point for granted,
    the zero points.
    """

    def __init__(
        self, form: Form, shape: Shape, spec: QuantSpec, scale_dtype: DType, *, has_zero_point: bool
    ) -> None:
        granularity, dtype = spec.granularity, spec.dtype
        assert isinstance(granularity, Blocked)
        self.form, self.shape, self.dtype = form, shape, dtype
        self.block_size = granularity.block_size
        self.depth = shape[granularity.axis]
        self.count = math.prod(shape) // max(self.depth, 1)
        self.blocks = -(-self.depth // self.block_size)
        self.is_typed = form is Form.GATHER and dtype.bits == 4
        middle = 1 << (dtype.bits - 1)
        self.flip = middle if dtype.kind == "int" and not self.is_typed else 0
        self.zero_point: int | None = None
        if not has_zero_point:
            self.zero_point = self.flip
        elif spec.symmetric and dtype.kind == "uint":
            self.zero_point = middle
        rows = shape[:-1] if form is Form.GATHER else (self.count,)
        self.parts = [*self._parts(rows, shape, scale_dtype)]
        if self.zero_point == (0 if self.is_typed else middle):
            del self.parts[2:]

    def _parts(self, rows: Shape, shape: Shape, scale_dtype: DType) -> Iterator[Part]:
        bits, codes, zero_points = self.dtype.bits, shape, (*rows, self.blocks)
        stored = self.dtype if self.is_typed else _UINT8
        if not self.is_typed:
            codes = (*rows, self.depth * bits // 8)
            zero_points = (*rows, -(-self.blocks * bits // 8))
        if self.form is not Form.GATHER:
            codes = (*rows, self.blocks, self.block_size * bits // 8)
        yield Part(f"_Q{bits}", stored, codes)
        yield Part("_scales", scale_dtype, (*rows, self.blocks))
        yield Part("_zero_points", stored, zero_points)

    @property
    def has_gaps(self) -> bool:
        """Whether rows of codes are padded to whole blocks."""
        return self.form is not Form.GATHER and self.depth % self.block_size > 0

"""The quantized weights of an ONNX model, under the names that they had before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.layouts.onnx_dequantize import Folded, OnnxDequantized
from qtool.layouts.onnx_dequantizers import Dequantizer
from qtool.layouts.onnx_nbits_read import NBitsWeight
from qtool.layouts.stored import Stored
from qtool.packing import unpack
from qtool.spec import Blocked, PerAxis, Shape, reader_of
from qtool.tensor import Codes

Array = NDArray[Any]


@dataclass(frozen=True)
class OnnxWeight:
    """A weight whose codes a model stores.

    parts: the labels of what it is made of, codes first.
    """

    source: OnnxSource
    folded: Folded

    @property
    def parts(self) -> list[str]:
        weight = self.folded.weight
        if isinstance(weight, NBitsWeight):
            labels = [weight.codes, weight.scales, weight.zero_points]
        else:
            labels = [*weight.inputs, *(weight.scale.inputs if weight.scale else [])]
        return [label for label in labels if label]

    @property
    def nbytes(self) -> int:
        """Bytes of its parts."""
        tensors = [self.source.tensors[label] for label in self.parts]
        return sum(self._dtype(t.name, t).nbytes(math.prod(t.dims)) for t in tensors)

    @property
    def global_scale(self) -> float | None:
        """The scale of the scales, where those are quantized too."""
        weight = self.folded.weight
        if isinstance(weight, NBitsWeight) or weight.scale is None:
            return None
        over = self.source.read(weight.scale.inputs[1])
        return float(over.reshape(-1)[0]) if over.size == 1 else None

    def is_turned(self, reduced_axis: int | None) -> bool:
        """Whether the weight, which is summed over that axis, is stored the other way round."""
        return self.folded.is_factor and len(self.folded.shape) == 2 and reduced_axis == 1

    def stored(self, *, turned: bool) -> Stored:
        """What the model says of the weight; turned: as it was before it was turned round."""
        folded = self.folded
        shape, granularity = folded.shape, folded.granularity
        if turned:
            shape, granularity = shape[::-1], _turned(granularity)
        labels, weight = self.parts, folded.weight
        if isinstance(weight, Dequantizer) and weight.scale is not None:
            scale, has_zero = weight.scale.inputs[0], any(weight.inputs[2:])
        else:
            scale, has_zero = labels[1], len(labels) > 2
        tensor = self.source.tensors[scale]
        storage, dtype = self._dtype(scale, tensor), folded.dtype
        if isinstance(weight, NBitsWeight) and not (weight.is_typed or weight.zero_points):
            dtype = DTYPES[f"int{dtype.bits}"]  # as codes() gives them
        return Stored(
            dtype, shape, granularity, storage, DTYPES["float32"], has_zero,
            global_scale=self.global_scale is not None,
        )  # fmt: skip

    @contextmanager
    def codes(self, *, turned: bool) -> Iterator[Codes]:
        """The codes and their parameters. Matrices that are stored as columns are in memory."""
        weight = self.folded.weight
        if not isinstance(weight, NBitsWeight):
            with weight.codes() as codes:
                yield _arranged(codes, codes.shape[-1], turned=True) if turned else codes
            return
        with weight.reading(self.source) as codes:
            if not self.folded.is_factor:
                yield codes
                return
            depth = weight.shape[0]
            is_whole = turned and depth == weight.stored[1]
            yield codes if is_whole else _arranged(codes, depth, turned=not turned)

    def _dtype(self, label: str, tensor: Any) -> DType:
        return onnx_tensor.dtype_of(tensor, self.source.thing(label))


class OnnxWeights:
    """found: by the labels that nodes read them under. rest: the labels of all other tensors."""

    def __init__(self, source: OnnxSource) -> None:
        model = OnnxDequantized(source, DTYPES["float32"])
        self.found = {folded.read: OnnxWeight(source, folded) for folded in model.folded}
        parts = {label for weight in self.found.values() for label in weight.parts}
        self.rest = [label for label in source.tensors if label in model.rest - parts]


def _turned(granularity: Any) -> Any:
    """The granularity of a matrix, of its transpose."""
    if isinstance(granularity, Blocked | PerAxis):
        return replace(granularity, axis=1 - granularity.axis)
    return granularity


def _arranged(codes: Codes, width: int, *, turned: bool) -> Codes:
    """The first columns of a matrix of codes in memory, one in each byte; turned: transposed."""
    stored = np.empty(codes.dtype.nbytes(math.prod(codes.shape)), np.uint8)
    codes.read(0, stored)
    matrix = unpack(stored, codes.dtype, codes.shape)[:, :width]
    scale, zero, granularity = codes.scale, codes.zero_point, codes.granularity
    if turned:
        matrix, granularity = matrix.T, _turned(granularity)
        if isinstance(granularity, Blocked):
            scale = np.ascontiguousarray(scale.T)
            zero = None if zero is None else np.ascontiguousarray(zero.T)
    matrix = np.ascontiguousarray(matrix)
    shape: Shape = matrix.shape
    return Codes(
        reader_of(matrix.reshape(-1).view(np.uint8)), codes.dtype, shape, scale, zero, granularity,
        is_packed=False, global_scale=codes.global_scale,
    )  # fmt: skip

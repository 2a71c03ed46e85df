"""Quantized files read without qtool, and the codes and figures of its report once more.

Files are read with safetensors, NumPy and onnx. Figures are plain NumPy in float64 over whole
tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import safetensors
from numpy.typing import NDArray
from onnx import numpy_helper

Array = NDArray[Any]

SAFETENSORS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I64": np.int64,
    "I8": np.int8, "U8": np.uint8,
}  # fmt: skip
CODES = {
    "int8": np.int8, "int4": ml_dtypes.int4, "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
LARGEST = {"int8": 127, "int4": 7, "float8e4m3fn": 448, "float4e2m1": 6}
# The first float32 quotient that rounds beyond the largest value: that one, and half the step to
# the next one on the grid, is a tie, which goes down for float8e4m3fn and up for float4e2m1.
BEYOND = {
    "int8": np.float32(127.50000), "int4": np.float32(7.5),
    "float8e4m3fn": np.nextafter(np.float32(464), np.float32(500)), "float4e2m1": np.float32(7),
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A quantized tensor of a file, without a zero point. scale: () or as its granularity needs."""

    dtype: str
    codes: Array
    scale: Array
    axis: int
    block_size: int | None

    def dequantized(self, dtype: Any) -> Array:
        """codes * scale in that type."""
        return self.codes.astype(dtype) * self._spread(dtype)

    def recoded(self, x: Array) -> Array:
        """The codes of x with this scale, the quotient in float32."""
        largest = LARGEST[self.dtype]
        lowest = -largest - self.is_integer
        if self.is_integer:
            rounded = np.clip(np.rint(self._quotient(x)), lowest, largest).astype(np.int8)
            return rounded.astype(self.codes.dtype)
        return np.clip(self._quotient(x), lowest, largest).astype(self.codes.dtype)

    @property
    def is_integer(self) -> bool:
        return self.dtype.startswith("int")

    def rescaled(self, x: Array) -> Array:
        """The scale that puts the largest absolute value of each group on the largest code."""
        x = np.abs(x.astype(np.float64))
        if self.block_size is None:
            others = tuple(axis for axis in range(x.ndim) if axis != self.axis)
            largest = x.max(axis=others)
        else:
            starts = range(self.block_size, x.shape[self.axis], self.block_size)
            blocks = np.split(x, starts, self.axis)
            largest = np.stack([block.max(axis=self.axis) for block in blocks], self.axis)
        scale = np.where(largest == 0, 1.0, largest / LARGEST[self.dtype])
        if self.scale.dtype == ml_dtypes.float8_e8m0fnu:
            scale = 2.0 ** np.ceil(np.log2(scale))
        if self.scale.dtype == ml_dtypes.float8_e4m3fn:
            scale = np.maximum(scale, 2.0**-9)  # the smallest one
        return scale.astype(self.scale.dtype)

    def clipped(self, x: Array) -> tuple[int, int]:
        """How many values of x round beyond the lowest and the largest code."""
        quotient, beyond = self._quotient(x), BEYOND[self.dtype]
        if self.is_integer:  # ties go to the even neighbour, out of range above and in range below
            low = quotient < -beyond - 1
        else:
            low = quotient <= -beyond
        return int(low.sum()), int((quotient >= beyond).sum())

    def _quotient(self, x: Array) -> Array:
        return x.astype(np.float32) / self._spread(np.float32)

    def _spread(self, dtype: Any) -> Array:
        """The scale of every element, broadcastable."""
        scale = self.scale.astype(dtype)
        if self.block_size is not None:
            size = self.codes.shape[self.axis]
            return np.repeat(scale, self.block_size, self.axis).take(range(size), self.axis)
        shape = [1] * self.codes.ndim
        shape[self.axis] = -1
        return scale.reshape(shape)


@dataclass(frozen=True)
class Written:
    """What a file holds: tensors as stored, quantized ones by name, metadata."""

    tensors: dict[str, Array]
    weights: dict[str, Weight]
    metadata: dict[str, str]


def read(path: Path) -> Written:
    """The whole file."""
    if path.suffix == ".onnx":
        return _read_onnx(path)
    if path.suffix == ".npz":
        with np.load(path) as file:
            tensors = dict(file)
        described = tensors.pop("__qtool__", None)
        metadata = {} if described is None else {"qtool": described.tobytes().decode()}
    else:
        tensors, metadata = _read_safetensors(path)
    weights = {}
    for name, fields in json.loads(metadata.get("qtool", '{"tensors": {}}'))["tensors"].items():
        codes = _unpacked(tensors[name], fields["dtype"], fields["shape"])
        scale = tensors[f"{name}.scale"]
        weights[name] = Weight(fields["dtype"], codes, scale, fields["axis"], fields["block_size"])
    return Written(tensors, weights, metadata)


def _read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found = {
        name: np.frombuffer(info["data"], SAFETENSORS[info["dtype"]]).reshape(info["shape"])
        for name, info in safetensors.deserialize(data)
    }
    metadata = header.pop("__metadata__", {})
    return {name: found[name] for name in header}, metadata


def _read_onnx(path: Path) -> Written:
    model = onnx.load(path)
    tensors = {name: numpy_helper.to_array(t) for name, t in stored(model).items()}
    weights = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            given = {a.name: a.i for a in node.attribute}
            codes, scale = (tensors[name] for name in node.input)
            (dtype,) = (name for name, code in CODES.items() if codes.dtype == code)
            weights[node.output[0]] = Weight(
                dtype, codes, scale, given["axis"], given.get("block_size"))  # fmt: skip
    return Written(tensors, weights, {e.key: e.value for e in model.metadata_props})


def stored(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers and the values of Constant nodes of the top-level graph."""
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    return found | {node.output[0]: node.attribute[0].t for node in constants}


def _unpacked(stored: Array, dtype: str, shape: list[int]) -> Array:
    """Codes of 4 bits, two to a byte, the first one low; others as they are."""
    code = np.dtype(CODES[dtype])
    if dtype not in ("int4", "float4e2m1"):
        return stored.view(code)
    nibbles = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[: math.prod(shape)]
    if dtype == "int4":
        return ((nibbles.astype(np.int8) ^ 8) - 8).astype(code).reshape(shape)
    return nibbles.view(code).reshape(shape)


class Figures:
    """The figures of sources x, in order, each with its quantized form."""

    def __init__(self, pairs: list[tuple[Array, Weight]]) -> None:
        self._pairs = pairs

    @cached_property
    def counts(self) -> dict[str, Any]:
        """What must be equal to the last bit."""
        parts = [self._part(x, weight) for x, weight in self._pairs]
        clipped = [weight.clipped(x) for x, weight in self._pairs]
        low, high = (sum(side) for side in zip(*clipped, strict=True))
        elements = sum(x.size for x, _ in self._pairs)
        lowest, highest = (f(part[k] for part in parts)
                           for f, k in ((min, "min"), (max, "max")))  # fmt: skip
        return {
            "elements": elements, "nan_count": 0, "inf_count": 0,
            "zero_count": sum(part["zeros"] for part in parts),
            "clipped_low": low, "clipped_high": high, "clipped": low + high,
            "clipped_fraction": (low + high) / elements,
            "flushed_to_zero": sum(part["flushed"] for part in parts),
            "min": lowest, "max": highest, "absmax": max(-lowest, highest),
            "max_abs_error": max(part["largest"] for part in parts),
        }  # fmt: skip

    @cached_property
    def sums(self) -> dict[str, float]:
        """What must be equal but for the order in which float64 sums were added."""
        xx, ee, xy, yy = (math.fsum(s) for s in zip(*map(self._products, self._pairs), strict=True))
        n = sum(x.size for x, _ in self._pairs)
        return {
            "mse": ee / n, "rmse": math.sqrt(ee / n), "sqnr_db": 10 * math.log10(xx / ee),
            "cosine_similarity": xy / math.sqrt(xx) / math.sqrt(yy),
            "relative_error": math.sqrt(ee / xx),
        }  # fmt: skip

    @cached_property
    def mean_error(self) -> tuple[float, float]:
        """The mean of the errors, and that of their absolute values."""
        errors = [_error(x, weight) for x, weight in self._pairs]
        n = sum(error.size for error in errors)
        return sum(e.sum() for e in errors) / n, sum(np.abs(e).sum() for e in errors) / n

    @staticmethod
    def _part(x: Array, weight: Weight) -> dict[str, Any]:
        zero = x == 0
        return {
            "zeros": int(zero.sum()), "min": float(x.min()), "max": float(x.max()),
            "flushed": int(((weight.dequantized(np.float32) == 0) & ~zero).sum()),
            "largest": float(np.abs(_error(x, weight)).max()),
        }  # fmt: skip

    @staticmethod
    def _products(pair: tuple[Array, Weight]) -> tuple[float, float, float, float]:
        x, error = pair[0].astype(np.float64).reshape(-1), _error(*pair).reshape(-1)
        y = pair[1].dequantized(np.float32).astype(np.float64).reshape(-1)
        return float(x @ x), float(error @ error), float(x @ y), float(y @ y)


def largest_error(x: Array, weight: Weight) -> list[int]:
    """The index of the first of the largest absolute errors."""
    error = np.abs(_error(x, weight))
    return [int(i) for i in np.unravel_index(np.argmax(error), error.shape)]


def _error(x: Array, weight: Weight) -> Array:
    return weight.dequantized(np.float32).astype(np.float64) - x.astype(np.float64)

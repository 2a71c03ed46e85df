"""Quantized files read without qtool, and the codes and figures of its report once more.

Files are read with safetensors, NumPy and onnx. Figures are plain NumPy in float64 over whole
tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
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
    "int8": np.float32(127.5), "int4": np.float32(7.5),
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
        x = np.abs(x.astype(np.float32)).astype(np.float64)
        if self.block_size is None:
            others = tuple(axis for axis in range(x.ndim) if axis != self.axis)
            largest = x.max(axis=others)
        else:
            starts = range(self.block_size, x.shape[self.axis], self.block_size)
            blocks = np.split(x, starts, self.axis)
            largest = np.stack([block.max(axis=self.axis) for block in blocks], self.axis)
        scale = np.where(largest == 0, 1.0, largest / LARGEST[self.dtype])
        if self.scale.dtype == ml_dtypes.float8_e8m0fnu:
            # between 6 and 7.25, being clipped to 6 costs less than a step that is twice as wide
            assert self.dtype == "float4e2m1"
            mantissa, exponent = np.frexp(largest / 7.25)  # mantissa in [0.5, 1)
            power = 2.0 ** np.where(mantissa == 0.5, exponent - 1, exponent)
            scale = np.where(largest == 0, 1.0, power)
        if self.scale.dtype == ml_dtypes.float8_e4m3fn:
            scale = np.maximum(scale, 2.0**-9)  # the smallest one
        return scale.astype(self.scale.dtype)

    def clipped(self, x: Array) -> tuple[int, int]:
        """How many values of x round beyond the lowest and the largest code."""
        quotient, beyond = self._quotient(x), BEYOND[self.dtype]
        # a tie below the lowest integer goes up to it, the even neighbour
        low = quotient < -beyond - 1 if self.is_integer else quotient <= -beyond
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
    for node in nodes(model.graph):
        if node.op_type == "DequantizeLinear":
            given = {a.name: a.i for a in node.attribute}
            codes, scale = (tensors[name] for name in node.input)
            (dtype,) = (name for name, code in CODES.items() if codes.dtype == code)
            weights[node.output[0]] = Weight(
                dtype, codes, scale, given["axis"], given.get("block_size"))  # fmt: skip
    return Written(tensors, weights, {e.key: e.value for e in model.metadata_props})


def stored(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers and the values of Constant nodes, in nested graphs too.

    No two of a published model have the same name.
    """
    found = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in nodes(model.graph):
        found += [(node.output[0], node.attribute[0].t)] if node.op_type == "Constant" else []
        found += [(t.name, t) for graph in subgraphs(node) for t in graph.initializer]
    assert len(found) == len(dict(found))
    return dict(found)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, those of nested ones after the node that holds them."""
    for node in graph.node:
        yield node
        for nested in subgraphs(node):
            yield from nodes(nested)


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def _unpacked(stored: Array, dtype: str, shape: list[int]) -> Array:
    """Codes of 4 bits, two to a byte, the first one low; others as they are."""
    code = np.dtype(CODES[dtype])
    if dtype not in ("int4", "float4e2m1"):
        return stored.view(code)
    nibbles = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[: math.prod(shape)]
    if dtype == "int4":
        return ((nibbles.astype(np.int8) ^ 8) - 8).astype(code).reshape(shape)
    return nibbles.view(code).reshape(shape)


@dataclass(frozen=True)
class Part:
    """What the figures of one tensor are made of. sums: of x^2, e^2, x * x_hat, x_hat^2, e, |e|."""

    elements: int
    zeros: int
    clipped: tuple[int, int]
    flushed: int
    low: float
    high: float
    largest_error: float
    largest_error_index: list[int]
    sums: tuple[float, ...]


def part(x: Array, weight: Weight) -> Part:
    """The figures of a source and its quantized form."""
    exact = x.astype(np.float64).reshape(-1)
    estimate = weight.dequantized(np.float32).astype(np.float64).reshape(-1)
    error = estimate - exact
    absolute = np.abs(error)
    at = int(np.argmax(absolute))
    products = (exact @ exact, error @ error, exact @ estimate, estimate @ estimate)
    return Part(
        x.size,
        int((exact == 0).sum()),
        weight.clipped(x),
        int(((estimate == 0) & (exact != 0)).sum()),
        float(exact.min()),
        float(exact.max()),
        float(absolute[at]),
        [int(i) for i in np.unravel_index(at, x.shape)],
        (*map(float, products), float(error.sum()), float(absolute.sum())),
    )


def counts(parts: list[Part]) -> dict[str, Any]:
    """The figures of several tensors together that no order of additions can change."""
    elements = sum(p.elements for p in parts)
    low, high = (sum(p.clipped[side] for p in parts) for side in (0, 1))
    lowest, highest = min(p.low for p in parts), max(p.high for p in parts)
    return {
        "elements": elements,
        "nan_count": 0,
        "inf_count": 0,
        "zero_count": sum(p.zeros for p in parts),
        "clipped_low": low,
        "clipped_high": high,
        "clipped": low + high,
        "clipped_fraction": (low + high) / elements,
        "flushed_to_zero": sum(p.flushed for p in parts),
        "min": lowest,
        "max": highest,
        "absmax": max(abs(lowest), abs(highest)),
        "max_abs_error": max(p.largest_error for p in parts),
    }


def means(parts: list[Part]) -> tuple[dict[str, float], float, float]:
    """The figures made of sums; the mean of the errors and that of their absolute values."""
    xx, ee, xy, yy, e, absolute = map(math.fsum, zip(*(p.sums for p in parts), strict=True))
    n = sum(p.elements for p in parts)
    ratios = {
        "mse": ee / n,
        "rmse": math.sqrt(ee / n),
        "sqnr_db": 10 * math.log10(xx / ee),
        "cosine_similarity": xy / math.sqrt(xx) / math.sqrt(yy),
        "relative_error": math.sqrt(ee / xx),
    }
    return ratios, e / n, absolute / n

"""What is said of a quantized tensor in a file, and what it is made of there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType, resolve_target
from qtool.formats import Entry
from qtool.spec import (
    SCALE_DTYPES,
    Blocked,
    Granularity,
    PerAxis,
    PerTensor,
    QuantSpec,
    Shape,
    Tiled,
    describe,
    phrase,
)

Array = NDArray[Any]
# From bytes to bytes (uint8).
Recode = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantized tensor, without its values.

    granularity: its axis counted from the front. source_dtype: the tensor's type before.
    bias: whether readers have a bias in the place of the zero point; see QuantSpec.
    activations: whether readers are to quantize what it is multiplied with, while running.
    """

    dtype: DType
    shape: Shape
    granularity: Granularity
    scale_dtype: DType
    source_dtype: DType
    zero_point: bool
    global_scale: bool = False
    bias: bool = False
    activations: bool = False

    @classmethod
    def of(
        cls,
        spec: QuantSpec,
        shape: Shape,
        scale_dtype: DType,
        source: DType,
        *,
        zero_point: bool,
        activations: bool = False,
    ) -> Stored:
        """A tensor quantized as spec says."""
        return cls(
            spec.dtype, shape, spec.granularity, scale_dtype, source, zero_point,
            spec.global_scale, spec.bias, activations,
        )  # fmt: skip

    def nbytes(self, role: str) -> int:
        """Bytes of what parts of that role hold, before they are encoded."""
        if role == "codes":
            return self.dtype.nbytes(math.prod(self.shape))
        if role == "global_scale":
            return 4
        storage = self.scale_dtype if role == "scale" else self.dtype
        return storage.nbytes(math.prod(self.scale_shape))

    @property
    def scale_shape(self) -> Shape:
        """Shape of the scale and of the zero point."""
        return self.granularity.scale_shape(self.shape)

    @property
    def kind(self) -> object:
        """All that readers must know of it besides shapes; equal for weights of one kind."""
        is_float = self.scale_dtype.bits > 8  # any float type will do for the others' readers
        scale = None if is_float else self.scale_dtype
        flags = (self.zero_point, self.global_scale, self.bias, self.activations)
        return (self.dtype, self.granularity, scale, flags)

    @property
    def words(self) -> str:
        """How the tensor is quantized, for a message."""
        inputs = ", with activations quantized too" if self.activations else ""
        where = phrase(self.granularity)
        return f"{self.dtype} {where} with {self.scale_dtype} scales{inputs}"

    def described(self) -> dict[str, Any]:
        """The tensor in a plan, under the names of reports."""
        return {
            "dtype": self.dtype.name,
            **describe(self.granularity),
            "scale_dtype": self.scale_dtype.name,
            "num_scales": math.prod(self.scale_shape),
            "zero_point": self.zero_point,
        }

    def to_json(self) -> dict[str, Any]:
        """The tensor's entry in the metadata."""
        return {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            **{k: v for k, v in describe(self.granularity).items() if k != "tile" or v},
            "scale_dtype": self.scale_dtype.name,
            "source_dtype": self.source_dtype.name,
            "zero_point": self.zero_point,
            **({"global_scale": True} if self.global_scale else {}),
            **({"bias": True} if self.bias else {}),
            **({"activations": True} if self.activations else {}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Stored:
        """Raises KeyError, TypeError, ValueError for anything that to_json() cannot give."""
        shape = tuple(fields["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("shape")
        if len(shape) > 64 or math.prod(n or 1 for n in shape) >= 1 << 60:
            raise ValueError("shape is beyond NumPy's limits")
        scale_dtype = DTYPES[fields["scale_dtype"]]
        if scale_dtype not in SCALE_DTYPES:
            raise ValueError("scale_dtype")
        optional = [fields.get(key, False) for key in ("global_scale", "bias", "activations")]
        flags = [fields["zero_point"], *optional]
        if not {type(flag) for flag in flags} <= {bool}:
            raise TypeError("zero_point, global_scale, bias, activations")
        made = cls(
            resolve_target(DTYPES[fields["dtype"]]),
            shape,
            _granularity(fields).resolve(shape),
            scale_dtype,
            DTYPES[fields["source_dtype"]],
            *flags,
        )
        if made.bias and not (made.dtype.is_integer and isinstance(made.granularity, Blocked)):
            raise ValueError("bias")
        return made


def _granularity(fields: Mapping[str, Any]) -> Granularity:
    name, axis, block_size = (fields[key] for key in ("granularity", "axis", "block_size"))
    if not {type(axis), type(block_size)} <= {int, type(None)}:
        raise TypeError("axis, block_size")
    if name == Tiled.name:
        rows, columns = fields["tile"]
        if not {type(rows), type(columns)} <= {int}:
            raise TypeError("tile")
        return Tiled((rows, columns))
    if name == PerTensor.name:
        return PerTensor()
    if name == PerAxis.name:
        return PerAxis(axis)
    if name == Blocked.name:
        return Blocked(axis, block_size)
    raise ValueError(name)


def unchanged(data: Array) -> Array:
    """The same bytes."""
    return data


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors in a file that a quantized one is made of.

    role: what it holds: "codes" (packed as ONNX packs them), "scale", "zero_point" (packed like
        codes), "global_scale" (float32) or "constant".
    encode: from bytes of that to the file's; decode: back. Both take any run of bytes, unless
        `whole` says that they take all of them at once, those of the scale besides if with_scale.
    """

    entry: Entry
    role: str
    encode: Callable[..., Array] = unchanged
    decode: Callable[..., Array] = unchanged
    whole: bool = False
    with_scale: bool = False


def constant(entry: Entry, values: Sequence[int]) -> Part:
    """A part that the tensor's values have no bearing on."""
    data = np.array(values, entry.dtype.numpy).view(np.uint8)
    return Part(entry, "constant", lambda: data)


def flipped(bits: int) -> Recode:
    """Signed codes of that many bits to the unsigned ones that are 2^(bits-1) more, and back."""
    mask = np.uint8({2: 0xAA, 4: 0x88, 8: 0x80}[bits])
    return lambda data: data ^ mask


def codes_entry(name: str, dtype: DType, shape: Shape) -> Entry:
    """What codes of this shape are stored as: themselves, or packed in a uint8 vector."""
    if dtype.bits >= 8:
        return Entry(name, dtype, shape)
    return Entry(name, DTYPES["uint8"], (dtype.nbytes(math.prod(shape)),))

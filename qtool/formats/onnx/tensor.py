"""Where the values of one ONNX TensorProto are: in its fields, or in a file beside the model.

Every size is checked from numbers before anything is read or allocated.
Source: ONNX onnx.proto, TensorProto, and ONNX ExternalData.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError
from qtool.formats.onnx.external import OWN, Region, region_of
from qtool.formats.steady import State
from qtool.packing import pack
from qtool.spec import Reader, Shape, reader_of

_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}
_PIECE = 1 << 20
# NumPy's limits; no element takes more than 16 bytes.
_MAX_RANK = 64
_MAX_COUNT = (2**63 - 1) // 16

# The field that holds values without raw_data; types not listed are in int32_data.
_FIELDS = {
    "float32": "float_data",
    "complex64": "float_data",
    "float64": "double_data",
    "complex128": "double_data",
    "int64": "int64_data",
    "uint32": "uint64_data",
    "uint64": "uint64_data",
}


@dataclass(frozen=True, slots=True)
class Payload:
    """The stored bytes of a tensor: little-endian, C order, codes below 8 bits packed.

    reading: opens a Reader of them, as uint8.
    """

    nbytes: int
    reading: Callable[[], AbstractContextManager[Reader]]

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes in pieces of at most 1 MiB, in memory that the next piece overwrites."""
        buffer = np.empty(min(_PIECE, self.nbytes), np.uint8)
        with self.reading() as read:
            for start in range(0, self.nbytes, _PIECE):
                piece = buffer[: self.nbytes - start]
                read(start, piece)
                yield piece

    def array(self) -> NDArray[np.uint8]:
        """All of the bytes."""
        data = np.empty(self.nbytes, np.uint8)
        with self.reading() as read:
            read(0, data)
        return data


def dtype_of(tensor: onnx.TensorProto, thing: str) -> DType:
    """The element type. Raises FormatError for strings and unknown codes."""
    dtype = _BY_CODE.get(tensor.data_type)
    if dtype is None:
        raise FormatError(thing, f"element type {tensor.data_type} is not a type of numbers")
    return dtype


def shape_of(tensor: onnx.TensorProto, thing: str) -> Shape:
    """The dimensions. Raises FormatError where no array can have them."""
    shape = tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise FormatError(thing, f"shape {shape} has a negative size")
    # NumPy leaves zeros out when it asks whether an array is too big.
    if len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) > _MAX_COUNT:
        raise FormatError(thing, f"shape {str(shape)[:80]} is beyond what an array can have")
    return shape


def is_float(tensor: onnx.TensorProto) -> bool:
    """Whether the elements are floats."""
    dtype = _BY_CODE.get(tensor.data_type)
    return dtype is not None and dtype.kind == "float"


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values are not in the message."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def is_own(tensor: onnx.TensorProto) -> bool:
    """Whether the values are in the model's file, but were not loaded."""
    return is_external(tensor) and any(entry.value == OWN for entry in tensor.external_data)


def check(tensor: onnx.TensorProto, model: Path, thing: str) -> Region | None:
    """Raise FormatError unless the data is there and fits type and shape.

    model: the model's path, whose folder external data may not leave.
    Returns the region of an external tensor.
    """
    shape = shape_of(tensor, thing)
    count = math.prod(shape)
    if tensor.HasField("segment"):
        raise FormatError(thing, "is stored in segments", "save it whole")
    if tensor.data_type == onnx.TensorProto.STRING:
        found, needed, unit = len(tensor.string_data), count, "strings"
    elif is_external(tensor):
        return region_of(tensor, model, dtype_of(tensor, thing).nbytes(count), thing)
    elif tensor.HasField("raw_data"):
        needed = dtype_of(tensor, thing).nbytes(count)
        found, unit = len(tensor.raw_data), "bytes"
    else:
        dtype = dtype_of(tensor, thing)
        found, unit = len(_field(tensor, dtype)), "values"
        needed = _field_length(dtype, count)
    if found != needed:
        raise FormatError(thing, f"holds {found} {unit}, shape {shape} needs {needed}")
    return None


def payload(
    tensor: onnx.TensorProto, model: Path, thing: str, states: Mapping[Path, State]
) -> Payload:
    """The stored bytes of a tensor, wherever they are. Raises FormatError as check() does.

    states: those that files must be in.
    """
    region = check(tensor, model, thing)
    if region is not None:
        region = replace(region, state=states.get(region.path, region.state))
        return Payload(region.nbytes, region.reading)
    dtype = dtype_of(tensor, thing)
    return Payload(dtype.nbytes(math.prod(tensor.dims)), lambda: _inline(tensor, dtype))


def tensor_proto(name: str, dtype: DType, shape: Shape) -> onnx.TensorProto:
    """A TensorProto that has no values yet."""
    return onnx.TensorProto(name=name, data_type=dtype.code, dims=shape)


def _inline(tensor: onnx.TensorProto, dtype: DType) -> AbstractContextManager[Reader]:
    raw = tensor.raw_data if tensor.HasField("raw_data") else _from_fields(tensor, dtype)
    return nullcontext(reader_of(np.frombuffer(raw, np.uint8)))


def _field(tensor: onnx.TensorProto, dtype: DType) -> Any:
    return getattr(tensor, _FIELDS.get(dtype.name, "int32_data"))


def _field_length(dtype: DType, count: int) -> int:
    """Entries of the typed field: two per complex value, one per byte of 2- and 4-bit codes."""
    if dtype.kind == "complex":
        return 2 * count
    return dtype.nbytes(count) if dtype.bits in (2, 4) else count


def _from_fields(tensor: onnx.TensorProto, dtype: DType) -> bytes:
    """raw_data of a tensor whose values are in a typed field."""
    values = _field(tensor, dtype)
    if dtype.name in _FIELDS:
        part = {"complex64": np.float32, "complex128": np.float64}.get(dtype.name, dtype.numpy)
        return np.array(values, part).tobytes()
    words = np.array(values, np.int32)
    if dtype.bits in (2, 4):
        return words.astype(np.uint8).tobytes()
    if dtype.bits < 8:
        return pack(words.astype(np.uint8).view(dtype.numpy), dtype).tobytes()
    return words.astype(f"u{dtype.bits // 8}").tobytes()

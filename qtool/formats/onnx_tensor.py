"""Where the values of one ONNX TensorProto are: in its fields, or in a file beside the model.

Every size is checked from numbers before anything is read or allocated.
Source: ONNX onnx.proto, TensorProto, and ONNX ExternalData.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError
from qtool.packing import pack, unpack
from qtool.spec import Shape

_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}
_PIECE = 8 << 20
# NumPy's limits; no element takes more than 16 bytes.
_MAX_RANK = 64
_MAX_COUNT = (2**63 - 1) // 16
_NUMBER = re.compile(r"[0-9]{1,18}")

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
    """The stored bytes of a tensor: little-endian, C order, codes below 8 bits packed."""

    nbytes: int
    chunks: Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of an external data file, checked to be there."""

    path: Path
    offset: int
    nbytes: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces. Raises FormatError where the file has shrunk meanwhile."""
        left = self.nbytes
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                piece = file.read(min(left, _PIECE))
                if not piece:
                    raise FormatError(str(self.path), f"cut short by {left} bytes")
                left -= len(piece)
                yield piece


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


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values are in a file beside the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def check(tensor: onnx.TensorProto, folder: Path, thing: str) -> Region | None:
    """Raise FormatError unless the data is there and fits type and shape.

    folder: the model's folder, which external data may not leave.
    Returns the region of an external tensor.
    """
    shape = shape_of(tensor, thing)
    count = math.prod(shape)
    if tensor.HasField("segment"):
        raise FormatError(thing, "is stored in segments", "save it whole")
    if tensor.data_type == onnx.TensorProto.STRING:
        found, needed, unit = len(tensor.string_data), count, "strings"
    elif is_external(tensor):
        return _region(tensor, folder, dtype_of(tensor, thing).nbytes(count), thing)
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


def payload(tensor: onnx.TensorProto, folder: Path, thing: str) -> Payload:
    """The stored bytes of a tensor, wherever they are. Raises FormatError as check() does."""
    region = check(tensor, folder, thing)
    if region is not None:
        return Payload(region.nbytes, region.chunks)
    dtype = dtype_of(tensor, thing)
    return Payload(dtype.nbytes(math.prod(tensor.dims)), lambda: _inline(tensor, dtype))


def array(tensor: onnx.TensorProto, folder: Path, thing: str) -> NDArray[Any]:
    """The values, one per element, in C order. Raises FormatError as check() does."""
    stored = payload(tensor, folder, thing)
    data = np.empty(stored.nbytes, np.uint8)
    start = 0
    for piece in stored.chunks():
        data[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        start += len(piece)
    return unpack(data, dtype_of(tensor, thing), tuple(tensor.dims))


def tensor_proto(name: str, dtype: DType, shape: Shape) -> onnx.TensorProto:
    """A TensorProto that has no values yet."""
    return onnx.TensorProto(name=name, data_type=dtype.code, dims=shape)


def _inline(tensor: onnx.TensorProto, dtype: DType) -> Iterator[bytes]:
    raw = tensor.raw_data if tensor.HasField("raw_data") else _from_fields(tensor, dtype)
    for start in range(0, len(raw), _PIECE):
        yield raw[start : start + _PIECE]


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


def _region(tensor: onnx.TensorProto, folder: Path, nbytes: int, thing: str) -> Region:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(entries.get("location", ""), folder, thing)
    numbers = {}
    for key, default in (("offset", 0), ("length", nbytes)):
        text = entries.get(key, str(default))
        if _NUMBER.fullmatch(text) is None:
            raise FormatError(
                thing,
                f"external data has the {key} {text[:40]!r}",
                "it must be a number of bytes, 0 or more",
            )
        numbers[key] = int(text)
    if numbers["length"] != nbytes:
        raise FormatError(
            thing,
            f"external data of {numbers['length']} bytes",
            f"type and shape {tuple(tensor.dims)} need {nbytes}",
        )
    size = path.stat().st_size
    if numbers["offset"] + nbytes > size:
        raise FormatError(
            thing,
            f"external data at {numbers['offset']}, {nbytes} bytes long",
            f"{path.name} ends at {size}",
        )
    return Region(path, numbers["offset"], nbytes)


def _inside(location: str, folder: Path, thing: str) -> Path:
    """The regular file at location, which must be inside folder, links followed."""
    parts = PurePosixPath(location).parts
    bad = not location or "\\" in location or "\0" in location or ".." in parts
    if bad or PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive:
        raise FormatError(
            thing,
            f"external data location {location[:80]!r}",
            "it must be a plain path below the model's folder",
        )
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        regular = path.is_file()
    except (OSError, RuntimeError) as error:
        raise FormatError(thing, f"external data {location[:80]!r} cannot be reached") from error
    if not path.is_relative_to(root):
        raise FormatError(
            thing,
            f"external data {location!r} is a link that leaves the folder",
            "it must stay below the model's folder",
        )
    if not regular:
        raise FormatError(thing, f"external data {location!r} is not a file")
    return path

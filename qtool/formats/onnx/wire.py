"""A model's message without the raw_data of large tensors: cut out of a file, and put back.

Source: protobuf's wire format; onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TrainingInfoProto,
)

from qtool.errors import FormatError
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx.external import OWN, place_at

# protobuf refuses larger messages, and deeper ones.
_MAX_MODEL = 2**31 - 1
_DEEPEST = 100
# Shorter raw_data is not worth a place of its own.
_LARGE = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PLACE = (TensorProto.DATA_LOCATION_FIELD_NUMBER, TensorProto.EXTERNAL_DATA_FIELD_NUMBER)
_RAW_DATA = TensorProto.RAW_DATA_FIELD_NUMBER
# Messages through which tensors are reached; the numbers of their fields that lead on, and to what.
_MESSAGES: dict[str, type[Message]] = {
    message.DESCRIPTOR.name: message
    for message in (
        ModelProto, TrainingInfoProto, FunctionProto, GraphProto, NodeProto, AttributeProto,
        SparseTensorProto, TensorProto,
    )
}  # fmt: skip
_INNER: dict[type[Message], dict[int, type[Message]]] = {
    message: {
        field.number: _MESSAGES[field.message_type.name]
        for field in message.DESCRIPTOR.fields
        if field.message_type is not None and field.message_type.name in _MESSAGES
    }
    for message in _MESSAGES.values()
}
# Fields of one tensor, whose parts protobuf merges where the field is there twice.
_SINGLE = (
    (AttributeProto, AttributeProto.T_FIELD_NUMBER),
    (SparseTensorProto, SparseTensorProto.VALUES_FIELD_NUMBER),
    (SparseTensorProto, SparseTensorProto.INDICES_FIELD_NUMBER),
)


class _Field(NamedTuple):
    """A field of a message: its number, wire type, and where it, its value and its end are."""

    number: int
    kind: int
    begin: int
    start: int
    end: int


class Gap(NamedTuple):
    """Where the values of the tensor of that number belong."""

    number: int
    nbytes: int


def parse(path: Path) -> ModelProto:
    """A model file, without its large raw_data. Raises FormatError where it is none."""
    try:
        size = path.stat().st_size
        data = _without_values(path, size) if 0 < size <= _MAX_MODEL else b""
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
    if size > _MAX_MODEL:
        raise FormatError(
            str(path),
            f"{size} bytes are more than a model file can have",
            "keep its weights as external data",
        )
    try:
        model: ModelProto = ModelProto.FromString(data)
    except DecodeError as error:
        raise FormatError(str(path), "is not an ONNX model, or is cut short") from error
    if model.ir_version < 1 or not model.HasField("graph"):
        raise FormatError(str(path), "is not an ONNX model: it has no graph")
    # protobuf gives text that is not UTF-8 as bytes.
    if not all(isinstance(name, str) for name in onnx_graph.names_of(model)):
        raise FormatError(str(path), "is not an ONNX model: a name in it is not UTF-8")
    return model


def _without_values(path: Path, size: int) -> bytes:
    """The file without large raw_data where that can be left out, else all of it."""
    with path.open("rb") as file:
        try:
            return _skeleton(file, size)
        except ValueError:
            file.seek(0)
            return file.read()


def _skeleton(file: BinaryIO, size: int) -> bytes:
    """The message of a model of size bytes, the large raw_data of whose tensors became external
    data at OWN, the model's own file.

    Raises ValueError where that cannot be done, the file being damaged or unusual.
    """
    file.seek(0)
    return _rewritten(file, size, ModelProto)


def pieces(message: bytes) -> list[bytes | Gap]:
    """The message of a model, with gaps of that many bytes for the values of the tensors that
    place_at() put at OWN."""
    return _with_gaps(BytesIO(message), len(message), ModelProto)


def nbytes(parts: Iterable[bytes | Gap]) -> int:
    """Bytes of pieces and gaps together."""
    return sum(part.nbytes if isinstance(part, Gap) else len(part) for part in parts)


def _with_gaps(file: BytesIO, end: int, message: type[Message]) -> list[bytes | Gap]:
    """The fields of such a message up to end, in pieces where there are gaps in them."""
    found: list[bytes | Gap] = []
    for field in _fields(file, end):
        inner = _INNER[message].get(field.number)
        content = _copied(file, field)
        if inner is None or OWN.encode() not in content:
            found.append(content)
            continue
        file.seek(field.start)
        is_tensor = inner is TensorProto
        parts = (
            _tensor_with_gap(file, field.end) if is_tensor else _with_gaps(file, field.end, inner)
        )
        found += [_encoded(field.number << 3 | _BYTES) + _encoded(nbytes(parts)), *parts]
    return found


def _tensor_with_gap(file: BinaryIO, end: int) -> list[bytes | Gap]:
    start = file.tell()
    content = file.read(end - start)
    place = {e.key: e.value for e in TensorProto.FromString(content).external_data}
    file.seek(start)
    fields = [field for field in _fields(file, end) if field.number not in _PLACE]
    before = [_copied(file, field) for field in fields if field.number < _RAW_DATA]
    after = [_copied(file, field) for field in fields if field.number > _RAW_DATA]
    gap = Gap(int(place["offset"]), int(place["length"]))
    return [*before, _encoded(_RAW_DATA << 3 | _BYTES) + _encoded(gap.nbytes), gap, *after]


def _rewritten(file: BinaryIO, end: int, message: type[Message], depth: int = 1) -> bytes:
    """Such a message up to end, the large tensors in it rewritten."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    written = bytearray()
    seen: set[int] = set()
    for field in _fields(file, end):
        inner = _INNER[message].get(field.number)
        if field.number in seen and (message, field.number) in _SINGLE:
            raise ValueError("a tensor in parts")
        seen.add(field.number)
        if inner is None or field.kind != _BYTES or field.end - field.start < _LARGE:
            written += _copied(file, field)
            continue
        file.seek(field.start)
        is_tensor = inner is TensorProto
        content = (
            _tensor(file, field.end) if is_tensor else _rewritten(file, field.end, inner, depth + 1)
        )
        written += _encoded(field.number << 3 | _BYTES) + _encoded(len(content)) + content
    return bytes(written)


def _tensor(file: BinaryIO, end: int) -> bytes:
    fields = list(_fields(file, end))
    numbers = [field.number for field in fields]
    raw = [field for field in fields if field.number == _RAW_DATA]
    is_plain = len(raw) == 1 and raw[0].kind == _BYTES and raw[0].end - raw[0].start >= _LARGE
    if not is_plain or any(number in numbers for number in _PLACE):
        return b"".join(_copied(file, field) for field in fields)
    place = TensorProto()
    place_at(place, OWN, raw[0].start, raw[0].end - raw[0].start)
    kept = (_copied(file, field) for field in fields if field != raw[0])
    return b"".join([*kept, place.SerializeToString()])


def _fields(file: BinaryIO, end: int) -> Iterator[_Field]:
    """The fields from the file's position to end."""
    begin = file.tell()
    while begin < end:
        tag = _varint(file)
        length = {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 == _VARINT:
            _varint(file)
        elif tag & 7 == _BYTES:
            length = _varint(file)
        elif not length:
            raise ValueError("a group, or no field")
        start = file.tell()
        if start + length > end:
            raise ValueError("a field beyond the end of its message")
        yield _Field(tag >> 3, tag & 7, begin, start, start + length)
        begin = start + length
        file.seek(begin)


def _copied(file: BinaryIO, field: _Field) -> bytes:
    file.seek(field.begin)
    content = file.read(field.end - field.begin)
    if len(content) != field.end - field.begin:
        raise ValueError("cut short")
    return content


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise ValueError("cut short")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("a number of more than 10 bytes")


def _encoded(value: int) -> bytes:
    """A number as a varint."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

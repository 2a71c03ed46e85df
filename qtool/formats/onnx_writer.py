"""Writing ONNX models: in one file, or with the large tensors in a data file beside it.

The data file is named MODEL.HASH.data after a hash of its content, so a new one never overwrites
the one that the old model names, and lands first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from qtool.errors import OutputError
from qtool.formats import onnx_graph, onnx_tensor
from qtool.formats.files import replacing
from qtool.formats.onnx import MAX_MODEL, OnnxSource
from qtool.formats.onnx_tensor import Payload

# A model of more bytes gets a data file; protobuf itself ends at 2 GiB.
INLINE_LIMIT = 1 << 30
# Readers map the data file into memory: tensors begin at pages.
_ALIGNMENT = 4096
# Smaller tensors stay in the model, where readers need them to infer shapes.
_SMALLEST = 1024

_FIELDS = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "uint64_data",
    "double_data",
    "external_data",
    "data_location",
)

Values = tuple[onnx.TensorProto, Payload]


def write_model(
    path: Path,
    model: onnx.ModelProto,
    values: Sequence[Values],
    *,
    source: OnnxSource,
    external_data: bool,
) -> None:
    """Write model to path, whole or not at all; the same model gives the same bytes.

    model: changed in place; the external data that it names lies in the source's folder.
    values: tensors of model and the bytes that they are to hold. external_data: put the
    initializers of 1 KiB and more into a data file, as is done anyway above 1 GiB.

    Raises OutputError where a file cannot be written or would replace the source's.
    """
    values = [*values, *_external(model, source)]
    for tensor, _ in values:
        _clear(tensor)
    placed: list[Values] = []
    if external_data or _size(model, values) > INLINE_LIMIT:
        large = [*values, *_inline(model, source, values)]
        placed = [(tensor, payload) for tensor, payload in large if payload.nbytes >= _SMALLEST]
    for tensor, payload in values:
        if not placed or payload.nbytes < _SMALLEST:
            tensor.raw_data = b"".join(payload.chunks())
    old = _own_data_files(path)
    new = _data_file(path, placed)
    if new is None:
        _write_message(path, model)
    elif new.resolve() in source.external_files:
        raise OutputError(str(new), "is the source's data", "choose another name")
    else:
        existed = new.exists()
        try:
            _write_data(new, placed)
            _write_message(path, model)
        except BaseException:
            if not existed:
                new.unlink(missing_ok=True)
            raise
    for stale in old - {new}:
        if stale.resolve() not in source.external_files:
            stale.unlink(missing_ok=True)


def _external(model: onnx.ModelProto, source: OnnxSource) -> Iterator[Values]:
    """The tensors that still name data of the source."""
    for tensor in onnx_graph.tensors(model):
        if onnx_tensor.is_external(tensor):
            thing = source.thing(tensor.name)
            yield tensor, onnx_tensor.payload(tensor, source.folder, thing)


def _inline(model: onnx.ModelProto, source: OnnxSource, done: Sequence[Values]) -> Iterator[Values]:
    """The initializers, nested graphs' included, that hold their own values."""
    waiting = {id(tensor) for tensor, _ in done}
    for graph in onnx_graph.graphs(model.graph):
        for tensor in graph.initializer:
            if id(tensor) not in waiting and tensor.data_type != onnx.TensorProto.STRING:
                thing = source.thing(tensor.name)
                yield tensor, onnx_tensor.payload(tensor, source.folder, thing)


def _size(model: onnx.ModelProto, values: Sequence[Values]) -> int:
    return int(model.ByteSize()) + sum(payload.nbytes for _, payload in values)


def _clear(tensor: onnx.TensorProto) -> None:
    """Drop the values, wherever they are."""
    for field in _FIELDS:
        tensor.ClearField(field)


def _data_file(path: Path, placed: Sequence[Values]) -> Path | None:
    """The data file of the model at path, named after what it will hold; None for nothing."""
    if not placed:
        return None
    digest = hashlib.sha256()
    for piece in _stream(placed):
        digest.update(piece)
    return path.with_name(f"{path.stem}.{digest.hexdigest()[:16]}.data")


def _write_data(target: Path, placed: Sequence[Values]) -> None:
    """Write the data file and make the tensors name it."""
    with replacing(target) as temporary, temporary.open("wb") as file:
        file.writelines(_stream(placed))
    for (tensor, payload), offset in zip(placed, _offsets(placed), strict=True):
        _clear(tensor)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": target.name, "offset": offset, "length": payload.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))


def _write_message(path: Path, model: onnx.ModelProto) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))


def _offsets(placed: Sequence[Values]) -> list[int]:
    offsets, end = [], 0
    for _, payload in placed:
        offsets.append(end + -end % _ALIGNMENT)
        end = offsets[-1] + payload.nbytes
    return offsets


def _stream(placed: Sequence[Values]) -> Iterator[bytes]:
    """The content of the data file."""
    end = 0
    for (_, payload), offset in zip(placed, _offsets(placed), strict=True):
        yield bytes(offset - end)
        yield from payload.chunks()
        end = offset + payload.nbytes


def _own_data_files(path: Path) -> set[Path]:
    """The data files that the model now at path names and that have the name of one of ours."""
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.data")
    if not path.is_file() or path.stat().st_size > MAX_MODEL:
        return set()
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except (OSError, DecodeError):
        return set()
    locations = (e.value for t in onnx_graph.tensors(model) for e in t.external_data)
    return {path.with_name(name) for name in locations if pattern.fullmatch(name)}

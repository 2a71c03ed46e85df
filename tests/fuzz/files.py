"""Files for targets whose input says what is in them, and how sources are read whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from qtool import formats
from qtool.dtypes import BY_SAFETENSORS, DType
from qtool.errors import QtoolError
from qtool.jobs.inspect import inspect_file
from qtool.report import to_json
from qtool.spec import bytes_of

_LARGEST = 1 << 14  # bytes of a tensor
_VALUES = np.random.default_rng(7).integers(0, 256, _LARGEST, np.uint8).tobytes()


def document(data: bytes) -> dict[str, Any]:
    """The object that an input holds; an empty one where it holds none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def mapping(value: Any) -> dict[str, Any]:
    """An object inside of an input."""
    return value if isinstance(value, dict) else {}


def safetensors_of(tensors: Any, metadata: Mapping[str, str] | None = None) -> bytes:
    """A sound file of the tensors that an input lists as NAME: [TYPE, SHAPE], as far as they are
    small; each with the bytes that it says, [TYPE, SHAPE, HEX], or any others."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    content = b""
    for name, said in mapping(tensors).items():
        code, shape, *values = said if isinstance(said, list) and len(said) > 1 else (None, None)
        dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
        sizes = shape if isinstance(shape, list) else [-1]
        if dtype is None or not all(type(n) is int and n >= 0 for n in sizes):
            continue
        size = math.prod(sizes) * dtype.bits // 8
        if size <= _LARGEST and math.prod(sizes) * dtype.bits % 8 == 0 and name != "__metadata__":
            offsets = [len(content), len(content) + size]
            header[name] = {"dtype": code, "shape": sizes, "data_offsets": offsets}
            content += (_given(values) + _VALUES)[:size]
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
    return len(text).to_bytes(8, "little") + text + content


def _given(values: list[Any]) -> bytes:
    with suppress(ValueError, TypeError):
        return bytes.fromhex(*values[:1]) if values else b""
    return b""


def listed(file: bytes) -> dict[str, Any]:
    """What safetensors_of() makes an equal file of."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    header.pop("__metadata__", None)
    return {
        name: [said["dtype"], said["shape"], file[end:][slice(*said["data_offsets"])].hex()]
        for name, said in header.items()
    }


def read_whole(path: Path, source_dtype: DType | None = None) -> dict[str, np.ndarray]:
    """Every tensor of a file, read in all ways that there are, which must agree."""
    found = {}
    with closing(formats.open(path, source_dtype=source_dtype)) as source:
        for info in source.infos():
            values = found[info.name] = source.read(info.name)
            assert (values.shape, values.dtype) == (info.shape, info.dtype.numpy)
            assert len(b"".join(source.chunks(info.name))) >= info.dtype.nbytes(info.size)
            out = np.empty(info.size * info.dtype.numpy.itemsize, np.uint8)
            with source.reading(info.name) as read:
                bytes_of(read, info.dtype)(0, out)
            assert out.tobytes() == values.tobytes()
    return found


def inspected(path: Path) -> None:
    """What qtool says of a file, its values too, which must be strict JSON."""
    with suppress(QtoolError):
        to_json(inspect_file(path))
    to_json(inspect_file(path, stats=True))

"""qtool's own layout in .safetensors and .npz: NAME, NAME.scale, NAME.zero_point and metadata.

NAME holds the codes: in a type of the container, or, below 8 bits and for float4 and float6,
packed as ONNX packs them in a uint8 vector; so does NAME.zero_point, where there is one. The
metadata key "qtool" holds JSON:

    {"version": 1, "tensors": {NAME: {"dtype", "shape", "granularity", "axis", "block_size",
     "scale_dtype", "source_dtype"}}, "stored": {NAME: dtype of an array NumPy has no name for}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType, resolve_target
from qtool.errors import FormatError, OutputError
from qtool.formats import Entry, Source, sink
from qtool.packing import pack
from qtool.spec import (
    SCALE_DTYPES,
    Blocked,
    Granularity,
    PerAxis,
    PerTensor,
    QuantSpec,
    Shape,
)
from qtool.tensor import QuantizedTensor, Target

VERSION = 1
KEY = "qtool"

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the metadata says of one quantized tensor."""

    dtype: DType
    shape: Shape
    granularity: Granularity
    scale_dtype: DType
    source_dtype: DType

    def to_json(self) -> dict[str, Any]:
        """The tensor's entry in the metadata."""
        return {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "granularity": self.granularity.name,
            "axis": self.granularity.attributes.get("axis"),
            "block_size": self.granularity.attributes.get("block_size"),
            "scale_dtype": self.scale_dtype.name,
            "source_dtype": self.source_dtype.name,
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
        return cls(
            resolve_target(DTYPES[fields["dtype"]]),
            shape,
            _granularity(fields).resolve(shape),
            scale_dtype,
            DTYPES[fields["source_dtype"]],
        )


def part_names(name: str) -> tuple[str, str, str]:
    """Names of the codes, the scale and the zero point of a tensor."""
    return name, f"{name}.scale", f"{name}.zero_point"


def entries(
    name: str, shape: Shape, spec: QuantSpec, scale_dtype: DType, *, zero_point: bool
) -> list[Entry]:
    """What a quantized tensor of this shape is stored as."""
    codes_name, scale_name, zero_name = part_names(name)
    scale_shape = spec.granularity.scale_shape(shape)
    parts = [
        codes_entry(codes_name, spec.dtype, shape),
        Entry(scale_name, scale_dtype, scale_shape),
    ]
    if zero_point:
        parts.append(codes_entry(zero_name, spec.dtype, scale_shape))
    return parts


def encode(name: str, tensor: QuantizedTensor) -> Iterator[tuple[str, Array]]:
    """The entries' names and arrays."""
    codes_name, scale_name, zero_name = part_names(name)
    yield codes_name, _stored_codes(tensor.y, tensor.spec.dtype)
    yield scale_name, tensor.scale
    if tensor.zero_point is not None:
        yield zero_name, _stored_codes(tensor.zero_point, tensor.spec.dtype)


def metadata(tensors: Mapping[str, Stored], written: Iterable[Entry]) -> str:
    """The value of the metadata key."""
    unnamed = {e.name: e.dtype.name for e in written if e.dtype.numpy.isbuiltin != 1}
    described = {name: stored.to_json() for name, stored in tensors.items()}
    return json.dumps(
        {"version": VERSION, "tensors": described, "stored": unnamed},
        separators=(",", ":"),
        ensure_ascii=False,
    )


def read_metadata(source: Source) -> dict[str, Stored]:
    """The quantized tensors of a file by name; empty for a file that qtool did not quantize.

    Raises FormatError for metadata that is damaged or of another version.
    """
    text = source.metadata.get(KEY)
    if text is None:
        return {}
    thing = f"{source.path}: metadata {KEY!r}"
    try:
        described = json.loads(text)
        if described["version"] != VERSION:
            raise FormatError(
                thing,
                f"version {described['version']!r} of the layout",
                f"this qtool reads version {VERSION}",
            )
        tensors = described["tensors"].items()
        return {name: Stored.from_json(fields) for name, fields in tensors}
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(thing, f"cannot be read ({error!r})", "the file is damaged") from error


class Writer:
    """A file in the native layout being written: quantized tensors one by one, then the rest.

    container: "safetensors", "npz", or "npy", which holds the codes of one tensor alone.
    quantized: the entries of the tensors to come, of which `tensors` says more; copied: those that
    are taken from source as they are, `kept` says which of them are quantized already.
    Raises OutputError where names collide.
    """

    def __init__(
        self,
        container: str,
        path: Path,
        quantized: Sequence[Entry],
        copied: Sequence[Entry],
        *,
        tensors: Mapping[str, Stored],
        kept: Mapping[str, Stored],
        source: Source,
    ) -> None:
        self._source = source
        self._copied = copied
        self._codes_only = container == "npy"
        _check_names(tensors, copied)
        if self._codes_only:
            quantized = [Entry(name, t.dtype, t.shape) for name, t in tensors.items()]
            self._copied = []
        self._parts = {entry.name for entry in quantized}
        entries = [*quantized, *self._copied]
        described = {**kept, **tensors}
        carried = {k: v for k, v in source.metadata.items() if k != KEY}
        own = {KEY: metadata(described, entries)} if described else {}
        self._sink = sink(container, path, entries, carried | own)

    def __enter__(self) -> Self:
        self._sink.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sink.__exit__(kind, error, trace)

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Write the codes, scale and zero point of a tensor."""
        parts = [(name, tensor.y)] if self._codes_only else encode(name, tensor)
        for part, array in parts:
            self._sink.write(part, array)

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a tensor go that is quantized tile by tile."""
        if self._codes_only:
            with self._sink.writing(name) as codes:
                yield Target(codes, _nowhere, _nowhere, is_packed=False)
            return
        written = [part for part in part_names(name) if part in self._parts]
        with ExitStack() as stack:
            # the last one entered is left first: parts end up in the order of their names
            writers = [stack.enter_context(self._sink.writing(part)) for part in reversed(written)]
            codes, scale, *rest = reversed(writers)
            zero_point = rest[0] if rest else None
            yield Target(codes, scale, zero_point, is_packed=True)

    def copy_rest(self) -> None:
        """Write the tensors that are not quantized, byte for byte."""
        for entry in self._copied:
            # containers differ in how they pack types of less than 8 bits
            is_packed = entry.dtype.bits < 8
            read = self._source.read if is_packed else self._source.chunks
            self._sink.write(entry.name, read(entry.name))


def _nowhere(offset: int, data: Array) -> None:
    """The Writer of parts that a container has no place for."""


def _check_names(tensors: Mapping[str, Stored], copied: Iterable[Entry]) -> None:
    """Refuse w.scale beside a w that is quantized: readers could not tell them apart."""
    taken = {entry.name for entry in copied}.union(tensors)
    for name in tensors:
        for part in part_names(name)[1:]:
            if part in taken:
                raise OutputError(
                    f"tensor {part}",
                    f"its name is needed for parameters of {name}",
                    f"rename it in the source, or use --exclude '{name}'",
                )


def _granularity(fields: Mapping[str, Any]) -> Granularity:
    name, axis, block_size = (fields[key] for key in ("granularity", "axis", "block_size"))
    if not {type(axis), type(block_size)} <= {int, type(None)}:
        raise TypeError("axis, block_size")
    if name == PerTensor.name:
        return PerTensor()
    if name == PerAxis.name:
        return PerAxis(axis)
    if name == Blocked.name:
        return Blocked(axis, block_size)
    raise ValueError(name)


def codes_entry(name: str, dtype: DType, shape: Shape) -> Entry:
    """What codes of this shape are stored as: themselves, or packed in a uint8 vector."""
    if dtype.bits >= 8:
        return Entry(name, dtype, shape)
    return Entry(name, DTYPES["uint8"], (dtype.nbytes(math.prod(shape)),))


def _stored_codes(codes: Array, dtype: DType) -> Array:
    return pack(codes, dtype) if dtype.bits < 8 else codes

"""A file that qtool has quantized, read as if it were not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError
from qtool.formats import Entry, Source
from qtool.layouts.metadata import KEY, read_metadata
from qtool.layouts.stored import Part, unchanged
from qtool.packing import pack, unpack
from qtool.spec import Reader, TensorInfo, bytes_of, reader_of
from qtool.tensor import Codes, bias_of, dequantize, operator_scale

Array = NDArray[Any]


class DequantizedSource:
    """NAME of a quantized file gives (y - zero_point) * scale.

    dtype: element type of the tensors that are quantized in the file; the others are as stored.
    original: the file as it is. tensors, layout: what its metadata says.
    tolerant: leave tensors out whose parts do not fit the metadata, in place of a FormatError;
    faults: what is wrong with them.
    """

    def __init__(self, source: Source, dtype: DType, *, tolerant: bool = False) -> None:
        self.original = source
        self._dtype = dtype
        described = read_metadata(source)
        self.tensors, self.layout = dict(described.tensors), described.layout
        self._parts = {
            name: self.layout.parts(name, stored) for name, stored in self.tensors.items()
        }
        self._infos = {info.name: info for info in source.infos()}
        self.path: Path = source.path
        self.container = source.container
        self.nbytes = source.nbytes
        self.metadata: Mapping[str, str] = {k: v for k, v in source.metadata.items() if k != KEY}
        self.faults: dict[str, FormatError] = {}
        for name, parts in self._parts.items():
            try:
                self._check(parts)
            except FormatError as error:
                if not tolerant:
                    raise
                self.faults[name] = error
                del self.tensors[name]

    def infos(self) -> list[TensorInfo]:
        """The tensors before quantization, in the order of their codes in the file."""
        codes = {self._parts[name][0].entry.name: name for name in self.tensors}
        hidden = {part.entry.name for parts in self._parts.values() for part in parts}
        infos = []
        for name, info in self._infos.items():
            if name in codes:
                shape = self.tensors[codes[name]].shape
                nbytes = self._dtype.nbytes(math.prod(shape))
                infos.append(TensorInfo(codes[name], shape, self._dtype, nbytes))
            elif name not in hidden:
                infos.append(info)
        return infos

    def read(self, name: str) -> Array:
        """The tensor, dequantized in the type asked for."""
        if name not in self.tensors:
            return self.original.read(name)
        stored = self.tensors[name]
        scale, zero_point, over = self.parameters(name)
        codes = unpack(self._bytes(name, "codes"), stored.dtype, stored.shape)
        compute = self._dtype if self._dtype.bits < 64 else DTYPES["float32"]
        divisor = operator_scale(scale, over)
        bias = self._bias(name)
        values = dequantize(codes, divisor, zero_point, stored.granularity, compute, bias)
        return values.astype(self._dtype.numpy, copy=False)

    def parts(self, name: str) -> list[Entry]:
        """What a quantized tensor is stored as."""
        return [part.entry for part in self._parts[name]]

    def parameters(self, name: str) -> tuple[Array, Array | None, float | None]:
        """The scale, zero point and global scale of a quantized tensor."""
        stored = self.tensors[name]
        scale = self._bytes(name, "scale").view(stored.scale_dtype.numpy)
        zero_point = over = None
        if stored.zero_point:
            zero_point = unpack(self._bytes(name, "zero_point"), stored.dtype, stored.scale_shape)
        if stored.global_scale:
            over = float(self._bytes(name, "global_scale").view(np.float32)[0])
        return scale.reshape(stored.scale_shape), zero_point, over

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor as infos() describes it."""
        if name not in self.tensors:
            return self.original.chunks(name)
        return iter([pack(self.read(name), self._dtype).tobytes()])

    def reading(self, name: str) -> AbstractContextManager[Reader]:
        """A Reader of a tensor as infos() describes it; a dequantized one is in memory."""
        if name not in self.tensors:
            return self.original.reading(name)
        return nullcontext(reader_of(self.read(name)))

    @contextmanager
    def codes(self, name: str) -> Iterator[Codes]:
        """The codes of a quantized tensor and their parameters."""
        stored, part = self.tensors[name], self._part(name, "codes")
        scale, zero_point, over = self.parameters(name)
        with self._reading(name, part) as read:
            yield Codes(
                read, stored.dtype, stored.shape, scale, zero_point, stored.granularity,
                global_scale=over, bias=self._bias(name),
            )  # fmt: skip

    def close(self) -> None:
        self.original.close()

    @contextmanager
    def _reading(self, name: str, part: Part) -> Iterator[Reader]:
        """A Reader of the bytes of codes."""
        if part.whole:
            yield reader_of(self._bytes(name, part.role))
            return
        with self.original.reading(part.entry.name) as read:
            read_bytes = bytes_of(read, part.entry.dtype)

            def decoded(start: int, out: Array) -> None:
                read_bytes(start, out)
                out[:] = part.decode(out)

            yield read_bytes if part.decode is unchanged else decoded

    def _part(self, name: str, role: str) -> Part:
        return next(part for part in self._parts[name] if part.role == role)

    def _bias(self, name: str) -> Array | None:
        """What readers add in the place of the zero point, as float32."""
        stored = self.tensors[name]
        if not stored.bias:
            return None
        if not stored.zero_point:
            return bias_of(self.parameters(name)[0], None, stored.dtype)
        bias = self.original.read(self._part(name, "zero_point").entry.name)
        return bias.astype(np.float32)

    def _bytes(self, name: str, role: str) -> Array:
        """All that the part of that role holds."""
        part = self._part(name, role)
        stored = self.original.read(part.entry.name)
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        given = [data, self._bytes(name, "scale")] if part.with_scale else [data]
        return part.decode(*given)

    def _check(self, parts: list[Part]) -> None:
        """Refuse metadata that does not fit the tensors of the file."""
        for entry in (part.entry for part in parts):
            info = self._infos.get(entry.name)
            if info is None or (info.dtype, info.shape) != (entry.dtype, entry.shape):
                found = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                raise FormatError(
                    f"{self.path}: tensor {entry.name}",
                    found,
                    f"the metadata needs {entry.dtype} {list(entry.shape)}",
                )

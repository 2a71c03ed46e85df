"""A natively quantized file, read as if it were not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType
from qtool.errors import FormatError
from qtool.formats import Entry, Source
from qtool.layouts.native import KEY, Stored, codes_entry, part_names, read_metadata
from qtool.packing import pack, unpack
from qtool.spec import Reader, Shape, TensorInfo, bytes_of, reader_of
from qtool.tensor import Codes, dequantize

Array = NDArray[Any]


class DequantizedSource:
    """NAME of a natively quantized file gives (y - zero_point) * scale.

    dtype: element type of the tensors that are quantized in the file; the others are as stored.
    original: the file as it is. tensors: what its metadata says of the quantized ones.
    """

    def __init__(self, source: Source, dtype: DType) -> None:
        self.original = source
        self._dtype = dtype
        self.tensors = read_metadata(source)
        self._infos = {info.name: info for info in source.infos()}
        self.path: Path = source.path
        self.container = source.container
        self.nbytes = source.nbytes
        self.metadata: Mapping[str, str] = {k: v for k, v in source.metadata.items() if k != KEY}
        for name, stored in self.tensors.items():
            self._check(name, stored)

    def infos(self) -> list[TensorInfo]:
        """The tensors before quantization, in the order of their codes in the file."""
        hidden = {part for name in self.tensors for part in part_names(name)[1:]}
        infos = []
        for name, info in self._infos.items():
            stored = self.tensors.get(name)
            if stored is not None:
                size = math.prod(stored.shape)
                infos.append(TensorInfo(name, stored.shape, self._dtype, self._dtype.nbytes(size)))
            elif name not in hidden:
                infos.append(info)
        return infos

    def read(self, name: str) -> Array:
        """The tensor, dequantized in the type asked for."""
        if name not in self.tensors:
            return self.original.read(name)
        stored = self.tensors[name]
        scale, zero_point = self.parameters(name)
        codes = self._codes(name, stored.dtype, stored.shape)
        compute = self._dtype if self._dtype.bits < 64 else DTYPES["float32"]
        values = dequantize(codes, scale, zero_point, stored.granularity, compute)
        return values.astype(self._dtype.numpy, copy=False)

    def parts(self, name: str) -> list[Entry]:
        """What a quantized tensor is stored as."""
        infos = [self._infos[part] for part in part_names(name) if part in self._infos]
        return [Entry(info.name, info.dtype, info.shape) for info in infos]

    def parameters(self, name: str) -> tuple[Array, Array | None]:
        """The scale and zero point of a quantized tensor."""
        stored = self.tensors[name]
        _, scale_name, zero_name = part_names(name)
        zero_point = None
        if zero_name in self._infos:
            shape = stored.granularity.scale_shape(stored.shape)
            zero_point = self._codes(zero_name, stored.dtype, shape)
        return self.original.read(scale_name), zero_point

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
        stored = self.tensors[name]
        with self.original.reading(name) as read:
            element = self._infos[name].dtype
            yield Codes(
                bytes_of(read, element), stored.dtype, stored.shape, *self.parameters(name),
                stored.granularity,
            )  # fmt: skip

    def close(self) -> None:
        self.original.close()

    def _codes(self, name: str, dtype: DType, shape: Shape) -> Array:
        array = self.original.read(name)
        return unpack(array, dtype, shape) if dtype.bits < 8 else array

    def _check(self, name: str, stored: Stored) -> None:
        """Refuse metadata that does not fit the tensors of the file."""
        codes, scale, zero_point = part_names(name)
        scale_shape = stored.granularity.scale_shape(stored.shape)
        wanted = [
            codes_entry(codes, stored.dtype, stored.shape),
            Entry(scale, stored.scale_dtype, scale_shape),
        ]
        if zero_point in self._infos:
            wanted.append(codes_entry(zero_point, stored.dtype, scale_shape))
        for entry in wanted:
            info = self._infos.get(entry.name)
            if info is None or (info.dtype, info.shape) != (entry.dtype, entry.shape):
                found = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                raise FormatError(
                    f"{self.path}: tensor {entry.name}",
                    found,
                    f"the metadata needs {entry.dtype} {list(entry.shape)}",
                )

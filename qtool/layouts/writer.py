"""Writes a file of quantized tensors in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from qtool.errors import OutputError
from qtool.formats import Entry, Sink, Source, file_nbytes, sink
from qtool.layouts.metadata import KEY, Description
from qtool.layouts.stored import Part
from qtool.layouts.wrapper import Wrapper
from qtool.packing import pack
from qtool.spec import Writer as PartWriter
from qtool.tensor import QuantizedTensor, Target

Array = NDArray[Any]


class Writer(Wrapper[Sink]):
    """A file being written: quantized tensors one by one, then the rest.

    container: "safetensors", "npz", or "npy", which holds the codes of one tensor alone.
    quantized: the parts of the tensors to come, by name, of which `description` says more; copied:
    the entries that are taken from source as they are.
    Raises OutputError where names collide.
    """

    def __init__(
        self,
        container: str,
        path: Path,
        quantized: Mapping[str, Sequence[Part]],
        copied: Sequence[Entry],
        *,
        description: Description,
        source: Source,
    ) -> None:
        self._source = source
        self._copied = copied
        self._parts = quantized
        self._stored = description.tensors
        self._codes_only = container == "npy"
        _check_names({name: description.layout.reserved(name) for name in quantized}, copied)
        entries = [part.entry for parts in quantized.values() for part in parts] + list(copied)
        if self._codes_only:
            stored = {name: description.tensors[name] for name in quantized}
            entries = [Entry(name, t.dtype, t.shape) for name, t in stored.items()]
            self._copied = []
        carried = {k: v for k, v in source.metadata.items() if k != KEY}
        is_told = description.tensors or description.provenance
        own = {KEY: description.to_json(entries)} if is_told else {}
        self._made = (container, path, entries, carried | own)

    @property
    def nbytes(self) -> int:
        """Bytes of the file when it is complete."""
        return file_nbytes(*self._made)

    def __enter__(self) -> Self:
        self._file = sink(*self._made)
        return super().__enter__()

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Write the codes, scale and zero point of a tensor."""
        if self._codes_only:
            self._file.write(name, tensor.y)
            return
        dtype = tensor.spec.dtype
        held = {"codes": pack(tensor.y, dtype), "scale": pack(tensor.scale, tensor.scale_dtype)}
        if tensor.zero_point is not None:
            held["zero_point"] = pack(tensor.zero_point, dtype)
        if tensor.global_scale is not None:
            held["global_scale"] = np.array([tensor.global_scale], np.float32).view(np.uint8)
        for part in self._parts[name]:
            stored = _encoded(part, held).view(part.entry.dtype.numpy)
            self._file.write(part.entry.name, stored.reshape(part.entry.shape))

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where the parts of a tensor go that is quantized tile by tile."""
        if self._codes_only:
            with self._file.writing(name) as codes:
                yield Target(codes, _nowhere, _nowhere, is_packed=False)
            return
        parts = self._parts[name]
        with ExitStack() as stack:
            # the last one entered is left first: parts end up in the order of their names
            writers = [
                stack.enter_context(self._file.writing(part.entry.name)) for part in reversed(parts)
            ]
            places = list(zip(parts, reversed(writers), strict=True))
            held: dict[str, Array] = {}
            yield Target(
                self._role(name, "codes", places, held) or _nowhere,
                self._role(name, "scale", places, held) or _nowhere,
                self._role(name, "zero_point", places, held),
                is_packed=True,
                global_scale=self._role(name, "global_scale", places, held),
            )
            for part, write in places:
                if part.whole or part.role == "constant":
                    write(0, _encoded(part, held))

    def copy_rest(self) -> None:
        """Write the tensors that are not quantized, byte for byte."""
        for entry in self._copied:
            # containers differ in how they pack types of less than 8 bits
            is_packed = entry.dtype.bits < 8
            read = self._source.read if is_packed else self._source.chunks
            self._file.write(entry.name, read(entry.name))

    def _role(
        self,
        name: str,
        role: str,
        places: Sequence[tuple[Part, PartWriter]],
        held: dict[str, Array],
    ) -> PartWriter | None:
        """What takes the bytes of a role and gives them to the parts that can use them piece by
        piece; those that others need whole are held."""
        direct = [place for place in places if place[0].role == role and not place[0].whole]
        wanted = any(
            part.whole and (part.role == role or (part.with_scale and role == "scale"))
            for part, _ in places
        )
        if wanted:
            held[role] = np.empty(self._stored[name].nbytes(role), np.uint8)
        if not direct and not wanted:
            return None

        def write(offset: int, data: Array) -> None:
            data = data.view(np.uint8)
            if wanted:
                held[role][offset : offset + data.size] = data
            for part, write_part in direct:
                write_part(offset, part.encode(data))

        return write


def _encoded(part: Part, held: Mapping[str, Array]) -> Array:
    """The bytes of a part, from those of all roles."""
    if part.role == "constant":
        return part.encode()
    given = [held[part.role], held["scale"]] if part.with_scale else [held[part.role]]
    return np.ascontiguousarray(part.encode(*given))


def _nowhere(offset: int, data: Array) -> None:
    """The Writer of parts that a container has no place for."""


def _check_names(reserved: Mapping[str, Sequence[str]], copied: Iterable[Entry]) -> None:
    """Refuse w.scale beside a w that is quantized: readers could not tell them apart."""
    taken = {entry.name for entry in copied}.union(reserved)
    for name, parts in reserved.items():
        for part in parts:
            if part in taken:
                raise OutputError(
                    f"tensor {part}",
                    f"its name is needed for parameters of {name}",
                    f"rename it in the source, or use --exclude '{name}'",
                )

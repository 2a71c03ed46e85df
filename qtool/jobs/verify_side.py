"""One of the two files that `verify` compares, whatever its container and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from qtool.dtypes import DTYPES
from qtool.engine import restore_plain
from qtool.errors import FormatError
from qtool.formats import Source
from qtool.layouts import foreign
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import read_metadata
from qtool.layouts.stored import Stored
from qtool.spec import Reader, TensorInfo, reader_of, writer_of
from qtool.tensor import Codes

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.layouts.onnx_codes import OnnxWeight

FLOAT32 = DTYPES["float32"]


@dataclass(frozen=True)
class Weight:
    """A quantized tensor. nbytes: of all that it is made of. codes: opens its codes. global_scale:
    where the codes' scales are times that already."""

    stored: Stored
    nbytes: int
    codes: Callable[[], AbstractContextManager[Codes]]
    global_scale: float | None = None


@dataclass(frozen=True)
class Side:
    """A file.

    infos: of the tensors that are not quantized, by name. faults: what is wrong with quantized ones
    that cannot be read, by name. helpers: names of tensors that may have come with the quantization
    of others.
    """

    source: Source
    infos: Mapping[str, TensorInfo]
    _weights: Mapping[str, Callable[[TensorInfo | None], Weight]]
    faults: Mapping[str, str] = field(default_factory=dict)
    helpers: Collection[str] = ()

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order of the file."""
        order = {info.name: number for number, info in enumerate(self.source.infos())}
        names = [*self.infos, *self._weights, *self.faults]
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def weight(self, name: str, original: TensorInfo | None = None) -> Weight | None:
        """The quantized tensor of that name; original: what it was. None: there is none."""
        found = self._weights.get(name)
        return None if found is None else found(original)

    def info(self, name: str) -> TensorInfo:
        """A tensor as it is before quantization."""
        weight = self.weight(name)
        if weight is None:
            return self.infos[name]
        shape = weight.stored.shape
        return TensorInfo(name, shape, FLOAT32, FLOAT32.nbytes(math.prod(shape)))

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """The elements of a tensor as info() says; those of a quantized one are in memory."""
        weight = self.weight(name)
        if weight is None:
            with self.source.reading(name) as read:
                yield read
            return
        values = np.empty(weight.stored.shape, np.float32)
        with weight.codes() as codes:
            restore_plain.restore(codes, writer_of(values), FLOAT32, 1)
        yield reader_of(values)


def side_of(source: Source, others: Collection[str] = ()) -> Side:
    """A file, read as `qtool dequantize` reads it.

    others: names of tensors that need not be dequantized.
    Raises FormatError for codes that qtool cannot read: those of other tools, and of .npy files.
    """
    if source.container == "onnx":
        return _onnx(cast("OnnxSource", source))
    _check_known(source, others)
    readable = DequantizedSource(source, FLOAT32, tolerant=True)

    def weight(name: str) -> Weight:
        nbytes = sum(entry.nbytes for entry in readable.parts(name))
        return Weight(readable.tensors[name], nbytes, lambda: readable.codes(name))

    return Side(
        source,
        {info.name: info for info in readable.infos() if info.name not in readable.tensors},
        {name: lambda _, name=name: weight(name) for name in readable.tensors},  # type: ignore[misc]
        {name: str(error) for name, error in readable.faults.items()},
    )


def _check_known(source: Source, others: Collection[str]) -> None:
    """Refuse codes without a scale, and those whose arithmetic qtool does not know."""
    if read_metadata(source).tensors:
        return
    infos = source.infos()
    if source.container == "npy" and infos[0].dtype.is_target:
        raise FormatError(
            str(source.path),
            f"holds {infos[0].dtype} codes alone, without their scale",
            "give the .safetensors or .npz file that `qtool quantize` wrote with them",
        )
    parts = {k: v for k, v in foreign.recognise(infos).items() if k not in others}
    if parts:
        raise FormatError(
            str(source.path),
            f"{next(iter(parts))} is in the layout of {next(iter(parts.values()))}, which qtool "
            "does not dequantize",
            "give a file that qtool quantized, or the dequantized weights",
        )


def _onnx(source: OnnxSource) -> Side:
    from qtool.layouts.onnx_codes import OnnxWeights

    weights = OnnxWeights(source)
    rest = set(weights.rest)
    infos = {info.name: info for info in source.infos() if info.name in rest}
    helpers = {name for name, info in infos.items() if _may_be_helper(info)}

    def opened(found: OnnxWeight, original: TensorInfo | None) -> Weight:
        turned = found.is_turned(None if original is None else original.reduced_axis)
        stored = found.stored(turned=turned)
        return Weight(stored, found.nbytes, lambda: found.codes(turned=turned), found.global_scale)

    return Side(
        source,
        infos,
        {
            name: lambda info, found=found: opened(found, info)  # type: ignore[misc]
            for name, found in weights.found.items()
        },
        helpers=helpers,
    )


def _may_be_helper(info: TensorInfo) -> bool:
    """Whether a tensor may have come with a conversion of operators to another opset, which turns
    attributes into inputs."""
    is_small = info.size < 2 or (len(info.shape) == 1 and info.name.endswith("_constant"))
    return info.dtype.kind != "float" or is_small

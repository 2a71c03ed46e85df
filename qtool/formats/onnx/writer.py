"""Writing ONNX models: in one file, or with the large tensors in a data file beside it.

The data file is named MODEL.HASH.data after a hash of its content, so a new one never overwrites
the one that the old model names, and lands first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.errors import OutputError
from qtool.formats.files import locked, replacing
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx import graph as onnx_graph
from qtool.formats.onnx import tensor as onnx_tensor
from qtool.formats.onnx import wire as onnx_wire
from qtool.formats.onnx.data import HASH_DIGITS, DataFile, data_offsets, data_stem
from qtool.formats.onnx.external import OWN, place_at
from qtool.formats.onnx.leftovers import own_data_files, unused_data_files
from qtool.formats.onnx.message import MessageFile
from qtool.formats.onnx.tensor import Payload
from qtool.spec import Writer

# A model of more bytes gets a data file; protobuf itself ends at 2 GiB.
INLINE_LIMIT = 1 << 30
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

_Values = tuple[onnx.TensorProto, Payload]


class ModelWriter:
    """A model being written to path, whole or not at all; the same model gives the same bytes.

    model: changed in place; the external data that it names lies in the source's folder.
    made: initializers and tensors of Constant nodes that hold no values: writing() takes them,
    under these names.
    external_data: put them, and other initializers, into a data file where they take 1 KiB and
    more, as is done anyway above 1 GiB. force: replace a model that is there in the end.

    Raises OutputError where a file cannot be written or would replace the source's, the model
    exists although force is False, or values have not been stored. Leaving it completes the model.
    """

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        made: Mapping[str, onnx.TensorProto],
        *,
        source: OnnxSource,
        external_data: bool,
        force: bool,
    ) -> None:
        # The data lands beside the model, not beside a link to it.
        self._path = path = path.resolve() if path.is_symlink() else path
        self._model = model
        self._source = source
        self._force = force
        self._missing = dict(made)
        self._data_path = path.with_name(f"{data_stem(path)}.data")  # until its content is known
        inside = _inside(model, source, made.values())
        unloaded = _unloaded(model, source)
        homes = {id(tensor) for tensor in onnx_graph.homes(model)}
        movable = [v for v in unloaded if not onnx_tensor.is_own(v[0]) or id(v[0]) in homes]
        for tensor, _ in unloaded:
            _clear(tensor)
        nbytes = sum(map(_nbytes, made.values())) + sum(payload.nbytes for _, payload in unloaded)
        self._placed: dict[str, onnx.TensorProto] = {}
        self._copied: list[_Values] = []
        if external_data or int(model.ByteSize()) + nbytes > INLINE_LIMIT:
            self._placed = {name: t for name, t in made.items() if _nbytes(t) >= _SMALLEST}
            self._copied = [v for v in (*movable, *inside) if v[1].nbytes >= _SMALLEST]
        self._has_data = bool(self._placed or self._copied)
        if not self._has_data:
            self._placed, self._copied = dict(made), unloaded
        copied = {id(tensor) for tensor, _ in self._copied}
        for tensor, payload in unloaded:
            if id(tensor) not in copied:
                tensor.raw_data = payload.array().tobytes()
        for name in set(made) - set(self._placed):
            made[name].raw_data = bytes(_nbytes(made[name]))  # so that the size is known
        self._sizes = [_nbytes(tensor) for tensor in self._placed.values()]
        self._sizes += [payload.nbytes for _, payload in self._copied]

    def __enter__(self) -> Self:
        self._numbers = {name: number for number, name in enumerate(self._placed)}
        self._file: DataFile | MessageFile
        with ExitStack() as stack:
            temporary = stack.enter_context(replacing(self._path, force=self._force))
            if self._has_data:
                stack.enter_context(self._writing_model(temporary))
                landing = replacing(self._data_path, lambda: self._data_path)
                self._file = DataFile(stack.enter_context(landing), self._sizes)
            else:
                self._place(OWN, range(len(self._sizes)))
                self._file = MessageFile(temporary, self._model)
            stack.enter_context(self._file)
            self._open = stack.pop_all()
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the model and its data file when they are complete."""
        if not self._has_data:
            self._place(OWN, range(len(self._sizes)))
            message = self._model.SerializeToString(deterministic=True)
            return onnx_wire.nbytes(onnx_wire.pieces(message))
        offsets, end = data_offsets(self._sizes)
        self._place(f"{data_stem(self._path)}.{'0' * HASH_DIGITS}.data", offsets)
        return end + int(self._model.ByteSize())

    @contextmanager
    def writing(self, name: str) -> Iterator[Writer]:
        """A Writer of the values of a tensor, packed as ONNX packs them; all of them have
        been stored when it is left."""
        if name not in self._missing:
            raise OutputError(str(self._path), f"{name!r} needs no values or has been written")
        if name in self._numbers:
            with self._file.writing(self._numbers[name]) as write:
                yield write
        else:
            with _writing_inline(self._missing[name]) as write:
                yield write
        del self._missing[name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)
            return
        with ExitStack() as landing, self._open:
            self._complete()
            landing.enter_context(self._landing())

    @contextmanager
    def _landing(self) -> Iterator[None]:
        """While the data and the model land no other run does that in their folder, so that data
        which no model names is of no use afterwards; also where the model has failed to land."""
        with locked(self._path.parent):
            old = own_data_files(self._path) | {self._data_path}
            try:
                yield
            finally:
                for stale in unused_data_files(self._path, old):
                    if stale.resolve() not in self._source.external_files:
                        stale.unlink(missing_ok=True)

    @contextmanager
    def _writing_model(self, temporary: Path) -> Iterator[None]:
        """Write the model once its data has landed."""
        yield
        temporary.write_bytes(self._model.SerializeToString(deterministic=True))

    def _complete(self) -> None:
        """Copy what is not made anew, and find the name of a data file."""
        if self._missing:
            raise OutputError(str(self._path), f"not written: {sorted(self._missing)}")
        for number, (_, payload) in enumerate(self._copied, len(self._placed)):
            with self._file.writing(number) as write:
                start = 0
                for piece in payload.pieces():
                    write(start, piece)
                    start += piece.size
        if isinstance(self._file, DataFile):
            name = f"{data_stem(self._path)}.{self._file.content_hash()}.data"
            self._data_path = self._path.with_name(name)
            if self._data_path.resolve() in self._source.external_files:
                raise OutputError(
                    str(self._data_path), "is the source's data", "choose another name"
                )
            self._place(name, self._file.offsets)

    def _place(self, location: str, offsets: Sequence[int]) -> None:
        """Let the tensors whose values are in the file name their places in it."""
        tensors = [*self._placed.values(), *(tensor for tensor, _ in self._copied)]
        for tensor, offset in zip(tensors, offsets, strict=True):
            _clear(tensor)
            place_at(tensor, location, offset, _nbytes(tensor))


@contextmanager
def _writing_inline(tensor: onnx.TensorProto) -> Iterator[Writer]:
    """A Writer of the values of a tensor that stay in the model."""
    values = np.zeros(_nbytes(tensor), np.uint8)
    stored: list[int] = []

    def write(offset: int, data: NDArray[Any]) -> None:
        values[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)
        stored.append(data.nbytes)

    yield write
    if sum(stored) != values.size:
        raise OutputError(
            f"tensor {tensor.name}", f"{sum(stored)} bytes of {values.size} were written"
        )
    tensor.raw_data = values.tobytes()


def _unloaded(model: onnx.ModelProto, source: OnnxSource) -> list[_Values]:
    """The tensors whose values are in other files, or in the source's and were not loaded."""
    return [
        (tensor, source.payload(tensor))
        for tensor in onnx_graph.tensors(model)
        if onnx_tensor.is_external(tensor)
    ]


def _inside(
    model: onnx.ModelProto, source: OnnxSource, made: Iterable[onnx.TensorProto]
) -> list[_Values]:
    """The initializers, nested graphs' included, whose values are in the message."""
    without = {id(tensor) for tensor in made}
    return [
        (tensor, source.payload(tensor))
        for graph in onnx_graph.graphs(model.graph)
        for tensor in graph.initializer
        if id(tensor) not in without
        and tensor.data_type != onnx.TensorProto.STRING
        and not onnx_tensor.is_external(tensor)
    ]


def _nbytes(tensor: onnx.TensorProto) -> int:
    return onnx_tensor.dtype_of(tensor, tensor.name).nbytes(math.prod(tensor.dims))


def _clear(tensor: onnx.TensorProto) -> None:
    """Drop the values, wherever they are."""
    for field in _FIELDS:
        tensor.ClearField(field)

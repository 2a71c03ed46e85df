"""The file of an ONNX model that holds all values itself, written in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx import ModelProto

from qtool.formats import write_at, writing_file
from qtool.formats.onnx import wire as onnx_wire
from qtool.spec import Writer


class MessageFile:
    """A model being written to path, in place: its message, then values at their places in it.

    model: its initializers whose values come through writing() are placed at OWN, their number
    as the offset.
    """

    def __init__(self, path: Path, model: ModelProto) -> None:
        self._path = path
        self._model = model
        self._gaps: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> MessageFile:
        self._file = self._path.open("r+b", buffering=0)
        try:
            self._write_message()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @contextmanager
    def writing(self, number: int) -> Iterator[Writer]:
        """A Writer of the values of one tensor; errors as formats.writing_file()."""
        begin, size = self._gaps[number]
        with writing_file(self._file.fileno(), begin, size, str(self._path)) as write:
            yield write

    def _write_message(self) -> None:
        position = 0
        for piece in onnx_wire.pieces(self._model.SerializeToString(deterministic=True)):
            if isinstance(piece, onnx_wire.Gap):
                self._gaps[piece.number] = (position, piece.nbytes)
                position += piece.nbytes
            else:
                write_at(self._file.fileno(), position, memoryview(piece))
                position += len(piece)

"""Where an ONNX model keeps the values of tensors outside of itself.

Source: ONNX ExternalData.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats import steady
from qtool.formats.steady import State
from qtool.spec import Reader

# The location that stands for the model's own file; no model can name it.
OWN = f"\0{os.urandom(16).hex()}"
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of an external data file, or of the model's own, checked to be there."""

    path: Path
    offset: int
    nbytes: int
    is_own: bool
    state: State

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A Reader of the bytes, as uint8; the file is open meanwhile.

        Raises FormatError where the file cannot be read, or was changed.
        """
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise FormatError(str(self.path), f"cannot be read: {error.strerror}") from error
        with file:

            def read(start: int, out: NDArray[Any]) -> None:
                view, position = out.view(np.uint8).data, self.offset + start
                steady.read_into(file.fileno(), view, position, self.path, self.state)

            yield read


def place_at(tensor: onnx.TensorProto, location: str, offset: int, nbytes: int) -> None:
    """Let a tensor that holds no values name those at an offset of location."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def region_of(tensor: onnx.TensorProto, model: Path, nbytes: int, thing: str) -> Region:
    """Where the values of a tensor of the model at that path are, which take nbytes.

    Raises FormatError where they are not there, or out of bounds.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    # protobuf gives text that is not UTF-8 as bytes.
    if not all(isinstance(text, str) for entry in entries.items() for text in entry):
        raise FormatError(thing, "external data is described by text that is not UTF-8")
    location = entries.get("location", "")
    path = model if location == OWN else _inside(location, model.parent, thing)
    numbers = {}
    for key, default in (("offset", 0), ("length", nbytes)):
        text = entries.get(key, str(default))
        if _NUMBER.fullmatch(text) is None:
            raise FormatError(
                thing,
                f"external data has the {key} {text[:40]!r}",
                "it must be a number of bytes, 0 or more",
            )
        numbers[key] = int(text)
    if numbers["length"] != nbytes and location == OWN:
        shape = tuple(tensor.dims)
        raise FormatError(thing, f"holds {numbers['length']} bytes, shape {shape} needs {nbytes}")
    if numbers["length"] != nbytes:
        raise FormatError(
            thing,
            f"external data of {numbers['length']} bytes",
            f"type and shape {tuple(tensor.dims)} need {nbytes}",
        )
    state = steady.state_of(path)
    size = state[2]
    if numbers["offset"] + nbytes > size:
        raise FormatError(
            thing,
            f"external data at {numbers['offset']}, {nbytes} bytes long",
            f"{path.name} ends at {size}",
        )
    return Region(path, numbers["offset"], nbytes, location == OWN, state)


def _inside(location: str, folder: Path, thing: str) -> Path:
    """The regular file at location, which must be inside folder, links followed."""
    parts = PurePosixPath(location).parts
    bad = not location or "\\" in location or "\0" in location or ".." in parts
    if bad or PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive:
        raise FormatError(
            thing,
            f"external data location {location[:80]!r}",
            "it must be a plain path below the model's folder",
        )
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        regular = path.is_file()
    except (OSError, RuntimeError) as error:
        raise FormatError(thing, f"external data {location[:80]!r} cannot be reached") from error
    if not path.is_relative_to(root):
        raise FormatError(
            thing,
            f"external data {location!r} is a link that leaves the folder",
            "it must stay below the model's folder",
        )
    if not regular:
        raise FormatError(thing, f"external data {location!r} is not a file")
    return path

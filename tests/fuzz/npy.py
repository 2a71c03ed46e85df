"""One array in a .npy file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np

from fuzz.files import inspected, read_whole
from fuzz.mutate import of_bytes
from qtool.dtypes import DTYPES
from qtool.errors import QtoolError

JUSTIFIED = 32
_WORDS = (
    b"'descr'", b"'shape'", b"'fortran_order'", b"(", b")", b",", b"True", b"'|O'", b"'>f4'",
    b"'<V1'", b"'<M8[s]'", b"(2, 3)", b"(0, 4611686018427387904)", b"L", b"\x93NUMPY\x03\x00",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = [
        values, values.T, values[:0], values[0, 0], values.astype(">f8"), values > 3,
        values.astype(np.complex64), values.astype(ml_dtypes.bfloat16), values.astype(np.int8),
    ]  # fmt: skip
    for array in arrays:
        yield file(np.asarray(array))
    stream = BytesIO()
    np.lib.format.write_array(stream, values, (2, 0))
    yield stream.getvalue()


def file(array: np.ndarray) -> bytes:
    stream = BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng, _WORDS)


def run(data: bytes, folder: Path) -> None:
    path = folder / "a.npy"
    path.write_bytes(data)
    with suppress(QtoolError):
        read_whole(path, DTYPES["bfloat16"])
    found = read_whole(path)
    with suppress(ValueError, TypeError, SyntaxError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.load(path, allow_pickle=False)
        expected = expected.astype(expected.dtype.newbyteorder("<"))
        assert found["a"].shape == expected.shape
        assert found["a"].tobytes() == np.ascontiguousarray(expected).tobytes()
    inspected(path)

"""The header of .npy data: NumPy's magic, version and a dict in plain text."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from io import BytesIO
from typing import IO

from numpy.lib import format as numpy_format

from qtool.dtypes import DTYPES, DType, names
from qtool.errors import FormatError
from qtool.spec import Shape, TensorInfo

MAGIC = b"\x93NUMPY"

_LENGTH_BYTES: dict[tuple[int, ...], int] = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_HEADER_LIMIT = 10_000  # NumPy's own limit
_RANK_LIMIT = 64  # NumPy's own limit

# The header is a Python dict literal with exactly these keys. Parsing the few forms that NumPy
# writes, instead of evaluating a literal, leaves nothing to exploit and nothing to warn about.
_ITEM = re.compile(
    r"""[ ]*(['"])(descr|fortran_order|shape)\1[ ]*:[ ]*"""
    r"""(True|False|'[^'\\]*'|"[^"\\]*"|\[.*\]|\([^()]*\))[ ]*(?:,|$)""",
    re.DOTALL,
)
_DIMENSION = re.compile(r"0|[1-9][0-9]{0,18}")
_PYTHON2_LONG = re.compile(r"(?<=[0-9])L(?=[,)])")
_TYPE = re.compile(r"([<>|=]?)([A-Za-z])([0-9]{0,9}(?:\[[A-Za-z0-9]+\])?)")

# "<f4" without its byte order -> type. Among the raw types that ml_dtypes adds only float8e5m2
# has a name of its own, "f1"; all others are saved as "V1" or "V2".
_BY_DESCR = {d.numpy.str[1:]: d for d in DTYPES.values() if d.numpy.kind != "V"}
_REFUSED = {
    "O": "Python objects, which are never unpickled",
    "S": "text",
    "U": "text",
    "M": "dates",
    "m": "time spans",
}


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """What the header of a .npy file says, and how many bytes come before the data."""

    dtype: DType
    shape: Shape
    fortran_order: bool
    big_endian: bool
    data_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of data that follow the header, one value per element."""
        return math.prod(self.shape) * self.dtype.numpy.itemsize

    def info(self, name: str) -> TensorInfo:
        """The array as a tensor called `name`."""
        return TensorInfo(name, self.shape, self.dtype, self.nbytes)


def read_header(stream: IO[bytes], size: int, thing: str, raw_dtype: DType | None) -> ArrayHeader:
    """The header of the .npy file of `size` bytes that starts at the stream's position.

    raw_dtype: what raw void elements are; others say it themselves.
    Raises FormatError, naming `thing`, for what is not an array of numbers of that size. The
    stream is left at the data. Source: numpy.lib.format, versions 1.0, 2.0 and 3.0.
    """
    text, data_offset = _header_text(stream, thing)
    fields = _fields(text, thing)
    dtype, big_endian = _element_type(fields["descr"], raw_dtype, thing)
    header = ArrayHeader(
        dtype,
        _shape(fields["shape"], dtype, thing),
        fields["fortran_order"] == "True",
        big_endian,
        data_offset,
    )
    _check_size(header, size - data_offset, thing)
    return header


def _header_text(stream: IO[bytes], thing: str) -> tuple[str, int]:
    """The dict of the header as text, and the number of bytes up to its end."""
    start = stream.read(len(MAGIC) + 2)
    if start[: len(MAGIC)] != MAGIC:
        raise FormatError(thing, f"is not a .npy file: {_guess(start)}")
    version = tuple(start[len(MAGIC) :])
    if len(version) == 2 and version not in _LENGTH_BYTES:
        raise FormatError(
            thing, f"unknown .npy version {version[0]}.{version[1]}", "use 1.0, 2.0 or 3.0"
        )
    wanted = _LENGTH_BYTES.get(version, 2)
    length_bytes = stream.read(wanted)
    length = int.from_bytes(length_bytes, "little")
    if length > _HEADER_LIMIT:
        raise FormatError(
            thing, f"its header takes {length} bytes", f"{_HEADER_LIMIT} are the limit"
        )
    raw = stream.read(length)
    if len(length_bytes) != wanted or len(raw) != length:
        raise FormatError(thing, "cut short within its header")
    text = raw.decode("latin-1")
    if version < (3, 0):
        text = _PYTHON2_LONG.sub("", text)
    return text, len(start) + len(length_bytes) + length


def _guess(start: bytes) -> str:
    if not start:
        return "it is empty"
    if start[:2] == b"PK":
        return "it is a zip archive, as .npz files are"
    if start[0] == 0x80:
        return "it is a pickle, which is never loaded"
    return f"it starts with {start.hex(' ')}, not with {MAGIC.hex(' ')}"


def _fields(text: str, thing: str) -> dict[str, str]:
    """The three entries of the header as written, e.g. {"descr": "'<f4'", ...}."""
    fields: dict[str, str] = {}
    body = text.removesuffix("\n").rstrip(" ")
    items = body[1:-1].rstrip(" ")
    position = 0 if body.startswith("{") and body.endswith("}") else len(items)
    while position < len(items):
        match = _ITEM.match(items, position)
        if match is None or match[2] in fields:
            break
        fields[match[2]] = match[3]
        position = match.end()
    if (
        position < len(items)
        or len(fields) != 3
        or fields["fortran_order"] not in ("True", "False")
    ):
        raise FormatError(
            thing,
            "malformed .npy header",
            "it must give descr, fortran_order and shape, in plain literals",
        )
    return fields


def _shape(text: str, dtype: DType, thing: str) -> Shape:
    parts = [part.strip(" ") for part in text[1:-1].split(",")]
    is_tuple = text[0] == "(" and (len(parts) > 1 or parts == [""])
    if parts[-1] == "":
        parts.pop()
    if not (is_tuple and all(map(_DIMENSION.fullmatch, parts))):
        raise FormatError(
            thing, f"its shape reads {text[:80]!r}", "a shape is a tuple of sizes, each 0 or more"
        )
    shape = tuple(map(int, parts))
    # NumPy leaves zeros out when it asks whether an array is too big.
    nbytes = math.prod(n for n in shape if n) * dtype.numpy.itemsize
    if len(shape) > _RANK_LIMIT or nbytes > sys.maxsize:
        raise FormatError(thing, f"its shape {text[:80]} is beyond what an array can have")
    return shape


def _element_type(text: str, raw_dtype: DType | None, thing: str) -> tuple[DType, bool]:
    """The type that a descr means, and whether its bytes are big-endian."""
    if text[0] == "[":
        raise FormatError(thing, "holds records of several fields", "save one plain array")
    match = _TYPE.fullmatch(text[1:-1])
    order, kind, size = match.groups() if match else ("", "", "")
    if kind == "V" and size.isdigit():
        return _raw_type(int(size), raw_dtype, thing), order == ">"
    dtype = _BY_DESCR.get(kind + size)
    if dtype is None:
        what = _REFUSED.get(kind, f"elements of the unknown type {text[1:-1][:80]!r}")
        raise FormatError(thing, f"holds {what}", "save an array of numbers")
    return dtype, order == ">"


def _raw_type(itemsize: int, raw_dtype: DType | None, thing: str) -> DType:
    if raw_dtype is not None and raw_dtype.numpy.itemsize == itemsize:
        return raw_dtype
    fitting = [d for d in DTYPES.values() if d.numpy.itemsize == itemsize]
    rule = f"holds raw elements of {itemsize} byte" + "s" * (itemsize != 1)
    if not fitting:
        raise FormatError(thing, rule, "no element type has that size")
    if raw_dtype is not None:
        rule += f", {raw_dtype} takes {raw_dtype.numpy.itemsize}"
    remedy = f"say what they are with --source-dtype: {names(fitting)}, or save them as float32"
    raise FormatError(thing, rule, remedy)


def _check_size(header: ArrayHeader, available: int, thing: str) -> None:
    if available == header.nbytes:
        return
    what = f"shape {header.shape} of {header.dtype} takes {header.nbytes} bytes, {available} follow"
    # np.load ignores what comes later, so that several arrays can share one stream. A tool that
    # did so would drop all but the first without a word.
    raise FormatError(thing, ("cut short: " if available < header.nbytes else "too long: ") + what)


def header_bytes(dtype: DType, shape: Shape) -> bytes:
    """The header that np.save writes in front of the C-order data of such an array.

    Types that only ml_dtypes knows are raw elements, "<V1" or "<V2", as np.save writes them. So
    is float8e5m2 here, for which np.save writes "<f1", a type that np.load does not know.
    """
    descr = "<V1" if dtype.numpy.str == "<f1" else dtype.numpy.str
    buffer = BytesIO()
    numpy_format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()

"""The header of a safetensors file: read with every check of the format, written in its order.

{"__metadata__": {name: text, ...}, name: {"dtype": ..., "shape": [...], "data_offsets": [begin,
end]}, ...}, offsets counted from the first byte of the data, which the tensors fill without gaps.
Source: safetensors 0.8, section Format of its README, and tensor.rs. Where the two differ the
README decides: keys may not repeat and the first byte is "{".
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from qtool.dtypes import BY_SAFETENSORS, DType
from qtool.errors import FormatError, OutputError, unreadable
from qtool.formats import Entry
from qtool.spec import TensorInfo

METADATA = "__metadata__"
MAX_HEADER = 100_000_000

_U64_MAX = 2**64 - 1

# The reference writer sorts tensors by this list, last type first, then by name.
_ORDER = (
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
)


def parse(
    header: bytes, size: int, thing: str
) -> tuple[dict[str, str], dict[str, tuple[TensorInfo, int]]]:
    """The metadata, and each tensor with its first byte in the data, which has `size` bytes.

    Raises FormatError about `thing` where the header breaks a rule.
    """
    document = _load(header, thing)
    metadata = document.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(thing, f"its {METADATA} is not an object of strings")
    tensors = {
        name: _tensor(name, entry, f"{thing}: tensor {name!r}") for name, entry in document.items()
    }
    _check_places(tensors, size, thing)
    return metadata, tensors


def layout(
    entries: Sequence[Entry], metadata: Mapping[str, str], thing: str
) -> tuple[bytes, dict[str, tuple[Entry, int]]]:
    """The file's bytes up to the data, and each entry with its first byte in the file.

    Tensors are ordered, and the header is spelled, as the reference writer does; metadata, which
    it writes in random order, is sorted.

    Raises OutputError about `thing` where the format cannot hold an entry.
    """
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    ordered = sorted(entries, key=lambda entry: _rank(entry, thing))
    begin = 0
    begins = []
    for entry in ordered:
        if entry.name == METADATA or entry.name in header:
            raise OutputError(
                f"{thing}: tensor {entry.name!r}",
                "its name is taken",
                "names must differ from each other and from " + METADATA,
            )
        end = begin + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype.safetensors,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begins.append(begin)
        begin = end
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise OutputError(thing, "a name or metadata is not valid Unicode") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise OutputError(
            thing, f"its header would take {len(text)} bytes", f"the format allows {MAX_HEADER}"
        )
    start = 8 + len(text)
    places = {e.name: (e, start + b) for e, b in zip(ordered, begins, strict=True)}
    return len(text).to_bytes(8, "little") + text, places


def _load(header: bytes, thing: str) -> dict[str, Any]:
    """The header's JSON object, with nothing in it that JSON does not allow."""
    try:
        text = header.decode()
        if not text.startswith("{"):
            raise ValueError("it does not start with '{'")
        document: dict[str, Any] = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse,
        )
        if "\\u" in text:  # such an escape may spell half a character, which UTF-8 cannot
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(thing, f"its header is not valid: {unreadable(error)}") from error
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} appears twice")
    return unique


def _integer(text: str) -> int | float:
    """An integer of at most 20 digits, which hold every u64; a float for anything else."""
    return int(text) if len(text) <= 20 and text != "-0" else _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _check_places(tensors: Mapping[str, tuple[TensorInfo, int]], size: int, thing: str) -> None:
    """Refuse tensors that do not fill `size` bytes one after another."""
    position = 0
    for info, begin in sorted(tensors.values(), key=lambda t: (t[1], t[0].nbytes)):
        if begin != position:
            raise FormatError(
                f"{thing}: tensor {info.name!r}",
                f"its data begins at byte {begin}",
                f"the tensors before it end at {position}",
            )
        position += info.nbytes
    if position != size:
        raise FormatError(thing, f"its tensors take {position} bytes", f"it holds {size}")


def _tensor(name: str, entry: Any, thing: str) -> tuple[TensorInfo, int]:
    """One entry of a header: the tensor and its first byte in the data."""
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or not all(key in entry for key in keys):
        raise FormatError(
            thing, "its entry in the header is incomplete", "it needs " + ", ".join(keys)
        )
    code, shape, offsets = (entry[key] for key in keys)
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(
            thing, f"{reprlib.repr(code)} is no safetensors type", f"use {' '.join(_ORDER)}"
        )
    text = f"shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}"
    if not _are_u64(shape) or not _are_u64(offsets) or len(offsets) != 2:
        raise FormatError(
            thing, text, "use lists of non-negative integers, two of them for the offsets"
        )
    bits, (begin, end) = _bits(shape, dtype, thing), offsets
    if bits != (end - begin) * 8:
        raise FormatError(
            thing,
            f"{dtype}, {text}",
            f"the shape takes {bits} bits, the offsets hold {(end - begin) * 8}",
        )
    return TensorInfo(name, tuple(shape), dtype, end - begin), begin


def _are_u64(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _U64_MAX for v in values
    )


def _bits(shape: Sequence[int], dtype: DType, thing: str) -> int:
    """Size of a tensor in bits, refused where the reference's 64-bit product overflows."""
    bits = 1
    for factor in (*shape, dtype.bits):
        bits *= factor
        if bits > _U64_MAX:
            raise FormatError(thing, f"shape {reprlib.repr(shape)} of {dtype} is beyond 2^64 bits")
    return bits


def _rank(entry: Entry, thing: str) -> tuple[int, str]:
    """Where the reference writer puts an entry, checked to be one that it could write."""
    dtype = entry.dtype
    where = f"{thing}: tensor {entry.name!r}"
    if dtype.safetensors is None:
        raise OutputError(where, f"safetensors has no {dtype}", f"use {' '.join(_ORDER)}")
    if math.prod(entry.shape) * dtype.bits % 8:
        raise OutputError(
            where,
            f"{dtype} of shape {entry.shape} ends within a byte",
            "safetensors stores whole bytes",
        )
    return -_ORDER.index(dtype.safetensors), entry.name

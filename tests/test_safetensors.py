"""safetensors files against the reference implementation: what is accepted, and every byte."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qtool.dtypes import BY_SAFETENSORS, DTYPES
from qtool.errors import FormatError, OutputError, QtoolError
from qtool.formats import Entry
from qtool.formats.safetensors import SafetensorsSink, SafetensorsSource

deserialize: Any = safetensors.deserialize

U8_2 = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
MIB_8 = 8 * 1024 * 1024


def container(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


def one(dtype: str, shape: str, offsets: str, more: str = "") -> str:
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


def opened(path: Path, content: bytes) -> closing[SafetensorsSource]:
    path.write_bytes(content)
    return closing(SafetensorsSource(path))


def described(path: Path, content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What we read, in the form of safetensors.deserialize, names sorted."""
    with opened(path, content) as source:
        return sorted(
            (
                i.name,
                {
                    "dtype": i.dtype.safetensors,
                    "shape": list(i.shape),
                    "data": b"".join(source.chunks(i.name)),
                },
            )
            for i in source.infos()
        )


def reference(content: bytes) -> list[tuple[str, dict[str, Any]]] | None:
    """What safetensors.deserialize gives, names sorted; None where it refuses."""
    try:
        found = deserialize(content)
    except safetensors.SafetensorError:
        return None
    return sorted((name, dict(t) | {"data": bytes(t["data"])}) for name, t in found)


# ---------------------------------------------------------------- reading: what is refused

MALFORMED = [
    pytest.param(b"", "0 bytes", id="empty file"),
    pytest.param(b"\x02\0\0\0\0\0\0", "7 bytes", id="shorter than the length field"),
    pytest.param(b"\xff" * 8 + b"{}", "18446744073709551615", id="length is the largest u64"),
    pytest.param(b"\x03\0\0\0\0\0\0\0{}", "a header of 3 bytes", id="length one past the end"),
    pytest.param(b"\0\0\0\0\0\0\0\0", "start with", id="no header at all"),
    pytest.param(container("\ufeff{}"), "start with", id="byte order mark"),
    pytest.param(container("[]"), "start with", id="a list"),
    pytest.param(container(b'{"\xff":1}'), "its byte 2 is no UTF-8", id="not UTF-8"),
    pytest.param(
        container(b'{"\xed\xa0\x80":{}}'), "its byte 2 is no UTF-8", id="surrogate in UTF-8"
    ),
    pytest.param(container('{"\\ud800":' + U8_2 + "}", b"ab"), "surrogate", id="half a character"),
    pytest.param(container("{"), "header is not valid", id="JSON without an end"),
    pytest.param(container("{}x"), "extra data at line 1, column 3", id="text after the object"),
    pytest.param(
        container("{}\0\0\0\0\0\0"), "extra data at line 1, column 3", id="padded with NUL"
    ),
    pytest.param(container('{"a":' + U8_2 + ",}", b"ab"), "header is not valid", id="last comma"),
    pytest.param(container('{"a\n":' + U8_2 + "}", b"ab"), "control character", id="bare newline"),
    pytest.param(container('{"a":' + "[" * 100_000), "nested too deeply", id="deep nesting"),
    pytest.param(
        container('{"__metadata__":{},"__metadata__":{}}'), "appears twice", id="metadata twice"
    ),
    pytest.param(container('{"__metadata__":{"n":1}}'), "object of strings", id="metadata number"),
    pytest.param(container('{"__metadata__":{"n":null}}'), "object of strings", id="metadata null"),
    pytest.param(container('{"__metadata__":[]}'), "object of strings", id="metadata list"),
    pytest.param(container('{"a":null}'), "incomplete", id="entry is null"),
    pytest.param(container('{"a":{"dtype":"U8","shape":[0]}}'), "incomplete", id="no offsets"),
    pytest.param(
        container(one('"U8","dtype":"U8"', "[2]", "[0,2]"), b"ab"),
        "appears twice",
        id="dtype twice",
    ),
    pytest.param(container(one('"u8"', "[2]", "[0,2]"), b"ab"), "'u8' is no", id="unknown type"),
    pytest.param(container(one('"I4"', "[4]", "[0,2]"), b"ab"), "'I4' is no", id="int4"),
    pytest.param(container(one("2", "[2]", "[0,2]"), b"ab"), "2 is no", id="type is a number"),
    pytest.param(container(one('["U8"]', "[2]", "[0,2]"), b"ab"), "is no", id="type is a list"),
    pytest.param(container(one('"U8"', "[-2]", "[0,2]"), b"ab"), "non-negative", id="negative"),
    pytest.param(container(one('"U8"', "[-0]", "[0,0]")), "non-negative", id="minus zero"),
    pytest.param(container(one('"U8"', "[2.0]", "[0,2]"), b"ab"), "non-negative", id="float"),
    pytest.param(container(one('"U8"', "[2e0]", "[0,2]"), b"ab"), "non-negative", id="exponent"),
    pytest.param(container(one('"U8"', "[true]", "[0,1]"), b"a"), "non-negative", id="bool"),
    pytest.param(container(one('"U8"', '["2"]', "[0,2]"), b"ab"), "non-negative", id="string"),
    pytest.param(container(one('"U8"', "2", "[0,2]"), b"ab"), "non-negative", id="bare number"),
    pytest.param(
        container(one('"U8"', "[18446744073709551616,0]", "[0,0]")),
        "non-negative",
        id="dimension of 2^64",
    ),
    pytest.param(
        container(one('"U8"', f"[{'9' * 5000},0]", "[0,0]")),
        "out of range",
        id="dimension of 5000 digits",
    ),
    pytest.param(container(one('"U8"', "[2]", "[0,2,2]"), b"ab"), "two of them", id="3 offsets"),
    pytest.param(container(one('"U8"', "[2]", "[0,2.0]"), b"ab"), "non-negative", id="float end"),
    pytest.param(container(one('"U8"', "[2]", "[2,0]"), b"ab"), "offsets hold -16", id="inverted"),
    pytest.param(
        container(one('"F32"', "[2]", "[0,4]"), b"abcd"),
        "takes 64 bits",
        id="shape larger than the data",
    ),
    pytest.param(
        container(one('"F32"', "[4294967296,4294967296]", "[0,0]")),
        "beyond 2\\^64",
        id="size that overflows to zero",
    ),
    pytest.param(
        container(one('"F32"', "[1152921504606846976]", "[0,0]")),
        "beyond 2\\^64",
        id="bits that overflow",
    ),
    pytest.param(
        container(one('"U8"', "[18446744073709551615,2,0]", "[0,0]")),
        "beyond 2\\^64",
        id="overflow before a zero",
    ),
    pytest.param(container(one('"F4"', "[3]", "[0,2]"), b"ab"), "takes 12 bits", id="odd F4"),
    pytest.param(container(one('"F6_E2M3"', "[2]", "[0,2]"), b"ab"), "takes 12 bits", id="two F6"),
    pytest.param(container('{"a":' + U8_2 + ',"b":' + U8_2 + "}", b"ab"), "end at 2", id="overlap"),
    pytest.param(container(one('"U8"', "[2]", "[1,3]"), b"abc"), "end at 0", id="hole in front"),
    pytest.param(
        container('{"a":' + U8_2 + ',"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}', b"ab"),
        "begins at byte 1; the tensors before it end at 2",
        id="empty tensor inside another",
    ),
    pytest.param(container('{"a":' + U8_2 + "}", b"abc"), "it holds 3", id="bytes after the last"),
    pytest.param(container('{"a":' + U8_2 + "}", b"a"), "it holds 1", id="truncated data"),
    pytest.param(container("{}", b"a"), "it holds 1", id="data without tensors"),
    pytest.param(
        container(one('"U8"', "[2]", "[0,2]", ',"x":NaN'), b"ab"), "NaN is not JSON", id="NaN"
    ),
    pytest.param(
        container(one('"U8"', "[2]", "[0,2]", ',"x":1e999'), b"ab"),
        "out of range",
        id="number beyond float64",
    ),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED)
def test_a_malformed_file_is_refused_as_the_reference_does(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert reference(content) is None
    with pytest.raises(FormatError, match=message) as caught:
        SafetensorsSource(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 600


STRICTER = [
    pytest.param(
        container('{"a":' + U8_2 + ',"a":' + U8_2 + "}", b"ab"),
        "'a' appears twice",
        id="tensor twice",
    ),
    pytest.param(
        container('{"a":' + U8_2 + ',"\\u0061":' + U8_2 + "}", b"ab"),
        "'a' appears twice",
        id="tensor twice, once escaped",
    ),
    pytest.param(
        container('{"__metadata__":{"k":"x","k":"y"}}'),
        "'k' appears twice",
        id="metadata key twice",
    ),
    pytest.param(container(" {}"), "start with", id="space in front"),
    pytest.param(container('{"a":["U8",[2],[0,2]]}', b"ab"), "incomplete", id="entry as a list"),
    pytest.param(container(one('{"U8":null}', "[2]", "[0,2]"), b"ab"), "is no", id="type as a map"),
]


@pytest.mark.parametrize(("content", "message"), STRICTER)
def test_what_only_the_reference_implementation_lets_pass_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert reference(content) is not None
    with pytest.raises(FormatError, match=message):
        SafetensorsSource(path)


def test_a_header_beyond_100_mb_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)
    with pytest.raises(FormatError, match="a header of 100000001 bytes in a file of 200000000"):
        SafetensorsSource(path)


@pytest.mark.parametrize("name", ["missing.safetensors", "."], ids=["missing", "folder"])
def test_what_cannot_be_opened_is_a_format_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot be read: (No such file|Is a directory)"):
        SafetensorsSource(tmp_path / name)


# ---------------------------------------------------------------- reading: what is accepted

ACCEPTED = [
    pytest.param(container("{}"), {}, id="no tensors"),
    pytest.param(container("{} \n\t\r"), {}, id="any JSON space after the object"),
    pytest.param(container('{"a":' + U8_2 + "}     ", b"ab"), {"a": (2,)}, id="padded with spaces"),
    pytest.param(container(one('"F32"', "[]", "[0,4]"), b"abcd"), {"a": ()}, id="scalar"),
    pytest.param(container(one('"F32"', "[0,3]", "[0,0]")), {"a": (0, 3)}, id="no elements"),
    pytest.param(
        container(one('"U8"', "[18446744073709551615,0]", "[0,0]")),
        {"a": (2**64 - 1, 0)},
        id="largest dimension",
    ),
    pytest.param(
        container(one('"U8"', "[0,18446744073709551615,2]", "[0,0]")),
        {"a": (0, 2**64 - 1, 2)},
        id="zero before an overflow",
    ),
    pytest.param(container(one('"F4"', "[3,2]", "[0,3]"), b"abc"), {"a": (3, 2)}, id="F4"),
    pytest.param(container(one('"F6_E3M2"', "[2,2]", "[0,3]"), b"abc"), {"a": (2, 2)}, id="F6"),
    pytest.param(
        container(one('"U8"', "[2]", "[0,2]", ',"x":[1,{"y":2.5}]'), b"ab"),
        {"a": (2,)},
        id="unknown key",
    ),
    pytest.param(container('{"__metadata__":null}'), {}, id="metadata is null"),
    pytest.param(container('{"":' + U8_2 + "}", b"ab"), {"": (2,)}, id="empty name"),
    pytest.param(
        container('{"a\\u0000\\ud83d\\ude00\x7f":' + U8_2 + "}", b"ab"),
        {"a\0\U0001f600\x7f": (2,)},
        id="escapes in a name",
    ),
    pytest.param(
        container(
            '{"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},"a":'
            + U8_2
            + ',"c":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}',
            b"abc",
        ),
        {"b": (1,), "a": (2,), "c": (0,)},
        id="header in another order than the data",
    ),
]


@pytest.mark.parametrize(("content", "shapes"), ACCEPTED)
def test_a_valid_file_is_read_as_the_reference_reads_it(
    content: bytes, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    assert described(path, content) == reference(content)
    with opened(path, content) as source:
        assert [(i.name, i.shape) for i in source.infos()] == list(shapes.items())
        assert (source.container, source.nbytes) == ("safetensors", len(content))


def test_metadata_is_kept_as_text(tmp_path: Path) -> None:
    header = '{"__metadata__":{"format":"pt","note":"h\\u00e9llo","":" "}}'
    with opened(tmp_path / "a", container(header)) as source:
        assert source.metadata == {"format": "pt", "note": "héllo", "": " "}
        assert list(source.infos()) == []


VALUES = [
    ("BOOL", "000100", [False, True, False]),
    ("U8", "00ff80", [0, 255, 128]),
    ("I8", "00ff80", [0, -1, -128]),
    ("F4", "2143", [0.5, 1, 1.5, 2]),
    ("F6_E2M3", "813010", [0.125, 0.25, 0.375, 0.5]),
    ("F6_E3M2", "813010", [0.0625, 0.125, 0.1875, 0.25]),
    ("F8_E4M3", "38b87e", [1, -1, 448]),
    ("F8_E5M2", "3cbc7c", [1, -1, np.inf]),
    ("F8_E4M3FNUZ", "40c07f", [1, -1, 240]),
    ("F8_E5M2FNUZ", "40c07f", [1, -1, 57344]),
    ("F8_E8M0", "7f80fe", [1, 2, 2.0**127]),
    ("I16", "0100ff7f0080", [1, 32767, -32768]),
    ("U16", "0100ffff", [1, 65535]),
    ("F16", "003c00c0ff7b", [1, -2, 65504]),
    ("BF16", "803f00c0807f", [1, -2, np.inf]),
    ("I32", "0100000000000080", [1, -(2**31)]),
    ("U32", "01000000ffffffff", [1, 2**32 - 1]),
    ("F32", "0000803f000000c0", [1, -2]),
    ("F64", "000000000000f03f", [1]),
    ("I64", "0000000000000080", [-(2**63)]),
    ("U64", "ffffffffffffffff", [2**64 - 1]),
    ("C64", "0000803f000000c0", [1 - 2j]),
]


@pytest.mark.parametrize(("code", "data", "values"), VALUES, ids=[v[0] for v in VALUES])
def test_every_type_is_read_as_its_values(
    code: str, data: str, values: list[Any], tmp_path: Path
) -> None:
    raw = bytes.fromhex(data)
    header = one(f'"{code}"', f"[1,{len(values)}]", f"[0,{len(raw)}]")
    with opened(tmp_path / "a", container(header, raw)) as source:
        array = source.read("a")
        assert array.dtype == BY_SAFETENSORS[code].numpy
        assert array.shape == (1, len(values))
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.tolist() == [values]
        assert list(source.chunks("a")) == [raw]


def test_the_table_above_has_every_type_of_the_format() -> None:
    assert {code for code, _, _ in VALUES} == set(BY_SAFETENSORS)


def test_chunks_are_at_most_8_mib_long(tmp_path: Path) -> None:
    data = os.urandom(MIB_8) + b"12345678"
    header = one('"I16"', f"[{len(data) // 2}]", f"[0,{len(data)}]")
    with opened(tmp_path / "a", container(header, data)) as source:
        pieces = list(source.chunks("a"))
        assert [len(piece) for piece in pieces] == [MIB_8, 8]
        assert b"".join(pieces) == data


def test_opening_reads_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    header = container(one('"F32"', "[250000000000]", "[0,1000000000000]"))
    path.write_bytes(header)
    os.truncate(path, len(header) + 10**12)
    with closing(SafetensorsSource(path)) as source:
        [info] = source.infos()
        assert (info.nbytes, info.size, info.dtype.name) == (10**12, 250 * 10**9, "float32")


def test_a_file_cut_short_while_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = container('{"a":' + U8_2 + "}", b"ab")
    with opened(path, content) as source:
        os.truncate(path, len(content) - 1)
        message = f"ends at byte {len(content) - 1}; it had {len(content)} bytes"
        with pytest.raises(FormatError, match=message):
            source.read("a")
        with pytest.raises(FormatError, match=message):
            list(source.chunks("a"))


def test_a_disk_that_fails_is_a_format_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path / "a", container('{"a":' + U8_2 + "}", b"ab")) as source:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(FormatError, match="cannot be read: Input/output error"):
            source.read("a")


def test_the_file_that_was_opened_is_read_although_its_name_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with opened(path, container('{"a":' + U8_2 + "}", b"ab")) as source:
        path.unlink()
        path.write_bytes(b"something else")
        assert source.read("a").tolist() == [0x61, 0x62]


def test_a_shape_that_numpy_cannot_hold_is_refused_when_read(tmp_path: Path) -> None:
    content = container(one('"U8"', "[18446744073709551615,0]", "[0,0]"))
    with (
        opened(tmp_path / "a", content) as source,
        pytest.raises(FormatError, match="NumPy cannot hold this shape"),
    ):
        source.read("a")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "a", container("{}")) as source,
        pytest.raises(QtoolError, match="has no tensor 'w'"),
    ):
        source.read("w")


# ---------------------------------------------------------------- reading: fuzz

ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F4", "F6_E2M3", "BF16", "F32", "C64", "I4", None, 1]),
        "shape": st.lists(
            st.sampled_from([0, 1, 2, 3, 4, 2**32, 2**64 - 1, 2**64, -1, 1.0, True]), max_size=3
        )
        | st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.sampled_from([0, 1, 2, 4, 6, 8, 2**64 - 1]), max_size=3)
        | st.lists(st.integers(0, 16), min_size=2, max_size=2),
    },
    optional={"x": st.none() | st.floats() | st.text(max_size=2)},
)
HEADER = st.dictionaries(
    st.sampled_from(["a", "b", "c", "é"]), ENTRY, max_size=3
) | st.fixed_dictionaries(
    {
        "__metadata__": st.none()
        | st.dictionaries(st.text(max_size=1), st.text(max_size=1) | st.integers(), max_size=2)
    },
    optional={"a": ENTRY},
)
VALID = [
    '{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    '"b":{"dtype":"F32","shape":[],"data_offsets":[2,6]}}',
    '{"a":{"dtype":"F4","shape":[1,4],"data_offsets":[0,2],"x":[1.5,"y\\n"]},'
    '"b":{"dtype":"I16","shape":[2,0],"data_offsets":[2,2]},'
    '"c":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}}',
]
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"0",
    b"1",
    b"2",
    b"-",
    b".",
    b"e",
    b" ",
    b"\n",
    b"\\",
    b"\\u0041",
    b"\\ud800",
    b"null",
    b"true",
    b"NaN",
    b"\0",
    b"\x1f",
    b"\x7f",
    b"\xc3\xa9",
    b"\xff",
    b"dtype",
    b"shape",
    b"F32",
    b"__metadata__",
]


def repeats_a_key(header: bytes) -> bool:
    """Whether valid JSON repeats a key: the one liberty of the reference that fuzzing finds."""
    found = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        found.append(len({key for key, _ in items}) < len(items))

    json.loads(header, object_pairs_hook=pairs)
    return any(found)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


def agree(path: Path, header: bytes, data: bytes) -> None:
    content = container(header, data)
    expected = reference(content)
    if expected is not None and (not header.startswith(b"{") or repeats_a_key(header)):
        expected = None
    if expected is None:
        path.write_bytes(content)
        with pytest.raises(FormatError):
            SafetensorsSource(path)
    else:
        assert described(path, content) == expected


@given(header=HEADER, size=st.integers(0, 16))
@settings(max_examples=600, deadline=None)
def test_headers_of_odd_values_are_judged_as_the_reference_judges_them(
    header: dict[str, Any], size: int, scratch: Path
) -> None:
    agree(scratch, json.dumps(header, ensure_ascii=False).encode("utf-8", "replace"), bytes(size))


@given(
    header=st.sampled_from(VALID),
    edits=st.lists(
        st.tuples(st.integers(0, 250), st.integers(0, 3), st.sampled_from(TOKENS)),
        min_size=1,
        max_size=2,
    ),
    size=st.sampled_from([6, 6, 6, 5, 7]),
)
@settings(max_examples=1500, deadline=None)
def test_damaged_headers_are_judged_as_the_reference_judges_them(
    header: str, edits: list[tuple[int, int, bytes]], size: int, scratch: Path
) -> None:
    raw = header.encode()
    for position, length, token in edits:
        raw = raw[:position] + token + raw[position + length :]
    agree(scratch, raw, bytes(size))


# ---------------------------------------------------------------- writing


def reference_file(
    arrays: dict[str, NDArray[Any]], metadata: dict[str, str] | None = None
) -> bytes:
    """What the reference implementation writes; F4 arrays are handed over packed."""
    kept, specs = [], {}
    for name, array in arrays.items():
        raw, kind, shape = np.ascontiguousarray(array), array.dtype.name, array.shape
        if kind == "float4_e2m1fn":
            codes = raw.view(np.uint8)
            raw = codes[..., ::2] | codes[..., 1::2] << 4
            kind, shape = "float4_e2m1fn_x2", raw.shape
        kept.append(raw)
        specs[name] = safetensors.TensorSpec(
            dtype=kind, shape=shape, data_ptr=raw.ctypes.data, data_len=raw.nbytes
        )
    return bytes(safetensors.serialize(specs, metadata))


def entries_of(arrays: dict[str, NDArray[Any]]) -> list[Entry]:
    by_numpy = {d.numpy: d for d in DTYPES.values()}
    return [Entry(n, by_numpy[a.dtype.newbyteorder("=")], a.shape) for n, a in arrays.items()]


def written(
    path: Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str] | None = None
) -> bytes:
    with SafetensorsSink(path, entries_of(arrays), metadata or {}) as sink:
        for name, array in arrays.items():
            sink.write(name, array)
    return path.read_bytes()


WRITABLE = [d for d in BY_SAFETENSORS.values() if d.bits != 6]


def sample(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> NDArray[Any]:
    """Any codes of dtype."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    high = 2 if dtype.kind == "bool" else 1 << min(dtype.bits, 8)
    raw = rng.integers(0, high, size * max(dtype.bits, 8) // 8, np.uint8)
    codes: NDArray[Any] = raw.view(dtype.numpy).reshape(shape)
    return codes


@pytest.mark.parametrize("dtype", WRITABLE, ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 4), (0, 2)], ids=str)
def test_a_tensor_of_each_type_is_written_as_the_reference_writes_it(
    dtype: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    arrays = {"w": sample(dtype, shape)}
    assert written(tmp_path / "a", arrays) == reference_file(arrays)


def test_all_types_in_one_file_are_ordered_as_the_reference_orders_them(tmp_path: Path) -> None:
    arrays = {
        f"{letter}.{dtype}": sample(dtype, (1, 2), seed)
        for letter in ("é", "b", "Z", "\U0001f600", "\uffff")
        for seed, dtype in enumerate(WRITABLE)
    }
    metadata = {'kéy\n"\\': "\x00\x1f\x7f/\u2028"}
    assert written(tmp_path / "a", arrays, metadata) == reference_file(arrays, metadata)


def test_float6_is_ordered_as_the_reference_lists_its_types(tmp_path: Path) -> None:
    """The reference cannot write F6 from Python; the order of its types is in a message."""
    content = container(one('"none"', "[2]", "[0,2]"), b"ab")
    with pytest.raises(safetensors.SafetensorError) as caught:
        deserialize(content)
    order = re.findall(r"`(\w+)`", str(caught.value).split("expected one of")[1])
    entries = [Entry(code, dtype, (4,)) for code, dtype in BY_SAFETENSORS.items()]
    with SafetensorsSink(tmp_path / "a", entries, {}) as sink:
        for entry in entries:
            sink.write(entry.name, np.zeros(entry.shape, entry.dtype.numpy))
    with closing(SafetensorsSource(tmp_path / "a")) as source:
        assert [info.name for info in source.infos()] == order[::-1]


def test_float6_is_packed_into_three_bytes_per_four_values(tmp_path: Path) -> None:
    array = np.array([[0.125, 0.25], [0.375, 0.5]], ml_dtypes.float6_e2m3fn)
    content = written(tmp_path / "a", {"w": array})
    header = b'{"w":{"dtype":"F6_E2M3","shape":[2,2],"data_offsets":[0,3]}}    '
    assert content == container(header, bytes.fromhex("813010"))
    assert reference(content) == [
        ("w", {"dtype": "F6_E2M3", "shape": [2, 2], "data": bytes.fromhex("813010")})
    ]


def test_a_file_without_tensors_and_metadata_is_the_reference_one(tmp_path: Path) -> None:
    assert written(tmp_path / "a", {}) == container(b"{}      ") == reference_file({})


def test_metadata_is_sorted_so_that_every_run_gives_the_same_bytes(tmp_path: Path) -> None:
    keys = ["b", "a", "é", "Z", "10", "9"]
    first = written(tmp_path / "a", {}, {key: key for key in keys})
    second = written(tmp_path / "a", {}, {key: key for key in reversed(keys)})
    text = b'{"__metadata__":{"10":"10","9":"9","Z":"Z","a":"a","b":"b","\xc3\xa9":"\xc3\xa9"}}'
    assert first == second == container(text + b" " * (-len(text) % 8))


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(WRITABLE), st.lists(st.integers(0, 3), max_size=3)), max_size=5
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=1),
    seed=st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_any_file_is_written_as_the_reference_writes_it_and_read_back(
    shapes: list[tuple[Any, list[int]]], metadata: dict[str, str], seed: int, scratch: Path
) -> None:
    arrays = {
        f"t{i}": sample(dtype, (*shape, 2), seed) for i, (dtype, shape) in enumerate(shapes)
    } | {"scalar": sample(DTYPES["float32"], (), seed)}
    content = written(scratch, arrays, metadata)
    assert content == reference_file(arrays, metadata)
    with closing(SafetensorsSource(scratch)) as source:
        assert source.metadata == metadata
        for name, array in arrays.items():
            again = source.read(name)
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert again.tobytes() == array.tobytes()


def test_the_reference_loads_the_values(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays: dict[str, NDArray[Any]] = {
        "w": np.array([[1.5, -2], [3, 4]], np.float32),
        "n": np.array([2**40], np.int64),
        "h": np.array([0.5], ml_dtypes.bfloat16),
    }
    written(path, arrays, {"format": "np"})
    loaded = safetensors.numpy.load_file(path)
    assert {k: (v.dtype, v.tolist()) for k, v in loaded.items()} == {
        k: (v.dtype, v.tolist()) for k, v in arrays.items()
    }
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "np"}


BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
MEMORY_ORDERS = [
    pytest.param(np.asfortranarray(BASE), id="Fortran order"),
    pytest.param(BASE.T, id="transposed"),
    pytest.param(BASE[::-2, ::3], id="strided"),
    pytest.param(BASE.astype(">f4"), id="big-endian"),
    pytest.param(np.asfortranarray(BASE.astype(">c8")), id="big-endian Fortran complex"),
    pytest.param(np.broadcast_to(np.float16(1), (2, 3)), id="broadcast"),
    pytest.param(np.asfortranarray(BASE.astype(ml_dtypes.bfloat16)), id="Fortran bfloat16"),
    pytest.param(np.asfortranarray(np.eye(4).astype(ml_dtypes.float4_e2m1fn)), id="Fortran F4"),
]


@pytest.mark.parametrize("array", MEMORY_ORDERS)
def test_arrays_in_any_memory_order_are_written_in_c_order(
    array: NDArray[Any], tmp_path: Path
) -> None:
    native = np.array(array.tolist(), array.dtype.newbyteorder("="))
    assert written(tmp_path / "a", {"w": array}) == reference_file({"w": native})


def test_entries_may_be_written_in_any_order_as_arrays_bytes_or_chunks(tmp_path: Path) -> None:
    arrays = {
        "a": np.array([1, 2, 3], np.int16),
        "b": np.array([4.0]),
        "c": np.array([0.5, 1, 1.5, 2], ml_dtypes.float4_e2m1fn),
    }
    with SafetensorsSink(tmp_path / "a", entries_of(arrays), {}) as sink:
        sink.write("c", np.array([0x21, 0x43], np.uint8))
        sink.write("a", iter([b"\x01\0\x02", b"", b"\0\x03\0"]))
        sink.write("b", arrays["b"])
    assert (tmp_path / "a").read_bytes() == reference_file(arrays)


def test_a_copy_made_of_chunks_is_the_same_file(tmp_path: Path) -> None:
    arrays = {str(d): sample(d, (3, 4)) for d in WRITABLE}
    content = reference_file(arrays, {"k": "v"})
    with opened(tmp_path / "a", content) as source:
        entries = [Entry(i.name, i.dtype, i.shape) for i in source.infos()]
        with SafetensorsSink(tmp_path / "b", entries, source.metadata) as sink:
            for info in source.infos():
                sink.write(info.name, source.chunks(info.name))
    assert (tmp_path / "b").read_bytes() == content


F32, F4 = DTYPES["float32"], DTYPES["float4e2m1"]
UNWRITABLE = [
    pytest.param(
        [Entry("w", F32, ()), Entry("w", F32, (2,))], {}, "'w': its name is taken", id="name twice"
    ),
    pytest.param([Entry("__metadata__", F32, ())], {}, "its name is taken", id="reserved name"),
    pytest.param(
        [Entry("__metadata__", F32, ())],
        {"k": "v"},
        "its name is taken",
        id="reserved name beside metadata",
    ),
    pytest.param([Entry("w", DTYPES["complex128"], ())], {}, "has no complex128", id="complex128"),
    pytest.param([Entry("w", DTYPES["int4"], (2,))], {}, "has no int4", id="int4"),
    pytest.param([Entry("w", F4, (3,))], {}, "ends within a byte", id="odd F4"),
    pytest.param([Entry("w", DTYPES["float6e2m3"], (2,))], {}, "ends within a byte", id="two F6"),
    pytest.param([Entry("\ud800", F32, ())], {}, "not valid Unicode", id="half a character"),
    pytest.param([], {"k": "\ud800"}, "not valid Unicode", id="half a character in metadata"),
    pytest.param([], {"k": "x" * 100_000_000}, "the format allows 100000000", id="long header"),
]


@pytest.mark.parametrize(("entries", "metadata", "message"), UNWRITABLE)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    entries: list[Entry], metadata: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    with pytest.raises(OutputError, match=message):
        SafetensorsSink(path, entries, metadata)
    assert not path.exists()


def pieces(*parts: bytes) -> Iterator[bytes]:
    yield from parts


WRONG_DATA = [
    pytest.param("x", np.zeros(2, np.float32), "'x' is no entry", id="unknown name"),
    pytest.param("w", np.zeros(2, np.float64), "float64 of shape \\(2,\\)", id="other type"),
    pytest.param("w", np.zeros((2, 1), np.float32), "of shape \\(2, 1\\)", id="other shape"),
    pytest.param("w", np.zeros(7, np.uint8), "7 bytes of 8", id="7 packed bytes"),
    pytest.param("w", np.zeros(9, np.uint8), "9 bytes of 8", id="9 packed bytes"),
    pytest.param("w", pieces(b"1234", b"123"), "7 bytes of 8", id="short pieces"),
    pytest.param("w", pieces(b"1234", b"12345"), "9 bytes of 8", id="long pieces"),
    pytest.param(
        "v",
        np.zeros(1, np.float32),
        "'v' is no entry of it or already written",
        id="written before",
    ),
]


@pytest.mark.parametrize(("name", "data", "message"), WRONG_DATA)
def test_data_that_is_not_the_entry_s_is_refused(
    name: str, data: Any, message: str, tmp_path: Path
) -> None:
    def write() -> None:
        entries = [Entry("v", F32, (1,)), Entry("w", F32, (2,))]
        with SafetensorsSink(tmp_path / "a", entries, {}) as sink:
            sink.write("v", np.zeros(1, np.float32))
            sink.write(name, data)

    with pytest.raises(OutputError, match=message):
        write()


def test_an_entry_that_was_not_written_is_an_error_and_leaves_no_header(tmp_path: Path) -> None:
    entries = [Entry("v", F32, (1,)), Entry("w", F32, (2,))]
    with (
        pytest.raises(OutputError, match=r"not written: \['w'\]"),
        SafetensorsSink(tmp_path / "a", entries, {}) as sink,
    ):
        sink.write("v", np.ones(1, np.float32))
    assert reference((tmp_path / "a").read_bytes()) is None


def test_an_error_while_writing_is_not_hidden_by_what_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        SafetensorsSink(tmp_path / "a", [Entry("w", F32, (2,))], {}),
    ):
        raise KeyboardInterrupt

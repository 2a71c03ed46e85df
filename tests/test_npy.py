from __future__ import annotations

import io
import pickle
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as numpy_format

from qtool.dtypes import DTYPES
from qtool.errors import FormatError, OutputError, QtoolError
from qtool.formats import Entry
from qtool.formats.npy import NpySink, NpySource

HEADER = "{'descr': %s, 'fortran_order': %s, 'shape': %s, }"
SWAPPABLE = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16")
RAW = {
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
    "float6e2m3": ml_dtypes.float6_e2m3fn,
    "float6e3m2": ml_dtypes.float6_e3m2fn,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8e8m0": ml_dtypes.float8_e8m0fnu,
    "bfloat16": ml_dtypes.bfloat16,
}


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """A .npy file put together by hand."""
    text = (header + "\n").encode("latin-1")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def plain(descr: str, shape: str, data: str = "", fortran: bool = False) -> bytes:
    return npy(HEADER % (repr(descr), fortran, shape), bytes.fromhex(data))


def saved(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def put(folder: Path, data: bytes) -> Path:
    path = folder / "x.npy"
    path.write_bytes(data)
    return path


def load(path: Path, source_dtype: str | None = None) -> np.ndarray[Any, Any]:
    return NpySource(
        path, name="x", source_dtype=DTYPES[source_dtype] if source_dtype else None
    ).read("x")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npy")


KNOWN = [
    pytest.param(
        plain("<f4", "(2, 3)", "00000000 00004040 0000803f 00008040 00000040 0000a040", True),
        [[0, 1, 2], [3, 4, 5]],
        "float32",
        "00000000 0000803f 00000040 00004040 00008040 0000a040",
        id="fortran",
    ),
    pytest.param(
        plain(">f4", "(3,)", "3fc00000 c0000000 3e800000"),
        [1.5, -2, 0.25],
        "float32",
        "0000c03f 000000c0 0000803e",
        id="big-endian",
    ),
    pytest.param(
        plain(">f2", "(2, 2)", "3c00 4200 4000 4400", True),
        [[1, 2], [3, 4]],
        "float16",
        "003c 0040 0042 0044",
        id="big-endian-fortran",
    ),
    pytest.param(
        plain(">i4", "(2,)", "00000001 fffffffe"),
        [1, -2],
        "int32",
        "01000000 feffffff",
        id="big-endian-int",
    ),
    pytest.param(
        plain(">c8", "(1,)", "3f800000 c0000000"),
        [1 - 2j],
        "complex64",
        "0000803f 000000c0",
        id="big-endian-complex",
    ),
    pytest.param(plain("|b1", "(3,)", "010001"), [True, False, True], "bool", "010001", id="bool"),
    pytest.param(
        plain("<f8", "()", "000000000000f83f"), 1.5, "float64", "000000000000f83f", id="scalar"
    ),
    pytest.param(plain("<i2", "(0, 3)"), np.empty((0, 3)), "int16", "", id="empty"),
    pytest.param(
        plain("<i2", "(1, 2, 2)", "0100 0300 0200 0400", True),
        [[[1, 2], [3, 4]]],
        "int16",
        "0100 0200 0300 0400",
        id="fortran-rank-3",
    ),
    pytest.param(
        npy('{"shape":(2,),"fortran_order":False,"descr":"|u1"}', b"\x01\x02"),
        [1, 2],
        "uint8",
        "0102",
        id="another-writer's-spelling",
    ),
]


@pytest.mark.parametrize(("data", "values", "dtype", "raw"), KNOWN)
def test_values_type_and_bytes_of_files_written_by_hand(
    tmp_path: Path, data: bytes, values: Any, dtype: str, raw: str
) -> None:
    source = NpySource(put(tmp_path, data), name="w")
    array = source.read("w")
    expected = np.array(values)
    assert np.array_equal(array, expected)
    assert (array.shape, array.dtype) == (expected.shape, DTYPES[dtype].numpy)
    assert array.flags.c_contiguous
    assert array.dtype.isnative
    assert b"".join(source.chunks("w")) == bytes.fromhex(raw)
    assert np.array_equal(array, np.load(source.path))


def test_the_header_alone_describes_the_tensor(tmp_path: Path) -> None:
    path = put(tmp_path, plain(">f2", "(2, 3)", "0000" * 6, True))
    source = NpySource(path, name="layer.weight")
    (info,) = source.infos()
    assert (info.name, info.shape, info.dtype.name, info.nbytes, info.size) == (
        "layer.weight",
        (2, 3),
        "float16",
        12,
        6,
    )
    assert (source.container, source.path, source.metadata) == ("npy", path, {})
    assert source.nbytes == path.stat().st_size
    source.close()


def test_another_name_than_that_of_the_tensor_is_refused(tmp_path: Path) -> None:
    source = NpySource(put(tmp_path, plain("|u1", "(1,)", "01")), name="w")
    with pytest.raises(QtoolError, match="has no tensor 'v'"):
        source.read("v")


def test_chunks_are_bounded_and_independent_of_each_other(tmp_path: Path) -> None:
    array = np.arange(3 << 18, dtype=np.int32)
    source = NpySource(put(tmp_path, saved(array[:-1])), name="w")
    first = source.chunks("w")
    pieces = [next(first)]
    assert np.array_equal(source.read("w"), array[:-1])
    pieces += first
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, (1 << 20) - 4]
    assert b"".join(pieces) == array[:-1].tobytes()


def test_chunks_of_a_fortran_file_come_in_c_order(tmp_path: Path) -> None:
    array = np.arange(600_000, dtype=np.float32).reshape(1000, 600)
    source = NpySource(put(tmp_path, saved(np.asfortranarray(array))), name="w")
    pieces = list(source.chunks("w"))
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, 2_400_000 - (2 << 20)]
    assert b"".join(pieces) == array.tobytes()


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(
    descr=st.sampled_from(SWAPPABLE),
    order=st.sampled_from("<>"),
    shape=SHAPES,
    fortran=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    data=st.data(),
)
def test_any_array_reads_as_numpy_reads_it(
    scratch: Path,
    descr: str,
    order: str,
    shape: tuple[int, ...],
    fortran: bool,
    version: tuple[int, int],
    data: st.DataObject,
) -> None:
    dtype = np.dtype(order + descr)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    array = np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numpy_format.write_array(buffer, array, version)
    path = put(scratch, buffer.getvalue())
    expected = np.load(path)
    native = expected.astype(expected.dtype.newbyteorder("="))
    source = NpySource(path, name="x")
    actual = source.read("x")
    assert (actual.shape, actual.dtype) == (native.shape, native.dtype)
    assert actual.tobytes() == native.tobytes() == b"".join(source.chunks("x"))


@settings(deadline=None, max_examples=500)
@given(
    descr=st.sampled_from(["<f4", ">i2", "|u1", "<c8"]),
    fortran=st.booleans(),
    shape=st.sampled_from([(), (3,), (12,), (2, 3), (0, 12)]),
    version=st.integers(1, 3),
    flips=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damaged_headers_give_a_format_error_or_what_numpy_reads(
    scratch: Path,
    descr: str,
    fortran: bool,
    shape: tuple[int, ...],
    version: int,
    flips: list[tuple[int, int]],
) -> None:
    data = bytes(range(int(np.prod(shape)) * np.dtype(descr).itemsize))
    damaged = bytearray(npy(HEADER % (repr(descr), fortran, shape), data, version))
    for position, value in flips:
        damaged[position % (len(damaged) - len(data))] = value
    path = put(scratch, bytes(damaged))
    try:
        actual = load(path)
    except FormatError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.load(path)
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.astype(expected.dtype.newbyteorder("=")).tobytes()


def test_sizes_written_by_python_2_are_read(tmp_path: Path) -> None:
    path = put(tmp_path, plain("|u1", "(2L, 3L)", "010203040506"))
    assert load(path).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.warns(UserWarning, match="Python 2"):
        assert np.load(path).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("name", RAW)
def test_raw_elements_are_read_as_the_source_dtype(tmp_path: Path, name: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 0]], np.int8).astype(RAW[name])
    path = put(tmp_path, saved(np.asfortranarray(array)))
    source = NpySource(path, name="x", source_dtype=DTYPES[name])
    actual = source.read("x")
    assert actual.dtype == array.dtype
    assert actual.tobytes() == array.tobytes() == b"".join(source.chunks("x"))
    assert [info.dtype.name for info in source.infos()] == [name]


@pytest.mark.parametrize(
    ("data", "source_dtype", "values"),
    [
        pytest.param(plain("|V1", "(2,)", "38b8"), "float8e4m3fn", [1, -1], id="V1"),
        pytest.param(plain("|V2", "(2,)", "803f00c0"), "bfloat16", [1, -2], id="V2"),
        pytest.param(plain(">V2", "(2,)", "3f80c000"), "bfloat16", [1, -2], id="big-endian-V2"),
        pytest.param(plain("<V4", "(1,)", "0000c03f"), "float32", [1.5], id="V4"),
        pytest.param(plain("<u2", "(2,)", "803f00c0"), "bfloat16", [1, -2], id="u2"),
        pytest.param(plain(">u2", "(2,)", "3f80c000"), "bfloat16", [1, -2], id="big-endian-u2"),
        pytest.param(plain("<i2", "(1,)", "003c"), "float16", [1], id="i2"),
        pytest.param(plain("|u1", "(2,)", "38b8"), "float8e4m3fn", [1, -1], id="u1"),
        pytest.param(plain("|i1", "(2,)", "0f07"), "int4", [-1, 7], id="i1"),
        pytest.param(plain("<f4", "(1,)", "0000c03f"), "float32", [1.5], id="the-same"),
        pytest.param(plain("<f1", "(2,)", "3cbc"), None, [1, -1], id="f1-is-float8e5m2"),
        pytest.param(plain("<f1", "(2,)", "3cbc"), "float8e5m2", [1, -1], id="f1-said"),
    ],
)
def test_source_dtype_says_what_the_bits_are(
    tmp_path: Path, data: bytes, source_dtype: str | None, values: list[float]
) -> None:
    array = load(put(tmp_path, data), source_dtype)
    assert array.dtype == DTYPES[source_dtype or "float8e5m2"].numpy
    assert array.astype(np.float64).tolist() == values


@pytest.mark.parametrize(
    ("data", "source_dtype", "message"),
    [
        pytest.param(
            plain("<V2", "(1,)", "803f"),
            None,
            "holds raw elements of 2 bytes; say what they are with --source-dtype: "
            "int16, uint16, float16, bfloat16, or save them as float32",
            id="nothing-said",
        ),
        pytest.param(
            plain("|V1", "(1,)", "80"),
            "bfloat16",
            "holds raw elements of 1 byte, bfloat16 takes 2; say what",
            id="size",
        ),
        pytest.param(
            plain("|V3", "(1,)", "808080"),
            "bfloat16",
            "holds raw elements of 3 bytes; no element type has that size",
            id="V3",
        ),
        pytest.param(
            plain("|V0", "(1,)"),
            None,
            "holds raw elements of 0 bytes; no element type has that size",
            id="V0",
        ),
        pytest.param(
            plain("<f4", "(1,)", "0000803f"),
            "bfloat16",
            "holds float32, which cannot be read as bfloat16; leave",
            id="float",
        ),
        pytest.param(
            plain("<f2", "(1,)", "0080"),
            "bfloat16",
            "holds float16, which cannot be read as bfloat16; leave",
            id="float-of-size",
        ),
        pytest.param(
            plain("<u2", "(1,)", "0080"),
            "float8e4m3fn",
            "holds uint16, which cannot be read as float8e4m3fn; leave",
            id="int-size",
        ),
    ],
)
def test_a_source_dtype_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, data: bytes, source_dtype: str | None, message: str
) -> None:
    path = put(tmp_path, data)
    with pytest.raises(FormatError) as caught:
        load(path, source_dtype)
    assert str(caught.value).startswith(f"{path}: {message}")


F4 = "00000000"
REFUSED = [
    pytest.param(b"", "is not a .npy file: it is empty", id="empty"),
    pytest.param(b"0.5 1.5\n2.5 3.5\n", "is not a .npy file: it starts with 30 2e 35", id="text"),
    pytest.param(b"PK\x03\x04rest", "is not a .npy file: it is a zip archive", id="zip"),
    pytest.param(pickle.dumps([1, 2]), "is not a .npy file: it is a pickle", id="pickle"),
    pytest.param(b"\x93NUMPY\x01", "cut short within its header", id="magic-only"),
    pytest.param(b"\x93NUMPY\x01\x00v", "cut short within its header", id="half-a-length"),
    pytest.param(plain("<f4", "(1,)")[:60], "cut short within its header", id="half-a-header"),
    pytest.param(npy("{}", version=4), "unknown .npy version 4.0", id="version"),
    pytest.param(npy(" " * 10_000, version=2), "its header takes 10001 bytes", id="long-header"),
    pytest.param(
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        "its header takes 4294967295 bytes",
        id="header-beyond-the-file",
    ),
    pytest.param(
        plain("|O", "(1,)", "00"), "holds Python objects, which are never unpickled", id="objects"
    ),
    pytest.param(saved(np.zeros(2, "S3")), "holds text", id="bytes"),
    pytest.param(saved(np.zeros(2, "U3")), "holds text", id="str"),
    pytest.param(saved(np.zeros(2, "M8[s]")), "holds dates", id="dates"),
    pytest.param(saved(np.zeros(2, "m8[25s]")), "holds time spans", id="time-spans"),
    pytest.param(saved(np.zeros(2, "f4,i4")), "holds records of several fields", id="records"),
    pytest.param(saved(np.zeros(2, [("a", "f4", (2,))])), "holds records", id="subarrays"),
    pytest.param(
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }"),
        "holds records",
        id="records-of-objects",
    ),
    pytest.param(
        npy("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,), }"),
        "malformed .npy header",
        id="subarray-type",
    ),
    pytest.param(
        plain("<f16", "(1,)", F4 * 4), "holds elements of the unknown type '<f16'", id="long-double"
    ),
    pytest.param(
        plain("float32", "(1,)", F4),
        "holds elements of the unknown type 'float32'",
        id="name-of-a-type",
    ),
    pytest.param(plain("V", "(1,)", F4), "holds elements of the unknown type 'V'", id="V"),
    pytest.param(plain("", "(1,)", F4), "holds elements of the unknown type ''", id="no-type"),
    pytest.param(
        plain("<f4", "(2, 2)", F4 * 3),
        "cut short: shape (2, 2) of float32 takes 16 bytes, 12 follow",
        id="truncated",
    ),
    pytest.param(
        plain("<f4", "(2,)", F4 * 3),
        "too long: shape (2,) of float32 takes 8 bytes, 12 follow",
        id="trailing",
    ),
    pytest.param(plain("<f4", "(-1,)", F4), "its shape reads '(-1,)'", id="negative"),
    pytest.param(plain("<f4", "(True,)", F4), "its shape reads '(True,)'", id="bool"),
    pytest.param(plain("<f4", "(1.0,)", F4), "its shape reads '(1.0,)'", id="float"),
    pytest.param(plain("<f4", "(1)", F4), "its shape reads '(1)'", id="no-tuple"),
    pytest.param(plain("<f4", "(,)", F4), "its shape reads '(,)'", id="comma"),
    pytest.param(plain("<f4", "[1]", F4), "its shape reads '[1]'", id="list"),
    pytest.param(plain("<f4", "(01,)", F4), "its shape reads '(01,)'", id="leading-zero"),
    pytest.param(plain("<f4", f"({'9' * 5000},)"), "its shape reads '(999", id="5000-digits"),
    pytest.param(
        plain("<f4", f"({2**61},)"), "its shape (2305843009213693952,) is beyond", id="huge"
    ),
    pytest.param(
        plain("<f4", f"({2**40}, {2**40})"),
        "its shape (1099511627776, 109951162777",
        id="huge-product",
    ),
    pytest.param(
        plain("<f4", f"(0, {2**62})"),
        "its shape (0, 4611686018427387904) is beyond",
        id="huge-but-for-a-zero",
    ),
    pytest.param(plain("<f4", f"({'1, ' * 65})", F4), "its shape (1, 1", id="rank-65"),
    pytest.param(
        plain("<f4", f"({2**32},)", F4),
        "cut short: shape (4294967296,) of float32 takes 17179869184 bytes, 4 follow",
        id="more-than-the-file",
    ),
    pytest.param(npy("{'descr': '<f4', 'shape': (1,)}"), "malformed .npy header", id="no-order"),
    pytest.param(
        npy("{'descr': '<f4', 'fortran_order': 'True', 'shape': (1,)}"),
        "malformed .npy header",
        id="order-as-text",
    ),
    pytest.param(
        npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), 'shape': (2,)}"),
        "malformed .npy header",
        id="key-twice",
    ),
    pytest.param(
        npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), 'x': 1}"),
        "malformed .npy header",
        id="key-too-many",
    ),
    pytest.param(npy("__import__('os').abort()"), "malformed .npy header", id="code"),
    pytest.param(npy("(" * 5000), "malformed .npy header", id="nested"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_is_not_an_array_of_numbers_is_refused_in_one_line(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = put(tmp_path, data)
    with pytest.raises(FormatError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}")
    assert text.isprintable()
    assert "allow_pickle" not in text


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_array", [True, False], ids=["object-array", "bare-pickle"])
def test_nothing_is_unpickled(tmp_path: Path, is_array: bool) -> None:
    created = tmp_path / "created"
    payload = Payload(created)
    array = np.empty((), object)
    array[()] = payload
    path = put(tmp_path, saved(array) if is_array else pickle.dumps(payload))
    with pytest.raises(FormatError):
        load(path)
    assert not created.exists()
    np.load(path, allow_pickle=True)
    assert created.exists()


def test_a_shape_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = put(tmp_path, plain("<f4", f"({2**28},)", F4))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="cut short"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_after_it_was_opened_is_reported(tmp_path: Path) -> None:
    path = put(tmp_path, plain("<f4", "(2,)", F4 * 2))
    source = NpySource(path, name="w")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="cut short: 7 of 8 bytes of data"):
        source.read("w")


def write(path: Path, name: str, shape: tuple[int, ...], data: Any) -> bytes:
    with NpySink(path, [Entry("w", DTYPES[name], shape)], {"note": "has no place"}) as sink:
        sink.write("w", iter(data) if isinstance(data, list) else data)
    return path.read_bytes()


NAMES = [name for name in DTYPES if name != "float8e5m2"]


@pytest.mark.parametrize("name", NAMES)
def test_the_sink_writes_the_bytes_that_np_save_writes(tmp_path: Path, name: str) -> None:
    array = np.array([[0, 1, 0], [1, 1, 0]]).astype(DTYPES[name].numpy)
    assert write(tmp_path / "x.npy", name, (2, 3), array) == saved(array)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (1,) * 64], ids=str)
def test_the_sink_writes_any_shape_as_np_save_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    assert write(tmp_path / "x.npy", "float32", shape, array) == saved(array)


def test_float8e5m2_is_written_as_raw_bytes_that_np_load_takes(tmp_path: Path) -> None:
    array = np.array([1, -2, 0.5], ml_dtypes.float8_e5m2)
    data = write(tmp_path / "x.npy", "float8e5m2", (3,), array)
    assert b"'descr': '<V1'" in data
    assert data[-3:] == bytes.fromhex("3cc038")
    assert np.load(tmp_path / "x.npy").view(ml_dtypes.float8_e5m2).tolist() == [1, -2, 0.5]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(np.array([[0, 1, 2], [3, 4, 5]], np.int16), id="c-order"),
        pytest.param(np.array([[0, 3], [1, 4], [2, 5]], np.int16).T, id="fortran-order"),
        pytest.param(
            np.repeat(np.arange(6, dtype=np.int16), 2).reshape(2, 6)[:, ::2], id="strided"
        ),
        pytest.param(np.array([[0, 1, 2], [3, 4, 5]], ">i2"), id="big-endian"),
        pytest.param([b"\0\0\x01", b"", b"\0\x02\0\x03\0\x04\0\x05\0"], id="pieces"),
        pytest.param(np.array([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0], np.uint8), id="bytes"),
    ],
)
def test_every_kind_of_data_is_stored_in_c_order_little_endian(tmp_path: Path, data: Any) -> None:
    written = write(tmp_path / "x.npy", "int16", (2, 3), data)
    assert written[-12:] == bytes.fromhex("0000 0100 0200 0300 0400 0500")
    assert np.load(tmp_path / "x.npy").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("data", "given"),
    [
        (np.zeros(3, np.float32), "more"),
        ([b"1234567"], "7"),
        ([b"12345678", b"9"], "more"),
    ],
    ids=["array", "too-few", "too-many"],
)
def test_data_of_the_wrong_length_is_refused(tmp_path: Path, data: Any, given: str) -> None:
    with pytest.raises(OutputError) as caught:
        write(tmp_path / "x.npy", "float32", (2,), data)
    assert str(caught.value) == f"w: shape (2,) of float32 takes 8 bytes, {given} were given"


@pytest.mark.parametrize("count", [0, 2])
def test_a_npy_file_holds_exactly_one_array(tmp_path: Path, count: int) -> None:
    entries = [Entry(f"w{i}", DTYPES["int8"], (1,)) for i in range(count)]
    with pytest.raises(OutputError, match=f"holds one array, not {count}"):
        NpySink(tmp_path / "x.npy", entries, {})


def test_an_entry_is_written_once_and_under_its_name(tmp_path: Path) -> None:
    with NpySink(tmp_path / "x.npy", [Entry("w", DTYPES["int8"], (1,))], {}) as sink:
        with pytest.raises(OutputError, match="v: is not an entry that is still to be written"):
            sink.write("v", np.zeros(1, np.int8))
        sink.write("w", np.zeros(1, np.int8))
        with pytest.raises(OutputError, match="w: is not an entry that is still to be written"):
            sink.write("w", np.zeros(1, np.int8))


def test_leaving_without_having_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="w: was never written"),
        NpySink(tmp_path / "x.npy", [Entry("w", DTYPES["int8"], (1,))], {}),
    ):
        pass


def test_an_error_inside_the_block_is_the_one_that_is_seen(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="stop"),
        NpySink(tmp_path / "x.npy", [Entry("w", DTYPES["int8"], (1,))], {}),
    ):
        raise KeyError("stop")

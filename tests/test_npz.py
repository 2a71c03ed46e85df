from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.dtypes import DTYPES
from qtool.errors import FormatError, OutputError
from qtool.formats import Entry
from qtool.formats.npz import NpzSink, NpzSource

WEIGHT = np.array([[0, 1, 2], [3, 4, 5]], np.float32)


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


def put(folder: Path, data: bytes) -> Path:
    path = folder / "x.npz"
    path.write_bytes(data)
    return path


def patched(data: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    """Archive bytes with a field of the first record of that signature overwritten."""
    start = data.index(signature) + offset
    return data[:start] + value + data[start + len(value) :]


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_members_read_as_numpy_reads_them_in_the_order_of_the_archive(
    tmp_path: Path, save: Any
) -> None:
    arrays = {
        "z.weight": WEIGHT,
        "folder/b": np.asfortranarray(WEIGHT),
        "a": np.array([1.5, -2], ">f8"),
        "größe": np.array(7, np.uint16),
        "empty": np.empty((0, 3), np.int8),
        "mask.npy": np.array([True, False]),
        "large": np.arange(700_000, dtype=np.int32),
    }
    path = tmp_path / "x.npz"
    save(path, **arrays)
    source = NpzSource(path)
    infos = source.infos()
    with np.load(path) as loaded:
        assert [info.name for info in infos] == list(arrays) == [*loaded.files]
        for info in infos:
            expected = np.ascontiguousarray(loaded[info.name]).reshape(info.shape)
            expected = expected.astype(expected.dtype.newbyteorder("<"))
            actual = source.read(info.name)
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            assert actual.flags.c_contiguous
            pieces = list(source.chunks(info.name))
            assert max(map(len, pieces), default=0) <= 1 << 20
            assert b"".join(pieces) == actual.tobytes() == expected.tobytes()
            assert info.nbytes == expected.nbytes
            assert info.dtype.numpy == expected.dtype
    assert (source.container, source.path, source.metadata) == ("npz", path, {})
    assert source.nbytes == path.stat().st_size
    source.close()


def test_the_best_that_deflate_can_do_is_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, w=np.zeros(20_000_000, np.int8))
    source = NpzSource(path)
    assert source.nbytes < 20_000
    assert np.array_equal(source.read("w"), np.zeros(20_000_000, np.int8))
    source.close()


def test_an_archive_may_be_empty(tmp_path: Path) -> None:
    source = NpzSource(put(tmp_path, archive({})))
    assert source.infos() == []
    source.close()


def test_chunks_of_two_members_may_be_read_in_turn(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(300_000, dtype=np.int32) + shift for name, shift in (("a", 0), ("b", 9))
    }
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=arrays["a"], b=arrays["b"])
    source = NpzSource(path)
    for pieces, array in zip(
        zip(source.chunks("a"), source.chunks("b"), strict=True), [0, 1], strict=True
    ):
        start = slice(array << 20, (array + 1) << 20)
        assert pieces == (arrays["a"].tobytes()[start], arrays["b"].tobytes()[start])
    source.close()


def test_opening_reads_headers_alone_and_reading_checks_the_data(tmp_path: Path) -> None:
    array = np.ones((100, 200), np.float32)
    data = bytearray(archive({"w.npy": npy(array)}))
    data[data.index(array.tobytes()) + 70_000] ^= 1
    source = NpzSource(put(tmp_path, bytes(data)))
    assert [(info.name, info.shape) for info in source.infos()] == [("w", (100, 200))]
    with pytest.raises(FormatError) as caught:
        source.read("w")
    expected = f"{source.path}, w.npy: damaged zip archive; write or fetch the file anew"
    assert str(caught.value) == expected
    with pytest.raises(FormatError, match="damaged zip archive"):
        list(source.chunks("w"))
    source.close()


NOTE = {
    "version": 1,
    "tensors": {"w": {"dtype": "int4"}},
    "stored": {"w.scale": "bfloat16", "w": "float8e5m2"},
}


def noted(note: Any) -> dict[str, bytes]:
    text = note if isinstance(note, bytes) else json.dumps(note).encode()
    return {"__qtool__.npy": npy(np.frombuffer(text, np.uint8))}


def test_the_metadata_of_qtool_types_the_raw_members(tmp_path: Path) -> None:
    members = {
        "w.npy": npy(np.array([0x3C, 0xBC], "u1").view("V1")),
        "w.scale.npy": npy(np.array([1, -2], ml_dtypes.bfloat16)),
        **noted(NOTE),
        "other.npy": npy(np.array([0.5], ml_dtypes.float8_e4m3fn)),
        "plain.npy": npy(WEIGHT),
    }
    source = NpzSource(put(tmp_path, archive(members)), source_dtype=DTYPES["float8e4m3fn"])
    assert [(info.name, info.dtype.name) for info in source.infos()] == [
        ("w", "float8e5m2"),
        ("w.scale", "bfloat16"),
        ("other", "float8e4m3fn"),
        ("plain", "float32"),
    ]
    assert source.metadata == {"qtool": json.dumps(NOTE)}
    assert source.read("w").tolist() == [1, -1]
    assert source.read("w.scale").tolist() == [1, -2]
    assert source.read("other").tolist() == [0.5]
    source.close()


def test_metadata_without_stored_types_is_kept_too(tmp_path: Path) -> None:
    source = NpzSource(put(tmp_path, archive(noted({"a": "é"}) | {"w.npy": npy(WEIGHT)})))
    assert json.loads(source.metadata["qtool"]) == {"a": "é"}
    assert [info.name for info in source.infos()] == ["w"]
    source.close()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param(noted(b"{"), "is not JSON", id="json"),
        pytest.param(noted(b"[" * 100_000), "is not JSON", id="deep-json"),
        pytest.param(noted(b"\xff\xfe"), "its byte 0 is no UTF-8", id="utf-8"),
        pytest.param(noted([1]), 'malformed metadata; "stored" must map', id="list"),
        pytest.param(noted({"stored": [1]}), 'malformed metadata; "stored" must map', id="stored"),
        pytest.param(noted({"stored": {"w": "f9"}}), "stored type of w is 'f9', which", id="f9"),
        pytest.param(noted({"stored": {"w": []}}), "stored type of w is [], which", id="type"),
        pytest.param(
            {"__qtool__.npy": npy(WEIGHT)},
            "is float32 of shape (2, 3); a uint8 vector",
            id="floats",
        ),
        pytest.param(
            {"__qtool__.npy": npy(np.zeros((2, 2), np.uint8))},
            "is uint8 of shape (2, 2); a uint8 vector",
            id="matrix",
        ),
    ],
)
def test_malformed_metadata_is_refused(
    tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    path = put(tmp_path, archive(members))
    with pytest.raises(FormatError) as caught:
        NpzSource(path)
    assert str(caught.value).startswith(f"{path}, __qtool__.npy: {message}")


def test_raw_members_need_a_source_dtype(tmp_path: Path) -> None:
    path = put(
        tmp_path, archive({"a.npy": npy(WEIGHT), "b.npy": npy(np.zeros(2, ml_dtypes.bfloat16))})
    )
    with pytest.raises(FormatError) as caught:
        NpzSource(path)
    assert str(caught.value) == (
        f"{path}, b.npy: holds raw elements of 2 bytes; say what they are with --source-dtype: "
        "int16, uint16, float16, bfloat16, or save them as float32"
    )


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_member_of_objects_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    created = tmp_path / "created"
    array = np.empty((), object)
    array[()] = Payload(created)
    path = put(tmp_path, archive({"w.npy": npy(array)}))
    with pytest.raises(FormatError) as caught:
        NpzSource(path)
    assert not created.exists()
    assert str(caught.value) == (
        f"{path}, w.npy: holds Python objects, which are never unpickled; save an array of numbers"
    )
    with np.load(path, allow_pickle=True) as loaded:
        assert loaded["w"].shape == ()
    assert created.exists()


def twice() -> bytes:
    return archive({"w.npy": npy(WEIGHT), "v.npy": npy(WEIGHT)}).replace(b"v.npy", b"w.npy")


ONE = archive({"w.npy": npy(WEIGHT)})
DEFLATED = archive({"w.npy": npy(np.zeros(5000))}, zipfile.ZIP_DEFLATED)
DEFLATED_SIZE = zipfile.ZipFile(io.BytesIO(DEFLATED)).getinfo("w.npy").compress_size
REFUSED = [
    pytest.param(b"", ": damaged zip archive; write or fetch the file anew", id="empty"),
    pytest.param(npy(WEIGHT), ": damaged zip archive; write or fetch the file anew", id="npy"),
    pytest.param(
        pickle.dumps({"w": 1}), ": damaged zip archive; write or fetch the file anew", id="pickle"
    ),
    pytest.param(ONE[:-30], ": damaged zip archive; write or fetch the file anew", id="truncated"),
    pytest.param(
        archive({"w.npy": npy(WEIGHT), "README.txt": b"hello"}),
        ", README.txt: is not a .npy member; an .npz archive holds arrays",
        id="text",
    ),
    pytest.param(archive({"folder/": b""}), ", folder/: is not a .npy member", id="folder"),
    pytest.param(
        archive({"data.pkl": b"\x80\x04K\x01."}),
        ", data.pkl: is not a .npy member",
        id="torch-archive",
    ),
    pytest.param(twice(), ", w.npy: stands twice in the archive", id="name-twice"),
    pytest.param(patched(ONE, CENTRAL, 8, b"\x01"), ", w.npy: is encrypted", id="encrypted"),
    pytest.param(
        archive({"w.npy": npy(WEIGHT)}, zipfile.ZIP_BZIP2),
        ", w.npy: has zip compression method 12; store or deflate it",
        id="bzip2",
    ),
    pytest.param(
        archive({"w.npy": npy(WEIGHT)}, zipfile.ZIP_LZMA),
        ", w.npy: has zip compression method 14; store or deflate it",
        id="lzma",
    ),
    pytest.param(
        archive({"w.npy": npy(WEIGHT)[:-1]}),
        ", w.npy: cut short: shape (2, 3) of float32 takes 24 bytes, 23 follow",
        id="member-cut-short",
    ),
    pytest.param(
        archive({"w.npy": npy(WEIGHT) + b"0"}),
        ", w.npy: too long: shape (2, 3) of float32 takes 24 bytes, 25 follow",
        id="member-too-long",
    ),
    pytest.param(archive({"w.npy": b"text"}), ", w.npy: is not a .npy file", id="member-no-array"),
    pytest.param(
        patched(ONE, CENTRAL, 24, struct.pack("<I", 1 << 31)),
        ", w.npy: 152 bytes in the archive cannot expand to 2147483648",
        id="stored-bomb",
    ),
    pytest.param(
        patched(DEFLATED, CENTRAL, 24, struct.pack("<I", 1 << 31)),
        f", w.npy: {DEFLATED_SIZE} bytes in the archive cannot expand to 2147483648",
        id="deflate-bomb",
    ),
    pytest.param(
        patched(ONE, CENTRAL, 20, struct.pack("<II", 9999, 9999)),
        ": damaged zip archive: its members take 9999 bytes, the file has 260",
        id="more-than-the-file",
    ),
    pytest.param(
        patched(ONE, LOCAL, 0, b"PK\x03\x05"),
        ", w.npy: damaged zip archive; write or fetch the file anew",
        id="local-header",
    ),
    pytest.param(
        patched(ONE, CENTRAL, 42, b"\x00\x00\x00\xf0"), ", w.npy: damaged zip archive", id="offset"
    ),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_what_is_not_an_archive_of_arrays_is_refused_in_one_line(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = put(tmp_path, data)
    with pytest.raises(FormatError) as caught:
        NpzSource(path)
    text = str(caught.value)
    assert text.startswith(f"{path}{message}")
    assert text.isprintable()
    assert "allow_pickle" not in text


@settings(deadline=None, max_examples=300)
@given(
    compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    flips=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damaged_archives_give_a_format_error_or_what_numpy_reads(
    scratch: Path, compression: int, flips: list[tuple[int, int]]
) -> None:
    damaged = bytearray(archive({"v.npy": npy(WEIGHT), "w.npy": npy(WEIGHT[0])}, compression))
    for position, value in flips:
        damaged[position % len(damaged)] = value
    path = put(scratch, bytes(damaged))
    try:
        source = NpzSource(path)
    except FormatError:
        return
    for info in source.infos():
        try:
            actual = source.read(info.name)
        except FormatError:
            continue
        with np.load(path) as loaded:
            expected = loaded[info.name]
        assert (actual.shape, actual.tobytes()) == (expected.shape, expected.tobytes())
    source.close()


def sink(
    path: Path,
    entries: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str] | None = None,
) -> NpzSink:
    return NpzSink(
        path,
        [Entry(name, DTYPES[dtype], shape) for name, (dtype, shape) in entries.items()],
        metadata or {},
    )


def test_written_members_are_those_of_np_save_in_the_order_written(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "w": np.asfortranarray(WEIGHT),
        "folder/größe": np.array(7, np.uint16),
        "int4": np.array([-8, 7, 0], ml_dtypes.int4),
        "empty": np.empty((0, 3), np.int8),
    }
    entries = {
        "empty": ("int8", (0, 3)),
        "w": ("float32", (2, 3)),
        "int4": ("int4", (3,)),
        "folder/größe": ("uint16", ()),
    }
    with sink(path, entries) as file:
        for name, array in arrays.items():
            file.write(name, array)
    with zipfile.ZipFile(path) as written:
        assert written.namelist() == [name + ".npy" for name in arrays]
        assert written.testzip() is None
        for name, array in arrays.items():
            assert written.read(name + ".npy") == npy(array.copy(order="C"))
            member = written.getinfo(name + ".npy")
            assert member.date_time == (1980, 1, 1, 0, 0, 0)
            assert (member.compress_type, member.create_system) == (zipfile.ZIP_STORED, 3)
    with np.load(path) as loaded:
        assert loaded["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert loaded["int4"].tobytes() == bytes.fromhex("080700")


def test_pieces_and_metadata_are_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    text = json.dumps({"stored": {"w": "bfloat16"}, "note": "é"}, ensure_ascii=False)
    with sink(path, {"w": ("bfloat16", (2,))}, {"qtool": text, "format": "pt"}) as file:
        file.write("w", iter([b"\x80", b"\x3f\x00\xc0"]))
    with np.load(path) as loaded:
        assert loaded.files == ["__qtool__", "w"]
        assert loaded["__qtool__"].dtype == np.uint8
        assert loaded["__qtool__"].tobytes().decode() == text
        assert loaded["w"].tobytes() == bytes.fromhex("803f00c0")
    source = NpzSource(path)
    assert source.metadata == {"qtool": text}
    assert source.read("w").tolist() == [1, -2]
    assert source.read("w").dtype == ml_dtypes.bfloat16
    source.close()


def test_the_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    paths = [tmp_path / "x.npz", tmp_path / "y.npz"]
    for path in paths:
        with sink(path, {"w": ("int8", (1,))}, {"qtool": "{}"}) as file:
            file.write("w", np.array([5], np.int8))
    data = paths[0].read_bytes()
    assert data == paths[1].read_bytes()
    # Signature, version, flags, method, time and date of 1 January 1980: nothing of today.
    assert data[:14] == bytes.fromhex("504b0304 1400 0000 0000 0000 2100")


def test_members_above_the_limit_of_zip_use_zip64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npz"
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    with sink(path, {"small": ("int8", (2,)), "w": ("int32", (500,))}) as file:
        file.write("small", np.array([1, 2], np.int8))
        file.write("w", np.arange(500, dtype=np.int32))
    data = path.read_bytes()
    assert data[data.index(LOCAL) + 4] == 20
    assert data[data.index(LOCAL, 4) + 4] == 45
    monkeypatch.undo()
    with np.load(path) as loaded:
        assert loaded["small"].tolist() == [1, 2]
        assert loaded["w"].tolist() == list(range(500))
    source = NpzSource(path)
    assert source.read("w").tolist() == list(range(500))
    source.close()


@pytest.mark.parametrize(
    "name",
    ["__qtool__", "a\0b", "\ud800", "x" * 65_532],
    ids=["reserved", "nul", "surrogate", "too-long"],
)
def test_names_that_an_archive_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"cannot be the name of an array in \.npz"):
        sink(tmp_path / "x.npz", {name: ("int8", (1,))})
    assert not (tmp_path / "x.npz").exists()


def test_the_longest_name_that_zip_allows_can_be_read_back(tmp_path: Path) -> None:
    path, name = tmp_path / "x.npz", "x" * 65_531
    with sink(path, {name: ("int8", (1,))}) as file:
        file.write(name, np.array([5], np.int8))
    source = NpzSource(path)
    assert source.read(name).tolist() == [5]
    source.close()


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    entry = Entry("w", DTYPES["int8"], (1,))
    with pytest.raises(OutputError, match="w: is the name of two entries"):
        NpzSink(tmp_path / "x.npz", [entry, entry], {})


def test_an_entry_is_written_once_and_under_its_name(tmp_path: Path) -> None:
    with sink(tmp_path / "x.npz", {"w": ("int8", (1,))}) as file:
        with pytest.raises(OutputError, match="v: is not an entry that is still to be written"):
            file.write("v", np.zeros(1, np.int8))
        file.write("w", np.zeros(1, np.int8))
        with pytest.raises(OutputError, match="w: is not an entry that is still to be written"):
            file.write("w", np.zeros(1, np.int8))


def test_leaving_with_entries_unwritten_is_an_error_that_names_them(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="a, b: was never written"),
        sink(tmp_path / "x.npz", {"a": ("int8", (1,)), "b": ("int8", (1,))}),
    ):
        pass


def test_data_of_the_wrong_length_is_the_error_that_is_seen(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"a: shape \(2,\) of int8 takes 2 bytes, 1 were given"),
        sink(tmp_path / "x.npz", {"a": ("int8", (2,))}) as file,
    ):
        file.write("a", iter([b"1"]))

"""The native layout: what is stored where, in bytes; metadata that does not fit is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import qtool
from qtool import formats
from qtool.dtypes import DTYPES, TARGETS
from qtool.errors import FormatError, OutputError
from qtool.formats import Entry
from qtool.layouts import native
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import read_metadata
from qtool.layouts.stored import Stored, codes_entry
from qtool.spec import Blocked, PerAxis, PerTensor

Array = NDArray[Any]

FLOAT32 = DTYPES["float32"]
TARGET_NAMES = [dtype.name for dtype in TARGETS]
SCALE_TYPES = ["float32", "float16", "bfloat16", "float8e4m3fn", "float8e8m0"]
W = np.random.default_rng(6).normal(size=(3, 10)).astype(np.float32)
FIELDS = {
    "dtype": "int4", "shape": [3, 10], "granularity": "blocked", "axis": 1, "block_size": 4,
    "scale_dtype": "float16", "source_dtype": "bfloat16", "zero_point": False,
}  # fmt: skip
BY_SAFETENSORS = {"I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16,
                  "F32": np.float32, "BF16": np.uint16}  # fmt: skip


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors (float8 as bytes) and the metadata, as the reference reads them."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in safetensors.deserialize(data):
        dtype = BY_SAFETENSORS.get(entry["dtype"], np.uint8)
        tensors[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    return tensors, json.loads(data[8 : 8 + size])["__metadata__"]


@contextmanager
def dequantized(path: Path, dtype: str = "float32") -> Iterator[DequantizedSource]:
    with closing(formats.open(path)) as source:
        yield DequantizedSource(source, DTYPES[dtype])


def metadata_of(path: Path) -> dict[str, Stored]:
    with closing(formats.open(path)) as source:
        return dict(read_metadata(source).tensors)


def source_file(folder: Path, container: str = "safetensors", **more: Array) -> Path:
    path = folder / f"w.{container}"
    if container == "npz":
        np.savez(path, w=W, **more)
    else:
        save_file({"w": W, **more}, path, metadata={"format": "pt"})
    return path


def crafted(
    folder: Path, fields: Any, codes: Array | None = None, scale: Array | None = None
) -> Path:
    """A file whose metadata says fields of w."""
    path = folder / "crafted.safetensors"
    tensors = {
        "w": np.zeros(15, np.uint8) if codes is None else codes,
        "w.scale": np.ones((3, 3), np.float16) if scale is None else scale,
    }
    text = json.dumps({"version": 1, "tensors": {"w": fields}, "stored": {}})
    save_file(tensors, path, metadata={"qtool": text})
    return path


def test_the_metadata_is_this_json(tmp_path: Path) -> None:
    path = source_file(tmp_path, bias=np.ones(3, np.float32))
    qtool.quantize_file(path, tmp_path / "q.safetensors", dtype="int4", block_size=4)
    tensors, metadata = read_safetensors(tmp_path / "q.safetensors")
    assert metadata["format"] == "pt"
    assert metadata["qtool"] == (
        f'{{"version":1,"tool":{{"name":"qtool","version":"{qtool.__version__}"}},'
        r'"recipe":"dtype = \"int4\"\nblock_size = 4\n",'
        '"tensors":{"w":{"dtype":"int4","shape":[3,10],"granularity":"blocked",'
        '"axis":1,"block_size":4,"scale_dtype":"float32","source_dtype":"float32",'
        '"zero_point":false}},"stored":{}}'
    )
    assert {name: (a.dtype.name, a.shape) for name, a in tensors.items()} == {
        "w": ("uint8", (15,)), "w.scale": ("float32", (3, 3)), "bias": ("float32", (3,)),
    }  # fmt: skip


CODES_BY_HAND = [
    ("int8", [-127, 0, 1, 127], "81 00 01 7f", "I8"),
    ("int16", [-32767, 0, 1, 32767], "01 80 00 00 01 00 ff 7f", "I16"),
    ("int4", [-7, 1, 2, 7, -1], "19 72 0f", "U8"),
    ("int2", [-1, 1, 0, 1, -1], "47 03", "U8"),
    ("float8e4m3fn", [-448, 1, 2], "fe 38 40", "F8_E4M3"),
    ("float8e5m2", [-57344, 1, 2], "fb 3c 40", "F8_E5M2"),
    ("float8e4m3fnuz", [-240, 1, 2], "ff 40 48", "F8_E4M3FNUZ"),
    ("float8e5m2fnuz", [-57344, 1, 2], "ff 40 44", "F8_E5M2FNUZ"),
    ("float4e2m1", [-6, 1, 2, 0.5], "2f 14", "U8"),
    ("float6e2m3", [-7.5, 1, 2], "3f 02 01", "U8"),
    ("float6e3m2", [-28, 1, 2], "3f 03 01", "U8"),
]


@pytest.mark.parametrize(
    ("dtype", "values", "code_bytes", "stored"), CODES_BY_HAND, ids=[c[0] for c in CODES_BY_HAND]
)
def test_codes_are_stored_as_these_bytes(
    tmp_path: Path, dtype: str, values: list[float], code_bytes: str, stored: str
) -> None:
    np.save(tmp_path / "w.npy", np.array(values, np.float32))
    qtool.quantize_file(tmp_path / "w.npy", tmp_path / "q.safetensors", dtype=dtype)
    found = dict(safetensors.deserialize((tmp_path / "q.safetensors").read_bytes()))
    assert bytes(found["w"]["data"]) == bytes.fromhex(code_bytes)
    assert found["w"]["dtype"] == stored
    assert found["w.scale"]["shape"] == []
    assert bytes(found["w.scale"]["data"]) == bytes.fromhex("00 00 80 3f")
    assert set(found) == {"w", "w.scale"}


def test_zero_points_are_packed_like_codes(tmp_path: Path) -> None:
    x = np.array([[0, 15], [-5, 10], [-15, 0]], np.float32)
    np.save(tmp_path / "w.npy", x)
    qtool.quantize_file(tmp_path / "w.npy", tmp_path / "q.safetensors", dtype="uint4", axis=0)
    tensors, _ = read_safetensors(tmp_path / "q.safetensors")
    assert tensors["w.zero_point"].tobytes() == bytes.fromhex("50 0f")
    assert tensors["w"].tobytes() == bytes.fromhex("f0 f0 f0")
    assert tensors["w.scale"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize(
    ("target", "scale_dtype"),
    [
        *product(["int8", "uint2"], SCALE_TYPES),
        *zip(TARGET_NAMES, cycle(SCALE_TYPES), strict=False),
    ],
)
def test_every_type_comes_back_from_every_container(
    tmp_path: Path, target: str, scale_dtype: str, container: str
) -> None:
    src, dst = source_file(tmp_path, container), tmp_path / f"q.{container}"
    spec = qtool.QuantSpec(target, Blocked(1, 4), scale_dtype=scale_dtype)
    qtool.quantize_file(src, dst, dtype=target, block_size=4, scale_dtype=scale_dtype)
    q = qtool.quantize(W, spec)
    with dequantized(dst) as source:
        values = source.read("w")
        scale, zero_point, over = source.parameters("w")
    assert over is None
    assert values.tobytes() == q.dequantize().tobytes()
    assert (scale.dtype, scale.tobytes()) == (q.scale.dtype, q.scale.tobytes())
    assert (zero_point is None) == (q.zero_point is None)
    if zero_point is not None and q.zero_point is not None:
        assert zero_point.tobytes() == q.zero_point.tobytes()


def test_npz_says_what_numpy_has_no_name_for(tmp_path: Path) -> None:
    src = source_file(tmp_path, "npz")
    for target, stored in (("float8e5m2", {"w": "float8e5m2", "w.scale": "bfloat16"}),
                           ("int8", {"w.scale": "bfloat16"})):  # fmt: skip
        qtool.quantize_file(
            src, tmp_path / "q.npz", dtype=target, scale_dtype="bfloat16", force=True
        )
        with np.load(tmp_path / "q.npz") as file:
            layout = json.loads(file["__qtool__"].tobytes())
        assert layout["stored"] == stored


def test_npy_holds_the_codes_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", W)
    qtool.quantize_file(tmp_path / "w.npy", tmp_path / "q.npy", dtype="int8", axis=0)
    wanted = qtool.quantize(W, qtool.QuantSpec("int8", PerAxis(0)))
    np.testing.assert_array_equal(np.load(tmp_path / "q.npy"), wanted.y, strict=True)


def test_names_that_collide_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    dst = tmp_path / "q.safetensors"
    dst.write_bytes(b"old")
    for name, dtype in (("w.scale", "int8"), ("w.zero_point", "uint8"), ("w.zero_point", "int8"),
                        ("w.global_scale", "int8")):  # fmt: skip
        path = source_file(tmp_path, **{name: np.ones(3, np.float32)})
        with pytest.raises(OutputError) as error:
            qtool.quantize_file(path, dst, force=True, dtype=dtype)
        assert str(error.value) == (
            f"tensor {name}: its name is needed for parameters of w; rename it in the source, or "
            "use --exclude 'w'"
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["q.safetensors", "w.safetensors"]
        assert dst.read_bytes() == b"old"


def test_names_are_free_again_where_the_tensor_stays(tmp_path: Path) -> None:
    path = source_file(tmp_path, **{"v": W, "w.scale": np.ones(3, np.float32)})
    qtool.quantize_file(path, tmp_path / "q.safetensors", dtype="int8", exclude=["w"])
    tensors, _ = read_safetensors(tmp_path / "q.safetensors")
    assert set(tensors) == {"v", "v.scale", "w", "w.scale"}
    assert tensors["w.scale"].tolist() == [1, 1, 1]


def test_tensors_that_stay_are_copied_byte_for_byte(tmp_path: Path) -> None:
    others = {"bias": np.array([np.nan, -0.0], np.float32), "ids": np.arange(3),
              "mask": np.array([True, False])}  # fmt: skip
    path = source_file(tmp_path, **others)
    qtool.quantize_file(path, tmp_path / "q.safetensors", dtype="int8")
    found = dict(safetensors.deserialize((tmp_path / "q.safetensors").read_bytes()))
    for name, array in others.items():
        assert bytes(found[name]["data"]) == array.tobytes()
        assert found[name]["shape"] == list(array.shape)


def test_a_dequantized_file_has_the_tensors_and_metadata_of_the_first(tmp_path: Path) -> None:
    path = source_file(tmp_path, bias=np.ones(3, np.float32))
    qtool.quantize_file(path, tmp_path / "q.safetensors", dtype="uint8")
    with dequantized(tmp_path / "q.safetensors", "float16") as source:
        infos = {info.name: (info.shape, info.dtype.name, info.nbytes) for info in source.infos()}
        assert infos == {"w": ((3, 10), "float16", 60), "bias": ((3,), "float32", 12)}
        assert source.metadata == {"format": "pt"}
        assert b"".join(source.chunks("bias")) == np.ones(3, np.float32).tobytes()
        assert b"".join(source.chunks("w")) == source.read("w").tobytes()
        assert source.read("w").dtype == np.float16


def test_float64_is_the_float32_value_widened(tmp_path: Path) -> None:
    qtool.quantize_file(source_file(tmp_path), tmp_path / "q.safetensors", dtype="int8")
    with dequantized(tmp_path / "q.safetensors") as source:
        narrow = source.read("w")
    with dequantized(tmp_path / "q.safetensors", "float64") as source:
        wide = source.read("w")
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, narrow)


def test_a_file_without_the_metadata_holds_nothing_quantized(tmp_path: Path) -> None:
    with dequantized(source_file(tmp_path)) as source:
        assert source.tensors == {}
        np.testing.assert_array_equal(source.read("w"), W)


def test_what_the_metadata_says_is_read(tmp_path: Path) -> None:
    stored = Stored(
        DTYPES["int4"], (3, 10), Blocked(1, 4), DTYPES["float16"], DTYPES["bfloat16"],
        zero_point=False,
    )  # fmt: skip
    assert metadata_of(crafted(tmp_path, FIELDS)) == {"w": stored}
    assert stored.to_json() == FIELDS


@pytest.mark.parametrize(
    ("granularity", "fields"),
    [
        (PerTensor(), {"granularity": "per_tensor", "axis": None, "block_size": None}),
        (PerAxis(1), {"granularity": "per_axis", "axis": 1, "block_size": None}),
        (Blocked(0, 2), {"granularity": "blocked", "axis": 0, "block_size": 2}),
    ],
)
def test_granularities_are_described_and_read(granularity: Any, fields: dict[str, Any]) -> None:
    stored = Stored(DTYPES["int4"], (3, 10), granularity, FLOAT32, FLOAT32, zero_point=True)
    assert stored.to_json().items() >= fields.items()
    assert Stored.from_json(stored.to_json()) == stored


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int5"}, {"dtype": "float32"}, {"dtype": 22}, {"dtype": None},
        {"dtype": ["int4"]},
        {"shape": [3, -10]}, {"shape": [3.0, 10]}, {"shape": "310"}, {"shape": 30},
        {"shape": None}, {"shape": [True, 10]}, {"shape": [0, 10**30]}, {"shape": [1] * 65},
        {"shape": [0, 2**40, 2**40]}, {"granularity": "per_row"}, {"granularity": None},
        {"axis": 2}, {"axis": -3}, {"axis": 1.0}, {"axis": None}, {"axis": True}, {"axis": "1"},
        {"axis": 10**400}, {"block_size": 0}, {"block_size": -4}, {"block_size": 4.0},
        {"block_size": None}, {"block_size": "4"}, {"scale_dtype": "int8"},
        {"scale_dtype": "float64"}, {"scale_dtype": "?"}, {"source_dtype": "?"},
        {"source_dtype": {}},
    ],
    ids=str,
)  # fmt: skip
def test_metadata_that_qtool_does_not_write_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = crafted(tmp_path, FIELDS | change)
    rule = r"metadata 'qtool'.*: is not as qtool writes it; write or fetch the file anew$"
    with pytest.raises(FormatError, match=rule), dequantized(path):
        pass


def test_zero_points_are_found_where_metadata_does_not_speak_of_them(tmp_path: Path) -> None:
    x, path, old = (
        tmp_path / "x.safetensors",
        tmp_path / "q.safetensors",
        tmp_path / "o.safetensors",
    )
    save_file({"w": np.linspace(-1, 3, 64, dtype=np.float32).reshape(8, 8)}, x)
    qtool.quantize_file(x, path, dtype="uint8")
    with safe_open(path, "np") as file:
        described = json.loads(file.metadata()["qtool"])
    assert described["tensors"]["w"].pop("zero_point") is True
    save_file(load_file(path), old, metadata={"qtool": json.dumps(described)})
    values = []
    for source in (path, old):
        qtool.dequantize_file(source, tmp_path / "b.safetensors", force=True)
        values.append(load_file(tmp_path / "b.safetensors")["w"])
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("missing", [name for name in FIELDS if name != "zero_point"])
def test_metadata_with_a_field_missing_is_refused(tmp_path: Path, missing: str) -> None:
    path = crafted(tmp_path, {name: v for name, v in FIELDS.items() if name != missing})
    rule = "metadata 'qtool' of tensor 'w': is not as qtool writes it"
    with pytest.raises(FormatError, match=rule), dequantized(path):
        pass


@pytest.mark.parametrize(
    "text",
    ["", "nope", "[]", "1", "null", '"x"', "{}", '{"version":1}', '{"version":1,"tensors":[]}',
     '{"version":1,"tensors":{"w":[]}}', '{"version":1,"tensors":{"w":null}}',
     '{"tensors":{}}', "[" * 100000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_metadata_that_is_not_the_layout_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": W}, path, metadata={"qtool": text})
    with pytest.raises(FormatError, match=r"metadata 'qtool'.*: (is no JSON|is not as)"):
        metadata_of(path)


def test_another_version_of_the_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": W}, path, metadata={"qtool": '{"version":2}'})
    with pytest.raises(FormatError) as error:
        metadata_of(path)
    assert str(error.value) == (
        f"{path}: metadata 'qtool': version 2 of the layout; this qtool reads version 1"
    )


@pytest.mark.parametrize(
    ("change", "codes", "scale", "message"),
    [
        ({}, np.zeros(16, np.uint8), None,
         "tensor w: is uint8 [16]; the metadata needs uint8 [15]"),
        ({}, np.zeros(15, np.int8), None,
         "tensor w: is int8 [15]; the metadata needs uint8 [15]"),
        ({}, None, np.ones((3, 3), np.float32),
         "tensor w.scale: is float32 [3, 3]; the metadata needs float16 [3, 3]"),
        ({}, None, np.ones((3, 2), np.float16),
         "tensor w.scale: is float16 [3, 2]; the metadata needs float16 [3, 3]"),
        ({"granularity": "per_tensor"}, None, None,
         "tensor w.scale: is float16 [3, 3]; the metadata needs float16 []"),
        ({"shape": [10, 3], "dtype": "uint8"}, np.zeros((3, 10), np.uint8), None,
         "tensor w: is uint8 [3, 10]; the metadata needs uint8 [10, 3]"),
    ],
    ids=str,
)  # fmt: skip
def test_metadata_that_does_not_fit_the_tensors_is_refused(
    tmp_path: Path, change: dict[str, Any], codes: Array | None, scale: Array | None, message: str
) -> None:
    path = crafted(tmp_path, FIELDS | change, codes, scale)
    with pytest.raises(FormatError) as error, dequantized(path):
        pass
    assert str(error.value) == f"{path}: {message}"


def test_metadata_of_a_tensor_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    text = json.dumps({"version": 1, "tensors": {"w": FIELDS}})
    save_file({"w": np.zeros(15, np.uint8)}, path, metadata={"qtool": text})
    with pytest.raises(FormatError) as error, dequantized(path):
        pass
    assert str(error.value) == (
        f"{path}: tensor w.scale: is missing; the metadata needs float16 [3, 3]"
    )


def test_entries_know_packed_sizes() -> None:
    spec = qtool.QuantSpec("uint4", Blocked(1, 4))
    stored = Stored.of(spec, (3, 5), DTYPES["bfloat16"], DTYPES["bfloat16"], zero_point=True)
    found = [part.entry for part in native.parts("w", stored)]
    uint8 = DTYPES["uint8"]
    assert found == [
        Entry("w", uint8, (8,)),
        Entry("w.scale", DTYPES["bfloat16"], (3, 2)),
        Entry("w.zero_point", uint8, (3,)),
    ]
    assert codes_entry("w", DTYPES["float6e2m3"], (5,)) == Entry("w", uint8, (4,))
    assert codes_entry("w", DTYPES["int2"], (0, 3)) == Entry("w", uint8, (0,))
    assert codes_entry("w", DTYPES["int2"], ()) == Entry("w", uint8, (1,))
    assert codes_entry("w", DTYPES["int16"], (5,)) == Entry("w", DTYPES["int16"], (5,))


def test_names_outside_ascii_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"gewicht.ß": W, "重み": W.astype(ml_dtypes.bfloat16)}, path)
    qtool.quantize_file(path, tmp_path / "q.safetensors", dtype="int8")
    tensors, metadata = read_safetensors(tmp_path / "q.safetensors")
    assert set(tensors) == {"gewicht.ß", "gewicht.ß.scale", "重み", "重み.scale"}
    assert set(json.loads(metadata["qtool"])["tensors"]) == {"gewicht.ß", "重み"}
    assert '"重み":{' in metadata["qtool"]

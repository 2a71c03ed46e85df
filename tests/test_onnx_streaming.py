"""Large ONNX models: read and written piece by piece, in bounded memory, with the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_jobs import dequantized
from onnx_models import Array, initializer, model, quantized, save

import qtool
from qtool import engine
from qtool.dtypes import DTYPES
from qtool.engine import restore_plain
from qtool.errors import FormatError, OutputError, TensorError
from qtool.formats.onnx import OnnxSource
from qtool.formats.onnx.data import DataFile
from qtool.layouts.onnx_qdq import OnnxQdq
from qtool.layouts.onnx_weight import Weight
from qtool.packing import pack
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, reader_of
from qtool.tensor import Codes

RNG = np.random.default_rng(29)
LARGE = RNG.normal(size=(320, 256)).astype(np.float32)  # more than a tile of the kernels
SMALL = RNG.normal(size=(256, 33)).astype(np.float32)


def three_weights(**weights: Array) -> ModelProto:
    stored = {"v": LARGE, "w": SMALL, "kept": RNG.normal(size=33).astype(np.float32)} | weights
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["i"]),
        helper.make_node("Add", ["i", "kept"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(values, name) for name, values in stored.items()]
    return model(nodes, tensors, inputs={"x": (2, 320)})


def stored_outside(made: ModelProto, path: Path) -> Path:
    """The model with its initializers in the file weights.bin, 12 bytes apart."""
    content = b""
    for tensor in made.graph.initializer:
        content += b"\xa5" * 12
        place = {"location": "weights.bin", "offset": len(content), "length": len(tensor.raw_data)}
        content += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    (path.parent / "weights.bin").write_bytes(content)
    return save(made, path)


@pytest.fixture(params=["inline", "external"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write = save if request.param == "inline" else stored_outside
    return write(three_weights(), folder / "m.onnx")


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: True)
    monkeypatch.setattr(engine, "TILES_PAY", 0)


def listing(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without the report, which holds the time."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.suffix != ".json"}


def test_any_part_of_a_tensor_is_read_by_any_thread(source: Path) -> None:
    opened = OnnxSource(source)

    def part(start: int) -> bytes:
        out = np.empty(777, np.float32)
        read(start, out)
        return out.tobytes()

    starts = range(0, LARGE.size - 777, 5000)
    with opened.reading("v") as read, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(part, starts))
    assert found == [LARGE.reshape(-1)[start : start + 777].tobytes() for start in starts]


def test_codes_of_less_than_a_byte_are_read_one_by_one(tmp_path: Path) -> None:
    codes = np.arange(-8, 7).astype(ml_dtypes.int4)
    made = model(
        [helper.make_node("Identity", ["q"], ["y"])], [initializer("q", codes, ml_dtypes.int4)]
    )
    out = np.empty(4, ml_dtypes.int4)
    with OnnxSource(save(made, tmp_path / "m.onnx")).reading("q") as read:
        read(5, out)
    assert out.astype(int).tolist() == [-3, -2, -1, 0]


def test_data_that_was_cut_after_opening_is_reported(tmp_path: Path) -> None:
    path = stored_outside(three_weights(), tmp_path / "m.onnx")
    opened = OnnxSource(path)
    stored, out = opened.stored("kept"), np.empty(LARGE.size, np.float32)
    with opened.reading("v") as read:
        os.truncate(tmp_path / "weights.bin", 12 + LARGE.nbytes - 5)
        with pytest.raises(FormatError, match=r"weights\.bin: ends at byte"):
            read(0, out)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FormatError, match=r"weights\.bin: cannot be read"):
        stored.array()


@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int4", "block_size": 32},
        {"dtype": "uint8"},
        {"dtype": "int8", "axis": 1},
        {"dtype": "uint4", "block_size": 24, "axis": 1},
        {"dtype": "float8e4m3fn", "block_size": 128},
        {"dtype": "float4e2m1", "block_size": 16},
        {"dtype": "int2", "exclude": ["v"]},
    ],
    ids=str,
)
def test_tiles_and_threads_change_no_byte(
    source: Path,
    tmp_path: Path,
    options: dict[str, Any],
    external_data: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "q.onnx"

    def files(jobs: int) -> dict[str, bytes]:
        qtool.quantize_file(
            source, out, force=True, jobs=jobs, external_data=external_data, **options
        )
        return listing(tmp_path)

    plain = files(1)
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: True)
    monkeypatch.setattr(engine, "TILES_PAY", 0)
    assert [files(jobs) == plain for jobs in (1, 2, 5)] == [True] * 3


@pytest.mark.usefixtures("tiled")
def test_the_data_file_bears_the_hash_of_its_content(source: Path, tmp_path: Path) -> None:
    qtool.quantize_file(source, tmp_path / "q.onnx", dtype="int8", external_data=True)
    (data,) = tmp_path.glob("*.data")
    assert data.name == f"q.{xxhash.xxh3_64(data.read_bytes()).hexdigest()}.data"


def test_a_data_file_is_the_same_in_whatever_order_it_is_written(tmp_path: Path) -> None:
    parts = [RNG.bytes(size) for size in (5000, 3 << 20, 1, 4096, 1 << 20)]
    expected = b"".join(part + bytes(-len(part) % 4096) for part in parts[:-1]) + parts[-1]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        path = tmp_path / "data"
        path.write_bytes(b"")
        with DataFile(path, [len(part) for part in parts]) as data:
            assert data.offsets == [0, 8192, 3153920, 3158016, 3162112]
            for index in order:
                values = np.frombuffer(parts[index], np.uint8)
                with data.writing(index) as write:
                    for start in reversed(range(0, values.size, 70_000)):
                        write(start, values[start : start + 70_000])
            assert data.content_hash() == xxhash.xxh3_64(expected).hexdigest()
        assert path.read_bytes() == expected


def failing(count: int) -> Any:
    """os.pwrite on a disk that is full after so many calls."""
    calls = iter(range(count))
    pwrite = os.pwrite

    def write(*args: Any) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    return write


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_full_disk_leaves_everything_as_it_was(
    source: Path,
    tmp_path: Path,
    external_data: bool,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "q.onnx"
    for old in (False, True):
        if old:
            qtool.quantize_file(source, out, dtype="int8", external_data=True)
        before = listing(tmp_path), listing(source.parent)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(count))
            with pytest.raises(OutputError, match="No space left"):
                qtool.quantize_file(
                    source, out, dtype="uint8", external_data=external_data, force=True
                )
        assert (listing(tmp_path), listing(source.parent)) == before


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
def test_a_weight_that_cannot_be_quantized_leaves_no_data_file(
    tmp_path: Path, external_data: bool
) -> None:
    bad = SMALL.copy()
    bad[200, 7] = np.nan
    path = save(three_weights(w=bad), tmp_path / "m.onnx")
    with pytest.raises(TensorError, match=r"tensor w: nan at \[200, 7\]"):
        qtool.quantize_file(path, tmp_path / "q.onnx", dtype="int8", external_data=external_data)
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
def test_values_that_were_not_stored_are_missed(
    source: Path, tmp_path: Path, external_data: bool
) -> None:
    spec = QuantSpec("int8", PerAxis(1))
    weights = {n: Weight(spec, DTYPES["float32"], has_zero_point=False) for n in ("v", "w")}
    opened = OnnxSource(source)
    tensor = quantized(SMALL, spec, "float32", None)
    before = listing(tmp_path)

    def quantize(*names: str) -> None:
        with OnnxQdq(opened, weights, tmp_path / "q.onnx", external_data=external_data) as writer:
            for name in names:
                writer.add(name, tensor)

    with pytest.raises(OutputError, match=r"not written: \['v_quantized', 'v_scale'\]"):
        quantize("w")
    with pytest.raises(OutputError, match="'w_quantized' needs no values or has been written"):
        quantize("w", "w")
    with pytest.raises(OutputError, match="8448 bytes of 81920 were written"):
        quantize("v")
    assert listing(tmp_path) == before


CASES: list[tuple[str, tuple[int, ...], Granularity]] = [
    ("int8", (), PerTensor()),
    ("int4", (5, 7, 3), PerTensor()),
    ("uint4", (5, 7, 3), PerAxis(1)),
    ("int2", (3, 50), PerAxis(0)),
    ("uint16", (4, 6), PerAxis(1)),
    ("int4", (3, 50), Blocked(1, 8)),
    ("float4e2m1", (50, 3), Blocked(0, 16)),
    ("float6e2m3", (2, 9, 33), Blocked(1, 4)),
    ("float8e5m2", (2, 9, 33), Blocked(2, 100)),
    ("int8", (0, 4), PerAxis(1)),
]


@pytest.mark.parametrize("tile", [1, 8, 40, 1 << 17])
@pytest.mark.parametrize("has_zero_point", [False, True], ids=["", "zero-point"])
@pytest.mark.parametrize(("dtype", "shape", "granularity"), CASES, ids=str)
def test_tiles_of_every_size_dequantize_alike(
    dtype: str,
    shape: tuple[int, ...],
    granularity: Granularity,
    has_zero_point: bool,
    tile: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restore_plain, "TILE", tile)
    element = DTYPES[dtype]
    has_zero_point = has_zero_point and element.is_integer
    low = 0 if element.kind == "uint" else -2
    codes = RNG.integers(low, 2, shape).astype(element.numpy)
    scale_shape = granularity.scale_shape(shape)
    scale = RNG.uniform(0.5, 2, scale_shape).astype(np.float32)
    zero = RNG.integers(low, 2, scale_shape).astype(element.numpy) if has_zero_point else None
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], **granularity.attributes)
    expected = dequantized(node, codes, scale, zero)
    result = np.full(shape, np.nan, np.float32)
    stored = result.reshape(-1).view(np.uint8)

    def write(offset: int, data: Array) -> None:
        stored[offset : offset + data.nbytes] = data

    read = reader_of(pack(codes, element))
    stored_codes = Codes(read, element, shape, scale, zero, granularity)
    restore_plain.restore(stored_codes, write, DTYPES["float32"], jobs=2)
    assert (result == expected).all()
    pieces = list(restore_plain.values(stored_codes, DTYPES["float32"]))
    assert max((piece.size for piece in pieces), default=0) <= max(tile, 8)
    assert np.concatenate([np.empty(0), *pieces]).tolist() == expected.reshape(-1).tolist()


def test_dequantize_leaves_nothing_where_the_disk_is_full(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q.onnx"
    qtool.quantize_file(source, path, dtype="int4", block_size=32, external_data=True)
    before = listing(tmp_path)
    monkeypatch.setattr(os, "pwrite", failing(2))
    for external_data in (False, True):
        with pytest.raises(OutputError, match="No space left"):
            qtool.dequantize_file(path, tmp_path / "d.onnx", external_data=external_data)
        assert listing(tmp_path) == before


def nested(made: ModelProto, path: Path) -> Path:
    """The model with its weights in Constant nodes of a branch."""
    body = helper.make_graph(
        [helper.make_node("Constant", [], [t.name], value=t) for t in made.graph.initializer],
        "then", [], made.graph.output,
    )  # fmt: skip
    body.node.extend(made.graph.node)
    del made.graph.initializer[:], made.graph.node[:]
    names = [value.name for value in made.graph.output]
    node = helper.make_node("If", ["c"], names, then_branch=body, else_branch=body)
    made.graph.node.append(node)
    made.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    return save(made, path)


@pytest.fixture(scope="module", params=["inline", "external", "nested"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of 320 MiB."""
    folder = tmp_path_factory.mktemp("big")
    tiles = 128 if request.param == "nested" else 256  # both branches hold them
    weight = np.tile(RNG.normal(size=(64, 2560)).astype(np.float32), (tiles, 1))
    made = model(
        [helper.make_node("MatMul", ["x", name], [f"y{name}"]) for name in "vw"],
        [numpy_helper.from_array(weight, name) for name in "vw"],
        inputs={"x": (1, len(weight))},
        outputs=("yv", "yw"),
    )
    write = {"inline": save, "external": stored_outside, "nested": nested}[request.param]
    yield write(made, folder / "m.onnx")
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("external_data", [False, True], ids=["inline", "external"])
def test_memory_does_not_grow_with_the_model(big: Path, external_data: bool) -> None:
    code = """if True:
        import sys, qtool
        job, source, target, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
        getattr(qtool, job)(source, target, force=True, **options)
        status = open("/proc/self/status").read().split()
        print(status[status.index("VmHWM:") + 1])
    """
    folder = big.parent
    for job, source, target, options in [
        ("quantize_file", "m.onnx", "q.onnx", {"dtype": "int4", "block_size": 32}),
        ("dequantize_file", "q.onnx", "d.onnx", {}),
    ]:
        options |= {"external_data": external_data}
        names = [str(folder / source), str(folder / target)]
        done = subprocess.run(
            [sys.executable, "-c", code, job, *names, str(options)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) < 280 * 1024  # KiB

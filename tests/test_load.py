"""Many tensors, many shards, and one tensor of more than 2^31 elements: time in proportion to
them, counted in calls of functions, and bounded memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx_models import initializer, model, save

from qtool.kernels import machine

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("load.py")
Used = dict[str, Any]


def used(folder: Path, command: str, *, counted: bool = False) -> Used:
    """What a command takes in a folder."""
    run = subprocess.run(
        [sys.executable, SCRIPT, str(int(counted)), *command.split()], cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: Used = json.loads(run.stdout)
    assert found["code"] == 0, (command, run.stderr)
    print(f"{command}: {found}")
    return found


def write_safetensors(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """As save_file() does, in a tenth of its time."""
    header, at = {}, 0
    for name, x in tensors.items():
        where = [at, at + x.nbytes]
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": where}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tiny(count: int) -> dict[str, NDArray[Any]]:
    values = np.random.default_rng(1).standard_normal((count, 4, 8)).astype(np.float32)
    return {f"layers.{i // 4}.part{i % 4}.weight": x for i, x in enumerate(values)}


def safetensors(folder: Path, count: int) -> str:
    write_safetensors(folder / "s.safetensors", tiny(count))
    return "safetensors"


def npz(folder: Path, count: int) -> str:
    np.savez(folder / "s.npz", **tiny(count))  # type: ignore[arg-type]
    return "npz"


def onnx_model(folder: Path, count: int) -> str:
    """A chain of Gemm nodes, whose weights change from 4 to 8 features and back."""
    weights, nodes = [], []
    for i, (name, x) in enumerate(tiny(count).items()):
        weights.append(initializer(name, x if i % 2 == 0 else x.T))
        nodes.append(helper.make_node("MatMul", [f"x{i}", name], [f"x{i + 1}"]))
    made = model(nodes, weights, inputs={"x0": (1, 4)}, outputs=[f"x{count}"])
    save(made, folder / "s.onnx")
    return "onnx"


def checkpoint(folder: Path, count: int) -> str:
    """Ten tensors to a shard."""
    (folder / "s").mkdir()
    tensors = list(tiny(count).items())
    shards = {
        f"model-{i + 1:05}-of-{count // 10:05}.safetensors": dict(tensors[10 * i : 10 * i + 10])
        for i in range(count // 10)
    }
    for name, held in shards.items():
        write_safetensors(folder / "s" / name, held)
    names = {key: name for name, held in shards.items() for key in held}
    index = {"metadata": {"total_size": 128 * count}, "weight_map": names}
    (folder / "s" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "s" / "config.json").write_text("{}")
    return ""


SOURCES: dict[str, tuple[Callable[[Path, int], str], int]] = {
    "safetensors": (safetensors, 1000),
    "npz": (npz, 1000),
    "onnx": (onnx_model, 1000),
    "checkpoint": (checkpoint, 300),
}
# {}: what names of files end in. The first ones make what the later ones read.
COMMANDS = """
quantize s{} -o q{} --dtype int8 --method absmax -q
quantize s{} -o n{} --dtype int8 --dry-run
inspect s{} --stats
inspect q{}
inspect q{} --json
verify s{} q{} --report v.json
dequantize q{} -o d{} -q
dynamic s{} -o y{} -q
compare s{} --dtypes int8 --block-sizes axis --methods absmax
report v.json -o p.html
report v.json -o p.md
report v.json -o p.csv
report v.json -o p.png
"""


def lines(kind: str, folder: Path, count: int) -> Iterator[str]:
    """The commands, for a source that is made there."""
    make, _ = SOURCES[kind]
    container = make(folder, count)
    suffix = f".{container}" if container else ""
    for line in COMMANDS.strip().splitlines():
        if not (line.startswith("compare") and kind == "onnx"):
            yield line.replace("{}", suffix)


@pytest.mark.parametrize("kind", SOURCES)
def test_time_is_in_proportion_to_the_number_of_tensors(kind: str, tmp_path: Path) -> None:
    """Of twice as many tensors. What takes the square takes four times as many calls."""
    found: list[list[tuple[str, Used]]] = []
    for times in (1, 2):
        folder = tmp_path / str(times)
        folder.mkdir()
        count = SOURCES[kind][1] * times
        found.append([(x, used(folder, x, counted=True)) for x in lines(kind, folder, count)])
    for (command, once), (_, twice) in zip(*found, strict=True):
        assert twice["calls"] < 2.05 * once["calls"], command
        more = twice["peak"] - once["peak"]
        assert more < SOURCES[kind][1] * 20_000 + (4 << 20), (command, more)


LARGE = {"safetensors": 100_000, "npz": 20_000, "onnx": 20_000, "checkpoint": 2000}


@pytest.mark.parametrize("kind", LARGE)
def test_memory_and_pages_of_very_many_tensors(kind: str, tmp_path: Path) -> None:
    for command in lines(kind, tmp_path, LARGE[kind]):
        found = used(tmp_path, command)
        assert found["peak"] < (100 << 20) + LARGE[kind] * 15_000, command
    assert (tmp_path / "p.html").stat().st_size < 5_000_000


COUNT = (1 << 31) + 3
PLACES = {0: 1.5, (1 << 31) - 1: -2.5, 1 << 31: 3.25, (1 << 31) + 2: -4.0}
ZEROS = (1, (1 << 31) - 2, (1 << 31) + 1)


def fill(path: Path, head: bytes) -> None:
    """A file of float16, most of them holes."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 2 * COUNT)
        for place, value in PLACES.items():
            file.seek(len(head) + 2 * place)
            file.write(np.float16(value).tobytes())


def large_safetensors(folder: Path) -> Path:
    entry = {"dtype": "F16", "shape": [1, COUNT], "data_offsets": [0, 2 * COUNT]}
    text = json.dumps({"w": entry}).encode()
    text += b" " * (-len(text) % 8)
    fill(folder / "w.safetensors", len(text).to_bytes(8, "little") + text)
    return folder / "w.safetensors"


def large_npy(folder: Path) -> Path:
    text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': (1, {COUNT}), }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    fill(folder / "w.npy", head)
    return folder / "w.npy"


def large_onnx(folder: Path) -> Path:
    """Its data lies beside it."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[COUNT, 1])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("length", str(2 * COUNT))):
        weight.external_data.add(key=key, value=value)
    half = {"dtype": TensorProto.FLOAT16}
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    made = model([node], [weight], inputs={"x": (1, COUNT)}, **half)
    (folder / "w.onnx").write_bytes(made.SerializeToString())
    fill(folder / "w.bin", b"")
    return folder / "w.onnx"


def values_at(path: Path, dtype: Any, places: Iterator[int]) -> list[float]:
    """Elements of w, which lie one after the other in a file or in the data beside it."""
    data, begin = path, 0
    if path.suffix == ".onnx":
        graph = onnx.load(path, load_external_data=False).graph
        tensors = [t for t in graph.initializer if list(t.dims) == [COUNT, 1]]
        said = {entry.key: entry.value for entry in tensors[0].external_data}
        data, begin = path.parent / said["location"], int(said.get("offset", 0))
    else:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            begin = 8 + size + json.loads(file.read(size))["w"]["data_offsets"][0]
    held = np.memmap(data, dtype, "r", begin, (COUNT,))
    return [float(held[place]) for place in places]


@pytest.mark.parametrize("make", [large_safetensors, large_npy, large_onnx])
def test_a_tensor_of_more_than_2_31_elements(make: Callable[[Path], Path], tmp_path: Path) -> None:
    machine.load()  # what compiles them needs more memory
    source = make(tmp_path)
    suffix = ".onnx" if source.suffix == ".onnx" else ".safetensors"
    target, back = f"q{suffix}", f"d{suffix}"
    options = " --external-data" if suffix == ".onnx" else ""
    quantize = f"quantize {source.name} -o {target} --dtype int8 --method absmax{options} -q"
    commands = [quantize, f"verify {source.name} {target} -q", f"inspect {source.name} --stats"]
    commands.append(f"dequantize {target} -o {back} --dtype float16{options} -q")
    if source.suffix == ".npy":
        commands.append(f"dynamic {source.name} -o y.safetensors -q")
    for command in commands:
        assert used(tmp_path, command)["peak"] < 300 << 20, command
    scale = np.float16(4 / 127)
    codes = {place: round(value / float(scale)) for place, value in PLACES.items()}
    assert values_at(tmp_path / target, np.int8, PLACES) == list(codes.values())
    assert values_at(tmp_path / target, np.int8, ZEROS) == [0, 0, 0]
    wanted = [float(np.float16(np.float32(code) * np.float32(scale))) for code in codes.values()]
    assert values_at(tmp_path / back, np.float16, PLACES) == wanted
    [record] = json.loads((tmp_path / "q.report.json").read_text())["tensors"]
    found = [record[key] for key in ("elements", "zero_count", "min", "max", "scale_max")]
    assert found == [COUNT, COUNT - 4, -4.0, 3.25, float(scale)]
    # float32 products of float16: exact sums of four squares
    errors = {p: np.float32(codes[p]) * np.float32(scale) - v for p, v in PLACES.items()}
    assert record["max_abs_error"] == max(map(abs, errors.values()))
    worst = max(errors, key=lambda place: abs(errors[place]))
    assert record["max_abs_error_index"] == ([worst, 0] if suffix == ".onnx" else [0, worst])
    shutil.rmtree(tmp_path)

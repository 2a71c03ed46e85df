"""Files of weights to measure on: normal values, one layer over and over."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, save_model

ROWS, COLUMNS = 4096, 4096
ELEMENTS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def layer(dtype: str = "F32") -> NDArray[np.generic]:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    return (values * np.float32(0.02)).astype(ELEMENTS[dtype])


def safetensors(path: Path, dtype: str, gigabytes: float, first: int = 0) -> Path:
    """A .safetensors file of as many layers as fit, with numbers from the first on."""
    data = layer(dtype).tobytes()
    count = max(1, round(gigabytes * 1e9 / len(data)))
    header = {
        f"layers.{first + i}.weight": {
            "dtype": dtype,
            "shape": [ROWS, COLUMNS],
            "data_offsets": [i * len(data), (i + 1) * len(data)],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(data)
    return path


def tiny(path: Path, count: int) -> Path:
    """A .safetensors file of so many tensors of 4 x 8 float32."""
    values = layer().reshape(-1)[:32].tobytes()
    header = {
        f"layers.{i}.weight": {
            "dtype": "F32", "shape": [4, 8], "data_offsets": [i * 128, i * 128 + 128],
        }
        for i in range(count)
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + values * count)
    return path


def checkpoint(folder: Path, gigabytes: float) -> Path:
    """A checkpoint folder of bfloat16 in four shards."""
    folder.mkdir()
    files, size = {}, 0
    for i in range(4):
        path = folder / f"model-{i + 1:05}-of-00004.safetensors"
        safetensors(path, "BF16", gigabytes / 4, 1000 * i)
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        files |= dict.fromkeys(header, path.name)
        size += max(entry["data_offsets"][1] for entry in header.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def npy(path: Path, gigabytes: float) -> Path:
    """A .npy array of float32."""
    rows = max(1, round(gigabytes * 1e9 / (4 * COLUMNS)))
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, COLUMNS))
    values = layer().reshape(-1)
    for start in range(0, array.size, values.size):
        part = array.reshape(-1)[start : start + values.size]
        part[:] = values[: part.size]
    array.flush()
    return path


def onnx(folder: Path, gigabytes: float) -> Path:
    """A model of MatMul layers, m.onnx; returns its data file, m.data."""
    data = layer().tobytes()
    count = max(1, round(gigabytes * 1e9 / len(data)))
    weights, nodes = [], []
    with (folder / "m.data").open("wb") as file:
        for i in range(count):
            weight = TensorProto(
                name=f"w{i}", data_type=TensorProto.FLOAT, dims=(ROWS, COLUMNS),
                data_location=TensorProto.EXTERNAL,
            )  # fmt: skip
            places = {"location": "m.data", "offset": str(file.tell()), "length": str(len(data))}
            for key, value in places.items():
                weight.external_data.add(key=key, value=value)
            file.write(data)
            weights.append(weight)
            nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, ROWS))
        for name in ("x0", f"x{count}")
    ]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    opset = helper.make_opsetid("", 21)
    save_model(helper.make_model(graph, opset_imports=[opset], ir_version=10), folder / "m.onnx")
    return folder / "m.data"


def growing(folder: Path, container: str, gigabytes: float) -> Path:
    path = folder / f"w.{container}"
    return npy(path, gigabytes) if container == "npy" else safetensors(path, "F32", gigabytes)


@dataclass(frozen=True)
class Work:
    """One line of the table: what to do with which file.

    name: with the file's size in the place of {}. bar: with absmax; searching: with the method that
        is the default, where that is a search.
    make: puts the source into a folder; returns it and the file that holds its bulk.
    """

    name: str
    options: str
    bar: float
    make: Callable[[Path, float], tuple[Path, Path]]
    gigabytes: float = 2.0
    suffix: str = ".safetensors"
    command: str = "quantize"
    searching: float | None = None


def _weights(dtype: str) -> Callable[[Path, float], tuple[Path, Path]]:
    def make(folder: Path, gigabytes: float) -> tuple[Path, Path]:
        path = safetensors(folder / "w.safetensors", dtype, gigabytes)
        return path, path

    return make


def _array(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    path = npy(folder / "w.npy", gigabytes)
    return path, path


def _model(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    return folder / "m.onnx", onnx(folder, gigabytes)


WORK = (
    Work("{} GB float32 -> int8 per axis", "--dtype int8", 1.3, _weights("F32")),
    Work("-> int4 block 32", "--dtype int4 --block-size 32", 1.5, _weights("F32"), searching=4.0),
    Work("-> float8e4m3fn block 128", "--dtype float8e4m3fn --block-size 128", 1.5,
         _weights("F32")),
    Work("-> float4e2m1 block 16, float8e4m3fn scales",
         "--dtype float4e2m1 --block-size 16 --scale-dtype float8e4m3fn", 1.5, _weights("F32"),
         searching=8.0),
    Work("{} GB bfloat16 -> int4 block 32", "--dtype int4 --block-size 32", 2.0, _weights("BF16"),
         searching=4.0),
    Work("{} GB float32 .npy, `dynamic`", "", 1.5, _array, 1.0, command="dynamic"),
    Work("{} GB ONNX with external data -> int4 block 32",
         "--dtype int4 --block-size 32 --external-data", 2.0, _model, 2.5, ".onnx", searching=4.0),
    Work("-> the same for MatMulNBits",
         "--dtype int4 --block-size 32 --external-data --layout matmul-nbits", 3.0, _model, 2.5,
         ".onnx", searching=4.0),
)  # fmt: skip

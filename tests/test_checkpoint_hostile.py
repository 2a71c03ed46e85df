"""Checkpoint folders whose index or configuration contradicts what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import ok, refused
from safetensors.numpy import load_file, save_file

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
WEIGHTS = {
    name: np.arange(64 * 64, dtype=np.float32).reshape(64, 64) - shift
    for name, shift in (("m.a.weight", 10), ("m.b.weight", 2000))
}


def folder(path: Path, places: dict[str, str], config: dict[str, object] | None = None) -> Path:
    path.mkdir()
    for shard, (name, values) in zip(SHARDS, WEIGHTS.items(), strict=True):
        save_file({name: values}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (path / "config.json").write_text(json.dumps(config or {}))
    return path


RIGHT = dict(zip(WEIGHTS, SHARDS, strict=True))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "names no tensor; the file is damaged"),
        ({"m.a.weight": SHARDS[0]}, "has the name of a shard, but model.safetensors.index.json"),
        (RIGHT | {"m.a.weight": "\ud800.safetensors"}, "is not the plain name of a .safetensors"),
    ],
    ids=["empty", "unnamed", "surrogate"],
)
def test_an_index_that_leaves_weights_out_is_refused(
    places: dict[str, str], message: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "m", places)
    assert message in refused("quantize", source, "-o", tmp_path / "q", "--dtype", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_a_configuration_of_another_quantization_is_refused(key: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "m", RIGHT, {key: {"bits": 4, "group_size": 64}})
    message = refused("quantize", source, "-o", tmp_path / "q", "--dtype", "int8")
    assert f"config.json: its {key} says that the weights are quantized already" in message
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_tile_may_be_higher_than_any_tensor(tmp_path: Path) -> None:
    source, quantized, back = (tmp_path / f"{name}.safetensors" for name in "xqb")
    save_file(WEIGHTS, source)
    options = ("--dtype", "int8", "--tile", "99999999999x64")
    ok("quantize", source, "-o", quantized, *options)
    ok("dequantize", quantized, "-o", back)
    for name, values in load_file(back).items():
        step = np.abs(WEIGHTS[name]).max() / np.float32(127)
        np.testing.assert_array_equal(values, np.rint(WEIGHTS[name] / step) * step)

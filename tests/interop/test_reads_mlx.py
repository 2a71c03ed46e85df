"""Folders of the mlx layout, read by mlx and mlx-lm on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from folders import Folders
from mlx import nn
from mlx_lm.utils import dequantize_model, load_model
from saved import config, modules, same, tensors
from tiny_llama import EVEN, RAGGED, TIED, Llama

pytestmark = pytest.mark.interop

# what config.json must say, by the options that choose it
LAYOUTS = {
    ("--dtype", "uint2", "--block-size", "64"): {"group_size": 64, "bits": 2, "mode": "affine"},
    ("--dtype", "uint4", "--block-size", "64"): {"group_size": 64, "bits": 4, "mode": "affine"},
    ("--dtype", "uint4", "--block-size", "32"): {"group_size": 32, "bits": 4, "mode": "affine"},
    ("--dtype", "uint8", "--block-size", "128"): {"group_size": 128, "bits": 8, "mode": "affine"},
    ("--preset", "mxfp4"): {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
OPTIONS = pytest.mark.parametrize("options", LAYOUTS, ids=lambda o: "-".join(o).strip("-"))
MODELS = pytest.mark.parametrize("model", [EVEN, RAGGED, TIED], ids=lambda m: m.name)
LAYOUT = ("--layout", "mlx")


def array(tensor: torch.Tensor) -> mx.array:
    """The same values in mlx, bfloat16 as float32."""
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return mx.array(wide.numpy())


def dense(parts: dict[str, torch.Tensor], how: dict[str, Any]) -> torch.Tensor:
    """What mlx dequantizes a module to: in float32 where the scales are floats."""
    assert parts["weight"].dtype == torch.uint32
    biases = array(parts["biases"]) if "biases" in parts else None
    values = mx.dequantize(array(parts["weight"]), array(parts["scales"]), biases, **how)
    return torch.from_numpy(np.array(values.astype(mx.float32)))


@MODELS
@OPTIONS
def test_it_dequantizes_to_the_values_of_dequantize(
    options: tuple[str, ...], model: Llama, folders: Folders
) -> None:
    folder = folders.quantized(model, *options, *LAYOUT)
    back = tensors(folders.dequantized(model, *options, *LAYOUT))
    found = modules(tensors(folder), "scales")
    for name, parts in found.items():
        assert same(dense(parts, LAYOUTS[options]), back[f"{name}.weight"]), name


@MODELS
@OPTIONS
def test_it_is_given_every_matrix_that_it_can_read_and_no_other(
    options: tuple[str, ...], model: Llama, folders: Folders
) -> None:
    source = tensors(folders.source(model))
    written = tensors(folders.quantized(model, *options, *LAYOUT))
    matrices = model.linears | model.vocabulary_matrices
    step = LAYOUTS[options]["group_size"]
    readable = {name for name, (_, size) in matrices.items() if size % step == 0}
    found = modules(written, "scales")
    assert set(found) == readable
    parts = {"weight", "scales"} | ({"biases"} if LAYOUTS[options]["mode"] == "affine" else set())
    assert all(set(held) == parts for held in found.values())
    alone = {name for name in source if name.removesuffix(".weight") not in readable}
    assert {name for name in alone if not same(written[name], source[name])} == set()


@MODELS
@OPTIONS
def test_its_configuration_says_how(
    options: tuple[str, ...], model: Llama, folders: Folders
) -> None:
    written = config(folders.quantized(model, *options, *LAYOUT))
    assert written["quantization"] == written["quantization_config"] == LAYOUTS[options]
    rest = {k: v for k, v in written.items() if not k.startswith("quantization")}
    assert rest == config(folders.source(model))


@MODELS
@OPTIONS
def test_mlx_lm_loads_the_folder_and_runs_as_the_model_of_dequantize(
    options: tuple[str, ...], model: Llama, folders: Folders
) -> None:
    folder = folders.quantized(model, *options, *LAYOUT)
    found = load(folder)
    quantized = {
        name
        for name, module in found.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    assert quantized == set(modules(tensors(folder), "scales"))
    found = dequantize_model(found)
    found.set_dtype(mx.float32)
    expected = load(folders.dequantized(model, *options, *LAYOUT))
    tokens = mx.arange(1, 49).reshape(2, 24)
    assert mx.array_equal(found(tokens), expected(tokens)).item()


def load(folder: Path) -> Any:
    """The model in float32; a tensor that is missing or unknown is an error."""
    model, _ = load_model(folder, strict=True)
    model.set_dtype(mx.float32)
    return model

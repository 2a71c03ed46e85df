"""Folders of the modelopt layout, read by ModelOpt's own tensors and converters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import Folders
from saved import config, modules, same, tensors
from tiny_llama import EVEN, FUSED, LAYERS, RAGGED, TIED, Llama

with warnings.catch_warnings(action="ignore"):  # of torch.jit and of transformers' version
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

pytestmark = pytest.mark.interop

MODELS = pytest.mark.parametrize("model", [EVEN, RAGGED, TIED], ids=lambda m: m.name)
PRESETS = ["nvfp4", "fp8"]


def layout(preset: str) -> tuple[str, ...]:
    return ("--preset", preset, "--layout", "modelopt")


def nvfp4(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight as ModelOpt dequantizes it."""
    rows, half = parts["weight"].shape
    held = NVFP4QTensor(torch.Size((rows, 2 * half)), torch.float32, parts["weight"])
    return held.dequantize(  # type: ignore[no-any-return]
        dtype=torch.float32,
        scale=parts["weight_scale"],
        double_scale=parts["weight_scale_2"],
        block_sizes={-1: 16},
    )


def fp8(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """One float32 scale per row, as the exporter stores it and vLLM multiplies with it."""
    assert parts["weight"].dtype == torch.float8_e4m3fn
    assert parts["weight_scale"].shape == parts["weight"].shape[:1]
    return parts["weight"].float() * parts["weight_scale"][:, None]


READERS: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {"nvfp4": nvfp4, "fp8": fp8}
# name, type and rank of a module's tensors, as ModelOpt's exporter writes them
PARTS = {
    "nvfp4": {
        "weight": (torch.uint8, 2),
        "weight_scale": (torch.float8_e4m3fn, 2),
        "weight_scale_2": (torch.float32, 0),
    },
    "fp8": {"weight": (torch.float8_e4m3fn, 2), "weight_scale": (torch.float32, 1)},
}
ALGORITHMS = {"nvfp4": ("W4A16_NVFP4", 16), "fp8": ("FP8_PER_CHANNEL_PER_TOKEN", None)}


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_it_dequantizes_to_the_values_of_dequantize(
    preset: str, model: Llama, folders: Folders
) -> None:
    back = tensors(folders.dequantized(model, *layout(preset)))
    found = modules(tensors(folders.quantized(model, *layout(preset))), "weight_scale")
    step = 16 if preset == "nvfp4" else 1
    assert set(found) == {name for name, (_, size) in model.linears.items() if size % step == 0}
    for name, parts in found.items():
        assert {n: (t.dtype, t.ndim) for n, t in parts.items()} == PARTS[preset]
        # + 0: ModelOpt reads the code of -0 as 0
        assert same(READERS[preset](parts) + 0, back[f"{name}.weight"] + 0), name


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_its_two_configurations_say_the_same(preset: str, model: Llama, folders: Folders) -> None:
    folder = folders.quantized(model, *layout(preset))
    stated = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))
    assert config(folder)["quantization_config"] == convert_hf_quant_config_format(stated)
    said = stated["quantization"]
    assert (said["quant_algo"], said.get("group_size")) == ALGORITHMS[preset]
    assert said["kv_cache_quant_algo"] is None
    assert set(said["exclude_modules"]) == alone(folder) | {"lm_head"}


def alone(folder: Path) -> set[str]:
    """Modules with a matrix that is not quantized."""
    held = tensors(folder)
    quantized = modules(held, "weight_scale")
    matrices = {
        n.removesuffix(".weight") for n, t in held.items() if n.endswith(".weight") and t.ndim == 2
    }
    return matrices - set(quantized)


def test_matrices_that_a_runtime_fuses_share_a_second_scale(folders: Folders) -> None:
    held: dict[str, dict[str, Any]] = modules(
        tensors(folders.quantized(EVEN, *layout("nvfp4"))), "weight_scale"
    )
    for layer in range(LAYERS):
        for parts in FUSED:
            names = [f"model.layers.{layer}.{part}" for part in parts]
            assert len({held[name]["weight_scale_2"].item() for name in names}) == 1, names
    assert len({parts["weight_scale_2"].item() for parts in held.values()}) > 1

"""Folders of the compressed-tensors layout, loaded and run by transformers on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import Folders
from saved import config, same
from tiny_llama import EVEN, RAGGED, TIED, Llama
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.interop

WEIGHTS_ONLY = ["w8a16", "w4a16", "nvfp4", "mxfp4", "mxfp6-e2m3", "mxfp8"]
PRESETS = ["int8", "fp8", "fp8-block", *WEIGHTS_ONLY]
# from_pretrained of transformers 5.24 expects packed zero points unpacked, also in folders that
# compressed-tensors writes; with dequantize it takes them
ASYMMETRIC = ["w4a16-asym", "int2"]
MODELS = pytest.mark.parametrize("model", [EVEN, RAGGED, TIED], ids=lambda m: m.name)
TOKENS = torch.arange(1, 49).reshape(2, 24)


def layout(preset: str) -> tuple[str, ...]:
    return ("--preset", preset, "--layout", "compressed-tensors")


def load(folder: Path, *, dequantize: bool = False) -> Any:
    """The model in bfloat16; no key of it is missing, unexpected or of another shape."""
    settings = AutoConfig.from_pretrained(folder)
    if dequantize:
        settings.quantization_config["dequantize"] = True
    model, information = AutoModelForCausalLM.from_pretrained(
        folder, config=settings, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {what: keys for what, keys in information.items() if keys} == {}
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits  # type: ignore[no-any-return]


@MODELS
@pytest.mark.parametrize("preset", [*PRESETS, *ASYMMETRIC])
def test_a_folder_loaded_dequantized_is_the_model_of_dequantize(
    preset: str, model: Llama, folders: Folders
) -> None:
    found = load(folders.quantized(model, *layout(preset)), dequantize=True)
    expected = load(folders.dequantized(model, *layout(preset)))
    weights = expected.state_dict()
    assert set(found.state_dict()) == set(weights)
    assert [n for n, weight in found.state_dict().items() if not same(weight, weights[n])] == []
    assert same(logits(found), logits(expected))


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_a_folder_loaded_compressed_gives_the_logits_of_the_model_of_dequantize(
    preset: str, model: Llama, folders: Folders
) -> None:
    folder = folders.quantized(model, *layout(preset))
    found = load(folder)
    assert found.get_submodule("model.layers.0.self_attn.q_proj").weight_scale.numel()
    expected = load(folders.dequantized(model, *layout(preset)))
    (group,) = config(folder)["quantization_config"]["config_groups"].values()
    assert (group["input_activations"] is None) == (preset in WEIGHTS_ONLY)
    if group["input_activations"] is not None:
        round_inputs(expected, group["input_activations"], found)
    assert same(logits(found), logits(expected))


def round_inputs(model: Any, how: dict[str, Any], quantized: Any) -> None:
    """Feed the modules that are quantized in `quantized` what a runtime feeds them."""
    for name, module in quantized.named_modules():
        if hasattr(module, "quantization_scheme"):
            model.get_submodule(name).register_forward_pre_hook(lambda _, x: rounded(x[0], how))


def rounded(x: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """Inputs quantized and dequantized with one dynamic scale per token, or per group of it.

    scale = max|x| / (half the range of codes), in x's type; int8 has codes -128 ... 127.
    """
    assert (how["num_bits"], how["symmetric"], how["dynamic"]) == (8, True, True)
    top = 127.5 if how["type"] == "int" else 448
    groups = x.unflatten(-1, (-1, how.get("group_size") or x.shape[-1]))
    scale = groups.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    if how["type"] == "int":
        codes = (groups / scale).clamp(-128, 127).round()
    else:
        codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    return (codes * scale).flatten(-2)

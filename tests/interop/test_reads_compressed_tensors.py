"""Folders of the compressed-tensors layout, decompressed by compressed-tensors itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from folders import Folders
from saved import config, index, modules, same, tensors
from tiny_llama import EVEN, FUSED, LAYERS, RAGGED, TIED, Llama
from transformers import AutoConfig, CompressedTensorsConfig

pytestmark = pytest.mark.interop

# format, and the weights' num_bits, type, strategy and symmetric
SCHEMES = {
    "int2": ("pack-quantized", 2, "int", "group", False),
    "int8": ("int-quantized", 8, "int", "channel", True),
    "w8a16": ("pack-quantized", 8, "int", "group", True),
    "w4a16": ("pack-quantized", 4, "int", "group", True),
    "w4a16-asym": ("pack-quantized", 4, "int", "group", False),
    "fp8": ("float-quantized", 8, "float", "channel", True),
    "fp8-block": ("float-quantized", 8, "float", "block", True),
    "nvfp4": ("nvfp4-pack-quantized", 4, "float", "tensor_group", True),
    "mxfp4": ("mxfp4-pack-quantized", 4, "float", "group", True),
    "mxfp6-e2m3": ("mxfp6-pack-quantized", 6, "float", "group", True),
    "mxfp8": ("mxfp8-quantized", 8, "float", "group", True),
}
PRESETS = list(SCHEMES)
MODELS = pytest.mark.parametrize("model", [EVEN, RAGGED, TIED], ids=lambda m: m.name)


def layout(preset: str) -> tuple[str, ...]:
    return ("--preset", preset, "--layout", "compressed-tensors")


def scheme(folder: Path) -> dict[str, Any]:
    (group,) = config(folder)["quantization_config"]["config_groups"].values()
    return group  # type: ignore[no-any-return]


def divisor(weights: dict[str, Any]) -> int:
    """What the number of input features must be a multiple of, for readers to take the module."""
    return weights.get("group_size") or (weights.get("block_structure") or [1, 1])[1]  # type: ignore[no-any-return]


def decompressed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every quantized module's weight as compressed-tensors gives it back."""
    read = QuantizationConfig.model_validate(config(folder)["quantization_config"])
    (group,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(group.format)
    for name, parts in modules(tensors(folder), "weight_scale").items():
        assert set(parts) == set(compressor.compression_param_names(group))
        yield name, compressor.decompress(parts, group)["weight"]


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_it_decompresses_to_the_values_of_dequantize(
    preset: str, model: Llama, folders: Folders
) -> None:
    back = tensors(folders.dequantized(model, *layout(preset)))
    found = dict(decompressed(folders.quantized(model, *layout(preset))))
    assert len(found) >= 12
    for name, weight in found.items():
        expected = back[f"{name}.weight"]
        assert (weight.dtype, expected.dtype) == (torch.bfloat16, torch.float32)
        assert same(weight, expected.to(torch.bfloat16)), name


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_given_every_matrix_that_it_can_read_and_no_other(
    preset: str, model: Llama, folders: Folders
) -> None:
    folder = folders.quantized(model, *layout(preset))
    step = divisor(scheme(folder)["weights"])
    readable = {name for name, (_, size) in model.linears.items() if size % step == 0}
    source, written = tensors(folders.source(model)), tensors(folder)
    assert set(modules(written, "weight_scale")) == readable
    alone = {name for name in source if name.removesuffix(".weight") not in readable}
    assert {name for name in alone if not same(written[name], source[name])} == set()
    matrices = {name.removesuffix(".weight") for name in alone if source[name].ndim == 2}
    assert set(config(folder)["quantization_config"]["ignore"]) == matrices | {"lm_head"}


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_its_configuration_is_read_and_written_back_the_same(
    preset: str, model: Llama, folders: Folders
) -> None:
    folder = folders.quantized(model, *layout(preset))
    written = config(folder)["quantization_config"]
    read = QuantizationConfig.model_validate(written)
    assert without_null(read.model_dump(mode="json")) == without_null(written)
    loaded = AutoConfig.from_pretrained(folder).quantization_config
    again = CompressedTensorsConfig.from_dict(dict(loaded)).to_dict()
    assert without_null(again) == without_null(written)


def without_null(value: Any) -> Any:
    """JSON without the members that say nothing."""
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None}
    return value


@pytest.mark.parametrize("preset", PRESETS)
def test_its_configuration_says_the_scheme(preset: str, folders: Folders) -> None:
    written = config(folders.quantized(EVEN, *layout(preset)))["quantization_config"]
    group = scheme(folders.quantized(EVEN, *layout(preset)))
    form, bits, kind, strategy, symmetric = SCHEMES[preset]
    weights = group["weights"]
    assert (written["quant_method"], written["quantization_status"]) == (
        "compressed-tensors",
        "compressed",
    )
    assert (written["format"], group["format"], group["targets"]) == (form, form, ["Linear"])
    assert (weights["num_bits"], weights["type"], weights["symmetric"]) == (bits, kind, symmetric)
    assert weights["strategy"] == strategy


@MODELS
@pytest.mark.parametrize("preset", PRESETS)
def test_the_rest_of_the_folder_is_as_it_was(preset: str, model: Llama, folders: Folders) -> None:
    source, folder = folders.source(model), folders.quantized(model, *layout(preset))
    rest = config(folder)
    del rest["quantization_config"]
    assert rest == config(source)
    assert {p.name for p in source.iterdir()} == {p.name for p in folder.iterdir()}
    kept = "generation_config.json"
    assert (folder / kept).read_bytes() == (source / kept).read_bytes()


def test_matrices_that_a_runtime_fuses_share_a_global_scale_across_shards(
    folders: Folders,
) -> None:
    folder = folders.quantized(EVEN, *layout("nvfp4"))
    held = modules(tensors(folder), "weight_scale")
    shards = index(folder)["weight_map"]
    crossing = 0
    for layer in range(LAYERS):
        for parts in FUSED:
            names = [f"model.layers.{layer}.{part}" for part in parts]
            scales = {held[name]["weight_global_scale"].item() for name in names}
            assert len(scales) == 1, names
            crossing += len({shards[f"{name}.weight_packed"] for name in names}) > 1
    assert crossing == 1
    assert len({parts["weight_global_scale"].item() for parts in held.values()}) > 1

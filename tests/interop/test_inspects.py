"""`qtool inspect` on what compressed-tensors, MLX and ModelOpt write themselves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from command import ok
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from tiny_llama import EVEN
from transformers import AutoModelForCausalLM

with warnings.catch_warnings(action="ignore"):  # of torch.jit and of transformers' version
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

pytestmark = pytest.mark.interop

OUT, IN = 128, 256
TENSOR: dict[str, Any] = {"granularity": "per_tensor", "axis": None, "block_size": None}
CHANNEL = {"granularity": "per_axis", "axis": 0, "block_size": None}
TILE = {"granularity": "tiled", "tile": [128, 128]}


def blocks(size: int) -> dict[str, Any]:
    return {"granularity": "blocked", "axis": 1, "block_size": size}


def weights(path: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The rows of the quantized weights, by name."""
    rows = ok("inspect", path, "--json", *options).json["tensors"]
    return {row["name"]: row for row in rows if row["quantization"]}


def check(path: Path, name: str, known: dict[str, Any]) -> None:
    """One weight, from headers and with its values."""
    for options in ([], ["--stats"]):
        row = weights(path, *options)[name]
        how = row["quantization"]
        assert {key: how[key] for key in known} == known
        assert how["problems"] == []
        assert row["shape"] == [OUT, IN]


# ---------------------------------------------------------------- compressed-tensors


def parameters(w: torch.Tensor, how: Any, over: Any) -> Any:
    """Scale and zero point of a weight, as llm-compressor finds them."""
    if how.strategy == "tensor":
        values = w.reshape(1, 1, -1)
    elif how.strategy == "channel":
        values = w.unsqueeze(1)
    elif how.strategy == "block":
        rows, columns = how.block_structure
        tiles = w.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        values = tiles.transpose(1, 2).flatten(-2)
    else:
        values = w.unflatten(-1, (-1, how.group_size))
    low, high = values.amin(-1), values.amax(-1)
    if how.strategy == "tensor":
        low, high = low.reshape(1), high.reshape(1)
    return calculate_qparams(low, high, how, global_scale=over)


SCHEMES = {
    "W2A16": {"layout": "pack-quantized", "dtype": "int2", **blocks(128)},
    "W4A16": {"layout": "pack-quantized", "dtype": "int4", **blocks(128), "zero_point": False},
    "W4A16_ASYM": {"layout": "pack-quantized", "dtype": "int4", **blocks(128), "zero_point": True},
    "W8A16": {"layout": "pack-quantized", "dtype": "int8"},
    "W8A8": {"layout": "int-quantized", "dtype": "int8", **CHANNEL},
    "FP8": {"layout": "float-quantized", "dtype": "float8e4m3fn", **TENSOR},
    "FP8_DYNAMIC": {"layout": "float-quantized", "dtype": "float8e4m3fn", **CHANNEL},
    "FP8_BLOCK": {"layout": "float-quantized", "dtype": "float8e4m3fn", **TILE},
    "NVFP4A16": {"layout": "nvfp4-pack-quantized", "dtype": "float4e2m1", **blocks(16),
                 "scale_dtype": "float8e4m3fn"},
    "MXFP4A16": {"layout": "mxfp4-pack-quantized", "dtype": "float4e2m1", **blocks(32),
                 "scale_dtype": "float8e8m0"},
    "MXFP6A16": {"layout": "mxfp6-pack-quantized", "dtype": "float6e2m3", **blocks(32)},
    "MXFP8A16": {"layout": "mxfp8-quantized", "dtype": "float8e4m3fn", **blocks(32)},
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT, bias=False)).to(torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    [linear] = model
    over = None
    if hasattr(linear, "weight_global_scale"):
        over = generate_gparam(*torch.aminmax(linear.weight.data))
        linear.weight_global_scale.data = over
    how = linear.quantization_scheme.weights
    scale, zero = parameters(linear.weight.data, how, over)
    linear.weight_scale.data = scale.to(linear.weight_scale.dtype)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data = zero.to(linear.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    known = SCHEMES[scheme] | {"layout": f"compressed-tensors {SCHEMES[scheme]['layout']}"}
    check(tmp_path / "model.safetensors", "0.weight", known)


# ---------------------------------------------------------------- MLX

MODES = {
    ("affine", 2, 128): "uint2", ("affine", 4, 64): "uint4", ("affine", 8, 32): "uint8",
    ("affine", 3, 64): "uint3", ("mxfp4", 4, 32): "float4e2m1", ("nvfp4", 4, 16): "float4e2m1",
    ("mxfp8", 8, 32): "float8e4m3fn",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_mlx(mode: tuple[str, int, int], tmp_path: Path) -> None:
    name, bits, size = mode
    mx.random.seed(7)
    w = mx.random.normal((OUT, IN)).astype(mx.bfloat16)
    made = mx.quantize(w, group_size=size, bits=bits, mode=name)
    parts = ("a.weight", "a.scales", "a.biases")
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), dict(zip(parts, made, strict=False)), {"format": "mlx"}
    )
    said = {"group_size": size, "bits": bits, "mode": name}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said}))
    known = {"layout": f"MLX {name}", "dtype": MODES[mode], **blocks(size)}
    check(tmp_path / "model.safetensors", "a.weight", known)


# ---------------------------------------------------------------- ModelOpt

CONFIGS = {
    "NVFP4_DEFAULT_CFG": {"layout": "ModelOpt nvfp4", "dtype": "float4e2m1", **blocks(16)},
    "FP8_DEFAULT_CFG": {"layout": "ModelOpt float8", "dtype": "float8e4m3fn", **TENSOR},
    "FP8_PER_CHANNEL_PER_TOKEN_CFG":
        {"layout": "ModelOpt float8", "dtype": "float8e4m3fn", **CHANNEL},
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG":
        {"layout": "ModelOpt float8", "dtype": "float8e4m3fn", **TILE},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize("config", CONFIGS)
def test_modelopt(config: str, tmp_path: Path) -> None:
    EVEN.save(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    model = mtq.quantize(model, getattr(mtq, config), lambda m: m(torch.arange(16)[None]))
    export_hf_checkpoint(model, export_dir=tmp_path / "exported")
    found = weights(tmp_path / "exported")
    assert found.keys() == {f"{name}.weight" for name in EVEN.linears}
    for name, shape in EVEN.linears.items():
        row = found[f"{name}.weight"]
        assert {key: row["quantization"][key] for key in CONFIGS[config]} == CONFIGS[config]
        assert (row["shape"], row["quantization"]["problems"]) == ([*shape], [])

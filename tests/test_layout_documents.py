"""What the JSON files of a checkpoint say of quantized tensors, word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qtool.dtypes import DTYPES
from qtool.layouts import LAYOUTS
from qtool.layouts.stored import Stored
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Tiled

COMPRESSED, MODELOPT, MLX = (LAYOUTS[n] for n in ("compressed-tensors", "modelopt", "mlx"))
Q, DOWN, GATE = (
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate")
)
LEFT = ["lm_head.weight", "model.embed_tokens.weight", f"{GATE}.weight", "relative"]


def stored(dtype: str, granularity: Granularity, scale: str, **more: Any) -> Stored:
    more = {"zero_point": False} | more
    return Stored(DTYPES[dtype], (256, 256), granularity, DTYPES[scale], DTYPES["bfloat16"], **more)


def config(layout: Any, tensor: Stored, others: list[str]) -> Any:
    """quantization_config of two modules that are quantized alike."""
    documents = layout.documents({f"{Q}.weight": tensor, f"{DOWN}.weight": tensor}, others)
    return documents["config.json"]["quantization_config"]


B128, B16, B32 = Blocked(1, 128), Blocked(1, 16), Blocked(1, 32)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "dynamic": False}
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
SYMMETRIC = {"symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("tensor", "form", "weights", "inputs"),
    [
        pytest.param(stored("int4", B128, "bfloat16"), "pack-quantized",
                     INT4 | {"symmetric": True}, None, id="w4a16"),
        pytest.param(stored("int4", B128, "bfloat16", zero_point=True), "pack-quantized",
                     INT4 | {"symmetric": False}, None, id="w4a16-asym"),
        pytest.param(stored("int8", B128, "bfloat16"), "pack-quantized",
                     INT4 | {"symmetric": True, "num_bits": 8}, None, id="w8a16"),
        pytest.param(stored("int2", Blocked(1, 64), "bfloat16", zero_point=True),
                     "pack-quantized",
                     INT4 | {"symmetric": False, "num_bits": 2, "group_size": 64}, None,
                     id="int2"),
        pytest.param(stored("int8", PerAxis(0), "bfloat16"), "pack-quantized",
                     {"num_bits": 8, "type": "int", "strategy": "channel"} | SYMMETRIC, None,
                     id="w8a16-channel"),
        pytest.param(stored("int8", PerAxis(0), "bfloat16", activations=True), "int-quantized",
                     {"num_bits": 8, "type": "int", "strategy": "channel"} | SYMMETRIC,
                     {"num_bits": 8, "type": "int"} | TOKEN, id="int8"),
        pytest.param(stored("float8e4m3fn", PerAxis(0), "bfloat16", activations=True),
                     "float-quantized",
                     {"num_bits": 8, "type": "float", "strategy": "channel"} | SYMMETRIC,
                     {"num_bits": 8, "type": "float"} | TOKEN, id="fp8"),
        pytest.param(stored("float8e4m3fn", PerTensor(), "bfloat16"), "naive-quantized",
                     {"num_bits": 8, "type": "float", "strategy": "tensor"} | SYMMETRIC, None,
                     id="fp8-per-tensor"),
        pytest.param(stored("float8e4m3fn", Tiled((128, 128)), "bfloat16", activations=True),
                     "float-quantized",
                     {"num_bits": 8, "type": "float", "strategy": "block",
                      "block_structure": [128, 128]} | SYMMETRIC,
                     {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group",
                      "group_size": 128, "dynamic": True}, id="fp8-block"),
        pytest.param(stored("float4e2m1", B16, "float8e4m3fn", global_scale=True),
                     "nvfp4-pack-quantized",
                     {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                      "scale_dtype": "torch.float8_e4m3fn"} | SYMMETRIC, None, id="nvfp4"),
        pytest.param(stored("float4e2m1", B32, "float8e8m0"), "mxfp4-pack-quantized",
                     {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                      "scale_dtype": "torch.uint8"} | SYMMETRIC, None, id="mxfp4"),
        pytest.param(stored("float4e2m1", B32, "float8e8m0", activations=True),
                     "mxfp4-pack-quantized",
                     {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                      "scale_dtype": "torch.uint8"} | SYMMETRIC,
                     {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                      "scale_dtype": "torch.uint8", "symmetric": True, "dynamic": True},
                     id="mxfp4-with-activations"),
        pytest.param(stored("float6e2m3", B32, "float8e8m0"), "mxfp6-pack-quantized",
                     {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32,
                      "scale_dtype": "torch.uint8"} | SYMMETRIC, None, id="mxfp6-e2m3"),
        pytest.param(stored("float8e4m3fn", B32, "float8e8m0"), "mxfp8-quantized",
                     {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                      "scale_dtype": "torch.uint8"} | SYMMETRIC, None, id="mxfp8"),
    ],
)  # fmt: skip
def test_compressed_tensors_says_the_scheme(
    tensor: Stored, form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> None:
    assert config(COMPRESSED, tensor, LEFT) == {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "model.embed_tokens", GATE],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "format": form, "weights": weights,
                "input_activations": inputs, "output_activations": None,
            }
        },
    }  # fmt: skip


def test_compressed_tensors_names_modules_that_are_quantized_in_several_ways() -> None:
    first, other = stored("int4", B128, "bfloat16"), stored("int8", PerAxis(0), "bfloat16",
                                                            activations=True)  # fmt: skip
    documents = COMPRESSED.documents(
        {f"{Q}.weight": first, "b.weight": other, "a.weight": other}, []
    )
    assert list(documents) == ["config.json"]
    found = documents["config.json"]["quantization_config"]
    assert (found["format"], found["ignore"]) == ("mixed-precision", ["lm_head"])
    groups = found["config_groups"]
    assert {name: (g["targets"], g["format"]) for name, g in groups.items()} == {
        "group_0": ([Q], "pack-quantized"), "group_1": (["a", "b"], "int-quantized"),
    }  # fmt: skip


def test_a_quantized_lm_head_is_not_ignored() -> None:
    tensor = stored("int4", B128, "bfloat16")
    for layout in (COMPRESSED, MODELOPT):
        held = tensor if layout is COMPRESSED else stored(
            "float8e4m3fn", PerAxis(0), "float32", activations=True)  # fmt: skip
        documents = layout.documents({"lm_head.weight": held}, ["model.embed_tokens.weight"])
        found = documents["config.json"]["quantization_config"]["ignore"]
        assert found == ["model.embed_tokens"]


IGNORED = ["lm_head", "model.embed_tokens"]


def test_modelopt_says_nvfp4() -> None:
    tensor = stored("float4e2m1", B16, "float8e4m3fn", global_scale=True)
    assert MODELOPT.documents({f"{Q}.weight": tensor}, LEFT[:2]) == {
        "hf_quant_config.json": {
            "quantization": {
                "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                "exclude_modules": IGNORED,
            }
        },
        "config.json": {
            "quantization_config": {
                "config_groups": {
                    "group_0": {
                        "weights": {"dynamic": False, "num_bits": 4, "type": "float",
                                    "group_size": 16},
                        "targets": ["Linear"],
                    }
                },
                "ignore": IGNORED, "quant_algo": "W4A16_NVFP4", "quant_method": "modelopt",
            }
        },
    }  # fmt: skip


def test_modelopt_says_fp8() -> None:
    tensor = stored("float8e4m3fn", PerAxis(0), "float32", activations=True)
    assert MODELOPT.documents({f"{Q}.weight": tensor}, ["model.embed_tokens.weight"]) == {
        "hf_quant_config.json": {
            "quantization": {
                "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": None,
                "exclude_modules": IGNORED,
            }
        },
        "config.json": {
            "quantization_config": {
                "ignore": IGNORED, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
                "quant_method": "modelopt",
            }
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "how"),
    [
        (stored("uint4", Blocked(1, 64), "bfloat16", zero_point=True),
         {"group_size": 64, "bits": 4, "mode": "affine"}),
        (stored("int8", B128, "float16"), {"group_size": 128, "bits": 8, "mode": "affine"}),
        (stored("int2", B32, "float32"), {"group_size": 32, "bits": 2, "mode": "affine"}),
        (stored("float4e2m1", B32, "float8e8m0"), {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
    ids=["uint4", "int8", "int2", "mxfp4"],
)  # fmt: skip
def test_mlx_says_the_mode_twice(tensor: Stored, how: dict[str, Any]) -> None:
    documents = MLX.documents({f"{Q}.weight": tensor, f"{DOWN}.weight": tensor}, LEFT)
    assert documents == {"config.json": {"quantization": how, "quantization_config": how}}


def test_mlx_names_the_modules_that_deviate() -> None:
    usual = stored("int4", Blocked(1, 64), "bfloat16")
    tensors = {
        "a.weight": replace(usual, dtype=DTYPES["int8"]), f"{Q}.weight": usual,
        f"{DOWN}.weight": usual, "b.weight": stored("float4e2m1", B32, "float8e8m0"),
    }  # fmt: skip
    how = {
        "group_size": 64, "bits": 4, "mode": "affine",
        "a": {"group_size": 64, "bits": 8, "mode": "affine"},
        "b": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }  # fmt: skip
    assert MLX.documents(tensors, []) == {
        "config.json": {"quantization": how, "quantization_config": how}
    }


def test_the_native_layout_needs_no_documents() -> None:
    assert LAYOUTS["native"].documents({"a.weight": stored("int4", B128, "bfloat16")}, LEFT) == {}

"""`qtool dynamic --graph` on weights in every place that ONNX has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper
from onnx_constructs import CONSTRUCTS, Construct
from onnx_jobs import bodies, reseed, sound, stored
from onnx_models import run, save

import qtool

# Where all readers of a weight are MatMul, Gemm and Conv that multiply by it.
PRODUCTS: dict[str, set[str]] = {
    "same_name_in_both_branches": {"/a/If.else_branch/w", "/a/If.then_branch/w"},
    "constants_in_branches": {"outer", "If.else_branch/If.else_branch/k", "If.then_branch/k"},
    "loop": {"outer", "inner"},
    "scan": {"feed", "recur"},
    "inputs_and_outputs": {"settable"},
    "function": {"local.Layer/k", "deep"},
    "operators": {"conv", "right"},
}


@pytest.fixture(params=[c for c in CONSTRUCTS if c.__name__ in PRODUCTS], ids=lambda c: c.__name__)
def case(request: pytest.FixtureRequest) -> tuple[Construct, set[str]]:
    reseed()
    return request.param(), PRODUCTS[request.param.__name__]


def values(made: ModelProto) -> dict[Any, Any]:
    """NAME_quantized times NAME_scale, by the number of the body and NAME."""
    found = {}
    for number, body in enumerate(bodies(made)):
        held = {name: numpy_helper.to_array(t) for name, t in stored(body).items()}
        for name, codes in held.items():
            base, is_codes, rest = name.partition("_quantized")
            if is_codes and codes.dtype == np.int8:
                scale = held[f"{base}_scale{rest}"]
                shape = [1] * codes.ndim if scale.size == 1 else _channels(codes, scale)
                found[(number, base)] = codes.astype(np.float32) * scale.reshape(shape)
    return found


def _channels(codes: Any, scale: Any) -> list[int]:
    """Of the last axis for a vector of scales, of the first one for (channels, 1, 1)."""
    axis = 0 if scale.ndim > 1 else codes.ndim - 1
    return [-1 if i == axis else 1 for i in range(codes.ndim)]


def test_products_are_of_integers_and_come_back(
    case: tuple[Construct, set[str]], tmp_path: Path
) -> None:
    construct, labels = case
    save(construct.made, tmp_path / "m.onnx")
    report = qtool.dynamic_file(tmp_path / "m.onnx", tmp_path / "d.onnx", graph=True)
    assert {row["name"] for row in report["tensors"]} == labels
    result = sound(tmp_path / "d.onnx")
    weights = values(result)
    assert len(weights) == len(labels)
    for feeds in construct.feeds:
        for new, old in zip(run(result, feeds), run(construct.made, feeds), strict=True):
            assert np.linalg.norm(new - old) < 0.05 * np.linalg.norm(old)
    done = qtool.dequantize_file(tmp_path / "d.onnx", tmp_path / "b.onnx")
    assert len(done["tensors"]) == len(labels)
    back = sound(tmp_path / "b.onnx")
    operators = {node.op_type for body in bodies(back) for node in body.node}
    assert operators.isdisjoint({"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"})
    float_weights = {name: numpy_helper.to_array(t) for body in bodies(back)
                     for name, t in stored(body).items()}  # fmt: skip
    for row in done["tensors"]:
        name = row["name"].rpartition("/")[2] if "/" in row["name"] else row["name"]
        assert any((float_weights[name] == value).all() for value in weights.values()
                   if value.shape == float_weights[name].shape)  # fmt: skip

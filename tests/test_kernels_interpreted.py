"""The kernels, run by Python line by line, give the bytes and the figures of the plain path.

So what they do is what their source says, whatever a compiler makes of it; and it is seen which of
their lines tests reach, which machine code does not tell.
"""

from __future__ import annotations

from typing import Any

import interpreted
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from streaming import check_restored, check_same, values

from qtool import engine, ops, packing
from qtool.dtypes import DTYPES, resolve
from qtool.engine import operators, plain, stream, tally, tiling, weighted
from qtool.errors import TensorError
from qtool.kernels import machine, refiner
from qtool.kernels.tensor import TileQuantizer, TileRestorer
from qtool.rounding.products import subtract_product
from qtool.scales import optimal
from qtool.spec import (
    Blocked,
    Granularity,
    PerAxis,
    PerTensor,
    QuantSpec,
    Shape,
    Tiled,
    reader_of,
)

Array = NDArray[Any]

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
ABSMAX = {"method": "absmax"}
E4M3 = {"scale_dtype": "float8e4m3fn"}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_loaded", interpreted.FUNCTIONS)


QUANTIZED: list[tuple[Shape, Any, str, Granularity, dict[str, Any]]] = [
    ((2, 2100), F32, "int8", PerTensor(), {}),
    ((2, 1027), F32, "uint8", PerAxis(0), {"method": "minmax"}),
    ((9, 130), F32, "uint8", PerAxis(1), {"method": "minmax", "nonfinite": "allow"}),
    ((3, 5, 40), F32, "int8", PerAxis(1), {"nonfinite": "allow"}),
    ((3, 5, 40), F16, "int16", PerAxis(-1), {}),
    ((1200,), BF16, "uint16", PerTensor(), {"nonfinite": "allow", "method": "minmax"}),
    ((6, 70), F32, "int4", Blocked(1, 16), {}),
    ((6, 70), F16, "uint4", Blocked(0, 4), {"method": "minmax"}),
    ((6, 7, 9), F32, "int4", Blocked(1, 3), {"narrow_range": True}),
    ((6, 64), F32, "int2", Blocked(1, 32), {"nonfinite": "allow"}),
    ((3, 7, 64), BF16, "uint2", Tiled((3, 32)), {"method": "minmax"}),
    ((11, 40), F32, "int8", Tiled((4, 16)), {"nonfinite": "allow"}),
    ((7, 45), F32, "float8e4m3fn", PerAxis(0), {"nonfinite": "allow"}),
    ((7, 45), F32, "float8e5m2", PerAxis(1), {}),
    ((7, 45), F16, "float8e4m3fnuz", PerAxis(0), {"nonfinite": "allow"}),
    ((7, 45), F32, "float8e5m2fnuz", PerAxis(0), {"nonfinite": "allow"}),
    ((5, 64), F32, "float4e2m1", Blocked(1, 16), E4M3 | {"global_scale": True}),
    ((5, 63), F32, "float6e2m3", PerAxis(0), {"scale_dtype": "bfloat16"}),
    ((5, 66), F32, "float6e3m2", Blocked(1, 32), {"scale_dtype": "float8e8m0"}),
    ((5, 65), F32, "int8", PerAxis(0), {"method": None, "semantics": "onednn"}),
    ((5, 67), F32, "uint8", PerTensor(), {"method": None, "semantics": "dynamic"}),
]


@pytest.mark.parametrize("case", QUANTIZED, ids=lambda case: f"{case[2]}-{case[3]}-{case[0]}")
def test_codes_figures_and_what_comes_back(
    case: tuple[Shape, Any, str, Granularity, dict[str, Any]],
) -> None:
    shape, source, target, granularity, options = case
    x = values(shape, source, 3, nonfinite="nonfinite" in options)
    spec = QuantSpec(target, granularity, **ABSMAX | options)
    check_same(x, spec, 1)
    asked = engine.request("x", x.shape, resolve(x.dtype), spec, None, None)
    if options.get("semantics") != "onednn":
        check_restored(plain.quantize(x, asked), "float32")


@pytest.mark.parametrize("has_zero_point", [False, True])
def test_given_scales(*, has_zero_point: bool) -> None:
    x = values((3, 50), F32, 8, nonfinite=False)
    parameters = {"scale": F32([0.1, 2, 30])}
    if has_zero_point:
        parameters["zero_point"] = np.uint8([0, 100, 255])
    check_same(x, QuantSpec("uint8", PerAxis(0)), 1, **parameters)


@pytest.mark.parametrize("together", [1, 2])
def test_figures_of_many_tiles(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some hold nothing that is finite, added up a few at a time."""
    monkeypatch.setattr(tally, "_TOGETHER", together)
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    x = values((5, 4096), F32, 9, nonfinite=True)
    x[:2] = np.nan
    check_same(x, QuantSpec("int8", PerAxis(0), nonfinite="allow"), 1)


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("given", [False, True])
def test_what_is_not_finite_is_named_with_its_place(method: str, *, given: bool) -> None:
    x = values((3, 50), F32, 8, nonfinite=False)
    x[1, 7], x[2, 9] = -np.inf, np.nan
    spec = QuantSpec("int8", PerAxis(0), method=method)
    scale = F32(1) if given else None
    asked = engine.request("w", x.shape, DTYPES["float32"], spec, scale, None)
    with pytest.raises(TensorError) as error:
        stream.quantize_array(x, asked, jobs=1)
    said = "tensor w: -inf at [1, 7]: 2 of 150 values are not finite; mend the weights, or use "
    assert str(error.value).startswith(said)


def test_the_first_place_is_named_wherever_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    x = values((3, 4096), F32, 8, nonfinite=False)
    x[1, 7], x[2, 9] = np.nan, np.inf
    spec = QuantSpec("int8", PerTensor(), method="absmax")
    asked = engine.request("w", x.shape, DTYPES["float32"], spec, None, None)
    with pytest.raises(TensorError, match=r"nan at \[1, 7\]: 2 of 12288 values"):
        stream.quantize_array(x, asked, jobs=1)


@pytest.mark.parametrize("over", [None, 1e4])
def test_tensors_that_are_fused_share_a_global_scale(over: float | None) -> None:
    x = values((2, 32), F32, 8, nonfinite=False)
    spec = QuantSpec("float4e2m1", Blocked(1, 16), **ABSMAX, **E4M3, global_scale=True)
    asked = engine.request("x", x.shape, DTYPES["float32"], spec, None, None, over)
    want, got = plain.quantize(x, asked), stream.quantize_array(x, asked, jobs=1)
    # the smallest power of two of which 6 * 448 times reach the magnitude
    power = 2.0 ** np.ceil(np.log2((over or np.abs(x).max()) / 2688))
    assert want.global_scale == got.global_scale == power
    assert (want.y.tobytes(), want.scale.tobytes()) == (got.y.tobytes(), got.scale.tobytes())


@pytest.mark.parametrize("source", [F32, F16])
@pytest.mark.parametrize("pays", [False, True])
def test_the_largest_magnitude(source: Any, *, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: pays)
    x = values((3, 50), source, 8, nonfinite=True)
    spec = QuantSpec("float4e2m1", Blocked(1, 16), nonfinite="allow", **E4M3, global_scale=True)
    asked = engine.request("x", x.shape, resolve(x.dtype), spec, None, None)
    largest = max(abs(float(v)) for v in x.flat if np.isfinite(v))
    assert engine.find_absmax(reader_of(x), asked, jobs=1) == largest


SEARCHED: list[tuple[Shape, Any, str, Granularity, dict[str, Any]]] = [
    ((3, 37), F32, "int4", PerAxis(0), {}),
    ((1, 257), F32, "int2", PerAxis(0), {}),
    ((37, 3), F16, "int4", PerAxis(1), {}),
    ((3, 37), BF16, "uint4", Blocked(1, 16), {"symmetric": False}),
    ((7, 9), BF16, "uint4", Tiled((3, 4)), {}),
    ((7, 9), F16, "int4", Tiled((3, 4)), {"scale_dtype": "bfloat16", "negative_scale": True}),
    ((7, 9), F32, "int2", Tiled((4, 5)), {"symmetric": False, "nonfinite": "allow"}),
    ((2, 32), F32, "float4e2m1", Blocked(1, 16), E4M3 | {"global_scale": True}),
    ((2, 32), F32, "float8e4m3fn", Blocked(1, 16), {"scale_dtype": "float8e8m0"}),
]


@pytest.fixture(params=[8, 1 << 20], ids=["in passes", "whole"])
def _longest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LARGEST_WINDOW", request.param)


@pytest.fixture(params=SEARCHED, ids=lambda case: f"{case[2]}-{case[3]}-{case[0]}")
def searched(request: pytest.FixtureRequest, _longest: None) -> tuple[Array, QuantSpec]:
    """Values, and a spec whose scales are searched."""
    shape, source, target, granularity, options = request.param
    x = values(shape, source, 4, nonfinite="nonfinite" in options)
    return x, QuantSpec(target, granularity, method="mse", **options)


def test_searched_scales(searched: tuple[Array, QuantSpec]) -> None:
    check_same(*searched, 1)


def test_scales_searched_by_weighted_errors(searched: tuple[Array, QuantSpec]) -> None:
    x, spec = searched
    weights = np.random.default_rng(1).integers(0, 9, x.shape).astype(np.float32)
    weights[:, 0] = 0
    asked = engine.request("x", x.shape, resolve(x.dtype), spec, None, None)
    asked = weighted.request(asked, weights)
    want, got = plain.quantize(x, asked), plain.quantize(x, asked, 1)
    assert (want.y.tobytes(), want.scale.tobytes()) == (got.y.tobytes(), got.scale.tobytes())


@pytest.mark.parametrize("target", ["int2", "uint4", "float6e3m2", "int8"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1026])
def test_codes_lie_packed_and_come_back(target: str, count: int) -> None:
    dtype = DTYPES[target]
    x, scale, no_zeros = values((count,), F32, count, nonfinite=False), F32([0.25]), F32([])
    codes = ops.quantize_linear(x, F32(0.25), output_dtype=target)
    packed = packing.pack(codes, dtype).tobytes() if dtype.bits < 8 else codes.tobytes()
    quantizer = TileQuantizer(x.shape, DTYPES["float32"], QuantSpec(target, PerTensor()))
    for quantize in (quantizer.quantize, quantizer.encode):
        out = np.empty(dtype.nbytes(count), np.uint8)
        quantize(x, scale, no_zeros, 0, 0, dtype.bits, out)
        assert out.tobytes() == packed
    back = np.empty(count, F32)
    TileRestorer(x.shape, dtype, PerTensor(), scale, no_zeros, dtype.bits).dequantize(out, 0, back)
    assert back.tolist() == (codes.astype(F32) * F32(0.25)).tolist()


@pytest.mark.parametrize("source", [F32, F16])
@pytest.mark.parametrize(
    ("target", "scale_shape"), [("int8", (3,)), ("uint8", ()), ("float8e4m3fn", ()), ("int4", ())]
)
def test_the_operator(
    target: str, scale_shape: Shape, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "kernels_pay", lambda elements: True)
    x = values((3, 1030), source, 7, nonfinite=True)
    scale = np.full(scale_shape, 0.3, F32)
    zero_point = np.full(scale_shape, 3).astype(DTYPES[target].numpy) if target[0] == "u" else None
    given = (x, scale, zero_point)
    got = operators.quantize_linear(*given, axis=0, output_dtype=target)
    want = ops.quantize_linear(*given, axis=0, output_dtype=target)
    assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())


def test_the_operator_leaves_other_cases_to_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "kernels_pay", lambda elements: True)
    x = values((3, 50), F32, 7, nonfinite=False)
    for options in (
        {"precision": "float16"}, {"output_dtype": "float8e5m2", "saturate": False},
    ):  # fmt: skip
        got = operators.quantize_linear(x, F32(0.3), **options)
        want = ops.quantize_linear(x, F32(0.3), **options)
        assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
    whole = np.int32([-900, -2, 0, 7])  # no source type of theirs
    assert operators.quantize_linear(whole, F32(2)).tolist() == [0, 0, 0, 4]


def groups() -> Array:
    """Groups of 16 values of every kind that the kernel of optimal scales tells apart."""
    random = np.random.default_rng(5)
    x = random.standard_normal((9, 16))
    x[1] = 0
    x[2] = 0.05 * np.round(x[2] * 9)  # halfway between codes, at many scales
    x[3, 3] = 40
    x[4] *= 1e30
    x[5] *= 1e-30
    x[6] = np.abs(x[6])
    x[7:, :8] = 6, -6, 6, -6, 4, -4, 6, -6  # codes of one scale, and between codes at almost that
    x[7:, 8:] = np.array([[0.25], [0.5]]) * (1 + random.standard_normal(8) / 1000)
    x[7:] *= 1.5 + 2.0**-9
    return x.astype(F32)


GROUPS = groups()
OPTIMAL: list[tuple[str, str, dict[str, Any]]] = [
    ("int4", "bfloat16", {"negative_scale": True, "symmetric": True}),
    ("uint2", "bfloat16", {"symmetric": False}),
    ("float4e2m1", "float16", {}),
    ("int4", "float32", {}),
    ("uint2", "float32", {"symmetric": False}),
    ("float4e2m1", "float32", {}),
]


def check_optimal(case: tuple[str, str, dict[str, Any]], x: Array, weights: Array | None) -> None:
    target, storage, options = case
    spec = QuantSpec(target, PerAxis(0), method="optimal", **options)
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    reach = (
        np.maximum(high, -low) / F32(0.95 * spec.dtype.qmax)
        if spec.symmetric
        else (high - low) / F32(3.3)
    )
    scale = np.where(reach > 0, np.clip(reach, 1e-7, 6e4), 1).astype(DTYPES[storage].numpy)
    zero = None
    if not spec.symmetric:
        zero = np.clip(np.rint(-low / scale.astype(F32)), 0, 3).astype(spec.dtype.numpy)
    given = (x, scale, zero, spec, DTYPES[storage], 1.0, weights)
    want, got = optimal.refine(*given), optimal.refine_compiled(*given)
    assert want[0].tobytes() == got[0].tobytes()
    assert np.any(want[0] != scale)
    assert (want[1] is None) == (got[1] is None)
    assert want[1] is None or want[1].tobytes() == np.asarray(got[1]).tobytes()


@pytest.mark.parametrize("case", OPTIMAL, ids=lambda case: "-".join(case[:2]))
def test_optimal_scales(case: tuple[str, str, dict[str, Any]]) -> None:
    check_optimal(case, GROUPS, None)


@pytest.mark.parametrize("source", [F32, F16, BF16])
def test_optimal_scales_of_a_stream(source: Any) -> None:
    x = values((2, 32), source, 4, nonfinite=False)
    spec = QuantSpec("int4", Blocked(1, 16), method="optimal", scale_dtype="bfloat16")
    check_same(x, spec, 1)


@pytest.mark.parametrize("case", OPTIMAL, ids=lambda case: "-".join(case[:2]))
def test_optimal_scales_by_weighted_errors(case: tuple[str, str, dict[str, Any]]) -> None:
    weights = np.random.default_rng(2).integers(0, 5, GROUPS.shape).astype(F32)
    weights[3, 3:5], weights[6, 2] = [1e30, 1e-30], 1e-15
    x = GROUPS.copy()
    x[6] *= 1e-8
    x[6, 2] = 4
    weights[8, 9:], x[8, 8] = 0, 0.5 * (1.5 + 2.0**-9)
    weights[8, :9] = [1] * 8 + [1e-17]  # two minima at one place
    check_optimal(case, x, weights)


@pytest.mark.parametrize("case", OPTIMAL, ids=lambda case: "-".join(case[:2]))
@pytest.mark.parametrize("short_of", [4, 30, 130, "breakpoints", "minima"])
def test_groups_that_memory_does_not_hold_are_left_to_the_plain_path(
    case: tuple[str, str, dict[str, Any]], short_of: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_minima = vars(interpreted.MODULES["optimal"])["minima"].__globals__
    if isinstance(short_of, int):  # candidates
        monkeypatch.setattr(refiner, "_ROOM", short_of)
    elif short_of == "breakpoints":
        monkeypatch.setattr(refiner, "_BREAKS", -15)
    else:
        monkeypatch.setitem(of_minima, "MINIMA", 0)
    check_optimal(case, GROUPS, None)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(3, 10, 5), (2, 66, 3), (4, 1, 258)])
def test_products_are_subtracted_one_by_one(rows: int, depth: int, columns: int) -> None:
    random = np.random.default_rng(rows)
    c, a, b = (
        random.standard_normal(s) for s in ((rows, columns), (rows, depth), (depth, columns))
    )
    want = c.copy()
    for i in range(rows):
        for j in range(columns):
            for k in range(depth):
                want[i, j] -= a[i, k] * b[k, j]
    subtract_product(c, a, b, compiled=True)
    assert c.tobytes() == want.tobytes()

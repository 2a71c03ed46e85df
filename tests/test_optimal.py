"""The optimal scale against every scale that can be stored."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from qtool import scales
from qtool.dtypes import DTYPES
from qtool.errors import SpecError
from qtool.scales import optimal
from qtool.scales.bounds import bounds, unclipped
from qtool.scales.bounds import windows as windows_between
from qtool.scales.breakpoints import (
    _cells,
    _edges,
    _intervals,
    _Levels,
    _promising,
    _running,
    cell_bits,
    middles,
)
from qtool.scales.squares import UNCLIPPED, Best, Grid, Groups, spread
from qtool.spec import Blocked, PerAxis, PerTensor, QuantSpec

Array = NDArray[Any]

SIZE = 9
LARGEST = float(np.finfo(np.float32).max)


def kinds() -> dict[str, Array]:
    """Blocks of SIZE elements, a few of every kind."""
    random = np.random.default_rng(5)
    normal = random.standard_normal((12, SIZE))
    outlier = normal * 0.01
    outlier[:, 3] = random.choice([-1, 1], 12)
    one_sided = np.abs(normal)
    one_sided[6:] *= -1
    return {
        "normal": normal,
        "heavy tails": random.standard_t(1.5, (12, SIZE)),
        "ties": random.integers(-15, 16, (12, SIZE)) / 2,
        "halves of one": random.integers(-30, 31, (12, SIZE)) * 0.05,
        "single outlier": outlier,
        "one side": one_sided,
        "constant": np.repeat(random.standard_normal((6, 1)), SIZE, axis=1),
        "two values": random.choice([-1.0, 0.37], (6, SIZE)),
        "one element": np.eye(SIZE)[:6] * random.standard_normal((6, 1)),
        "extra code": np.concatenate(
            [normal[:6, :-1], -np.abs(normal[:6]).max(1)[:, None] * 1.2], 1
        ),
        "wide": normal * np.exp(random.normal(size=(12, SIZE)) * 4),
        "small": normal[:6] * 1e-6,
        "subnormal": random.integers(-40, 41, (8, SIZE)) * 2.0**-149,
        "almost subnormal": normal[:6] * 1e-38,
        "large": normal[:6] * 3e4,
        "huge": np.clip(random.uniform(-1.2, 1.2, (8, SIZE)) * LARGEST, -LARGEST, LARGEST),
        "zeros": np.zeros((2, SIZE)),
    }


KINDS = {name: values.astype(np.float32) for name, values in kinds().items()}
BLOCKS = np.concatenate(list(KINDS.values()))


def windows(spec: QuantSpec) -> list[tuple[int, float, float]]:
    """Sign of the scale, lowest and highest code less the zero point, in order of preference."""
    low, high = (float(v) for v in TARGETS[spec.dtype.name])
    low += spec.narrow_range
    if not spec.symmetric:
        width = int(high - low)
        return [(1, -w, width - w) for w in range(width + 1)]
    if spec.dtype.kind == "uint":
        middle = (high + 1) / 2
        low, high = low - middle, high - middle
    return [(sign, low, high) for sign in ((1, -1) if spec.negative_scale else (1,))]


TARGETS: dict[str, tuple[Any, Any]] = dict(oracle.INTEGERS)
TARGETS |= {name: (-f.largest, f.largest) for name, f in oracle.FORMATS.items()
            if name in oracle.EXPONENT_BITS}  # fmt: skip


def rounded(quotient: Array, spec: QuantSpec) -> Array:
    """float32 quotients as codes without ends (of float types: with)."""
    if spec.dtype.is_integer:
        return np.rint(quotient).astype(np.float64)
    last = np.float32(TARGETS[spec.dtype.name][1])
    return np.clip(quotient, -last, last).astype(spec.dtype.numpy).astype(np.float64)


def squares(
    x: Array, scale: Array, spec: QuantSpec, ends: tuple[int, float, float], storage: str,
    weights: Array | None = None,
) -> Array:  # fmt: skip
    """The error of one block under positive float32 scales; Inf where values come back infinite."""
    sign, low, high = ends
    divisor, error, largest = sign * scale, np.zeros(scale.size), np.zeros(scale.size)
    for number, value in enumerate(x):
        with np.errstate(over="ignore", under="ignore"):
            estimate = rounded(value / divisor, spec)
        np.clip(estimate, low, high, out=estimate)
        estimate *= divisor
        np.maximum(largest, np.abs(estimate), out=largest)
        estimate -= value
        estimate *= estimate
        error += estimate if weights is None else estimate * float(weights[number])
    own = {"float16": 65504.0, "bfloat16": float(255 * 2.0**120)}.get(storage, LARGEST)
    error[largest > (own if np.abs(x).max() <= own else LARGEST)] = np.inf
    return error


def storable(storage: str, over: float) -> Array:
    """All positive values of a storage type, times the global scale."""
    dtype = DTYPES[storage].numpy
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        values = codes.astype(np.float32)
    return np.unique(values[(values > 0) & (values < np.inf)]) * np.float32(over)


def stationary(
    x: Array, spec: QuantSpec, ends: tuple[int, float, float], weights: Array | None
) -> Array:
    """float32 scales near every breakpoint and every minimum of a parabola between two."""
    sign, low, high = ends
    positive = np.arange(max(high, -low) + 1)
    if not spec.dtype.is_integer:
        positive = np.array(sorted({v for v, _ in oracle.CODES[spec.dtype.name] if v >= 0}))
        positive = positive[positive <= high]
    halves = (positive[1:] + positive[:-1]) / 2
    breaks = np.unique(np.abs(x[x != 0]).astype(np.float64)[:, None] / halves)
    middles = np.concatenate([breaks[:1] / 2, (breaks[1:] + breaks[:-1]) / 2])
    quotient = x.astype(np.float64) / (sign * middles[:, None])
    if spec.dtype.is_integer:
        codes = np.rint(quotient)
    else:
        codes = np.sign(quotient) * positive[np.searchsorted(halves, np.abs(quotient))]
    codes = np.clip(codes, low, high) * sign
    weight = np.ones(x.size) if weights is None else weights.astype(np.float64)
    square = (codes**2 * weight).sum(axis=1)
    minima = (codes * x * weight).sum(axis=1)[square > 0] / square[square > 0]
    with np.errstate(over="ignore", under="ignore"):
        # and the largest scales with which codes come back finite
        near = np.concatenate([breaks, minima[minima > 0], LARGEST / positive[1:]])
        near = near.astype(np.float32)
    bits = near.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    return np.unique(np.clip(bits, 1, 0x7F7FFFFF).view(np.float32))


def brute_force(
    x: Array, spec: QuantSpec, storage: str, over: float, weights: Array | None = None
) -> float:
    """The least error of a block."""
    table = None if storage == "float32" else storable(storage, over)
    return min(
        squares(x, stationary(x, spec, ends, weights) if table is None else table, spec, ends,
                storage, weights).min()
        for ends in windows(spec)
    )  # fmt: skip


def check(
    blocks: Array, spec: QuantSpec, storage: str, over: float = 1.0, weights: Array | None = None
) -> None:
    """The error of refine()'s scale is the least, and the scale is one that can be stored."""
    scale, zero = start(blocks, spec, storage, over)
    found, zero_point = optimal.refine(blocks, scale, zero, spec, DTYPES[storage], over, weights)
    assert found.dtype == DTYPES[storage].numpy
    assert (zero_point is None) == (zero is None)
    for number, x in enumerate(blocks):
        weight = None if weights is None else weights[number]
        if not x[slice(None) if weight is None else weight > 0].any():
            assert found[number] == scale[number]
            continue
        ends = found_window(spec, float(found[number]), zero_point, number)
        divisor = np.abs(found[number : number + 1].astype(np.float32)) * np.float32(over)
        error = squares(x, divisor, spec, ends, storage, weight)[0]
        least = brute_force(x, spec, storage, over, weight)
        assert error == pytest.approx(least, rel=1e-12, abs=0), (number, x)


def found_window(
    spec: QuantSpec, scale: float, zero_point: Array | None, number: int
) -> tuple[int, float, float]:
    if spec.symmetric:
        if zero_point is not None:
            assert int(zero_point[number]) == 2 ** (spec.dtype.bits - 1)
        return windows(spec)[scale < 0]
    assert zero_point is not None
    return windows(spec)[int(zero_point[number]) - int(spec.qmin)]


def start(blocks: Array, spec: QuantSpec, storage: str, over: float) -> tuple[Array, Array | None]:
    """absmax or minmax."""
    method = "absmax" if spec.symmetric else "minmax"
    plain = replace(spec, method=method, negative_scale=False)
    scale, zero = scales.choose(blocks, plain, DTYPES[storage], over)
    return scale.reshape(-1), None if zero is None else zero.reshape(-1)


def a_spec(target: str, storage: str, **options: Any) -> QuantSpec:
    return QuantSpec(target, Blocked(1, SIZE), scale_dtype=storage, **options)


SYMMETRIC = [
    *[(t, {"symmetric": True}) for t in ("int2", "uint2", "int4", "uint4", "int8", "uint8")],
    *[(t, {"symmetric": True, "narrow_range": True}) for t in ("int2", "int4", "uint2")],
    *[(t, {"symmetric": True, "negative_scale": True}) for t in ("int2", "int4", "uint4", "int8")],
    *[(t, {}) for t in ("float4e2m1", "float6e2m3", "float6e3m2", "float8e4m3fn",
                        "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")],
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "options", "storage"),
    [
        (*case, storage)
        for case in SYMMETRIC
        for storage in ("float8e4m3fn", "float8e8m0", "float16", "bfloat16", "float32")
        if storage != "float8e8m0" or "negative_scale" not in case[1]  # which has no sign
    ],
    ids=str,
)
def test_symmetric(target: str, options: dict[str, Any], storage: str) -> None:
    step = {"float16": 17, "bfloat16": 17, "float32": 3}.get(storage, 1)
    check(BLOCKS[::step], a_spec(target, storage, **options), storage)


ASYMMETRIC = [
    *[(t, s, 3) for t in ("int2", "uint4") for s in ("float8e4m3fn", "float32")],
    *[(t, s, 29) for t in ("uint2", "int4", "uint4") for s in ("float16", "bfloat16")],
    *[(t, s, 23) for t in ("int8", "uint8") for s in ("float8e4m3fn", "float8e8m0")],
    ("uint8", "bfloat16", 97), ("int8", "float32", 71),
]  # fmt: skip


@pytest.mark.parametrize(("target", "storage", "step"), ASYMMETRIC, ids=str)
def test_asymmetric(target: str, storage: str, step: int) -> None:
    check(BLOCKS[::step], a_spec(target, storage, symmetric=False), storage)


@pytest.mark.parametrize("storage", ["float8e4m3fn", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["int16", "uint16"])
def test_16_bits(target: str, storage: str) -> None:
    check(BLOCKS[::11], a_spec(target, storage, symmetric=True), storage)


@pytest.mark.parametrize("storage", ["float8e8m0", "float8e4m3fn"])
def test_zero_points_of_16_bits(storage: str) -> None:
    """Every scale with which not even unclipped codes are worse, with every zero point."""
    spec = a_spec("int16", storage, symmetric=False)
    for x in (KINDS["normal"][0], KINDS["single outlier"][1], KINDS["extra code"][2]):
        scale, zero = start(x[None], spec, storage, 1.0)
        scale, zero_point = optimal.refine(x[None], scale, zero, spec, DTYPES[storage], 1.0, None)
        assert zero_point is not None
        low = -32768.0 - int(zero_point[0])
        found = squares(x, scale.astype(np.float32), spec, (1, low, low + 65535), storage)[0]
        lows = -np.arange(65536.0)
        for s in storable(storage, 1.0):
            codes = np.rint(x / s).astype(np.float64)
            if ((x - codes * float(s)) ** 2).sum() < found:
                clipped = np.clip(codes[:, None], lows, lows + 65535)
                error = ((x[:, None] - clipped * float(s)) ** 2).sum(axis=0).min()
                assert error > found * (1 - 1e-12)


WEIGHTED = [
    ("int4", "float8e4m3fn", {}), ("int4", "float32", {"negative_scale": True}),
    ("uint4", "float8e4m3fn", {"symmetric": False}), ("uint4", "float32", {"symmetric": False}),
    ("float4e2m1", "float32", {}), ("int8", "float8e4m3fn", {}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "storage", "options"), WEIGHTED, ids=str)
def test_weighted(target: str, storage: str, options: dict[str, Any]) -> None:
    random = np.random.default_rng(6)
    blocks = BLOCKS[::4]
    weights = random.exponential(size=blocks.shape) ** 3
    weights[random.random(blocks.shape) < 0.2] = 0
    weights[3] = 0
    weights[4] *= 1e20
    check(blocks, a_spec(target, storage, **options), storage, weights=weights.astype(np.float32))


@pytest.mark.parametrize("target", ["float4e2m1", "int4"])
@pytest.mark.parametrize("over", [2.0**-7, 2.0**3, 0.0123])
def test_under_a_global_scale(target: str, over: float) -> None:
    spec = a_spec(target, "float8e4m3fn", global_scale=True)
    blocks = np.concatenate([KINDS[kind] for kind in ("normal", "wide", "ties", "one side")])
    check(blocks * np.float32(over * 100), spec, "float8e4m3fn", float(np.float32(over)))


def test_any_start_leads_to_the_same_scale() -> None:
    spec = a_spec("int4", "bfloat16")
    blocks = np.concatenate([KINDS[kind] for kind in ("normal", "heavy tails", "ties", "small")])
    scale, _ = start(blocks, spec, "bfloat16", 1.0)
    found, _ = optimal.refine(blocks, scale, None, spec, DTYPES["bfloat16"], 1.0, None)
    other = (scale.astype(np.float32) * 3).astype(scale.dtype)
    again, _ = optimal.refine(blocks, other, None, spec, DTYPES["bfloat16"], 1.0, None)
    assert found.tobytes() == again.tobytes()


@pytest.mark.parametrize(
    ("target", "options", "x", "scale", "zero_point"),
    [
        pytest.param("int4", {}, [0, 4, 0, 4], 1.0, None, id="4 in the codes up to 7"),
        pytest.param("int4", {}, [0, -4, 0, 0], 0.5, None, id="-8 is a code"),
        pytest.param("int4", {"negative_scale": True}, [0, 4], -0.5, None, id="and so is 8"),
        pytest.param("int4", {"negative_scale": True}, [-4, 0], 0.5, None, id="positive"),
        pytest.param("uint4", {"symmetric": False}, [0, 4, 8], 1.0, 0, id="first zero point"),
        pytest.param("uint4", {"symmetric": False}, [-4, 0, 3], 0.5, 8, id="of one only"),
    ],
)
def test_of_equal_errors_the_smallest_scale_and_the_first_zero_point(
    target: str, options: dict[str, Any], x: list[float], scale: float, zero_point: int | None
) -> None:
    storage = DTYPES["float8e4m3fn" if "negative_scale" in options else "float8e8m0"]
    spec = QuantSpec(target, Blocked(1, len(x)), scale_dtype=storage, **options)
    values = np.array([x], np.float32)
    first, zero = start(values, spec, storage.name, 1.0)
    for factor in (1, 2, 4):
        begin = (first.astype(np.float32) * factor).astype(first.dtype)
        found, zeros = optimal.refine(values, begin, zero, spec, storage, 1.0, None)
        assert found.astype(np.float64).tolist() == [scale]
        assert (None if zeros is None else int(zeros[0])) == zero_point


FLOAT32_ONLY = "optimal saturates and divides in float32; leave it out"


@pytest.mark.parametrize(
    ("target", "storage", "options", "message"),
    [
        *[
            (
                target, "float32", {},
                f"method: optimal float32 scales of {target} take 32768 breakpoints per element; "
                "store the scales as float16 or bfloat16, or use mse",
            )
            for target in ("int16", "uint16")
        ],
        ("uint8", "float16", {"semantics": "onednn"},
         "method: optimal zero points are those of ONNX, not of onednn; use another method"),
        ("int8", "float16", {"precision": "float16"}, f"precision: {FLOAT32_ONLY}"),
        ("float8e5m2", "float16", {"saturate": False}, f"saturate: {FLOAT32_ONLY}"),
    ],
)  # fmt: skip
def test_refusals(target: str, storage: str, options: dict[str, Any], message: str) -> None:
    spec = QuantSpec(target, PerTensor(), scale_dtype=storage, **options)
    with pytest.raises(SpecError) as error:
        optimal.check(spec, DTYPES[storage])
    assert str(error.value) == message


KERNEL = [
    ("int4", {}), ("int4", {"negative_scale": True}), ("uint4", {"symmetric": False}),
    ("int2", {"symmetric": False}), ("uint4", {"symmetric": True}), ("int8", {}),
    ("uint8", {"symmetric": False}), ("float4e2m1", {}), ("float6e3m2", {}), ("float8e4m3fn", {}),
]  # fmt: skip


@pytest.mark.parametrize("storage", ["float8e4m3fn", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("target", "options"), KERNEL, ids=str)
def test_the_kernel_gives_the_same_bits(target: str, options: dict[str, Any], storage: str) -> None:
    random = np.random.default_rng(7)
    is_slow = storage == "float16" or options.get("symmetric") is False
    shapes = [(40, 32), (30, 5), (4, 130), (1, 300 if is_slow else 5000)]
    blocks = BLOCKS[::2]
    if is_slow:  # not the huge ones, for which all scales are nearly the same
        blocks = blocks[np.abs(blocks).max(axis=1) < 1e30]
    groups = [blocks, *[random.standard_t(4, shape) for shape in shapes]]
    for number, block in enumerate(groups):
        values = block.astype(np.float32)
        weights = random.random(values.shape).astype(np.float32) if number % 2 else None
        spec = QuantSpec(target, Blocked(1, values.shape[1]), scale_dtype=storage, **options)
        first = start(values, spec, storage, 1.0)
        plain = optimal.refine(values, *first, spec, DTYPES[storage], 1.0, weights)
        fast = optimal.refine_compiled(values, *first, spec, DTYPES[storage], 1.0, weights)
        for a, b in zip(plain, fast, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or a.tobytes() == b.tobytes()


BOUNDED = [
    ("int4", {}), ("int4", {"negative_scale": True}), ("uint4", {"symmetric": True}),
    ("uint2", {"symmetric": False}), ("uint8", {"symmetric": False}), ("float4e2m1", {}),
    ("float8e4m3fn", {}),
]  # fmt: skip


def begun(
    blocks: Array, target: str, options: dict[str, Any], weights: Array | None = None
) -> tuple[Groups, Best]:
    """Groups, and the start as the best so far."""
    spec = a_spec(target, "bfloat16", **options)
    scale, zero = start(blocks, spec, "bfloat16", 1.0)
    window = np.zeros(len(blocks), np.int32)
    if not spec.symmetric and zero is not None:
        window = zero.astype(np.int32) - int(spec.qmin)
    groups = Groups(blocks, weights, Grid(spec), DTYPES["bfloat16"])
    return groups, Best(groups, scale.astype(np.float32), window)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("target", "options"), BOUNDED, ids=str)
def test_the_best_scale_is_looked_for_between_the_bounds_of_the_proofs(
    target: str, options: dict[str, Any], is_weighted: bool
) -> None:
    blocks, weights = BLOCKS[::3], None
    if is_weighted:
        weights = np.random.default_rng(8).random(blocks.shape).astype(np.float32)
        weights[weights < 0.3] = 0
    groups, best = begun(blocks, target, options, weights)
    spec = a_spec(target, "bfloat16", **options)
    ends = windows(spec)
    unhalved = 2.0**-40
    numbers = range(len(ends)) if spec.symmetric else [UNCLIPPED]
    found = [bounds(groups, best, window, unhalved) for window in numbers]
    above, below = groups.reach(best.error)
    for number, row in enumerate(blocks.astype(np.float64)):
        weight = np.ones(SIZE) if weights is None else weights[number].astype(np.float64)
        x = np.where(weight > 0, row, 0)
        most, least = max(x.max(), 0), max(-x.min(), 0)
        # clipping at reach costs more than what is known, and a bit farther out it does not
        for side, top, end in ((x, most, above[number]), (-x, least, below[number])):
            inside = (weight * np.maximum(side - end - top / 4096, 0) ** 2).sum()
            outside = (weight * np.maximum(side - end, 0) ** 2).sum()
            assert inside <= best.error[number] * (1 + 2e-9)
            assert outside > best.error[number] * (1 + 1e-10) or end == 0
        for (sign, low, high), (lower, upper) in zip(ends, found, strict=False):
            up, down = (high, -low) if sign > 0 else (-low, high)
            if spec.symmetric:
                lowest = max(above[number] / up, below[number] / down)
                highest = max(most / halfway(target, up), least / halfway(target, down))
            else:
                lowest = (above[number] + below[number]) / (high - low)
                highest = (most + least) / ((high - low) // 2)
            zeros = 2 * max(most, least) / float(smallest_code(target))
            highest = min(max(highest, unhalved), zeros)
            if groups.is_huge[number]:
                highest = zeros
            slack = 1 + 2.0**-20
            assert lower[number] == pytest.approx(lowest / slack, rel=1e-14, abs=0)
            assert upper[number] == pytest.approx(highest * slack, rel=1e-14, abs=0)


def codes_of(target: str) -> list[float]:
    """The positive ones, in order."""
    if target in oracle.INTEGERS:
        return [float(k) for k in range(1, 257)]
    return sorted({float(value) for value, _ in oracle.CODES[target] if 0 < value < math.inf})


def smallest_code(target: str) -> float:
    return codes_of(target)[0]


def halfway(target: str, last: float) -> float:
    """The quotient from which on codes are beyond half of the last one."""
    codes = [0.0, *codes_of(target)]
    beyond = next(i for i, code in enumerate(codes) if code > last / 2)
    return (codes[beyond - 1] + codes[beyond]) / 2


@pytest.mark.parametrize("target", ["uint2", "uint8"])
def test_windows_that_clip_nothing_and_those_that_clip_too_much_are_known(target: str) -> None:
    blocks = BLOCKS[np.abs(BLOCKS).max(axis=1) < 1e30][::2]
    groups, best = begun(blocks, target, {"symmetric": False})
    width = oracle.INTEGERS[target][1]
    above, below = groups.reach(best.error)
    for factor in (0.5, 1.0, 1.3):
        which = np.flatnonzero(groups.absmax > 0)
        scale = (best.scale[which] * factor).astype(np.float32)
        which, scale = which[scale > 0], scale[scale > 0]
        fits, window = unclipped(groups, which, scale)
        pairs, kept = windows_between(groups, best, which, scale)
        slack = scale.astype(np.float64) * (1 + 2.0**-20)
        for number, group in enumerate(which):
            codes = np.rint(blocks[group] / scale[number])
            whole = [w for w in range(width + 1) if -w <= codes.min() and codes.max() <= width - w]
            assert bool(whole) == fits[number]
            assert not whole or window[number] == whole[0]
            assert kept[pairs == number].tolist() == [
                w for w in range(width + 1)
                if w >= below[group] / slack[number] and width - w >= above[group] / slack[number]
            ]  # fmt: skip


def test_of_candidates_the_one_of_least_error_scale_and_window_is_kept() -> None:
    random = np.random.default_rng(9)
    groups, best = begun(KINDS["normal"][:5], "uint4", {"symmetric": False})
    best.error[:] = [0.2, 0.3, 0.3, 0.2, 0.1]
    best.scale[:] = [2, 2, 2, 1, 2]
    best.window[:] = [1, 1, 1, 1, 0]
    held = list(zip(best.error, best.scale, best.window, strict=True))
    for turn in range(30):
        which = np.sort(random.integers(turn % 2, 5, 7))
        error, scale = random.choice([0.1, 0.2, 0.3], 7), random.choice([1, 2, 3], 7)
        window = random.integers(0, 3, 7)
        again = Best(groups, best.scale.copy(), best.window.copy())
        again.error[:] = best.error
        again.offer(which, error, scale.astype(np.float32), window)
        offered = list(zip(which, error, scale, window, strict=True))
        expected = [min([tuple(c[1:]) for c in offered if c[0] == g] + [held[g]]) for g in range(5)]
        assert list(zip(again.error, again.scale, again.window, strict=True)) == expected


def test_what_is_known_of_a_group() -> None:
    x = np.array([[1, -3, 4, np.nan, 0, -8, 2], [1e38, 0, 0, 0, 0, 0, -np.inf]], np.float32)
    weights = np.array([[1, 2, 3, 4, 5, 0, 0.5], [0, 1, 1, 1, 1, 1, 1]], np.float32)
    spec, storage = a_spec("int4", "float32"), DTYPES["float32"]
    groups = Groups(x, weights, Grid(spec), storage)
    assert (groups.count, groups.x.shape, groups.low.tolist()) == (2, (16, 2), [3, 0])
    assert (groups.high.tolist(), groups.absmax.tolist()) == ([4, 0], [4, 0])
    assert (groups.lowest.tolist(), groups.highest.tolist()) == ([8, 0], [4, float(x[1, 0])])
    assert groups.norm.tolist() == [np.sqrt(1 + 2 * 9 + 3 * 16 + 2), 0]
    assert groups.limit.tolist() == [LARGEST] * 2
    assert groups.is_huge.tolist() == [False, True]
    plain = Groups(x, None, Grid(spec), storage)
    assert (plain.low.tolist(), plain.high.tolist()) == ([8, 0], [4, float(x[1, 0])])
    assert plain.norm[0] == np.sqrt(1 + 9 + 16 + 64 + 4)
    half = Groups(x, None, Grid(spec), DTYPES["float16"])
    assert half.limit.tolist() == [65504, LARGEST]


def test_numbers_of_every_pair() -> None:
    which, number = spread(np.array([2, 0, 3]))
    assert which.tolist() == [0, 0, 2, 2, 2]
    assert number.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("target", ["int4", "uint8", *oracle.EXPONENT_BITS])
def test_codes_by_number(target: str) -> None:
    codes = codes_of(target)
    levels = _Levels(Grid(a_spec(target, "float32")))
    width = len(codes) if target in oracle.EXPONENT_BITS else 15
    assert levels.positive(width).tolist() == codes[:width]
    codes = [0.0, *codes[:width]]
    numbers = np.arange(len(codes))
    assert levels.value(numbers).tolist() == codes
    halves = [(a + b) / 2 for a, b in itertools.pairwise(codes)]
    assert levels.halfway(numbers[:-1]).tolist() == halves
    assert levels.index(np.array(codes)).tolist() == numbers.tolist()
    assert levels.index(np.nextafter(halves, 0)).tolist() == numbers[:-1].tolist()
    assert levels.index(np.nextafter(halves, 1e9)).tolist() == numbers[1:].tolist()


@pytest.mark.parametrize(
    ("target", "per_octave"),
    [("int2", 128), ("uint4", 128), ("float4e2m1", 128), ("float6e2m3", 512),
     ("float8e5m2", 512), ("int8", 1024)],
)  # fmt: skip
def test_cells_of_the_float32_numbers(target: str, per_octave: int) -> None:
    grid = Grid(a_spec(target, "float32"))
    size = (1 << 23) // per_octave
    assert 1 << cell_bits(grid) == size
    last = 0x7F7FFFFF // size
    cell = np.array([0, 1, 5, 127 * per_octave, last], np.int32)
    left, right = (end.view(np.int32).tolist() for end in _edges(cell, grid))
    assert left == [1, size, 5 * size, 0x3F800000, last * size]
    assert right == [size, 2 * size, 6 * size, 0x3F800000 + size, 0x7F7FFFFF]
    middle = [k * size + size // 2 for k in cell.tolist()]
    assert middles(cell, grid).view(np.int32).tolist() == middle


@pytest.mark.parametrize(("target", "options"), BOUNDED, ids=str)
def test_the_cells_between_the_bounds_and_those_that_may_have_less_error(
    target: str, options: dict[str, Any]
) -> None:
    blocks = np.concatenate([BLOCKS[::7], KINDS["zeros"]])
    groups, best = begun(blocks, target, options)
    window = 0 if groups.grid.count < 3 else UNCLIPPED
    low, high = bounds(groups, best, window, 2.0**-125 - 2.0**-149)
    which, cell = _cells(groups, best, window)
    shift = cell_bits(groups.grid)
    for number in range(groups.count):
        ends = np.minimum([low[number], high[number]], LARGEST).astype(np.float32)
        first, last = (ends.view(np.int32) >> shift).tolist()
        expected = list(range(first, max(first, last) + 1)) if high[number] > 0 else []
        assert cell[which == number].tolist() == expected
    middle, left = middles(cell, groups.grid), _edges(cell, groups.grid)[0].astype(np.float64)
    error = groups.errors(which, middle, window)
    least = best.error.copy()
    if window != UNCLIPPED:
        np.minimum.at(least, which, error)
    else:
        best.error *= 0.99  # of the codes without ends nothing is known
        least *= 0.99
    found = _promising(groups, best, which, cell, window)
    assert best.error.tolist() == least.tolist()
    known, norm = np.sqrt(least[which]), groups.norm[which]
    farthest = middle / left - 1
    wanted = np.sqrt(error) <= known + farthest * (norm + known) + 1e-6 * norm
    wanted |= np.abs(blocks).max(axis=1)[which] >= LARGEST / 4
    assert found.tolist() == wanted.tolist()
    assert 0 < found.sum() < found.size


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("target", "options"), BOUNDED, ids=str)
def test_between_breakpoints_errors_are_parabolas(
    target: str, options: dict[str, Any], is_weighted: bool
) -> None:
    blocks, weights = np.concatenate([KINDS["normal"], KINDS["ties"], KINDS["one side"]]), None
    if is_weighted:
        weights = np.random.default_rng(8).random(blocks.shape).astype(np.float32)
    groups, best = begun(blocks, target, options, weights)
    which = np.flatnonzero(groups.absmax > 0)[::2].repeat(2)
    right = (best.scale[which] * np.float32(0.9)).astype(np.float32)
    left = (right * np.float32(0.93)).astype(np.float32)
    right[1::2], left[1::2] = right[::2] * np.float32(2), right[::2]
    window = (np.arange(which.size) // 2) % groups.grid.count
    found = _intervals(groups, which, left, right, window)
    two = _intervals(groups, which[:2], left[:2], right[:2], window[:2])
    pair, start, end, c, g, b = found
    for of_two, of_all in zip(two, found, strict=True):
        np.testing.assert_allclose(of_two, of_all[pair < 2], rtol=0, atol=1e-13)
    assert np.unique(pair).tolist() == list(range(which.size))
    assert (np.diff(pair) >= 0).all()
    codes = np.array([0.0, *codes_of(target)])
    for number, group in enumerate(which):
        inside = np.flatnonzero(pair == number)
        assert start[inside[0]] == 0
        assert start[inside[1:]].tolist() == end[inside[:-1]].tolist()
        unit = float(right[number])
        assert end[inside[-1]] == float(left[number]) / unit - 1
        x = blocks[group].astype(np.float64)
        weight = np.ones(SIZE) if weights is None else weights[group].astype(np.float64)
        low, high = groups.grid.lows[window[number]], groups.grid.highs[window[number]]
        for i in inside[start[inside] - end[inside] > 1e-9]:
            u = (start[i] + end[i]) / 2
            scale = unit * (1 + u)
            nearest = codes[np.abs(np.abs(x)[:, None] / scale - codes).argmin(axis=1)]
            estimate = np.clip(np.copysign(nearest, x), low, high) * scale
            wanted = (weight * (x - estimate) ** 2).sum() / (weight * x * x).sum()
            assert c[i] + g[i] * u + b[i] * u * u == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize(
    ("target", "options", "lows", "width", "smallest"),
    [
        ("int4", {}, [-8], 15, 1), ("int4", {"narrow_range": True}, [-7], 14, 1),
        ("int4", {"negative_scale": True}, [-8, -7], 15, 1),
        ("int4", {"negative_scale": True, "narrow_range": True}, [-7], 14, 1),
        ("uint2", {"symmetric": True}, [-2], 3, 1), ("uint2", {}, [0, -1, -2, -3], 3, 1),
        ("uint2", {"symmetric": True, "negative_scale": True}, [-2, -1], 3, 1),
        ("int2", {"symmetric": False, "narrow_range": True}, [0, -1, -2], 2, 1),
        ("float4e2m1", {}, [-6], 12, 0.5), ("float8e5m2", {}, [-57344], 114688, 2.0**-16),
    ],
    ids=str,
)  # fmt: skip
def test_windows_by_hand(
    target: str, options: dict[str, Any], lows: list[int], width: int, smallest: float
) -> None:
    grid = Grid(a_spec(target, "float32", method="optimal", **options))
    far = 2.0**30
    assert (grid.count, grid.width, grid.smallest) == (len(lows), width, smallest)
    assert grid.lows.tolist() == [*lows, -far]
    assert grid.highs.tolist() == [*(low + width for low in lows), far]


def test_groups_that_fill_their_lanes_reach_from_zero() -> None:
    x = np.stack([np.arange(2, 18), -np.arange(2, 18)]).astype(np.float32)
    spec, storage = a_spec("int4", "float32"), DTYPES["float32"]
    groups = Groups(x, None, Grid(spec), storage)
    assert groups.x.shape == (16, 2)
    assert (groups.low.tolist(), groups.high.tolist()) == ([0, 17], [17, 0])
    assert (groups.lowest.tolist(), groups.highest.tolist()) == ([0, 17], [17, 0])


def test_clipping_that_costs_as_much_as_is_known_is_not_ruled_out() -> None:
    groups, best = begun(np.eye(SIZE, dtype=np.float32)[:1], "int4", {})
    best.error[:] = 0.25
    above, below = groups.reach(best.error)
    assert 0.5 - 2.0**-12 <= above[0] < 0.5
    assert below[0] == 0


def test_the_largest_number_may_come_back() -> None:
    x = np.zeros((1, SIZE), np.float32)
    x[0, :2] = LARGEST, -LARGEST / 7  # of which 7 is a factor
    spec, storage = a_spec("int4", "float32"), DTYPES["float32"]
    start = np.float32([LARGEST / 6])
    found, _ = optimal.refine(x, start, None, spec, storage, 1.0, None)
    assert found.tolist() == [LARGEST / 7]


def test_sums_of_one_pair_are_not_rounded_to_those_of_all() -> None:
    steps, pair = np.array([1e6, 3e6, 0.1, 0.2, 0.4, 7]), np.array([0, 0, 1, 1, 1, 2])
    found = _running(steps, pair)
    np.testing.assert_allclose(found, [1e6, 4e6, 0.1, 0.3, 0.7, 7], rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("target", "storage", "options"),
    [("int4", "float32", {}), ("uint4", "float32", {"symmetric": False}),
     ("float4e2m1", "float32", {}), ("int2", "bfloat16", {"symmetric": False})],
)  # fmt: skip
def test_a_group_alone_has_the_scale_that_it_has_among_others(
    target: str, storage: str, options: dict[str, Any]
) -> None:
    spec, kind, blocks = a_spec(target, storage, **options), DTYPES[storage], BLOCKS[::5]
    first, zero = start(blocks, spec, storage, 1.0)
    scale, zero_point = optimal.refine(blocks, first, zero, spec, kind, 1.0, None)
    for number in range(len(blocks)):
        one = slice(number, number + 1)
        given = None if zero is None else zero[one]
        alone, point = optimal.refine(blocks[one], first[one], given, spec, kind, 1.0, None)
        assert alone.tolist() == scale[one].tolist()
        assert zero_point is None or point is None or point.tolist() == zero_point[one].tolist()


@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize("weights", [None, np.zeros((1, SIZE), np.float32)], ids=["", "weights 0"])
def test_zeros_keep_the_scale_and_the_zero_point_of_the_start(
    storage: str, weights: Array | None
) -> None:
    x = np.zeros((1, SIZE), np.float32) if weights is None else KINDS["normal"][:1]
    first, zero = np.array([0.75], DTYPES[storage].numpy), np.array([3], DTYPES["int4"].numpy)
    spec = a_spec("int4", storage, symmetric=False, narrow_range=True)
    signed = a_spec("int4", storage, negative_scale=True)
    for refine in (optimal.refine, optimal.refine_compiled):
        found, point = refine(x, first, zero, spec, DTYPES[storage], 1.0, weights)
        assert point is not None
        assert (found.tolist(), point.astype(int).tolist()) == ([0.75], [3])
        for begin in (first, -first):
            found, _ = refine(x, begin, None, signed, DTYPES[storage], 1.0, weights)
            assert found.tolist() == begin.tolist()


@pytest.mark.parametrize(
    ("storage", "unit"), [("float8e4m3fn", 2.0**-9), ("float16", 2.0**-24), ("float32", 2.0**-149)]
)
def test_scales_whose_half_cannot_be_stored(storage: str, unit: float) -> None:
    """9 of the smallest numbers are 3 times 3, and 3 has no half, nor has 1."""
    x = np.zeros((3, SIZE))
    x[0, 0], x[1, :2], x[2, 0] = 9 * unit, (5 * unit, 7 * unit), 27 * unit
    spec, kind = a_spec("int4", storage), DTYPES[storage]
    first = np.array([8 * unit] * 3).astype(kind.numpy)
    for refine in (optimal.refine, optimal.refine_compiled):
        found, _ = refine(x.astype(np.float32), first, None, spec, kind, 1.0, None)
        assert found.astype(float).tolist() == [3 * unit, unit, 9 * unit]


def test_the_first_zero_point_of_those_that_clip_nothing() -> None:
    x = (np.random.default_rng(18).standard_normal((150, SIZE)) * 0.01).astype(np.float32)
    spec, kind = a_spec("uint4", "float32", symmetric=False), DTYPES["float32"]
    found, zero = optimal.refine(x, *start(x, spec, "float32", 1.0), spec, kind, 1.0, None)
    codes = np.rint(x / found[:, None])
    below, above = -np.minimum(codes.min(axis=1), 0), np.maximum(codes.max(axis=1), 0)
    fits = below + above <= 15
    assert zero is not None
    assert zero.astype(float)[fits].tolist() == below[fits].tolist()
    assert 20 < fits.sum() < 150


@pytest.mark.parametrize("storage", ["float32", "float16", "float8e4m3fn"])
@pytest.mark.parametrize(
    ("target", "options"), [case for case in BOUNDED if case[0] != "uint8"], ids=str
)
def test_the_kernel_weighs_the_smallest_and_the_largest_values_alike(
    target: str, options: dict[str, Any], storage: str
) -> None:
    kinds = ("subnormal", "almost subnormal", "zeros", "one element", "ties")
    blocks = np.concatenate([KINDS[kind][:4] for kind in kinds] + [KINDS["huge"][:2]])
    weights = np.random.default_rng(12).random(blocks.shape).astype(np.float32)
    spec = a_spec(target, storage, **options)
    first = start(blocks, spec, storage, 1.0)
    plain = optimal.refine(blocks, *first, spec, DTYPES[storage], 1.0, weights)
    fast = optimal.refine_compiled(blocks, *first, spec, DTYPES[storage], 1.0, weights)
    assert plain[0].tobytes() == fast[0].tobytes()
    assert np.array_equal(plain[1], fast[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("storage", "unhalved"),
    [("float16", 2047 * 2.0**-24), ("bfloat16", 255 * 2.0**-133), ("float8e4m3fn", 15 * 2.0**-9),
     ("float8e8m0", 2.0**-127)],
)  # fmt: skip
def test_all_scales_that_can_be_stored(storage: str, unhalved: float) -> None:
    table = optimal._divisors(DTYPES[storage], 1.0)
    assert table.tolist() == storable(storage, 1.0).tolist()
    assert optimal._unhalved(table) == unhalved
    with np.errstate(over="ignore"):
        four = storable(storage, 4.0)
    assert optimal._divisors(DTYPES[storage], 4.0).tolist() == four[four < np.inf].tolist()


def test_scales_between_bounds_are_one_at_least() -> None:
    table = np.float32([1, 2, 4, 8])
    low = np.array([0.0, 3, 2, 9, 5, 0, 0])
    high = np.array([0.0, 5, 4, 20, 6, 0.5, 99])
    which, scale = optimal._between(table, low, high)
    assert which.tolist() == [1, 2, 2, 3, 4, 5, 6, 6, 6, 6]
    assert scale.tolist() == [4, 2, 4, 8, 8, 1, 1, 2, 4, 8]


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}], ids=str)
@pytest.mark.parametrize("granularity", [PerAxis(1), Blocked(1, SIZE)], ids=str)
def test_every_group_of_a_tensor_gets_its_best_scale(
    granularity: PerAxis | Blocked, options: dict[str, Any], compiled: bool, is_weighted: bool
) -> None:
    """Values that are not finite count as 0, weights that are all 0 as none."""
    groups = KINDS["heavy tails"].copy()
    groups[3, :2] = np.nan, np.inf
    weights = np.random.default_rng(13).random(groups.shape).astype(np.float32)
    weights[5], groups[7] = 0, 0
    storage, over = "float8e4m3fn", 0.75
    spec = QuantSpec(
        "int4", granularity, method="optimal", scale_dtype=storage, nonfinite="allow", **options
    )

    def tensor(rows: Array) -> Array:
        return np.ascontiguousarray(rows.T if granularity == PerAxis(1) else rows.reshape(6, -1))

    given, kind = tensor(weights) if is_weighted else None, DTYPES[storage]
    scale, zero = scales.choose(tensor(groups), spec, kind, over, given, compiled=compiled)
    shape = (12,) if granularity == PerAxis(1) else (6, 2)
    assert (scale.shape, scale.dtype) == (shape, kind.numpy)
    assert zero is None or (zero.shape, zero.dtype) == (shape, spec.dtype.numpy)
    scale, zero = scale.reshape(-1), None if zero is None else zero.reshape(-1)
    assert scale[7] == 1
    assert zero is None or zero[7] == 0
    for number, row in enumerate(np.where(np.isfinite(groups), groups, np.float32(0))):
        weight = weights[number] if is_weighted and number != 5 else None
        ends = found_window(spec, float(scale[number]), zero, number)
        divisor = np.abs(scale[number : number + 1].astype(np.float32)) * np.float32(over)
        least = brute_force(row, spec, storage, over, weight)
        assert squares(row, divisor, spec, ends, storage, weight)[0] == pytest.approx(least)

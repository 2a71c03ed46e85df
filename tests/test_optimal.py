"""The optimal scale against every scale that can be stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray

from qtool import scales
from qtool.dtypes import DTYPES
from qtool.errors import SpecError
from qtool.scales import optimal
from qtool.spec import Blocked, QuantSpec

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
        "extra code": np.concatenate([normal[:6, :-1], -np.abs(normal[:6]).max(1)[:, None] * 1.2], 1),
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


def windows(spec: QuantSpec, storage: str) -> list[tuple[int, float, float]]:
    """Sign of the scale, lowest and highest code less the zero point, in order of preference."""
    low, high = (float(v) for v in TARGETS[spec.dtype.name])
    low += spec.narrow_range
    if not spec.symmetric:
        width = int(high - low)
        return [(1, -w, width - w) for w in range(width + 1)]
    if spec.dtype.kind == "uint":
        middle = (high + 1) / 2
        low, high = low - middle, high - middle
    mirrors = spec.negative_scale and spec.dtype.is_integer and storage != "float8e8m0"
    signs = (1, -1) if mirrors else (1,)
    return [(sign, low, high) for sign in signs]


TARGETS = {name: ends for name, ends in oracle.INTEGERS.items()}
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
    with np.errstate(over="ignore", under="ignore"):
        codes = np.clip(rounded(x / (sign * scale[:, None]), spec), low, high)
    values = codes * (sign * scale[:, None].astype(np.float64))
    terms = (x - values) ** 2
    error = (terms if weights is None else terms * weights.astype(np.float64)).sum(axis=1)
    own = {"float16": 65504.0, "bfloat16": float(255 * 2.0**120)}.get(storage, LARGEST)
    limit = own if np.abs(x).max() <= own else LARGEST
    error[np.abs(values).max(axis=1) > limit] = np.inf
    return np.asarray(error)


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
        for ends in windows(spec, storage)
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
        ends = found_window(spec, storage, float(found[number]), zero_point, number)
        divisor = np.abs(found[number : number + 1].astype(np.float32)) * np.float32(over)
        error = squares(x, divisor, spec, ends, storage, weight)[0]
        least = brute_force(x, spec, storage, over, weight)
        assert error == pytest.approx(least, rel=1e-12, abs=0), (number, x)


def found_window(
    spec: QuantSpec, storage: str, scale: float, zero_point: Array | None, number: int
) -> tuple[int, float, float]:
    if spec.symmetric:
        if zero_point is not None:
            assert int(zero_point[number]) == 2 ** (spec.dtype.bits - 1)
        return windows(spec, storage)[scale < 0]
    assert zero_point is not None
    return windows(spec, storage)[int(zero_point[number]) - int(spec.qmin)]


def start(
    blocks: Array, spec: QuantSpec, storage: str, over: float
) -> tuple[Array, Array | None]:
    """absmax or minmax."""
    scale, zero = scales.choose(blocks, spec, DTYPES[storage], over)
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


@pytest.mark.parametrize("storage", ["float8e4m3fn", "float8e8m0", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("target", "options"), SYMMETRIC, ids=str)
def test_symmetric(target: str, options: dict[str, Any], storage: str) -> None:
    step = {"float16": 5, "bfloat16": 5}.get(storage, 1)
    check(BLOCKS[::step], a_spec(target, storage, **options), storage)


ASYMMETRIC = [
    *[(t, "float8e4m3fn", 1) for t in ("int2", "uint2", "int4", "uint4")],
    *[(t, s, 3) for t in ("int2", "uint2") for s in ("float16", "bfloat16", "float32")],
    *[(t, s, 9) for t in ("int4", "uint4") for s in ("float16", "bfloat16", "float32")],
    *[(t, s, 17) for t in ("int8", "uint8") for s in ("float8e4m3fn", "float8e8m0")],
    *[(t, s, 47) for t in ("int8", "uint8") for s in ("bfloat16", "float32")],
]


@pytest.mark.parametrize(("target", "storage", "step"), ASYMMETRIC, ids=str)
def test_asymmetric(target: str, storage: str, step: int) -> None:
    check(BLOCKS[::step], a_spec(target, storage, symmetric=False), storage)

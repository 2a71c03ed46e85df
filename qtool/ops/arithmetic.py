"""Division, rounding, saturation and casts on arrays that broadcast: what the operators share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, DType, resolve
from qtool.errors import SpecError

Array = NDArray[Any]

FLOAT32 = DTYPES["float32"]
FLOAT64 = DTYPES["float64"]


def rounded(
    x: Array, scale: Array, zero_point: Array | None, dtype: DType, precision: DType
) -> Array:
    """round(x / scale) + zero_point as float64, before saturation.

    scale, zero_point: broadcastable to x. Float targets: x / scale + zero_point rounded to the
    type's grid, continued without bound.
    """
    quotient = _divide(x, scale, precision).astype(np.float64)
    if dtype.is_integer:
        np.rint(quotient, out=quotient)
    if zero_point is not None:
        with np.errstate(invalid="ignore"):  # float8e5m2 has Inf
            quotient = quotient + zero_point.astype(np.float64)
    return quotient if dtype.is_integer else round_to_grid(quotient, dtype)


def rounded_onednn(x: Array, scale: Array, zero_point: Array | None, dtype: DType) -> Array:
    """round(x / scale + zero_point) as float64, the sum in float32, before saturation."""
    total = _divide(x, scale, FLOAT32)
    if zero_point is not None:
        total = total + zero_point.astype(np.float32)
    if dtype.is_integer:
        return np.rint(total).astype(np.float64)
    return round_to_grid(total.astype(np.float64), dtype)


def scaled(codes: Array, scale: Array, zero_point: Array | None, output: DType) -> Array:
    """(codes - zero_point) * scale, the difference and the product each rounded once to output.

    scale, zero_point: broadcastable to codes.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        difference = codes.astype(np.float64)
        if zero_point is not None:
            difference = difference - zero_point.astype(np.float64)
        return np.asarray(cast(difference, output) * cast(scale, output))


def biased(codes: Array, scale: Array, bias: Array, output: DType) -> Array:
    """codes * scale + bias, the product and the sum each rounded once to output."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(cast(codes, output) * cast(scale, output) + cast(bias, output))


def cast(x: Array, dtype: DType) -> Array:
    """x rounded once, to nearest even, to a float type; overflow gives Inf.

    NumPy and ml_dtypes convert float64 and integers to 16 bits through float32, which rounds twice.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signalling NaN
        if dtype.bits < 32 and x.dtype.itemsize > 2 and x.dtype != np.float32:
            x = round_to_grid(x.astype(np.float64), dtype)
        return x.astype(dtype.numpy, copy=False)


def round_to_grid(v: Array, dtype: DType) -> Array:
    """float64 v rounded, ties to even, to the nearest of dtype's values, continued beyond qmax.

    The grid around v has the step 2^(max(e, emin) - m): e the exponent of v, emin that of the
    smallest normal value, m the stored mantissa bits. That is what the last bit counts of
    |v| + 2^52 steps, so that adding and subtracting these rounds. Beyond 2^900, where every type
    has ended, the step no longer grows.
    """
    v = np.asarray(v)
    steps = np.asarray(v.view(np.int64) >> 52)
    steps &= 0x7FF  # the exponent, whose bias is 1023
    np.clip(steps, dtype.limits.minexp + 1023, 900 + 1023, out=steps)
    steps += 52 - dtype.limits.nmant
    steps <<= 52
    rounded = np.asarray(np.abs(v))
    rounded += steps.view(np.float64)
    rounded -= steps.view(np.float64)
    np.copysign(rounded, v, out=rounded)
    return rounded


def saturate_cast(
    v: Array,
    zero_point: Array | None,
    dtype: DType,
    *,
    saturate: bool = True,
    qmin: float | None = None,
) -> Array:
    """Rounded float64 values as codes of dtype; see quantize_linear for NaN and `saturate`.

    qmin: raises the lowest code (narrow range).
    """
    lowest = dtype.qmin if qmin is None else qmin
    clipped = np.clip(v, lowest, dtype.qmax)
    if dtype.is_integer:
        nan = np.isnan(clipped)
        if nan.any():
            zero = 0.0 if zero_point is None else zero_point.astype(np.float64)
            clipped = np.where(nan, np.clip(zero, lowest, dtype.qmax), clipped)
        return cast_integers(clipped, dtype)
    nan = np.isnan(v)
    if not saturate and dtype.has_nan:
        overflow = np.abs(v) > dtype.qmax
        if dtype.name == "float8e5m2":
            clipped = np.where(overflow, np.copysign(np.inf, v), clipped)
        else:
            nan |= overflow
    clipped = np.where(nan, np.nan if dtype.has_nan else 0.0, clipped)
    return np.asarray(clipped.astype(dtype.numpy))


def cast_integers(v: Array, dtype: DType) -> Array:
    """Whole numbers within dtype's range, exactly."""
    if dtype.bits < 8:  # NumPy's float64 to int8 is several times faster than ml_dtypes' to int4
        return np.asarray(v).astype(np.int8).astype(dtype.numpy)
    return np.asarray(v).astype(dtype.numpy)


def check_scale(scale: Array, thing: str) -> None:
    """Refuse a scale that, in the precision type, is zero or not finite."""
    values = cast(scale, FLOAT32)
    bad = ~np.isfinite(values) | (values == 0)
    if bad.any():
        index = np.unravel_index(int(np.argmax(bad)), bad.shape)
        at = f" at {[int(i) for i in index]}" if bad.size > 1 else ""
        raise SpecError(
            thing,
            f"{values[index]}{at} in {resolve(scale.dtype)} cannot divide",
            "scales must be finite and not zero",
        )


def _divide(x: Array, scale: Array, precision: DType) -> Array:
    divisor = cast(scale, precision)
    check_scale(divisor, "y_scale")
    with np.errstate(all="ignore"):
        return np.asarray(cast(x, precision) / divisor)


def float32_source(x: Array, thing: str) -> Array:
    dtype = resolve(x.dtype, thing)
    if dtype.kind != "float" or dtype.bits < 16:
        raise SpecError(thing, f"type {dtype} is not allowed", "use float32")
    return cast(x, FLOAT32)

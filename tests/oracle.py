"""The operators once more, one element at a time in exact rational arithmetic, without qtool.

Written from the text of ONNX QuantizeLinear, DequantizeLinear and Cast (the float8 tables) and of
oneDNN's Quantize. A value is a Python float (exact for every type here, with its NaN, Inf and
-0.0) and each operation rounds the exact Fraction once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

Index = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """A binary floating-point type.

    mantissa: stored bits. emin: exponent of the smallest normal value. largest: finite value.
    """

    mantissa: int
    emin: int
    largest: Fraction


FORMATS = {
    "float32": Format(23, -126, Fraction((2**24 - 1) * 2**104)),
    "float16": Format(10, -14, Fraction(65504)),
    "bfloat16": Format(7, -126, Fraction((2**8 - 1) * 2**120)),
    "float8e4m3fn": Format(3, -6, Fraction(448)),
    "float8e4m3fnuz": Format(3, -7, Fraction(240)),
    "float8e5m2": Format(2, -14, Fraction(57344)),
    "float8e5m2fnuz": Format(2, -15, Fraction(57344)),
    "float4e2m1": Format(1, 0, Fraction(6)),
    "float6e2m3": Format(3, 0, Fraction(15, 2)),
    "float6e3m2": Format(2, -2, Fraction(28)),
}
INTEGERS = {
    "int2": (-2, 1),
    "uint2": (0, 3),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
}
EXPONENT_BITS = {
    "float8e4m3fn": 4, "float8e4m3fnuz": 4, "float8e5m2": 5, "float8e5m2fnuz": 5,
    "float4e2m1": 2, "float6e2m3": 2, "float6e3m2": 3,
}  # fmt: skip
NAN_CODES = {
    "float8e4m3fn": 0x7F, "float8e4m3fnuz": 0x80, "float8e5m2": 0x7E, "float8e5m2fnuz": 0x80,
}  # fmt: skip
WITHOUT_NAN = ("float4e2m1", "float6e2m3", "float6e3m2")


def nearest(exact: Fraction, fmt: Format) -> Fraction:
    """The nearest value of fmt, ties to even, as if its exponents had no upper end."""
    if exact == 0:
        return exact
    n, d = abs(exact.numerator), exact.denominator
    exponent = n.bit_length() - d.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, fmt.emin) - fmt.mantissa)
    return round(exact / step) * step  # round() of a Fraction is half to even


def as_float(exact: Fraction, fmt: Format, negative: bool) -> float:
    """exact rounded once to fmt; negative: the sign of a zero."""
    rounded = nearest(exact, fmt)
    if abs(rounded) > fmt.largest:
        return math.copysign(math.inf, rounded)
    return math.copysign(float(rounded), -1 if negative else 1) if rounded == 0 else float(rounded)


def convert(x: float, fmt: Format) -> float:
    """x rounded once to fmt."""
    return as_float(Fraction(x), fmt, _negative(x)) if math.isfinite(x) else x


def divide(x: float, y: float, fmt: Format) -> float:
    """x / y rounded once to fmt, for a finite y other than 0."""
    negative = _negative(x) != _negative(y)
    if math.isnan(x):
        return x
    if math.isinf(x):
        return -math.inf if negative else math.inf
    return as_float(Fraction(x) / Fraction(y), fmt, negative)


def multiply(x: float, y: float, fmt: Format) -> float:
    """x * y rounded once to fmt."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y
    return as_float(Fraction(x) * Fraction(y), fmt, _negative(x) != _negative(y))


def add(x: float, y: float, fmt: Format) -> float:
    """x + y rounded once to fmt."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    return as_float(Fraction(x) + Fraction(y), fmt, _negative(x) and _negative(y))


def quantize(
    x: float, scale: float, zero: float | None, target: str, precision: str, *, saturate: bool
) -> int:
    """QuantizeLinear of one element: the value of an integer type, the bits of a float type."""
    fmt = FORMATS[precision]
    quotient = divide(convert(x, fmt), convert(scale, fmt), fmt)
    if target not in INTEGERS:
        return _float_code(quotient, zero, target, saturate)
    low, high = INTEGERS[target]
    if math.isnan(quotient):
        return int(zero or 0)
    if math.isinf(quotient):
        return high if quotient > 0 else low
    return min(max(round(Fraction(quotient)) + int(zero or 0), low), high)


def onednn(x: float, scale: float, zero: int | None, target: str) -> int:
    """oneDNN's Quantize of one element, in float32, the zero point added before rounding."""
    fmt = FORMATS["float32"]
    total = divide(x, scale, fmt)
    if target not in INTEGERS:
        return _float_code(total, None, target, True)
    low, high = INTEGERS[target]
    total = add(total, convert(float(zero or 0), fmt), fmt)
    if math.isnan(total):
        return min(max(zero or 0, low), high)
    if math.isinf(total):
        return high if total > 0 else low
    return min(max(round(Fraction(total)), low), high)


def dynamic(values: list[float], target: str) -> tuple[list[int], float, int]:
    """DynamicQuantizeLinear: (y, y_scale, y_zero_point); int8 spans [-127, 127].

    All-zero values have scale 1 and zero point 0; a scale is at least 2^-149.
    """
    fmt = FORMATS["float32"]
    low, high = INTEGERS[target]
    low = max(low, -127)
    smallest, largest = min([*values, 0.0]), max([*values, 0.0])
    if smallest == largest:
        return [0] * len(values), 1.0, 0
    extent = add(largest, -smallest, fmt)
    scale = max(divide(extent, float(high - low), fmt), 2.0**-149)
    zero = add(float(low), -divide(smallest, scale, fmt), fmt)
    zero_point = round(Fraction(min(max(zero, low), high)))
    codes = [quantize(v, scale, zero_point, target, "float32", saturate=True) for v in values]
    return [max(code, low) for code in codes], scale, zero_point


def dequantize(x: float, scale: float, zero: float | None, output: str) -> float:
    """DequantizeLinear of one element."""
    fmt = FORMATS[output]
    difference = convert(x, fmt) if zero is None else add(x, -zero, fmt)
    return multiply(difference, convert(scale, fmt), fmt)


def decode(code: int, target: str) -> float:
    """The value of a float type's bits."""
    fmt, bits = FORMATS[target], EXPONENT_BITS[target]
    sign = -1.0 if code >> (bits + fmt.mantissa) else 1.0
    exponent = code >> fmt.mantissa & (1 << bits) - 1
    mantissa = code & (1 << fmt.mantissa) - 1
    if target.endswith("uz") and code == 0x80:
        return math.nan
    if target == "float8e4m3fn" and code & 0x7F == 0x7F:
        return math.nan
    if target == "float8e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, fmt.emin - fmt.mantissa)
    return sign * math.ldexp(mantissa + (1 << fmt.mantissa), fmt.emin + exponent - 1 - fmt.mantissa)


def encode(value: float, target: str) -> int:
    """The bits of a value that a float type has; a zero without a sign where it has no -0."""
    if math.isnan(value):
        return NAN_CODES[target]
    return CODES[target].get((value, _negative(value)), 0 if value == 0 else -1)


def scale_index(index: Index, shape: Shape, axis: int, block_size: int, per_tensor: bool) -> Index:
    """Where in y_scale the scale of x[index] stands."""
    if per_tensor:
        return ()
    axis = axis + len(shape) if axis < 0 else axis
    if block_size == 0:
        return (index[axis],)
    return (*index[:axis], index[axis] // block_size, *index[axis + 1 :])


def _float_code(quotient: float, zero: float | None, target: str, saturate: bool) -> int:
    fmt = FORMATS[target]
    total = quotient if zero is None else quotient + zero  # for its sign, NaN and Inf
    if math.isfinite(total):
        rounded = nearest(Fraction(quotient) + Fraction(zero or 0), fmt)
        if abs(rounded) <= fmt.largest:
            return encode(math.copysign(float(rounded), total), target)
    if math.isnan(total):
        return encode(0.0 if target in WITHOUT_NAN else total, target)
    if saturate or target in WITHOUT_NAN:
        return encode(math.copysign(float(fmt.largest), total), target)
    return encode(math.copysign(math.inf, total) if target == "float8e5m2" else math.nan, target)


def _negative(x: float) -> bool:
    return math.copysign(1, x) < 0


def _codes(target: str) -> Iterator[tuple[tuple[float, bool], int]]:
    for code in range(1 << (1 + EXPONENT_BITS[target] + FORMATS[target].mantissa)):
        value = decode(code, target)
        if not math.isnan(value):
            yield (value, _negative(value)), code


CODES = {name: dict(_codes(name)) for name in EXPONENT_BITS}

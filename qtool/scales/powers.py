"""Scales that are powers of two, of the mx formats.

Sources: OCP Microscaling Formats (MX) 1.0, section 6.3 (floor); the scale modes of torchao (ceil,
even, rceil); NVIDIA, Recipes for Pre-training LLMs with MXFP8 (rceil).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType

Array = NDArray[Any]

_LOWEST, _HIGHEST = -127, 127  # exponents of float8e8m0


def power_of_two(absmax: Array, dtype: DType, levels: float, rule: str) -> Array:
    """Scales 2^k for groups with that largest magnitude, as float64; 1 for a group of zeros.

    levels: the largest code, of which e = floor(log2(levels)) and which has m bits after the
    leading one. rule:
        floor: k = floor(log2(absmax)) - e; what lies above levels * 2^k is clipped
        ceil: k = ceil(log2(absmax)) - e
        even: floor, of absmax rounded to m bits after the leading one, ties away from zero
        rceil: k = ceil(log2(absmax / levels)); nothing is clipped
        rceil-7.25: k = ceil(log2(absmax / 7.25)), for float4e2m1: up to 7.25, being clipped to 6
            costs less than a step that is twice as wide
    k is kept within [-127, 127].
    """
    absmax = absmax.astype(np.float64)
    last = int(np.frexp(levels)[1]) - 1
    if rule.startswith("rceil"):
        exponent = ceil_log2(absmax / (7.25 if rule == "rceil-7.25" else levels))
    elif rule == "ceil":
        exponent = ceil_log2(absmax) - last
    else:
        mantissa, exponent = np.frexp(absmax)  # mantissa in [0.5, 1)
        bits = dtype.bits - 2 if dtype.is_integer else int(dtype.limits.nmant)
        carries = (rule == "even") & (mantissa >= 1 - 2.0 ** -(bits + 2))
        exponent = exponent - 1 + carries - last
    scale = np.ldexp(1.0, np.clip(exponent, _LOWEST, _HIGHEST))
    return np.where(absmax == 0, 1.0, scale)


def ceil_log2(x: Array | np.float64) -> Array:
    """ceil(log2(x)), exactly."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(exponent - (mantissa == 0.5))

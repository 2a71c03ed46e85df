"""The natural logarithm, the same bits on every processor: NumPy and libm choose by what it has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# ln 2 in two parts; times an exponent the first one is exact.
_HIGH, _LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
# (ln m - f + s f) / s as a polynomial of s^2, within 2^-58, the highest power first.
_TERMS = [
    float.fromhex(term)
    for term in (
        "0x1.2f112df3e5244p-3", "0x1.39a09d078c69fp-3", "0x1.7466496cb03dep-3",
        "0x1.c71c51d8e78afp-3", "0x1.2492494229359p-2", "0x1.999999997fa04p-2",
        "0x1.5555555555593p-1",
    )
]  # fmt: skip
_ROOT = np.float64(0.5**0.5).view(np.int64)


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln x, within 1 unit in the last place, of normal x > 0.

    x = 2^e m with m from sqrt(1/2) to sqrt 2, f = m - 1, s = f / (2 + f).
    Source: e_log.c of FreeBSD's msun, by Sun Microsystems.
    """
    bits = np.asarray(x).view(np.int64)
    exponent = (bits - _ROOT) >> 52
    f = (bits - (exponent << 52)).view(np.float64) - 1.0
    e = exponent.astype(np.float64)
    s = f / (f + 2.0)
    square = s * s
    rest = square * _TERMS[0]
    for term in _TERMS[1:]:
        rest += term
        rest *= square
    # 2 s = f - s f, and f has no error
    rest -= f
    rest *= s
    rest += e * _LOW
    rest += f
    rest += e * _HIGH
    return rest

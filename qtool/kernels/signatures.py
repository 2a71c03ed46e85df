"""The kernels that are compiled: of each its module and its parameters.

A parameter is i, an integer, d, a float64, or a pointer to elements of a NumPy type.
"""

from __future__ import annotations

_SOURCE = "f4* u2* i i"
_PLACE = "i8* i i"
_CODES = f"{_SOURCE} f4* f4* i {_PLACE} i f4* i4* i i u1* u2*"
_GROUPS = "f4* u2* i f4* i f4* i8* i8* i8* i i"
SIGNATURES: dict[str, tuple[str, str]] = {
    "find_absmax": ("groups", f"{_SOURCE} {_PLACE} i i4* f4*"),
    "find_minmax": ("groups", f"{_SOURCE} {_PLACE} i i4* i4* f4*"),
    "divide": ("quotients", "f4* i d f8* i8* f4*"),
    "quantize": ("tiles", f"{_CODES} f8* i8* i4* f8* f8* f4* f4* f4* f4* f4* u2* u4* u8* i4*"),
    "encode": ("tiles", f"{_CODES} f4* f4* f4* u2* u4* u8* i8*"),
    "optimal": (
        "optimal",
        "f4* f4* i i i f4* i i4* i f8* i i i i f4* i4* u1* f4* f4* f4* i4* f8* f4* f8* f4* f4* f4* "
        "f4* f4* i4* i4* f4* i4* i f8* f8* i f4*",
    ),
    "dequantize": ("decode", "u1* u2* i i i i f4* i f4* f4* i i8* i f4* f4* f4* u2*"),
    "search": (
        "search",
        f"{_GROUPS} i i4* d d d i8* f4* i i8* i i8* i8* f4* f4* f4* f4* f8* f8* f4* f4*",
    ),
    "add_costs": ("search", f"{_GROUPS} i i4* d i f4* f4* f4* f4* f4* f8* f8*"),
    "subtract_product": ("product", "f8* i f8* i f8* i i i i f8*"),
}

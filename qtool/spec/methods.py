"""How scales are chosen, by name: which methods there are, and which one a spec without one has."""

from __future__ import annotations

import re

from qtool.dtypes import DType
from qtool.errors import SpecError, nearest

SEMANTICS = ("onnx", "onednn", "dynamic")
# Those that compare the errors of many scales; they need what codes are computed by.
SEARCHES = ("mse", "optimal")
_NAMES = ("absmax", "minmax", *SEARCHES, "entropy")
METHODS = "absmax, minmax, mse, optimal, entropy or percentile:P with P in (0, 100]"


def symmetry(dtype: DType, symmetric: bool | None, method: str | None, semantics: str) -> bool:
    """The value of QuantSpec.symmetric that the arguments mean together."""
    if semantics not in SEMANTICS:
        raise SpecError("semantics", f"{semantics!r} is unknown", "use " + ", ".join(SEMANTICS))
    by_method = {"absmax": True, "minmax": False}.get(method or "")
    if by_method is None and method is not None and method not in (*SEARCHES, "entropy"):
        _check_percentile(method)
    if method == "entropy" and not dtype.is_integer:
        raise SpecError("method", f"entropy needs codes in equal steps, {dtype} has others")
    if symmetric is not None and by_method is not None and symmetric != by_method:
        want = "--symmetric" if by_method else "--asymmetric"
        raise SpecError("method", f"{method} is {want[2:]}", f"use {want} or another method")
    if symmetric is None:
        symmetric = by_method
    if symmetric is None:
        symmetric = dtype.kind != "uint" and semantics != "dynamic"
    if not symmetric and not dtype.is_integer:
        raise SpecError(
            "symmetric" if by_method is None else "method",
            f"{dtype} has no zero point to shift its grid by",
            "quantize float types symmetrically",
        )
    return symmetric


def _check_percentile(method: str) -> None:
    match = re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", method)
    if match is None:
        raise SpecError(
            "method",
            f"{method!r} is unknown",
            nearest(method, _NAMES, f"use {METHODS}"),
        )
    if not 0 < float(match[1]) <= 100:
        raise SpecError(
            "method",
            f"percentile {match[1]} is outside (0, 100]",
            "use for example percentile:99.9",
        )

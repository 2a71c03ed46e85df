"""How kernels are compiled: IEEE arithmetic in the order written, inlined, without Python objects.

Kernels see memory as C does: a pointer, where to begin, how many elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numpy.typing import NDArray

Pointer = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
# without what Python needs to call it
ALONE = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inlined(function: Kernel) -> Kernel:
    """A part of kernels. It cannot raise: what could is no part of compiled code."""
    return cast(Kernel, numba.njit(**_OPTIONS, forceinline=True)(function))

"""How kernels are compiled: without the GIL, cached on disk, IEEE division and no reordering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numpy.typing import NDArray

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """numba.njit as every kernel uses it."""
    return cast(Kernel, numba.njit(nogil=True, cache=True, error_model="numpy")(function))

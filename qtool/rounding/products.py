"""Products of matrices whose bits depend on no machine, no library and no number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.pool import buffer

Array = NDArray[Any]

ROOM = 256 * 64  # elements that the kernel needs

# Products of two numbers from which on loading the kernels pays, and compiling them.
LOADING_PAYS, COMPILING_PAYS = 1 << 25, 1 << 31


def kernels_pay(products: int) -> bool:
    """Whether that many products of two numbers in all are done sooner with kernels."""
    if products < LOADING_PAYS:
        return False
    from qtool.kernels import machine

    return products >= COMPILING_PAYS or machine.is_kept()


def subtract_product(c: Array, a: Array, b: Array, *, compiled: bool) -> None:
    """c -= a b, in float64: the products are subtracted one by one, in the order of a's columns.

    A BLAS adds in an order of its own on every processor. compiled: by a kernel, the same bits.
    c: (rows, columns), a: (rows, depth), b: (depth, columns); the rows of c and b contiguous.
    """
    if not compiled:
        for k in range(a.shape[1]):
            c -= np.multiply.outer(a[:, k], b[k])
        return
    from qtool.kernels.machine import Kernel

    a = np.ascontiguousarray(a)
    room = buffer("product", np.dtype(np.float64), ROOM)
    steps = [array.strides[0] // 8 for array in (c, a, b)]
    places = [array.ctypes.data for array in (c, a, b)]
    Kernel("subtract_product")(
        places[0], steps[0], places[1], steps[1], places[2], steps[2], *c.shape, a.shape[1],
        room.ctypes.data,
    )  # fmt: skip

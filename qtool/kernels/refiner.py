"""The kernel of the scales of least squared error, on whole groups."""

from __future__ import annotations

import numpy as np

from qtool.kernels import AROUND, LANES, MINIMA, WIDTH
from qtool.kernels.machine import Array, Kernel, address

_optimal = Kernel("optimal")
_ROOM, _BREAKS = 1 << 18, 2048  # candidates of a group; breakpoints in a cell, besides its elements


def refine(
    values: Array,
    weights: Array | None,
    scales: Array,
    windows: Array,
    table: Array,
    cells: int,
    numbers: Array,
    width: int,
    format: tuple[int, int],
) -> Array:
    """Put the best scales and windows in place of the given ones; returns where that is done.

    values, weights: float32 (G, n). scales: float32 (G,) > 0, times the global scale; windows:
    int32 (G,). table, cells, numbers, width: see optimal(), whose window 1 is there where
    numbers[5] is not 0. format: mantissa bits, -1 for integers, and exponent of the smallest
    normal number.
    """
    groups, n = values.shape
    done = np.zeros(groups, np.uint8)
    rows = -(-n // LANES) * LANES
    given = values if weights is None else weights
    floats, lanes, doubles = np.zeros((3, rows), np.float32), np.zeros(LANES), np.zeros(3)
    floats[1:, :n] = 1
    small = np.zeros((6, WIDTH), np.float32)
    lists, errors = np.zeros((2, _ROOM + WIDTH), np.int32), np.zeros(_ROOM + WIDTH, np.int32)
    breaks = _BREAKS + rows
    events, state = np.zeros(2 * breaks), np.zeros(96)
    powers = np.arange(256, dtype=np.int32) << 23
    binades = np.searchsorted(table.view(np.int32), powers).astype(np.int32)
    near = np.zeros((2 * AROUND + 1) * MINIMA, np.float32)
    mantissa, emin = format
    _optimal(
        address(values, "f4"), address(given, "f4"), int(weights is not None), groups, n,
        address(table, "f4"), table.size, address(binades, "i4"), cells, address(numbers, "f8"),
        int(numbers[5] != 0), width, mantissa, (127 + emin) << 23, address(scales, "f4"),
        address(windows, "i4"),
        address(done, "u1"), *(address(row, "f4") for row in floats),
        address(floats[0].view(np.int32), "i4"), address(lanes, "f8"),
        address(small[5], "f4"), address(doubles, "f8"),
        *(address(row, "f4") for row in small[:5]), *(address(row, "i4") for row in lists),
        address(errors.view(np.float32), "f4"), address(errors, "i4"), _ROOM,
        address(state, "f8"), address(events, "f8"), breaks, address(near, "f4"),
    )  # fmt: skip
    return done.astype(bool)

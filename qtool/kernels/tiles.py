"""One tile of a tensor, from float32 elements to codes and figures, in chunks that stay in L1."""

from __future__ import annotations

import numpy as np

from qtool.kernels import CHUNK
from qtool.kernels.codes import integers, magnitudes, quotients, reconstruct, signed
from qtool.kernels.compiled import Array, compiled
from qtool.kernels.figures import add_figures
from qtool.kernels.layout import expand
from qtool.kernels.pack import narrow


@compiled
def quantize_integers(
    x: Array,
    scales: Array,
    zeros: Array,
    layout: Array,
    start: int,
    first: int,
    limits: tuple[np.float32, np.float32],
    zero_first: bool,
    finite: bool,
    codes: Array,
    sums: Array,
    counts: Array,
    bounds: Array,
    worst: Array,
) -> None:
    """Codes of the elements from number start on, and their figures (see add_figures()).

    scales, zeros: float32, from group number first on; no zeros at all mean 0. limits: qmin, qmax.
    """
    scale, zero = np.empty(CHUNK, np.float32), np.zeros(CHUNK, np.float32)
    wide, x_hat = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.float32)
    for chunk in range(sums.shape[0]):
        begin = chunk * CHUNK
        part = x[begin : begin + CHUNK]
        n = part.size
        expand(scales, layout, start + begin, first, scale[:n])
        if zeros.size:
            expand(zeros, layout, start + begin, first, zero[:n])
        integers(part, scale, zero, limits[0], limits[1], zero_first, wide, x_hat, counts)
        narrow(wide[:n], codes[begin : begin + n])
        add_figures(part, x_hat[:n], start + begin, finite, sums[chunk], counts, bounds, worst)


@compiled
def quantize_floats(
    x: Array,
    scales: Array,
    layout: Array,
    start: int,
    first: int,
    grid: Array,
    limits: tuple[np.float32, np.float32],
    finite: bool,
    codes: Array,
    sums: Array,
    counts: Array,
    bounds: Array,
    worst: Array,
) -> None:
    """quantize_integers() for a float type, described by codes.grid().

    limits: the smallest normal value, and what quotients() adds.
    """
    scale, x_hat = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    quotient, shifted = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    magnitude, decoded = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.int32)
    bits, shifted_bits = quotient.view(np.int32), shifted.view(np.int32)
    values = decoded.view(np.float32)
    for chunk in range(sums.shape[0]):
        begin = chunk * CHUNK
        part = x[begin : begin + CHUNK]
        n = part.size
        expand(scales, layout, start + begin, first, scale[:n])
        quotients(part, scale, limits[1], quotient, shifted)
        magnitudes(bits[:n], shifted_bits, grid, magnitude, decoded, counts)
        reconstruct(quotient[:n], values, scale, limits[0], limits[1], x_hat)
        signed(bits[:n], grid, magnitude, decoded)
        narrow(decoded[:n], codes[begin : begin + n])
        add_figures(part, x_hat[:n], start + begin, finite, sums[chunk], counts, bounds, worst)

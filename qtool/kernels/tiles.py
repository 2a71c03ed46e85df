"""One tile of a tensor, in parts that stay in a core's L1 cache: the functions that are called.

Their parameters are those of signatures.SIGNATURES. All memory is given: nothing is allocated.

x, bits, form: the source's elements as float32 and as uint16, which of the two they are in, and
as what: 0 float32, 1 bfloat16, 2 float16. n: their number. layout: see geometry.layout(). start:
number of the first one; first: of the first group. values, scale, zero, x_hat, clean: room for
PART + LANES float32; codes, pairs, fours: for PART uint16, under three types; found: for five
int32; lanes: 5 * LANES zeros.
"""

from __future__ import annotations

from qtool.kernels import CHUNK, PART
from qtool.kernels.codes import floats, integers
from qtool.kernels.compiled import Pointer, inlined, prefetch
from qtool.kernels.convert import to_float32
from qtool.kernels.figures import add_figures, fold
from qtool.kernels.layout import expand, group_of, run_length
from qtool.kernels.pack import pack

# Elements that are computed while the next ones are fetched, and float32 of a line of the cache.
STEP, LINE = 256, 16


def quantize(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    scales: Pointer,
    zeros: Pointer,
    has_zeros: int,
    layout: Pointer,
    start: int,
    first: int,
    family: int,
    limits: Pointer,
    grid: Pointer,
    width: int,
    mask: int,
    out: Pointer,
    out16: Pointer,
    sums: Pointer,
    counts: Pointer,
    bounds: Pointer,
    worst: Pointer,
    lanes: Pointer,
    values: Pointer,
    scale: Pointer,
    zero: Pointer,
    x_hat: Pointer,
    clean: Pointer,
    codes: Pointer,
    pairs: Pointer,
    fours: Pointer,
    found: Pointer,
) -> None:
    """Codes of the elements and their figures (see figures.add_figures()); start is a multiple of
    CHUNK.

    scales, zeros: float32, of the groups. zero: zeros, where there are none of the groups.
    family, limits, grid: see find_codes().
    width: bits of a stored code; mask: those that count in a byte; out, out16: where they go, as
    bytes and as uint16. sums: five per chunk.
    """
    held = -1  # the group whose scale fills the memory for scales
    for at in range(0, n, PART):
        count = min(PART, n - at)
        part, place = x, at
        if form:
            to_float32(bits, at, count, form == 2, values)
            part, place = values, 0
        group = group_of(layout, start + at, count)
        if group < 0 or group != held:
            expand(scales, layout, start + at, first, scale, count)
            if has_zeros:
                expand(zeros, layout, start + at, first, zero, count)
        held = group if count == PART or group == held else -1
        find_codes(
            part, place, count, scale, zero, 1, family, limits, grid, codes, 0, 0xFFFF, x_hat,
            counts, True,
        )  # fmt: skip
        add_figures(
            part, place, count, x_hat, start + at, counts, bounds, worst, lanes, found, clean
        )
        if (at + count) % CHUNK == 0 or at + count == n:
            fold(lanes, sums, at // CHUNK * 5)
        store(codes, pairs, fours, count, width, mask, out, out16, at)


def encode(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    scales: Pointer,
    zeros: Pointer,
    has_zeros: int,
    layout: Pointer,
    start: int,
    first: int,
    family: int,
    limits: Pointer,
    grid: Pointer,
    width: int,
    mask: int,
    out: Pointer,
    out16: Pointer,
    values: Pointer,
    scale: Pointer,
    zero: Pointer,
    codes: Pointer,
    pairs: Pointer,
    fours: Pointer,
    counts: Pointer,
) -> None:
    """quantize() without figures. Long runs of one scale are read as a stream."""
    at = 0
    while at < n:
        count = min(run_length(layout, start + at), n - at)
        if form == 0 and width == 8 and count >= PART:
            expand(scales, layout, start + at, first, scale, 1)
            if has_zeros:
                expand(zeros, layout, start + at, first, zero, 1)
            find_codes(
                x, at, count, scale, zero, 0, family, limits, grid, out, at, mask, values,
                counts, False,
            )  # fmt: skip
            at += count
            continue
        count = min(PART, n - at)
        part, place = x, at
        if form:
            to_float32(bits, at, count, form == 2, values)
            part, place = values, 0
        expand(scales, layout, start + at, first, scale, count)
        if has_zeros:
            expand(zeros, layout, start + at, first, zero, count)
        find_codes(
            part, place, count, scale, zero, 1, family, limits, grid, codes, 0, 0xFFFF, values,
            counts, False,
        )  # fmt: skip
        store(codes, pairs, fours, count, width, mask, out, out16, at)
        at += count


@inlined
def store(
    codes: Pointer,
    pairs: Pointer,
    fours: Pointer,
    n: int,
    width: int,
    mask: int,
    out: Pointer,
    out16: Pointer,
    at: int,
) -> None:
    """Put the codes of one part where those of elements from number `at` on belong."""
    if width == 16:
        for i in range(n):
            out16[at + i] = codes[i]
    else:
        pack(codes, pairs, fours, n, width, mask, out, at * width // 8)


@inlined
def find_codes(
    x: Pointer,
    at: int,
    n: int,
    scale: Pointer,
    zero: Pointer,
    step: int,
    family: int,
    limits: Pointer,
    grid: Pointer,
    codes: Pointer,
    codes_at: int,
    mask: int,
    x_hat: Pointer,
    clipped: Pointer,
    measured: bool,
) -> None:
    """Codes of one part. family: 0 integers, 1 integers in oneDNN's order, or the mantissa bits
    that floats drop, negative for those without a negative zero; the rest: see codes."""
    for begin in range(0, n, STEP):
        end = min(begin + STEP, n)
        for line in range(end, end + STEP, LINE):
            prefetch(x, at + line)  # type: ignore[call-arg]
        if family == 20:
            floats(
                x, at, begin, end, scale, step, limits, grid, 20, True, codes, codes_at,
                x_hat, clipped, measured,
            )  # fmt: skip
        elif family == 21:
            floats(
                x, at, begin, end, scale, step, limits, grid, 21, True, codes, codes_at,
                x_hat, clipped, measured,
            )  # fmt: skip
        elif family == 22:
            floats(
                x, at, begin, end, scale, step, limits, grid, 22, True, codes, codes_at,
                x_hat, clipped, measured,
            )  # fmt: skip
        elif family == -20:
            floats(
                x, at, begin, end, scale, step, limits, grid, 20, False, codes, codes_at,
                x_hat, clipped, measured,
            )  # fmt: skip
        elif family == -21:
            floats(
                x, at, begin, end, scale, step, limits, grid, 21, False, codes, codes_at,
                x_hat, clipped, measured,
            )  # fmt: skip
        else:
            integers(
                x, at, begin, end, scale, zero, step, limits, family == 1, codes, codes_at, mask,
                x_hat, clipped, measured,
            )  # fmt: skip

"""One tile of a tensor, in parts that stay in a core's L1 cache: the functions that are called.

Their parameters are those of machine.SIGNATURES. All memory is given: nothing is allocated.

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
from qtool.kernels.decode import decode
from qtool.kernels.figures import add_figures, fold
from qtool.kernels.groups import LARGEST_FINITE, UNLIMITED, absmax, minmax
from qtool.kernels.layout import expand
from qtool.kernels.pack import pack, unpack


def find_absmax(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    layout: Pointer,
    start: int,
    first: int,
    masked: int,
    out: Pointer,
    values: Pointer,
) -> None:
    """groups.absmax() of the elements, without NaN and Inf where masked is set."""
    if form == 0 and masked:
        absmax(x, n, layout, start, first, LARGEST_FINITE, out)
    elif form == 0:
        absmax(x, n, layout, start, first, UNLIMITED, out)
    else:
        limit = LARGEST_FINITE if masked else UNLIMITED
        for at in range(0, n, PART):
            count = min(PART, n - at)
            to_float32(bits, at, count, form == 2, values)
            absmax(values, count, layout, start + at, first, limit, out)


def find_minmax(
    x: Pointer,
    bits: Pointer,
    form: int,
    n: int,
    layout: Pointer,
    start: int,
    first: int,
    masked: int,
    low: Pointer,
    high: Pointer,
    values: Pointer,
) -> None:
    """groups.minmax() of the elements, without NaN and Inf where masked is set."""
    if form == 0 and masked:
        minmax(x, n, layout, start, first, LARGEST_FINITE, low, high)
    elif form == 0:
        minmax(x, n, layout, start, first, UNLIMITED, low, high)
    else:
        limit = LARGEST_FINITE if masked else UNLIMITED
        for at in range(0, n, PART):
            count = min(PART, n - at)
            to_float32(bits, at, count, form == 2, values)
            minmax(values, count, layout, start + at, first, limit, low, high)


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
    measured: int,
) -> None:
    """Codes of the elements and, if measured, their figures (see figures.add_figures()); start is
    then a multiple of CHUNK.

    scales, zeros: float32, of the groups. zero: zeros, where there are none of the groups.
    family, limits, grid: see encode().
    width: bits of a stored code; mask: those that count in a byte; out,
    out16: where they go, as bytes and as uint16.
    sums: five per chunk.
    """
    for at in range(0, n, PART):
        count = min(PART, n - at)
        part, place = x, at
        if at + 2 * PART <= n and form == 0:
            for line in range(0, PART, 16):
                prefetch(x, at + PART + line)  # type: ignore[call-arg]
        if form:
            to_float32(bits, at, count, form == 2, values)
            part, place = values, 0
        expand(scales, layout, start + at, first, scale, count)
        if has_zeros:
            expand(zeros, layout, start + at, first, zero, count)
        if measured:
            encode(
                part, place, count, scale, zero, family, limits, grid, codes, 0, 0xFFFF, x_hat,
                counts, True,
            )  # fmt: skip
            add_figures(
                part, place, count, x_hat, start + at, counts, bounds, worst, lanes, found, clean
            )
            if (at + count) % CHUNK == 0 or at + count == n:
                fold(lanes, sums, at // CHUNK * 5)
        elif width == 8:
            encode(
                part, place, count, scale, zero, family, limits, grid, out, at, mask, x_hat,
                counts, False,
            )  # fmt: skip
            continue
        else:
            encode(
                part, place, count, scale, zero, family, limits, grid, codes, 0, 0xFFFF, x_hat,
                counts, False,
            )  # fmt: skip
        if width == 16:
            for i in range(count):
                out16[at + i] = codes[i]
        else:
            pack(codes, pairs, fours, count, width, mask, out, at * width // 8)


@inlined
def encode(
    x: Pointer,
    at: int,
    n: int,
    scale: Pointer,
    zero: Pointer,
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
    that floats drop, of 3, 2 and 1; the rest: see codes."""
    if family == 20:
        floats(x, at, n, scale, limits, grid, 20, codes, codes_at, x_hat, clipped, measured)
    elif family == 21:
        floats(x, at, n, scale, limits, grid, 21, codes, codes_at, x_hat, clipped, measured)
    elif family == 22:
        floats(x, at, n, scale, limits, grid, 22, codes, codes_at, x_hat, clipped, measured)
    else:
        integers(
            x, at, n, scale, zero, limits, family == 1, codes, codes_at, mask, x_hat, clipped,
            measured,
        )  # fmt: skip


def dequantize(
    packed: Pointer,
    codes16: Pointer,
    width: int,
    size: int,
    n: int,
    signed: int,
    table: Pointer,
    has_table: int,
    scales: Pointer,
    zeros: Pointer,
    has_zeros: int,
    layout: Pointer,
    start: int,
    out: Pointer,
    scale: Pointer,
    zero: Pointer,
    codes: Pointer,
) -> None:
    """out = (value of code - zero) * scale of the elements.

    packed, codes16: the stored codes, of `width` bits, the lowest `size` of which count, as bytes
    and as uint16. signed, table,
    has_table: see decode(). scales, zeros: of all groups. zero: zeros, where there are none.
    """
    for at in range(0, n, PART):
        count = min(PART, n - at)
        expand(scales, layout, start + at, 0, scale, count)
        if has_zeros:
            expand(zeros, layout, start + at, 0, zero, count)
        if width == 16:
            for i in range(count):
                codes[i] = codes16[at + i]
        else:
            unpack(packed, at * width // 8, count, width, size, codes)
        decode(codes, count, size, signed, table, has_table, scale, zero, out, at)

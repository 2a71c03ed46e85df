"""Products of matrices, added up in an order that is always the same."""

from __future__ import annotations

from qtool.kernels.compiled import Pointer, inlined

# Columns of c and rows of b that are taken at once: so much of b stays in the L2 cache, and two
# rows of c in the L1 cache.
COLUMNS, DEPTH = 256, 64


def subtract_product(
    c: Pointer,
    c_step: int,
    a: Pointer,
    a_step: int,
    b: Pointer,
    b_step: int,
    rows: int,
    columns: int,
    depth: int,
    room: Pointer,
) -> None:
    """c -= a b, in float64: from every element of c the products are subtracted one by one, in the
    order of the columns of a, each product and each difference rounded.

    c: (rows, columns), a: (rows, depth), b: (depth, columns), each with so many elements from row
    to row. room: for COLUMNS * DEPTH elements.
    """
    for left in range(0, columns, COLUMNS):
        width = min(COLUMNS, columns - left)
        for first in range(0, depth, DEPTH):
            count = min(DEPTH, depth - first)
            for k in range(count):
                for j in range(width):
                    room[k * COLUMNS + j] = b[(first + k) * b_step + left + j]
            for i in range(0, rows - 1, 2):
                at = i * a_step + first
                two_rows(c, i * c_step + left, c_step, a, at, a_step, room, width, count)
            if rows % 2:
                i = rows - 1
                one_row(c, i * c_step + left, a, i * a_step + first, room, width, 0, count)


@inlined
def two_rows(
    c: Pointer,
    p: int,
    c_step: int,
    a: Pointer,
    at: int,
    a_step: int,
    room: Pointer,
    width: int,
    count: int,
) -> None:
    """Two rows of c, eight products at once."""
    for k in range(0, count - 7, 8):
        x, y, q = at + k, at + a_step + k, k * COLUMNS
        a0, a1, a2, a3 = a[x], a[x + 1], a[x + 2], a[x + 3]
        a4, a5, a6, a7 = a[x + 4], a[x + 5], a[x + 6], a[x + 7]
        b0, b1, b2, b3 = a[y], a[y + 1], a[y + 2], a[y + 3]
        b4, b5, b6, b7 = a[y + 4], a[y + 5], a[y + 6], a[y + 7]
        for j in range(width):
            r0, r1 = room[q + j], room[q + COLUMNS + j]
            r2, r3 = room[q + 2 * COLUMNS + j], room[q + 3 * COLUMNS + j]
            r4, r5 = room[q + 4 * COLUMNS + j], room[q + 5 * COLUMNS + j]
            r6, r7 = room[q + 6 * COLUMNS + j], room[q + 7 * COLUMNS + j]
            s = c[p + j] - a0 * r0 - a1 * r1 - a2 * r2 - a3 * r3
            c[p + j] = s - a4 * r4 - a5 * r5 - a6 * r6 - a7 * r7
            t = c[p + c_step + j] - b0 * r0 - b1 * r1 - b2 * r2 - b3 * r3
            c[p + c_step + j] = t - b4 * r4 - b5 * r5 - b6 * r6 - b7 * r7
    rest = count // 8 * 8
    one_row(c, p, a, at, room, width, rest, count)
    one_row(c, p + c_step, a, at + a_step, room, width, rest, count)


@inlined
def one_row(
    c: Pointer, p: int, a: Pointer, at: int, room: Pointer, width: int, begin: int, end: int
) -> None:
    """One row of c, one product after another."""
    for k in range(begin, end):
        factor, q = a[at + k], k * COLUMNS
        for j in range(width):
            c[p + j] -= factor * room[q + j]

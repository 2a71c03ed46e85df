"""The scale or zero point of every element of a window."""

from __future__ import annotations

from qtool.kernels.compiled import Pointer, inlined


@inlined
def outer_group(layout: Pointer, a: int) -> int:
    """The number that counts for the scales of the elements (a, ...); see geometry.layout()."""
    rows, band = layout[6], layout[7]
    if rows == 1:
        return a
    number: int = a // band * -(-band // rows) + a % band // rows
    return number


@inlined
def expand(values: Pointer, layout: Pointer, start: int, first: int, out: Pointer, n: int) -> None:
    """out[k] = the value of element start + k; values begin with that of group number first.

    layout: see geometry.layout().
    """
    size, inner, block = layout[0], layout[1], layout[2]
    outer_stride, block_stride, inner_stride = layout[3], layout[4], layout[5]
    k = 0
    row, c = start // inner, start % inner
    while k < n:
        d = row % size
        base = outer_group(layout, row // size) * outer_stride + d // block * block_stride - first
        left = min(block - d % block, size - d)
        if inner_stride:
            rows, count = 1, min(inner - c, n - k)
            for i in range(count):
                out[k + i] = values[base + c + i]
        elif inner == 1 and left == block and n - k >= block:
            groups = min((size - d) // block, (n - k) // block)
            rows = groups * block
            count = rows
            for g in range(groups):
                value = values[base + g]
                for i in range(block):
                    out[k + g * block + i] = value
        else:
            count = min(left * inner - c, n - k)
            rows = left
            value = values[base]
            for i in range(count):
                out[k + i] = value
        row += rows
        k += count
        c = 0


@inlined
def run_length(layout: Pointer, start: int) -> int:
    """How many elements from `start` on lie in one group, one after another."""
    size, inner, block, inner_stride = layout[0], layout[1], layout[2], layout[5]
    d = start // inner % size
    if inner_stride:
        return 1
    length: int = min(block - d % block, size - d) * inner - start % inner
    return length


@inlined
def group_of(layout: Pointer, start: int, n: int) -> int:
    """The number of the group that n elements from `start` on are of; -1 where they are of
    several."""
    if run_length(layout, start) < n:
        return -1
    size, inner, block = layout[0], layout[1], layout[2]
    row = start // inner
    group: int = outer_group(layout, row // size) * layout[3] + row % size // block * layout[4]
    group += start % inner * layout[5]
    return group

"""The scale or zero point of every element of a window."""

from __future__ import annotations

from qtool.kernels.compiled import Pointer, inlined


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
        base = row // size * outer_stride + d // block * block_stride - first
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

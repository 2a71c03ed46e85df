"""The vectors that a weight is multiplied with, out of the tensor that an operator reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

if TYPE_CHECKING:
    from qtool.formats.onnx.operands import Operand, Window

Array = NDArray[Any]

_PIECE = 1 << 22  # elements of patches at once


def rows(x: Array, operand: Operand) -> Iterator[Array]:
    """Pieces of (rows, operand.features) float32, in C order.

    x: float32. Of a matrix product every vector along the axis that is summed over; of a
    convolution the patch of every position, as weight.reshape(outputs, -1) meets it, and of several
    groups those of each in turn.
    """
    if operand.window is not None:
        yield from _patches(x, operand.window)
        return
    axis = max(operand.axis, -x.ndim) % x.ndim  # a vector has one axis for both
    yield np.ascontiguousarray(np.moveaxis(x, axis, -1)).reshape(-1, operand.features)


def _patches(x: Array, window: Window) -> Iterator[Array]:
    """(positions of one sample * groups, channels of a group * kernel), some positions at a time.

    x: (samples, channels, *spatial), padded with zeros.
    Source: ONNX Conv.
    """
    spread = [(k - 1) * d + 1 for k, d in zip(window.kernel, window.dilations, strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *_padding(x.shape[2:], window, spread)])
    every = [slice(None, None, step) for step in (*window.strides, *window.dilations)]
    seen = sliding_window_view(padded, spread, tuple(range(2, x.ndim)))
    turned = np.moveaxis(seen[(slice(None), slice(None), *every)], 1, x.ndim - 1)
    positions = turned.shape[1 : x.ndim - 1]  # then channels, then the kernel's axes
    features = x.shape[1] // window.groups * math.prod(window.kernel)
    step = max(_PIECE // (max(math.prod(positions[1:]), 1) * features * window.groups), 1)
    for sample in turned:
        for start in range(0, positions[0], step):
            yield sample[start : start + step].reshape(-1, features)


def _padding(sizes: tuple[int, ...], window: Window, spread: list[int]) -> list[tuple[int, int]]:
    """Zeros before and after every spatial axis."""
    if window.pads is not None:
        return list(window.pads)
    if window.auto_pad == "VALID":
        return [(0, 0)] * len(sizes)
    found = []
    for size, reach, stride in zip(sizes, spread, window.strides, strict=True):
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        before = total // 2 if window.auto_pad == "SAME_UPPER" else -(-total // 2)
        found.append((before, total - before))
    return found

"""Hypothesis strategies for the operators' inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from qtool.dtypes import DTYPES

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A shape with an axis, a block size and the scale shape that they mean."""

    shape: Shape
    axis: int
    block_size: int
    scale_shape: Shape

    @property
    def per_tensor(self) -> bool:
        return self.block_size == 0 and self.scale_shape in ((), (1,))


@st.composite
def layouts(draw: st.DrawFn, max_rank: int = 4) -> Layout:
    """Per tensor, per axis and blocked; ranks 0 to max_rank; axes counted from either end."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=max_rank)))
    rank = len(shape)
    kind = draw(st.sampled_from(["tensor", "axis", "block"])) if rank else "tensor"
    if kind == "tensor":
        return Layout(shape, draw(st.integers(-2, 2)), 0, draw(st.sampled_from([(), (1,)])))
    axis = draw(st.integers(-rank, rank - 1))
    if kind == "axis":
        return Layout(shape, axis, 0, (shape[axis],))
    block_size = draw(st.integers(1, 5))
    front = axis % rank
    blocks = -(-shape[front] // block_size)
    return Layout(shape, axis, block_size, (*shape[:front], blocks, *shape[front + 1 :]))


@st.composite
def bits(draw: st.DrawFn, name: str, shape: Shape) -> Array:
    """Any values of a type: NaN, Inf, subnormals and -0.0 as often as their bits."""
    dtype = DTYPES[name]
    size = int(np.prod(shape))
    codes = draw(st.lists(st.integers(0, (1 << dtype.bits) - 1), min_size=size, max_size=size))
    unsigned = np.dtype(f"u{dtype.numpy.itemsize}")
    return np.asarray(np.array(codes, unsigned).view(dtype.numpy).reshape(shape))


@st.composite
def scales(draw: st.DrawFn, name: str, precision: str, shape: Shape) -> Array:
    """Scales of either sign that stay finite and not zero in the precision type."""
    narrow = "float16" in (name, precision)
    exponents = st.integers(-20, 14) if narrow else st.integers(-120, 120)
    size = int(np.prod(shape))
    drawn = [
        (1 + draw(st.integers(0, 2**20)) / 2**20) * 2.0 ** draw(exponents) for _ in range(size)
    ]
    values = np.array(drawn).reshape(shape)
    if name == "int32":
        return np.asarray(np.clip(np.rint(np.abs(values)), 1, 60000), np.int32)
    if name == "float8e8m0":
        return np.asarray(2.0 ** np.floor(np.log2(values))).astype(DTYPES[name].numpy)
    signs = np.array([draw(st.sampled_from([1.0, 1.0, -1.0])) for _ in range(size)])
    return np.asarray(values * signs.reshape(shape)).astype(DTYPES[name].numpy)


@st.composite
def sources(draw: st.DrawFn, name: str, spread: Array) -> Array:
    """x of spread's shape: bit patterns, or ties and near ties of k times spread."""
    if draw(st.booleans()) or name == "int32":
        return draw(bits(name, spread.shape))
    size = spread.size
    halves = draw(st.lists(st.integers(-1100, 1100), min_size=size, max_size=size))
    nudges = draw(
        st.lists(st.sampled_from([0.0, 0.0, 2.0**-22, -(2.0**-22)]), min_size=size, max_size=size)
    )
    steps = np.array(halves, np.float64) / draw(st.sampled_from([2, 16])) + np.array(nudges)
    with np.errstate(over="ignore"):
        return np.asarray(steps.reshape(spread.shape) * spread).astype(DTYPES[name].numpy)


@st.composite
def any_scales(draw: st.DrawFn, name: str, shape: Shape) -> Array:
    """Usual scales, and bit patterns: DequantizeLinear has no rule for its scale's value."""
    if draw(st.booleans()):
        return draw(scales(name, name, shape))
    return draw(bits(name, shape))


@st.composite
def zero_points(draw: st.DrawFn, target: str, layout: Layout) -> Array:
    """A zero point of any bits; one element may be of shape () or (1,) whatever the scale has."""
    shape = layout.scale_shape
    if layout.per_tensor:
        shape = draw(st.sampled_from([(), (1,)]))
    return draw(bits(target, shape))

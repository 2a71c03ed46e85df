"""Which elements of a tensor share a scale: PerTensor, PerAxis, Blocked and Tiled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qtool.errors import SpecError

Shape = tuple[int, ...]


def normalize_axis(axis: int, rank: int, thing: str = "axis") -> int:
    """The axis counted from the front. Raises SpecError outside [-rank, rank-1]."""
    if not -rank <= axis < rank:
        raise SpecError(
            thing,
            f"{axis} is out of range for rank {rank}",
            f"use {-rank} to {rank - 1}" if rank else "a scalar has no axis",
        )
    return axis % rank


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for all elements: (4, 33) -> ()."""

    name = "per_tensor"

    def resolve(self, shape: Shape) -> PerTensor:
        """The granularity with its axis counted from the front, checked against shape."""
        return self

    def scale_shape(self, shape: Shape) -> Shape:
        return ()

    @property
    def attributes(self) -> dict[str, int]:
        """The granularity as attributes of QuantizeLinear."""
        return {}


@dataclass(frozen=True, slots=True)
class PerAxis:
    """One scale per index of axis: (4, 33), axis 0 -> (4,)."""

    axis: int

    name = "per_axis"

    def resolve(self, shape: Shape) -> PerAxis:
        """The granularity with its axis counted from the front, checked against shape."""
        return PerAxis(normalize_axis(self.axis, len(shape)))

    def scale_shape(self, shape: Shape) -> Shape:
        return (shape[self.axis],)

    @property
    def attributes(self) -> dict[str, int]:
        """The granularity as attributes of QuantizeLinear."""
        return {"axis": self.axis}


@dataclass(frozen=True, slots=True)
class Blocked:
    """One scale per run of block_size elements along axis: (4, 33), axis 1, 16 -> (4, 3)."""

    axis: int
    block_size: int

    name = "blocked"

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)

    def resolve(self, shape: Shape) -> Blocked:
        """The granularity with its axis counted from the front, checked against shape."""
        return Blocked(normalize_axis(self.axis, len(shape)), self.block_size)

    def scale_shape(self, shape: Shape) -> Shape:
        axis = normalize_axis(self.axis, len(shape))
        blocks = -(-shape[axis] // self.block_size)
        return (*shape[:axis], blocks, *shape[axis + 1 :])

    @property
    def attributes(self) -> dict[str, int]:
        """The granularity as attributes of QuantizeLinear."""
        return {"axis": self.axis, "block_size": self.block_size}


@dataclass(frozen=True, slots=True)
class Tiled:
    """One scale per tile of that shape, over the last two axes: (300, 200) in tiles of (128, 128)
    -> (3, 2). ONNX has no word for it.
    """

    shape: tuple[int, int]

    name = "tiled"

    def __post_init__(self) -> None:
        if len(self.shape) != 2:
            raise SpecError("tile", f"{self.shape} is not rows and columns", "use (128, 128)")
        for size in self.shape:
            _check_size("tile", size)

    @property
    def rows(self) -> int:
        """Rows of a whole tile."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of a whole tile."""
        return self.shape[1]

    def resolve(self, shape: Shape) -> Tiled:
        """The granularity, checked against shape."""
        if len(shape) < 2:
            raise SpecError("tile", f"a tensor of rank {len(shape)} has none", "use --block-size")
        return self

    def scale_shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns))

    @property
    def attributes(self) -> dict[str, int]:
        """None: QuantizeLinear cannot say it."""
        return {}

    def by_rows(self, values: NDArray[Any], shape: Shape) -> tuple[NDArray[Any], Blocked]:
        """The same scales, one for each row of a tile, and the granularity that they have."""
        repeated = values.repeat(min(self.rows, shape[-2]), axis=-2)[..., : shape[-2], :]
        return repeated, Blocked(len(shape) - 1, self.columns)


OnnxGranularity = PerTensor | PerAxis | Blocked
Granularity = OnnxGranularity | Tiled


def describe(granularity: Granularity) -> dict[str, Any]:
    """A granularity in plain data, under the names of reports and metadata."""
    attributes = granularity.attributes
    return {
        "granularity": granularity.name,
        "axis": attributes.get("axis"),
        "block_size": attributes.get("block_size"),
        "tile": list(granularity.shape) if isinstance(granularity, Tiled) else None,
    }


def phrase(granularity: Granularity) -> str:
    """A granularity in a few words of a message."""
    if isinstance(granularity, Tiled):
        return f"in tiles of {granularity.rows}x{granularity.columns}"
    if isinstance(granularity, Blocked):
        return f"in blocks of {granularity.block_size} along axis {granularity.axis}"
    return f"per axis {granularity.axis}" if isinstance(granularity, PerAxis) else "per tensor"


def _check_size(thing: str, size: int) -> None:
    if size < 1:
        raise SpecError(thing, f"must be at least 1, got {size}")
    if size >= 1 << 63:
        raise SpecError(thing, f"{size} does not fit 64 bits", "use less")


def folded(shape: Shape, granularity: Granularity) -> tuple[int, int, int]:
    """The shape as (before, along, after) the granularity's axis: the last for a Tiled one."""
    if isinstance(granularity, PerTensor):
        return (1, 1, math.prod(shape))
    axis = len(shape) - 1 if isinstance(granularity, Tiled) else granularity.axis
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))

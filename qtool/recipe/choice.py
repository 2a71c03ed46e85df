"""How one tensor is quantized: the words about it, put together."""

from __future__ import annotations

from dataclasses import dataclass

from qtool.errors import SpecError, UsageError
from qtool.presets import expanded
from qtool.recipe.words import Words
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, TensorInfo, Tiled

_SHARING = ("axis", "block_size", "tile")


@dataclass(frozen=True)
class Choice:
    """A spec whose granularity depends on the tensor.

    spec: the target type and all other choices; its granularity is replaced by granularity().
    axis, block_size, tile: as given, None where not.
    activations: readers are to quantize activations while running.
    """

    spec: QuantSpec
    axis: int | None = None
    block_size: int | None = None
    tile: tuple[int, int] | None = None
    activations: bool = False

    @classmethod
    def of(cls, words: Words) -> Choice | None:
        """What words mean together; None where none of them gives a type. Raises SpecError."""
        given = {k: v for k, v in expanded(words).items() if v is not None}
        if "dtype" not in given:
            return None
        axis, block_size, tile = (given.pop(name, None) for name in _SHARING)
        activations = given.pop("dynamic_activations", False)
        if tile is not None and (axis is not None or block_size is not None):
            raise UsageError("--tile", "replaces --axis and --block-size", "leave one of them out")
        spec = QuantSpec(given.pop("dtype"), PerTensor(), **given)
        # contradictions show before a file is read
        if block_size is not None:
            spec.at(Blocked(0, block_size))
        if tile is not None:
            spec.at(Tiled(tile))
        return cls(spec, axis, block_size, tile, activations)

    def spec_for(self, info: TensorInfo, *, bare: bool) -> QuantSpec:
        """The spec of a tensor, its axis counted from the front. bare: it is an array alone."""
        try:
            return self.spec.at(self.granularity(info, bare=bare).resolve(info.shape))
        except SpecError as error:
            raise SpecError(f"tensor {info.name}", str(error)) from error

    def granularity(self, info: TensorInfo, *, bare: bool) -> Granularity:
        """Blocks along the reduced axis, or one scale per output channel; per tensor for a bare
        array."""
        if self.spec.semantics == "dynamic":
            return PerTensor()
        if self.tile is not None:
            return Tiled(self.tile)
        rank = len(info.shape)
        if self.block_size is not None:
            default = rank - 1 if bare or rank <= 2 else 1
            return Blocked(_first(self.axis, info.reduced_axis, default), self.block_size)
        if bare and self.axis is None:
            return PerTensor()
        return PerAxis(_first(self.axis, info.output_axis, 0))


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)

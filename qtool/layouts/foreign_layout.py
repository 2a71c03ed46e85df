"""What is said of one way in which other tools spell a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qtool.dtypes import DType
from qtool.layouts.foreign_config import Config
from qtool.spec import TensorInfo

# What may stand beside any weight, of its inputs.
INPUTS = (".input_scale", ".input_global_scale", ".output_scale", ".pre_quant_scale")


@dataclass(frozen=True)
class Candidate:
    """A tensor that may hold codes: what stands beside it, by the endings of names, and what the
    model's configuration says."""

    base: str
    tensors: Mapping[str, TensorInfo]
    config: Config

    def get(self, ending: str) -> TensorInfo | None:
        """The tensor of that ending."""
        return self.tensors.get(self.base + ending)

    def columns(self, ending: str) -> int:
        """The last size of a tensor; 0 where there is none."""
        info = self.get(ending)
        return info.shape[-1] if info is not None and info.shape else 0


@dataclass(frozen=True)
class Layout:
    """One way of spelling a quantized weight.

    codes, scale: endings of the names, and types, of the tensors that are always there; no types:
    any that fit. needs, extras: endings of others that must, or may, be there. zero_point: of the
    zero points. methods: what a configuration says of it. when: what else must hold.
    dtype: of a code; "": as it is stored; "int" or "uint": of as many bits as the rest tells; "?":
    not told.
    packed: the axis along which an element holds several codes. transposed: inputs come first.
    scale_dtype, block_size: where type and shape of the scale do not tell.
    equation: what a code stands for; {middle}: half the number of codes. shifted: with zero_point.
    blocks: block sizes, and who takes them alone.
    """

    tool: str
    variant: str
    codes: tuple[str, Sequence[str]]
    scale: tuple[str, Sequence[str]]
    dtype: str = ""
    equation: str = "code * scale"
    zero_point: str = ""
    shifted: str = ""
    needs: Sequence[str] = ()
    extras: Sequence[str] = INPUTS
    methods: Sequence[str] = ()
    when: Callable[[Candidate], bool] = lambda candidate: True
    packed: int | None = None
    transposed: bool = False
    scale_dtype: str = ""
    block_size: int | None = None
    blocks: tuple[Sequence[int], str] = ((), "")

    @property
    def name(self) -> str:
        """How it is called."""
        return f"{self.tool} {self.variant}".strip()

    def fits(self, candidate: Candidate) -> bool:
        """Whether these are codes in this layout."""
        codes = candidate.get(self.codes[0])
        if codes is None or not _is_one_of(self.codes[1], codes.dtype, codes.dtype.is_integer):
            return False  # as most tensors are not
        scale = candidate.get(self.scale[0])
        return (
            scale is not None
            and _is_one_of(self.scale[1], scale.dtype, scale.dtype.kind == "float")
            and all(candidate.get(ending) is not None for ending in self.needs)
            and self.when(candidate)
        )


def _is_one_of(types: Sequence[str], dtype: DType, fits: bool) -> bool:
    return dtype.name in types if types else fits or dtype.is_small_float

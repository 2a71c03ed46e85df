"""How a quantized weight is spelled for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qtool.dtypes import DType
from qtool.layouts import compressed_tensors, mlx, modelopt, native, nbits
from qtool.layouts.stored import Part, Stored
from qtool.spec import QuantSpec, TensorInfo


class Layout(Protocol):
    """A spelling of quantized tensors in .safetensors files.

    left_alone: patterns of the names of weights that its readers want unquantized.
    fuses: whether its readers put weights together, which must be quantized alike then.
    mixes: whether its readers take weights of several kinds in one model.
    """

    name: str
    left_alone: Sequence[str]
    fuses: bool
    mixes: bool

    def adapted(self, spec: QuantSpec, storage: DType) -> QuantSpec:
        """The spec with the type of scales that the layout wants, where none was asked for, and
        with a bias where its readers add one. storage: the type of scales by the spec alone."""
        ...

    def obstacle(self, info: TensorInfo, stored: Stored) -> str | None:
        """Why this tensor is left alone although it was to be quantized, or None.

        Raises UsageError where the layout has no word for any tensor quantized like that.
        """
        ...

    def parts(self, tensor: str, stored: Stored) -> list[Part]:
        """What a quantized tensor is made of; the codes first."""
        ...

    def reserved(self, tensor: str) -> list[str]:
        """Names that its readers take for parts of a quantized tensor, whichever it has."""
        ...

    def documents(
        self, tensors: Mapping[str, Stored], others: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """What the JSON files of a checkpoint, by name, say of these quantized tensors beside
        others of rank 2 that are left alone."""
        ...


LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (native, compressed_tensors, modelopt, mlx)
}
# Those of ONNX models, the default first.
ONNX_LAYOUTS = ("qdq", nbits.NAME)

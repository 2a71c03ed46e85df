"""What a weight of an ONNX model is quantized to, and what that asks of DequantizeLinear.

Source: ONNX DequantizeLinear, versions 10 to 28.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from onnx import defs

from qtool.dtypes import DTYPES, DType
from qtool.errors import SpecError
from qtool.spec import QuantSpec, Shape

# The first opset whose DequantizeLinear has the granularity, and its attribute output_dtype.
_GRANULARITIES = {"per_tensor": 10, "per_axis": 13, "blocked": 21}
_OUTPUT_DTYPE = 23
_FLOAT32, _FLOAT64 = DTYPES["float32"], DTYPES["float64"]


class Part(NamedTuple):
    """A tensor that a weight is made of. suffix: of its name. role: as in layouts.stored."""

    role: str
    suffix: str
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class Weight:
    """What a weight is quantized to; scale_dtype: the type in which its scales are stored.

    Scales of a type that DequantizeLinear takes as codes alone, as float8e4m3fn, are dequantized
    themselves, by the global scale or by 1.
    """

    spec: QuantSpec
    scale_dtype: DType
    has_zero_point: bool

    @property
    def has_two_levels(self) -> bool:
        """Whether the scales are dequantized themselves."""
        return self.scale_dtype.scale_opset is None and self.scale_dtype.opset is not None

    @property
    def operand_dtype(self) -> DType:
        """The type of the scales that DequantizeLinear multiplies the codes by."""
        return _FLOAT32 if self.has_two_levels else self.scale_dtype

    def parts(self, shape: Shape) -> Iterator[Part]:
        """The codes, the scale, the zero point and what dequantizes the scale."""
        scale_shape = self.spec.granularity.scale_shape(shape)
        yield Part("codes", "quantized", self.spec.dtype, shape)
        suffix = "scale_quantized" if self.has_two_levels else "scale"
        yield Part("scale", suffix, self.scale_dtype, scale_shape)
        if self.has_zero_point:
            yield Part("zero_point", "zero_point", self.spec.dtype, scale_shape)
        if self.has_two_levels:
            yield Part("global_scale", "global_scale", _FLOAT32, ())

    def required_opset(self, source: DType) -> int:
        """The first opset whose DequantizeLinear takes the codes and scales, and gives a weight of
        that source type."""
        scale = self.scale_dtype
        needed = [
            self.spec.dtype.opset,
            scale.opset if self.has_two_levels else scale.scale_opset,
            _GRANULARITIES[self.spec.granularity.name],
            None if self.operand_dtype == result_dtype(source) else _OUTPUT_DTYPE,
        ]
        return max(opset for opset in needed if opset is not None)

    def check_function(self, name: str) -> None:
        """Raise SpecError where a Constant node, as functions need, cannot hold the codes."""
        allowed = defs.get_schema("Constant").type_constraints[0].allowed_type_strs
        if f"tensor({self.spec.dtype})" not in allowed:
            raise SpecError(
                f"tensor {name}",
                f"is in a function, and Constant nodes hold no {self.spec.dtype}",
                "exclude it, or choose another type",
            )


def result_dtype(source: DType) -> DType:
    """What DequantizeLinear gives for a weight of a type; it has no float64."""
    return _FLOAT32 if source == _FLOAT64 else source

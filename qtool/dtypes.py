"""The element types: one row each, everything else computed from the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from qtool.errors import SpecError, nearest


@dataclass(frozen=True)
class DType:
    """One element type, named as ONNX names it.

    code: ONNX TensorProto.DataType, or None where ONNX has no such type.
    numpy: the NumPy (or ml_dtypes) type, one value per element.
    bits: size of one value when stored densely.
    kind: "int", "uint", "float", "bool" or "complex".
    opset: the first ai.onnx opset whose QuantizeLinear produces the type; None where none does.
    scale_opset: the first opset that takes it as a scale; None where none does.
    safetensors, onednn: the name there, or None.
    """

    name: str
    code: int | None
    numpy: np.dtype[Any]
    bits: int
    kind: str
    opset: int | None
    scale_opset: int | None
    safetensors: str | None
    onednn: str | None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        """Another process takes its own row of that name."""
        return resolve, (self.name,)

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_target(self) -> bool:
        """Whether QuantizeLinear produces it."""
        return self.opset is not None

    @property
    def is_small_float(self) -> bool:
        return self.kind == "float" and self.bits <= 8

    @cached_property
    def limits(self) -> Any:
        """ml_dtypes' finfo or iinfo of the type."""
        info = ml_dtypes.finfo if self.kind == "float" else ml_dtypes.iinfo
        return info(self.numpy)

    @property
    def qmin(self) -> float:
        """Lowest finite value."""
        return float(self.limits.min)

    @property
    def qmax(self) -> float:
        """Largest finite value."""
        return float(self.limits.max)

    @property
    def has_negative_zero(self) -> bool:
        """Whether a float type tells -0.0 from 0.0."""
        return not self.name.endswith("fnuz")

    @cached_property
    def has_nan(self) -> bool:
        return self.kind == "float" and self.name not in ("float4e2m1", "float6e2m3", "float6e3m2")

    def nbytes(self, count: int) -> int:
        """Bytes of count values stored densely, the last byte padded."""
        return (count * self.bits + 7) // 8


# fmt: off
_ROWS: tuple[tuple[Any, ...], ...] = (
    # name            code  element type               bits kind      opset scale safetensors oneDNN
    ("int2",            26, ml_dtypes.int2,              2, "int",       25, None, None, None),
    ("uint2",           25, ml_dtypes.uint2,             2, "uint",      25, None, None, None),
    ("int4",            22, ml_dtypes.int4,              4, "int",       21, None, None, None),
    ("uint4",           21, ml_dtypes.uint4,             4, "uint",      21, None, None, None),
    ("int8",             3, np.int8,                     8, "int",       10, None, "I8", "s8"),
    ("uint8",            2, np.uint8,                    8, "uint",      10, None, "U8", "u8"),
    ("int16",            5, np.int16,                   16, "int",       21, None, "I16", None),
    ("uint16",           4, np.uint16,                  16, "uint",      21, None, "U16", None),
    ("float4e2m1",      23, ml_dtypes.float4_e2m1fn,     4, "float",     23, None, "F4", None),
    ("float6e2m3",      27, ml_dtypes.float6_e2m3fn,     6, "float",     28, None, "F6_E2M3", None),
    ("float6e3m2",      28, ml_dtypes.float6_e3m2fn,     6, "float",     28, None, "F6_E3M2", None),
    ("float8e4m3fn",    17, ml_dtypes.float8_e4m3fn,     8, "float",     19, None, "F8_E4M3",
     "f8_e4m3"),
    ("float8e4m3fnuz",  18, ml_dtypes.float8_e4m3fnuz,   8, "float",     19, None, "F8_E4M3FNUZ",
     None),
    ("float8e5m2",      19, ml_dtypes.float8_e5m2,       8, "float",     19, None, "F8_E5M2",
     "f8_e5m2"),
    ("float8e5m2fnuz",  20, ml_dtypes.float8_e5m2fnuz,   8, "float",     19, None, "F8_E5M2FNUZ",
     None),
    ("float8e8m0",      24, ml_dtypes.float8_e8m0fnu,    8, "float",   None, 24, "F8_E8M0", None),
    ("float16",         10, np.float16,                 16, "float",   None, 19, "F16", None),
    ("bfloat16",        16, ml_dtypes.bfloat16,         16, "float",   None, 19, "BF16", None),
    ("float32",          1, np.float32,                 32, "float",   None, 10, "F32", "f32"),
    ("float64",         11, np.float64,                 64, "float",   None, None, "F64", None),
    ("bool",             9, np.bool_,                    8, "bool",    None, None, "BOOL", None),
    ("int32",            6, np.int32,                   32, "int",     None, 10, "I32", None),
    ("int64",            7, np.int64,                   64, "int",     None, None, "I64", None),
    ("uint32",          12, np.uint32,                  32, "uint",    None, None, "U32", None),
    ("uint64",          13, np.uint64,                  64, "uint",    None, None, "U64", None),
    ("complex64",       14, np.complex64,               64, "complex", None, None, "C64", None),
    ("complex128",      15, np.complex128,             128, "complex", None, None, None, None),
)
# fmt: on

DTYPES: dict[str, DType] = {
    name: DType(name, code, np.dtype(element), *rest) for name, code, element, *rest in _ROWS
}
TARGETS: tuple[DType, ...] = tuple(dtype for dtype in DTYPES.values() if dtype.is_target)
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}

_BY_CODE = {d.code: d for d in DTYPES.values()}
_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}
_BY_TYPE: dict[type, DType] = {d.numpy.type: d for d in DTYPES.values()}

DTypeLike = DType | str | int | np.dtype[Any] | type


def resolve(
    value: DTypeLike, thing: str = "dtype", allowed: Sequence[DType] | None = None
) -> DType:
    """The row for an ONNX name ("int4"), an ONNX element-type code (22) or a NumPy dtype.

    Raises SpecError, naming `thing`, for anything else; its remedy is one of the allowed types.
    """
    if isinstance(value, DType):
        return value
    found = None
    if isinstance(value, str):
        found = DTYPES.get(value)
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        found = _BY_CODE.get(int(value))
    elif isinstance(value, np.dtype):
        found = _BY_NUMPY.get(value.newbyteorder("="))
    elif isinstance(value, type):
        found = _BY_TYPE.get(value)
    if found is None:
        rule = f"{value!r} is not an element type"
        raise SpecError(thing, rule, nearest(value, map(str, allowed or DTYPES)))
    return found


def resolve_target(value: DTypeLike, thing: str = "dtype") -> DType:
    """resolve(), restricted to the types that QuantizeLinear produces."""
    dtype = resolve(value, thing, TARGETS)
    if not dtype.is_target:
        raise SpecError(
            thing, f"QuantizeLinear does not produce {dtype}", "use one of " + names(TARGETS)
        )
    return dtype


def names(dtypes: Any) -> str:
    """ "int2, uint2, ..." for messages."""
    return ", ".join(str(dtype) for dtype in dtypes)

"""What is asked for one tensor, checked once, before its values are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qtool import ops
from qtool.dtypes import DType, names, resolve
from qtool.errors import SpecError
from qtool.spec import PRECISIONS, QuantSpec, Shape
from qtool.tensor import operator_scale

Array = NDArray[Any]

SOURCES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor to be quantized.

    name: what messages call it. shape, source: of the tensor. spec: its axis counted from the
    front. given: scale, in its storage type, and zero point that the user gives, or None.
    absmax: largest magnitude of all tensors that share the global scale; None: of this one.
    weights: float32 in the tensor's shape, by which squared errors count; None: all alike.
    """

    name: str
    shape: Shape
    source: DType
    spec: QuantSpec
    given: tuple[Array, Array | None] | None
    absmax: float | None = None
    weights: Array | None = None

    @property
    def storage(self) -> DType:
        """The type in which a chosen scale is stored."""
        return self.spec.storage_dtype(self.source)

    @property
    def precision(self) -> DType:
        """The type of the division: as asked for, or else float32 for a chosen scale and the
        standard's default for a given one."""
        default = ops.FLOAT32 if self.given is None else resolve(self.given[0].dtype)
        if self.spec.semantics == "onednn" or default not in PRECISIONS:
            default = ops.FLOAT32
        return self.spec.precision or default


def request(
    name: str,
    shape: Shape,
    source: DType,
    spec: QuantSpec,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    absmax: float | None = None,
) -> Request:
    """Raises SpecError for what does not fit the tensor's shape and type."""
    if source not in ops.SOURCES:
        raise SpecError(name, f"{source} is not a source type", f"use {names(ops.SOURCES)}")
    spec = spec.at(spec.granularity.resolve(shape))
    if scale is None:
        if zero_point is not None:
            raise SpecError(f"zero_point of {name}", "given without a scale", "give both")
        if spec.negative_scale:
            _check_signs(spec)
        made = Request(name, shape, source, spec, None, absmax)
        if spec.method == "optimal":
            from qtool.scales import optimal

            optimal.check(spec, made.storage)
        return made
    if spec.global_scale:
        raise SpecError(f"scale of {name}", "a global scale needs chosen scales", "leave one out")
    thing, scale = f"scale of {name}", np.asarray(scale)
    storage = spec.storage_dtype(source, resolve(scale.dtype, thing))
    scale_shape = spec.granularity.scale_shape(shape)
    stored = given_scale(scale, storage, scale_shape, thing, negative=spec.negative_scale)
    zero = _given_zero_point(zero_point, spec, scale_shape, name)
    made = Request(name, shape, source, spec, (stored, zero))
    ops.check_scale(ops.cast(operator_scale(stored), made.precision), thing)
    return made


def _check_signs(spec: QuantSpec) -> None:
    """Raise SpecError where chosen scales cannot have either sign."""
    if not (spec.symmetric and spec.dtype.is_integer):
        raise SpecError(
            "negative_scale",
            "only symmetric grids of integers have a larger side to choose",
            "leave it out, or give scales",
        )
    if spec.scale_dtype == resolve("float8e8m0"):
        raise SpecError("negative_scale", "float8e8m0 scales have no sign", "leave it out")


def given_scale(
    scale: Array, storage: DType, shape: Shape, thing: str, *, negative: bool = False
) -> Array:
    """A given scale in its storage type and in the scale shape.

    Raises SpecError where it does not fit, is zero or not finite, or negative but must not be.
    """
    values = ops.cast(_fit(scale, shape, thing), ops.FLOAT64)
    if not negative and (values < 0).any():
        raise SpecError(thing, "a value below zero", "use --negative-scale if it is meant")
    stored = ops.cast(values, storage)
    ops.check_scale(stored, thing)
    return stored


def _given_zero_point(
    zero_point: ArrayLike | None, spec: QuantSpec, shape: Shape, name: str
) -> Array | None:
    """A given zero point as codes in the scale shape; None where none is given."""
    if zero_point is None:
        return None
    thing = f"zero_point of {name}"
    if spec.semantics == "onednn" and not spec.dtype.is_integer:
        raise SpecError(thing, f"oneDNN Quantize takes none for {spec.dtype}", "leave it out")
    codes = given_codes(zero_point, spec.dtype, shape, thing)
    if (codes.astype(np.float64) < spec.qmin).any():
        raise SpecError(thing, "a value outside the narrow range", f"use {spec.qmin:g} or more")
    return codes


def given_codes(
    zero_point: ArrayLike, dtype: DType, shape: Shape, thing: str = "zero_point"
) -> Array:
    """A given zero point as codes of dtype, in the scale shape."""
    values = ops.cast(_fit(np.asarray(zero_point), shape, thing), ops.FLOAT64)
    codes = ops.saturate_cast(values, None, dtype)
    if not np.array_equal(codes.astype(np.float64), values):
        raise SpecError(
            thing,
            f"a value that {dtype} cannot hold",
            f"use {'whole ' if dtype.is_integer else ''}values in [{dtype.qmin:g}, {dtype.qmax:g}]",
        )
    return np.asarray(codes)


def _fit(values: Array, shape: Shape, thing: str) -> Array:
    """values in the scale shape: one value stands for all groups."""
    if resolve(values.dtype, thing).kind in ("bool", "complex"):
        raise SpecError(thing, f"{values.dtype} values", "give numbers")
    if values.shape == shape:
        return values
    if values.shape in ((), (1,)):
        return np.full(shape, values.reshape(()))
    raise SpecError(
        thing,
        f"shape {values.shape}, but the granularity needs {shape}",
        "give one value or that shape, or another --axis or --block-size",
    )

"""Scales and zero points that the user gives instead of a method."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import formats
from qtool.dtypes import DTYPES, DType, DTypeLike, resolve
from qtool.errors import QtoolError, SpecError
from qtool.jobs import streams
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import read_metadata
from qtool.tensor import operator_scale

Array = NDArray[Any]
GivenValue = float | str | Path | NDArray[Any]


class Given:
    """Looks up the given scale and zero point of a tensor.

    scale, zero_point: a number or array for every tensor, the name of a .npy file with one, or of
        a .safetensors or .npz file that holds NAME.scale and NAME.zero_point. Zero points beside
        the scales in one file are used unless zero_point is given.
    scale_dtype: type of scales that NumPy saved as raw bytes.
    paths: the files among them.
    """

    def __init__(
        self,
        scale: GivenValue,
        zero_point: GivenValue | None,
        scale_dtype: DTypeLike | None = None,
    ) -> None:
        self.paths: list[Path] = []
        self._scales = self._load(scale, "scale", scale_dtype)
        self._zero_points = None
        if zero_point is not None:
            self._zero_points = self._load(zero_point, "zero_point", None)

    def of(self, name: str) -> tuple[Array, Array | None] | None:
        """The scale and zero point of a tensor; None where no scale is given for it."""
        scale = self._pick(self._scales, name, 0)
        if scale is None:
            return None
        if self._zero_points is None:
            beside = None if isinstance(self._scales, np.ndarray) else self._scales.get(name)
            return scale, None if beside is None else beside[1]
        zero_point = self._pick(self._zero_points, name, 1)
        if zero_point is None:
            raise QtoolError(
                f"tensor {name}",
                "has a given scale and no given zero point",
                "give both, or leave --zero-point out",
            )
        return scale, zero_point

    def for_array(self, name: str) -> Given:
        """The same for a bare array: what a file has for one name alone is for it, whatever its
        own name is."""
        part = copy(self)
        part._scales = _renamed(self._scales, name)
        part._zero_points = None
        if self._zero_points is not None:
            part._zero_points = _renamed(self._zero_points, name)
        return part

    def part(self, names: Iterable[str]) -> Given:
        """The same, as far as it is about these tensors."""
        part, wanted = copy(self), set(names)
        part._scales = _only(self._scales, wanted)
        part._zero_points = None if self._zero_points is None else _only(self._zero_points, wanted)
        return part

    def header(self, name: str) -> tuple[DType | None, bool] | None:
        """The type of the given scale (None for a plain number), and whether there is a zero
        point."""
        found = self.of(name)
        if found is None:
            return None
        scale, zero_point = found
        return resolve(scale.dtype, "scale"), zero_point is not None

    def _load(self, value: GivenValue, thing: str, dtype: DTypeLike | None) -> _Values:
        if not isinstance(value, str | Path):
            return np.asarray(value)
        try:
            return np.asarray(float(str(value)))
        except ValueError:
            path = Path(value)
        if not os.path.exists(path):
            rule = f"{str(value)!r} is neither a number nor a file"
            raise SpecError(thing, rule, "give a number, or a .npy, .npz or .safetensors file")
        self.paths.append(path)
        is_npy = path.suffix == ".npy" or streams.is_pipe(path)
        with streams.opened(path, dtype if is_npy else None) as source:
            if source.container == "npy":
                return source.read(source.infos()[0].name)
            return _parameters(source)

    def _pick(self, values: _Values, name: str, part: int) -> Array | None:
        if isinstance(values, np.ndarray):
            return values
        return values.get(name, (None, None))[part]


_Values = Array | Mapping[str, tuple[Array | None, Array | None]]


def _only(values: _Values, names: set[str]) -> _Values:
    if isinstance(values, np.ndarray):
        return values
    return {name: found for name, found in values.items() if name in names}


def _renamed(values: _Values, name: str) -> _Values:
    if isinstance(values, np.ndarray) or len(values) != 1:
        return values
    [found] = values.values()
    return {name: found}


def _parameters(source: formats.Source) -> dict[str, tuple[Array | None, Array | None]]:
    """NAME -> NAME.scale, NAME.zero_point of every NAME in a file that has one of them."""
    if source.container == "onnx":
        raise SpecError(
            str(source.path), "is an ONNX model", "give scales as .npy, .npz or .safetensors"
        )
    described = read_metadata(source).tensors
    quantized = DequantizedSource(source, DTYPES["float32"]) if described else None
    stored = {info.name for info in source.infos()}
    found: dict[str, tuple[Array | None, Array | None]] = {}
    for name in sorted(stored):
        base, dot, part = name.rpartition(".")
        if not dot or part not in ("scale", "zero_point") or base in found:
            continue
        if quantized is not None and base in described:
            scale_of, zero_of, over = quantized.parameters(base)
            found[base] = operator_scale(scale_of, over) if over else scale_of, zero_of
        else:
            names = f"{base}.scale", f"{base}.zero_point"
            scale, zero_point = (source.read(n) if n in stored else None for n in names)
            found[base] = scale, zero_point
    if not found:
        raise SpecError(
            str(source.path),
            "holds no NAME.scale and no NAME.zero_point",
            "write one with `qtool quantize`",
        )
    return found

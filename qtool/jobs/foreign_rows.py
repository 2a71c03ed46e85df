"""What `inspect` says of weights that other tools have quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.dtypes import DTYPES
from qtool.formats import Source
from qtool.jobs import faults
from qtool.layouts import foreign
from qtool.layouts.foreign import ForeignWeight
from qtool.layouts.foreign_config import FILES, config_of
from qtool.layouts.foreign_weight import quantization

_LARGEST = 1 << 24


def find(source: Source) -> list[ForeignWeight]:
    """The weights of other tools in a file; configurations beside it are read."""
    folder = source.path if source.path.is_dir() else source.path.parent
    documents = {name: found for name in FILES if (found := _document(folder / name)) is not None}
    return foreign.find(source.infos(), config_of(documents, source.metadata))


def row(weight: ForeignWeight, source: Source) -> dict[str, Any]:
    """One weight, all of its tensors together."""
    shape, how = quantization(weight, source.read)
    return {
        "name": weight.name,
        "shape": list(weight.codes.shape if shape is None else shape),
        "dtype": how["dtype"] or weight.codes.dtype.name,
        "bytes": sum(part.nbytes for part in weight.parts),
        "quantization": how | {"parts": [part.name for part in weight.parts]},
    }


def add_faults(weight: ForeignWeight, found: dict[str, Any], source: Source) -> None:
    """Read the scales and codes of a weight and add what is wrong with them to its row."""
    how = found["quantization"]
    dtype = DTYPES[how["scale_dtype"]]
    if dtype.bits == weight.scale.dtype.bits:
        how["scales"] = faults.scale_figures(source.read(weight.scale.name), dtype)
        how["problems"] += faults.scale_faults(how["scales"], weight.scale.size)
    how["problems"] += faults.code_faults(
        source, weight.codes.name, weight.codes.dtype, weight.codes.size
    )
    if weight.layout.tool == "GPTQ" and weight.zero_point is not None and how["dtype"]:
        stored = source.read(weight.zero_point.name)
        less_one = weight.layout.variant == "v1"
        bits = DTYPES[how["dtype"]].bits if how["dtype"] in DTYPES else 0
        how["problems"] += faults.zero_point_faults(stored, bits, less_one=less_one)


def _document(path: Path) -> Mapping[str, Any] | None:
    """What a JSON file says; None where there is no such file, or a damaged one."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

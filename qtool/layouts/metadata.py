"""What a file's own metadata says of the quantized tensors in it.

The metadata key "qtool" holds JSON:

    {"version": 1, "tool": {"name", "version"}, "recipe": TOML, "layout": NAME,
     "tensors": {NAME: {"dtype", "shape", "granularity", "axis", "block_size", "scale_dtype",
     "source_dtype", "zero_point"}}, "stored": {NAME: dtype of an array that NumPy has no name for}}

"tool" and "recipe", which say what made the file, are missing in files of qtool's first days.
"layout" is left out where it is the native one; "tile", "global_scale" and "activations" stand
where there are such. ONNX models hold "tool" and "recipe" alone; their operators say the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qtool.errors import FormatError, UsageError, unreadable
from qtool.formats import Entry, Source
from qtool.layouts import LAYOUTS, Layout, native
from qtool.layouts.provenance import Provenance
from qtool.layouts.stored import Stored
from qtool.spec import TensorInfo

VERSION = 1
KEY = "qtool"
_REMEDY = "write or fetch the file anew"


@dataclass(frozen=True, slots=True)
class Description:
    """The quantized tensors of a file by name, the layout that they are stored in, and what made
    the file."""

    layout: Layout = native
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    provenance: Provenance | None = None

    def to_json(self, written: Iterable[Entry]) -> str:
        """The value of the metadata key, for a file that holds what is written."""
        unnamed = {e.name: e.dtype.name for e in written if e.dtype.numpy.isbuiltin != 1}
        described = {name: stored.to_json() for name, stored in self.tensors.items()}
        made = {} if self.provenance is None else self.provenance.to_json()
        layout = {} if self.layout is native else {"layout": self.layout.name}
        return json.dumps(
            {"version": VERSION, **made, **layout, "tensors": described, "stored": unnamed},
            separators=(",", ":"),
            ensure_ascii=False,
        )


def read_metadata(source: Source) -> Description:
    """The quantized tensors of a file; none for a file that qtool did not quantize.

    Raises FormatError for metadata that is damaged or of another version.
    """
    text = source.metadata.get(KEY)
    if text is None:
        return Description()
    thing = f"{source.path}: metadata {KEY!r}"
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(thing, f"is no JSON: {unreadable(error)}", _REMEDY) from error
    try:
        provenance = Provenance.from_json(described)
        if source.container == "onnx":
            return Description(provenance=provenance)
        if described["version"] != VERSION:
            raise FormatError(
                thing,
                f"version {described['version']!r} of the layout",
                f"this qtool reads version {VERSION}",
            )
        layout = LAYOUTS[described.get("layout", native.name)]
        tensors = described["tensors"].items()
        held = {info.name for info in source.infos()}
        found = {}
        for name, fields in tensors:
            thing = f"{source.path}: metadata {KEY!r} of tensor {name!r}"
            # files of qtool's first days do not say whether there are zero points
            zero_point = {"zero_point": f"{name}.zero_point" in held}
            found[name] = Stored.from_json({**zero_point, **fields})
            _check(layout, name, found[name])
        return Description(layout, found, provenance)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(thing, "is not as qtool writes it", _REMEDY) from error


def _check(layout: Layout, name: str, stored: Stored) -> None:
    """Raise ValueError for a tensor that the layout has no place for."""
    info = TensorInfo(name, stored.shape, stored.source_dtype, 0)
    try:
        reason = layout.obstacle(info, stored)
    except UsageError as error:
        reason = error.rule
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    parts = {part.role: part.entry for part in layout.parts(name, stored)}
    if stored.zero_point and "zero_point" not in parts:
        raise ValueError(f"{name}: zero_point")
    if stored.global_scale and "global_scale" not in parts:
        raise ValueError(f"{name}: global_scale")
    if stored.bias and stored.zero_point and parts["zero_point"].dtype != stored.scale_dtype:
        raise ValueError(f"{name}: bias")

"""What stands against quantizing a source, and what the user should know of the outcome."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from qtool.dtypes import DTYPES
from qtool.errors import FormatError, UsageError
from qtool.formats import Source
from qtool.jobs import fusing
from qtool.layouts import Layout, foreign
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import KEY, read_metadata
from qtool.layouts.stored import Stored
from qtool.plan import Planned
from qtool.recipe import Recipe, unmatched
from qtool.spec import TensorInfo, Tiled
from qtool.stats import Stats

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


def readable(
    source: Source, *, requantize: bool, remedy: str = "dequantize it first, or use --requantize"
) -> Source:
    """The source, dequantized where qtool quantized it and requantize allows that.

    Raises FormatError where the source is quantized already and requantize is False.
    """
    is_own = bool(read_metadata(source).tensors)
    if requantize:
        return DequantizedSource(source, DTYPES["float32"]) if is_own else source
    if is_own:
        found = "qtool"
    elif source.container == "onnx":
        from qtool.formats.onnx.uses import uses_of_stored_codes

        uses = uses_of_stored_codes(cast("OnnxSource", source).model)
        found = f"{uses[0].operator} of {uses[0].tensor}" if uses else ""
    else:
        found = next(iter(foreign.recognise(source.infos()).values()), "")
    if found:
        raise FormatError(str(source.path), f"is quantized already ({found})", remedy)
    return source


def marked(source: Source) -> list[TensorInfo]:
    """The tensors, with an obstacle on those that other tools' quantization needs as they are."""
    infos = list(source.infos())
    parts = foreign.recognise(infos)
    return [
        replace(info, obstacle=f"quantized already ({parts[info.name]})")
        if info.name in parts and info.obstacle is None
        else info
        for info in infos
    ]


def check_something(
    plan: Sequence[Planned],
    recipe: Recipe,
    source: Source,
    remedy: str | None = "use --allow-empty to copy it as it is",
) -> None:
    """Refuse a file with tensors none of which is quantized."""
    if recipe.options.get("allow_empty") or any(p.spec is not None for p in plan):
        return
    if not plan and source.container != "onnx":
        return  # a file of no tensors is one of no weights too; a model may keep them elsewhere
    reasons = Counter(p.reason for p in plan).most_common()
    text = ", ".join([*(f"{reason} ({count})" for reason, count in reasons), *idle(recipe, plan)])
    rule = f"nothing to quantize: {text or 'no tensors'}"
    raise FormatError(str(source.path), rule, remedy)


def check_room(plan: Sequence[Planned], name: str, container: str) -> None:
    """Refuse several tensors in a container of one."""
    count = sum(p.spec is not None for p in plan)
    if container == "npy" and count != 1:
        raise FormatError(
            name,
            f"a .npy file holds one array, {count} tensors are quantized",
            "choose one with --include, or write .npz or .safetensors",
        )


def check_kinds(plan: Sequence[Planned], layout: Layout, container: str) -> None:
    """Refuse weights of several kinds where the layout's readers want them alike, and tiles in
    ONNX. Raises UsageError."""
    kinds: dict[object, tuple[str, Stored]] = {}
    for planned in plan:
        name, stored = planned.info.name, planned.stored
        if stored is None:
            continue
        if container == "onnx" and isinstance(stored.granularity, Tiled):
            raise UsageError("--tile", "ONNX has no word for tiles", "use --block-size")
        group = fusing.group(name) if layout.mixes else None
        first, other = kinds.setdefault(group or (name if layout.mixes else None), (name, stored))
        if (layout.fuses or not layout.mixes) and stored.kind != other.kind:
            words = f"{other.words}, {name} {stored.words}"
            rule = "readers put both together" if group else "readers take one kind of weights"
            remedy = "quantize them alike"
            raise UsageError(f"--layout {layout.name}", f"{rule}, {first} is {words}", remedy)


def warnings(recipe: Recipe, plan: Sequence[Planned], container: str, source: Source) -> list[str]:
    """What the user should know although the command succeeded."""
    found = idle(recipe, plan)
    if container == "npy":
        others = f" and the {_tensors(len(plan) - 1)} left alone" if len(plan) > 1 else ""
        found.append(f"a .npy file holds the codes alone, without scale and zero point{others}")
    lost = sorted(set(source.metadata) - {KEY}) if container in ("npy", "npz") else []
    if lost:
        found.append(f".{container} has no place for the metadata {', '.join(lost)}")
    if source.container == "onnx":
        found += _fixed(plan, cast("OnnxSource", source))
    rounded = sum(p.spec is not None and p.info.dtype.name == "float64" for p in plan)
    if rounded:
        found.append(f"{_tensors(rounded)} rounded from float64 to float32 before quantizing")
    return found


def _fixed(plan: Sequence[Planned], source: OnnxSource) -> list[str]:
    """What becomes of weights that a model lets its callers set."""
    names = [p.info.name for p in plan if p.spec and p.info.name in source.overridable]
    if not names:
        return []
    text = "weights that callers of the model could set are fixed now; --exclude keeps them"
    return [f"{text}: {', '.join(names)}"]


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def idle(recipe: Recipe, plan: Sequence[Planned]) -> list[str]:
    """What the recipe says of no tensor at all."""
    names = [p.info.name for p in plan]
    of_rules = (pattern for rule in recipe.rules for pattern in rule.patterns)
    patterns = dict.fromkeys([*recipe.include, *recipe.exclude, *of_rules])
    return [f"pattern '{pattern}' matches no tensor" for pattern in unmatched([*patterns], names)]


def nonfinite(nan: int, inf: int) -> str:
    """ "1 NaN and 2 Inf"; nothing where there are none."""
    return " and ".join(f"{n} {name}" for n, name in ((nan, "NaN"), (inf, "Inf")) if n)


def nonfinite_warnings(tensors: Iterable[Stats]) -> list[str]:
    """How many NaN and Inf were quantized, where they are allowed, and what became NaN or Inf."""
    tensors, found = list(tensors), []
    if odd := [s for s in tensors if s.nan_count or s.inf_count]:
        counts = nonfinite(sum(s.nan_count for s in odd), sum(s.inf_count for s in odd))
        found.append(f"quantized {counts} in {_tensors(len(odd))}")
    if lost := sum(not math.isfinite(s.max_abs_error) for s in tensors):
        found.append(f"{_tensors(lost)} with finite values that became NaN or Inf")
    return found

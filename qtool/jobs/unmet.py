"""What --strict fails on: whatever is not quantized as asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qtool import ops
from qtool.formats import Source
from qtool.jobs import screening
from qtool.plan import Planned
from qtool.recipe import SOURCE_FLOATS, Recipe
from qtool.spec import TensorInfo

_PIECE = 1 << 20  # elements

Unmet = tuple[str | None, str]


def unmet(
    recipe: Recipe,
    plan: Sequence[Planned],
    records: Sequence[Mapping[str, Any]],
    with_nan: Sequence[str],
) -> list[Unmet]:
    """Tensors, or None for the whole, and reasons.

    A tensor that is left alone counts where the recipe wanted it: where it was chosen for
    quantization and the layout or the type could not take it; where a pattern of --include or a
    rule is its very name; and where such a pattern matches it and it is a weight, a float tensor
    of rank 2 and more. What --exclude, skip or a narrower --include keep out does not count.

    records: what a report says of the quantized ones; NaN and Inf in them count too. with_nan: the
    others that hold NaN; Inf in them may be meant, as in masks.
    """
    found: list[Unmet] = [
        (p.info.name, p.reason)
        for p in plan
        if p.reason is not None and (p.is_fallback or recipe.demands(p.info))
    ]
    found += [(None, text) for text in screening.idle(recipe, plan)]
    found += _nonfinite(records)
    found += [(name, "holds NaN") for name in with_nan]
    if not any(p.spec is not None for p in plan):
        reasons = Counter(p.reason for p in plan).most_common()
        text = ", ".join(f"{reason} ({count})" for reason, count in reasons)
        found.append((None, f"nothing is quantized: {text or 'no tensors'}"))
    return found


def kept_with_nan(source: Source, plan: Sequence[Planned]) -> list[str]:
    """The names of the float tensors that are left alone and hold NaN."""
    return [
        p.info.name
        for p in plan
        if p.spec is None and p.info.dtype in SOURCE_FLOATS and _holds_nan(source, p.info)
    ]


def _holds_nan(source: Source, info: TensorInfo) -> bool:
    with source.reading(info.name) as read:
        for start in range(0, info.size, _PIECE):
            piece = np.empty(min(_PIECE, info.size - start), info.dtype.numpy)
            read(start, piece)
            if np.isnan(ops.cast(piece, ops.FLOAT32)).any():
                return True
    return False


def _nonfinite(records: Sequence[Mapping[str, Any]]) -> Iterator[Unmet]:
    for record in records:
        counts = screening.nonfinite(record.get("nan_count", 0), record.get("inf_count", 0))
        if counts:
            yield record["name"], f"holds {counts}"
        elif record.get("max_abs_error", 0) is None and record["elements"]:
            yield record["name"], "holds codes that are not finite, of values that are"

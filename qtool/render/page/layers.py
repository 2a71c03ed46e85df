"""The chart of relative errors in model order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qtool.render.page import plots
from qtool.render.page.figures import Record, figure, is_nonfinite, plain, tensors
from qtool.render.text import short_names

NAMED = 30  # tensors up to which the chart of layers has their names
BARS = {"wide": 240, "narrow": 80}  # that the chart of layers has at most


def layers(report: Record, width: str) -> Figure | None:
    """Relative errors in model order. width: "wide" or "narrow"."""
    records = tensors(report)
    if not has_errors(records):
        return None
    extent = {"wide": 1000, "narrow": 340}[width]
    if len(records) <= NAMED:  # for a line of text each
        made = plots.new_figure(extent, 60 + 26 * len(records))
        draw_names(made.add_subplot(), records, {"wide": 48, "narrow": 20}[width])
    else:
        made = plots.new_figure(extent, 280)
        draw_order(made.add_subplot(), records, BARS[width])
    return made


def has_errors(records: Sequence[Record]) -> bool:
    """Whether there is anything to draw; a plan has no errors."""
    return any(not math.isnan(_error(r)) or is_nonfinite(r) for r in records)


def draw_names(axes: Axes, records: Sequence[Record], characters: int) -> None:
    """A bar for each tensor, with its name."""
    errors = [_error(record) for record in records]
    names = [text.plain for text in short_names([plain(r["name"]) for r in records], characters)]
    places = range(len(records))
    axes.barh(places, np.nan_to_num(errors), height=0.62, color=plots.COLORS["bar"])
    top = max([e for e in errors if not math.isnan(e)], default=0.0) or 1.0
    for place, error, record in zip(places, errors, records, strict=True):
        text = f"{error:.4f}" if not math.isnan(error) else _missing(record)
        at = 0.0 if math.isnan(error) else error
        axes.text(at + 0.012 * top, place, text, va="center", color=plots.COLORS["ink"])
    axes.set_yticks(places, names)
    axes.set_ylim(len(records) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * top)
    axes.tick_params(length=0)
    axes.set_xlabel("relative error")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for label in axes.get_yticklabels():
        label.set_color(plots.COLORS["ink"])


def draw_order(axes: Axes, records: Sequence[Record], bars: int) -> None:
    """Bars in model order, each the worst of neighbouring tensors where there are many."""
    each = -(-len(records) // bars)
    groups = [records[i : i + each] for i in range(0, len(records), each)]
    errors = np.array([_worst(group) for group in groups])
    starts = np.arange(len(groups)) * each + 1
    axes.bar(
        starts, np.nan_to_num(errors), width=0.72 * each, align="edge", color=plots.COLORS["bar"]
    )
    odd = [any(is_nonfinite(r) for r in group) for group in groups]
    top = float(np.nanmax(errors)) if not np.isnan(errors).all() else 1.0
    axes.plot(
        starts[odd] + each / 2, np.full(sum(odd), 1.04 * (top or 1)), "x", color=plots.COLORS["hot"]
    )
    axes.set_xlim(0.4, len(records) + 1.4)
    axes.set_ylim(0, 1.1 * (top or 1))
    axes.set_ylabel("relative error")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(length=0)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    marks = _layer_marks(records, 24 if bars > 100 else 7)
    if marks:
        axes.tick_params(axis="x", length=5)
        axes.set_xticks([at for at, _ in marks], [text for _, text in marks])
        axes.set_xlabel("layer, in model order")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel("number of the tensor, in model order")


def _error(record: Record) -> float:
    """The relative error, 0 where exact; NaN where there is none."""
    if figure(record, "mse") == 0:
        return 0.0
    value = figure(record, "relative_error")
    return math.nan if value is None else value


def worst(records: Sequence[Record], most: int) -> list[int]:
    """The numbers, in order and from 1 on, of those with the largest errors; no figure is worse."""
    errors = [math.inf if math.isnan(e) else e for e in map(_error, records)]
    return sorted(sorted(range(1, len(records) + 1), key=lambda n: -errors[n - 1])[:most])


def _worst(group: Sequence[Record]) -> float:
    return max((e for e in map(_error, group) if not math.isnan(e)), default=math.nan)


def _missing(record: Record) -> str:
    return "not finite" if is_nonfinite(record) else "no figure"


def _layer_marks(records: Sequence[Record], most: int) -> list[tuple[float, str]]:
    """Where the layers begin that the first numbers in the names count, thinned."""
    found: dict[str, float] = {}
    for place, record in enumerate(records, 1):
        number = re.search(r"(?<![a-zA-Z0-9])\d{1,4}(?![a-zA-Z0-9])", plain(record["name"]))
        if number:
            found.setdefault(number[0], place + 0.36)
    marks = sorted((at, text) for text, at in found.items())
    return marks[:: -(-len(marks) // most)] if len(marks) > 1 else []

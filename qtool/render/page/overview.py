"""A report as one picture: totals, errors in model order, and its worst tensors."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from qtool.render.page import facts, layers, plots
from qtool.render.page.figures import plain, tensors
from qtool.render.text import many

_COLUMNS = 2  # worst tensors that are drawn
_MOST = 40  # characters of a tensor's name


def document(report: Mapping[str, Any], pictures: Mapping[str, Any]) -> bytes:
    """A PNG of 2000 pixels' width, on white."""
    data = io.BytesIO()
    with plots.style():
        figure = _figure(report, pictures["tensors"][:_COLUMNS])
        figure.savefig(data, format="png", dpi=144, metadata={"Software": None})
    return data.getvalue()


def _figure(report: Mapping[str, Any], pictures: Sequence[Mapping[str, Any]]) -> Figure:
    records = tensors(report)
    named = len(records) <= layers.NAMED
    heights = [96, 56 + 24 * max(len(records), 1) if named else 280]
    heights += [240] * (1 + any(p["heat"] for p in pictures)) if pictures else []
    figure = plots.new_figure(1000, sum(heights) + 24)
    figure.set_layout_engine("constrained", rect=(0.012, 0.012, 0.976, 0.976))
    figure.patch.set_visible(True)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _headline(parts[0], report)
    axes = parts[1].subplots()
    if not layers.has_errors(records):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no errors of tensors", ha="center", color=plots.COLORS["muted"])
    elif named:
        layers.draw_names(axes, records, 48)
    else:
        layers.draw_order(axes, records, layers.BARS["wide"])
    for part, what in zip(parts[2:], ("histogram", "heat"), strict=False):
        for place, picture in zip(
            part.subfigures(1, _COLUMNS, squeeze=False)[0], pictures, strict=False
        ):
            _picture(place, picture, what)
    return figure


def _picture(place: Any, picture: Mapping[str, Any], what: str) -> None:
    if not picture[what]:
        return
    name = plain(picture["name"])
    name = name if len(name) <= _MOST else "…" + name[1 - _MOST :]
    if what == "histogram":
        plots.draw_histogram(place, picture)
        place.suptitle(f"{name}: values and grid", fontsize=11)
    else:
        plots.draw_heat(place, picture)
        place.suptitle(f"{name}: RMS error of blocks", fontsize=11)


def _headline(part: Any, report: Mapping[str, Any]) -> None:
    title = facts.title(report)
    part.text(0.012, 0.92, title if len(title) <= 70 else title[:69] + "…", va="top", fontsize=20)
    muted = plots.COLORS["muted"]
    part.text(0.012, 0.52, facts.lead(report)[:130], va="top", fontsize=12, color=muted)
    failed = sum(not gate["passed"] for gate in facts.gates(report))
    faults = [(len(facts.problems(report)), "problem"), (failed, "failed gate")]
    shown = [many(count, noun) for count, noun in faults if count]
    shown += [f"{label} {text}" for label, text, _ in facts.totals(report)[: 6 - len(shown)]]
    part.text(0.012, 0.24, "   ·   ".join(shown)[:150], va="top", fontsize=11)

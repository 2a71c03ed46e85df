"""Style, histograms and heat maps: matplotlib's objects, without pyplot or a window."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# The colours by their names in page.css, in a light theme; none stands for two things.
COLORS = {
    "ink": "#17212b",
    "muted": "#566270",
    "line": "#dce2e9",
    "bar": "#2a78b8",
    "hot": "#a53f0e",
}
HEAT = "viridis"  # light and dark themes show both of its ends
_CLOSE = 120  # lines that can be told apart over the width of a histogram


@contextmanager
def style(font: float = 12) -> Iterator[None]:
    """How everything is drawn: text as text, never as formulas, and the same bytes every time."""
    ink, muted, line = (COLORS[name] for name in ("ink", "muted", "line"))
    options: Any = {  # matplotlib types the names one by one
        "axes.edgecolor": line, "axes.labelcolor": muted, "axes.labelsize": font,
        "axes.facecolor": "none",
        "axes.spines.right": False, "axes.spines.top": False, "axes.titlecolor": ink,
        "axes.titlesize": font, "axes.unicode_minus": True, "figure.dpi": 72,
        "font.family": "DejaVu Sans", "font.size": font, "grid.color": line, "grid.linewidth": 1,
        "svg.fonttype": "none", "svg.hashsalt": "qtool", "svg.image_inline": True,
        "text.color": ink, "text.parse_math": False, "xtick.color": line, "ytick.color": line,
        "xtick.labelcolor": muted, "ytick.labelcolor": muted, "xtick.labelsize": font,
        "ytick.labelsize": font,
    }  # fmt: skip
    with mpl.rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has them
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many CSS pixels."""
    made = Figure(figsize=(width / 72, height / 72), layout="constrained")
    made.patch.set_visible(False)
    return made


def histogram(picture: Mapping[str, Any]) -> Figure:
    """A histogram with the grid over it."""
    made = new_figure(340, 230)
    draw_histogram(made, picture)
    return made


def grid_style(picture: Mapping[str, Any]) -> str:
    """How the grid is drawn: "lines", a "band" where they would run together, or its "limits" and
    how dense it is."""
    found, values = picture["histogram"], picture["grid"]["values"]
    if values is None:
        return "limits"
    step = (values[-1] - values[0]) / max(1, len(values) - 1)
    return "lines" if step * _CLOSE >= found["high"] - found["low"] else "band"


def draw_histogram(made: Any, picture: Mapping[str, Any]) -> None:
    """Into a figure or a part of one: counts on a logarithmic scale, lines where codes lie, or
    where there are many their limits and how dense they are."""
    found, grid = picture["histogram"], picture["grid"]
    edges = np.linspace(found["low"], found["high"], len(found["counts"]) + 1)
    drawn = None if grid is None else grid_style(picture)
    is_dense = drawn == "limits"
    axes, strip = made.subplots(
        2, 1, sharex=True, squeeze=False, height_ratios=(6, 1) if is_dense else (1, 0.001)
    )[:, 0]
    counts = np.maximum(found["counts"], 0.5)  # a logarithm of 0 there is not
    axes.stairs(counts, edges, baseline=0.5, fill=True, color=COLORS["bar"])
    axes.set_yscale("log")
    axes.set_ylim(0.5, 2 * max(counts.max(), 1))
    axes.yaxis.set_major_formatter(FuncFormatter(_count))
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_ylabel("weights")
    axes.tick_params(length=0)
    axes.set_xlim(edges[0], edges[-1])
    if grid is not None:
        limits = [grid["low"], grid["high"]]
        lines = grid["values"] if drawn == "lines" else limits
        inside = [v for v in lines if edges[0] <= v <= edges[-1]]
        axes.vlines(inside, 0, 1, transform=axes.get_xaxis_transform(), color=COLORS["hot"], lw=1)
    if drawn == "band":
        axes.axvspan(*limits, color=COLORS["hot"], alpha=0.35, lw=0)
    bottom = axes
    if is_dense:
        strip.stairs(grid["density"], edges, fill=True, color=COLORS["hot"])
        strip.set_ylabel("codes", rotation=0, ha="right", va="center")
        strip.set_yticks([])
        strip.tick_params(length=0)
        bottom = strip
    else:
        strip.remove()
        axes.tick_params(labelbottom=True)
    bottom.set_xlabel("value")
    bottom.xaxis.set_major_locator(MaxNLocator(5))


def _count(value: float, _position: object = None) -> str:
    """A power of ten: 1, 10, 100, 1k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def heat(picture: Mapping[str, Any]) -> Figure:
    """The heat map of a picture that has one."""
    made = new_figure(340, 230)
    draw_heat(made, picture)
    return made


def draw_heat(made: Any, picture: Mapping[str, Any]) -> None:
    """Into a figure or a part of one: root mean square errors of blocks, as a matrix."""
    found = picture["heat"]
    cells = np.array(found["cells"], np.float64)  # None becomes NaN
    axes = made.subplots()
    extent = (0, found["columns"], found["rows"], 0)
    top = np.nanmax(cells) if not np.isnan(cells).all() else 1.0
    image = axes.imshow(
        cells, HEAT, aspect="auto", interpolation="none", extent=extent, vmin=0, vmax=top or 1.0
    )
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = made.colorbar(image, ax=axes, pad=0.02, label="RMS error")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.ax.yaxis.set_major_locator(MaxNLocator(4))

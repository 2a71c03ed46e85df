"""A report as one page of HTML that needs nothing else: no network, no server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from qtool.render.page import facts, layers, plots
from qtool.render.page.figures import (
    Column,
    Record,
    columns,
    figure,
    is_nonfinite,
    plain,
    shape,
    tensors,
    way,
)
from qtool.render.page.svg import inline

_ROWS = 20  # of the table behind a histogram
_MOST = 5000  # tensors in the table: browsers take long for more


def document(report: Mapping[str, Any], pictures: Mapping[str, Any]) -> bytes:
    """HTML in UTF-8. Whatever comes from the report or from files is escaped by Jinja, or by
    ElementTree in plots; scripts but the page's own are forbidden by its policy."""
    style, script = _part("page.css"), _part("page.js")
    with plots.style():
        charts, cards = _layers(report), [_card(*item) for item in enumerate(pictures["tensors"])]
    environment = Environment(
        loader=DictLoader({"page": _part("page.html")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    records = tensors(report)
    found = columns(records)
    text = environment.get_template("page").render(
        policy=_policy(script),
        style=Markup(style),
        script=Markup(script),
        facts=facts,
        report=report,
        title=facts.title(report),
        charts=charts,
        is_grouped=len(records) > min(layers.BARS.values()),
        has_crosses=len(records) > layers.NAMED and any(map(is_nonfinite, records)),
        cards=cards,
        notes=[plain(note) for note in pictures["notes"]],
        columns=found,
        count=len(records),
        tensors=[_row(i, records[i - 1], found) for i in layers.worst(records, _MOST)],
    )
    return text.encode()


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded, and only this script runs (Content Security Policy Level 3). SVG has
    its colours in style attributes, which hashes do not cover."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _breakable(text: str) -> Markup:
    """A name that is broken between its words where it is too long."""
    return Markup("<wbr>").join(re.findall(r"[^._/:-]*[._/:-]*", text))


def _row(place: int, record: Record, found: Sequence[Column]) -> dict[str, Any]:
    values = [column.value(record) for column in found]
    return {
        "place": place,
        "name": plain(record["name"]),
        "way": way(record),
        "shape": shape(record),
        "elements": figure(record, "elements"),
        "cells": [
            (column.text(record), "" if value is None else f"{value:.9g}")
            for column, value in zip(found, values, strict=True)
        ],
    }


def _layers(report: Record) -> dict[str, Markup]:
    """The chart of layers, for wide and for narrow windows."""
    title = "Relative error by tensor in model order"
    words = "A bar for each tensor. The figures are in the table of tensors."
    drawn = {width: layers.layers(report, width) for width in ("wide", "narrow")}
    return {
        width: inline(chart, f"layers-{width}", title, words)
        for width, chart in drawn.items()
        if chart is not None
    }


def _card(place: int, picture: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of one of the worst tensors."""
    name, found, heat = (picture[key] for key in ("name", "histogram", "heat"))
    name = plain(name)
    total = sum(found["counts"])
    ends = f"from {found['low']:.4g} to {found['high']:.4g}"
    words = f"{total} values {ends}, on a logarithmic scale" if total else "No value is finite"
    return {
        "name": name,
        "histogram": inline(
            plots.histogram(picture),
            f"h{place}",
            f"Histogram of {name}",
            f"{words}. {_grid(picture)}",
        ),
        "words": words,
        "grid": _grid(picture),
        "bins": _bins(found),
        "heat": heat
        and inline(plots.heat(picture), f"m{place}", f"Errors in {name}", _cells(heat)),
        "cells": heat and _cells(heat),
        "extremes": _extremes(heat) if heat else [],
    }


_LINES = {
    "lines": "Lines are the values",
    "band": "The band, too narrow for lines, has the values",
    "limits": "Lines are the limits and the strip shows the density",
}


def _grid(picture: Mapping[str, Any]) -> str:
    """The grid in words."""
    grid = picture["grid"]
    if grid is None:
        return ""
    lines = f"{_LINES[plots.grid_style(picture)]} of the {grid['levels']} codes"
    limits = f"from {grid['low']:.4g} to {grid['high']:.4g}"
    return f"{lines} at the median scale, {grid['scale']:.4g}: {limits}."


def _bins(found: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """The histogram with fewer bins: from, to, count."""
    counts, low = found["counts"], found["low"]
    each = -(-len(counts) // _ROWS)
    width = (found["high"] - low) / len(counts)
    starts = range(0, len(counts), each)
    return [
        (f"{low + width * i:.4g}", f"{low + width * (i + each):.4g}", sum(counts[i : i + each]))
        for i in starts
    ]


def _cells(heat: Mapping[str, Any]) -> str:
    """The heat map in words."""
    height, width = heat["cell"]
    known = sorted(c for row in heat["cells"] for c in row if c is not None)
    if not known:
        return "No error is finite."
    return (
        f"Root mean square error in cells of {height} x {width} weights: least {known[0]:.3g}, "
        f"median {known[len(known) // 2]:.3g}, largest {known[-1]:.3g}."
    )


def _extremes(heat: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The cells with the largest errors: rows, columns, error."""
    height, width = heat["cell"]
    cells = [
        (-value, i, j)
        for i, row in enumerate(heat["cells"])
        for j, value in enumerate(row)
        if value is not None
    ]
    return [
        (
            _span(i, height, heat["rows"]),
            _span(j, width, heat["columns"]),
            f"{-value:.4g}",
        )
        for value, i, j in sorted(cells)[:10]
    ]


def _span(place: int, step: int, size: int) -> str:
    last = min((place + 1) * step, size) - 1
    return str(last) if last == place * step else f"{place * step} to {last}"

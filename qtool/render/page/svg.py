"""A figure as SVG to be put into HTML."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from qtool.render.page.plots import COLORS, style

_FAMILY = re.compile(r"(font: [^;']*)'[^;]*")
_COLOR = re.compile("|".join(COLORS.values()))
_VARIABLES = {color: f"var(--{name})" for name, color in COLORS.items()}
_DROPPED = {
    "metadata",
    "style",
}  # the style is for `*`, and would be the whole page's: see page.css


def inline(figure: Figure, key: str, title: str, description: str) -> Markup:
    """The figure as one <svg>, whose colours are those of the page's theme.

    key: what its ids begin with, which no other figure on the page has. title, description: what
    screen readers say in its place.
    """
    text = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with style():
        figure.savefig(text, format="svg", metadata=metadata)
    root = ElementTree.fromstring(text.getvalue())
    for parent in root.iter():
        for child in [c for c in parent if _local(c.tag) in _DROPPED]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(name): _adapted(_local(name), value, key)
            for name, value in element.attrib.items()
        }
    viewbox = root.attrib["viewBox"]
    root.attrib = {
        "viewBox": viewbox,
        "role": "img",
        "aria-labelledby": f"{key}-title {key}-desc",
        "width": viewbox.split()[2],
        "height": viewbox.split()[3],
    }
    for place, (name, words) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(name, {"id": f"{key}-{name}"})
        element.text = words
        root.insert(place, element)
    return Markup(ElementTree.tostring(root, "unicode", short_empty_elements=False))


def _local(name: str) -> str:
    """A name without its namespace, which HTML does not have."""
    return name.rpartition("}")[2]


def _adapted(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{key}-{value[1:]}"
    if name == "style":
        value = _FAMILY.sub(r"\1sans-serif", value)
        return _COLOR.sub(lambda found: _VARIABLES[found[0]], value)
    return re.sub(r"url\(#", f"url(#{key}-", value)

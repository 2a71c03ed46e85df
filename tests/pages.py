"""Reports to make pages of, and how a page is read."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from command import ok
from numpy.typing import NDArray
from safetensors.numpy import save_file

from qtool.jobs.pictures import pictures
from qtool.jobs.progress import Silent

VOID = {"meta", "link", "input", "wbr", "br", "img"}
# What would run, load or break out if a name got into a page, a picture or a cell as it is.
HOSTILE = [
    "<script>alert(1)</script>.weight",
    '"><img src=x onerror=alert(1)>',
    "</script></style></svg><b>",
    "=cmd|' /C calc'!A0",
    "| a | `b` | [x](http://e.org) ![i](http://e.org/i.png)",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "$\\frac{$ & {{ 7*7 }} {% raw %}",
    "層.0.重み",
    "www.e.org @user #1",
    "+1",
    "-1",
    "@sum",
]


def quantized(
    folder: Path, tensors: dict[str, NDArray[Any]], *options: str, name: str = "weights"
) -> Path:
    """The report of quantizing those tensors."""
    source = folder / f"{name}.safetensors"
    save_file(tensors, source)
    target = folder / f"{name}.q.safetensors"
    ok("quantize", source, "-o", target, "-q", *options)
    return folder / f"{name}.q.report.json"


def weights(*names: str, shape: tuple[int, ...] = (16, 64), seed: int = 0) -> dict[str, Any]:
    """Normal values under those names."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name in names}


def edited(report: Path, name: str, **changes: Any) -> Path:
    """Another report with other values of these keys."""
    data = json.loads(report.read_text(encoding="utf-8")) | changes
    path = report.with_name(name)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def grown(report: Path, count: int) -> Path:
    """The report with its tensors repeated under other names, layer by layer."""
    data = json.loads(report.read_text(encoding="utf-8"))
    records = data["tensors"]
    many = [
        records[i % len(records)] | {"name": f"model.layers.{i // 10}.mlp.part{i % 10}.weight"}
        for i in range(count)
    ]
    return edited(report, "many.report.json", tensors=many)


class Page(HTMLParser):
    """A page of well-nested HTML: its elements as (tag, attributes, text inside)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in VOID:
            self._open.append((tag, text))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, text in self._open:
            text.append(data)

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of all such elements."""
        return ["".join(text).strip() for _, text in self._found(tag, attributes)]

    def attribute(self, tag: str, name: str) -> list[str | None]:
        """The values of an attribute of all such elements that have it."""
        return [a[name] for t, a, _ in self.elements if t == tag and name in a]

    def _found(self, tag: str, attributes: dict[str, str]) -> list[tuple[Any, list[str]]]:
        return [
            (a, text)
            for t, a, text in self.elements
            if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]


def data(path: Path) -> Any:
    """A report."""
    return json.loads(path.read_text(encoding="utf-8"))


def html(report: Path, *options: str | Path) -> Page:
    """The page of a report."""
    return Page(ok("report", report, "-o", "-", *options).out.decode())


def drawn(report: Path, **files: Path | None) -> dict[str, Any]:
    """What is drawn of a report's tensors."""
    given = {"original": None, "quantized": None} | files
    return pictures(data(report), report.parent, progress=Silent(), **given)  # type: ignore[arg-type]

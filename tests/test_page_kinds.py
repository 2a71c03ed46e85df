"""`qtool report` as Markdown, CSV and PNG."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from command import ok, process
from pages import HOSTILE, data, edited, quantized, weights
from PIL import Image

from qtool.render.page.markdown import escaped

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.safetensors"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of two small tensors, int4 in blocks of 32."""
    tensors = weights("a.0.weight", "a.1.weight")
    return quantized(tmp_path, tensors, "--dtype", "int4", "--block-size", "32")


def test_the_markdown(report: Path) -> None:
    found = data(report)
    name = "x|<b>`y`_*[l](http://e.org)"
    found["tensors"][0]["name"] = name
    text = ok("report", edited(report, "md.json", **found), "-o", "-", "--to", "md").out.decode()
    lines = text.splitlines()
    assert lines[:3] == [
        "# weights.q.safetensors",
        "",
        "2 quantized tensors: int4 /32. 8.3 kB became 2.1 kB, 3.91 times smaller.",
    ]
    record = found["tensors"][0]
    clipped = f"{record['clipped_fraction']:.3%}" if record["clipped"] else "0"
    row = (
        r"| x\|\<b\>\`y\`\_\*\[l\](http\://e.org) | int4 /32 | 16x64 "
        f"| {record['sqnr_db']:.2f} | {record['relative_error']:.4f} "
        f"| {record['max_abs_error']:.3g} | {clipped} | 5.00 | 4.1 kB | 640 B |"
    )
    assert row in lines
    header = lines[lines.index(row) - 2 : lines.index(row)]
    assert header == [
        "| tensor | type | shape | SQNR, dB | relative error | max error | clipped | bits "
        "| before | after |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_shows_any_name_as_it_is(name: str, report: Path) -> None:
    found = data(report)
    found["tensors"][0]["name"] = name
    text = ok("report", edited(report, "md.json", **found), "-o", "-", "--to", "md").out.decode()
    (row,) = [line for line in text.splitlines() if line.startswith("| ") and "16x64" in line][:1]
    cell = re.split(r"(?<!\\)\|", row)[1]
    assert len(re.split(r"(?<!\\)\|", row)) == 12
    bare = re.sub(r"\\[^\w\s]", "", cell)  # what is left means something to Markdown
    assert not re.search(r"[`<>*_\[\]|]", bare)
    shown = re.sub(r"\\(?=[^\w\s])", "", cell).replace("&#8203;", "").strip()
    assert shown == ("red" if "red" in name else name)
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1. a", r"1\. a"),
        ("12) a", r"12\) a"),
        ("1.5 a. (b)", "1.5 a. (b)"),
        ("- a - b", r"\- a - b"),
        ("+1", r"\+1"),
        ("# a", r"\#&#8203; a"),
        ("int4: a:b", "int4: a:b"),
        ("a :tada: b", r"a \:tada: b"),
        ("https://a", r"https\://a"),
        ("{{ a }} {% b %} {c}", r"\{{ a }} \{% b %} {c}"),
    ],
)
def test_what_means_something_to_markdown_where_it_stands(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_the_table_of_values_has_every_figure_in_full(report: Path) -> None:
    text = ok("report", report, "-o", "-", "--to", "csv").out.decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    records = data(report)["tensors"]
    assert list(rows[0]) == list(records[0])
    for row, record in zip(rows, records, strict=True):
        for key, value in record.items():
            if value is None:
                assert row[key] == ""
            elif isinstance(value, list):
                assert row[key] == " ".join(map(str, value))
            elif isinstance(value, bool):
                assert row[key] == str(value).lower()
            else:
                assert type(value)(row[key]) == value
    assert text.count("\r\n") == text.count("\n") == 3


def test_no_cell_is_a_formula(report: Path) -> None:
    names = ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", " =1", "a=1", '"', "a,b", "\x1b[0m=1"]
    (record, _) = data(report)["tensors"]
    tensors = [record | {"name": name, "min": -1.5, "=key": "=2"} for name in names]
    changed = edited(report, "formulas.json", tensors=tensors)
    text = ok("report", changed, "-o", "-", "--to", "csv").out.decode()
    rows = list(csv.reader(io.StringIO(text)))
    assert [row[0] for row in rows[1:]] == [
        "'=1+1", "'+1", "'-1", "'@a", "'?=1", "'?=1", "' =1", "a=1", '"', "a,b", "'=1"
    ]  # fmt: skip
    assert (rows[0][-1], rows[1][-1]) == ("'=key", "'=2")
    assert rows[1][rows[0].index("min")] == "-1.5"


def test_settings_that_lie_about_are_not_taken(report: Path, tmp_path: Path) -> None:
    """Neither those in the current folder, which could run LaTeX, nor those of a user."""
    said = {"none": b"", "latex": b"text.usetex: True\nfont.size: 99\nodd: 1\n", "odd": b"\xff\xfe"}
    drawn = {}
    for name, content in said.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "matplotlibrc").write_bytes(content)
        mine = {} if name == "none" else {"MATPLOTLIBRC": str(folder), "MPLBACKEND": "nonsense"}
        arguments = ["report", str(report), "-o", "-", "--to", "png"]
        done = process(*arguments, cwd=folder, env=os.environ | mine)
        assert done.returncode == 0, done.stderr
        drawn[name] = (done.stdout, done.stderr)
    assert drawn["none"] == drawn["latex"] == drawn["odd"]


def test_the_picture(report: Path, tmp_path: Path) -> None:
    target = tmp_path / "overview.png"
    ok("report", report, "-o", target, "-q")
    with Image.open(target) as image:
        assert image.format == "PNG"
        assert image.width == 2000
        assert image.info.get("Software") is None
        pixels = np.asarray(image.convert("RGB"))
    assert (pixels[0, 0] == 255).all()
    colours = set((pixels.astype(np.uint32) @ (1 << 16, 1 << 8, 1)).reshape(-1).tolist())
    assert {0x2A78B8, 0x17212B, 0xFDE725} <= colours  # bars, text, the hottest cell

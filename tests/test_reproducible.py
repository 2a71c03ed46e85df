"""The same bytes every time: outputs, and reports but for the fields that measure time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import three

import qtool

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGE = Path(qtool.__file__).parent
W4 = "--dtype int4 --block-size 32"
# Each writes something, and a report beside it or where it says.
LINES = [
    f"quantize m.safetensors -o a.safetensors {W4} --hash",
    "quantize m.safetensors -o b.npz --preset nvfp4 --rule fc3*:\u00a0dtype=int8",
    "quantize m.safetensors -o c.safetensors --target-bits 5.5 --save-recipe c.toml --hash",
    f"quantize m.safetensors -o d.safetensors {W4} --activations fc1.weight=x.npy",
    f"quantize m.onnx -o e.onnx {W4} --layout matmul-nbits --external-data --hash",
    "quantize m.onnx -o g.onnx --dtype int8 --method entropy",
    "dynamic m.onnx --graph -o h.onnx --hash",
    "dynamic m.safetensors -o i.safetensors --report told.json",
    "quantize big.npy -o j.safetensors --dtype uint4 --block-size 32",
    f"quantize folder -o k {W4} --layout compressed-tensors --hash",
    "quantize m.safetensors -o l.safetensors --dtype int4 --fail-if sqnr_db<1 --strict",
    f"quantize m.safetensors {W4} --dry-run --report planned.json",
]
RUN = """
import sys
from typer.testing import CliRunner
from qtool.cli import app
for line in sys.argv[1:]:
    done = CliRunner().invoke(app, [word.replace("\\xa0", " ") for word in line.split(" ")])
    assert done.exit_code == 0, (line, done.stderr, done.exception)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders in which all was done, in environments that differ."""
    made = []
    for name, seed, jobs in (("one", "0", "1"), ("two/deeper", "17", "3")):
        folder = tmp_path_factory.mktemp("place") / name
        folder.mkdir(parents=True)
        shutil.copy(EXAMPLES / "digits.safetensors", folder / "m.safetensors")
        shutil.copy(EXAMPLES / "digits.onnx", folder / "m.onnx")
        shutil.copy(EXAMPLES / "digits_inputs.npy", folder / "x.npy")
        big = np.random.default_rng(5).standard_normal((1 << 10, 1 << 10), np.float32)
        np.save(folder / "big.npy", big)
        three(folder / "folder")
        subprocess.run(
            [sys.executable, "-c", RUN, *(f"{line} --jobs {jobs}" for line in LINES)],
            cwd=folder,
            env=os.environ | {"PYTHONHASHSEED": seed, "COLUMNS": "80" if seed == "0" else "200"},
            check=True,
            timeout=100,
        )
        made.append(folder)
    return made


def measured(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a schema marks fields as measurements."""
    if isinstance(schema, dict):
        if schema.get("x-measurement"):
            yield path
        for key, inner in schema.items():
            yield from measured(inner, (*path, key))
    elif isinstance(schema, list):
        for inner in schema:
            yield from measured(inner, path)


def schema() -> dict[str, Any]:
    text = (PACKAGE / "report.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def test_the_schema_marks_one_field_as_a_measurement() -> None:
    assert list(measured(schema())) == [("properties", "seconds")]


def test_reports_are_the_same_bytes_but_for_what_is_marked(folders: list[Path]) -> None:
    marked = [path[-1] for path in measured(schema())]
    reports = [sorted(folder.glob("*.json")) for folder in folders]
    names = [[path.name for path in found] for found in reports]
    assert names[0] == names[1]
    assert len(names[0]) == len(LINES)
    for paths in zip(*reports, strict=True):
        texts = []
        for path in paths:
            text = path.read_text(encoding="utf-8")
            told = json.loads(text)
            assert text == json.dumps(told, indent=2) + "\n"
            for name in marked:
                del told[name]
            texts.append(json.dumps(told, indent=2))
        assert texts[0] == texts[1], paths[0].name


def test_outputs_are_the_same_bytes(folders: list[Path]) -> None:
    contents = [
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
            and not path.name.endswith(("report.json", "told.json", "planned.json"))
        }
        for folder in folders
    ]
    assert contents[0].keys() == contents[1].keys()
    differing = [name for name, data in contents[0].items() if contents[1][name] != data]
    assert differing == []
    assert len([name for name in contents[0] if name[0] in "abcdeghijkl"]) > len(LINES)


def test_nothing_tells_where_it_was_made(folders: list[Path]) -> None:
    for folder in folders:
        for path in folder.rglob("*"):
            assert not path.is_file() or str(folder).encode() not in path.read_bytes(), path

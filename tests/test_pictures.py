"""What `qtool report` draws of tensors, from the files that the report names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ok, refused, stored, unpacked
from pages import data, drawn, edited, html, quantized, weights
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.safetensors"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of two small tensors, int4 in blocks of 32."""
    tensors = weights("a.0.weight", "a.1.weight")
    return quantized(tmp_path, tensors, "--dtype", "int4", "--block-size", "32")


def test_the_histogram_the_grid_and_the_errors_are_those_of_the_files(report: Path) -> None:
    original = stored(report.with_name("weights.safetensors"))
    codes = stored(report.with_name("weights.q.safetensors"))
    found = drawn(report)
    assert found["notes"] == []
    worst = sorted(data(report)["tensors"], key=lambda record: record["sqnr_db"])
    assert [p["name"] for p in found["tensors"]] == [record["name"] for record in worst]
    for picture in found["tensors"]:
        name = picture["name"]
        x, scale = original[name], codes[f"{name}.scale"]
        histogram = picture["histogram"]
        assert (histogram["low"], histogram["high"]) == (x.min(), x.max())
        counts, _ = np.histogram(x.astype(np.float64), 80, (x.min(), x.max()))
        assert histogram["counts"] == counts.tolist()
        median = float(np.sort(scale.reshape(-1))[scale.size // 2 - 1])
        grid = picture["grid"]
        assert grid["scale"] == median
        assert grid["values"] == [np.float32(k) * np.float32(median) for k in range(-8, 8)]
        y = np.array(unpacked(codes[name], "int4", 16, 64), np.float32)
        errors = x.astype(np.float64) - y * np.repeat(scale, 32, axis=1)
        blocks = np.square(errors).reshape(16, 2, 32).mean(axis=2)
        assert picture["heat"]["cell"] == [1, 32]
        np.testing.assert_allclose(picture["heat"]["cells"], np.sqrt(blocks), rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "options", "cell", "cells"),
    [
        ((300, 10), ("--dtype", "int8"), [3, 1], (100, 10)),
        ((64, 20), ("--dtype", "int4", "--block-size", "16", "--axis", "0"), [16, 1], (4, 20)),
        ((6, 8, 3, 3), ("--dtype", "int4", "--block-size", "4", "--axis", "1"), [1, 36], (6, 2)),
        ((2, 4, 32), ("--dtype", "int4", "--block-size", "16", "--axis", "2"), [1, 16], (8, 2)),
        ((32, 64), ("--dtype", "int8", "--tile", "16x16"), [16, 16], (2, 4)),
        ((4, 4096), ("--dtype", "int4", "--block-size", "16"), [1, 32], (4, 128)),
        ((4, 50), ("--dtype", "int4", "--block-size", "16"), [1, 16], (4, 4)),
    ],
)  # fmt: skip
def test_cells_are_whole_blocks(
    shape: tuple[int, ...],
    options: tuple[str, ...],
    cell: list[int],
    cells: tuple[int, int],
    tmp_path: Path,
) -> None:
    report = quantized(tmp_path, weights("w", shape=shape), *options)
    (picture,) = drawn(report)["tensors"]
    assert picture["heat"]["cell"] == cell
    assert np.shape(picture["heat"]["cells"]) == cells


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "int2", "--block-size", "16"),
        ("--dtype", "uint4", "--block-size", "32"),
        ("--dtype", "float8e4m3fn"),
        ("--dtype", "int16"),
        ("--preset", "nvfp4"),
        ("--preset", "mxfp4"),
        ("--preset", "mxfp6-e3m2"),
        ("--preset", "w4a16", "--block-size", "32", "--layout", "compressed-tensors"),
        ("--preset", "nvfp4", "--layout", "modelopt"),
        ("--preset", "w4a16-asym", "--block-size", "32", "--layout", "mlx"),
    ],
    ids=" ".join,
)
def test_every_layout_can_be_drawn(options: tuple[str, ...], tmp_path: Path) -> None:
    report = quantized(tmp_path, weights("w.weight", shape=(32, 64)), *options)
    found = drawn(report)
    assert found["notes"] == []
    (picture,) = found["tensors"]
    total = np.mean(np.square(picture["heat"]["cells"]))
    np.testing.assert_allclose(total, data(report)["tensors"][0]["mse"], rtol=1e-6)
    bits = {"int2": 4, "uint4": 16, "int16": 65536}.get(options[1])
    assert bits is None or picture["grid"]["levels"] == bits
    html(report)


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "int8"),
        ("--dtype", "uint4", "--block-size", "32", "--layout", "matmul-nbits"),
        ("--dtype", "int4", "--block-size", "128", "--layout", "matmul-nbits"),
        ("--dtype", "int4", "--block-size", "32"),
    ],
    ids=" ".join,
)
def test_onnx_models_can_be_drawn(options: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "q.onnx"
    ok("quantize", ROOT / "examples" / "digits.onnx", "-o", target, "-q", *options)
    report = tmp_path / "q.report.json"
    found = drawn(report)
    assert found["notes"] == []
    told = {record["name"]: record["mse"] for record in data(report)["tensors"]}
    for picture in found["tensors"]:
        total = np.mean(np.square(picture["heat"]["cells"]))
        np.testing.assert_allclose(total, told[picture["name"]], rtol=1e-6)


def test_a_model_is_drawn_in_bounded_memory(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from qtool.jobs.pictures import pictures
        from qtool.jobs.progress import Silent
        from qtool.report import read_report
        report = read_report(Path(sys.argv[1]))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pictures(report, Path(), None, None, Silent())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    report = quantized(tmp_path, weights("w", shape=(16384, 1024)), "--dtype", "int8")  # 64 MiB
    command = [sys.executable, "-c", re.sub("(?m)^ {8}", "", code), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 << 10  # KiB


def test_without_the_files_the_page_says_what_is_missing(report: Path) -> None:
    full = html(report)
    report.with_name("weights.q.safetensors").unlink()
    page = html(report)
    (note,) = [text for text in page.all("li") if "No grids" in text]
    assert note.endswith("weights.q.safetensors is not there. Name the file with --quantized.")
    assert page.all("h3", class_="name") or "a.0.weight" in page.all("h3")
    assert len(page.all("svg")) == 4
    report.with_name("weights.safetensors").unlink()
    page = html(report)
    assert "No histograms: " in page.all("body")[0]
    assert len(page.all("svg")) == 2
    assert page.all("th", scope="row") == full.all("th", scope="row")
    err = ok("report", report, "-o", "-").err
    assert err.count("warning: No ") == 2


def test_files_are_looked_for_beside_the_report(report: Path, tmp_path: Path) -> None:
    found = data(report)
    for key in ("source", "output"):
        found[key]["name"] = Path(found[key]["name"]).name
    moved = edited(report, "relative.json", **found)
    assert drawn(moved) == drawn(report)
    assert len(drawn(moved)["tensors"]) == 2


def test_files_can_be_named(report: Path, tmp_path: Path) -> None:
    whole = drawn(report)
    folder = tmp_path / "moved"
    folder.mkdir()
    files = {}
    for option, name in (("original", "weights"), ("quantized", "weights.q")):
        files[option] = folder / f"{option}.safetensors"
        report.with_name(f"{name}.safetensors").rename(files[option])
    assert drawn(report)["tensors"] == []
    assert drawn(report, **files) == whole
    page = html(report, "--original", files["original"], "--quantized", files["quantized"])
    assert len(page.all("svg")) == 6
    missing = tmp_path / "none.safetensors"
    assert str(missing) in refused("report", report, "-o", "-", "--original", missing)
    line = refused("report", report, "-o", "-", "--to", "md", "--original", missing, code=2)
    assert line == "--original: .md has no pictures; it is for html, png"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.0.weight": np.ones((16, 64), np.float32)}, "a.1.weight cannot be drawn in full"),
        (weights("a.0.weight", "a.1.weight", shape=(64, 16)), "it is [64, 16] in"),
        (weights("a.0.weight", "a.1.weight", seed=1), "its mean squared error is"),
        ({n: np.ones((16, 64), np.int64) for n in ("a.0.weight", "a.1.weight")}, "as int64"),
    ],
)
def test_another_file_is_told_from_the_source(
    tensors: dict[str, Any], words: str, report: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    page = html(report, "--original", other)
    assert any(words in text for text in page.all("li"))
    assert len(page.all("svg")) == 2
    assert page.all("th", scope="row") == ["a.0.weight", "a.1.weight"]


def test_a_source_that_has_changed_is_not_drawn(report: Path) -> None:
    source = report.with_name("weights.safetensors")
    save_file(weights("a.0.weight", "a.1.weight", "b"), source)
    (note,) = drawn(report)["notes"]
    assert "is not the file of the report any more: it has" in note
    source.write_bytes(b"not weights at all")
    (note,) = drawn(report)["notes"]
    assert note.startswith(f"No histograms: {source}: ")

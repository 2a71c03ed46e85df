"""Tensors of rank 0 and 8, names of 10 kB, and rows of 10,000 scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ok, refused, report
from numpy.typing import NDArray
from onnx import helper
from onnx_models import initializer, model, save
from safetensors.numpy import save_file

import qtool
from qtool import engine

Array = NDArray[Any]
RNG = np.random.default_rng(4)
DEEP = RNG.standard_normal((2, 1, 3, 1, 2, 1, 4, 6)).astype(np.float32)
SCALAR = np.array(-1.25, np.float32)


def onnx_file(path: Path, tensors: Mapping[str, Array]) -> Path:
    """A model that adds something to each of them."""
    names = dict(enumerate(tensors))
    nodes = [helper.make_node("Add", [f"x{i}", name], [f"y{i}"]) for i, name in names.items()]
    return save(
        model(
            nodes, [initializer(name, x) for name, x in tensors.items()],
            inputs={f"x{i}": tensors[name].shape for i, name in names.items()},
            outputs=[f"y{i}" for i in names],
        ),
        path,
    )  # fmt: skip


def npz_file(path: Path, tensors: Mapping[str, Array]) -> Path:
    np.savez(path, **tensors)  # type: ignore[arg-type]
    return path


def safetensors_file(path: Path, tensors: Mapping[str, Array]) -> Path:
    save_file(dict(tensors), path)
    return path


FILES: dict[str, Callable[[Path, Mapping[str, Array]], Path]] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "onnx": onnx_file,
}


def read(path: Path, name: str) -> Array:
    """One tensor of a file, as qtool reads it."""
    with closing(qtool.open(path)) as source:
        return source.read(name)


def reconstructed(x: Array, axis: int | None, block: int | None, qmax: int) -> Array:
    """x as symmetric codes with absmax / qmax as scales, and back."""
    if axis is None or not x.ndim:
        groups = x.reshape(1, -1)
    else:
        moved = np.moveaxis(x, axis, -1 if block else 0)
        groups = moved.reshape(-1, block) if block else moved.reshape(moved.shape[0], -1)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(qmax)).astype(np.float32)
    found = np.clip(np.rint(groups / scale), -qmax - 1, qmax) * scale
    if axis is None or not x.ndim:
        return found.reshape(x.shape)
    return np.moveaxis(found.reshape(moved.shape), -1 if block else 0, axis)


WAYS = [(0, None), (4, None), (7, 3), (2, 3)]


@pytest.mark.parametrize(("axis", "block"), WAYS)
@pytest.mark.parametrize("container", FILES)
def test_rank_8(container: str, axis: int, block: int | None, tmp_path: Path) -> None:
    source = FILES[container](tmp_path / f"s.{container}", {"w": DEEP})
    options = ["--axis", str(axis), *(["--block-size", str(block)] if block else [])]
    options += ["--include", "w", "--method", "absmax"]
    target, back = tmp_path / f"q.{container}", tmp_path / f"d.{container}"
    ok("quantize", source, "-o", target, "--dtype", "int8", *options)
    ok("verify", source, target)
    ok("dequantize", target, "-o", back)
    wanted = reconstructed(DEEP, axis, block, 127)
    assert (read(back, "w") == wanted).all()
    # a model's own stored tensors are listed, which are codes
    listed = back if container == "onnx" else target
    told = ok("inspect", listed, "--stats", "--json").json["tensors"]
    [row] = [row for row in told if row["name"] == "w"]
    assert (row["shape"], row["stats"]["max"]) == (list(DEEP.shape), wanted.max())


@pytest.mark.parametrize("container", FILES)
@pytest.mark.parametrize("x", [DEEP, SCALAR], ids=["deep", "scalar"])
def test_rank_8_and_0_without_an_axis(container: str, x: Array, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", x)
    target, back = tmp_path / "q.safetensors", tmp_path / "d.safetensors"
    ok("quantize", tmp_path / "w.npy", "-o", target, "--dtype", "int8", "--method", "absmax")
    ok("verify", tmp_path / "w.npy", target)
    ok("dequantize", target, "-o", back)
    assert (read(back, "w") == reconstructed(x, None, None, 127)).all()
    assert read(back, "w").shape == x.shape
    source = FILES[container](tmp_path / f"s.{container}", {"w": x})
    made = ok("dynamic", source, "-o", tmp_path / f"y.{container}", "--include", "w", "--json").json
    [record] = made["tensors"]
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    assert (record["shape"], record["min"], record["max"]) == (list(x.shape), x.min(), x.max())
    assert record["scale_max"] == (high - low) / np.float32(255)
    for kind in ("html", "png") if container == "npz" else ():
        ok("report", tmp_path / "q.report.json", "-o", tmp_path / f"r.{kind}")
    [listed] = ok("inspect", source, "--stats", "--json").json["tensors"]
    assert (listed["shape"], listed["stats"]["min"]) == (list(x.shape), x.min())


@pytest.mark.parametrize("options", [("--axis", "0"), ("--block-size", "2"), ("--tile", "2x2")])
def test_rank_0_has_no_axis(options: tuple[str, str], tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", SCALAR)
    refused("quantize", tmp_path / "w.npy", "--dtype", "int8", *options)


LONG = ["layer." * 1706 + "w", "x" * 10240, "\u00fc" * 5120, "a b" * 3413]


@pytest.mark.parametrize("container", FILES)
def test_names_of_10_kb(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    tensors = {name: RNG.standard_normal((8, 16)).astype(np.float32) for name in LONG}
    source = FILES[container](Path(f"s.{container}"), tensors)
    quantized, back = f"q.{container}", f"d.{container}"
    commands: list[list[str | Path]] = [
        ["quantize", source, "-o", quantized, "--dtype", "int8", "--axis", "0", "--include", "*"],
        ["quantize", source, "--dtype", "int8", "--include", "*", "--dry-run"],
        ["inspect", source, "--stats"],
        ["inspect", quantized],
        ["verify", source, quantized],
        ["dequantize", quantized, "-o", back],
        ["dynamic", source, "-o", f"y.{container}", "--include", "*"],
        *(["report", "q.report.json", "-o", f"r.{kind}"] for kind in ("html", "md", "csv")),
    ]
    for command in commands:
        done = ok(*command)
        rows = [row for row in (done.out.decode() + done.err).splitlines() if "\u2026" in row]
        assert len(rows) >= (len(LONG) if command[0] in ("quantize", "inspect", "verify") else 0)
        assert max(map(len, rows), default=0) <= 80, command
    for name in LONG:
        assert np.abs(read(Path(back), name) - tensors[name]).max() < 0.02
    text = Path("r.html").read_text(encoding="utf-8")
    assert all(name in text for name in LONG)
    assert len(text) < 1_000_000
    assert {record["name"] for record in report(Path(quantized))["tensors"]} == set(LONG)


def test_an_error_about_a_name_of_10_kb_is_one_line(tmp_path: Path) -> None:
    x = np.full((2, 4), np.nan, np.float32)
    source = safetensors_file(tmp_path / "s.safetensors", {LONG[0]: x})
    assert refused("quantize", source, "--dtype", "int8").startswith(f"tensor {LONG[0]}: nan at")
    refused("quantize", source, "--dtype", "int8", "--include", LONG[1])


@pytest.mark.parametrize("uses_kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize(("block", "dtype", "qmax"), [(1, "int8", 127), (2, "int4", 7)])
def test_10_000_scales_per_row(
    block: int, dtype: str, qmax: int, uses_kernels: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "kernels_pay", lambda elements: uses_kernels)
    x = RNG.standard_normal((3, 10_000 * block)).astype(np.float32)
    np.save(tmp_path / "w.npy", x)
    sources = [tmp_path / "w.npy"]
    if block > 1:  # else a model would not get smaller
        sources.append(onnx_file(tmp_path / "w.onnx", {"w": x}))
    options = ["--axis", "1", "--block-size", str(block), "--method", "absmax", "--include", "w"]
    options += ["--dtype", dtype, "--json"]
    for source, container in zip(sources, ("safetensors", "onnx"), strict=False):
        target, back = tmp_path / f"q.{container}", tmp_path / f"d.{container}"
        [record] = ok("quantize", source, "-o", target, *options).json["tensors"]
        assert record["num_scales"] == 30_000
        ok("verify", source, target)
        ok("dequantize", target, "-o", back)
        assert (read(back, "w") == reconstructed(x, 1, block, qmax)).all()
    ok("report", tmp_path / "q.report.json", "-o", tmp_path / "q.html")
    assert (tmp_path / "q.html").stat().st_size < 1_000_000

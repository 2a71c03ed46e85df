"""qtool calibrate: scales from batches, held against NumPy and onnxruntime, and used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector
from safetensors.numpy import save_file

from qtool import engine
from qtool.jobs import batches
from tests.command import leftovers, ok, process, refused, report, stored

Array = NDArray[Any]


def activations(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def saved(tmp_path: Path, *arrays: Array) -> list[Path]:
    """Arrays as a0.npy, a1.npy, ..."""
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"a{number}.npy", array)
    return [tmp_path / f"a{number}.npy" for number in range(len(arrays))]


def calibrated(tmp_path: Path, *args: str | Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The scales, and the first tensor of --json."""
    dst = tmp_path / "s.safetensors"
    done = ok("calibrate", *args, "-o", dst, "--force", "--json")
    return stored(dst), done.json["tensors"][0]


def uint_parameters(low: Any, high: Any, steps: int) -> tuple[Array, Array]:
    """Scale and zero point by the formula of DynamicQuantizeLinear, rounded once."""
    low, high = np.minimum(low, 0).astype(np.float64), np.maximum(high, 0).astype(np.float64)
    scale = ((high - low) / steps).astype(np.float32)
    return scale, np.rint(-low / scale.astype(np.float64)).astype(np.uint8)


def test_the_range_of_all_batches_counts(tmp_path: Path) -> None:
    a, b = activations(0, 30, 8), activations(1, 50, 8) * 3
    both = np.concatenate([a, b])
    found, row = calibrated(tmp_path, *saved(tmp_path, a, b), "--dtype", "uint8")
    scale, zero_point = uint_parameters(both.min(), both.max(), 255)
    assert found["a0.scale"].tobytes() == scale.tobytes()
    assert found["a0.zero_point"].tobytes() == zero_point.tobytes()
    assert set(found) == {"a0.scale", "a0.zero_point"}
    x_hat = (np.clip(np.rint(both / scale) + zero_point, 0, 255) - zero_point) * scale
    noise = np.square(both.astype(np.float64) - x_hat).sum()
    sqnr = 10 * np.log10(np.square(both.astype(np.float64)).sum() / noise)
    assert row["sqnr_db"] == pytest.approx(sqnr, rel=1e-9)
    assert (row["name"], row["batches"], row["elements"]) == ("a0", 2, both.size)
    assert (row["min"], row["max"], row["clipped"]) == (both.min(), both.max(), 0)


@pytest.mark.parametrize("method", ["absmax", "percentile:99.5"])
def test_symmetric_scales_per_channel(tmp_path: Path, method: str) -> None:
    a, b = activations(2, 3, 7, 6), activations(3, 2, 11, 6)
    rows = np.concatenate([a.reshape(-1, 6), b.reshape(-1, 6)]).astype(np.float64)
    bound = np.abs(rows).max(axis=0)
    if method != "absmax":
        bound = np.percentile(np.abs(rows), 99.5, axis=0)
    paths = saved(tmp_path, a, b)
    args = ("--dtype", "int8", "--axis", "-1", "--method", method)
    found, row = calibrated(tmp_path, *paths, *args)
    assert found["a0.scale"].tobytes() == (bound / 127).astype(np.float32).tobytes()
    assert (row["granularity"], row["axis"], row["num_scales"]) == ("per_axis", -1, 6)
    clipped = np.abs(np.rint(rows / found["a0.scale"])) > 128
    assert row["clipped"] == pytest.approx(clipped.sum(), abs=2)


def test_images_have_their_channels_along_axis_1(tmp_path: Path) -> None:
    a, b = activations(4, 2, 3, 4, 5), activations(5, 6, 3, 4, 5)
    paths = saved(tmp_path, a, b)
    found, _ = calibrated(tmp_path, *paths, "--dtype", "int8", "--axis", "1")
    bound = np.abs(np.concatenate([a, b])).max(axis=(0, 2, 3)).astype(np.float64)
    assert found["a0.scale"].tobytes() == (bound / 127).astype(np.float32).tobytes()
    np.save(paths[1], b[..., :3])
    line = refused("calibrate", *paths, "--dtype", "int8", "--axis", "1")
    assert "differ along axis 1 or behind it" in line
    ok("calibrate", *paths, "--dtype", "int8")


def test_entropy_is_onnxruntimes_on_the_same_histogram(tmp_path: Path) -> None:
    a, b = (np.abs(activations(n, 400, 25)) - np.float32(0.5) for n in (6, 7))
    both = np.concatenate([a, b]).reshape(-1)
    found, row = calibrated(
        tmp_path, *saved(tmp_path, a, b), "--dtype", "uint4", "--method", "entropy"
    )
    t = np.abs(both).max()
    counts, edges = np.histogram(both, 257, range=(-t, t))
    given = (counts, edges, both.min(), both.max(), t)
    collector = HistogramCollector("entropy", False, 257, 16, 99.9, "same")
    scale, zero_point = uint_parameters(*collector.get_entropy_threshold(given, 16), 15)
    assert found["a0.scale"] == pytest.approx(scale, rel=1e-6)
    assert (found["a0.zero_point"], found["a0.zero_point"].dtype) == (zero_point, np.uint8)
    assert row["clipped"] > 0


@pytest.mark.parametrize("axis", [None, 1])
def test_mse_has_the_least_error_over_all_batches(tmp_path: Path, axis: int | None) -> None:
    arrays = [activations(30 + i, 60, 5) * (1 + i) for i in range(3)]
    args = ("--dtype", "int4", *(() if axis is None else ("--axis", str(axis))))
    found, _ = calibrated(tmp_path, *saved(tmp_path, *arrays), *args)
    columns = np.concatenate(arrays).astype(np.float64)
    groups = [columns.reshape(-1)] if axis is None else list(columns.T)
    for values, scale in zip(groups, found["a0.scale"].reshape(-1).tolist(), strict=True):

        def error(s: float, values: Array = values) -> float:
            return float(np.square(np.clip(np.rint(values / s), -8, 7) * s - values).sum())

        absmax = np.abs(values).max() / 7
        best = min(error(absmax * k / 1000) for k in range(50, 1200))
        assert error(scale) <= best * 1.02
        assert error(scale) < error(absmax)


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "uint8", "--method", "entropy"),
        ("--dtype", "int4", "--method", "percentile:99", "--asymmetric"),
        ("--dtype", "float8e4m3fn", "--scale-dtype", "float16"),
        ("--dtype", "int8", "--axis", "1", "--narrow-range"),
    ],
)
def test_quantize_takes_what_is_written(tmp_path: Path, options: tuple[str, ...]) -> None:
    a = activations(8, 100, 12)
    paths = saved(tmp_path, a, activations(9, 80, 12))
    _, row = calibrated(tmp_path, paths[0], *options)
    shared = [o for o in options if o not in ("--method", "entropy", "percentile:99")]
    shared = [o for o in shared if o != "--asymmetric"] + ["--precision", "float32"]
    scales = ("--scale", tmp_path / "s.safetensors")
    for path in paths:  # a batch by any name
        ok("quantize", path, *shared, *scales, "-o", tmp_path / "q.safetensors", "--force")
    ok("quantize", paths[0], *shared, *scales, "-o", tmp_path / "q.safetensors", "--force")
    again = report(tmp_path / "q.safetensors")["tensors"][0]
    for figure in ("sqnr_db", "clipped", "scale_min", "scale_max", "max_abs_error", "zero_point"):
        assert again[figure] == row[figure]


def test_files_of_names_and_bare_arrays(tmp_path: Path) -> None:
    x, h = activations(10, 20, 4), activations(11, 9, 3)
    np.savez(tmp_path / "b.npz", x=x, ids=np.arange(3))
    save_file({"x": x * 2, "h": h}, str(tmp_path / "c.safetensors"))
    np.save(tmp_path / "d.npy", h * 5)
    np.save(tmp_path / "e.npy", h * 7)
    files = [tmp_path / "b.npz", tmp_path / "c.safetensors", f"h={tmp_path / 'd.npy'}"]
    args = ("--dtype", "int8", "-o", tmp_path / "s.safetensors", "--force", "--json")
    done = ok("calibrate", *files, tmp_path / "e.npy", *args).json
    assert [(t["name"], t["batches"]) for t in done["tensors"]] == [("x", 2), ("h", 2), ("e", 1)]
    assert done["skipped"] == [{"name": "ids", "reason": "int64 is no source type"}]
    found = stored(tmp_path / "s.safetensors")
    for name, most in (("x", np.abs(x).max() * 2), ("h", np.abs(h).max() * 5)):
        assert found[f"{name}.scale"] == (np.float64(most) / 127).astype(np.float32)
    done = ok("calibrate", *files, "--include", "h", "--exclude", "z", *args).json
    assert [t["name"] for t in done["tensors"]] == ["h"]
    assert done["warnings"] == ["pattern 'z' matches no tensor"]


def test_the_scale_has_the_type_of_the_batches(tmp_path: Path) -> None:
    a = activations(12, 10, 3)
    for dtype, expected in (
        (np.float16, np.float16),
        (np.float64, np.float32),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ):
        paths = saved(tmp_path, a.astype(dtype))
        raw = ("--source-dtype", "bfloat16") if dtype is ml_dtypes.bfloat16 else ()
        found, _ = calibrated(tmp_path, *paths, "--dtype", "int8", *raw)
        assert found["a0.scale"].dtype == expected
    mixed = saved(tmp_path, a, a.astype(np.float16))
    assert calibrated(tmp_path, *mixed, "--dtype", "int8")[0]["a0.scale"].dtype == np.float32


@pytest.mark.parametrize("method", ["absmax", "mse", "entropy", "percentile:99.9"])
@pytest.mark.parametrize("container", ["npy", "npz"])
@pytest.mark.parametrize("axis", [(), ("--axis", "1"), ("--axis", "0")])
def test_pieces_and_kernels_make_no_difference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    container: str,
    axis: tuple[str, ...],
    method: str,
) -> None:
    arrays = [activations(20 + i, 40, 30) for i in range(9)]
    paths = saved(tmp_path, *arrays)
    if container == "npz":
        for path, array in zip(paths, arrays, strict=True):
            np.savez(path.with_suffix(".npz"), a0=array)
        paths = [path.with_suffix(".npz") for path in paths]
    args = (*paths, "--dtype", "int4", "--method", method, *axis)

    def result(*more: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        found, row = calibrated(tmp_path, *args, *more)
        return {name: array.tobytes() for name, array in found.items()}, row

    plain = result()
    monkeypatch.setattr(batches, "_PIECE", 701)
    assert result() == plain
    monkeypatch.setattr(engine, "kernels_pay", lambda _: True)
    for jobs in ("1", "3"):
        assert result("--jobs", jobs) == plain


def test_nan_and_inf(tmp_path: Path) -> None:
    a, b = activations(13, 10, 4), activations(14, 10, 4)
    b[3, 2], b[4, 1] = np.nan, np.inf
    paths = saved(tmp_path, a, b)
    line = refused("calibrate", *paths, "--dtype", "uint8", "-o", tmp_path / "s.safetensors")
    assert line.startswith(f"tensor a0: {paths[1]} holds values that are not finite")
    assert sorted(os.listdir(tmp_path)) == ["a0.npy", "a1.npy"]
    found, row = calibrated(tmp_path, *paths, "--dtype", "uint8", "--nonfinite", "allow")
    numbers = np.concatenate([a, np.where(np.isfinite(b), b, 0)])
    assert found["a0.scale"] == uint_parameters(numbers.min(), numbers.max(), 255)[0]
    assert (row["nan_count"], row["inf_count"]) == (1, 1)


def test_it_works_in_a_pipe(tmp_path: Path) -> None:
    [path] = saved(tmp_path, activations(15, 10, 4))
    plain, _ = calibrated(tmp_path, path, "--dtype", "int8")
    done = ok("calibrate", "x=-", "--dtype", "int8", "-o", "-", stdin=path.read_bytes())
    assert stored(done.out)["x.scale"] == plain["a0.scale"]


def test_many_files_are_not_open_at_once(tmp_path: Path) -> None:
    paths = saved(tmp_path, *(np.full((2, 3), i, np.float32) for i in range(40)))
    for path in paths:
        np.savez(path.with_suffix(".npz"), x=np.load(path))
    names = [path.with_suffix(".npz").name for path in paths]
    command = ["calibrate", *names, "--dtype", "int8", "-o", "s.safetensors"]
    limited = f"ulimit -n 24; exec {os.sys.executable} -m qtool {' '.join(command)}"  # type: ignore[attr-defined]
    assert os.waitstatus_to_exitcode(os.system(f"cd {tmp_path} && {limited} 2>err")) == 0
    assert stored(tmp_path / "s.safetensors")["x.scale"] == (np.float64(39) / 127).astype("f4")


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["a0.npy"], 2, "--dtype: no type to quantize to"),
        (
            ["a0.npy", "--dtype", "int8", "-o", "s.npz"],
            2,
            "s.npz: safetensors cannot be written as npz; end its name in .safetensors",
        ),
        (["a0.npy", "--dtype", "int8", "--method", "best"], 2, "'best' is unknown"),
        (["a0.npy", "--dtype", "int8", "--axis", "2"], 1, "axis: 2 is out of range for rank 2"),
        (["none.npy", "--dtype", "int8"], 1, "cannot be read: No such file"),
        (["n=two.npz", "--dtype", "int8"], 1, "holds 2 arrays, n is the name of one"),
        (["ids.npy", "--dtype", "int8"], 1, "nothing to calibrate: int64 is no source type"),
        (
            ["two.npz", "--dtype", "int8", "--include", "x*"],
            1,
            "two.npz: nothing to calibrate: not included; its arrays are ",
        ),
        (["empty.npy", "--dtype", "int8"], 1, "tensor empty: has no values"),
        (
            ["a0.npy", "--dtype", "int8", "-o", "a0.npy"],
            2,
            "a0.npy: safetensors cannot be written as npy",
        ),
        (["m.onnx", "--dtype", "int8"], 1, "is onnx, which holds no activations"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, activations(16, 4, 3))
    np.savez("two.npz", a=np.ones(3, np.float32), b=np.ones(3, np.float32))
    np.save("ids.npy", np.arange(4))
    np.save("empty.npy", np.ones((0, 3), np.float32))
    digits = Path(__file__).parents[1] / "examples" / "digits.onnx"
    Path("m.onnx").write_bytes(digits.read_bytes())
    before = sorted(os.listdir())
    assert line in refused("calibrate", *args, code=code)
    assert sorted(os.listdir()) == before


def test_a_file_of_scales_is_whole_or_as_it_was(tmp_path: Path) -> None:
    paths = saved(tmp_path, activations(17, 4, 3))
    ok("calibrate", *paths, "--dtype", "int8")
    dst = tmp_path / "a0.scales.safetensors"
    before = dst.read_bytes()
    assert "exists already" in refused("calibrate", *paths, "--dtype", "uint8")
    assert dst.read_bytes() == before
    assert leftovers(tmp_path) == []
    done = process("calibrate", paths[0], "--dtype", "int8", "--force")
    assert done.returncode == 0
    assert b"int8" in done.stderr
    assert dst.read_bytes() == before


def test_the_table_has_ranges_scales_and_what_they_cost(tmp_path: Path) -> None:
    x = np.array([[-1, 2], [3, 1.27]], np.float32)
    np.savez(tmp_path / "b.npz", x=x, n=np.arange(3))
    args = (tmp_path / "b.npz", "--dtype", "int8", "-o", tmp_path / "s.safetensors", "--force")
    lines = ok("calibrate", *args, "--exclude", "z").err.splitlines()
    assert lines[0].split() == ["tensor", "type", "values", "scale", "clipped", "SQNR"]
    assert lines[1].split()[:6] == ["x", "int8", "-1", "to", "3", "0.02362"]
    assert lines[2] == "left alone: 1 tensor: int64 is no source type"
    assert lines[3] == "warning: pattern 'z' matches no tensor"
    assert lines[4].startswith(f"{tmp_path / 's.safetensors'}: scales of 1 tensor, ")
    per_axis = ok("calibrate", *args, "--axis", "1", "--method", "percentile:40").err
    assert "0.0123 to 0.01417" in per_axis
    warning = "warning: pattern 'z' matches no tensor\n"
    assert ok("calibrate", *args, "--exclude", "z", "--quiet").err == warning

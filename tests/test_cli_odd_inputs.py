"""Inputs that are allowed and seldom thought of: whole arrays, odd scales, mixed files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command import PYTHON, float32, int8, ok, process, qtool, refused, stored, uint8
from safetensors.numpy import save_file


@pytest.mark.parametrize("container", ["safetensors", "npz"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("options", "codes", "zero"),
    [
        pytest.param(["--dtype", "uint8"], [0, 85, 170, 255], 85, id="uint8"),
        pytest.param(["--dtype", "uint16"], [0, 21845, 43690, 65535], 21845, id="uint16"),
        pytest.param(["--dtype", "int8", "--asymmetric"], [-128, -43, 42, 127], -43, id="int8"),
        pytest.param(["--dtype", "uint8", "--method", "percentile:100"], [0, 85, 170, 255], 85,
                     id="percentile"),
    ],
)  # fmt: skip
def test_a_whole_array_has_one_zero_point(
    options: list[str], codes: list[int], zero: int, shape: tuple[int, ...], container: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    x = float32([-1, 0, 1, 2])[: int(np.prod(shape))].reshape(shape)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / f"y.{container}"
    ok("quantize", tmp_path / "x.npy", "-o", out, *options)
    tensors = stored(out) if container == "safetensors" else dict(np.load(out))
    restored = (tensors["x"].astype(float) - tensors["x.zero_point"]) * tensors["x.scale"]
    assert tensors["x.zero_point"].shape == ()
    assert np.allclose(restored, x, atol=1e-2)
    if x.size == 4:
        assert (tensors["x"].reshape(-1).tolist(), int(tensors["x.zero_point"])) == (codes, zero)


def test_requantizing_one_tensor_keeps_the_others_as_they_are_quantized(tmp_path: Path) -> None:
    source, first = tmp_path / "m.safetensors", tmp_path / "q.safetensors"
    w = float32([[1, -1, 0.5, 0.25]] * 4)
    save_file({"a": w, "b": 2 * w, "bias": w[0]}, source)
    ok("quantize", source, "--dtype", "int8", "-o", first)
    ok("quantize", first, "--requantize", "--dtype", "int4", "--include", "b", "--axis", "0",
       "-o", tmp_path / "r.safetensors")  # fmt: skip
    before, after = stored(first), stored(tmp_path / "r.safetensors")
    for name in ("a", "a.scale", "bias"):
        assert after[name].tobytes() == before[name].tobytes(), name
    assert after["b"].tolist() == uint8([0x97, 0x24] * 4).tolist()
    ok("dequantize", tmp_path / "r.safetensors", "-o", tmp_path / "d.safetensors")
    restored = stored(tmp_path / "d.safetensors")
    assert restored["a"].tolist() == (before["a"] * before["a.scale"][:, None]).tolist()
    assert sorted(restored) == ["a", "b", "bias"]


@pytest.mark.parametrize("path", ["{folder}/y.safetensors", "sub/../y.safetensors", "link"])
def test_a_report_is_never_written_over_its_output(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", float32([1, 2]))
    Path("sub").mkdir()
    Path("link").symlink_to("y.safetensors")
    report = path.format(folder=tmp_path)
    line = refused("quantize", "x.npy", "--dtype", "int8", "-o", "y.safetensors",
                   "--report", report)  # fmt: skip
    assert line.endswith("is also y.safetensors; choose another name")
    assert not Path("y.safetensors").exists()


def test_an_input_that_holds_scales_is_never_a_target(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([1, 2]))
    save_file({"x.scale": float32(1)}, tmp_path / "s.safetensors")
    scales = (tmp_path / "s.safetensors").read_bytes()
    arguments = ["quantize", tmp_path / "x.npy", "--dtype", "int8", "--force"]
    given = ["--scale", tmp_path / "s.safetensors"]
    assert "is the source" in refused(*arguments, *given, "-o", tmp_path / "s.safetensors")
    line = refused(*arguments, *given, "--report", tmp_path / "s.safetensors")
    assert "is also" in line
    assert (tmp_path / "s.safetensors").read_bytes() == scales


@pytest.mark.parametrize(
    ("dtype", "name", "stored_as"),
    [
        (ml_dtypes.float8_e8m0fnu, "float8e8m0", np.uint8),
        (ml_dtypes.bfloat16, "bfloat16", np.uint16),
        (ml_dtypes.float8_e4m3fn, "float8e4m3fn", np.uint8),
    ],
)
def test_scales_of_types_that_numpy_has_no_name_for_are_given_with_their_type(
    dtype: type, name: str, stored_as: type, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", float32([[4, 8], [4, 8]]))
    scale = np.array([2, 4], dtype)
    np.save(tmp_path / "s.npy", scale)
    ok("quantize", tmp_path / "x.npy", "--dtype", "int8", "--axis", "0", "--scale",
       tmp_path / "s.npy", "--scale-dtype", name)  # fmt: skip
    tensors = stored(tmp_path / "x.int8.safetensors")
    assert tensors["x"].tolist() == [[2, 4], [1, 2]]
    assert tensors["x.scale"].view(stored_as).tolist() == scale.view(stored_as).tolist()


@pytest.mark.parametrize("scale", [np.array(True), np.array(1j, np.complex64)], ids=str)
def test_a_scale_is_a_number(scale: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([1, 2]))
    np.save(tmp_path / "s.npy", scale)
    line = refused("quantize", tmp_path / "x.npy", "--dtype", "int8", "--scale", tmp_path / "s.npy")
    assert line.startswith("scale of x: ")
    assert line.endswith("give numbers")


def test_a_scale_comes_out_of_a_pipe(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([2, 4]))
    np.save(tmp_path / "s.npy", float32(2))
    script = (
        'exec "$0" -m qtool quantize x.npy --dtype int8 -q -o y.safetensors --scale <(cat s.npy)'
    )
    done = process_in_bash(script, tmp_path)
    assert (done, stored(tmp_path / "y.safetensors")["x"].tolist()) == (0, [1, 2])


def process_in_bash(script: str, folder: Path) -> int:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=folder, env=environment, check=False
    ).returncode


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_a_block_may_be_longer_than_anything(size: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([[127, 1], [254, 2]]))
    ok("quantize", tmp_path / "x.npy", "--dtype", "int8", "--block-size", str(size))
    tensors = stored(tmp_path / "x.int8.safetensors")
    assert (tensors["x"].tolist(), tensors["x.scale"].tolist()) == (
        [[127, 1], [127, 1]],
        [[1], [2]],
    )


@pytest.mark.parametrize("size", [1 << 63, 10**29])
def test_a_block_size_fits_64_bits(size: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([1, 2]))
    line = refused("quantize", tmp_path / "x.npy", "--dtype", "int8", "--block-size", str(size),
                   code=2)  # fmt: skip
    assert "does not fit 64 bits" in line


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, 1.0 + 2.3e-16]), np.array([2**60, 2**60 + 300]), np.full(3, 7.0)],
    ids=["last-place", "large-integers", "constant"],
)
def test_nearly_constant_tensors_have_a_histogram(values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values)
    [row] = ok("inspect", tmp_path / "x.npy", "--stats", "--json").json["tensors"]
    assert sum(row["stats"]["histogram"]) == values.size


def test_zero_points_stay_in_a_narrow_range(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", int8([1]).astype(np.float32))
    arguments = [
        "quantize",
        tmp_path / "x.npy",
        "--dtype",
        "int8",
        "--narrow-range",
        "--scale",
        "1",
    ]
    assert "use -127 or more" in refused(*arguments, "--zero-point", "-128")
    assert qtool(*arguments, "--zero-point", "-127").code == 0


def test_names_that_the_terminal_cannot_write_are_shown_escaped(tmp_path: Path) -> None:
    save_file({"é中": float32([[1]])}, tmp_path / "m.safetensors")
    done = process("inspect", tmp_path / "m.safetensors",
                   env=os.environ | {"PYTHONIOENCODING": "ascii"})  # fmt: skip
    assert done.returncode == 0
    assert rb"\xe9\u4e2d" in done.stdout


def test_a_result_for_a_closed_standard_output_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([1, 2]))
    script = 'exec "$0" -m qtool quantize x.npy --dtype int8 -q -o - >&- 2>/dev/null'
    assert process_in_bash(script, tmp_path) == 1


def test_help_for_a_full_disk_is_an_error_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PYTHON, "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr

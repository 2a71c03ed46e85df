"""qtool quantize --activations and --hessian, on files, folders and models."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import checkpoints
import jsonschema
import ml_dtypes
import numpy as np
import onnx_models
import pytest
from command import ok, process, refused, report, stored, strict, unpacked, unsigned
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import load_file, save_file
from textbook import correlated, obq, output_error

import qtool
from qtool import Blocked, PerAxis, QuantSpec

Array = NDArray[Any]
SCHEMA = json.loads((Path(qtool.__file__).parent / "report.schema.json").read_text())
EXAMPLES = Path(__file__).parents[1] / "examples"
INT4 = ("--dtype", "int4", "--block-size", "32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two weights, one with inputs in two files, one without any."""
    rng = np.random.default_rng(0)
    weights = {
        "a.weight": rng.standard_normal((24, 96), np.float32),
        "b.weight": rng.standard_normal((8, 64), np.float32),
    }
    save_file(weights, tmp_path / "w.safetensors")
    x = correlated(rng, 120, 96)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "first.npz", **{"a.weight": x[:50]})
    save_file({"a.weight": x[50:].reshape(7, 10, 96)}, tmp_path / "second.safetensors")
    h = x.T.astype(np.float64) @ x
    np.savez(tmp_path / "h.npz", **{"a.weight": h})
    return tmp_path


def quantized(folder: Path, name: str, *options: str | Path) -> tuple[Any, Any]:
    """What is in the file besides its recipe, and the report."""
    dst = folder / f"{name}.safetensors"
    ok("quantize", folder / "w.safetensors", "-o", dst, *INT4, *options)
    return unsigned(dst), report(dst)


def test_every_way_to_give_the_same_inputs(folder: Path) -> None:
    x = folder / "x.npy"
    by_name, told = quantized(folder, "1", "--activations", f"a.weight={x}")
    ways: list[tuple[str | Path, ...]] = [
        ("--activations", f"a*={x}"),
        ("--activations", f"re:^a={x}"),
        ("--activations", folder / "first.npz", "--activations", folder / "second.safetensors"),
        ("--activations", folder / "first.npz", "--activations",
         f"a.weight={folder / 'second.safetensors'}"),
        ("--activations", f"a*={x}", "--damping", "0.01", "--act-order"),
    ]  # fmt: skip
    for i, options in enumerate(ways):
        assert quantized(folder, f"w{i}", *options)[0] == by_name
    sums, _ = quantized(folder, "sums", "--hessian", folder / "h.npz")
    assert sums == by_name
    assert quantized(folder, "n", "--hessian", folder / "h.npz", "--no-act-order")[0] != by_name
    assert quantized(folder, "d", "--hessian", folder / "h.npz", "--damping", "1")[0] != by_name
    assert told["settings"]["activations"] == [f"a.weight={x}"]
    assert (told["settings"]["damping"], told["settings"]["act_order"]) == (0.01, True)


def test_codes_figures_and_report_are_those_of_the_textbook(folder: Path) -> None:
    _, told = quantized(folder, "q", "--activations", f"a.weight={folder / 'x.npy'}")
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    x = np.load(folder / "x.npy").astype(np.float64)
    w = load_file(folder / "w.safetensors")
    h = x.T @ x / len(x)
    plain = {k: qtool.quantize(v, QuantSpec("int4", Blocked(1, 32))) for k, v in w.items()}
    found = stored(folder / "q.safetensors")
    codes = obq(w["a.weight"], h, plain["a.weight"], damping=0.01, act_order=True)
    assert unpacked(found["a.weight"], "int4", 24, 96) == codes.tolist()
    near = plain["b.weight"].y.astype(int).tolist()
    assert unpacked(found["b.weight"], "int4", 8, 64) == near
    first, second = told["tensors"]
    scale = np.repeat(plain["a.weight"].scale, 32, axis=1)
    expected = output_error(w["a.weight"], codes.astype(np.float32) * scale, h)
    nearest = output_error(w["a.weight"], plain["a.weight"].dequantize(), h)
    assert first["rounding"] == "second-order"
    assert first["output_error"] == pytest.approx(expected, rel=1e-9)
    assert first["output_error_nearest"] == pytest.approx(nearest, rel=1e-9)
    assert [second[k] for k in ("rounding", "output_error", "output_error_nearest")] == [None] * 3
    totals = told["totals"]
    assert totals["second_order"] == 1
    assert totals["output_error"] == pytest.approx(expected, rel=1e-9)
    assert told["warnings"] == ["rounded to nearest, as no inputs are given: b.weight"]


def test_the_table_shows_the_error_of_outputs(folder: Path) -> None:
    options = (*INT4, "--activations", f"a.weight={folder / 'x.npy'}")
    text = ok("quantize", folder / "w.safetensors", *options).err
    told = report(folder / "w.int4.safetensors")["tensors"][0]
    header, row = (next(s for s in text.splitlines() if w in s) for w in ("SQNR", "a.weight"))
    assert header.split()[-3:] == ["output", "error", "nearest"]
    assert row.split()[-2:] == [f"{told[k]:.4f}" for k in ("output_error", "output_error_nearest")]
    assert "output error" not in ok("quantize", folder / "w.safetensors", *INT4, "--force").err


@pytest.mark.parametrize(
    "options",
    [
        ("--preset", "nvfp4", "--layout", "compressed-tensors"),
        ("--preset", "mxfp4", "--layout", "mlx"),
        ("--preset", "w4a16", "--block-size", "32", "--layout", "mlx"),
        ("--preset", "int2", "--block-size", "32", "--layout", "mlx"),
        ("--dtype", "float8e4m3fn", "--tile", "8x32"),
    ],
    ids=" ".join,
)
def test_layouts_dequantize_to_the_error_that_the_report_says(
    folder: Path, options: tuple[str, ...]
) -> None:
    source, x = folder / "w.safetensors", np.load(folder / "x.npy").astype(np.float64)
    dst, back = folder / "q.safetensors", folder / "back.safetensors"
    inputs = ("--activations", f"a.weight={folder / 'x.npy'}")
    ok("quantize", source, "-o", dst, *options, *inputs, "--include", "a.weight")
    ok("dequantize", dst, "-o", back)
    ok("quantize", source, "-o", folder / "near.safetensors", *options, "--include", "a.weight")
    ok("dequantize", folder / "near.safetensors", "-o", folder / "nearest.safetensors")
    w = load_file(source)["a.weight"]
    (told,) = report(folder / "q")["tensors"]
    for name, key in (("back", "output_error"), ("nearest", "output_error_nearest")):
        estimate = load_file(folder / f"{name}.safetensors")["a.weight"]
        exact = output_error(w, estimate.astype(np.float32), x.T @ x)
        assert told[key] == pytest.approx(exact, rel=1e-6)
    assert told["output_error"] < told["output_error_nearest"]


def test_a_recipe_keeps_all_of_it(folder: Path) -> None:
    given = ("--hessian", folder / "h.npz", "--damping", "0.5", "--no-act-order")
    quantized(folder, "1", *given, "--save-recipe", folder / "kept.toml")
    expected = (folder / "1.safetensors").read_bytes()
    printed = ok("recipe", *INT4, *given).out.decode()
    assert printed == (folder / "kept.toml").read_text()
    said = tomllib.loads(printed)
    assert said["hessian"] == [str(folder / "h.npz")]
    assert (said["damping"], said["act_order"]) == (0.5, False)
    src, dst = folder / "w.safetensors", folder / "2.safetensors"
    ok("quantize", src, "-o", dst, "--recipe", folder / "kept.toml")
    assert dst.read_bytes() == expected
    ok("quantize", src, "-o", dst, "--recipe", folder / "kept.toml", "--act-order", "--force")
    assert unsigned(dst) != unsigned(folder / "1.safetensors")


def test_npz_npy_and_a_bare_array(folder: Path) -> None:
    w = load_file(folder / "w.safetensors")["a.weight"]
    np.save(folder / "a.weight.npy", w)
    ok("quantize", folder / "a.weight.npy", "-o", folder / "bare.npy", *INT4,
       "--activations", folder / "first.npz")  # fmt: skip
    x = np.load(folder / "x.npy")[:50].astype(np.float64)
    tensor = qtool.quantize(w, QuantSpec("int4", Blocked(1, 32)))
    expected = obq(w, x.T @ x, tensor, damping=0.01, act_order=True)
    assert (
        np.load(folder / "bare.npy").view(ml_dtypes.int4).astype(int).tolist() == expected.tolist()
    )


def test_the_digits_network(tmp_path: Path) -> None:
    """Its first layer, whose inputs are pixels: a fifth of them is always or nearly always 0."""
    source, x = EXAMPLES / "digits.safetensors", EXAMPLES / "digits_inputs.npy"
    w = load_file(source)
    values = np.load(x)
    inputs = {}
    for i in (1, 2, 3):
        inputs[f"fc{i}.weight"] = values
        values = np.maximum(values @ w[f"fc{i}.weight"].T + w[f"fc{i}.bias"], 0)
    np.savez(tmp_path / "inputs.npz", **inputs)
    options = ("--activations", tmp_path / "inputs.npz")
    ok("quantize", source, "-o", tmp_path / "q.safetensors", *INT4, *options)
    told = report(tmp_path / "q")
    assert [t["rounding"] for t in told["tensors"]] == ["second-order"] * 3
    for tensor in told["tensors"]:
        assert tensor["output_error"] < 0.7 * tensor["output_error_nearest"]
    assert told["warnings"] == []


# ---------------------------------------------------------------- folders


def activations(folder: Path) -> Path:
    """Inputs of three of the five layers of checkpoints.three()."""
    rng = np.random.default_rng(5)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 2, 4)]
    np.savez(folder / "x.npz", **{name: correlated(rng, 80, 64) for name in names})
    return folder / "x.npz"


def test_a_checkpoint_folder_at_once_in_slices_and_resumed(tmp_path: Path) -> None:
    src, x = checkpoints.three(tmp_path / "src"), activations(tmp_path)
    options = (*INT4, "--activations", x)
    ok("quantize", src, "-o", tmp_path / "whole", *options)
    for k in (2, 1):
        ok("quantize", src, "-o", tmp_path / "sliced", *options, "--shards", f"{k}/2")
    ok("finish", tmp_path / "sliced")
    assert checkpoints.content(tmp_path / "sliced") == checkpoints.content(tmp_path / "whole")
    told = report(tmp_path / "sliced")
    assert told["totals"] | {"file_bytes_after": 0} == report(tmp_path / "whole")["totals"] | {
        "file_bytes_after": 0
    }
    rounding = [t["rounding"] for t in told["tensors"]]
    assert rounding == ["second-order", None, "second-order", None, "second-order"]
    one = next((tmp_path / "whole").glob("model-00002*"))
    w = load_file(src / one.name)["model.layers.2.mlp.down_proj.weight"]
    h = np.load(x)["model.layers.2.mlp.down_proj.weight"].astype(np.float64)
    tensor = qtool.quantize(w, QuantSpec("int4", Blocked(1, 32)), hessian=h.T @ h)
    found = stored(one)["model.layers.2.mlp.down_proj.weight"]
    assert unpacked(found, "int4", 16, 64) == tensor.y.astype(int).tolist()


def test_other_inputs_are_another_run(tmp_path: Path) -> None:
    src, x = checkpoints.three(tmp_path / "src"), activations(tmp_path)
    options = ("-o", tmp_path / "dst", *INT4, "--activations", x)
    ok("quantize", src, *options, "--shards", "1/2")
    values = dict(np.load(x))
    values["model.layers.4.mlp.down_proj.weight"] *= np.float32(2) ** np.arange(64)
    np.savez(x, **values)
    told = refused("quantize", src, *options, "--shards", "2/2")
    assert "is of a run with another source or other settings" in told
    shutil.rmtree(tmp_path / "dst.partial")
    ok("quantize", src, *options)


def test_work_that_goes_to_other_processes(tmp_path: Path) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    src, x = checkpoints.three(tmp_path / "src"), activations(tmp_path)
    options = {"dtype": "int4", "block_size": 32, "activations": x}
    qtool.quantize_file(src, tmp_path / "here", **options)  # type: ignore[arg-type]
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        qtool.quantize_file(src, tmp_path / "there", scheduler=executor, **options)  # type: ignore[arg-type]
    assert checkpoints.content(tmp_path / "here") == checkpoints.content(tmp_path / "there")


# ---------------------------------------------------------------- ONNX


def model(folder: Path) -> Path:
    """y = x W, W (96, 24), and a kernel of a convolution."""
    w = load_file(folder / "w.safetensors")["a.weight"]
    nodes = [helper.make_node("MatMul", ["x", "a.weight"], ["y"])]
    made = onnx_models.model(
        nodes, [onnx_models.initializer("a.weight", w.T)], inputs={"x": ["n", 96]}
    )
    return onnx_models.save(made, folder / "m.onnx")


@pytest.mark.parametrize("layout", ["qdq", "matmul-nbits"])
def test_a_product_whose_inputs_come_first_in_the_weight(folder: Path, layout: str) -> None:
    src, dst = model(folder), folder / "q.onnx"
    inputs = ("--activations", f"a.weight={folder / 'x.npy'}")
    ok("quantize", src, "-o", dst, *INT4, *inputs, "--layout", layout)
    (told,) = report(folder / "q")["tensors"]
    x = np.load(folder / "x.npy").astype(np.float64)
    w = load_file(folder / "w.safetensors")["a.weight"]
    tensor = qtool.quantize(w, QuantSpec("int4", Blocked(1, 32)), hessian=x.T @ x)
    (y,) = onnx_models.run(dst, {"x": np.eye(96, dtype=np.float32)})
    np.testing.assert_array_equal(y.T, tensor.dequantize())
    assert tensor.output_error is not None
    assert told["output_error"] == pytest.approx(tensor.output_error.second_order, rel=1e-9)
    assert told["rounding"] == "second-order"


def test_blocks_along_the_outputs_of_a_product(folder: Path) -> None:
    """Each row of the matrix has scales of its own anyway, wherever they lie."""
    src, dst = model(folder), folder / "q.onnx"
    inputs = ("--activations", f"a.weight={folder / 'x.npy'}", "--axis", "1")
    ok("quantize", src, "-o", dst, "--dtype", "int4", "--block-size", "8", *inputs)
    (told,) = report(folder / "q")["tensors"]
    x = np.load(folder / "x.npy").astype(np.float64)
    w = load_file(folder / "w.safetensors")["a.weight"]
    plain = qtool.quantize(w, QuantSpec("int4", Blocked(0, 8)))
    scale = np.repeat(plain.scale, 8, axis=0)
    (y,) = onnx_models.run(dst, {"x": np.eye(96, dtype=np.float32)})
    assert (np.rint(y.T / scale) * scale == y.T).all()
    exact = output_error(w, y.T, x.T @ x)
    assert told["output_error"] == pytest.approx(exact, rel=1e-9)
    assert told["output_error"] < 0.8 * told["output_error_nearest"]


def test_a_weight_of_several_matrices_is_refused(folder: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 96, 24), np.float32)
    made = onnx_models.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [onnx_models.initializer("w", w)], inputs={"x": ["n", 96]},
    )  # fmt: skip
    src = onnx_models.save(made, folder / "m.onnx")
    told = refused("quantize", src, "--dtype", "int8", "--activations", f"w={folder / 'x.npy'}")
    assert told.startswith("tensor w: of shape (2, 96, 24) is no one matrix")


def test_a_convolution(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((6, 4, 3, 3), np.float32)
    made = onnx_models.model(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        [onnx_models.initializer("w", w)], inputs={"x": [1, 4, "h", "w"]},
    )  # fmt: skip
    src = onnx_models.save(made, tmp_path / "m.onnx")
    x = correlated(rng, 100, 36)
    np.save(tmp_path / "w.npy", x)
    ok("quantize", src, "--dtype", "int4", "--activations", tmp_path / "w.npy")
    tensor = qtool.quantize(w, QuantSpec("int4", PerAxis(0)), hessian=x.T.astype(float) @ x)
    image = np.zeros((1, 4, 5, 5), np.float32)
    image[0, 1, 2, 2] = 1
    (y,) = onnx_models.run(tmp_path / "m.int4.onnx", {"x": image})
    np.testing.assert_array_equal(y[0, :, ::-1, ::-1], tensor.dequantize()[:, 1])


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("options", [(), ("--hessian",)])
def test_the_same_bytes_for_any_number_of_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((1100, 160), np.float32)
    x = correlated(rng, 400, 160)
    save_file({"w": w}, tmp_path / "w.safetensors")
    h = x.T.astype(np.float64) @ x
    np.savez(tmp_path / "x.npz", w=(h + h.T) / 2 if options else x)
    found = set()
    for jobs, blas in (("1", "1"), ("2", "2"), ("3", "1")):
        dst = tmp_path / f"{jobs}{blas}.safetensors"
        done = process(
            "quantize", tmp_path / "w.safetensors", "-o", dst, *INT4, "--jobs", jobs, "--json",
            options[0] if options else "--activations", tmp_path / "x.npz",
            env=os.environ | {"OPENBLAS_NUM_THREADS": blas},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        figures = strict(done.stdout.decode())
        found.add((dst.read_bytes(), str(figures["tensors"])))
    assert len(found) == 1


# ---------------------------------------------------------------- refusals


def test_options_that_need_inputs(folder: Path) -> None:
    src, x = folder / "w.safetensors", f"a.weight={folder / 'x.npy'}"
    for option in (("--damping", "0.1"), ("--act-order",), ("--no-act-order",)):
        told = refused("quantize", src, *INT4, *option, code=2)
        assert "is for second-order rounding; give --activations or --hessian" in told
    both = ("--activations", x, "--hessian", folder / "h.npz")
    assert refused("quantize", src, *INT4, *both, code=2).startswith("--hessian: replaces")
    for damping in ("-1", "nan", "inf", "1e20"):
        told = refused("quantize", src, *INT4, "--activations", x, "--damping", damping, code=2)
        assert told.startswith("--damping: ")


def test_arrays_that_do_not_fit(folder: Path) -> None:
    src, x = folder / "w.safetensors", folder / "x.npy"

    def told(*words: str | Path, option: str = "--activations", code: int = 1) -> str:
        given = [part for word in words for part in (option, word)]
        return refused("quantize", src, *INT4, *given, code=code)

    assert "'a.wieght' is no tensor of the source; the nearest name is 'a.weight'" in told(
        f"a.wieght={x}", code=2
    )
    assert "'x' is no tensor of the source" in told(x, code=2)
    assert "shape (120, 96), but b.weight has 64 inputs; give (..., 64)" in told(f"b.weight={x}")
    assert "cannot be read" in told(folder / "missing.npz")
    assert "cannot be read" in told(f"a.weight={folder / 'missing.npz'}")
    assert "has no NAME" in told(f"={x}", code=2)
    assert "no file that can be read more than once" in told(folder, code=2)
    assert "is a model" in told(model(folder))
    np.savez(folder / "two.npz", p=np.ones(96), q=np.ones(96))
    assert "holds 2 arrays, not one" in told(f"a.weight={folder / 'two.npz'}", code=2)
    np.savez(folder / "none.npz")
    assert "holds 0 arrays" in told(folder / "none.npz", code=2)
    np.save(folder / "a.weight.npy", np.ones((3, 96), np.int32))
    assert "holds int32; give float32 inputs" in told(folder / "a.weight.npy")
    np.save(folder / "a.weight.npy", np.float32(1))
    assert "shape (), but a.weight has 96 inputs" in told(folder / "a.weight.npy")
    np.save(folder / "a.weight.npy", np.empty((0, 96), np.float32))
    assert "activations of a.weight: hold no sample" in told(folder / "a.weight.npy")
    bad = np.ones((2, 3, 96))
    bad[1, 0, 7] = 1e300
    np.save(folder / "a.weight.npy", bad)
    assert "1e+300 at [1, 0, 7] is not finite in float32" in told(folder / "a.weight.npy")
    h = folder / "h.npz"
    assert "two Hessians for a.weight" in told(h, f"a*={h}", option="--hessian", code=2)
    assert "float32 (120, 96), but a.weight has 96 inputs" in told(f"a*={x}", option="--hessian")
    np.save(folder / "a.weight.npy", -np.eye(96))
    assert "is below zero" in told(folder / "a.weight.npy", option="--hessian")
    assert not list(folder.glob("w.int4*"))


def test_inputs_of_a_tensor_that_is_left_alone_are_told(folder: Path) -> None:
    _, told = quantized(
        folder, "q", "--activations", f"*.weight={folder / 'x.npy'}", "--exclude", "b.*"
    )
    assert told["warnings"] == ["left alone although inputs are given: b.weight"]


def test_inputs_are_never_the_target(folder: Path) -> None:
    x = folder / "second.safetensors"
    content = x.read_bytes()
    src = folder / "w.safetensors"
    told = refused("quantize", src, *INT4, "--force", "-o", x, "--activations", x)
    assert str(x) in told
    assert x.read_bytes() == content


def test_a_name_with_an_equals_sign(folder: Path) -> None:
    shutil.copy(folder / "x.npy", folder / "a=b.npy")
    by_name, _ = quantized(folder, "1", "--activations", f"a.weight={folder / 'x.npy'}")
    assert quantized(folder, "2", "--activations", f"a.weight={folder / 'a=b.npy'}")[0] == by_name
    assert "'a=b' is no tensor" in refused(
        "quantize", folder / "w.safetensors", *INT4, "--activations", folder / "a=b.npy", code=2
    )


def test_sixteen_bit_inputs(folder: Path) -> None:
    x = np.load(folder / "x.npy").astype(ml_dtypes.bfloat16)
    save_file({"a.weight": x}, folder / "b.safetensors")
    save_file({"a.weight": x.astype(np.float32)}, folder / "f.safetensors")
    found = [
        quantized(folder, f"q{s}", "--activations", folder / f"{s}.safetensors") for s in ("b", "f")
    ]
    assert found[0][0] == found[1][0]

"""qtool quantize --importance, on files, folders and models."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import jsonschema
import numpy as np
import onnx_models
import pytest
from command import ok, refused, report, stored, unpacked, unsigned
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import load_file, save_file

import qtool
from qtool import Blocked, PerAxis, QuantSpec

Array = NDArray[Any]
SCHEMA = json.loads((Path(qtool.__file__).parent / "report.schema.json").read_text())
INT4 = ("--dtype", "int4", "--block-size", "32")
SPEC = QuantSpec("int4", Blocked(1, 32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two weights, and weights of errors of the first one: of elements, of channels, and inputs."""
    rng = np.random.default_rng(0)
    weights = {
        "a.weight": rng.standard_t(4, (24, 96)).astype(np.float32),
        "b.weight": rng.standard_normal((8, 64), np.float32),
        "c.bias": np.ones(8, np.float32),
    }
    save_file(weights, tmp_path / "w.safetensors")
    x = (rng.standard_normal((120, 96)) * rng.lognormal(0, 2, 96)).astype(np.float32)
    channels = (x.astype(np.float64) ** 2).mean(axis=0)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", **{"a.weight": x.reshape(4, 30, 96)})
    np.save(tmp_path / "channels.npy", channels)
    whole = np.ascontiguousarray(np.broadcast_to(channels.astype(np.float32), (24, 96)))
    save_file({"a.weight": whole}, tmp_path / "elements.safetensors")
    np.savez(tmp_path / "channels.npz", **{"a.weight": channels})
    return tmp_path


def quantized(folder: Path, *options: str | Path, name: str = "q") -> tuple[bytes, Any]:
    """The file and the report."""
    dst = folder / f"{name}.safetensors"
    source = folder / "w.safetensors"
    ok(
        "quantize",
        source,
        "-o",
        dst,
        "--force",
        *(options if "--dtype" in options else INT4 + options),
    )
    told = report(dst)
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    return unsigned(dst), told


def test_every_way_to_give_the_same_weights(folder: Path) -> None:
    first, told = quantized(folder, "--importance", folder / "channels.npz")
    assert told["settings"]["importance"] == [str(folder / "channels.npz")]
    kinds = set()
    for word in (
        f"a.weight={folder / 'channels.npy'}",
        f"a.*={folder / 'channels.npy'}",
        f"re:^a={folder / 'channels.npy'}",
        f"{folder / 'elements.safetensors'}",
        f"activations:{folder / 'x.npz'}",
        f"activations:a.weight={folder / 'x.npy'}",
    ):
        found, told = quantized(folder, "--importance", word)
        assert found == first
        kinds.add(told["tensors"][0]["importance"])
    assert kinds == {"channel", "element", "activations"}
    recipe = folder / "recipe.toml"
    recipe.write_bytes(ok("recipe", *INT4, "--importance", folder / "channels.npz").out)
    assert quantized(folder, "--dtype", "int4", "--recipe", recipe)[0] == first
    python = qtool.quantize_file(
        folder / "w.safetensors", folder / "p.safetensors", dtype="int4", block_size=32,
        importance=folder / "channels.npz",
    )  # fmt: skip
    assert unsigned(folder / "p.safetensors") == first
    assert python["settings"]["importance"] == [str(folder / "channels.npz")]


def test_codes_figures_and_report(folder: Path) -> None:
    _, told = quantized(folder, "--importance", folder / "elements.safetensors")
    w = load_file(folder / "w.safetensors")
    importance = load_file(folder / "elements.safetensors")["a.weight"]
    found = stored(folder / "q.safetensors")
    first, second = told["tensors"]
    for name, weights in (("a.weight", importance), ("b.weight", None)):
        tensor = qtool.quantize(w[name], SPEC, importance=weights)
        assert unpacked(found[name], "int4", *w[name].shape) == tensor.y.astype(int).tolist()
    codes = np.array(unpacked(found["a.weight"], "int4", 24, 96))
    scale = np.repeat(found["a.weight.scale"].astype(np.float64), 32, axis=1)
    x, share = w["a.weight"].astype(np.float64), importance.astype(np.float64)
    noise, signal = (share * (x - codes * scale) ** 2).sum(), (share * x**2).sum()
    assert first["importance"] == "element"
    assert first["weighted_mse"] == pytest.approx(noise / share.sum(), rel=1e-6)
    assert first["weighted_relative_error"] == pytest.approx((noise / signal) ** 0.5, rel=1e-6)
    assert first["weighted_sqnr_db"] == pytest.approx(10 * np.log10(signal / noise), rel=1e-6)
    names = ("importance", "weighted_mse", "weighted_relative_error", "weighted_sqnr_db")
    assert [second[name] for name in names] == [None] * 4
    assert [told["totals"][name] for name in names[1:]] == [None] * 3
    assert told["warnings"] == ["quantized without importance, as none is given: b.weight"]
    _, told = quantized(
        folder, "--importance", folder / "elements.safetensors", "--include", "a.weight"
    )
    assert [told["totals"][n] for n in names[1:]] == [first[n] for n in names[1:]]


def test_the_error_that_counts_is_smaller(folder: Path) -> None:
    """8 bits too, where the default is absmax for the others."""
    w = load_file(folder / "w.safetensors")
    importance = load_file(folder / "elements.safetensors")["a.weight"].astype(np.float64)
    for dtype in ("int4", "int8", "float8e4m3fn"):
        options = ("--dtype", dtype, "--block-size", "32")
        errors = []
        for more in ((), ("--importance", folder / "elements.safetensors")):
            quantized(folder, *options, *more)
            ok("dequantize", folder / "q.safetensors", "-o", folder / "back.safetensors", "--force")
            e = load_file(folder / "back.safetensors")["a.weight"].astype(float) - w["a.weight"]
            errors.append((importance * e**2).sum())
        assert errors[1] < 0.9 * errors[0]


def test_the_table_shows_both(folder: Path) -> None:
    source, more = folder / "w.safetensors", ("--importance", folder / "channels.npz")
    text = ok("quantize", source, *INT4, *more).err
    told = report(folder / "w.int4.safetensors")["tensors"][0]
    header, row = (next(s for s in text.splitlines() if w in s) for w in ("SQNR", "a.weight"))
    assert header.split()[4:6] == ["SQNR", "weighted"]
    assert f"{told['sqnr_db']:.2f} dB  {told['weighted_sqnr_db']:.2f} dB" in row
    assert "weighted" not in ok("quantize", source, *INT4, "--force").err


@pytest.mark.parametrize(
    ("array", "word", "said"),
    [
        (np.ones(95), "a.weight=", "a.npy: shape (95,), but a.weight has (24, 96); give (24, 96) "
         "or (96,)"),
        (np.ones((96, 24)), "a.weight=", "a.npy: shape (96, 24), but a.weight has (24, 96); give "
         "(24, 96) or (96,)"),
        (np.ones(24), "a.weight=", "a.npy: shape (24,), but a.weight has (24, 96); give (24, 96) "
         "or (96,)"),
        (np.ones(96, np.int32), "a.weight=", "a.npy: holds int32; give float32 weights"),
        (-np.arange(96.0), "a.weight=", "a.npy: -1.0 at [1] is no weight; give finite ones of 0 "
         "and more"),
        (np.full((24, 96), np.nan), "a.weight=", "a.npy: nan at [0, 0] is no weight; give finite "
         "ones of 0 and more"),
        (np.full(96, np.inf), "a.weight=", "a.npy: inf at [0] is no weight; give finite ones of "
         "0 and more"),
        (np.full(96, 1e39), "a.weight=", "a.npy: 1e+39 at [0] is no weight; give finite ones of "
         "0 and more"),
        (np.zeros(96), "a.weight=", "a.npy: zeros alone; leave it out, or give some weight"),
        (np.ones((5, 95)), "activations:a.weight=", "a.npy: shape (5, 95), but a.weight has 96 "
         "inputs; give (..., 96)"),
        (np.full((2, 96), np.nan, np.float32), "activations:a.weight=", "a.npy: nan at [0, 0] is "
         "not finite in float32; leave that sample out"),
        (np.zeros((2, 96)), "activations:a.weight=", "activations of a.weight: zeros alone; leave "
         "it out, or give some weight"),
        (np.ones((0, 96)), "activations:a.weight=", "activations: hold no sample; give some"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be(folder: Path, array: Array, word: str, said: str) -> None:
    np.save(folder / "a.npy", array)
    told = refused("quantize", folder / "w.safetensors", *INT4, "--importance",
                   f"{word}{folder / 'a.npy'}")  # fmt: skip
    assert told.replace(f"{folder}/", "").removeprefix("a of ") == said
    assert not (folder / "w.int4.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--importance", "a.wieght={}/channels.npy"], "--importance: 'a.wieght' is no tensor of "
         "the source; the nearest name is 'a.weight'; NAME={}/channels.npy says whose it is"),
        (["--importance", "{}/channels.npy"], "--importance: 'channels' is no tensor of the "
         "source; the nearest name is 'c.bias'; NAME={}/channels.npy says whose it is"),
        (["--importance", "{}/channels.npz", "--importance", "a*={}/channels.npy"],
         "--importance: two for a.weight: a.weight of {}/channels.npz and channels of "
         "{}/channels.npy; leave one of them out"),
        (["--importance", "{}/channels.npz", "--importance", "activations:{}/x.npz"],
         "--importance: two for a.weight: a.weight of {}/channels.npz and a.weight of {}/x.npz; "
         "leave one of them out"),
        *((["--importance", "{}/channels.npz", "--method", method],
           f"--importance: {method} follows the range of a.weight alone; use --method mse or "
           "optimal")
          for method in ("absmax", "minmax", "percentile:99", "entropy")),
        (["--importance", "{}/channels.npz", "--rule", "a*: method=absmax"],
         "--importance: absmax follows the range of a.weight alone; use --method mse or optimal"),
        (["--importance", "{}/channels.npz", "--precision", "float16"],
         "--importance: of a.weight needs method mse: method: mse does not go with precision "
         "float16; leave one of them out"),
        (["--importance", "{}/channels.npz", "--scale", "0.1"],
         "--scale: leaves nothing to weigh; leave --importance out"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(folder: Path, options: list[str], said: str) -> None:
    told = refused("quantize", folder / "w.safetensors", *INT4,
                   *(word.replace("{}", str(folder)) for word in options), code=2)  # fmt: skip
    assert told.startswith(said.replace("{}", str(folder)))


def test_a_rule_may_have_another_method_for_other_tensors(folder: Path) -> None:
    more = ("--importance", folder / "channels.npz")
    quantized(folder, *more)
    quantized(folder, *more, "--rule", "b*: method=absmax", name="r")
    found, whole = stored(folder / "r.safetensors"), stored(folder / "q.safetensors")
    assert found["a.weight"].tobytes() == whole["a.weight"].tobytes()
    w = load_file(folder / "w.safetensors")["b.weight"]
    absmax = np.abs(w.reshape(8, 2, 32)).max(axis=2) / np.float32(7)
    assert found["b.weight.scale"].tolist() == absmax.tolist()


def test_what_is_left_alone_is_told(folder: Path) -> None:
    _, told = quantized(folder, "--importance", folder / "channels.npz", "--exclude", "a*")
    assert "left alone although importance is given: a.weight" in told["warnings"]


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "float4e2m1", "--preset", "nvfp4", "--layout", "compressed-tensors"),
        ("--dtype", "float4e2m1", "--preset", "mxfp4", "--layout", "mlx"),
        ("--dtype", "int4", "--preset", "w4a16", "--block-size", "32", "--layout", "mlx"),
        ("--dtype", "float8e4m3fn", "--tile", "8x32"),
        ("--dtype", "float8e4m3fn", "--preset", "fp8", "--layout", "modelopt"),
        ("--dtype", "uint8", "--block-size", "16"),
    ],
    ids=" ".join,
)
def test_layouts_dequantize_to_the_error_that_the_report_says(
    folder: Path, options: tuple[str, ...]
) -> None:
    w = load_file(folder / "w.safetensors")["a.weight"].astype(np.float64)
    importance = load_file(folder / "elements.safetensors")["a.weight"].astype(np.float64)
    errors = {}
    for name, more in (("q", ("--importance", folder / "channels.npz")), ("plain", ())):
        _, told = quantized(folder, *options, "--include", "a.weight", *more, name=name)
        ok("dequantize", folder / f"{name}.safetensors", "-o", folder / f"{name}.back.safetensors")
        e = load_file(folder / f"{name}.back.safetensors")["a.weight"].astype(np.float64) - w
        errors[name] = (importance * e**2).sum() / importance.sum()
        if more:
            assert told["tensors"][0]["weighted_mse"] == pytest.approx(errors["q"], rel=1e-6)
    assert errors["q"] < errors["plain"]


def test_npz_and_a_bare_array(folder: Path) -> None:
    w = load_file(folder / "w.safetensors")["a.weight"]
    np.save(folder / "a.weight.npy", w)
    ok("quantize", folder / "a.weight.npy", "-o", folder / "bare.npz", *INT4,
       "--importance", folder / "channels.npz")  # fmt: skip
    expected = qtool.quantize(w, SPEC, importance=np.load(folder / "channels.npy"))
    with np.load(folder / "bare.npz") as file:
        codes = unpacked(file["a.weight"], "int4", 24, 96)
    assert codes == expected.y.astype(int).tolist()


# ---------------------------------------------------------------- folders


def weights(folder: Path) -> Path:
    """Of three of the five layers of checkpoints.three()."""
    rng = np.random.default_rng(5)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 2, 4)]
    np.savez(folder / "i.npz", **{name: rng.lognormal(0, 2, 64) for name in names})
    return folder / "i.npz"


@pytest.mark.parametrize("preset", ["w4a16", "nvfp4"])
def test_a_checkpoint_folder_at_once_and_in_slices(tmp_path: Path, preset: str) -> None:
    src = checkpoints.three(tmp_path / "src")
    options = ("--preset", preset, "--block-size", "16", "--importance", weights(tmp_path))
    ok("quantize", src, "-o", tmp_path / "whole", *options)
    for k in (2, 1):
        ok("quantize", src, "-o", tmp_path / "sliced", *options, "--shards", f"{k}/2")
    ok("finish", tmp_path / "sliced")
    assert checkpoints.content(tmp_path / "sliced") == checkpoints.content(tmp_path / "whole")
    told = report(tmp_path / "sliced")
    kinds = [t["importance"] for t in told["tensors"]]
    assert kinds == ["channel", None, "channel", None, "channel"]
    one = next((tmp_path / "whole").glob("model-00002*"))
    w = load_file(src / one.name)["model.layers.2.mlp.down_proj.weight"]
    with np.load(tmp_path / "i.npz") as file:
        importance = file["model.layers.2.mlp.down_proj.weight"]
    if preset == "w4a16":
        tensor = qtool.quantize(w, QuantSpec("int4", Blocked(1, 16)), importance=importance)
        found = stored(one)["model.layers.2.mlp.down_proj.weight"]
        assert unpacked(found, "int4", 16, 64) == tensor.y.astype(int).tolist()


def test_other_weights_are_another_run(tmp_path: Path) -> None:
    src, i = checkpoints.three(tmp_path / "src"), weights(tmp_path)
    options = ("-o", tmp_path / "dst", *INT4, "--importance", i)
    ok("quantize", src, *options, "--shards", "1/2")
    values = dict(np.load(i))
    values["model.layers.4.mlp.down_proj.weight"][3] *= 2
    np.savez(i, **values)
    told = refused("quantize", src, *options, "--shards", "2/2")
    assert "is of a run with another source or other settings" in told
    shutil.rmtree(tmp_path / "dst.partial")
    ok("quantize", src, *options)


def test_work_that_goes_to_other_processes(tmp_path: Path) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    src, i = checkpoints.three(tmp_path / "src"), weights(tmp_path)
    options: dict[str, Any] = {"dtype": "int4", "block_size": 32, "importance": [i]}
    qtool.quantize_file(src, tmp_path / "here", **options)
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        qtool.quantize_file(src, tmp_path / "there", scheduler=executor, **options)
    assert checkpoints.content(tmp_path / "here") == checkpoints.content(tmp_path / "there")


# ---------------------------------------------------------------- ONNX


@pytest.mark.parametrize("layout", ["qdq", "matmul-nbits"])
@pytest.mark.parametrize("word", ["a.weight={}/channels.npy", "activations:{}/x.npz"])
def test_a_product_whose_inputs_come_first_in_the_weight(
    folder: Path, layout: str, word: str
) -> None:
    w = load_file(folder / "w.safetensors")["a.weight"]
    made = onnx_models.model(
        [helper.make_node("MatMul", ["x", "a.weight"], ["y"])],
        [onnx_models.initializer("a.weight", w.T)], inputs={"x": ["n", 96]},
    )  # fmt: skip
    src, dst = onnx_models.save(made, folder / "m.onnx"), folder / "q.onnx"
    word = word.replace("{}", str(folder))
    ok("quantize", src, "-o", dst, *INT4, "--importance", word, "--layout", layout)
    (told,) = report(folder / "q")["tensors"]
    tensor = qtool.quantize(w, SPEC, importance=np.load(folder / "channels.npy"))
    (y,) = onnx_models.run(dst, {"x": np.eye(96, dtype=np.float32)})
    np.testing.assert_array_equal(y.T, tensor.dequantize())
    figures = tensor.stats.figures()
    assert told["weighted_mse"] == pytest.approx(figures["weighted_mse"], rel=1e-12)


@pytest.mark.parametrize("size", [4, 36])
def test_a_convolution(tmp_path: Path, size: int) -> None:
    """One weight per input channel, or per element of a kernel."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((6, 4, 3, 3), np.float32)
    made = onnx_models.model(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        [onnx_models.initializer("w", w)], inputs={"x": [1, 4, "h", "w"]},
    )  # fmt: skip
    src, importance = onnx_models.save(made, tmp_path / "m.onnx"), rng.lognormal(0, 2, size)
    np.save(tmp_path / "w.npy", importance)
    ok("quantize", src, "--dtype", "int4", "--importance", tmp_path / "w.npy")
    each = importance.reshape(4, -1, 1) if size == 4 else importance.reshape(4, 3, 3)
    whole = np.broadcast_to(each, w.shape)
    tensor = qtool.quantize(w, QuantSpec("int4", PerAxis(0)), importance=whole)
    image = np.zeros((1, 4, 5, 5), np.float32)
    image[0, 1, 2, 2] = 1
    (y,) = onnx_models.run(tmp_path / "m.int4.onnx", {"x": image})
    np.testing.assert_array_equal(y[0, :, ::-1, ::-1], tensor.dequantize()[:, 1])


# ---------------------------------------------------------------- mixed precision


def test_a_target_of_bits_has_the_least_weighted_error_of_all_choices(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tensors = {f"t{i}.weight": rng.standard_normal((8, 64), np.float32) for i in range(3)}
    shares = {
        "t0.weight": np.full(64, 1e4, np.float32),
        "t1.weight": np.full(64, 1e-4, np.float32),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    save_file(shares, tmp_path / "i.safetensors")
    importance = ("--importance", tmp_path / "i.safetensors")
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in tensors}
    for dtype in ("int2", "int4", "int8"):
        ok("quantize", tmp_path / "m.safetensors", "-o", tmp_path / f"{dtype}.safetensors",
           "--dtype", dtype, "--block-size", "32", *importance)  # fmt: skip
        for row in report(tmp_path / dtype)["tensors"]:
            share = float(shares.get(row["name"], np.ones(1))[0])
            found[row["name"]].append((row["bytes_after"], share * row["mse"] * row["elements"]))
    budget = 6 * 3 * 8 * 64 / 8
    choices = [c for c in itertools.product(*found.values()) if sum(n for n, _ in c) <= budget]
    least = min(sum(error for _, error in c) for c in choices)
    ok("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "q.safetensors", *importance,
       "--target-bits", "6", "--candidates", "int2:32,int4:32,int8:32",
       "--save-recipe", tmp_path / "r.toml")  # fmt: skip
    told = report(tmp_path / "q")
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    error = sum(
        float(shares.get(row["name"], np.ones(1))[0]) * row["mse"] * row["elements"]
        for row in told["tensors"]
    )
    assert error == pytest.approx(least, rel=1e-12)
    assert [row["dtype"] for row in told["tensors"]] == ["int8", "int2", "int4"]
    ok("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "again.safetensors",
       "--recipe", tmp_path / "r.toml")  # fmt: skip
    again = (tmp_path / "again.safetensors").read_bytes()
    assert again == (tmp_path / "q.safetensors").read_bytes()


def test_a_target_of_sqnr_is_that_of_weighted_errors(folder: Path) -> None:
    more = ("--importance", folder / "channels.npz", "--include", "a.weight", "--rule",
            "a.weight: symmetric=true")  # fmt: skip
    _, told = quantized(folder, *more)
    reached = told["totals"]["weighted_sqnr_db"]
    assert reached > told["totals"]["sqnr_db"]
    options = ("--candidates", "int2:32,int4:32,int8:32", "--importance", folder / "channels.npz",
               "--include", "a.weight")  # fmt: skip
    for target, dtype in ((reached - 0.01, "int4"), (reached + 0.01, "int8")):
        ok("quantize", folder / "w.safetensors", "-o", folder / "t.safetensors", "--force",
           "--target-sqnr", str(target), *options)  # fmt: skip
        (row,) = report(folder / "t")["tensors"]
        assert row["dtype"] == dtype
        assert row["weighted_sqnr_db"] >= target


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("options", [INT4, ("--preset", "nvfp4"), ("--dtype", "uint8")])
def test_the_same_bytes_for_any_number_of_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2200, 1024)).astype(np.float16)
    save_file({"w": w, "v": w[:40, :100]}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "i.npz", w=rng.lognormal(0, 2, 1024), v=rng.lognormal(0, 2, (40, 100)))
    found = set()
    for jobs in ("1", "2", "5"):
        dst = tmp_path / f"{jobs}.safetensors"
        ok("quantize", tmp_path / "w.safetensors", "-o", dst, *options, "--jobs", jobs,
           "--importance", tmp_path / "i.npz")  # fmt: skip
        figures = json.dumps([report(dst)["tensors"], report(dst)["totals"]])
        found.add((dst.read_bytes(), figures))
    assert len(found) == 1

"""What the commands refuse: one line that names the thing and the remedy, and nothing written."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_models
import pytest
from command import Array, float32, initializers, ok, qtool, refused, uint8
from onnx import TensorProto, helper
from safetensors.numpy import save_file

WEIGHT = float32([[127, -1.5, 2.5], [254, 127, -254]])


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an array, a checkpoint, a model and a checkpoint that qtool quantized."""
    np.save(tmp_path / "x.npy", WEIGHT)
    np.savez(tmp_path / "m.npz", w=WEIGHT, v=WEIGHT)
    save_file({"w": WEIGHT, "v": WEIGHT}, tmp_path / "m.safetensors")
    save_file({"w": WEIGHT, "w.scale": WEIGHT}, tmp_path / "twice.safetensors")
    save_file({"b": float32([1, 2])}, tmp_path / "vector.safetensors")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_models.model([node], [onnx_models.initializer("w", WEIGHT)], inputs={"x": [1, 2]})
    onnx_models.save(model, tmp_path / "m.onnx")
    bad = WEIGHT.copy()
    bad[1, 2] = np.nan
    save_file({"good": WEIGHT, "w": bad}, tmp_path / "nan.safetensors")
    np.save(tmp_path / "inf.npy", np.array([1, np.inf], np.float16))
    np.save(tmp_path / "wide.npy", np.array([1, 1e39]))
    np.save(tmp_path / "raw.npy", np.array([1, 2], ml_dtypes.bfloat16).view("V2"))
    np.save(tmp_path / "ids.npy", np.array([1, 2]))
    np.save(tmp_path / "three.npy", float32([1, 2, 3]))
    np.save(tmp_path / "third_zero.npy", float32([1, 2, 0]))
    (tmp_path / "other.json").write_text('{"tool": "another"}')
    ok("quantize", tmp_path / "m.safetensors", "--dtype", "int8", "-o", tmp_path / "q.safetensors")
    return tmp_path


ARGUMENTS: list[Any] = [  # arguments after "quantize", exit code, what the line says
    pytest.param("gone.npy --dtype int8", 1, "gone.npy: cannot be read: No such file",
                 id="missing"),
    pytest.param(". --dtype int8", 1, ".: is a folder without config.json", id="folder"),
    pytest.param("other.json --dtype int8", 1,
                 "other.json: holds no .npy, .npz, .safetensors or ONNX data", id="other-file"),
    pytest.param("x.npy --dtype itn4", 2,
                 "--dtype: 'itn4' is not an element type; did you mean int4 or uint4?",
                 id="unknown-type"),
    pytest.param("x.npy --dtype int4 --method ms", 2,
                 "--method: 'ms' is unknown; did you mean mse?",
                 id="nearest-method"),
    pytest.param("x.npy --preset nvpf4", 2, "--preset: 'nvpf4' is unknown; did you mean nvfp4?",
                 id="nearest-preset"),
    pytest.param("x.npy --dtype int4 --layout mlc", 2,
                 "--layout: 'mlc' is unknown; did you mean mlx?",
                 id="nearest-layout"),
    pytest.param("x.npy --dtype int8 -o y", 2, "y: its name does not say what to write; "
                 "end it in .safetensors or .npz or .npy", id="no-suffix"),
    pytest.param("x.npy --dtype float32", 2, "does not produce float32", id="source-type"),
    pytest.param("x.npy --dtype int8 --axis 2", 1,
                 "tensor x: axis: 2 is out of range for rank 2; use -2 to 1", id="axis-too-large"),
    pytest.param("m.safetensors --dtype int8 --axis=-3", 1, "axis: -3 is out of range for rank 2",
                 id="axis-too-small"),
    pytest.param("x.npy --dtype int8 --block-size 0", 2, "--block-size: 0 is not positive",
                 id="block-0"),
    pytest.param("x.npy --dtype int8 --block-size -4", 2, "--block-size: -4 is not positive",
                 id="block-minus-4"),
    pytest.param("x.npy --dtype int8 --method percentile:0", 2,
                 "percentile 0 is outside (0, 100]", id="percentile-0"),
    pytest.param("x.npy --dtype int8 --method percentile:100.1", 2,
                 "percentile 100.1 is outside (0, 100]", id="percentile-above-100"),
    pytest.param("x.npy --dtype int8 --method percentile:x", 2,
                 "'percentile:x' is unknown; use absmax, minmax, mse, optimal, entropy or",
                 id="percentile-x"),
    pytest.param("x.npy --dtype int8 --method best", 2, "--method: 'best' is unknown", id="method"),
    pytest.param("x.npy --dtype int8 --method minmax --symmetric", 2, "use --asymmetric",
                 id="contradicting-method"),
    pytest.param("x.npy --dtype float8e4m3fn --asymmetric", 2,
                 "--asymmetric: float8e4m3fn has no zero point to shift its grid by; quantize "
                 "float types symmetrically", id="asymmetric-float"),
    pytest.param("x.npy --dtype float8e4m3fn --narrow-range", 2,
                 "--narrow-range: float8e4m3fn is a float type", id="narrow-float"),
    pytest.param("x.npy --dtype int8 --no-saturate", 2,
                 "--no-saturate: int8 always saturates; doing without is for the float8 types",
                 id="no-saturate"),
    pytest.param("x.npy --dtype int8 --precision float64", 2,
                 "--precision: float64 is not allowed; use float32, float16, bfloat16",
                 id="precision"),
    pytest.param("x.npy --dtype int8 --scale-dtype int8", 2,
                 "--scale-dtype: int8 is not allowed; use float32, float16, bfloat16, float8e8m0, "
                 "float8e4m3fn", id="scale-dtype"),
    pytest.param("x.npy --dtype int8 --scale-dtype foo", 2,
                 "--scale-dtype: 'foo' is not an element type; use float32, float16, bfloat16, "
                 "float8e8m0, float8e4m3fn", id="unknown-scale-dtype"),
    pytest.param("x.npy --dtype float8e4m3fn --method minmax", 2, "--method: float8e4m3fn has no",
                 id="minmax-float"),
    pytest.param("x.npy --dtype int8 --nonfinite maybe", 2,
                 "--nonfinite: 'maybe' is unknown; use error or allow", id="nonfinite"),
    pytest.param("x.npy --dtype int8 --semantics dnn", 2,
                 "--semantics: 'dnn' is unknown; use onnx or onednn", id="semantics"),
    pytest.param("x.npy --dtype int4 --semantics onednn", 2,
                 "oneDNN Quantize does not produce int4", id="onednn-int4"),
    pytest.param("x.npy --dtype int8 --semantics onednn --block-size 2", 2,
                 "--semantics: oneDNN Quantize has no blocks", id="onednn-blocks"),
    pytest.param("nan.safetensors --dtype int8", 1,
                 "tensor w: nan at [1, 2]: 1 of 6 values is not finite; mend the weights, or use "
                 "--nonfinite allow", id="nan"),
    pytest.param("inf.npy --dtype int8", 1, "tensor inf: inf at [1]: 1 of 2 values is not finite;",
                 id="inf"),
    pytest.param("wide.npy --dtype int8", 1, "1e+39 at [1]: 1 of 2 values is not finite in float32",
                 id="beyond-float32"),
    pytest.param("raw.npy --dtype int8", 1, "--source-dtype", id="raw-bytes"),
    pytest.param("raw.npy --dtype int8 --source-dtype float32", 1, "raw.npy", id="wrong-width"),
    pytest.param("x.npy --dtype int8 --source-dtype bf16", 2, "--source-dtype: 'bf16' is not an",
                 id="unknown-source-type"),
    pytest.param("m.safetensors --dtype int8 --source-dtype bfloat16", 1,
                 "leave --source-dtype out", id="source-type-of-safetensors"),
    pytest.param("ids.npy --dtype int8", 1, "int64 is not a source type", id="int64-array"),
    pytest.param("q.safetensors --dtype int4", 1,
                 "q.safetensors: is quantized already (qtool); dequantize it first, or use "
                 "--requantize", id="quantized-by-qtool"),
    pytest.param("vector.safetensors --dtype int8", 1,
                 "vector.safetensors: nothing to quantize: rank below 2 (1); use --allow-empty",
                 id="nothing"),
    pytest.param("m.npz --dtype int8 --include z", 1,
                 "nothing to quantize: not included (2), pattern 'z' matches no tensor",
                 id="nothing-included"),
    pytest.param("m.npz --dtype int8 --include re:[", 2,
                 "pattern 're:[': is not a regular expression", id="bad-expression"),
    pytest.param("twice.safetensors --dtype int8", 1,
                 "tensor w.scale: its name is needed for parameters of w", id="name-collision"),
    pytest.param("x.npy --dtype int8 -o q.safetensors", 1,
                 "q.safetensors: exists already; choose another name or --force", id="exists"),
    pytest.param("x.npy --dtype int8 -o none/y.npz", 1, "create its folder first", id="no-folder"),
    pytest.param("x.npy --dtype int8 -o y.bin", 2, "cannot be written as bin; end its name in "
                 ".safetensors or .npz or .npy", id="unknown-suffix"),
    pytest.param("x.npy --dtype int8 -o y.onnx", 2, "cannot be written as onnx",
                 id="array-to-onnx"),
    pytest.param("m.onnx --dtype int8 -o y.npz", 2, "onnx cannot be written as npz",
                 id="onnx-to-npz"),
    pytest.param("m.onnx --dtype int8 --to npz", 2, "--to: npz cannot be written from onnx",
                 id="to-npz-from-onnx"),
    pytest.param("x.npy --dtype int8 --to gguf", 2, "use safetensors, npz, npy", id="to-unknown"),
    pytest.param("x.npy --dtype int8 -o y.npz --to npy", 2, "its suffix contradicts --to npy",
                 id="to-against-suffix"),
    pytest.param("m.npz --dtype int8 --to npy", 1,
                 "m.int8.npy: a .npy file holds one array, 2 tensors are quantized",
                 id="two-in-npy"),
    pytest.param("x.npy --dtype int8 --external-data", 2,
                 "--external-data: safetensors has none; it is for ONNX models",
                 id="external-data"),
    pytest.param("x.npy --dtype int8 --report other.json", 1,
                 "report other.json: exists and is no qtool report", id="report-over-other-file"),
    pytest.param("x.npy --dtype int8 --report none/r.json", 1, "create its folder first",
                 id="report-without-folder"),
    pytest.param("x.npy --dtype int8 --report x.npy", 1, "report x.npy: is also x.npy",
                 id="report-over-source"),
    pytest.param("x.npy --dtype int8 -o y.npz --report y.npz", 1, "report y.npz: is also y.npz",
                 id="report-over-target"),
    pytest.param("x.npy --dtype int8 --report -", 2, "print the report with --json",
                 id="report-on-standard-output"),
    pytest.param("x.npy --dtype int8 -o - --json", 2,
                 "--json: standard output carries the file; use --report FILE", id="two-results"),
    pytest.param("x.npy --dtype int8 --zero-point 1", 2, "given without --scale", id="no-scale"),
    pytest.param("x.npy --dtype int8 --scale 1 --method absmax", 2, "--scale: replaces --method",
                 id="scale-and-method"),
    pytest.param("x.npy --dtype int8 --scale 1 --asymmetric", 2, "--scale: replaces --method",
                 id="scale-and-symmetry"),
    pytest.param("x.npy --dtype int8 --scale 0", 1, "scales must be finite and not zero",
                 id="zero-scale"),
    pytest.param("x.npy --dtype int8 --scale nan", 1, "scales must be finite and not zero",
                 id="nan-scale"),
    pytest.param("x.npy --dtype int8 --scale inf", 1, "scales must be finite and not zero",
                 id="infinite-scale"),
    pytest.param("x.npy --dtype int8 --scale 1e-46", 1, "scales must be finite and not zero",
                 id="underflowing-scale"),
    pytest.param("x.npy --dtype int8 --scale -1", 1, "use --negative-scale", id="negative-scale"),
    pytest.param("x.npy --dtype int8 --scale three.npy", 1,
                 "shape (3,), but the granularity needs ()", id="scale-shape"),
    pytest.param("x.npy --dtype int8 --axis 0 --scale three.npy", 1,
                 "shape (3,), but the granularity needs (2,)", id="scale-shape-of-other-axis"),
    pytest.param("x.npy --dtype int8 --axis 1 --scale third_zero.npy", 1,
                 "scales must be finite and not zero", id="one-zero-scale"),
    pytest.param("x.npy --dtype int8 --scale gone.npy", 1,
                 "--scale: 'gone.npy' is neither a number nor a file", id="no-scale-file"),
    pytest.param("x.npy --dtype int8 --scale m.onnx", 1, "m.onnx: is an ONNX model",
                 id="scale-from-onnx"),
    pytest.param("x.npy --dtype int8 --scale vector.safetensors", 1,
                 "vector.safetensors: holds no NAME.scale", id="file-without-scales"),
    pytest.param("x.npy --dtype int8 --scale q.safetensors", 1,
                 "nothing to quantize: no scale is given for it (1)", id="scales-of-others"),
    pytest.param("x.npy --dtype uint8 --scale 1 --zero-point 256", 1,
                 "use whole values in [0, 255]",
                 id="zero-point-too-large"),
    pytest.param("x.npy --dtype int8 --scale 1 --zero-point 0.5", 1,
                 "a value that int8 cannot hold", id="zero-point-not-integer"),
    pytest.param("x.npy --dtype int8 --axis 0 --scale 1 --zero-point three.npy", 1,
                 "shape (3,), but the granularity needs (2,)", id="zero-point-shape"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), ARGUMENTS)
def test_quantize_refuses_in_one_line_and_writes_nothing(
    arguments: str, code: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = content(folder)
    assert message in refused("quantize", *arguments.split(), code=code)
    assert content(folder) == before


def save_object(path: Path) -> None:
    np.save(path, np.array([{}, None], object), allow_pickle=True)


def save_archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=WEIGHT)


ARRAYS = [
    pytest.param(save_object, id="objects"),
    pytest.param(lambda path: path.write_bytes(pickle.dumps([1.0])), id="pickle"),
    pytest.param(save_archive, id="archive"),
    pytest.param(lambda path: path.write_bytes(b""), id="empty"),
    pytest.param(lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), id="truncated"),
]


@pytest.mark.parametrize("save", ARRAYS)
@pytest.mark.parametrize("command", ["quantize", "dynamic", "dequantize", "inspect"])
def test_files_that_are_no_array_are_refused_and_never_unpickled(
    save: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    save(tmp_path / "x.npy")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    options = ["--dtype", "int8"] if command == "quantize" else []
    message = refused(command, tmp_path / "x.npy", *options)
    assert "x.npy" in message
    assert "allow_pickle" not in message
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_opened_is_named_with_the_cause(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "x.npy"))
        message = refused("quantize", tmp_path / "x.npy", "--dtype", "int8")
    assert message == f"{tmp_path}/x.npy: cannot be read: No such device or address"


QUANTIZED: list[Any] = [
    pytest.param({"a.weight": np.ones((2, 2), np.int8), "a.weight_scale": float32([[1], [1]])},
                 "compressed-tensors", id="int8-with-weight-scale"),
    pytest.param({"a.weight_packed": np.ones((2, 1), np.int32),
                  "a.weight_scale": float32([[1], [1]]), "a.weight_shape": np.array([2, 8])},
                 "compressed-tensors", id="packed"),
    pytest.param({"a.qweight": np.ones((1, 8), np.int32), "a.scales": np.ones((1, 8), np.float16),
                  "a.qzeros": np.ones((1, 1), np.int32)}, "GPTQ", id="gptq"),
    pytest.param({"a.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
                  "a.weight_scale_inv": float32([[1]])}, "block float8", id="float8"),
    pytest.param({"a.weight": uint8([1]), "a.weight.absmax": float32([1]),
                  "a.weight.quant_map": float32([1])}, "bitsandbytes", id="bitsandbytes"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["quantize", "dynamic"])
@pytest.mark.parametrize(("tensors", "tool"), QUANTIZED)
def test_what_other_tools_quantized_is_refused(
    tensors: dict[str, Array], tool: str, command: str, tmp_path: Path
) -> None:
    save_file({"w": WEIGHT, **tensors}, tmp_path / "m.safetensors")
    options = ["--dtype", "int8"] if command == "quantize" else []
    message = refused(command, tmp_path / "m.safetensors", *options)
    assert "is quantized already" in message
    assert tool in message
    assert "--requantize" in message


@pytest.mark.parametrize("command", ["quantize", "dynamic"])
def test_a_quantized_onnx_model_is_refused(command: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    tensors = [
        onnx_models.initializer("q", [[1, 2]], np.int8),
        onnx_models.initializer("s", 0.5),
        onnx_models.initializer("v", np.ones((2, 64))),
    ]
    model = onnx_models.model(nodes, tensors, inputs={"x": [1, 1]})
    source = onnx_models.save(model, tmp_path / "m.onnx")
    options = ["--dtype", "int8"] if command == "quantize" else []
    message = refused(command, source, *options)
    assert "is quantized already (DequantizeLinear of q)" in message
    ok(command, source, *options, "--requantize", "-o", tmp_path / "y.onnx")
    found = initializers(tmp_path / "y.onnx")
    assert {"q", "s", "v_quantized", "v_scale"} <= set(found)
    assert (found["q"].dtype.name, found["q"].tolist()) == ("int8", [[1, 2]])
    assert (found["s"].dtype.name, found["s"].tolist()) == ("float32", 0.5)


def link(source: Path, folder: Path) -> Path:
    (folder / "link.npy").symlink_to(source)
    return folder / "link.npy"


def hard_link(source: Path, folder: Path) -> Path:
    os.link(source, folder / "hard.npy")
    return folder / "hard.npy"


NAMES = [
    pytest.param(lambda source, folder: source, id="same"),
    pytest.param(lambda source, folder: Path(f"{folder}/../{folder.name}/./x.npy"), id="dots"),
    pytest.param(lambda source, folder: Path("./x.npy"), id="relative"),
    pytest.param(link, id="symbolic-link"),
    pytest.param(hard_link, id="hard-link"),
]


@pytest.mark.parametrize("role", ["target", "report"])
@pytest.mark.parametrize("alias", NAMES)
@pytest.mark.parametrize("command", ["quantize", "dynamic", "dequantize"])
def test_the_source_is_never_written_whatever_it_is_called(
    command: str, alias: Any, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "x.npy"
    np.save(source, WEIGHT)
    before = source.read_bytes()
    other = str(alias(source, tmp_path))
    options = {"quantize": ["--dtype", "int8"], "dequantize": ["--scale", "1"]}.get(command, [])
    options += ["--force", "-o", other] if role == "target" else ["-o", "y.npy", "--report", other]
    if role == "report" and command == "dequantize":
        assert "No such option" in run_usage(command, source, *options)
    else:
        assert "x.npy" in refused(command, source, *options)
    assert source.read_bytes() == before
    assert not (tmp_path / "y.npy").exists()


def run_usage(*arguments: str | Path) -> str:
    done = qtool(*arguments)
    assert (done.code, done.out) == (2, b"")
    return done.err


@pytest.mark.parametrize(
    "options",
    [["-o", "w.onnx"], ["-o", "hard.onnx"], ["--report", "w.onnx"]],
    ids=["target", "hard-link", "report"],
)
def test_a_model_does_not_replace_its_own_external_data(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.onnx")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx_models.model([node], [], inputs={"x": [1, 2], "w": [2, 3]})
    del model.graph.input[1]
    model.graph.initializer.append(weight)
    onnx_models.save(model, tmp_path / "m.onnx")
    (tmp_path / "w.onnx").write_bytes(WEIGHT.tobytes())
    os.link(tmp_path / "w.onnx", tmp_path / "hard.onnx")
    monkeypatch.chdir(tmp_path)
    assert "w.onnx" in refused("quantize", "m.onnx", "--dtype", "int8", "--force", *options)
    assert (tmp_path / "w.onnx").read_bytes() == WEIGHT.tobytes()


def test_a_type_or_a_preset_has_to_be_given(tmp_path: Path) -> None:
    message = refused("quantize", tmp_path / "absent.npy", code=2)
    assert message == "--dtype: no type to quantize to; give one, or a --preset"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["quantize", "--dtype", "int8"], id="no-source"),
        pytest.param(["finish", "x", "y"], id="two-folders"),
        pytest.param(["quantize", "x.npy", "--dtype", "int8", "--axis", "one"], id="axis-in-words"),
        pytest.param(["quantize", "x.npy", "--dtype", "int8", "--frobnicate"], id="no-such-option"),
        pytest.param(["frobnicate"], id="no-such-command"),
        pytest.param(["dynamic"], id="dynamic-without-source"),
        pytest.param(["dequantize"], id="dequantize-without-source"),
        pytest.param(["inspect"], id="inspect-without-source"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_hint(arguments: list[str]) -> None:
    message = run_usage(*arguments)
    assert "Usage: qtool" in message
    assert "Traceback" not in message

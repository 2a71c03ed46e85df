"""Messages name the file as it was given and the rule in words of their own; remedies help; tables
end in text."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import float32, ok, qtool, refused
from safetensors.numpy import save_file

EXAMPLES = Path(__file__).parents[1] / "examples"
W = np.arange(12, dtype=np.float32).reshape(3, 4)
ENTRY = {
    "dtype": "int8", "shape": [2, 2], "granularity": "per_tensor", "axis": None,
    "block_size": None, "scale_dtype": "float32", "source_dtype": "float32", "zero_point": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every kind, some of them damaged, in the current folder."""
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", W)
    np.save("ids.npy", np.arange(5))
    np.save("raw.npy", np.zeros((2, 8), "V2"))
    save_file({"w": W}, "w.safetensors")
    save_file({"ids": np.arange(4)}, "ids.safetensors")
    np.savez("flipped.npz", w=W)
    data = bytearray(Path("flipped.npz").read_bytes())
    with zipfile.ZipFile("flipped.npz") as archive:
        at = archive.getinfo("w.npy").file_size
    data[at] ^= 255  # in the last of its bytes
    Path("flipped.npz").write_bytes(data)
    Path("latin.toml").write_bytes(b"dtype = '\xff'")
    Path("digits.json").write_text('{"a": ' + "1" * 5000 + "}")
    for name, text in {"a": "{", "b": '{"version":1,"tensors":{"w":{}}}'}.items():
        save_file({"w": np.zeros(4, np.int8)}, f"{name}.safetensors", {"qtool": text})
    shutil.copy(EXAMPLES / "digits.onnx", "m.onnx")
    Path("m").mkdir()
    save_file({"w.weight": W}, "m/model.safetensors")
    Path("m/config.json").write_text('{"a": 1,}')


ANEW = "write or fetch the file anew"
NO_SIZE = "say what they are with --source-dtype: int16, uint16, float16, bfloat16"
LINES = [
    ("inspect flipped.npz --stats", 1, f"flipped.npz, w.npy: damaged zip archive; {ANEW}"),
    ("inspect a.safetensors", 1,
     "a.safetensors: metadata 'qtool': is no JSON: expecting property name enclosed in double "
     f"quotes at line 1, column 2; {ANEW}"),
    ("inspect b.safetensors", 1,
     f"b.safetensors: metadata 'qtool' of tensor 'w': is not as qtool writes it; {ANEW}"),
    ("inspect m", 1, "m/config.json: is not valid JSON: expecting property name enclosed in double "
                     "quotes at line 1, column 9"),
    ("report digits.json", 1, "digits.json: is no JSON object (a number in it has too many digits);"
                              " give a report that qtool has written"),
    ("recipe --recipe latin.toml", 1, "latin.toml: is no TOML: its byte 9 is no UTF-8"),
    ("--config latin.toml presets", 1, "latin.toml: is no TOML: its byte 9 is no UTF-8"),
    ("inspect raw.npy", 1, f"raw.npy: holds raw elements of 2 bytes; {NO_SIZE}, or save them as "
                           "float32"),
    ("calibrate w.npy ids.npy --dtype int8 -o s.safetensors", 1,
     "ids.npy: nothing to calibrate: int64 is no source type"),
    ("quantize w.safetensors --dtype int4 --importance ids.npy", 2,
     "--importance: 'ids' is no tensor of the source; the nearest name is 'w'; NAME=ids.npy says "
     "whose it is"),
    ("quantize w.safetensors --dtype int4 --importance w=ids.npy", 1,
     "ids of ids.npy: holds int64; give float32 weights"),
    ("quantize w.safetensors --dtype int4 --activations w=", 2,
     "--activations: 'w=' has no FILE; use NAME=FILE or FILE"),
    ("quantize w.safetensors --dtype int4 --importance activations:", 2,
     "--importance: '' has no FILE; use NAME=FILE or FILE"),
    ("quantize w.safetensors --dtype int4 --scale s.npz", 1,
     "--scale: 's.npz' is neither a number nor a file; give a number, or a .npy, .npz or "
     ".safetensors file"),
    ("quantize w.safetensors --dtype int8 --scale 1 --zero-point 1.5", 1,
     "zero_point of w: a value that int8 cannot hold; use whole values in [-128, 127]"),
    ("quantize w.safetensors w.safetensors --dtype int4 -o out/", 2,
     "w.safetensors: is given twice; leave one of them out"),
    ("finish out", 1, "out.partial: has no shards; make them by `qtool quantize --shards K/N`"),
    ("compare ids.safetensors", 1, "ids.safetensors: nothing to quantize: int64 is no source type "
                                   "(1)"),
    ("compare w.npy --methods percentile:x", 2,
     "--methods: 'percentile:x' is unknown; use absmax, minmax, mse, optimal, entropy or "
     "percentile:P with P in (0, 100]"),
    ("dynamic w.npy --dtype float32", 2,
     "--dtype: DynamicQuantizeLinear does not produce float32; use uint8 or int8"),
    ("dynamic w.npy --dtype fp8", 2, "--dtype: 'fp8' is not an element type; use uint8, int8"),
    ("dequantize w.safetensors --dtype fp8", 2,
     "--dtype: 'fp8' is not an element type; use float16, bfloat16, float32, float64"),
    ("dequantize w.safetensors -o y", 2,
     "y: its name does not say what to write; end it in .safetensors"),
    ("quantize w.npy --dtype int4 --target-bits 0", 2,
     "--target-bits: 0.0 is not above 0; use for example 4.5"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "message"), LINES, ids=[line for line, _, _ in LINES])
def test_a_message_is_this_line(line: str, code: int, message: str) -> None:
    assert refused(*line.split(), code=code) == message


def test_an_output_without_a_name_is_called_by_its_option() -> None:
    assert refused("quantize", "w.safetensors", "--dtype", "int4", "-o", "", code=2) == (
        "-o '': its name does not say what to write; end it in .safetensors or .npz or .npy"
    )
    assert refused("report", "digits.json", "-o", "", code=2) == (
        "-o '': its name does not say what to write; use .html, .md, .csv, .png"
    )


def test_the_remedy_for_a_model_to_capture_from_has_no_option_of_another_command() -> None:
    ok("quantize", "m.onnx", "-o", "q.onnx", "--dtype", "int8")
    np.save("x.npy", np.zeros((2, 64), np.float32))
    line = refused("capture", "q.onnx", "x.npy", "-o", "x.safetensors")
    assert line.endswith("; dequantize it first")
    assert refused("quantize", "q.onnx", "--dtype", "int8").endswith(
        "; dequantize it first, or use --requantize"
    )


@pytest.mark.parametrize(
    ("values", "of_quantize", "warning"),
    [
        ([1, np.nan], "nan at [1]: 1 of 2 values is not finite", "1 NaN in 1 tensor"),
        ([-np.inf, 1, np.inf], "-inf at [0]: 2 of 3 values are not finite", "2 Inf in 1 tensor"),
        (
            [np.nan, np.inf],
            "nan at [0]: 2 of 2 values are not finite",
            "1 NaN and 1 Inf in 1 tensor",
        ),
        ([np.nan], "nan at [0]: 1 of 1 value is not finite", "1 NaN in 1 tensor"),
    ],
    ids=str,
)
def test_what_is_not_finite_is_called_what_it_is(
    values: list[float], of_quantize: str, warning: str
) -> None:
    np.save("x.npy", float32(values))
    assert refused("quantize", "x.npy", "--dtype", "int8") == (
        f"tensor x: {of_quantize}; mend the weights, or use --nonfinite allow to saturate"
    )
    done = ok("quantize", "x.npy", "-o", "y.npz", "--dtype", "int8", "--nonfinite", "allow", "-q")
    assert done.err == f"warning: quantized {warning}\n"


def test_a_figure_without_a_value_is_null_as_in_the_report() -> None:
    ok("quantize", "w.safetensors", "-o", "q.safetensors", "--dtype", "int8")
    report: dict[str, Any] = json.loads(Path("q.report.json").read_text())
    del report["tensors"][0]["scale_min"]
    Path("q.report.json").write_text(json.dumps(report))
    done = qtool("verify", "w.safetensors", "q.safetensors", "-q")
    assert (done.code, done.out) == (3, b"")
    least = float(float32(3) / float32(127))  # of the first row
    assert done.err == f"qtool: w: its scale_min is {least}, the report says null\n"


def test_a_model_that_cannot_be_run_is_no_place_in_the_sources_of_onnxruntime() -> None:
    model = onnx.load("m.onnx")
    del model.opset_import[:]
    onnx.save(model, "bad.onnx")
    np.save("x.npy", np.zeros((2, 64), np.float32))
    line = refused("verify", "m.onnx", "bad.onnx", "--run", "x.npy")
    assert line.startswith("bad.onnx: onnxruntime cannot run it: Missing opset in the model. ")


@pytest.mark.parametrize("columns", ["", "60", "200"])
def test_tables_end_in_text(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ok("quantize", "w.safetensors", "-o", "q.safetensors", "--dtype", "int8")
    for line in (
        "presets", "dtypes", "inspect q.safetensors", "inspect w.safetensors --stats",
        "compare w.safetensors --dtypes int8,int4", "verify w.safetensors q.safetensors",
        "quantize w.safetensors --dtype int8 --dry-run",
    ):  # fmt: skip
        done = ok(*line.split())
        assert " \n" not in done.out.decode() + done.err, line

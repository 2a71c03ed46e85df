"""The public names of the package, their signatures, and that they agree with the command line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from command import float32, int8
from typer.main import get_command

import qtool
from qtool.cli import app

SIGNATURES = {
    "quantize_linear": "x, y_scale, y_zero_point=None, *, axis=1, block_size=0, output_dtype=None, "
    "precision=None, saturate=True",
    "dequantize_linear": "x, x_scale, x_zero_point=None, *, axis=1, block_size=0, "
    "output_dtype=None",
    "dynamic_quantize_linear": "x, *, dtype='uint8'",
    "onednn_quantize": "src, scales, zps=None, *, qtype='per_tensor', axis=1, dst='u8'",
    "PerTensor": "",
    "PerAxis": "axis",
    "Blocked": "axis, block_size",
    "Tiled": "shape",
    "quantize": "x, spec, *, scale=None, zero_point=None, importance=None, hessian=None, "
    "damping=None, act_order=None, name='x'",
}
SPEC = (
    "dtype, granularity, *, symmetric=None, method=None, scale_dtype=None, precision=None, "
    "saturate=True"
)
FILE = "src, dst=None, *, dtype=None, axis=None, block_size=None"


def signature(name: str) -> str:
    """The parameters of a public name, without their types."""
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(getattr(qtool, name)).parameters.values()
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_that_were_promised(name: str) -> None:
    assert signature(name) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("name", "start"), [("QuantSpec", SPEC), ("quantize_file", FILE)], ids=["QuantSpec", "file"]
)
def test_signatures_begin_as_promised(name: str, start: str) -> None:
    assert signature(name).startswith(start + ", ")


# What stands on the command line alone: how results are shown.
SHOWN = {"json", "json_lines", "quiet", "plot"}


@pytest.mark.parametrize("command", ["quantize", "dynamic", "dequantize", "inspect"])
def test_arguments_are_the_options_of_the_command_with_their_defaults(command: str) -> None:
    parameters = inspect.signature(getattr(qtool, f"{command}_file")).parameters
    options: dict[str, Any] = {
        p.name: p.default
        for p in get_command(app).commands[command].params  # type: ignore[attr-defined]
        if p.name not in SHOWN | {"help"}
    }
    defaults = {n: p.default for n, p in parameters.items() if n not in ("progress", "bins")}
    if "rule" in options:  # Python takes all of them at once
        options["rules"] = options.pop("rule")
    options["dst"] = options.pop("output", None)
    if command == "inspect":
        del options["dst"]
    assert set(options) == set(defaults)
    same = {None: None, (): None, inspect.Parameter.empty: None}
    assert {n: same.get(v, v) for n, v in defaults.items()} == {
        n: None if v in (None, []) else v for n, v in options.items()
    }


PUBLIC = [
    *SIGNATURES, "QuantSpec", "quantize_file", "dynamic_file", "dequantize_file", "inspect_file",
    "finish_folder", "open", "QtoolError", "QuantizedTensor",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_listed_and_documented(name: str) -> None:
    assert name in dir(qtool)
    assert inspect.getdoc(getattr(qtool, name))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'qtool' has no attribute 'frobnicate'"):
        qtool.frobnicate  # noqa: B018


@pytest.mark.parametrize("name", [n for n in SIGNATURES if n.islower()])
def test_public_functions_have_types(name: str) -> None:
    function = getattr(qtool, name)
    assert set(get_type_hints(function)) == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("dtype", ["int4", 22], ids=["name", "code"])
def test_element_types_go_by_name_and_by_code(dtype: str | int) -> None:
    y = qtool.quantize_linear(float32([1.5, -9]), float32(1), output_dtype=dtype)
    assert (y.dtype.name, y.tolist()) == ("int4", [2, -8])


def test_a_quantized_tensor_has_its_parts() -> None:
    tensor = qtool.quantize(float32([[1, 2], [3, 254]]), qtool.QuantSpec("int8", qtool.PerAxis(0)),
                            scale=[1, 2])  # fmt: skip
    assert tensor.y.tolist() == [[1, 2], [2, 127]]
    assert tensor.scale.tolist() == [1, 2]
    assert tensor.zero_point is None
    assert tensor.spec.granularity == qtool.PerAxis(0)
    assert (tensor.stats.clipped_low, tensor.stats.clipped_high) == (0, 0)
    assert tensor.dequantize().tolist() == [[1, 2], [4, 254]]


def test_open_reads_headers_and_single_tensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=float32([[1, 2]]), b=np.arange(3))
    source = qtool.open(tmp_path / "m.npz")
    infos = [(i.name, i.shape, i.dtype.name, i.nbytes) for i in source.infos()]
    assert infos == [("a", (1, 2), "float32", 8), ("b", (3,), "int64", 24)]
    assert source.read("b").tolist() == [0, 1, 2]
    source.close()


def test_quantize_file_takes_arrays_and_paths_and_returns_the_report(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", float32([[1, 2], [3, 254]]))
    report = qtool.quantize_file(
        tmp_path / "x.npy",
        tmp_path / "y.npz",
        dtype="int8",
        axis=0,
        scale=float32([1, 2]),
        zero_point=int8([1, -1]),
    )
    found = np.load(tmp_path / "y.npz")
    assert found["x"].tolist() == [[2, 3], [1, 126]]
    assert report["tensors"][0]["clipped"] == 0
    with pytest.raises(qtool.QtoolError, match="exists already"):
        qtool.quantize_file(tmp_path / "x.npy", tmp_path / "y.npz", dtype="int8")


def test_errors_are_value_errors_with_thing_rule_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder without") as caught:
        qtool.open(tmp_path)
    assert isinstance(caught.value, qtool.QtoolError)
    assert (caught.value.thing, caught.value.rule) == (
        str(tmp_path),
        "is a folder without config.json",
    )
    assert caught.value.remedy == "name a checkpoint folder, or a file in it"

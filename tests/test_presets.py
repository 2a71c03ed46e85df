"""Presets: what each stands for, that it is those options, and what stands beside one."""

from __future__ import annotations

import json
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command import ok, refused, report, stored, unsigned
from jsonschema import Draft202012Validator
from safetensors.numpy import save_file

import qtool

# What the standards and the runtimes that load them call by that name.
OPTIONS = {
    "int8": "--dtype int8 --dynamic-activations",
    "w8a16": "--dtype int8 --block-size 128",
    "w4a16": "--dtype int4 --block-size 128",
    "w4a16-asym": "--dtype int4 --block-size 128 --asymmetric",
    "int2": "--dtype int2 --block-size 64 --asymmetric",
    "fp8": "--dtype float8e4m3fn --dynamic-activations",
    "fp8-block": "--dtype float8e4m3fn --tile 128x128 --dynamic-activations",
    "mxfp4": "--dtype float4e2m1 --block-size 32 --scale-dtype float8e8m0",
    "mxfp6-e2m3": "--dtype float6e2m3 --block-size 32 --scale-dtype float8e8m0",
    "mxfp6-e3m2": "--dtype float6e3m2 --block-size 32 --scale-dtype float8e8m0",
    "mxfp8": "--dtype float8e4m3fn --block-size 32 --scale-dtype float8e8m0",
    "nvfp4": "--dtype float4e2m1 --block-size 16 --scale-dtype float8e4m3fn --global-scale",
}
COMPRESSED = "compressed-tensors"
# The rules of mx presets with method absmax.
RULES = {"mxfp4": "rceil-7.25", "mxfp6-e2m3": "even", "mxfp6-e3m2": "even", "mxfp8": "rceil"}
VALIDATOR = Draft202012Validator(
    json.loads(resources.files("qtool").joinpath("report.schema.json").read_text("utf-8"))
)
EVERY = pytest.mark.parametrize("preset", OPTIONS)
W = np.random.default_rng(31).standard_normal((300, 200)).astype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with a model in it."""
    monkeypatch.chdir(tmp_path)
    tensors = {"a.weight": W, "b.weight": W[:7], "a.bias": W[0]}
    save_file(tensors, "m.safetensors", metadata={"format": "pt"})


def presets() -> dict[str, str]:
    """The presets as `qtool presets --json` tells them."""
    return {row["name"]: row["options"] for row in ok("presets", "--json").json["presets"]}


def quantized(*options: str, source: str = "m.safetensors") -> tuple[Any, Any]:
    """What is written, and the report, but for recipes, which say the same in several ways."""
    target = Path("q" + Path(source).suffix)
    ok("quantize", source, "-o", target, "--force", *options)
    told = report(target)
    VALIDATOR.validate(told)
    del told["seconds"], told["recipe"], told["output"]["bytes"]
    del told["totals"]["file_bytes_after"]
    return unsigned(target), told


def first(*options: str) -> Any:
    """The report's entry of the first tensor, and the settings."""
    _, told = quantized(*options)
    return told["tensors"][0] | {"settings": told["settings"]}


def test_the_presets_are_these() -> None:
    found = {name: set(words.split(" --")) for name, words in presets().items()}
    assert found == {name: set(words.split(" --")) for name, words in OPTIONS.items()}


def test_they_are_listed_one_a_line() -> None:
    lines = ok("presets").out.decode().splitlines()
    told = presets()
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.split()}
    assert {name: found.get(name) for name in told} == told


PLACES = [("m.safetensors", "native"), ("m.npz", "native"), ("m.safetensors", COMPRESSED)]


@pytest.mark.parametrize(
    ("preset", "source", "layout"),
    [
        pytest.param(preset, *place, id="-".join([preset, *place]))
        for preset, place in product(OPTIONS, PLACES)
        if (preset, place[1]) != ("mxfp6-e3m2", COMPRESSED)  # which has no format for it
    ],
)
def test_a_preset_is_the_options_that_are_printed(preset: str, source: str, layout: str) -> None:
    np.savez("m.npz", w=W.astype(np.float32), v=W[:7].astype(np.float16))
    even = np.ascontiguousarray(W[:, :128])
    save_file({"a.weight": even, "b.weight": even[:7], "a.bias": W[0]}, "m.safetensors")
    words = [*presets()[preset].split(), "--layout", layout]
    written, told = quantized(*words, source=source)
    assert told["settings"].pop("preset") is None
    by_name, told_by_name = quantized("--preset", preset, "--layout", layout, source=source)
    assert told_by_name["settings"].pop("preset") == preset
    assert by_name == written
    assert told_by_name == told


@EVERY
def test_a_preset_says_how_tensors_are_quantized(preset: str) -> None:
    words = OPTIONS[preset].replace("--global-scale", "--global-scale yes")
    for flag in ("--asymmetric", "--dynamic-activations"):
        words = words.replace(flag, f"{flag} yes")
    given = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    tile = [128, 128] if "--tile" in given else None
    size = int(given["--block-size"]) if "--block-size" in given else None
    found = first("--preset", preset)
    assert (found["dtype"], found["block_size"], found["tile"]) == (given["--dtype"], size, tile)
    assert found["axis"] == (None if tile else 1 if size else 0)
    assert found["scale_dtype"] == given.get("--scale-dtype", "bfloat16")
    assert (found["global_scale"] is not None) == ("--global-scale" in given)
    assert found["zero_point"] == ("--asymmetric" in given)
    searches = given["--dtype"] in ("int2", "int4", "float4e2m1") or preset in RULES
    assert (found["settings"]["method"] == "mse") == searches
    assert found["mx_rule"] is found["settings"]["mx_rule"] is None
    assert found["settings"]["dynamic_activations"] == ("--dynamic-activations" in given)


@pytest.mark.parametrize("preset", RULES)
def test_without_a_search_an_mx_preset_follows_a_rule(preset: str) -> None:
    found = first("--preset", preset, "--method", "absmax")
    assert found["mx_rule"] == found["settings"]["mx_rule"] == RULES[preset]


@EVERY
def test_the_output_is_named_after_the_preset(preset: str) -> None:
    ok("quantize", "m.safetensors", "--preset", preset)
    assert {path.name for path in Path().iterdir()} == {
        "m.safetensors", f"m.{preset}.safetensors", f"m.{preset}.report.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("--preset w4a16 --block-size 32", {"block_size": 32, "dtype": "int4"}),
        ("--preset w4a16 --axis 0", {"granularity": "per_axis", "axis": 0, "block_size": None}),
        ("--preset w4a16 --axis 0 --block-size 8", {"axis": 0, "block_size": 8}),
        ("--preset w4a16 --tile 64x32", {"granularity": "tiled", "tile": [64, 32]}),
        ("--preset w4a16 --dtype int8", {"dtype": "int8", "block_size": 128}),
        ("--preset w4a16 --asymmetric", {"zero_point": True}),
        ("--preset w4a16 --method percentile:99", {"zero_point": False}),
        ("--preset w4a16-asym --symmetric", {"zero_point": False}),
        ("--preset w4a16-asym --method absmax", {"zero_point": False}),
        ("--preset w4a16-asym --method minmax", {"zero_point": True}),
        ("--preset w4a16-asym --scale-dtype float32", {"scale_dtype": "float32"}),
        ("--preset fp8-block --tile 16x16", {"tile": [16, 16]}),
        ("--preset fp8-block --block-size 32", {"granularity": "blocked", "tile": None}),
        ("--preset fp8-block --axis 1", {"granularity": "per_axis", "axis": 1}),
        ("--preset mxfp4 --mx-rule floor", {"mx_rule": "floor", "scale_dtype": "float8e8m0"}),
        ("--preset mxfp4 --scale-dtype float32", {"mx_rule": None, "scale_dtype": "float32"}),
        ("--preset mxfp4 --dtype int4", {"mx_rule": None, "dtype": "int4"}),
        ("--preset mxfp4 --dtype int4 --method absmax", {"mx_rule": "even", "dtype": "int4"}),
        ("--preset nvfp4 --block-size 32", {"block_size": 32, "scale_dtype": "float8e4m3fn"}),
        ("--preset nvfp4 --no-global-scale", {"global_scale": None, "block_size": 16}),
        ("--preset nvfp4 --no-global-scale --scale-dtype float16",
         {"global_scale": None, "scale_dtype": "float16"}),
    ],
)  # fmt: skip
def test_options_beside_a_preset_take_precedence(options: str, changed: dict[str, Any]) -> None:
    found = first(*options.split())
    assert {name: found[name] for name in changed} == changed
    assert found["settings"]["preset"] == options.split()[1]


def test_activations_may_be_left_out_of_a_preset() -> None:
    _, told = quantized("--preset", "int8", "--no-dynamic-activations")
    assert told["settings"]["dynamic_activations"] is False


def test_a_method_beside_a_preset_stands_in_the_report() -> None:
    assert first("--preset", "w4a16-asym", "--method", "percentile:99.9")["settings"]["method"] == (
        "percentile:99.9"
    )


def test_presets_work_from_python_too() -> None:
    told = qtool.quantize_file("m.safetensors", "p.safetensors", preset="nvfp4", block_size=32)
    written, _ = quantized("--preset", "nvfp4", "--block-size", "32")
    assert unsigned(Path("p.safetensors")) == written
    assert told["settings"]["preset"] == "nvfp4"


def test_a_given_scale_takes_the_place_of_a_presets_choice() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--preset", "w4a16-asym",
       "--scale", "0.25", "--zero-point", "1")  # fmt: skip
    found = stored(Path("q.safetensors"))
    assert set(found["a.weight.scale"].astype(float).flat) == {0.25}
    (row, *_) = report(Path("q.safetensors"))["tensors"]
    assert (row["dtype"], row["block_size"], row["zero_point"]) == ("int4", 128, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--preset q5_k", "--preset: 'q5_k' is unknown; use " + ", ".join(OPTIONS)),
        ("--preset nvfp4 --scale-dtype float16",
         "--global-scale: it stands over float8e4m3fn scales of a symmetric grid; "
         "use it with --scale-dtype float8e4m3fn"),
        ("--preset w4a16 --mx-rule even",
         "--mx-rule: it chooses the float8e8m0 scales of a symmetric grid; "
         "use it with --scale-dtype float8e8m0"),
        ("--preset mxfp6-e2m3 --mx-rule rceil-7.25",
         "--mx-rule: rceil-7.25 is for float4e2m1, not float6e2m3"),
        ("--preset fp8 --tile 128x128 --block-size 32",
         "--tile: replaces --axis and --block-size; leave one of them out"),
        ("--preset fp8 --tile 128", "--tile: '128' is not ROWSxCOLUMNS; use for example 128x128"),
        ("--preset fp8 --asymmetric",
         "--asymmetric: float8e4m3fn has no zero point to shift its grid by; "
         "quantize float types symmetrically"),
    ],
)  # fmt: skip
def test_what_contradicts_a_preset_is_wrong_usage(options: str, message: str) -> None:
    assert refused("quantize", "m.safetensors", *options.split(), code=2) == message
    assert [path.name for path in Path().iterdir()] == ["m.safetensors"]

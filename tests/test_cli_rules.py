"""qtool quantize --rule and --recipe, and qtool recipe: every tensor as its own words say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from command import initializers, ok, refused, report, stored, strict
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import qtool

RNG = np.random.default_rng(3)
NAMES = ("a.weight", "b.weight", "c.weight")
TENSORS = {
    name: (RNG.standard_normal((n, 256)) * 0.1).astype(np.float32)
    for name, n in zip(NAMES, (64, 32, 16), strict=True)
}
# rules, and the options that each tensor has by them
RULES = ("b*: dtype=int8, block_size=64", "c.weight: preset=mxfp4")
OPTIONS = {
    "a.weight": "--dtype int4 --block-size 32",
    "b.weight": "--dtype int8 --block-size 64",
    "c.weight": "--preset mxfp4",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with a model in it."""
    monkeypatch.chdir(tmp_path)
    save_file({**TENSORS, "a.bias": TENSORS["a.weight"][0]}, "m.safetensors")


def by_rules(*rules: str) -> list[str]:
    return [word for rule in rules for word in ("--rule", rule)]


def checkpoint(**tensors: np.ndarray) -> Path:
    """A folder of two shards."""
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "test"}')
    places = {}
    for i, name in enumerate(tensors):
        places[name] = f"model-{i % 2 + 1:05}-of-00002.safetensors"
    for shard in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def model(**weights: np.ndarray) -> Path:
    """An ONNX model that multiplies by its weights, one after the other."""
    nodes, last = [], "x"
    for i, name in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [last, name], [f"y{i}"]))
        last = f"y{i}"
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 256])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [2, 256])],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, "m.onnx")
    return Path("m.onnx")


def test_each_tensor_is_quantized_as_if_alone() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--dtype", "int4", "--block-size", "32",
       *by_rules(*RULES))  # fmt: skip
    together, told = stored(Path("q.safetensors")), report(Path("q.safetensors"))
    for name, options in OPTIONS.items():
        save_file({name: TENSORS[name]}, "one.safetensors")
        ok("quantize", "one.safetensors", "-o", "1.safetensors", "--force", *options.split())
        alone = stored(Path("1.safetensors"))
        for part, values in alone.items():
            np.testing.assert_array_equal(together[part].view("u1"), values.view("u1"))
        [row] = [row for row in told["tensors"] if row["name"] == name]
        assert row == report(Path("1.safetensors"))["tensors"][0]
    assert told["settings"]["dtype"] == "int4"
    assert told["settings"]["rules"] == [
        {"patterns": ["b*"], "words": "dtype=int8, block_size=64"},
        {"patterns": ["c.weight"], "words": "preset=mxfp4"},
    ]


def test_what_inspect_and_dequantize_make_of_a_mixture() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--dtype", "int4", *by_rules(*RULES))
    rows = {row["name"]: row for row in ok("inspect", "q.safetensors", "--json").json["tensors"]}
    assert [rows[n]["dtype"] for n in NAMES] == ["int4", "int8", "float4e2m1"]
    assert [rows[n]["quantization"]["block_size"] for n in NAMES] == [None, 64, 32]
    ok("dequantize", "q.safetensors", "-o", "f.safetensors")
    back = stored(Path("f.safetensors"))
    errors = {row["name"]: row["rmse"] for row in report(Path("q.safetensors"))["tensors"]}
    for name in NAMES:
        rmse = np.sqrt(np.mean((back[name].astype(float) - TENSORS[name].astype(float)) ** 2))
        assert rmse == pytest.approx(errors[name], rel=1e-9)


def test_rules_hold_in_npz_too() -> None:
    np.savez("m.npz", **TENSORS)
    ok("quantize", "m.npz", "-o", "q.npz", *by_rules("a*: dtype=int8", "b*: dtype=uint8, axis=1"))
    with np.load("q.npz") as made:
        assert {n: (made[n].dtype.name, made[n].shape) for n in made if n[0] in "abc"} == {
            "a.weight": ("int8", (64, 256)), "a.weight.scale": ("float32", (64,)),
            "b.weight": ("uint8", (32, 256)), "b.weight.scale": ("float32", (256,)),
            "b.weight.zero_point": ("uint8", (256,)), "c.weight": ("float32", (16, 256)),
        }  # fmt: skip
    assert report(Path("q.npz"))["skipped"] == [
        {"name": "c.weight", "reason": "no rule gives it a type"}
    ]


def test_one_array_has_its_rules() -> None:
    np.save("m.npy", TENSORS["a.weight"])
    ok("quantize", "m.npy", "-o", "q.npz", "--dtype", "int8", *by_rules("m: block_size=64"))
    with np.load("q.npz") as made:
        assert made["m.scale"].shape == (64, 4)


def test_skip_and_patterns_that_match_nothing() -> None:
    done = ok("quantize", "m.safetensors", "--dtype", "int8", "-o", "q.safetensors",
              *by_rules("*: skip", "a*: block_size=32", "z*: skip"))  # fmt: skip
    assert "warning: pattern 'z*' matches no tensor" in done.err.splitlines()
    told = report(Path("q.safetensors"))
    assert [row["name"] for row in told["tensors"]] == ["a.weight"]
    assert {(row["name"], row["reason"]) for row in told["skipped"]} == {
        ("b.weight", "skipped by a rule"), ("c.weight", "skipped by a rule"),
        ("a.bias", "rank below 2"),
    }  # fmt: skip


def test_a_file_whose_rules_alone_give_types_is_called_mixed() -> None:
    ok("quantize", "m.safetensors", *by_rules("a*: dtype=int8"))
    assert Path("m.mixed.safetensors").exists()
    assert Path("m.mixed.report.json").exists()
    assert report(Path("m.mixed.safetensors"))["settings"]["dtype"] is None


def test_an_onnx_model_with_weights_of_several_types_runs() -> None:
    weights = {n[0]: np.ascontiguousarray(TENSORS["a.weight"].repeat(4, 0)) for n in NAMES}
    ok("quantize", model(**weights), "-o", "q.onnx", "--dtype", "int4", "--block-size", "32",
       *by_rules("b: dtype=int8, block_size=none", "c: dtype=uint8, block_size=64"))  # fmt: skip
    made = initializers(Path("q.onnx"))
    assert [made[f"{n}_quantized"].dtype.name for n in "abc"] == ["int4", "int8", "uint8"]
    assert [made[f"{n}_scale"].shape for n in "abc"] == [(8, 256), (256,), (4, 256)]
    options = onnxruntime.SessionOptions()  # fused, it would quantize activations too
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession("q.onnx", options)
    x = RNG.standard_normal((2, 256)).astype(np.float32)
    [y] = session.run(None, {"x": x})
    ok("dequantize", "q.onnx", "-o", "f.onnx")
    [expected] = onnxruntime.InferenceSession("f.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)


def test_matmul_nbits_holds_weights_of_several_kinds() -> None:
    weights = {n[0]: np.ascontiguousarray(TENSORS["a.weight"].repeat(4, 0)) for n in NAMES}
    ok("quantize", model(**weights), "-o", "q.onnx", "--dtype", "int4", "--block-size", "32",
       "--layout", "matmul-nbits",
       *by_rules("b: dtype=int8", "c: dtype=uint4, block_size=64, symmetric=true"))  # fmt: skip
    found = [
        {a.name: helper.get_attribute_value(a) for a in node.attribute} | {"n": len(node.input)}
        for node in onnx.load("q.onnx").graph.node
    ]
    assert [(f["bits"], f["block_size"], f["n"]) for f in found] == [(4, 32, 3), (8, 32, 3),
                                                                     (4, 64, 3)]  # fmt: skip
    x = RNG.standard_normal((2, 256)).astype(np.float32)
    [y] = onnxruntime.InferenceSession("q.onnx").run(None, {"x": x})
    ok("dequantize", "q.onnx", "-o", "f.onnx")
    [expected] = onnxruntime.InferenceSession("f.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "rules", "message"),
    [
        ("--dtype int4", ["c: tile=8x8"], "--tile: ONNX has no word for tiles; use --block-size"),
        ("--dtype int4 --block-size 32 --layout matmul-nbits", ["c: dtype=float4e2m1"],
         "--layout: MatMulNBits holds no float4e2m1 codes; "
         "use int2, uint2, int4, uint4, int8, uint8"),
        ("--dtype int4 --block-size 32 --layout matmul-nbits", ["c: axis=0"],
         "--axis: MatMulNBits has blocks along the axis that it sums over; leave it out"),
        ("--dtype int4", ["c: dynamic_activations=true"],
         "--dynamic-activations: ONNX says it by operators in the graph; "
         "use `qtool dynamic --graph`"),
        ("--dtype int4 --scale 0.5", ["c: method=absmax"],
         "--scale: replaces --method and --symmetric; leave one of them out"),
        ("--dtype int4", ["c: dtpye=int8"],
         "rule 'c: dtpye=int8': 'dtpye' is unknown; did you mean dtype?"),
        ("--dtype float8e4m3fn", ["c: symmetric=false"],
         "rule 'c': symmetric: float8e4m3fn has no zero point to shift its grid by; "
         "quantize float types symmetrically"),
        ("--dtype int4", ["re:(: skip"], "pattern 're:(': is not a regular expression "
         "(missing ), unterminated subpattern at position 0); see Python's re"),
        ("", ["c: block_size=32"], "--dtype: no type to quantize to; give one, or a --preset"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_wrong_usage(options: str, rules: list[str], message: str) -> None:
    model(**{n[0]: np.ascontiguousarray(TENSORS["a.weight"].repeat(4, 0)) for n in NAMES})
    before = sorted(Path().iterdir())
    words = [*options.split(), *by_rules(*rules)]
    assert refused("quantize", "m.onnx", "-o", "q.onnx", *words, code=2) == message
    assert sorted(Path().iterdir()) == before


def test_compressed_tensors_names_the_modules_of_each_scheme() -> None:
    checkpoint(**TENSORS)
    ok("quantize", "model", "-o", "q", "--preset", "w4a16", "--layout", "compressed-tensors",
       *by_rules("b.*: preset=int8", "c.*: preset=nvfp4"))  # fmt: skip
    said = json.loads(Path("q/config.json").read_text())["quantization_config"]
    groups = [
        (g["targets"], g["format"], g["weights"]["num_bits"], g["input_activations"] is not None)
        for g in said["config_groups"].values()
    ]
    assert sorted(groups) == [
        (["a"], "pack-quantized", 4, False), (["b"], "int-quantized", 8, True),
        (["c"], "nvfp4-pack-quantized", 4, False),
    ]  # fmt: skip
    assert said["format"] == "mixed-precision"


def test_mlx_has_an_entry_for_each_module_that_differs() -> None:
    checkpoint(**TENSORS)
    ok("quantize", "model", "-o", "q", "--preset", "w4a16", "--block-size", "64", "--layout", "mlx",
       *by_rules("c.*: dtype=int8, block_size=32"))  # fmt: skip
    assert json.loads(Path("q/config.json").read_text())["quantization"] == {
        "group_size": 64, "bits": 4, "mode": "affine",
        "c": {"group_size": 32, "bits": 8, "mode": "affine"},
    }  # fmt: skip


FUSED = {f"l.{name}.weight": TENSORS["a.weight"] for name in ("q_proj", "k_proj", "v_proj", "o")}


@pytest.mark.parametrize("source", ["model", "m.safetensors"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "w4a16", "--layout", "compressed-tensors", "--rule", "*k_proj*: dtype=int8"],
         "--layout compressed-tensors: readers put both together, l.{}_proj.weight is {}; "
         "quantize them alike"),
        (["--preset", "fp8", "--layout", "modelopt", "--rule", "*.o.*: preset=nvfp4"],
         "--layout modelopt: readers take one kind of weights, {} is {}; quantize them alike"),
    ],
    ids=["fused", "mixed"],
)  # fmt: skip
def test_layouts_refuse_mixtures_that_their_readers_cannot_take(
    options: list[str], message: str, source: str
) -> None:
    checkpoint(**FUSED)
    save_file(FUSED, "m.safetensors")
    before = sorted(Path().rglob("*"))
    line = refused("quantize", source, "-o", "q.safetensors", *options, code=2)
    begin, middle, end = message.split("{}")
    assert line.startswith(begin)
    assert middle in line
    assert line.endswith(end)
    assert sorted(Path().rglob("*")) == before


def test_layouts_take_mixtures_that_are_not_fused() -> None:
    save_file(FUSED, "m.safetensors")
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--preset", "w4a16", "--layout",
       "compressed-tensors", "--rule", "*.o.*: dtype=int8")  # fmt: skip
    found = {row["name"]: row["dtype"] for row in report(Path("q.safetensors"))["tensors"]}
    assert found["l.o.weight"] == "int8"
    assert set(found.values()) == {"int4", "int8"}


def test_fused_tensors_of_one_kind_share_their_global_scale_among_themselves() -> None:
    large = {n: t * (100 if "q_proj" in n else 1) for n, t in FUSED.items()}
    save_file(large, "m.safetensors")
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--preset", "nvfp4",
       "--method", "absmax", "--rule", "*q_proj*: preset=int8")  # fmt: skip
    told = report(Path("q.safetensors"))["tensors"]
    found = {row["name"]: row["global_scale"] for row in told}
    assert found["l.q_proj.weight"] is None
    save_file({n: t for n, t in FUSED.items() if "k_proj" in n}, "one.safetensors")
    ok(
        "quantize",
        "one.safetensors",
        "-o",
        "1.safetensors",
        "--preset",
        "nvfp4",
        "--method",
        "absmax",
    )
    [alone] = report(Path("1.safetensors"))["tensors"]
    assert found["l.k_proj.weight"] == found["l.v_proj.weight"] == alone["global_scale"]


def test_a_folder_in_slices_has_the_bytes_and_figures_of_one_run() -> None:
    checkpoint(**TENSORS)
    options = ["--preset", "w4a16", *by_rules("b.*: preset=nvfp4", "c.*: skip")]
    ok("quantize", "model", "-o", "whole", *options)
    for k in (2, 1):
        ok("quantize", "model", "-o", "sliced", "--shards", f"{k}/2", *options)
    ok("finish", "sliced")
    for path in Path("whole").iterdir():
        assert path.read_bytes() == (Path("sliced") / path.name).read_bytes()
    whole, sliced = (strict(Path(f"{n}.report.json").read_text()) for n in ("whole", "sliced"))
    for told in (whole, sliced):
        del told["seconds"], told["output"]["name"]
    assert whole == sliced


def test_resume_sees_that_a_rule_is_another_one() -> None:
    checkpoint(**TENSORS)
    ok("quantize", "model", "-o", "q", "--shards", "1/2", "--dtype", "int8")
    message = refused("quantize", "model", "-o", "q", "--shards", "2/2", "--dtype", "int8",
                      "--rule", "b.*: skip")  # fmt: skip
    assert message.endswith(
        "q.partial: is of a run with another source or other settings; "
        "finish that one, or remove the folder"
    )


def test_python_has_the_same_words() -> None:
    told = qtool.quantize_file(
        "m.safetensors", "p.safetensors", dtype="int4", block_size=32, rules=RULES
    )
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--dtype", "int4", "--block-size", "32",
       *by_rules(*RULES))  # fmt: skip
    assert Path("p.safetensors").read_bytes() == Path("q.safetensors").read_bytes()
    assert told["settings"] == report(Path("q.safetensors"))["settings"]


def test_an_array_has_no_place_in_a_recipe() -> None:
    options: dict[str, Any] = {"dtype": "int8", "save_recipe": "r.toml"}
    with pytest.raises(qtool.QtoolError, match="recipe: has no place for an array"):
        qtool.quantize_file("m.safetensors", "q.safetensors", scale=np.ones(3), **options)
    assert not Path("q.safetensors").exists()
    qtool.quantize_file("m.safetensors", "q.safetensors", scale=np.float32(0.5), **options)
    assert Path("r.toml").read_text() == 'dtype = "int8"\nscale = 0.5\n'


LINES = [
    "--dtype int4",
    "--preset w4a16 --block-size 32 --exclude 'b*' --nonfinite allow",
    "--preset nvfp4 --rule 'b*: preset=int8' --rule 'a: b: skip' --rule 're:^c: block_size=32'",
    "--dtype uint4 --tile 8x16 --method percentile:99.5 --scale-dtype float16 --asymmetric",
    "--dtype int8 --narrow-range --precision float16 --axis -1 --include '*.weight' --include x",
    "--dtype float8e4m3fn --no-saturate",
    "--preset fp8 --no-dynamic-activations",
    "--dtype int8 --semantics onednn --scale 0.25 --zero-point 0 --negative-scale",
    "--preset w4a16 --block-size 64 --layout mlx --rule 'b*: dtype=int8'",
    "--preset mxfp4 --mx-rule floor --layout compressed-tensors --include '*'",
    "--dtype int8 --to npz --rule 'c*: dtype=int4, block_size=32'",
    "--target-bits 5.5 --candidates int4:32,int8:64 --rule 'a*: symmetric=false'",
    "--target-sqnr 30 --candidates 'dtype=int4, block_size=32' --candidates int8",
]


@pytest.mark.parametrize("line", LINES)
def test_a_recipe_repeats_the_command_line(line: str) -> None:
    words = shlex.split(line)
    text = ok("recipe", *words).out
    Path("r.toml").write_bytes(text)
    assert ok("recipe", "--recipe", "r.toml").out == text
    suffix = "npz" if "npz" in words else "safetensors"
    ok("quantize", "m.safetensors", "-o", f"1.{suffix}", *words)
    ok("quantize", "m.safetensors", "-o", f"2.{suffix}", "--recipe", "r.toml",
       "--save-recipe", "s.toml")  # fmt: skip
    assert Path(f"1.{suffix}").read_bytes() == Path(f"2.{suffix}").read_bytes()
    first, second = (report(Path(f"{n}.{suffix}")) for n in (1, 2))
    for told in (first, second):
        del told["seconds"], told["output"]
    assert first == second
    if "--target" not in line:
        assert Path("s.toml").read_bytes() == text


def test_options_take_precedence_over_a_recipe() -> None:
    Path("r.toml").write_text(
        'preset = "w4a16"\nnarrow_range = true\nrequantize = true\n\n'
        '[[rules]]\npattern = "b*"\ndtype = "int8"\n'
    )
    text = ok("recipe", "--recipe", "r.toml", "--block-size", "32", "--no-narrow-range",
              "--rule", "b*: skip").out.decode()  # fmt: skip
    assert text == (
        'preset = "w4a16"\nblock_size = 32\nnarrow_range = false\nrequantize = true\n\n'
        '[[rules]]\npattern = "b*"\ndtype = "int8"\n\n[[rules]]\npattern = "b*"\nskip = true\n'
    )


def test_a_recipe_may_be_written_as_other_systems_write_texts() -> None:
    Path("r.toml").write_bytes(b'\xef\xbb\xbfdtype = "int4"\r\nblock_size = 32\r\n')
    said = ok("recipe", "--recipe", "r.toml").out
    assert said == b'dtype = "int4"\nblock_size = 32\n'


def test_a_wrong_recipe_stops_before_anything_is_written() -> None:
    Path("r.toml").write_text('dtype = "int8"\n[[rules]]\npattern = "a"\nblok_size = 3\n')
    message = "r.toml: rule 1, 'a': 'blok_size' is unknown; did you mean block_size?"
    assert refused("quantize", "m.safetensors", "--recipe", "r.toml", code=2) == message
    assert refused("recipe", "--recipe", "r.toml", code=2) == message
    Path("r.toml").write_text("dtype = int8\n")
    assert refused("quantize", "m.safetensors", "--recipe", "r.toml") == (
        "r.toml: is no TOML: Invalid value (at line 1, column 9)"
    )


def test_recipe_takes_any_command_line_of_quantize() -> None:
    words = ["--preset", "w4a16", "--rule", "b*: dtype=int8"]
    others = ["m.safetensors", "-o", "q.safetensors", "--strict", "--fail-if", "mse > 1", "-q",
              "--report", "r.json", "--hash", "--jobs", "2", "--force", "--dry-run"]  # fmt: skip
    assert ok("recipe", *others, *words).out == ok("recipe", *words).out
    assert not Path("r.json").exists()


def test_an_old_recipe_is_not_replaced_by_another_one() -> None:
    options = ["quantize", "m.safetensors", "--dtype", "int8", "--save-recipe", "r.toml", "--force"]
    ok(*options)
    assert Path("r.toml").read_text() == 'dtype = "int8"\n'
    Path("r.toml").write_text("mine")
    assert refused(*options[:-1], "-o", "q.safetensors") == (
        "recipe r.toml: exists and says something else; choose another name or --force"
    )
    assert Path("r.toml").read_text() == "mine"
    assert not Path("q.safetensors").exists()
    ok(*options)
    assert Path("r.toml").read_text() == 'dtype = "int8"\n'
    for other in ("m.safetensors", "q2.safetensors", "q2.report.json"):
        line = refused("quantize", "m.safetensors", "-o", "q2.safetensors", "--dtype", "int8",
                       "--save-recipe", other, "--force")  # fmt: skip
        assert line == f"recipe {other}: is also {other}; choose another name"
    assert not Path("q2.safetensors").exists()


def test_bfloat16_scales_are_no_other_kind() -> None:
    mixed = {n: t.astype(ml_dtypes.bfloat16) if "q" in n else t for n, t in FUSED.items()}
    save_file(mixed, "m.safetensors")
    ok("quantize", "m.safetensors", "-o", "q.safetensors", "--preset", "w4a16", "--layout",
       "compressed-tensors")  # fmt: skip
    told: Any = report(Path("q.safetensors"))
    assert {row["scale_dtype"] for row in told["tensors"]} == {"float32", "bfloat16"}

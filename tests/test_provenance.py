"""What outputs and reports say of their making: the tool, its version and the recipe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import content, save, tensors, three
from command import metadata, ok, qtool, refused, report, stored
from safetensors import safe_open
from safetensors.numpy import save_file

import qtool as library
from qtool.errors import FormatError
from qtool.jobs import recipes
from qtool.recipe import toml

EXAMPLES = Path(__file__).parents[1] / "examples"
TOOL = {"name": "qtool", "version": library.__version__}
DIGITS, MODEL = EXAMPLES / "digits.safetensors", EXAMPLES / "digits.onnx"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS, "m.safetensors")
    shutil.copy(MODEL, "m.onnx")
    with safe_open(DIGITS, "np") as file:
        np.savez("m.npz", **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    np.save("m.npy", np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32))


def said(path: str | Path) -> dict[str, Any]:
    """What a file says of itself, read without qtool."""
    path = Path(path)
    if path.suffix == ".onnx":
        props = {e.key: e.value for e in onnx.load(path, load_external_data=False).metadata_props}
        return json.loads(props["qtool"])  # type: ignore[no-any-return]
    if path.suffix == ".npz":
        with np.load(path) as file:
            return json.loads(file["__qtool__"].tobytes())  # type: ignore[no-any-return]
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["qtool"])  # type: ignore[no-any-return]


W4 = ("--dtype", "int4", "--block-size", "32")
LINES: list[tuple[str, str, tuple[str, ...]]] = [
    ("m.safetensors", "safetensors", W4),
    ("m.safetensors", "npz", (*W4, "--to", "npz")),
    ("m.npz", "npz", ("--preset", "nvfp4", "--exclude", "fc3*")),
    ("m.npz", "safetensors", ("--dtype", "uint8", "--asymmetric", "--axis", "-1")),
    ("m.npy", "safetensors", ("--dtype", "int8", "--tile", "3x16")),
    ("m.safetensors", "safetensors", ("--preset", "w4a16", "--layout", "compressed-tensors")),
    ("m.safetensors", "safetensors", ("--preset", "nvfp4", "--layout", "modelopt")),
    ("m.safetensors", "safetensors", ("--preset", "mxfp4", "--layout", "mlx")),
    ("m.safetensors", "safetensors", (*W4, "--rule", "fc1*: dtype=int8, block_size=none")),
    ("m.safetensors", "safetensors", ("--target-bits", "5.5")),
    ("m.safetensors", "safetensors", ("--dtype", "int8", "--include", "nothing", "--allow-empty")),
    ("m.onnx", "onnx", W4),
    ("m.onnx", "onnx", ("--preset", "nvfp4")),
    ("m.onnx", "onnx", ("--dtype", "int8", "--external-data")),
    ("m.onnx", "onnx", (*W4, "--layout", "matmul-nbits")),
    ("m.onnx", "onnx", ("--target-sqnr", "30", "--candidates", "int4:32,int8:64")),
]


@pytest.mark.parametrize(("source", "suffix", "options"), LINES, ids=lambda v: "".join(v)[:40])
def test_an_output_says_what_made_it_and_can_be_made_again(
    source: str, suffix: str, options: tuple[str, ...]
) -> None:
    first = Path(f"q.{suffix}")
    ok("quantize", source, "-o", first, *options, "--save-recipe", "kept.toml")
    made = said(first)
    text = Path("kept.toml").read_text(encoding="utf-8")
    assert (made["tool"], made["recipe"], report(first)["recipe"]) == (TOOL, text, text)
    if not any(option.startswith("--target") for option in options):
        assert ok("recipe", *options).out.decode() == text
    found = ok("inspect", first, "--json").json["provenance"]
    assert found == {"tool": TOOL, "recipe": text}
    assert ok("recipe", "--from", first).out.decode() == text
    Path("again").mkdir()
    again = Path("again", first.name)
    ok("quantize", source, "-o", again, "--recipe", "kept.toml", "--save-recipe", "twice.toml")
    assert Path("twice.toml").read_text(encoding="utf-8") == text
    written = {path.name: path.read_bytes() for path in Path("again").iterdir()}
    del written["q.report.json"]
    assert written == {name: Path(name).read_bytes() for name in written}
    assert len(written) == 1 + ("--external-data" in options)


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ("m.npy", (), 'dtype = "uint8"\nsemantics = "dynamic"\n'),
        ("m.npz", ("--dtype", "int8"), 'dtype = "int8"\nsemantics = "dynamic"\n'),
        (
            "m.safetensors",
            ("--exclude", "fc1*", "--to", "safetensors"),
            'dtype = "uint8"\nsemantics = "dynamic"\nto = "safetensors"\nexclude = ["fc1*"]\n',
        ),
        ("m.onnx", ("--graph",), 'dtype = "int8"\nscale_dtype = "float32"\ngraph = true\n'),
        (
            "m.onnx",
            ("--graph", "--per-tensor", "--dtype", "uint8"),
            'dtype = "uint8"\nscale_dtype = "float32"\ngraph = true\nper_tensor = true\n',
        ),
    ],
    ids=["npy", "npz", "safetensors", "graph", "graph-per-tensor"],
)
def test_dynamic_says_it_too(source: str, options: tuple[str, ...], text: str) -> None:
    target = Path("q.onnx" if source.endswith("onnx") else "q.safetensors")
    ok("dynamic", source, "-o", target, *options)
    made = said(target)
    assert (made["tool"], made["recipe"], report(target)["recipe"]) == (TOOL, text, text)
    assert ok("recipe", "--from", target).out.decode() == text
    assert ok("recipe", "--from", target.with_suffix(".report.json")).out.decode() == text


def test_every_shard_of_a_folder_says_it() -> None:
    folder = save(Path("f"), [tensors([0]), {"v": np.ones(3, np.float32)}, tensors([1])])
    ok("quantize", folder, *W4, "-o", "q")
    text = ok("recipe", *W4).out.decode()
    shards = sorted(Path("q").glob("model-*.safetensors"))
    assert [(said(p)["tool"], said(p)["recipe"]) for p in shards] == [(TOOL, text)] * 3
    assert said(shards[1])["tensors"] == {}
    assert ok("inspect", "q", "--json").json["provenance"] == {"tool": TOOL, "recipe": text}
    assert ok("recipe", "--from", "q").out.decode() == text
    assert json.loads(Path("q.report.json").read_text())["recipe"] == text
    ok("dequantize", "q", "-o", "b")
    back = sorted(Path("b").glob("*.safetensors"))
    assert [metadata(p) for p in back] == [{"format": "pt"}] * 3


def test_shards_of_several_recipes_are_read_and_their_making_is_not_told() -> None:
    folder = three(Path("f"))
    ok("quantize", folder, *W4, "-o", "a")
    ok("quantize", folder, *W4, "--method", "absmax", "-o", "b")
    name = sorted(Path("a").glob("model-*"))[1].name
    shutil.copy(Path("b", name), Path("a", name))
    assert ok("inspect", "a", "--json").json["provenance"] is None
    assert ok("inspect", "a", "--json").json["quantized_by"] == ["qtool"]
    ok("dequantize", "a", "-o", "c")


def test_slices_and_a_run_that_is_resumed_give_the_same_bytes() -> None:
    folder = three(Path("f"))
    ok("quantize", folder, "--target-bits", "5", "-o", "whole", "--save-recipe", "r.toml")
    for k in (2, 1):
        ok("quantize", folder, "--recipe", "r.toml", "-o", "s", "--shards", f"{k}/2")
    ok("finish", "s")
    assert content(Path("s")) == content(Path("whole"))
    reports = [json.loads(Path(f"{n}.report.json").read_text()) for n in ("s", "whole")]
    assert reports[0]["recipe"] == reports[1]["recipe"] == Path("r.toml").read_text()


def test_a_shard_of_another_recipe_is_made_anew() -> None:
    folder = three(Path("f"))
    ok("quantize", folder, *W4, "-o", "q", "--shards", "1/2")
    line = refused("quantize", folder, *W4, "--allow-empty", "-o", "q", "--shards", "2/2")
    assert "is of a run with another source or other settings" in line
    ok("quantize", folder, *W4, "--allow-empty", "-o", "q", "--resume")
    ok("quantize", folder, *W4, "--allow-empty", "-o", "r")
    assert content(Path("q")) == content(Path("r"))


def test_bare_codes_have_no_place_for_it_and_the_report_has() -> None:
    ok("quantize", "m.npy", "-o", "q.npy", "--dtype", "int8")
    assert np.load("q.npy").dtype == np.int8
    assert report(Path("q.npy"))["recipe"] == 'dtype = "int8"\n'
    line = refused("recipe", "--from", "q.npy")
    assert line == (
        "q.npy: does not say what it was made by; name what a qtool of this kind has written"
    )


@pytest.mark.parametrize("source", ["m.safetensors", "m.npz", "m.onnx"])
def test_dequantize_takes_it_away_and_requantize_replaces_it(source: str) -> None:
    suffix = Path(source).suffix
    ok("quantize", source, "-o", f"q{suffix}", "--dtype", "int8")
    ok("dequantize", f"q{suffix}", "-o", f"b{suffix}")
    assert ok("inspect", f"b{suffix}", "--json").json["provenance"] is None
    with pytest.raises(KeyError):
        said(f"b{suffix}")
    if suffix == ".onnx":
        ok("quantize", f"b{suffix}", "-o", f"r{suffix}", *W4)
        assert len([e for e in onnx.load(f"r{suffix}").metadata_props if e.key == "qtool"]) == 1
        return
    ok("quantize", f"q{suffix}", "-o", f"r{suffix}", *W4, "--requantize")
    assert said(f"r{suffix}")["recipe"] == ok("recipe", *W4, "--requantize").out.decode()


def test_readers_load_models_that_say_it() -> None:
    ok("quantize", "m.onnx", "-o", "q.onnx", *W4)
    onnx.checker.check_model("q.onnx", full_check=True)
    session = onnxruntime.InferenceSession("q.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["qtool"] == json.dumps(
        {"tool": TOOL, "recipe": 'dtype = "int4"\nblock_size = 32\n'}, separators=(",", ":")
    )


def test_the_place_of_the_source_the_name_of_the_target_and_threads_do_not_matter(
    tmp_path: Path,
) -> None:
    Path("elsewhere").mkdir()
    shutil.copy("m.onnx", "elsewhere/other.onnx")
    ok("quantize", "m.onnx", "-o", "a.onnx", *W4, "--jobs", "1")
    ok("quantize", tmp_path / "elsewhere" / "other.onnx", "-o", "elsewhere/b.onnx", *W4,
       "--jobs", "3", "--force")  # fmt: skip
    assert Path("a.onnx").read_bytes() == Path("elsewhere/b.onnx").read_bytes()
    data = Path("m.safetensors").read_bytes()
    ok("quantize", "m.safetensors", "-o", "a.safetensors", *W4)
    assert ok("quantize", "-", "-o", "-", *W4, "-q", stdin=data).out == (
        Path("a.safetensors").read_bytes()
    )


def test_the_same_words_in_another_order_are_the_same_recipe() -> None:
    Path("r.toml").write_text('allow_empty = true\nblock_size = 32\nmethod = "absmax"\n')
    Path("s.toml").write_text('method = "absmax"\ndtype = "int4"\n')
    lines = [
        ("--recipe", "r.toml", "--dtype", "int4"),
        ("--recipe", "s.toml", "--block-size", "32", "--allow-empty"),
        ("--allow-empty", "--method", "absmax", *W4),
    ]
    for number, line in enumerate(lines):
        ok("quantize", "m.safetensors", "-o", f"{number}.safetensors", *line)
    written = {Path(f"{number}.safetensors").read_bytes() for number in range(3)}
    assert len(written) == 1
    assert said("0.safetensors")["recipe"] == (
        'dtype = "int4"\nblock_size = 32\nmethod = "absmax"\nallow_empty = true\n'
    )


ODD = ['a"b\\c', "tab\tnew\nline", "größe.重み", "\x7f\x00", "# no comment", "'''", "é" * 3]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int4", "tile": (3, 5), "symmetric": False, "precision": None},
        {"preset": "nvfp4", "scale": 0.1, "zero_point": 3},
        {"dtype": "int8", "scale": "1e-05", "damping": 1e-300, "act_order": False},
        {"target_bits": 5, "candidates": ["int4:32,int8:128", "dtype=int8"]},
        {"target_sqnr": 1e16, "candidates": []},
        {"dtype": "int8", "include": ODD, "exclude": ODD[:1], "importance": ODD},
        {"rules": ["a: b: skip", "re:[x: dtype=int8, axis=-1, tile=none", "*: preset=w4a16"]},
        {"rules": ["x*: block_size=none, dtype=uint4"], "scale_dtype": "float16"},
        {"dtype": "int8", "source_dtype": np.dtype(np.float16), "scale": Path("a/b.npz")},
    ],
    ids=str,
)
def test_writing_what_was_read_from_what_was_written_changes_nothing(
    options: dict[str, Any],
) -> None:
    text = recipes.recipe_text(**options)
    read = toml.parsed(text.encode("utf-8"), "r.toml")
    assert toml.written(read) == text
    Path("r.toml").write_bytes(text.encode("utf-8"))
    assert recipes.recipe_text(recipe="r.toml") == text


def test_an_array_from_python_is_told_as_what_it_is() -> None:
    scale = np.full(6, 0.1, np.float32)
    told = library.quantize_file("m.npy", "q.safetensors", dtype="int8", axis=0, scale=scale)
    assert told["recipe"] == said("q.safetensors")["recipe"]
    assert told["recipe"] == 'dtype = "int8"\naxis = 0\nscale = "float32 array of shape (6,)"\n'
    Path("r.toml").write_text(told["recipe"])
    line = refused("quantize", "m.npy", "--recipe", "r.toml")
    assert "'float32 array of shape (6,)' is neither a number nor a file" in line


def test_a_file_name_that_is_no_text_has_its_bytes_in_the_recipe() -> None:
    name = os.fsdecode(b"s\xff.npy")
    np.save(name, np.float32(0.1))
    ok("quantize", "m.npy", "-o", "q.safetensors", "--dtype", "int8", "--scale", name)
    assert said("q.safetensors")["recipe"] == 'dtype = "int8"\nscale = "s\\\\xff.npy"\n'
    toml.parsed(said("q.safetensors")["recipe"].encode(), "r.toml")


# ---------------------------------------------------------------- other files than ours


Change = Callable[[dict[str, Any]], Any]


def rewritten(change: Change, name: str = "q.safetensors") -> None:
    """An output that says of itself what change makes of its own words."""
    if name.endswith("onnx"):
        ok("quantize", "m.onnx", "-o", name, *W4)
        model = onnx.load(name)
        (entry,) = (e for e in model.metadata_props if e.key == "qtool")
        entry.value = json.dumps(change(json.loads(entry.value)))
        onnx.save(model, name)
        return
    ok("quantize", "m.safetensors", "-o", name, *W4)
    text = json.dumps(change(said(name)))
    save_file(stored(Path(name)), name, metadata={"qtool": text})


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}


@pytest.mark.parametrize("name", ["q.safetensors", "q.onnx"])
def test_files_that_do_not_say_it_are_read(name: str) -> None:
    rewritten(lambda said: without(said, "tool", "recipe"), name)
    assert ok("inspect", name, "--json").json["provenance"] is None
    assert "made by" not in ok("inspect", name).out.decode()
    assert "does not say what it was made by" in refused("recipe", "--from", name)
    ok("dequantize", name, "-o", f"b{Path(name).suffix}")


HOSTILE: dict[str, Change] = {
    "recipe-number": lambda said: said | {"recipe": 5},
    "recipe-null": lambda said: said | {"recipe": None},
    "recipe-alone": lambda said: without(said, "tool"),
    "tool-alone": lambda said: without(said, "recipe"),
    "tool-text": lambda said: said | {"tool": "qtool"},
    "tool-list": lambda said: said | {"tool": []},
    "tool-empty": lambda said: said | {"tool": {}},
    "version-number": lambda said: said | {"tool": {"name": "qtool", "version": 1}},
    "name-object": lambda said: said | {"tool": {"name": {}, "version": "1"}},
    "number": lambda said: 17,
}


@pytest.mark.parametrize("name", ["q.safetensors", "q.onnx"])
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metadata_is_refused_in_one_line(change: Change, name: str) -> None:
    rewritten(change, name)
    for words in (["inspect", name], ["recipe", "--from", name]):
        line = refused(*words)
        assert line == (
            f"{name}: metadata 'qtool': is not as qtool writes it; write or fetch the file anew"
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no { json", "expecting value at line 1, column 1"),
        ("[" * 100_000, "it is nested too deeply"),
        ("", "expecting value at line 1, column 1"),
        ("1" * 5000, "a number in it has too many digits"),
    ],
)
def test_metadata_of_a_model_that_is_no_json_is_refused(text: str, reason: str) -> None:
    model = onnx.load("m.onnx")
    onnx.helper.set_model_props(model, {"qtool": text})
    onnx.save(model, "q.onnx")
    assert refused("inspect", "q.onnx") == (
        f"q.onnx: metadata 'qtool': is no JSON: {reason}; write or fetch the file anew"
    )


def test_a_model_that_tells_of_tensors_of_ours_is_read_by_its_operators() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *W4)
    model = onnx.load("m.onnx")
    onnx.helper.set_model_props(model, {"qtool": json.dumps(said("q.safetensors"))})
    onnx.save(model, "fake.onnx")
    assert ok("inspect", "fake.onnx", "--json").json["quantized_by"] == []
    ok("quantize", "fake.onnx", "-o", "q.onnx", "--dtype", "int8")
    assert said("q.onnx") == {"tool": TOOL, "recipe": 'dtype = "int8"\n'}


def test_a_strange_recipe_is_shown_in_one_short_line() -> None:
    recipe = "\x1b[31m = \r\n" + 'x = "y"\n' * 300_000
    tool = {"name": "qtool", "version": "9\n" * 100_000}
    rewritten(lambda said: said | {"recipe": recipe, "tool": tool})
    done = ok("inspect", "q.safetensors")
    line = done.out.decode().splitlines()[1]
    assert line.startswith("made by qtool 9?9?")
    assert len(line) < 700
    assert "\x1b" not in line


def test_inspect_shows_the_recipe_in_a_line() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *W4, "--rule", "fc3*: dtype=int8",
       "--rule", "fc1*: skip")  # fmt: skip
    line = ok("inspect", "q.safetensors").out.decode().splitlines()[1]
    version = library.__version__
    assert line == f'made by qtool {version}: dtype = "int4", block_size = 32, 2 rules'


def test_recipe_from_takes_no_other_options() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *W4)
    for options in (["--dtype", "int8"], ["--rule", "a: skip"], ["--allow-empty"]):
        line = refused("recipe", "--from", "q.safetensors", *options, code=2)
        assert line == "--from: an output has its recipe already; leave the rest out"
    data = Path("q.safetensors").read_bytes()
    assert ok("recipe", "--from", "-", stdin=data).out.decode() == ok("recipe", *W4).out.decode()


def test_the_library_tells_it_too() -> None:
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *W4)
    assert recipes.recipe_of("q.safetensors") == 'dtype = "int4"\nblock_size = 32\n'
    with pytest.raises(FormatError, match="does not say"):
        recipes.recipe_of("m.safetensors")
    assert qtool("recipe", "--from", "gone.safetensors").code == 1

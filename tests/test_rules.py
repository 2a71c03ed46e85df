"""Rules, recipes and their TOML, without files of tensors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.dtypes import DTYPES, TARGETS
from qtool.errors import FormatError, UsageError
from qtool.recipe import Recipe, Rule, effective, escaped, over, toml
from qtool.recipe.patterns import Patterns
from qtool.spec import Blocked, Granularity, PerAxis, QuantSpec, TensorInfo, Tiled

F32 = DTYPES["float32"]


def info(name: str = "w") -> TensorInfo:
    return TensorInfo(name, (64, 256), F32, 64 * 256 * 4)


def rules(*texts: str) -> list[Rule]:
    return [Rule.parse(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "pattern", "words"),
    [
        ("*.mlp.*: dtype=int8", "*.mlp.*", {"dtype": "int8"}),
        ("w: dtype=int8, block_size=64, method=absmax", "w",
         {"dtype": "int8", "block_size": 64, "method": "absmax"}),
        ("a: b: dtype=int8", "a: b", {"dtype": "int8"}),
        ("a:b: axis=-1", "a:b", {"axis": -1}),
        ("re:^x: tile=128x64", "re:^x", {"tile": (128, 64)}),
        ("w: symmetric = false ,saturate=true", "w", {"symmetric": False, "saturate": True}),
        ("w: block_size=none, preset=none", "w", {"block_size": None, "preset": None}),
        ("w: preset=nvfp4, global_scale=true", "w", {"preset": "nvfp4", "global_scale": True}),
        ("w: method=percentile:99.9", "w", {"method": "percentile:99.9"}),
        ("w: mx_rule=rceil-7.25, scale_dtype=float8e8m0", "w",
         {"mx_rule": "rceil-7.25", "scale_dtype": "float8e8m0"}),
        ("w: nonfinite=allow, semantics=onednn, precision=float16, narrow_range=true, "
         "negative_scale=true, dynamic_activations=true", "w",
         {"nonfinite": "allow", "semantics": "onednn", "precision": "float16",
          "narrow_range": True, "negative_scale": True, "dynamic_activations": True}),
    ],
)  # fmt: skip
def test_a_rule_is_a_pattern_and_words(text: str, pattern: str, words: dict[str, Any]) -> None:
    assert Rule.parse(text) == Rule((pattern,), words)


def test_skip_is_a_rule() -> None:
    assert Rule.parse("lm_head*: skip") == Rule(("lm_head*",), {}, skip=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w: dtpye=int8", "rule 'w: dtpye=int8': 'dtpye' is unknown; did you mean dtype?"),
        ("w: blocksize=8",
         "rule 'w: blocksize=8': 'blocksize' is unknown; did you mean block_size?"),
        ("w: dtype=float16",
         "rule 'w: dtype=float16': dtype: float16 is not allowed; use "
         + ", ".join(map(str, TARGETS))),
        ("w: dtype=int8,", "rule 'w: dtype=int8,': '' is no word; write for example dtype=int8"),
        ("w: skp", "rule 'w: skp': 'skp' is unknown; did you mean skip?"),
        ("w: dtype=in8", "rule 'w: dtype=in8': dtype: 'in8' is unknown; "
         "did you mean int8 or uint8?"),
        ("w: dtype=flaot4e2m1", "rule 'w: dtype=flaot4e2m1': dtype: 'flaot4e2m1' is unknown; "
         "did you mean float4e2m1?"),
        ("w: preset=w4a61",
         "rule 'w: preset=w4a61': preset: 'w4a61' is unknown; did you mean w4a16?"),
        ("w: method=absmx",
         "rule 'w: method=absmx': method: 'absmx' is unknown; did you mean absmax?"),
        ("w: axis=x", "rule 'w: axis=x': axis is 'x'; use a whole number, for example 32"),
        ("w: block_size=0",
         "rule 'w: block_size=0': block_size is 0; use a whole number, for example 32"),
        ("w: tile=8", "rule 'w: tile=8': tile is '8'; use ROWSxCOLUMNS, for example 128x128"),
        ("w: symmetric=2", "rule 'w: symmetric=2': symmetric is '2'; use true or false"),
        ("w: dtype", "rule 'w: dtype': dtype is True; use int2, uint2, int4, uint4, int8, uint8, "
         "int16, uint16, float4e2m1, float6e2m3, float6e3m2, float8e4m3fn, float8e4m3fnuz, "
         "float8e5m2, float8e5m2fnuz"),
        ("w: axis=1, axis=2", "rule 'w: axis=1, axis=2': gives axis twice; "
         "leave one of them out"),
        ("w: skip, axis=2", "rule 'w: skip, axis=2': skip takes no value and no other words; "
         "write it alone"),
        ("w: skip=yes", "rule 'w: skip=yes': skip takes no value and no other words; "
         "write it alone"),
        *((text, f"rule {text!r}: is no pattern and words with a colon and a space between them; "
           "write for example '*.mlp.*: dtype=int8'")
          for text in ("w", "w:dtype=int8", ": dtype=int8", "w: ", "")),
    ],
)  # fmt: skip
def test_a_rule_that_is_none_says_what_is_right(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Rule.parse(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("words", "texts", "expected"),
    [
        ("dtype=int4", [], QuantSpec("int4", PerAxis(0))),
        ("dtype=int4, block_size=32", ["w: dtype=int8"], QuantSpec("int8", Blocked(1, 32))),
        ("dtype=int4, block_size=32", ["w: block_size=none"], QuantSpec("int4", PerAxis(0))),
        ("dtype=int4", ["*: block_size=32", "w: block_size=64", "v: block_size=8"],
         QuantSpec("int4", Blocked(1, 64))),
        ("dtype=int4", ["w: block_size=64", "*: dtype=int8"], QuantSpec("int8", Blocked(1, 64))),
        ("dtype=int4, block_size=32", ["w: axis=0"], QuantSpec("int4", Blocked(0, 32))),
        ("dtype=int4, block_size=32", ["w: tile=8x8"], QuantSpec("int4", Tiled((8, 8)))),
        ("dtype=int4, tile=8x8", ["w: block_size=16"], QuantSpec("int4", Blocked(1, 16))),
        # presets begin anew; what is beside them takes precedence
        ("preset=nvfp4", ["w: preset=w8a16"], QuantSpec("int8", Blocked(1, 128))),
        ("preset=nvfp4, method=percentile:99", ["w: preset=w8a16, block_size=32"],
         QuantSpec("int8", Blocked(1, 32), method="percentile:99")),
        ("preset=w4a16", ["w: block_size=none, dtype=int8"], QuantSpec("int8", PerAxis(0))),
        ("preset=w4a16", ["w: axis=0"], QuantSpec("int4", PerAxis(0))),
        ("preset=w4a16-asym", ["w: method=absmax"],
         QuantSpec("int4", Blocked(1, 128), method="absmax")),
        ("preset=w4a16-asym", ["w: method=mse"],
         QuantSpec("int4", Blocked(1, 128), symmetric=False, method="mse")),
        ("preset=nvfp4", ["w: preset=none, dtype=int4"], QuantSpec("int4", PerAxis(0))),
        ("dtype=int4, method=minmax", ["w: symmetric=true"], QuantSpec("int4", PerAxis(0))),
        ("dtype=int4, symmetric=false", ["w: method=absmax"],
         QuantSpec("int4", PerAxis(0), method="absmax")),
        ("dtype=int4, symmetric=false", ["w: method=percentile:99"],
         QuantSpec("int4", PerAxis(0), symmetric=False, method="percentile:99")),
        ("preset=mxfp4", ["w: mx_rule=floor"],
         QuantSpec("float4e2m1", Blocked(1, 32), scale_dtype="float8e8m0", mx_rule="floor")),
        ("dtype=int8", ["w: narrow_range=true", "w: narrow_range=false"],
         QuantSpec("int8", PerAxis(0))),
    ],
)  # fmt: skip
def test_later_words_win_one_by_one(words: str, texts: list[str], expected: QuantSpec) -> None:
    [base] = rules(f"*: {words}")
    recipe = Recipe(base.words, rules(*texts))
    assert recipe.reason_against(info()) is None
    assert recipe.spec_for(info()) == expected


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["*: skip"], "skipped by a rule"),
        (["*: skip", "w: block_size=32"], None),
        (["w: block_size=32", "w*: skip"], "skipped by a rule"),
        (["v: skip"], None),
    ],
)
def test_the_last_rule_says_whether_a_tensor_is_skipped(
    texts: list[str], reason: str | None
) -> None:
    assert Recipe({"dtype": "int4"}, rules(*texts)).reason_against(info()) == reason


def test_without_a_type_only_what_rules_name_is_quantized() -> None:
    recipe = Recipe({"block_size": 8}, rules("v: dtype=int4", "w: method=absmax"))
    recipe.check(typed_later=False)
    assert recipe.reason_against(info("w")) == "no rule gives it a type"
    assert recipe.spec_for(info("v")) == QuantSpec("int4", Blocked(1, 8))
    assert (recipe.tag, Recipe({"dtype": "int4"}).tag) == ("mixed", "int4")


def test_rules_that_give_no_type_leave_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="--dtype: no type to quantize to"):
        Recipe({}, rules("w: block_size=32")).check(typed_later=False)


def test_words_that_contradict_each_other_name_the_rule() -> None:
    recipe = Recipe({"preset": "mxfp4"}, rules("w: scale_dtype=float16, mx_rule=floor"))
    with pytest.raises(UsageError) as error:
        recipe.spec_for(info())
    assert str(error.value) == (
        "rule 'w': mx_rule: it chooses the float8e8m0 scales of a symmetric grid; "
        "use it with --scale-dtype float8e8m0"
    )


@pytest.mark.parametrize(
    ("expected", "texts"),
    [(PerAxis(1), ["w: axis=1"]), (Blocked(0, 4), ["w: axis=0", "*: block_size=4"])],
)
def test_each_tensor_has_its_granularity(expected: Granularity, texts: list[str]) -> None:
    recipe = Recipe({"dtype": "int4"}, rules(*texts))
    assert recipe.spec_for(info("w")).granularity == expected


NAMES = st.text(st.sampled_from("ab.*?[]!re:\\/ -"), max_size=8)


@given(NAMES, NAMES)
def test_an_escaped_name_matches_itself_alone(name: str, other: str) -> None:
    assert Patterns([escaped(name)]).match(name)
    assert Patterns([escaped(name)]).match(other) == (name == other)
    assert Patterns(["zz", escaped(name), "re:^zzz"]).match(other) == (name == other)


def test_words_over_others_leave_both_as_they_are() -> None:
    earlier, later = {"tile": (8, 8), "dtype": "int4"}, {"block_size": 4}
    assert over(later, earlier) == {"dtype": "int4", "block_size": 4}
    assert earlier == {"tile": (8, 8), "dtype": "int4"}


DOCUMENT = """
preset = "w4a16"
method = "percentile:99"
layout = "mlx"
exclude = ["*.bias"]

[[rules]]
pattern = ["a: b", "re:^c"]
block_size = 64
tile = "none"

[[rules]]
pattern = "lm_head*"
skip = true
"""


def read(text: str, folder: Path) -> Recipe:
    path = folder / "r.toml"
    path.write_text(text, encoding="utf-8")
    return toml.read(path)


def test_a_recipe_has_the_words_of_the_command_line(tmp_path: Path) -> None:
    recipe = read(DOCUMENT, tmp_path)
    assert recipe == Recipe(
        {"preset": "w4a16", "method": "percentile:99"},
        (
            Rule(("a: b", "re:^c"), {"block_size": 64, "tile": None}),
            Rule(("lm_head*",), {}, skip=True),
        ),
        (),
        ("*.bias",),
        {"layout": "mlx"},
    )
    assert tomllib.loads(toml.written(recipe)) == tomllib.loads(DOCUMENT)


def test_options_take_precedence_and_rules_come_behind(tmp_path: Path) -> None:
    read(DOCUMENT, tmp_path)
    made = effective(
        tmp_path / "r.toml", ["w: dtype=int8"], include=["w*"], block_size=32, layout="native"
    )
    assert made.words == {"preset": "w4a16", "method": "percentile:99", "block_size": 32}
    assert [rule.patterns[0] for rule in made.rules] == ["a: b", "lm_head*", "w"]
    assert (made.include, made.exclude) == (("w*",), ("*.bias",))
    assert made.options == {"layout": "native"}
    assert effective(tmp_path / "r.toml", preset="int8").words == {
        "preset": "int8", "method": "percentile:99",
    }  # fmt: skip


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
WORDS = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["int4", "int8"])},
    optional={
        "axis": st.integers(-9, 9) | st.none(), "block_size": st.integers(1, 1 << 40) | st.none(),
        "tile": st.tuples(st.integers(1, 999), st.integers(1, 999)), "symmetric": st.booleans(),
        "method": st.just("percentile:99.9"), "preset": st.sampled_from(["fp8", "nvfp4"]),
    },
)  # fmt: skip
RULES = st.lists(
    st.builds(Rule, st.lists(TEXT, min_size=1, max_size=6).map(tuple), WORDS)
    | st.builds(Rule, TEXT.map(lambda text: (text,)), st.just({}), skip=st.just(True))
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "target_bits": st.floats(0.5, 9), "candidates": st.lists(TEXT, min_size=1),
        "scale": TEXT | st.floats(allow_nan=False, allow_infinity=False),
        "external_data": st.just(True),
    },
)  # fmt: skip


@given(st.builds(Recipe, WORDS, RULES.map(tuple), st.lists(TEXT).map(tuple), st.just(()), OPTIONS))
def test_a_recipe_comes_back_from_its_toml(recipe: Recipe) -> None:
    assert toml.parsed(toml.written(recipe).encode(), "r.toml") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtpye = 'int8'", "'dtpye' is unknown; did you mean dtype?"),
        ("dtype = 'int3'", "dtype: 'int3' is unknown; did you mean int8, int4 or int2?"),
        ("exlude = []", "'exlude' is unknown; did you mean exclude?"),
        ("[[rule]]\npattern = 'w'", "'rule' is unknown; did you mean rules?"),
        ("rules = 3", "rules: is no array of tables; begin each with [[rules]]"),
        ("include = 'w'", "include is 'w'; give texts in [ ]"),
        ("include = [3]", "include is [3]; give texts in [ ]"),
        ("target_bits = '4'", "target_bits is '4'; give a number"),
        ("target_bits = true", "target_bits is True; give a number"),
        ("requantize = 1", "requantize is 1; give true or false"),
        ("axis = true", "axis is True; use a whole number, for example 32"),
        ("symmetric = 1", "symmetric is 1; use true or false"),
        ("[[rules]]\ndtype = 'int8'", "rule 1: has no pattern; give a text, or a list of them"),
        ("[[rules]]\npattern = []\ndtype = 'int8'", "rule 1: has no pattern"),
        ("[[rules]]\npattern = 'v'\nskip = true\n[[rules]]\npattern = 'w'\ndtpye = 'int8'",
         "rule 2, 'w': 'dtpye' is unknown; did you mean dtype?"),
        ("[[rules]]\npattern = 'w'\nskip = false", "rule 1, 'w': says nothing"),
        ("[[rules]]\npattern = 'w'", "rule 1, 'w': says nothing"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_none_names_the_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(text, tmp_path)
    words = (
        str(error.value).removeprefix(f"{tmp_path}/r.toml: ").removeprefix(f"{tmp_path}/r.toml: ")
    )
    assert words.startswith(message)


@pytest.mark.parametrize(
    ("text", "place"),
    [("dtype =\n", "line 1, column 8"), ("a = 1\na = 2\n", "line 2, column 6"),
     ("\x00", "line 1, column 1"), ("[" * 5000, "")],
)  # fmt: skip
def test_what_is_no_toml_names_the_line(text: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=rf"r\.toml: is no TOML: .*{place}"):
        read(text, tmp_path)


def test_a_recipe_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        toml.read(tmp_path / "none.toml")

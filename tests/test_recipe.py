"""Which tensors a recipe chooses, and the granularity that it gives them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qtool.dtypes import DTYPES
from qtool.errors import SpecError, UsageError
from qtool.recipe import Recipe, unmatched
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, QuantSpec, TensorInfo

WORDS = {"dtype": "int8"}
DYNAMIC = {"dtype": "uint8", "semantics": "dynamic"}


def info(
    shape: tuple[int, ...] = (4, 8), dtype: str = "float32", name: str = "w", **fields: Any
) -> TensorInfo:
    return TensorInfo(name, shape, DTYPES[dtype], DTYPES[dtype].nbytes(math.prod(shape)), **fields)


@pytest.mark.parametrize(
    ("patterns", "name", "is_match"),
    [
        (["*"], "a.b/c", True), (["a*"], "a.b/c", True), (["a*"], "ba", False),
        (["*.weight"], "layer.0.weight", True), (["*.weight"], "layer.0.weight2", False),
        (["a.?.weight"], "a.0.weight", True), (["a.?.weight"], "a.10.weight", False),
        (["[ab].w"], "b.w", True), (["[!ab].w"], "b.w", False), (["w"], "w", True),
        (["w"], "W", False), (["W"], "w", False), (["a", "b"], "b", True), (["w"], "w\n", False),
        (["*"], "a\nb", True), (["a+b"], "a+b", True), (["a:b"], "a:b", True),
        (["re:^layer\\.\\d+\\.weight$"], "layer.10.weight", True),
        (["re:\\d"], "layer.1.weight", True), (["re:\\d"], "layer", False), (["re:"], "w", True),
        (["re:^w"], "aw", False),
    ],
)  # fmt: skip
def test_patterns_are_globs_or_regular_expressions(
    patterns: list[str], name: str, is_match: bool
) -> None:
    tensor = info(name=name)
    included = Recipe(WORDS, include=patterns).reason_against(tensor)
    excluded = Recipe(WORDS, exclude=patterns).reason_against(tensor)
    assert (included, excluded) == ((None, "excluded") if is_match else ("not included", None))


@pytest.mark.parametrize("pattern", ["re:(", "re:a{99999999999999999999}", "re:*"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError) as error:
        Recipe(WORDS, include=[pattern]).reason_against(info())
    assert str(error.value).startswith(f"pattern {pattern!r}: is not a regular expression (")
    assert error.value.remedy == "see Python's re"


def test_exclude_wins_over_include() -> None:
    recipe = Recipe(WORDS, include=["*"], exclude=["w"])
    assert recipe.reason_against(info()) == "excluded"


def test_patterns_that_match_nothing_are_told_in_order() -> None:
    assert unmatched(["z*", "w", "re:q"], ["w", "v"]) == ["z*", "re:q"]
    assert unmatched([], ["w"]) == []
    assert unmatched(["w"], []) == ["w"]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (info(), None),
        (info(dtype="float16"), None),
        (info(dtype="bfloat16"), None),
        (info(dtype="float64"), None),
        (info((4, 8, 3, 3)), None),
        (info(dtype="int32"), "int32 is no source type"),
        (info(dtype="int8"), "int8 is no source type"),
        (info(dtype="bool"), "bool is no source type"),
        (info(dtype="float8e4m3fn"), "float8e4m3fn is no source type"),
        (info(dtype="float4e2m1"), "float4e2m1 is no source type"),
        (info((8,)), "rank below 2"),
        (info(()), "rank below 2"),
        (info(obstacle="is shared"), "is shared"),
        (info((8,), "int64"), "int64 is no source type"),
    ],
)
def test_float_tensors_of_rank_2_and_more_are_quantized(
    tensor: TensorInfo, reason: str | None
) -> None:
    assert Recipe(WORDS).reason_against(tensor) == reason


def test_dynamic_quantization_takes_every_rank() -> None:
    recipe = Recipe(DYNAMIC, all_ranks=True)
    assert recipe.reason_against(info(())) is None
    assert recipe.reason_against(info((), "int64")) == "int64 is no source type"


def test_a_bare_array_is_quantized_whatever_it_is() -> None:
    for tensor in (info(()), info((3,), "int32"), info((2, 3), "int64")):
        assert Recipe(WORDS, bare=True).reason_against(tensor) is None
    assert Recipe(WORDS, bare=True, exclude=["w"]).reason_against(info()) == "excluded"


def made(choices: dict[str, Any]) -> Recipe:
    """A recipe of words, but for whether the source is a bare array."""
    words = {name: value for name, value in choices.items() if name != "bare"}
    return Recipe(WORDS | words, bare="bare" in choices)


OUTPUT_1 = {"output_axis": 1, "reduced_axis": 0}


@pytest.mark.parametrize(
    ("choices", "tensor", "expected"),
    [
        ({}, info(), PerAxis(0)),
        ({}, info((4, 8, 3, 3)), PerAxis(0)),
        ({}, info(**OUTPUT_1), PerAxis(1)),
        ({"axis": 1}, info(), PerAxis(1)),
        ({"axis": -1}, info((4, 8, 3)), PerAxis(2)),
        ({"axis": 0}, info(**OUTPUT_1), PerAxis(0)),
        ({"block_size": 4}, info(), Blocked(1, 4)),
        ({"block_size": 4}, info((4, 8, 3, 3)), Blocked(1, 4)),
        ({"block_size": 4}, info((4, 8, 3)), Blocked(1, 4)),
        ({"block_size": 4}, info(**OUTPUT_1), Blocked(0, 4)),
        ({"block_size": 4, "axis": 0}, info(), Blocked(0, 4)),
        ({"block_size": 4, "axis": -2}, info((4, 8, 3), **OUTPUT_1), Blocked(1, 4)),
        ({"bare": True}, info(), PerTensor()),
        ({"bare": True}, info(()), PerTensor()),
        ({"bare": True, "axis": 1}, info(), PerAxis(1)),
        ({"bare": True, "block_size": 4}, info((2, 3, 4)), Blocked(2, 4)),
        ({"bare": True, "block_size": 4}, info((8,)), Blocked(0, 4)),
        ({"bare": True, "block_size": 4, "axis": 0}, info((8, 2)), Blocked(0, 4)),
    ],
)
def test_granularity_by_options_consumer_and_rank(
    choices: dict[str, Any], tensor: TensorInfo, expected: Granularity
) -> None:
    assert made(choices).spec_for(tensor) == QuantSpec("int8", expected)


@pytest.mark.parametrize("tensor", [info(), info(()), info((2, 3, 4), **OUTPUT_1)], ids=str)
def test_dynamic_quantization_is_per_tensor(tensor: TensorInfo) -> None:
    spec = QuantSpec("uint8", PerTensor(), semantics="dynamic")
    assert Recipe(DYNAMIC, all_ranks=True).spec_for(tensor) == spec


@pytest.mark.parametrize(
    ("choices", "shape", "rule"),
    [
        ({"axis": 2}, (4, 8), "axis: 2 is out of range for rank 2; use -2 to 1"),
        ({"axis": -3, "block_size": 4}, (4, 8), "axis: -3 is out of range for rank 2; use -2 to 1"),
        (
            {"bare": True, "block_size": 4},
            (),
            "axis: -1 is out of range for rank 0; a scalar has no axis",
        ),
    ],
)
def test_an_axis_that_a_tensor_has_not_names_the_tensor(
    choices: dict[str, Any], shape: tuple[int, ...], rule: str
) -> None:
    with pytest.raises(SpecError) as error:
        made(choices).spec_for(info(shape, name="layer.w"))
    assert str(error.value) == f"tensor layer.w: {rule}"

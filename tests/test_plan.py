"""The fate of every tensor, from headers alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qtool.dtypes import DTYPES, DType
from qtool.engine import quantize
from qtool.errors import SpecError
from qtool.formats import Entry
from qtool.layouts import mlx
from qtool.packing import pack
from qtool.plan import make_plan
from qtool.recipe import Recipe
from qtool.spec import Blocked, PerAxis, QuantSpec, TensorInfo


def info(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorInfo:
    return TensorInfo(name, shape, DTYPES[dtype], DTYPES[dtype].nbytes(math.prod(shape)))


def recipe(dtype: str = "int8", **choices: Any) -> Recipe:
    names = ("axis", "block_size", "include", "exclude", "bare", "all_ranks")
    mine = {name: choices.pop(name) for name in names if name in choices}
    words = {name: mine.pop(name) for name in ("axis", "block_size") if name in mine}
    return Recipe({"dtype": dtype, **words, **choices}, **mine)


def entry(name: str, dtype: str, *shape: int) -> Entry:
    return Entry(name, DTYPES[dtype], shape)


def test_every_tensor_has_its_fate_in_the_order_of_the_source() -> None:
    infos = [info("b", (4,)), info("w", (4, 33)), info("ids", (7,), "int64"), info("v", (8, 9))]
    plan = make_plan(infos, recipe(exclude=["v"]))
    assert [(p.info, p.reason) for p in plan] == [
        (infos[0], "rank below 2"), (infos[1], None), (infos[2], "int64 is no source type"),
        (infos[3], "excluded"),
    ]  # fmt: skip
    assert [list(p.entries) for p in plan] == [
        [entry("b", "float32", 4)],
        [entry("w", "int8", 4, 33), entry("w.scale", "float32", 4)],
        [entry("ids", "int64", 7)],
        [entry("v", "float32", 8, 9)],
    ]
    assert [p.bytes_after for p in plan] == [16, 4 * 33 + 16, 56, 288]
    assert plan[1].spec == QuantSpec("int8", PerAxis(0))
    assert plan[1].stored is not None
    assert plan[1].stored.scale_dtype == DTYPES["float32"]
    assert plan[0].spec is plan[0].stored is None


@pytest.mark.parametrize(
    ("choices", "source", "entries"),
    [
        ({"dtype": "int4", "block_size": 16}, "float32",
         [entry("w", "uint8", 66), entry("w.scale", "float32", 4, 3)]),
        ({"dtype": "uint4", "block_size": 16}, "bfloat16",
         [entry("w", "uint8", 66), entry("w.scale", "bfloat16", 4, 3),
          entry("w.zero_point", "uint8", 6)]),
        ({"dtype": "uint8", "axis": 1}, "float16",
         [entry("w", "uint8", 4, 33), entry("w.scale", "float16", 33),
          entry("w.zero_point", "uint8", 33)]),
        ({"dtype": "int8", "symmetric": False}, "float64",
         [entry("w", "int8", 4, 33), entry("w.scale", "float32", 4),
          entry("w.zero_point", "int8", 4)]),
        ({"dtype": "float6e3m2", "scale_dtype": "float8e8m0", "block_size": 32}, "float32",
         [entry("w", "uint8", 99), entry("w.scale", "float8e8m0", 4, 2)]),
        ({"dtype": "float8e5m2"}, "float32",
         [entry("w", "float8e5m2", 4, 33), entry("w.scale", "float32", 4)]),
        ({"dtype": "uint2"}, "float32",
         [entry("w", "uint8", 33), entry("w.scale", "float32", 4),
          entry("w.zero_point", "uint8", 1)]),
        ({"dtype": "uint8", "semantics": "dynamic", "all_ranks": True}, "float16",
         [entry("w", "uint8", 4, 33), entry("w.scale", "float32"), entry("w.zero_point", "uint8")]),
    ],
    ids=str,
)  # fmt: skip
def test_the_plan_says_what_is_stored(
    choices: dict[str, Any], source: str, entries: list[Entry]
) -> None:
    (planned,) = make_plan([info("w", (4, 33), source)], recipe(**choices))
    assert list(planned.entries) == entries
    assert planned.bytes_after == sum(e.nbytes for e in entries)
    x = np.random.default_rng(0).normal(size=(4, 33)).astype(DTYPES[source].numpy)
    assert planned.spec is not None
    tensor = quantize(x, planned.spec)
    held = {"codes": pack(tensor.y, tensor.spec.dtype), "scale": tensor.scale}
    if tensor.zero_point is not None:
        held["zero_point"] = pack(tensor.zero_point, tensor.spec.dtype)
    assert [part.role for part in planned.parts] == list(held)
    assert [held[part.role].nbytes for part in planned.parts] == [e.nbytes for e in entries]


@pytest.mark.parametrize(
    ("shape", "source", "choices", "reason"),
    [
        ((4, 1), "float32", {"dtype": "int8"}, "would not get smaller as int8"),
        ((4, 2), "float32", {"dtype": "int8"}, None),  # 8 + 16 < 32
        ((2, 2), "float16", {"dtype": "int8"}, "would not get smaller as int8"),  # 4 + 4 = 8
        ((2, 3), "float16", {"dtype": "int8"}, None),
        ((4, 99), "float16", {"dtype": "int16"}, "would not get smaller as int16"),
        ((0, 5), "float32", {"dtype": "int4"}, "would not get smaller as int4"),
        ((4, 8), "float32", {"dtype": "int8", "block_size": 1}, "would not get smaller as int8"),
        ((1,), "float32", {"dtype": "int8", "bare": True}, None),
        ((1,), "float32", {"dtype": "uint8", "semantics": "dynamic", "all_ranks": True}, None),
    ],
)
def test_a_tensor_that_would_not_get_smaller_stays(
    shape: tuple[int, ...], source: str, choices: dict[str, Any], reason: str | None
) -> None:
    tensor = info("w", shape, source)
    (planned,) = make_plan([tensor], recipe(**choices))
    assert planned.reason == reason
    if reason is not None:
        assert list(planned.entries) == [Entry("w", tensor.dtype, shape)]


def test_given_scales_decide_what_is_quantized_and_stored() -> None:
    known: dict[str, tuple[DType | None, bool]] = {
        "a": (DTYPES["float16"], True), "b": (None, False), "d": (DTYPES["float64"], False),
    }  # fmt: skip
    infos = [info(name, (4, 33)) for name in "abcd"]
    a, b, c, d = make_plan(infos, recipe("uint8"), known.get)
    assert list(a.entries) == [
        entry("a", "uint8", 4, 33), entry("a.scale", "float16", 4),
        entry("a.zero_point", "uint8", 4),
    ]  # fmt: skip
    assert list(b.entries) == [entry("b", "uint8", 4, 33), entry("b.scale", "float32", 4)]
    assert c.reason == "no scale is given for it"
    assert d.stored is not None
    assert d.stored.scale_dtype == DTYPES["float32"]


def test_given_scales_are_not_asked_for_tensors_that_stay() -> None:
    def given(name: str) -> tuple[DType | None, bool] | None:
        raise AssertionError(name)

    (planned,) = make_plan([info("b", (4,))], recipe(), given)
    assert planned.reason == "rank below 2"


def test_a_recipe_that_does_not_fit_names_the_tensor() -> None:
    with pytest.raises(SpecError) as error:
        make_plan([info("w", (4, 33))], recipe(axis=2))
    assert str(error.value) == "tensor w: axis: 2 is out of range for rank 2; use -2 to 1"


def test_the_axis_of_a_planned_spec_counts_from_the_front() -> None:
    (planned,) = make_plan([info("w", (4, 33))], recipe("int4", axis=-1, block_size=8))
    assert planned.spec is not None
    assert planned.spec.granularity == Blocked(1, 8)


def test_what_a_layout_cannot_say_stays_and_why() -> None:
    infos = [info("a.weight", (4, 64)), info("b.weight", (4, 66)), info("c", (4, 64))]
    plan = make_plan(infos, recipe("uint4", block_size=32), layout=mlx)
    assert [(p.reason, p.is_fallback) for p in plan] == [
        (None, False),
        ("mlx needs rows of whole blocks of 32, not of 66", True),
        ("no weight of a linear layer or embedding, which mlx is for", True),
    ]
    assert [p.bytes_after for p in plan[1:]] == [i.nbytes for i in infos[1:]]

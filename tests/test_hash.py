"""--hash: the SHA-256 of every source and output file in the report."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from checkpoints import shard_name, three
from command import leftovers, ok, refused, report, strict
from safetensors.numpy import save_file

import qtool
from qtool.errors import GateError
from qtool.jobs import hashing
from qtool.jobs.hashing import Sums

EXAMPLES = Path(__file__).parents[1] / "examples"
SCHEMA = json.loads((Path(qtool.__file__).parent / "report.schema.json").read_text())
NAMES = [shard_name(number, 3) for number in (1, 2, 3)]
W4 = ("--dtype", "int4", "--block-size", "32")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def entries(*paths: str | Path) -> list[dict[str, Any]]:
    """What a report should say of these files."""
    found = [(str(path), Path(path).read_bytes()) for path in paths]
    return sorted(
        (
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in found
        ),
        key=lambda entry: str(entry["name"]),
    )


def files(told: dict[str, Any]) -> tuple[Any, Any]:
    """Those of the source and of the output, in a report that follows the schema."""
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    return told["source"]["files"], told["output"]["files"]


def of_folder(target: str) -> tuple[Any, Any]:
    return files(strict(Path(f"{target}.report.json").read_text(encoding="utf-8")))


def in_folder(folder: str) -> list[dict[str, Any]]:
    return entries(*(path for path in Path(folder).rglob("*") if path.is_file()))


def weights() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=(48, 64)).astype(np.float32) for name in ("a", "b", "c")}


@pytest.mark.parametrize("source", ["m.npy", "m.npz", "m.safetensors"])
@pytest.mark.parametrize("target", ["out/q.npz", "out/größe q.safetensors", "out/q.npy"])
@pytest.mark.parametrize("command", ["quantize", "dynamic"])
def test_one_file(source: str, target: str, command: str) -> None:
    Path("out").mkdir()
    one = {"a": weights()["a"]}
    {"m.npy": lambda: np.save("m.npy", one["a"]), "m.npz": lambda: np.savez("m.npz", **one),
     "m.safetensors": lambda: save_file(one, "m.safetensors")}[source]()  # fmt: skip
    ok(command, f"./{source}", "-o", target, "--hash", "--dtype", "int8")
    (read,), wrote = files(report(Path(target)))
    assert (read, wrote) == (entries(source)[0] | {"name": f"./{source}"}, entries(target))
    told = subprocess.run(["sha256sum", target], capture_output=True, text=True, check=True)
    assert told.stdout.split()[0] == wrote[0]["sha256"]


def test_without_it_nothing_is_told() -> None:
    save_file(weights(), "m.safetensors")
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *W4)
    assert files(report(Path("q.safetensors"))) == (None, None)
    ok("quantize", three(Path("f")), *W4, "-o", "g")
    assert of_folder("g") == (None, None)


def test_standard_input_and_output() -> None:
    save_file(weights(), "m.safetensors")
    data = Path("m.safetensors").read_bytes()
    done = ok("quantize", "-", "-o", "-", *W4, "--hash", "--report", "r.json", "-q", stdin=data)
    Path("q.safetensors").write_bytes(done.out)
    read, wrote = files(json.loads(Path("r.json").read_text()))
    assert read == [entries("m.safetensors")[0] | {"name": "-"}]
    assert wrote == [entries("q.safetensors")[0] | {"name": "-"}]


def test_a_pipe_by_name() -> None:
    save_file(weights(), "m.safetensors")
    os.mkfifo("pipe")
    with subprocess.Popen(["cp", "m.safetensors", "pipe"]):
        ok("quantize", "pipe", "-o", "q.safetensors", *W4, "--hash")
    read, _ = files(report(Path("q.safetensors")))
    assert read == [entries("m.safetensors")[0] | {"name": "pipe"}]


def external_model(folder: Path) -> Path:
    """A model whose values lie in two files beside it and below it."""
    (folder / "data").mkdir(parents=True)
    model = onnx.load(EXAMPLES / "digits.onnx")
    for tensor in model.graph.initializer:
        place = "data/big.bin" if tensor.name.endswith("weight") else "small.bin"
        onnx.external_data_helper.set_external_data(tensor, place)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("more", [("quantize", *W4), ("dynamic", "--graph")], ids=lambda m: m[0])
def test_external_data_of_models(more: tuple[str, ...]) -> None:
    source = external_model(Path("in"))
    Path("out").mkdir()
    ok(more[0], source, "-o", "out/q.onnx", *more[1:], "--external-data", "--hash")
    read, wrote = files(report(Path("out/q.onnx")))
    assert read == entries("in/m.onnx", "in/data/big.bin", "in/small.bin")
    (data,) = Path("out").glob("*.data")
    assert wrote == entries("out/q.onnx", data)


def test_links_are_told_as_the_user_reaches_them() -> None:
    external_model(Path("in"))
    Path("there").mkdir()
    Path("there/real.onnx").touch()
    Path("link.onnx").symlink_to("there/real.onnx")
    Path("folder").symlink_to("in")
    ok("quantize", "folder/m.onnx", "-o", "link.onnx", *W4, "--external-data", "--hash", "--force")
    read, wrote = files(report(Path("link.onnx")))
    assert read == entries("folder/m.onnx", "folder/data/big.bin", "folder/small.bin")
    (data,) = Path("there").glob("*.data")
    assert wrote == entries("link.onnx", data)


def test_every_file_of_a_folder() -> None:
    three(Path("f"))
    ok("quantize", "f/", *W4, "-o", "q", "--layout", "compressed-tensors", "--hash")
    read, wrote = of_folder("q")
    assert read == in_folder("f")
    assert wrote == in_folder("q")
    assert len(wrote) == 3 + 2 + 5
    ok("dynamic", "f", "-o", "d", "--hash")
    assert of_folder("d") == (in_folder("f"), in_folder("d"))


def test_what_a_folder_leaves_out_is_no_source() -> None:
    folder = three(Path("f"))
    (folder / "pytorch_model.bin").write_bytes(b"copy")
    ok("quantize", folder, *W4, "-o", "q", "--hash")
    read, _ = of_folder("q")
    assert "f/pytorch_model.bin" not in {entry["name"] for entry in read}
    assert len(read) == len(in_folder("f")) - 1


def test_slices_and_finish() -> None:
    three(Path("f"))
    done = [
        ok("quantize", "f", *W4, "-o", "q", "--shards", f"{k}/2", "--hash", "--json")
        for k in (1, 2)
    ]
    read = [files(one.json)[0] for one in done]
    assert read == [entries(f"f/{NAMES[0]}", f"f/{NAMES[2]}"), entries(f"f/{NAMES[1]}")]
    assert [files(one.json)[1] for one in done] == [None, None]
    ok("finish", "q")
    assert of_folder("q") == (in_folder("f"), in_folder("q"))


@pytest.mark.parametrize("hashed", [1, 2])
def test_slices_with_and_without_it_are_of_two_runs(hashed: int) -> None:
    three(Path("f"))
    options = {k: ["--hash"] if k == hashed else [] for k in (1, 2)}
    ok("quantize", "f", *W4, "-o", "q", "--shards", "1/2", *options[1])
    line = refused("quantize", "f", *W4, "-o", "q", "--shards", "2/2", *options[2])
    assert "is of a run with another source or other settings" in line
    ok("quantize", "f", *W4, "-o", "q", "--shards", "2/2", *options[1])
    ok("finish", "q")
    wanted = (in_folder("f"), in_folder("q")) if hashed == 1 else (None, None)
    assert of_folder("q") == wanted


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_run_that_is_resumed_hashes_what_was_finished_before(before: bool, after: bool) -> None:
    three(Path("f"))
    options = {True: ["--hash"], False: []}
    ok("quantize", "f", *W4, "-o", "q", "--shards", "1/2", *options[before])
    record = Path("q.partial/shards", f"{NAMES[0]}.json")
    assert (json.loads(record.read_text())["files"] is not None) == before
    made = Path("q.partial/folder", NAMES[0]).stat()
    ok("quantize", "f", *W4, "-o", "q", "--resume", *options[after])
    assert os.path.samestat(Path("q", NAMES[0]).stat(), made)
    assert of_folder("q") == ((in_folder("f"), in_folder("q")) if after else (None, None))


def test_other_processes_hash_their_own_shards() -> None:
    three(Path("f"))
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        told = qtool.quantize_file(
            "f", "q", dtype="int4", block_size=32, hash=True, scheduler=executor
        )
    assert files(told) == (in_folder("f"), in_folder("q"))


# ---------------------------------------------------------------- when it cannot be told


class Meddling:
    """Progress that does something to a file once a tensor is done."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def begin(self, tensors: int, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish(self, name: str) -> None:
        self._action()

    def note(self, text: str) -> None: ...


def replaced(path: str) -> None:
    shutil.copy(path, f"{path}.new")
    os.replace(f"{path}.new", path)


def grown(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [replaced, grown, lambda p: os.utime(p, ns=(1, 1))])
@pytest.mark.parametrize("name", ["m.safetensors", "in/m.onnx", "in/data/big.bin"])
def test_a_source_that_changes_is_an_error_and_the_target_stays(
    name: str, change: Callable[[str], None]
) -> None:
    source = "in/m.onnx" if name.startswith("in") else name
    if source == "m.safetensors":
        save_file(weights(), source)
    else:
        external_model(Path("in"))
    target = Path("q" + Path(source).suffix)
    target.write_bytes(b"old")
    progress = Meddling(lambda: change(name))
    with pytest.raises(qtool.QtoolError) as error:
        qtool.quantize_file(source, target, dtype="int8", hash=True, force=True, progress=progress)
    assert str(error.value).endswith(f"{name}: was changed while it was read; begin anew")
    assert target.read_bytes() == b"old"
    assert leftovers(Path()) == []
    assert not Path("q.report.json").exists()


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], "config.json", "LICENSE"])
def test_so_it_is_in_a_folder(name: str) -> None:
    three(Path("f"))
    path = str(Path("f", name).absolute())
    progress = Meddling(lambda: os.utime(path, ns=(1, os.stat(path).st_mtime_ns + 1)))
    message = "was changed while it was read; begin anew"
    with pytest.raises(qtool.QtoolError, match=message) as error:
        qtool.quantize_file("f", "q", dtype="int8", hash=True, progress=progress)
    assert name in error.value.thing
    assert not Path("q").exists()
    ok("quantize", "f", "-o", "q", "--dtype", "int8", "--hash", "--resume")
    assert of_folder("q") == (in_folder("f"), in_folder("q"))


def test_a_result_that_fails_has_no_files_and_its_source_has() -> None:
    save_file(weights(), "m.safetensors")
    Path("q.safetensors").write_bytes(b"old")
    for source, target in (("m.safetensors", "q.safetensors"), ("f", "q")):
        if source == "f":
            three(Path("f"))
        with pytest.raises(GateError):
            qtool.quantize_file(
                source, target, dtype="int4", hash=True, force=True, fail_if=["sqnr_db < 100"]
            )
        told = strict(Path("q.report.json").read_text(encoding="utf-8"))
        wanted = in_folder("f") if source == "f" else entries("m.safetensors")
        assert files(told) == (wanted, None)
    assert Path("q.safetensors").read_bytes() == b"old"


def test_a_dry_run_hashes_nothing() -> None:
    save_file(weights(), "m.safetensors")
    line = refused("quantize", "m.safetensors", *W4, "--dry-run", "--hash", code=2)
    assert line == "--hash: a dry run reads headers alone; leave one of them out"


def test_sums_of_nothing_of_much_and_of_what_is_not_there(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("empty", "piece", "more")]
    for path, count in zip(paths, (0, 1 << 20, (3 << 20) + 7), strict=True):
        path.write_bytes(os.urandom(count))
    with Sums(wanted=True) as sums:
        sums.add({str(path): path for path in paths})
        assert sums.entries() == entries(*paths)
        with pytest.raises(qtool.QtoolError, match="gone: cannot be read: No such file"):
            sums.add({"gone": tmp_path / "gone"})
    with Sums(wanted=False) as sums:
        sums.add({"gone": tmp_path / "gone"})
        assert sums.entries() is None


def test_a_file_that_goes_away_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    with Sums(wanted=True) as sums:
        sums.add({"x": path})
        path.unlink()
        with pytest.raises(qtool.QtoolError, match="x: cannot be read"):
            sums.entries()


def test_complete_files_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no memory for one once the output is there."""
    Path("b").write_bytes(b"b")
    Path("a").write_bytes(bytes(3 << 20))

    def started(_jobs: int, _name: str) -> None:
        raise MemoryError

    monkeypatch.setattr(hashing, "started", started)
    found = hashing.of_files({"b": Path("b"), "a": Path("a")}, wanted=True)
    assert found == entries("a", "b")

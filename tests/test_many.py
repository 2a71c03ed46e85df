"""Several sources in one call, folders as targets, and JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import PYTHON, ok, qtool, refused, stored, strict
from safetensors.numpy import save_file

WEIGHT = np.asarray([[127, -1.5, 2.5, 1], [254, 127, -254, 0]], np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in: a.npy, b.npz, c.safetensors, a checkpoint, and what is none."""
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", WEIGHT)
    np.savez("b.npz", w=WEIGHT)
    save_file({"w": WEIGHT}, "c.safetensors")
    Path("bad.npy").write_bytes(b"nothing")
    Path("model").mkdir()
    save_file({"w": WEIGHT}, "model/model.safetensors")
    Path("model/config.json").write_text("{}")
    return tmp_path


def lines(out: bytes) -> list[Any]:
    """JSON lines, each of which must be one strict document without a blank."""
    text = out.decode("ascii")
    assert text.endswith("\n")
    rows = text[:-1].split("\n")
    documents = [strict(row) for row in rows]
    assert rows == [json.dumps(d, separators=(",", ":")) for d in documents]
    return documents


def written(before: set[str] | None = None) -> set[str]:
    found = {str(p) for p in Path().rglob("*") if p.is_file()}
    return found - (before or set())


def test_each_source_gets_its_own_output_beside_it(folder: Path) -> None:
    before = written()
    done = ok("quantize", "a.npy", "b.npz", "c.safetensors", "model", "--dtype", "int8")
    assert written(before) == {
        "a.int8.safetensors", "a.int8.report.json", "b.int8.safetensors", "b.int8.report.json",
        "c.int8.safetensors", "c.int8.report.json", "model-int8/model.safetensors",
        "model-int8/config.json", "model-int8.report.json",
    }  # fmt: skip
    assert done.err.count("times smaller") + done.err.count(" -> ") >= 4
    assert stored(Path("b.int8.safetensors"))["w"].tolist() == [[127, -2, 2, 1], [127, 64, -127, 0]]


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "made"])
def test_a_folder_takes_the_default_names(folder: Path, is_there: bool) -> None:
    if is_there:
        Path("out").mkdir()
    before = written()
    target = "out" if is_there else "out/"
    ok("quantize", "a.npy", "c.safetensors", "--dtype", "int8", "-o", target, "--report", target)
    expected = {"out/a.int8.safetensors", "out/a.int8.report.json", "out/c.int8.safetensors",
                "out/c.int8.report.json"}  # fmt: skip
    assert written(before) == expected
    ok("dynamic", "a.npy", "-o", target)
    ok("dequantize", "out/a.int8.safetensors", "out/c.int8.safetensors", "-o", "back/")
    assert written(before) - expected == {
        "out/a.dynamic.safetensors", "out/a.dynamic.report.json",
        "back/a.int8.float32.safetensors", "back/c.int8.float32.safetensors",
    }  # fmt: skip


def test_checkpoints_are_one_source_each_and_go_into_folders_too(folder: Path) -> None:
    os.rename("model", "one")
    subprocess.run(["cp", "-r", "one", "two"], check=True)
    ok("quantize", "one", "two/", "a.npy", "--dtype", "int8", "-o", "out/", "--report", "reports/")
    assert written() >= {"out/one-int8/model.safetensors", "out/two-int8/model.safetensors",
                         "out/a.int8.safetensors"}  # fmt: skip
    assert sorted(os.listdir("reports")) == [
        "a.int8.report.json", "one-int8.report.json", "two-int8.report.json",
    ]  # fmt: skip
    ok("quantize", "one", "--dtype", "int8", "-o", "alone")
    assert Path("alone/model.safetensors").is_file()


def test_one_that_fails_does_not_stop_the_others(folder: Path) -> None:
    done = qtool("quantize", "bad.npy", "a.npy", "gone.npz", "c.safetensors", "--dtype", "int8",
                 "-q")  # fmt: skip
    assert (done.code, done.out) == (1, b"")
    first, second = done.err.splitlines()
    assert first.startswith("qtool: bad.npy: holds no .npy")
    assert second.startswith("qtool: gone.npz: ")
    assert Path("a.int8.safetensors").is_file()
    assert Path("c.int8.safetensors").is_file()


def test_an_error_about_a_tensor_names_the_file_too(folder: Path) -> None:
    save_file({"w": np.full((4, 4), np.nan, np.float32)}, "nan.safetensors")
    done = qtool("quantize", "nan.safetensors", "a.npy", "--dtype", "int8", "-q")
    assert done.code == 1
    assert done.err.startswith("qtool: nan.safetensors: tensor w: ")
    alone = refused("quantize", "nan.safetensors", "--dtype", "int8", "-q")
    assert alone.startswith("tensor w: ")


@pytest.mark.parametrize(("sources", "code"), [
    (["a.npy", "c.safetensors"], 0), (["c.safetensors", "gated.safetensors"], 3),
    (["gated.safetensors", "bad.npy"], 1), (["gated.safetensors", "b.onnx"], 1),
    (["bad.npy", "gated.safetensors", "a.npy"], 1),
], ids=str)  # fmt: skip
def test_the_worst_exit_code_is_left_with(sources: list[str], code: int, folder: Path) -> None:
    save_file({"w": np.asarray([[1e4, 4e3], [1e4, 4e3]], np.float32)}, "gated.safetensors")
    done = qtool("quantize", *sources, "--dtype", "int2", "--fail-if",
                 "max_abs_error > 1000", "-q")  # fmt: skip
    assert done.code == code, done.err
    if code == 3:
        assert "gated.safetensors: " in done.err
        assert not Path("gated.int2.safetensors").exists()
        assert Path("gated.int2.report.json").is_file()
        assert Path("c.int2.safetensors").is_file()


REFUSED = [
    ("quantize a.npy c.safetensors --dtype int8 -o y.npz", "-o: y.npz is one file for 2 sources; "
     "name a folder, ending in /"),
    ("quantize a.npy c.safetensors --dtype int8 -o -", "-o: - is one file for 2 sources"),
    ("quantize a.npy c.safetensors --dtype int8 --report r.json", "--report: r.json is one file"),
    ("quantize a.npy c.safetensors --dtype int8 --save-recipe r.toml", "--save-recipe: r.toml is"),
    ("quantize a.npy c.safetensors --dtype int8 --baseline r.json", "--baseline: r.json is one"),
    ("quantize a.npy c.safetensors --dtype int8 --json", "--json: is one document, for one SRC; "
     "use --json-lines"),
    ("inspect a.npy b.npz --json", "--json: is one document, for one SRC; use --json-lines"),
    ("inspect a.npy --json --json-lines", "--json: contradicts --json-lines"),
    ("inspect - -", "SRC: - is given twice"),
    ("quantize - a.npy - --dtype int8", "SRC: - is given twice"),
    ("quantize a.npy ./a.npy --dtype int8", "./a.npy: would be written where that of a.npy is"),
    ("quantize a.npy sub/../a.npz --dtype int8", "sub/../a.npz: would be written where"),
    ("quantize a.npy sub/a.npy --dtype int8 -o out/", "sub/a.npy: would be written where"),
    ("quantize a.npy sub/a.npy --dtype int8 --report out/", "sub/a.npy: would be written where"),
    ("dequantize a.npy a.npy", "a.npy: is given twice; leave one of them out"),
    ("quantize model model/ --dtype int8", "model/: would be written where"),
    ("quantize - --dtype int8 -o out/", "-o out/: standard input has no name of its own"),
    ("quantize - --dtype int8 --json-lines", "--json-lines: standard output carries the file"),
    ("quantize a.npy --dtype int8 -o - --json-lines", "--json-lines: standard output carries"),
    ("inspect a.npy b.npz --plot --json-lines", "--plot: draws for people"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[a for a, _ in REFUSED])
def test_what_cannot_go_together_is_refused_before_any_work(
    arguments: str, message: str, folder: Path
) -> None:
    Path("sub").mkdir()
    before = {*Path().rglob("*")}
    data = Path("a.npy").read_bytes()
    assert message in refused(*arguments.split(), code=2, stdin=data)
    assert {*Path().rglob("*")} == before


def test_the_same_name_in_other_folders_or_containers_is_no_clash(folder: Path) -> None:
    Path("sub").mkdir()
    np.save("sub/a.npy", WEIGHT)
    ok("quantize", "a.npy", "sub/a.npy", "--dtype", "int8", "--to", "npz")
    np.savez("q.npz", **dict(np.load("a.int8.npz")))
    ok("quantize", "c.safetensors", "--dtype", "int8", "-o", "q.safetensors")
    ok("dequantize", "q.npz", "q.safetensors")
    assert {"q.float32.npz", "q.float32.safetensors"} <= written()


# -------------------------------------------------------------------------------------- JSON lines


def test_json_lines_are_the_documents_of_json(folder: Path) -> None:
    done = ok("inspect", "a.npy", "b.npz", "model", "--json-lines", "--stats")
    assert lines(done.out) == [
        ok("inspect", name, "--json", "--stats").json for name in ("a.npy", "b.npz", "model")
    ]
    for command in ("quantize", "dynamic"):
        dtype = ["--dtype", "int8"] if command == "quantize" else []
        done = ok(command, "a.npy", "c.safetensors", *dtype, "--json-lines", "-q")
        found = lines(done.out)
        assert [d["source"]["name"] for d in found] == ["a.npy", "c.safetensors"]
        for document in found:
            path = Path(document["output"]["name"]).with_suffix(".report.json")
            assert strict(path.read_text()) == document
    done = ok("dequantize", "c.int8.safetensors", "a.int8.safetensors", "--json-lines")
    assert [d["output"]["name"] for d in lines(done.out)] == [
        "c.int8.float32.safetensors", "a.int8.float32.safetensors",
    ]  # fmt: skip


def test_an_error_is_a_line_too(folder: Path) -> None:
    done = qtool("inspect", "a.npy", "bad.npy", "gone", "--json-lines")
    good, bad, gone = lines(done.out)
    assert done.code == 1
    assert good["name"] == "a.npy"
    assert bad == {"source": "bad.npy", "error": bad["error"], "exit_code": 1}
    assert gone["source"] == "gone"
    assert done.err == f"qtool: {bad['error']}\nqtool: {gone['error']}\n"
    alone = qtool("inspect", "bad.npy", "--json-lines")
    assert (alone.code, lines(alone.out)) == (1, [bad])


def test_a_gate_that_fails_is_a_line_with_the_report(folder: Path) -> None:
    done = qtool("quantize", "c.safetensors", "--dtype", "int8", "--fail-if", "bits_per_weight > 1",
                 "--json-lines", "-q")  # fmt: skip
    [line] = lines(done.out)
    assert (done.code, line["exit_code"], line["source"]) == (3, 3, "c.safetensors")
    assert line["report"] == strict(Path("c.int8.report.json").read_text())
    assert "w" in line["error"]


def test_a_plan_is_a_line_and_no_table(folder: Path) -> None:
    before = {*Path().rglob("*")}
    done = ok("quantize", "a.npy", "c.safetensors", "--dtype", "int8", "--dry-run", "--json-lines",
              "-o", "out/")  # fmt: skip
    assert [d["output"]["name"] for d in lines(done.out)] == [
        "out/a.int8.safetensors", "out/c.int8.safetensors",
    ]  # fmt: skip
    assert {*Path().rglob("*")} == before


def test_a_line_comes_as_soon_as_its_source_is_done(folder: Path) -> None:
    os.mkfifo("late.npy")
    command = [*PYTHON, "inspect", "a.npy", "late.npy", "--json-lines"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert strict(running.stdout.readline().decode())["name"] == "a.npy"
        assert running.poll() is None
        Path("late.npy").write_bytes(Path("a.npy").read_bytes())
        assert strict(running.stdout.readline().decode())["name"] == "late.npy"
    assert running.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once(number: signal.Signals, code: int, folder: Path) -> None:
    os.mkfifo("late.npy")
    command = [*PYTHON, "quantize", "bad.npy", "late.npy", "c.safetensors", "--dtype", "int8"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:  # fmt: skip
        assert running.stderr is not None
        assert running.stderr.readline().startswith(b"qtool: bad.npy: ")
        time.sleep(0.2)
        running.send_signal(number)
        assert running.wait(30) == code
    assert not Path("c.int8.safetensors").exists()


def test_people_see_each_file_with_its_headline(folder: Path) -> None:
    out = ok("inspect", "a.npy", "b.npz").out.decode()
    assert [line.split(":")[0] for line in out.splitlines() if ", 1 tensor" in line] == [
        "a.npy", "b.npz",
    ]  # fmt: skip
    first, second = (ok("inspect", name).out.decode() for name in ("a.npy", "b.npz"))
    assert out == f"{first}\n{second}"

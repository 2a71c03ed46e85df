"""Files made to hang or exhaust their reader, or to run something: each costs an error message."""

from __future__ import annotations

import ast
import json
import os
import pickle
import signal
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from command import int8, metadata, ok, process, qtool, refused, report, stored
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx_models import initializer, model
from safetensors.numpy import load_file, save_file

import qtool as package
from qtool.errors import QtoolError, UsageError
from qtool.jobs.dequantize import dequantize_file
from qtool.jobs.inspect import inspect_file
from qtool.jobs.quantize import quantize_file
from qtool.recipe import patterns, toml

WEIGHT = np.arange(512, dtype=np.float32).reshape(16, 32)
Put = Callable[[Path, str], Path]


def saved(folder: Path, name: str = "w.safetensors", **tensors: Any) -> Path:
    save_file(tensors or {"w": WEIGHT}, folder / name)
    return folder / name


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    saved(folder, "model.safetensors", **{"a.weight": WEIGHT})
    (folder / "config.json").write_text("{}")
    return folder


def in_file(made: ModelProto, folder: Path) -> Path:
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    return folder / "m.onnx"


# ------------------------------------------------------------------------------------------ depth


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


@pytest.mark.parametrize(("depth", "code"), [(10, 0), (40, 1), (4000, 1)])
def test_graphs_in_graphs_are_read_as_deep_as_protobuf_does(
    depth: int, code: int, tmp_path: Path
) -> None:
    values = b"\x08\x80\x80\x04\x10\x03" + field(8, b"w") + field(9, bytes(1 << 16))
    graph = field(5, values)
    for _ in range(depth):  # a node, its attribute, the graph there
        graph = field(1, field(4, b"If") + field(5, b"\xa0\x01\x05" + field(6, graph)))
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x0a" + field(7, graph))
    done = qtool("inspect", path, "--json")
    assert (done.code, "is not an ONNX model" in done.err) == (code, code == 1), done.err
    if not code:
        assert [row["shape"] for row in done.json["tensors"]] == [[1 << 16]]


def with_metadata(folder: Path, text: str) -> Path:
    save_file({"w": WEIGHT}, folder / "m.safetensors", {"qtool": text})
    return folder / "m.safetensors"


def with_header(folder: Path, text: str) -> Path:
    path = folder / "h.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    return path


def with_note(folder: Path, text: str) -> Path:
    np.savez(folder / "n.npz", w=WEIGHT, __qtool__=np.frombuffer(text.encode(), np.uint8))
    return folder / "n.npz"


def with_properties(folder: Path, text: str) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = model(nodes, [initializer("w", WEIGHT)], inputs={"x": (2, 16)})
    made.metadata_props.add(key="qtool", value=text)
    return in_file(made, folder)


def with_config(folder: Path, text: str) -> Path:
    (checkpoint(folder / "c") / "config.json").write_text(text)
    return folder / "c"


def with_index(folder: Path, text: str) -> Path:
    (checkpoint(folder / "c") / "model.safetensors.index.json").write_text(text)
    return folder / "c"


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
@pytest.mark.parametrize(
    "put", [with_metadata, with_header, with_note, with_properties, with_config, with_index]
)
def test_json_that_is_nested_too_deep_is_refused(put: Put, deep: str, tmp_path: Path) -> None:
    refused("inspect", put(tmp_path, deep))


# ------------------------------------------------------------------------------------------- time


def tensor(name: str) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], raw_data=bytes(8))


def unnamed(count: int) -> GraphProto:
    return GraphProto(initializer=[tensor("") for _ in range(count)])


def attributes(count: int) -> GraphProto:
    held = AttributeProto(name="a", type=AttributeProto.TENSOR, t=tensor(""))
    return GraphProto(node=[NodeProto(op_type="Own", domain="own", attribute=[held] * count)])


def names(count: int) -> GraphProto:
    different = [f"w{i}" for i in range(count)]
    return GraphProto(initializer=[tensor(name) for name in [*different, different[-1]]])


def graphs(count: int) -> GraphProto:
    node = helper.make_node("If", ["c"], ["y"], then_branch=GraphProto(name="g"))
    return GraphProto(node=[node] * count)


def readers(count: int) -> GraphProto:
    made = [helper.make_node("MatMul", ["x", "w"], [f"y{i}"]) for i in range(count)]
    return GraphProto(node=made, initializer=[initializer("w", WEIGHT)])


@pytest.mark.parametrize(
    ("make", "command"),
    [
        (unnamed, ["inspect"]), (attributes, ["inspect"]), (names, ["inspect"]),
        (graphs, ["inspect"]), (readers, ["inspect"]), (readers, ["dynamic", "--graph", "--force"]),
    ],
)  # fmt: skip
def test_time_grows_with_a_model_and_not_with_its_square(
    make: Callable[[int], GraphProto], command: list[str], tmp_path: Path
) -> None:
    def seconds(count: int) -> float:
        made = ModelProto(ir_version=10, graph=make(count))
        made.opset_import.add(version=21)
        path = in_file(made, tmp_path)
        started = time.process_time()
        done = qtool(*command, path)
        assert done.code == (1 if make is names else 0), done.err
        return time.process_time() - started

    seconds(10)
    short, long = seconds(500), seconds(6000)
    assert long < 36 * short + 0.5, (short, long)  # 144 times as long where it is the square


def nested_calls(depth: int, last: str) -> ModelProto:
    """Functions that call each other twice, before a node whose type is asked for."""
    imports = [helper.make_opsetid("", 10), helper.make_opsetid("own", 1)]
    made = ModelProto(ir_version=8, opset_import=imports)
    for i in range(depth):
        callee = f"f{i + 1}" if i < depth - 1 else last
        domain = "" if callee == "Identity" else "own"
        calls = [helper.make_node(callee, [a], [b], domain=domain) for a, b in ("xt", "ty")]
        made.functions.append(helper.make_function("own", f"f{i}", ["x"], ["y"], calls, imports))
    nodes = [
        helper.make_node("f0", ["x"], ["a"], domain="own"),
        helper.make_node("MatMul", ["a", "w"], ["m"]),
        helper.make_node("Clip", ["m"], ["y"], min=0.0, max=1.0),
    ]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 16])
    stored = [initializer("w", WEIGHT)]
    made.graph.CopyFrom(helper.make_graph(nodes, "g", [value], [], stored))
    return made


@pytest.mark.parametrize(("depth", "last"), [(5, "Identity"), (40, "Identity"), (3, "f0")])
def test_functions_that_call_each_other_take_no_time(depth: int, last: str, tmp_path: Path) -> None:
    path = in_file(nested_calls(depth, last), tmp_path)
    started = time.process_time()
    options = ["--dtype", "int4", "--block-size", "16", "-o", tmp_path / "q.onnx"]
    if depth == 5:
        ok("quantize", path, *options)
    else:
        assert "the type of its input 'm' is not known" in refused("quantize", path, *options)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    ["a." * 50_000 + "b = 1", '"x".' * 50_000 + "b = 1", "[" + "a." * 50_000 + "b]"],
    ids=["bare", "quoted", "table"],
)
def test_a_long_key_in_a_recipe_is_refused_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(f'dtype = "int8"\n{text}\n')
    started = time.process_time()
    line = refused("quantize", saved(tmp_path), "--recipe", tmp_path / "r.toml")
    assert "is no TOML: a line has more than 1000 dots" in line
    assert time.process_time() - started < 5


def test_a_recipe_may_have_many_patterns_in_a_line(tmp_path: Path) -> None:
    excluded = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(400)]
    (tmp_path / "r.toml").write_text(f'dtype = "int8"\nexclude = {json.dumps(excluded)}\n')
    assert toml.read(tmp_path / "r.toml").exclude == tuple(excluded)


def test_a_pattern_that_python_warns_of_warns_nobody(tmp_path: Path) -> None:
    made = ok("quantize", saved(tmp_path), "--dtype", "int8", "--include", "re:[[w]", "--json",
              "-o", tmp_path / "q.safetensors")  # fmt: skip
    assert [row["name"] for row in made.json["tensors"]] == ["w"]


SLOW = ["re:(a+)+$", "re:(a|aa)+$", "re:(a|a)(a?)" + "(a|a)" * 40 + "b"]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_takes_for_ever_is_an_error(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(QtoolError, match=r"takes more than 0\.2 seconds for one name"):
        patterns.Patterns([pattern]).match("a" * 50 + "!")
    assert patterns.Patterns(["re:(a+)+$"]).match("a" * 50)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_pattern_in_a_quantized_file_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    name, made = "a" * 50 + "!", tmp_path / "q.safetensors"
    save_file({name: WEIGHT}, tmp_path / "w.safetensors")
    ok("quantize", tmp_path / "w.safetensors", "--dtype", "int8", "-o", made)
    said = json.loads(metadata(made)["qtool"])
    said["recipe"] += '[[rules]]\npattern = "re:(a+)+$"\nsaturate = false\n'
    save_file(stored(made), made, {"qtool": json.dumps(said)})
    line = refused("verify", tmp_path / "w.safetensors", made, "--alone")
    assert line.startswith("pattern 're:(a+)+$': takes more than 0.2 seconds for one name; ")


def test_brackets_that_nothing_closes_are_few() -> None:
    started = time.process_time()
    with pytest.raises(UsageError, match=r"has more than 100 \[ that no \] closes; write \[\[\]"):
        patterns.Patterns(["x]" + "[" * 100_000]).match("w")
    assert time.process_time() - started < 1
    assert patterns.Patterns(["[w]" + "[" * 100]).match("w" + "[" * 100)
    assert patterns.Patterns(["*" + "[[]" * 1000]).match("[" * 1000)


def test_a_thread_that_cannot_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    monkeypatch.setattr(threading.Thread, "start", start)
    line = refused("quantize", saved(tmp_path), "--dtype", "int8", "--hash")
    assert line == "threads: can't start new thread; raise the limit on processes (ulimit -u)"


PIPES = {
    "config": ("config.json", ["inspect", "c"]),
    "shard": ("model.safetensors", ["quantize", "c", "--dtype", "int8"]),
    "index": ("model.safetensors.index.json", ["inspect", "c"]),
    "other": ("tokenizer.json", ["quantize", "c", "--dtype", "int8", "-o", "d"]),
    "foreign": ("hf_quant_config.json", ["inspect", "c"]),
    "beside": ("config.json", ["inspect", "c/model.safetensors"]),
}


@pytest.mark.parametrize("case", PIPES)
def test_nobody_waits_for_a_pipe_in_a_folder(case: str, tmp_path: Path) -> None:
    name, arguments = PIPES[case]
    path = checkpoint(tmp_path / "c") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    done = process(*arguments, cwd=tmp_path)
    is_refused = case not in ("foreign", "beside")  # which are not said where they are no files
    assert (done.returncode, b"is no regular file" in done.stderr) == (is_refused, is_refused)


def test_nobody_waits_for_a_pipe_that_stands_for_a_report(tmp_path: Path) -> None:
    ok("quantize", saved(tmp_path), "-o", tmp_path / "q.safetensors", "--dtype", "int8")
    (tmp_path / "q.report.json").unlink()
    os.mkfifo(tmp_path / "q.report.json")
    assert process("verify", "w.safetensors", "q.safetensors", cwd=tmp_path).returncode == 0


def test_nobody_waits_for_a_pipe_that_a_report_names(tmp_path: Path) -> None:
    source = saved(tmp_path)
    ok("quantize", source, "-o", tmp_path / "q.safetensors", "--dtype", "int8")
    source.unlink()
    os.mkfifo(source)
    done = process("report", "q.report.json", "-o", "r.html", cwd=tmp_path)
    assert (done.returncode, b"w.safetensors is not there" in done.stderr) == (0, True)


# ----------------------------------------------------------------------------------------- memory


def huge_npy(folder: Path) -> Path:
    np.save(folder / "x.npy", int8([1]))
    data = (folder / "x.npy").read_bytes()
    shape = b"(9999999999999,), }"
    (folder / "x.npy").write_bytes(data.replace(b"(1,), }".ljust(len(shape)), shape))
    return folder / "x.npy"


def huge_safetensors(folder: Path) -> Path:
    said = {"dtype": "U8", "shape": [1 << 43], "data_offsets": [0, 1 << 43]}
    return with_header(folder, json.dumps({"w": said}))


def wrapping_safetensors(folder: Path) -> Path:
    said = {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}
    return with_header(folder, json.dumps({"w": said}))


def huge_onnx(folder: Path) -> Path:
    held = TensorProto(name="w", data_type=1, dims=[1 << 40, 1 << 20], raw_data=b"abcd")
    return in_file(ModelProto(ir_version=10, graph=GraphProto(initializer=[held])), folder)


def wrapping_onnx(folder: Path) -> Path:
    held = TensorProto(name="w", data_type=1, dims=[1 << 32, 1 << 32], raw_data=b"")
    return in_file(ModelProto(ir_version=10, graph=GraphProto(initializer=[held])), folder)


def huge_metadata(folder: Path) -> Path:
    how = {
        "dtype": "int4", "shape": [1 << 30, 1 << 29], "granularity": "blocked", "axis": 1,
        "block_size": 1, "scale_dtype": "float32", "source_dtype": "float32", "zero_point": True,
    }  # fmt: skip
    return with_metadata(folder, json.dumps({"version": 1, "tensors": {"w": how}, "stored": {}}))


def swollen_note(folder: Path) -> Path:
    """Metadata that deflates to a thousandth."""
    np.savez_compressed(folder / "n.npz", w=WEIGHT, __qtool__=np.full(90_000_000, 32, np.uint8))
    return folder / "n.npz"


def overlapping_members(folder: Path) -> Path:
    """A zip archive whose directory has names for one member over and over (D. Fifield, A better
    zip bomb)."""
    path = folder / "z.npz"
    np.savez_compressed(path, w=np.zeros(10_000_000, np.int8))
    data = path.read_bytes()
    at, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    letters = "abcdefghijklmnopqrstuvwxyz"
    entries = b"".join(data[at:end].replace(b"w.npy", f"{c}.npy".encode()) for c in letters)
    count = len(letters).to_bytes(2, "little") * 2
    tail = data[end : end + 8] + count + len(entries).to_bytes(4, "little") + data[end + 16 :]
    path.write_bytes(data[:at] + entries + tail)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == len(letters)
    return path


@pytest.mark.parametrize("command", [["inspect", "--stats"], ["dequantize", "--force"]])
@pytest.mark.parametrize(
    "make",
    [huge_npy, huge_safetensors, wrapping_safetensors, huge_onnx, wrapping_onnx, huge_metadata,
     swollen_note, overlapping_members],
)  # fmt: skip
def test_what_a_file_says_of_its_size_allocates_nothing(
    make: Callable[[Path], Path], command: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path)
    given = ["--scale", "1"] if command[0] == "dequantize" and make is huge_npy else []
    refused(*command, path, *given)  # imports what is imported late
    tracemalloc.start()
    try:
        refused(*command, path, *given)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def lists(count: int) -> str:
    return '{"a":[' + "[]," * count + "[]]}"


def entries(count: int) -> str:
    said = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return "{" + ",".join(f'"{i}":{said}' for i in range(count)) + "}"


def values(count: int) -> str:
    return '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(count)) + "}}"


DENSE: list[tuple[Callable[[Path], Path], int]] = [
    (lambda folder: with_header(folder, lists(100_000)), 1),
    (lambda folder: with_header(folder, entries(4_000)), 0),
    (lambda folder: with_header(folder, values(20_000)), 0),
    (lambda folder: with_metadata(folder, lists(100_000)), 1),
    (lambda folder: with_note(folder, lists(100_000)), 1),
    (lambda folder: with_properties(folder, lists(100_000)), 0),
    (lambda folder: with_config(folder, lists(100_000)), 0),
    (lambda folder: with_index(folder, lists(100_000)), 1),
    (lambda folder: in_file(ModelProto(ir_version=10, graph=names(4_000)), folder), 1),
    (lambda folder: in_file(ModelProto(ir_version=10, graph=unnamed(4_000)), folder), 0),
    (lambda folder: in_file(ModelProto(ir_version=10, graph=graphs(4_000)), folder), 0),
]


@pytest.mark.parametrize("case", range(len(DENSE)))
def test_memory_is_in_proportion_to_the_file(case: int, tmp_path: Path) -> None:
    make, code = DENSE[case]
    path = make(tmp_path)
    files = path.iterdir() if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    qtool("inspect", path, "--json")  # imports what is imported late
    tracemalloc.start()
    try:
        assert qtool("inspect", path, "--json").code == code
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 120 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, -1, 1 << 63, 1 << 70, 10**300, True, "8", 1.0], ids=str)
@pytest.mark.parametrize("key", ["block_size", "tile"])
def test_an_absurd_block_in_metadata_is_refused(key: str, size: object, tmp_path: Path) -> None:
    made = tmp_path / "q.safetensors"
    options = ["--tile", "8x8"] if key == "tile" else ["--block-size", "8"]
    ok("quantize", saved(tmp_path), "-o", made, "--dtype", "int8", *options)
    said = json.loads(metadata(made)["qtool"])
    said["tensors"]["w"][key] = [size, 8] if key == "tile" else size
    save_file(load_file(made), made, {"qtool": json.dumps(said)})
    for command in ("inspect", "dequantize"):
        assert "metadata 'qtool' of tensor 'w': is not as qtool writes it" in refused(command, made)


# ------------------------------------------------------------------------------------ what is said

HASHED = {"name": "q.safetensors", "container": "safetensors", "bytes": 3, "files": [1]}
LIES: list[dict[str, Any]] = [
    {"source": None}, {"output": 3}, {"output": {}}, {"source": {"name": 1}}, {"output": HASHED},
    {"command": []}, {"tensors": {}}, {"tensors": [{"name": 3}]},
    {"tensors": [{"name": "w", "dtype": {}}]}, {"totals": None}, {"tool": {"name": "qtool"}},
    {"recipe": 5},
    {"output": HASHED | {"files": False}}, {"source": HASHED | {"files": {}}},
    {"report_version": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:30])
def test_verify_says_what_is_wrong_with_a_report(lie: dict[str, Any], tmp_path: Path) -> None:
    source, made = saved(tmp_path), tmp_path / "q.safetensors"
    ok("quantize", source, "-o", made, "--dtype", "int8", "--hash")
    (tmp_path / "q.report.json").write_text(json.dumps(report(made) | lie))
    done = qtool("verify", source, made)
    assert done.code in (1, 3)
    assert done.err.splitlines()[-1].startswith("qtool: ")


SIGNALING = {
    "F16": (np.dtype(np.float16), 0x7C01),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 0x7F81),
    "F32": (np.dtype(np.float32), 0x7F800001),
    "F64": (np.dtype(np.float64), 0x7FF0000000000001),
}


@pytest.mark.parametrize("kind", SIGNALING)
def test_a_signaling_nan_warns_nobody(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dtype, bits = SIGNALING[kind]
    values = np.eye(32, dtype=dtype)
    values.view(f"u{dtype.itemsize}")[3, 4] = bits
    saved(Path(), w=values)
    saved(Path(), "good.safetensors", w=WEIGHT)
    done = ok("inspect", "w.safetensors", "--stats", "--json")
    ok("inspect", "w.safetensors", "--stats", "--plot")
    assert done.json["tensors"][0]["stats"]["nan_count"] == 1
    out = ["-o", "q.safetensors", "--force"]
    for options in (["--dtype", "int8"], ["--dtype", "int4", "--block-size", "16"]):
        ok("quantize", "w.safetensors", *options, *out, "--nonfinite", "allow")
        ok("verify", "w.safetensors", "q.safetensors")
        ok("report", "q.report.json", "-o", "q.html", "--force")
        refused("quantize", "w.safetensors", *options, *out)
    ok("dynamic", "good.safetensors", *out)
    for option in ("--hessian", "--activations", "--importance", "--scale"):
        given = "w=w.safetensors" if option != "--scale" else "w.npy"
        np.save("w.npy", values[3:4, 4].reshape(()))
        wrong = ["--scale-dtype", "bfloat16"] if kind == "BF16" else []
        if option != "--scale" or kind != "F64":
            refused("quantize", "good.safetensors", "--dtype", "int8", *out, option, given, *wrong)
    qtool("dynamic", "w.safetensors", *out)
    qtool("compare", "w.safetensors", "--dtypes", "int8", "--nonfinite", "allow")
    qtool("calibrate", "w.safetensors", "--dtype", "int8", *out)
    ok("quantize", "good.safetensors", "--dtype", "int8", *out)
    saved(Path(), "two.safetensors", w=values, good=values[:2])
    options = ["--dtype", "int8", "--exclude", "w", *out]
    assert qtool("quantize", "two.safetensors", *options, "--strict").code == 3
    assert qtool("verify", "two.safetensors", "q.safetensors").code in (0, 3)
    ok("quantize", "good.safetensors", "--dtype", "int8", *out)
    codes, parameters = load_file("q.safetensors"), metadata(Path("q.safetensors"))
    codes["w.scale"].view(np.uint32)[0] = SIGNALING["F32"][1]
    save_file(codes, "q.safetensors", parameters)
    assert ok("inspect", "q.safetensors", "--stats", "--json").json["tensors"]
    ok("dequantize", "q.safetensors", "-o", "d.safetensors", "--dtype", "float64")
    assert qtool("verify", "good.safetensors", "q.safetensors", "--alone").code == 3


def test_figures_beyond_float64_are_dashes_on_a_page(tmp_path: Path) -> None:
    made = tmp_path / "q.safetensors"
    ok("quantize", saved(tmp_path), "-o", made, "--dtype", "int8")
    said = report(made)
    said["seconds"] = said["source"]["bytes"] = 10**400
    (tmp_path / "q.report.json").write_text(json.dumps(said))
    assert (
        rb"| Time | \- |" in ok("report", tmp_path / "q.report.json", "-o", "-", "--to", "md").out
    )


def test_a_graph_in_a_node_that_has_none_is_refused(tmp_path: Path) -> None:
    inner = GraphProto(name="g", initializer=[initializer("v", WEIGHT)])
    made = readers(1)
    made.node[0].name = "n"
    made.node[0].attribute.append(helper.make_attribute("body", inner))
    path = in_file(ModelProto(ir_version=10, graph=made), tmp_path)
    line = refused("quantize", path, "--dtype", "int4")
    assert line.endswith("m.onnx, node 'n': MatMul has no graph in it; the model is damaged")


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000, "n/" * 5000, "\udcff"], ids=ascii)
@pytest.mark.parametrize("option", ["scale", "hessian", "activations", "importance"])
def test_what_no_file_can_be_called_is_refused(option: str, name: str, tmp_path: Path) -> None:
    source, made = saved(tmp_path), tmp_path / "q.safetensors"
    given = name if option == "scale" else [name]
    with pytest.raises(QtoolError):
        quantize_file(source, made, dtype="int8", **{option: given})
    for wrong in (name, f"{name}.onnx"):
        with pytest.raises(QtoolError):
            quantize_file(wrong, made, dtype="int8")
        with pytest.raises(QtoolError):
            dequantize_file(wrong, made)
        with pytest.raises(QtoolError):
            inspect_file(wrong)


@pytest.mark.parametrize("option", ["--hessian", "--importance"])
def test_a_long_name_may_say_whose_an_array_is(option: str, tmp_path: Path) -> None:
    name = "model." * 1000 + "weight"
    np.save(tmp_path / "h.npy", np.eye(32, dtype=np.float32)[: 16 if "imp" in option else 32])
    ok("quantize", saved(tmp_path, **{name: WEIGHT}), "--dtype", "int8", option,
       f"{name}={tmp_path / 'h.npy'}", "-o", tmp_path / "q.safetensors")  # fmt: skip


def test_a_constant_that_nobody_can_read_is_left_alone(tmp_path: Path) -> None:
    made = readers(1)
    value = initializer("", WEIGHT)
    made.node.insert(0, helper.make_node("Constant", [], [], value=value))
    path = in_file(ModelProto(ir_version=10, graph=made), tmp_path)
    for options in (["--dtype", "int8"], ["--dtype", "int4", "--block-size", "16"]):
        ok("quantize", path, *options, "-o", tmp_path / "q.onnx", "--force")
        stored = onnx.load(tmp_path / "q.onnx").graph.node
        assert [node.attribute[0].t for node in stored if node.op_type == "Constant"] == [value]


def test_attributes_without_a_type_are_copied(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    node.attribute.add(name="odd")
    stored = initializer("w", WEIGHT.reshape(16, 8, 4))
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 9])
    made = ModelProto(ir_version=10, graph=GraphProto(node=[node], initializer=[stored]))
    made.graph.input.append(value)
    made.opset_import.add(version=21)
    ok("dynamic", in_file(made, tmp_path), "--graph", "-o", tmp_path / "q.onnx")
    (product,) = (
        n for n in onnx.load(tmp_path / "q.onnx").graph.node if n.op_type == "ConvInteger"
    )
    assert list(product.attribute) == list(node.attribute)


@pytest.mark.parametrize("output", ["w", "d"])
def test_a_node_does_not_give_what_there_is_already(output: str, tmp_path: Path) -> None:
    made = readers(1)
    for name in (output, "d"):
        made.node.append(helper.make_node("DequantizeLinear", ["codes", "scale"], [name]))
    made.node[0].input[1] = "d"
    made.initializer.extend([initializer("codes", WEIGHT, np.int8), initializer("scale", 1.0)])
    made.output.add(name=output)
    path = in_file(ModelProto(ir_version=10, graph=made), tmp_path)
    line = refused("dequantize", path)
    assert line.endswith(f"m.onnx, tensor {output!r}: is defined twice; names must be unique")


def test_codes_that_nothing_gives_are_not_those_of_another_node(tmp_path: Path) -> None:
    made = readers(1)
    for name in ("codes", "nothing"):
        made.node.append(helper.make_node("DequantizeLinear", [name, "scale"], ["d"]))
    made.node[0].input[1] = "d"
    made.initializer.extend([initializer("codes", WEIGHT, np.int8), initializer("scale", 1.0)])
    path = in_file(ModelProto(ir_version=10, graph=made), tmp_path)
    ok("dequantize", path, "-o", tmp_path / "d.onnx")
    kept = onnx.load(tmp_path / "d.onnx").graph.node
    assert [[*n.input] for n in kept if n.op_type == "DequantizeLinear"] == [["nothing", "scale"]]


@pytest.mark.parametrize("version", [-(2**63), -1, 0])
def test_an_opset_that_there_cannot_be(version: int, tmp_path: Path) -> None:
    made = ModelProto(ir_version=10, graph=readers(1))
    made.graph.node.append(helper.make_node("ReduceMax", ["y0"], ["most"]))
    made.opset_import.add(version=version)
    line = refused("quantize", in_file(made, tmp_path), "--dtype", "int4", "--block-size", "16")
    assert f"opset {version} has no such operator" in line


# ----------------------------------------------------------------------------------- nothing runs


class Malicious:
    """What makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def pickled(name: str, folder: Path) -> Path:
    """A pickle under that name, or where NumPy would look for one."""
    bad = Malicious(folder / "ran")
    path = folder / name
    if name == "objects.npy":
        np.save(path, np.array([bad], object), allow_pickle=True)
    elif name == "objects.npz":
        np.savez(path, w=np.array([bad], object))
    elif name == "member.npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", pickle.dumps(bad))
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(bad))
    return path


@pytest.mark.parametrize(
    "name",
    ["x.npy", "x.npz", "x.safetensors", "x.onnx", "x.bin", "x.json", "x.toml", "member.npz",
     "objects.npy", "objects.npz"],
)  # fmt: skip
def test_nothing_is_unpickled(name: str, tmp_path: Path) -> None:
    path, good = pickled(name, tmp_path), saved(tmp_path)
    quantize = ["quantize", good, "--dtype", "int8", "-o", tmp_path / "o.safetensors"]
    for arguments in (
        ["inspect", path, "--stats"],
        ["quantize", path, "--dtype", "int8", "-o", tmp_path / "o.safetensors"],
        ["dequantize", path, "-o", tmp_path / "o.npy"],
        ["verify", good, path],
        ["verify", good, good, "--against", path],
        ["report", path, "-o", tmp_path / "o.md"],
        [*quantize, "--scale", path],
        [*quantize, "--hessian", path],
        [*quantize, "--importance", path],
        [*quantize, "--recipe", path],
        [*quantize, "--fail-if", "mse > 1", "--baseline", path],
        ["calibrate", path, "-o", tmp_path / "o.npz", "--dtype", "int8"],
        ["recipe", "--from", path],
        ["--config", path, "dtypes"],
    ):
        assert qtool(*arguments).code in (1, 2), arguments
    with pytest.raises(FileNotFoundError):
        (tmp_path / "ran").rmdir()


def test_the_malice_of_these_tests_is_real(tmp_path: Path) -> None:
    np.load(pickled("objects.npy", tmp_path), allow_pickle=True)
    (tmp_path / "ran").rmdir()


RUNS = {
    "eval", "exec", "compile", "__import__", "pickle", "marshal", "shelve", "dill", "cloudpickle",
    "joblib", "runpy", "subprocess", "popen", "system", "literal_eval", "allow_pickle",
}  # fmt: skip


def words(node: ast.AST) -> set[str]:
    """The names that a piece of code has in it, but for re.compile."""
    match node:
        case ast.Name():
            return {node.id}
        case ast.Attribute():
            return set() if ast.unparse(node) == "re.compile" else {node.attr}
        case ast.Import(aliases) | ast.ImportFrom(names=aliases):
            found = {part for alias in aliases for part in alias.name.split(".")}
            return found | set((getattr(node, "module", "") or "").split("."))
        case ast.keyword(arg=str()):
            return {str(node.arg)}
    return set()


def test_no_module_has_what_could_run_what_it_reads() -> None:
    assert package.__file__ is not None
    for path in sorted(Path(package.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not RUNS & words(node), (path, getattr(node, "lineno", 0))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("method", ["absmax", "mse", "optimal"])
def test_a_tensor_without_elements_has_a_global_scale(
    method: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
    made = ok("quantize", tmp_path / "x.npy", "-o", tmp_path / "q.npz", "--preset", "nvfp4",
              "--method", method, "--json")  # fmt: skip
    (record,) = json.loads(made.out)["tensors"]
    assert (record["shape"], record["global_scale"]) == (list(shape), 1.0)


@pytest.mark.parametrize("method", ["absmax", "mse", "percentile:99"])
def test_the_largest_weights_come_back_finite_from_second_order_rounding(
    method: str, tmp_path: Path
) -> None:
    rng, most = np.random.default_rng(0), np.finfo(np.float32).max
    np.save(tmp_path / "w.npy", np.where(rng.random((64, 32)) < 0.5, most, -most))
    np.save(tmp_path / "a.npy", rng.standard_normal((1, 32)).astype(np.float32))
    weights, inputs = tmp_path / "w.npy", tmp_path / "a.npy"
    made = ok("quantize", weights, "--dtype", "int8", "--method", method, "--json",
              "-o", tmp_path / "q.npz", "--activations", f"w={inputs}")  # fmt: skip
    (record,) = json.loads(made.out)["tensors"]
    assert 0 <= record["max_abs_error"] <= most
    ok("dequantize", tmp_path / "q.npz", "-o", tmp_path / "r.npz")
    with np.load(tmp_path / "r.npz") as restored:
        assert np.isfinite(restored["w"]).all()


def test_a_signaling_nan_of_rank_0_has_a_percentile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array(0x7FA00000, np.uint32).view(np.float32))
    ok("quantize", tmp_path / "x.npy", "--dtype", "int8", "--method", "percentile:99",
       "--nonfinite", "allow", "-o", tmp_path / "q.safetensors")  # fmt: skip


@pytest.mark.parametrize("decibels", ["1e20", "1e300"])
def test_more_decibels_than_floats_have_are_out_of_reach(decibels: str, tmp_path: Path) -> None:
    said = refused("quantize", saved(tmp_path), "-o", tmp_path / "q.safetensors",
                   "--target-sqnr", decibels)  # fmt: skip
    assert "dB cannot be reached with these candidates; the most is" in said


def test_underflow_is_no_error_wherever_callers_want_it_to_be_one() -> None:
    x = np.array([1e-40, -1e-41], np.float32)
    with np.errstate(all="raise"):
        codes, scale, zero_point = package.dynamic_quantize_linear(x)
    assert (codes.tolist(), scale > 0, zero_point) == ([255, 0], True, 23)

"""qtool quantize --dry-run: the plan from headers alone, and that it is what comes out."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import save, tensors
from command import ok, process, refused, report, stored, strict
from jsonschema import Draft202012Validator
from onnx import TensorProto, helper, numpy_helper
from referencing import Registry, Resource
from safetensors.numpy import save_file

RNG = np.random.default_rng(6)
WEIGHT = RNG.standard_normal((48, 96)).astype(np.float32)
SCHEMAS = {
    name: json.loads(resources.files("qtool").joinpath(name).read_text("utf-8"))
    for name in ("plan.schema.json", "report.schema.json")
}
REGISTRY: Any = Registry().with_resources(
    [(name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items()]
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with weights in every container in it."""
    monkeypatch.chdir(tmp_path)
    held = {"b.weight": WEIGHT, "a.weight": WEIGHT[:8, :33].copy(), "a.bias": WEIGHT[0, :5].copy()}
    save_file(held, "m.safetensors", metadata={"format": "pt"})
    np.savez("m.npz", **held)
    np.save("m.npy", WEIGHT)
    save(Path("folder"), [tensors([0, 1]), tensors([2])])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("MatMul", ["y", "v"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 48])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 8])],
        [numpy_helper.from_array(w, n) for n, w in (("w", WEIGHT), ("v", WEIGHT.T[:, :8].copy()))],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, "m.onnx")


def plan(*args: str) -> Any:
    """The plan of a command line, which the schema allows and which leaves no file behind."""
    before = sorted(Path().rglob("*"))
    found = ok(*args, "--dry-run", "--json").json
    assert sorted(Path().rglob("*")) == before
    validator = Draft202012Validator(SCHEMAS["plan.schema.json"], registry=REGISTRY)
    validator.validate(found)
    return found


WAYS = [
    ("m.safetensors", "q.safetensors", "--dtype int8"),
    ("m.safetensors", "q.safetensors", "--dtype int4 --block-size 32 --exclude a*"),
    ("m.safetensors", "q.npz", "--dtype uint4 --block-size 32"),
    ("m.safetensors", "q.npy", "--dtype float8e4m3fn --include b*"),
    ("m.safetensors", "q.safetensors", "--preset w4a16 --block-size 32 --layout mlx"),
    ("m.safetensors", "q.safetensors", "--preset nvfp4 --layout compressed-tensors"),
    ("m.npz", "q.npz", "--dtype int8 --asymmetric"),
    ("m.npz", "q.safetensors", "--preset mxfp4"),
    ("m.npy", "q.safetensors", "--dtype int2"),
    ("m.npy", "q.npy", "--dtype int4"),
    ("m.onnx", "q.onnx", "--dtype int4 --block-size 32"),
    ("m.onnx", "q.onnx", "--dtype int8 --external-data"),
    ("m.onnx", "q.onnx", "--dtype int4 --block-size 16 --layout matmul-nbits"),
    ("m.onnx", "q.onnx", "--dtype int4 --block-size 16 --layout matmul-nbits --external-data"),
    ("folder", "q", "--dtype int4 --block-size 32"),
    ("folder", "q", "--preset nvfp4 --layout compressed-tensors"),
]


@pytest.mark.parametrize(("src", "dst", "options"), WAYS, ids=[f"{s} {o}" for s, _, o in WAYS])
def test_what_is_planned_is_what_comes_out(src: str, dst: str, options: str) -> None:
    planned = plan("quantize", src, "-o", dst, *options.split())
    done = ok("quantize", src, "-o", dst, *options.split(), "--json").json
    assert planned["output"]["bytes"] == done["output"]["bytes"]
    files = sorted(Path(dst).glob("*.safetensors")) if Path(dst).is_dir() else [*Path().glob("q.*")]
    sizes = [f.stat().st_size for f in files if not f.name.endswith(".report.json")]
    assert planned["totals"]["file_bytes_after"] == sum(sizes)
    for row, made in zip(planned["tensors"], done["tensors"], strict=True):
        assert row.items() <= made.items()
    assert [s["name"] for s in planned["skipped"]] == [s["name"] for s in done["skipped"]]
    assert planned["totals"].items() <= done["totals"].items()
    same = ("tool", "command", "source", "settings", "warnings", "gates", "strict")
    assert [planned[key] for key in same] == [done[key] for key in same]


@pytest.mark.parametrize("options", [[], ["--external-data"]])
@pytest.mark.parametrize("graph", [[], ["--graph"]])
def test_dynamic_has_plans_too(options: list[str], graph: list[str]) -> None:
    planned = plan("dynamic", "m.onnx", "-o", "q.onnx", *options, *graph)
    done = ok("dynamic", "m.onnx", "-o", "q.onnx", *options, *graph, "--json").json
    assert planned["command"] == "dynamic"
    assert planned["output"]["bytes"] == done["output"]["bytes"]


def test_sizes_are_those_of_the_arithmetic() -> None:
    planned = plan("quantize", "m.safetensors", "--dtype", "int4", "--block-size", "32")
    assert [(r["name"], r["num_scales"], r["bytes_before"], r["bytes_after"])
            for r in planned["tensors"]] == [
        ("a.weight", 16, 8 * 33 * 4, 8 * 33 // 2 + 16 * 4),
        ("b.weight", 48 * 3, 48 * 96 * 4, 48 * 96 // 2 + 48 * 3 * 4),
    ]  # fmt: skip
    assert planned["skipped"] == [
        {"name": "a.bias", "shape": [5], "dtype": "float32", "bytes": 20, "reason": "rank below 2"}
    ]
    assert planned["tensors"][1]["bits_per_weight"] == 5
    elements = 8 * 33 + 48 * 96
    assert planned["totals"]["bits_per_weight"] == 8 * (132 + 64 + 2304 + 576) / elements
    assert planned["output"]["name"] == "m.int4.safetensors"


def test_values_are_not_read(tmp_path: Path) -> None:
    """The data is a hole of 64 GB, of NaN would it be read as such."""
    entries = {
        f"layers.{n}.weight": {
            "dtype": "BF16",
            "shape": [1 << 16, 1 << 13],
            "data_offsets": [n << 30, (n + 1) << 30],
        }
        for n in range(64)
    }
    header = json.dumps(entries).encode()
    with Path("large.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (64 << 30))
    ok("quantize", "large.safetensors", "--dtype", "int4", "--block-size", "32", "--dry-run")
    started = time.process_time()
    planned = plan("quantize", "large.safetensors", "--dtype", "int4", "--block-size", "32")
    assert time.process_time() - started < 2  # no reading of 64 GB
    assert planned["totals"]["bytes_after"] == 64 * (1 << 29) * 9 // 16
    assert planned["totals"]["bits_per_weight"] == 4.5


def test_nan_is_no_matter_of_the_plan() -> None:
    save_file({"w": np.full((32, 32), np.nan, np.float32)}, "n.safetensors")
    assert plan("quantize", "n.safetensors", "--dtype", "int8")["totals"]["tensors"] == 1
    assert "nan at [0, 0]" in refused("quantize", "n.safetensors", "--dtype", "int8")


def test_a_target_that_is_there_is_a_warning() -> None:
    Path("m.int8.safetensors").write_bytes(b"kept")
    planned = plan("quantize", "m.safetensors", "--dtype", "int8")
    assert planned["warnings"] == [
        "m.int8.safetensors: exists already; choose another name or --force"
    ]
    assert plan("quantize", "m.safetensors", "--dtype", "int8", "--force")["warnings"] == []
    assert Path("m.int8.safetensors").read_bytes() == b"kept"
    Path("folder-int8").mkdir()
    [warning] = plan("quantize", "folder", "--dtype", "int8")["warnings"]
    assert warning == "folder-int8: exists already; choose another name or --force"


def test_a_report_that_is_asked_for_is_written() -> None:
    ok("quantize", "m.safetensors", "--dtype", "int8", "--dry-run", "--report", "plan.json")
    written = strict(Path("plan.json").read_text())
    assert written["dry_run"] is True
    assert not Path("m.int8.safetensors").exists()


def test_mixed_precision_is_planned_as_it_is_chosen() -> None:
    options = ["--target-bits", "6", "--candidates", "int4:32,int8"]
    planned = plan("quantize", "m.safetensors", "-o", "q.safetensors", *options)
    ok("quantize", "m.safetensors", "-o", "q.safetensors", *options)
    assert [r["dtype"] for r in planned["tensors"]] == [
        r["dtype"] for r in report(Path("q.safetensors"))["tensors"]
    ]


def test_what_the_table_says() -> None:
    done = process("quantize", "m.safetensors", "--dtype", "int4", "--block-size", "32",
                   "--dry-run", "--include", "*weight", "--exclude", "none*")  # fmt: skip
    assert done.returncode == 0
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == [
        "tensor",
        "from",
        "to",
        "scales",
        "count",
        "before",
        "after",
        "bits",
    ]
    assert lines[1].split() == [
        "a.weight", "float32", "int4", "/32", "float32", "1", "1.1", "kB", "196", "B", "5.94",
    ]  # fmt: skip
    assert lines[4] == "left alone: 1 tensor: not included (a.bias)"
    output = plan("quantize", "m.safetensors", "--dtype", "int4", "--block-size", "32",
                  "--include", "*weight", "--exclude", "none*")["output"]  # fmt: skip
    before, after = Path("m.safetensors").stat().st_size, output["bytes"]
    sizes = f"{before / 1000:.1f} kB -> {after / 1000:.1f} kB"
    assert lines[5] == (
        f"m.int4.safetensors: {sizes}, {before / after:.2f} times smaller, not written"
    )
    assert done.stderr.decode() == "warning: pattern 'none*' matches no tensor\n"


def test_layers_of_one_kind_are_one_row() -> None:
    done = process("quantize", "folder", "--dtype", "int8", "--dry-run")
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    # 3 weights of (16, 64) in bfloat16, with 16 scales each
    assert lines[1] == ["model.layers.*.mlp.down_proj.weight", "bfloat16", "int8", "axis", "0",
                        "bfloat16", "3", "6.1", "kB", "3.2", "kB", "8.25"]  # fmt: skip
    assert lines[2][:2] == ["all", "3"]


def test_what_is_left_alone_is_named() -> None:
    done = process("quantize", "folder", "--dtype", "int8", "--dry-run", "--exclude", "*.1.mlp*",
                   "--include", "*")  # fmt: skip
    told = [line for line in done.stdout.decode().splitlines() if line.startswith("left alone")]
    assert told == [
        "left alone: 3 tensors: rank below 2 (model.layers.*.norm.weight)",
        "left alone: 1 tensor: excluded (model.layers.1.mlp.down_proj.weight)",
    ]


def test_quiet_says_warnings_alone() -> None:
    done = ok("quantize", "m.safetensors", "--dtype", "int8", "--dry-run", "-q", "--exclude", "x")
    assert (done.out, done.err) == (b"", "warning: pattern 'x' matches no tensor\n")


def test_the_plan_goes_to_standard_output_in_the_place_of_the_file() -> None:
    done = ok("quantize", "-", "-o", "-", "--dtype", "int8", "--dry-run", "--json",
              stdin=Path("m.npy").read_bytes())  # fmt: skip
    assert done.json["output"]["name"] == "-"
    assert done.json["tensors"][0]["name"] == "array"


def test_what_would_be_refused_is_refused() -> None:
    assert "--dtype" in refused("quantize", "m.safetensors", "--dry-run", code=2)
    line = refused("quantize", "m.safetensors", "--dtype", "int8", "--dry-run", "--include", "q")
    assert "nothing to quantize" in line
    ok("quantize", "m.safetensors", "--dtype", "int8")
    line = refused("quantize", "m.int8.safetensors", "--dtype", "int4", "--dry-run")
    assert "is quantized already" in line


def test_slices_say_what_is_theirs() -> None:
    whole = plan("quantize", "folder", "-o", "q", "--dtype", "int8")
    parts = [
        plan("quantize", "folder", "-o", "q", "--dtype", "int8", "--shards", f"{k}/2")["output"]
        for k in (1, 2)
    ]
    assert sum(part["bytes"] for part in parts) == whole["output"]["bytes"]


def test_the_same_plan_again() -> None:
    """But for the time that it took."""
    first, second = (plan("quantize", "m.onnx", "--dtype", "int8") for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert stored(Path("m.safetensors"))["b.weight"].shape == (48, 96)

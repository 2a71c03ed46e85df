"""Weights in every place that ONNX has for them: quantized, run, dequantized, inspected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, helper, numpy_helper
from onnx_constructs import CONSTRUCTS, Construct, in_type
from onnx_jobs import bodies, reference, replaced, reseed, same, sound, stored, unsigned, weights
from onnx_models import check, run, save

import qtool
from qtool.jobs.inspect import inspect_file

OPTIONS: dict[str, dict[str, Any]] = {
    "per-channel": {"dtype": "int8"},
    "blocks": {"dtype": "int4", "block_size": 8},
    "zero-points": {"dtype": "uint8", "block_size": 8},
    "axis": {"dtype": "int8", "axis": 0},
}


@pytest.fixture(params=CONSTRUCTS, ids=lambda make: make.__name__)
def construct(request: pytest.FixtureRequest) -> Construct:
    reseed()
    built: Construct = request.param()
    described(built.made)
    return built


def described(made: ModelProto) -> None:
    """Give the model words of its own wherever it has a place for them."""
    helper.set_model_props(made, {"author": "\u00fc", "version": "3"})
    made.producer_name, made.doc_string = "tests", "a model"
    for body in bodies(made):
        body.doc_string = "a body"
        body.metadata_props.add(key="of", value="the body")
        for number, node in enumerate(body.node):
            node.doc_string = f"node {number}"
            node.metadata_props.add(key="number", value=str(number))


def written(construct: Construct, folder: Path, **options: Any) -> tuple[ModelProto, Any]:
    """The quantized model, checked in full, and the report."""
    source = save(construct.made, folder / "m.onnx")
    report = qtool.quantize_file(source, folder / "q.onnx", force=True, **options)
    return sound(folder / "q.onnx"), report


def check_runs(
    construct: Construct, result: ModelProto | Path, values: Any, wide: Any = None
) -> None:
    """Equal outputs of the result and of the original with other weights.

    wide: what weights under restored names are, without a node that gives them.
    """
    expected = replaced(construct.made, values)
    for name in wide or ():
        (node,) = (n for n in expected.graph.node if name in n.output)
        expected.graph.node.remove(node)
        expected.graph.initializer.append(numpy_helper.from_array(wide[name], name))
    for feeds in construct.feeds:
        same(run(result, feeds), run(expected, feeds))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_result_computes_with_the_dequantized_weights(
    construct: Construct, options: dict[str, Any], tmp_path: Path
) -> None:
    result, report = written(construct, tmp_path, **options)
    blocked = "block_size" in options
    found = {row["name"]: row["axis"] for row in report["tensors"]}
    axes = {name: own[1] if blocked else own[0] for name, own in construct.axes.items()}
    assert found == (dict.fromkeys(axes, options["axis"]) if "axis" in options else axes)
    values = weights(result)
    assert len(values) == len(axes)
    check_runs(construct, result, values)
    # as sqrt(sum e^2 / sum x^2): the codes are those of the weights
    assert max(row["relative_error"] for row in report["tensors"]) < 0.15


# Conv, LSTM and Einsum take no bfloat16.
NO_BFLOAT16 = ("operators", "recurrent", "einsum")


@pytest.mark.parametrize("kind", ["per-channel", "blocks"])
@pytest.mark.parametrize(
    ("dtype", "make"),
    [(d, c) for d in ("float16", "bfloat16") for c in CONSTRUCTS
     if d == "float16" or c.__name__ not in NO_BFLOAT16],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_16_bit_weights_have_scales_of_their_own_type(
    dtype: str, make: Any, kind: str, tmp_path: Path
) -> None:
    """onnxruntime has no DequantizeLinear of bfloat16 for the CPU: the reference runs it."""
    reseed()
    construct = in_type(make(), dtype)
    result, report = written(construct, tmp_path, **OPTIONS[kind])
    assert {row["scale_dtype"] for row in report["tensors"]} <= {dtype, "float16"}
    left_alone = construct.axes.keys() - {row["name"] for row in report["tensors"]}
    assert left_alone <= {"right"}  # would not get smaller as int8
    execute = run if dtype == "float16" else reference
    expected = replaced(construct.made, weights(result))
    for feeds in construct.feeds:
        same(execute(result, feeds), execute(expected, feeds))


@pytest.mark.parametrize(("dtype", "opset"), [("int8", 13), ("int4", 21), ("uint2", 25)])
@pytest.mark.parametrize("make", CONSTRUCTS, ids=lambda make: make.__name__)
def test_every_place_is_raised_to_the_opset_that_the_type_needs(
    make: Any, dtype: str, opset: int, tmp_path: Path
) -> None:
    reseed()
    construct: Construct = make()
    made, before = construct.made, 18 if make.__name__ == "operators" else 13  # ReduceMean's axes
    for entry in (*made.opset_import, *(e for f in made.functions for e in f.opset_import)):
        entry.version = before if entry.domain == "" else entry.version
    made.ir_version = 8
    result, _ = written(construct, tmp_path, dtype=dtype, axis=-1)
    imports = [entry for f in result.functions for entry in f.opset_import]
    versions = {e.version for e in (*result.opset_import, *imports) if e.domain == ""}
    first = 19 if make.__name__ == "laid_out_anew" else before  # for scales in float16
    assert versions == {max(opset, first)}
    assert result.ir_version == {13: 8, 18: 8, 19: 9, 21: 10, 25: 13}[max(opset, first)]
    check_runs(construct, result, weights(result))


def test_patterns_match_labels(tmp_path: Path) -> None:
    reseed()
    construct = CONSTRUCTS[0]()
    labels = {"/a/If.else_branch/w", "/a/If.then_branch/w"}
    for options, chosen in (
        ({"exclude": ["*then*"]}, {"/a/If.else_branch/w"}),
        ({"include": ["re:then_branch/w$"]}, {"/a/If.then_branch/w"}),
        ({"include": ["*/w"]}, labels),
    ):
        result, report = written(construct, tmp_path, dtype="int8", **options)
        assert {row["name"] for row in report["tensors"]} == chosen
        assert labels <= {row["name"] for row in (*report["tensors"], *report["skipped"])}
        check_runs(construct, result, weights(result))


def test_nothing_else_changes(construct: Construct, tmp_path: Path) -> None:
    result, _ = written(construct, tmp_path, dtype="int4", block_size=8)
    touched = weights(result)
    assert [len(b) for b in rest(result, touched)] == [
        len(b) for b in rest(construct.made, touched)
    ]
    assert rest(result, touched) == rest(construct.made, touched)
    fixed = set(construct.fixed)
    inputs = [v for v in construct.made.graph.input if v.name not in fixed]
    assert (list(result.graph.input), list(result.graph.output)) == (
        inputs, list(construct.made.graph.output))  # fmt: skip
    unsigned(result)
    for field in ("metadata_props", "producer_name", "doc_string", "opset_import", "ir_version"):
        assert getattr(result, field) == getattr(construct.made, field)


def rest(made: ModelProto, touched: Any) -> list[list[str]]:
    """What the bodies hold besides weights, and what is made of them, in their order."""
    found = []
    for number, body in enumerate(bodies(made)):
        names = {n for key in touched for i, n in [(0, key) if isinstance(key, str) else key]
                 if i == number}  # fmt: skip
        added = {name for node in body.node if node.op_type == "DequantizeLinear"
                 for name in (*node.input, *node.output)}  # fmt: skip
        held = [shallow(n) for n in body.node if not names.union(added).intersection(n.output)]
        tensors = body.initializer if isinstance(body, GraphProto) else []
        held += [str(t) for t in tensors if t.name not in names | added]
        found.append([*held, str(list(body.metadata_props)), body.doc_string])
    return found


def shallow(node: onnx.NodeProto) -> str:
    """A node without the graphs in it."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        attribute.ClearField("g")
    return str(copy)


def operators(made: ModelProto) -> list[Counter[str]]:
    return [Counter(node.op_type for node in body.node) for body in bodies(made)]


@pytest.mark.parametrize("external", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dequantize_reads_it_back(
    construct: Construct, options: dict[str, Any], external: bool, tmp_path: Path
) -> None:
    result, report = written(construct, tmp_path, **options)
    values = weights(result)
    done = qtool.dequantize_file(
        tmp_path / "q.onnx", tmp_path / "back.onnx", external_data=external
    )
    names = [construct.restored.get(row["name"], row["name"]) for row in report["tensors"]]
    assert {row["name"] for row in done["tensors"]} == set(names)
    back = sound(tmp_path / "back.onnx")
    assert "DequantizeLinear" not in sum(operators(back), Counter())
    held = [stored(body) for body in bodies(onnx.load(tmp_path / "back.onnx"))]
    wide = {new: numpy_helper.to_array(held[0][new]) for new in construct.restored.values()}
    check_runs(construct, tmp_path / "back.onnx", values, wide)
    for key, value in values.items():
        number, name = (0, key) if isinstance(key, str) else key
        if name in construct.restored:  # not rounded to float16 in between
            (restored,) = wide.values()
            same([restored.astype(np.float16)], [value])
        else:
            same([numpy_helper.to_array(held[number][name])], [value])


def test_external_data_serves_every_place(construct: Construct, tmp_path: Path) -> None:
    """Of tensors of 1 KiB and more; see the writer's own tests for the places in the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qtool.formats.onnx.writer._SMALLEST", 64)
        inside, _ = written(construct, tmp_path, dtype="int8")
        result, _ = written(construct, tmp_path, dtype="int8", external_data=True)
        listing = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        written(construct, tmp_path, dtype="int8", external_data=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == listing.keys()
    (data,) = tmp_path.glob("q.*.data")
    assert data.stat().st_size == listing[data.name]
    places = [{e.key: e.value for e in t.external_data} for body in bodies(result)
              for t in stored(body).values() if t.external_data]  # fmt: skip
    assert len(places) >= len(construct.axes) - 1  # one of them is small
    assert {place["location"] for place in places} == {data.name}
    assert all(int(place["offset"]) % 4096 == 0 for place in places)
    check_runs(construct, tmp_path / "q.onnx", weights(inside))
    loaded = onnx.load(tmp_path / "q.onnx")
    tensors = [t for body in bodies(loaded) for t in stored(body).values()]
    assert not any(tensor.data_location for tensor in tensors)
    assert weights(loaded).keys() == weights(inside).keys()


def test_commands_agree_on_the_names(construct: Construct, tmp_path: Path) -> None:
    _, report = written(construct, tmp_path, dtype="int8")
    before = inspect(tmp_path / "m.onnx")
    assert {r["name"] for r in report["tensors"]} <= before.keys()
    assert {r["name"] for r in (*report["tensors"], *report["skipped"])} == before.keys()
    after = inspect(tmp_path / "q.onnx")
    codes = [row for row in after.values() if row["dtype"] == "int8"]
    assert len(codes) == len(construct.axes)
    assert {row["quantization"]["granularity"] for row in codes} == {"per_axis"}
    dynamic = qtool.dynamic_file(tmp_path / "m.onnx", tmp_path / "d.onnx")
    rows = {r["name"]: r for r in (*dynamic["tensors"], *dynamic["skipped"])}
    assert rows.keys() == before.keys()
    assert construct.axes.keys() <= {r["name"] for r in dynamic["tensors"]}
    check_runs(construct, sound(tmp_path / "d.onnx"), weights(check(tmp_path / "d.onnx")))


def inspect(path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in inspect_file(path)["tensors"]}

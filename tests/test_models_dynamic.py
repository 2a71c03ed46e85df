"""`qtool dynamic --graph` on published models, beside onnxruntime's quantize_dynamic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import Array, ok
from fetch import fetch
from integer_oracle import by_onnxruntime, codes_of, relative_error, same
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx_models import check, run
from test_models import ONNX, name_of

from qtool.formats.onnx.graph import all_nodes

pytestmark = pytest.mark.network

MODELS = {key: feeds for key, feeds in ONNX.items() if "styletransfer" not in key[0]}
# Those in which quantize_dynamic finds the same weights; in the others it looks for them neither
# in Constant nodes nor in branches, or writes a model that onnxruntime refuses.
SHARED = [
    "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx", "silero_vad_16k_op15.onnx",
    "silero_vad_16k_sequence.onnx", "silero_vad_half.onnx",
]  # fmt: skip
KINDS = [(dtype, channel) for dtype in ("int8", "uint8") for channel in (True, False)]
IDS = [f"{dtype}-{'channel' if channel else 'tensor'}" for dtype, channel in KINDS]
INTEGER = {"MatMul": "MatMulInteger", "Gemm": "MatMulInteger", "Conv": "ConvInteger"}
# One scale per tensor is too coarse for some of the networks, whoever chooses it.
ERROR = {"PP-OCRv6_det_small.onnx": 0.3, "PP-OCRv6_rec_small.onnx": 0.15}


@pytest.fixture(scope="module", params=MODELS, ids=name_of)
def published(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Array]]:
    return fetch(*request.param), MODELS[request.param]


def convert(source: Path, folder: Path, dtype: str, *, channel: bool) -> Path:
    options = ["--dtype", dtype, *([] if channel else ["--per-tensor"])]
    ok("dynamic", source, "--graph", "-o", folder / "out.onnx", *options, "-q")
    return folder / "out.onnx"


def products(made: ModelProto) -> list[tuple[NodeProto, TensorProto]]:
    """Every MatMul, Gemm and Conv with the stored float weight that it reads, in branches too."""
    return list(products_of(made.graph, {}))


def products_of(
    graph: GraphProto, outer: dict[str, TensorProto]
) -> Iterator[tuple[NodeProto, TensorProto]]:
    stored = outer | {t.name: t for t in graph.initializer}
    stored |= {node.output[0]: node.attribute[0].t for node in graph.node
               if node.op_type == "Constant"}  # fmt: skip
    for node in graph.node:
        weight = stored.get(node.input[1]) if node.op_type in INTEGER else None
        if weight is not None and weight.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            yield node, weight
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from products_of(attribute.g, stored)


def matrix(node: NodeProto, weight: TensorProto) -> Array:
    """The weight as the product takes it, in float32."""
    values = numpy_helper.to_array(weight).astype(np.float32)
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return np.ascontiguousarray(values.T) if transposed else values


def contents(made: ModelProto, dtype: Any) -> Counter[bytes]:
    """The bytes of every initializer of a type, in branches too."""
    graphs = [made.graph, *(a.g for node in all_nodes(made.graph.node) for a in node.attribute
                            if a.type == AttributeProto.GRAPH)]  # fmt: skip
    arrays = [numpy_helper.to_array(t) for graph in graphs for t in graph.initializer]
    return Counter(a.tobytes() for a in arrays if a.dtype == dtype)


def counts(made: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in all_nodes(made.graph.node))


@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_every_product_with_a_stored_weight_is_one_of_integers(
    published: tuple[Path, dict[str, Array]], dtype: str, channel: bool, tmp_path: Path
) -> None:
    source, feeds = published
    result = check(convert(source, tmp_path, dtype, channel=channel))
    made = onnx.load(source)
    before, after = counts(made), counts(result)
    found = products(made)
    expected = Counter(INTEGER[node.op_type] for node, _ in found)
    assert {op: after[op] for op in expected} == expected
    assert after["DynamicQuantizeLinear"] <= len(found)
    for op in INTEGER:
        assert after[op] == before[op] - sum(node.op_type == op for node, _ in found)
    outputs = run(tmp_path / "out.onnx", feeds)
    if channel:
        assert relative_error(outputs, run(source, feeds)) < ERROR.get(source.name, 0.03)


def test_codes_and_scales_follow_from_the_weights_and_give_them_back(
    published: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    source, feeds = published
    result = check(convert(source, tmp_path, "int8", channel=True))
    ok("dequantize", tmp_path / "out.onnx", "-o", tmp_path / "back.onnx", "-q")
    back = check(tmp_path / "back.onnx")
    made = onnx.load(source)
    codes: Counter[bytes] = Counter()
    values: Counter[bytes] = Counter()
    scales: Counter[bytes] = Counter()
    for node, weight in {id(weight): (node, weight) for node, weight in products(made)}.values():
        w = matrix(node, weight)
        q, scale, _ = codes_of(w, "int8", 0 if node.op_type == "Conv" else w.ndim - 1)
        w_hat = q.astype(np.float32) * scale
        codes[q.astype(np.int8).tobytes()] += 1
        scales[scale.tobytes()] += 1
        values[w_hat.tobytes()] += 1
        stored = w_hat if w_hat.shape == tuple(weight.dims) else w_hat.T
        dtype = numpy_helper.to_array(weight).dtype
        weight.CopyFrom(numpy_helper.from_array(stored.astype(dtype), weight.name))
    assert contents(result, np.int8) == codes
    assert scales <= contents(result, np.float32)
    assert values <= contents(back, np.float32)
    assert not {"MatMulInteger", "ConvInteger"} & counts(back).keys()
    expected = run(made, feeds)
    limit = 1e-5 if expected[0].dtype == np.float32 else 1e-3
    assert relative_error(run(tmp_path / "back.onnx", feeds), expected) < limit


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("dtype", "channel"), KINDS, ids=IDS)
def test_quantize_dynamic_gives_the_same_per_tensor_and_a_worse_model_per_channel(
    name: str, dtype: str, channel: bool, tmp_path: Path
) -> None:
    [key] = [key for key in MODELS if key[1].endswith(name)]
    source, feeds = fetch(*key), MODELS[key]
    ours = convert(source, tmp_path, dtype, channel=channel)
    theirs = by_onnxruntime(source, tmp_path / "r.onnx", dtype, per_channel=channel)
    operators = [counts(onnx.load(path)) for path in (ours, theirs)]
    for op in ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "MatMul", "Conv"):
        assert operators[0][op] == operators[1][op]
    assert ours.stat().st_size < (1.02 if channel else 1.0) * theirs.stat().st_size
    outputs, peer_outputs = run(ours, feeds), run(theirs, feeds)
    if channel:  # quantize_dynamic gives Conv one scale per tensor even so
        expected = run(source, feeds)
        peer_error = relative_error(peer_outputs, expected)
        assert relative_error(outputs, expected) < 0.6 * peer_error
    else:
        for output, peer in zip(outputs, peer_outputs, strict=True):
            same(output, peer)

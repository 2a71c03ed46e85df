"""An ONNX model: its message, and what its graphs, functions and nodes say of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import onnx_constructs as constructs
from onnx import ModelProto, helper, numpy_helper
from onnx_models import initializer, model

from fuzz.files import inspected, read_whole
from fuzz.mutate import of_bytes, of_message
from qtool import formats
from qtool.formats.onnx import OnnxSource, wire

JUSTIFIED = 400
_MADE = (
    "same_name_in_both_branches", "constants_in_branches", "branches_give_weights", "loop", "scan",
    "shared", "function", "laid_out_anew", "operators", "recurrent", "einsum",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    for name in _MADE:
        yield getattr(constructs, name)().made.SerializeToString()
    yield _old().SerializeToString()
    yield _quantized("DequantizeLinear", ["w", "scale", "zero"], axis=0).SerializeToString()
    yield _quantized("DequantizeLinear", ["w", "scales"], axis=1, block_size=4).SerializeToString()
    nbits = {"K": 32, "N": 8, "bits": 4, "block_size": 16, "domain": "com.microsoft"}
    made = _quantized("MatMulNBits", ["x", "packed", "two"], **nbits)
    yield made.SerializeToString()


def _old() -> ModelProto:
    """A model whose conversion to a later opset asks for types and ranks, behind a function."""
    imports = [helper.make_opsetid("", 10), helper.make_opsetid("own", 1)]
    inner = [helper.make_node("Identity", ["a"], ["b"])]
    outer = [helper.make_node("inner", ["a"], ["b"], domain="own")]
    nodes = [
        helper.make_node("outer", ["x"], ["f"], domain="own"),
        helper.make_node("MatMul", ["f", "w"], ["m"]),
        helper.make_node("Clip", ["m"], ["c"], min=0.0, max=1.0),
        helper.make_node("Softmax", ["c"], ["s"], axis=1),
        helper.make_node("Dropout", ["s"], ["y", "mask"], ratio=0.5),
    ]
    made = model(
        nodes, [initializer("w", np.ones((32, 16)))], inputs={"x": (2, 32)}, opset=10,
        imports=imports[1:], ir_version=8,
    )  # fmt: skip
    made.functions.append(helper.make_function("own", "outer", ["a"], ["b"], outer, imports))
    made.functions.append(helper.make_function("own", "inner", ["a"], ["b"], inner, imports))
    return made


def _quantized(operator: str, inputs: list[str], **attributes: object) -> ModelProto:
    codes = np.arange(64, dtype=np.int8).reshape(8, 8)
    stored = [
        initializer("w", codes, np.int8), initializer("scale", np.ones(8)),
        initializer("zero", np.zeros(8), np.int8), initializer("scales", np.ones((8, 2))),
        initializer("packed", np.ones((8, 2, 8)), np.uint8), initializer("two", np.ones(16)),
    ]  # fmt: skip
    nodes = [helper.make_node(operator, inputs, ["d"], **attributes)]
    nodes.append(helper.make_node("MatMul", ["x", "d"], ["y"]))
    imports = [helper.make_opsetid("com.microsoft", 1)]
    return model(nodes, stored, inputs={"x": (2, 8)}, imports=imports)


def mutate(data: bytes, rng: Random) -> bytes:
    return of_bytes(data, rng) if rng.random() < 0.1 else of_message(ModelProto, data, rng)


def run(data: bytes, folder: Path) -> None:
    path = folder / "a.onnx"
    path.write_bytes(data)
    _check_wire(data)
    read = read_whole(path)
    with closing(cast(OnnxSource, formats.open(path))) as source:
        for name, tensor in source.tensors.items():
            if name in read and tensor.data_location == 0:
                expected = numpy_helper.to_array(tensor)
                assert read[name].tobytes() == expected.astype(read[name].dtype).tobytes()
    inspected(path)


def _check_wire(data: bytes) -> None:
    """What is left out of a message and put back makes the same message."""
    with suppress(ValueError):
        parts = wire.pieces(wire._skeleton(BytesIO(data), len(data)))
        assert wire.nbytes(parts) >= 0

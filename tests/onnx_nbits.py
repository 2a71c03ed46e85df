"""Models of MatMulNBits and GatherBlockQuantized, read element by element without qtool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper
from onnx_jobs import attributes

Array = NDArray[Any]


def stored(made: ModelProto, folder: Path = Path()) -> dict[str, Array]:
    """The initializers by name."""
    loaded = ModelProto()
    loaded.CopyFrom(made)
    onnx.load_external_data_for_model(loaded, str(folder))
    return {t.name: numpy_helper.to_array(t) for t in loaded.graph.initializer}


def fields(row: Array, bits: int) -> list[int]:
    """The numbers of that many bits in a row of bytes, the first one in the lowest bits."""
    stream = int.from_bytes(row.tobytes(), "little")
    return [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(row.size * 8 // bits)]


def rows(packed: Array, bits: int) -> Array:
    """fields() of every row of a uint8 tensor, whose axes from the second on are one row."""
    return np.array([fields(row, bits) for row in packed.reshape(len(packed), -1)])


def spread(values: Array, block: int, width: int) -> Array:
    """The value of the block of every element of a row."""
    return np.repeat(values, block, axis=-1)[..., :width]


def parameters(node: NodeProto, tensors: Mapping[str, Array]) -> list[Array]:
    """The stored tensors that a node reads: codes, scales and zero points."""
    names = list(node.input)
    del names[1 if node.op_type == "GatherBlockQuantized" else 0]
    return [tensors[name] for name in names]


def matmul_codes(node: NodeProto, tensors: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Codes of [N, blocks * block_size], scales and zero points of [N, blocks]."""
    given = attributes(node)
    codes, scales, *zero_points = parameters(node, tensors)
    blocks = -(-given["K"] // given["block_size"])
    assert codes.dtype == np.uint8
    assert codes.shape == (given["N"], blocks, given["block_size"] * given["bits"] // 8)
    assert scales.shape == (given["N"], blocks)
    zeros = np.full(scales.shape, 1 << (given["bits"] - 1))
    if zero_points:
        assert zero_points[0].dtype == np.uint8
        assert zero_points[0].shape == (given["N"], -(-blocks * given["bits"] // 8))
        zeros = rows(zero_points[0], given["bits"])[:, :blocks]
    return rows(codes, given["bits"]), scales, zeros


def matmul_weight(node: NodeProto, tensors: Mapping[str, Array]) -> Array:
    """W of [K, N], in the scales' type: float32 products rounded once."""
    given = attributes(node)
    codes, scales, zeros = matmul_codes(node, tensors)
    differences = codes - spread(zeros, given["block_size"], codes.shape[1])
    values = differences * spread(scales.astype(np.float32), given["block_size"], codes.shape[1])
    return values[:, : given["K"]].T.astype(scales.dtype)  # type: ignore[no-any-return]


def gather_codes(node: NodeProto, tensors: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Codes of [..., D], scales and zero points of [..., blocks]."""
    given = attributes(node)
    codes, scales, *zero_points = parameters(node, tensors)
    assert (given["gather_axis"], given["quantize_axis"]) == (0, codes.ndim - 1)
    if codes.dtype != np.uint8:
        assert "bits" not in given
        zeros = zero_points[0] if zero_points else np.zeros(scales.shape)
        assert not zero_points or zero_points[0].dtype == codes.dtype
        return codes.astype(int), scales, zeros.astype(int)
    bits, shape = given["bits"], codes.shape[:-1]
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if zero_points:
        unpacked = rows(zero_points[0].reshape(-1, zero_points[0].shape[-1]), bits)
        zeros = unpacked[:, : scales.shape[-1]].reshape(scales.shape)
    return rows(codes.reshape(-1, codes.shape[-1]), bits).reshape(*shape, -1), scales, zeros


def gather_weight(node: NodeProto, tensors: Mapping[str, Array]) -> Array:
    """The table, in the scales' type: float32 products rounded once."""
    codes, scales, zeros = gather_codes(node, tensors)
    block, width = attributes(node)["block_size"], codes.shape[-1]
    differences = codes - spread(zeros, block, width)
    values = differences * spread(scales.astype(np.float32), block, width)
    return values.astype(scales.dtype)  # type: ignore[no-any-return]

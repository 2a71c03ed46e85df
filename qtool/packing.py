"""Codes of fewer than 8 bits <-> bytes, as ONNX lays them out in raw_data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DType
from qtool.errors import FormatError
from qtool.spec import Shape


def pack(codes: NDArray[Any], dtype: DType) -> NDArray[np.uint8]:
    """The bytes of codes in C order: a uint8 vector of ceil(codes.size * bits / 8).

    The codes form one little-endian bit stream: the first one in the lowest bits of the first
    byte, rows not padded, the last byte filled with zeros. Types of 8 bits and more are their
    little-endian bytes, and not copied.
    Source: ONNX onnx.proto, TensorProto.raw_data and "4bit data type"; IR version 14 for 2 and 6
    bits.
    """
    flat = np.ascontiguousarray(codes).ravel().view(np.uint8)
    bits = dtype.bits
    if bits >= 8:
        return flat
    if bits == 6:  # codes that cross bytes
        columns = np.unpackbits(flat[:, None], axis=1, count=bits, bitorder="little")
        return np.packbits(columns, bitorder="little")
    per_byte = 8 // bits
    padded = np.zeros(-(-flat.size // per_byte) * per_byte, np.uint8)
    np.bitwise_and(flat, (1 << bits) - 1, out=padded[: flat.size])
    packed = padded[::per_byte].copy()
    for lane in range(1, per_byte):
        packed |= padded[lane::per_byte] << (lane * bits)
    return packed


def unpack(packed: NDArray[np.uint8], dtype: DType, shape: Shape) -> NDArray[Any]:
    """The codes of pack(), one per element, in dtype's NumPy type; 8 bits and more are not copied.

    Raises FormatError where the number of bytes does not fit the shape.
    """
    count = int(np.prod(shape, dtype=object))
    flat = packed.ravel()
    if flat.size != dtype.nbytes(count):
        raise FormatError(
            "packed data",
            f"{flat.size} bytes for {count} values of {dtype}",
            f"{dtype.nbytes(count)} are needed",
        )
    bits = dtype.bits
    if bits >= 8:
        return flat.view(dtype.numpy).reshape(shape)
    codes: NDArray[Any]
    if bits == 6:
        stream = np.unpackbits(flat, count=count * bits, bitorder="little").reshape(count, bits)
        codes = np.packbits(stream, axis=1, bitorder="little")
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((flat[:, None] >> shifts) & np.uint8((1 << bits) - 1)).ravel()[:count]
    return codes.view(dtype.numpy).reshape(shape)

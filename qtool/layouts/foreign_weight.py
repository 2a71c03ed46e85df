"""How a weight of another tool is quantized: type, shape and granularity, from headers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from qtool.dtypes import DTYPES
from qtool.errors import QtoolError
from qtool.layouts.foreign import ForeignWeight
from qtool.spec import Blocked, Granularity, PerAxis, PerTensor, Shape, Tiled, describe

# Where some tools keep the shape, in a few bytes.
_SHAPE = ".weight_shape"
_STATE = ".weight.quant_state.bitsandbytes__"
_BITS = {"nf4": 4, "fp4": 4}

# Gives a small tensor.
Read = Callable[[str], NDArray[Any]]


def quantization(weight: ForeignWeight, read: Read) -> tuple[Shape | None, dict[str, Any]]:
    """The shape before quantization, [outputs, inputs], and how it is quantized, as plain data.

    None, in either, for what neither headers nor a configuration tell. read: of the tensors in
    which some tools keep the shape.
    """
    layout = weight.layout
    shape = _said_shape(weight, read)
    bits = _bits(weight, shape)
    shape = shape or _shape(weight, bits)
    granularity = None if shape is None else _granularity(weight, shape)
    dtype = layout.dtype or weight.codes.dtype.name
    if dtype in ("int", "uint"):
        dtype = f"{dtype}{bits}" if bits else "?"
    said = describe(granularity) if granularity else dict.fromkeys(describe(PerTensor()))
    shifted = weight.zero_point is not None and layout.shifted
    middle = 1 << (bits or 1) - 1
    return shape, {
        "layout": layout.name,
        "dtype": None if dtype == "?" else dtype,
        **said,
        "scale_dtype": layout.scale_dtype or weight.scale.dtype.name,
        "zero_point": weight.zero_point is not None,
        "equation": (layout.shifted if shifted else layout.equation).format(middle=middle) or None,
        "problems": list(_problems(weight, shape, bits, granularity)),
    }


def _said_shape(weight: ForeignWeight, read: Read) -> Shape | None:
    """The shape as a tensor of the file says it."""
    said: Any = None
    try:
        if (info := weight.candidate.get(_SHAPE)) and info.shape == (2,):
            said = read(info.name).tolist()
        elif (info := weight.candidate.get(_STATE + weight.layout.dtype)) and info.size < 1 << 16:
            said = json.loads(read(info.name).tobytes())["shape"]
    except (QtoolError, ValueError, KeyError, TypeError, RecursionError):
        return None  # a damaged one says nothing
    is_shape = isinstance(said, list) and all(type(n) is int and n > 0 for n in said)
    return tuple(said) if is_shape and said else None


def _bits(weight: ForeignWeight, shape: Shape | None) -> int | None:
    """Bits of a code."""
    layout, codes, scale = weight.layout, weight.codes, weight.scale
    zero = weight.zero_point
    if layout.dtype not in ("int", "uint"):
        known = DTYPES.get(layout.dtype or codes.dtype.name)
        return known.bits if known else _BITS.get(layout.dtype)
    width = codes.dtype.bits
    if shape is not None:  # a row ends with a word that may not be full
        words = codes.shape[-1] if codes.shape else 0
        return next((b for b in range(1, 9) if -(-shape[-1] * b // width) == words), None)
    if zero is not None and min(len(part.shape) for part in (zero, codes, scale)) == 2:
        if layout.transposed:
            return _quotient(zero.shape[1] * width, scale.shape[1])
        return _quotient(zero.shape[0] * width, codes.shape[0])
    return weight.candidate.config.of(weight.candidate.base)[0]


def _quotient(total: int, count: int) -> int | None:
    """total / count, where that is a whole number of bits."""
    found = total // count if count and total % count == 0 else 0
    return found if 1 <= found <= 8 else None


def _shape(weight: ForeignWeight, bits: int | None) -> Shape | None:
    """The shape that the codes have when they are unpacked."""
    layout, shape = weight.layout, list(weight.codes.shape)
    if layout.packed is not None:
        if bits is None or len(shape) < 2:
            return None
        axis = len(shape) - 2 + layout.packed
        shape[axis] = shape[axis] * weight.codes.dtype.bits // bits
    if layout.dtype in _BITS or layout.dtype == "?":
        return None
    return tuple(reversed(shape)) if layout.transposed else tuple(shape)


def _granularity(weight: ForeignWeight, shape: Shape) -> Granularity | None:
    """What the scale's shape makes of a weight's."""
    layout, scale = weight.layout, weight.scale.shape
    said = weight.candidate.config.of(weight.candidate.base)[1]
    if layout.block_size is not None:
        return Blocked(len(shape) - 1, layout.block_size)
    count = math.prod(scale)
    if count == 1:
        return PerTensor()
    if layout.dtype in _BITS:  # blocks of the flat weight
        size = _block(math.prod(shape), count, said)
        return Blocked(len(shape) - 1, size) if size else None
    if len(shape) < 2 or (len(scale) == 1 and scale != shape[:1]):
        return None
    if len(scale) == 2 * len(shape):  # a block's own axes are kept
        scale = scale[::2]
    scale = (*scale, 1) if len(scale) == 1 else scale
    scale = tuple(reversed(scale)) if layout.transposed else scale
    if len(scale) != len(shape) or scale[:-2] != shape[:-2]:
        return None
    rows, columns = (
        _block(n, count, said) for n, count in zip(shape[-2:], scale[-2:], strict=True)
    )
    if rows is None or columns is None:
        return None
    if rows > 1:
        return Tiled((rows, columns))
    if scale[-1] == 1 and len(shape) == 2:
        return PerAxis(0)
    return Blocked(len(shape) - 1, columns)


def _block(size: int, count: int, said: int | None) -> int | None:
    """The size of the blocks of which there are that many; the last one may be shorter."""
    exact = [size // count] if count and size % count == 0 else []
    powers = [1 << n for n in range(12, 0, -1)]
    tried = [*([said] if said else []), *exact, *powers]
    return next((block for block in tried if block and -(-size // block) == count), None)


def _problems(
    weight: ForeignWeight, shape: Shape | None, bits: int | None, granularity: Granularity | None
) -> Iterator[str]:
    """What readers are known to refuse, or to read wrongly."""
    layout = weight.layout
    said_bits, said_block = weight.candidate.config.of(weight.candidate.base)
    if said_bits and bits and said_bits != bits and layout.dtype in ("int", "uint"):
        yield f"the configuration says {said_bits} bits, the shapes {bits}"
    if shape is None:
        return
    if granularity is None:
        yield f"scales of shape {list(weight.scale.shape)} fit no blocks of {list(shape)}"
    if not isinstance(granularity, Blocked):
        return
    size, (blocks, reader) = granularity.block_size, layout.blocks
    if blocks and size not in blocks and size < shape[-1]:
        yield f"blocks of {size}, but {reader} {', '.join(map(str, blocks))} alone"
    if layout.dtype not in _BITS and shape[-1] % size:
        yield f"rows of {shape[-1]} are not whole blocks of {size}"
    if said_block and said_block != size and said_block < shape[-1]:
        yield f"the configuration says blocks of {said_block}, the shapes {size}"

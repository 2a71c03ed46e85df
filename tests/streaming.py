"""The streaming engine held against the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.dtypes import DTYPES, resolve
from qtool.engine import can_stream, plain, request, restore, stream
from qtool.packing import pack
from qtool.spec import QuantSpec, Shape, reader_of
from qtool.tensor import Codes, QuantizedTensor

Array = NDArray[Any]


def values(shape: Shape, dtype: Any, seed: int, *, nonfinite: bool) -> Array:
    """Values of many magnitudes, with zeros, and NaN and Inf where asked for."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    flat = x.reshape(-1)
    flat[::7] = 0
    flat[3::11] = -0.0
    if nonfinite:
        flat[[0, 50 % flat.size, 5000 % flat.size]] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(dtype))


def check_same(x: Array, spec: QuantSpec, jobs: int, **parameters: Array) -> None:
    """The streaming engine equals the plain one to the last bit."""
    given_parameters = (parameters.get("scale"), parameters.get("zero_point"))
    asked = request("x", x.shape, resolve(x.dtype), spec, *given_parameters)
    assert can_stream(asked)
    want, got = plain.quantize(x, asked), stream.quantize_array(x, asked, jobs=jobs)
    for name in ("y", "scale", "zero_point"):
        a, b = getattr(want, name), getattr(got, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes()), name
    assert want.stats.sums.tobytes() == got.stats.sums.tobytes()
    assert want.stats.max_abs_error_at == got.stats.max_abs_error_at
    assert want.stats.figures() == got.stats.figures()
    assert want.outcome.describe() == got.outcome.describe()


def check_restored(tensor: QuantizedTensor, output: str) -> None:
    dtype, shape = tensor.spec.dtype, tensor.y.shape
    stored = tensor.y.reshape(-1).view(f"u{tensor.y.itemsize}")
    if dtype.bits < 8:
        stored = pack(tensor.y, dtype)
    out = np.empty(shape, DTYPES[output].numpy)

    def write(offset: int, data: Array) -> None:
        out.reshape(-1).view(np.uint8)[offset : offset + data.nbytes] = data.view(np.uint8)

    codes = Codes(
        reader_of(stored.view(np.uint8)), dtype, shape, tensor.scale, tensor.zero_point,
        tensor.spec.granularity, global_scale=tensor.global_scale,
    )  # fmt: skip
    restore.restore(codes, write, DTYPES[output], jobs=2, moved=lambda nbytes: None)
    computed = "float32" if output == "float64" else output
    want = tensor.dequantize(computed)
    assert out.tobytes() == want.astype(DTYPES[output].numpy).tobytes()

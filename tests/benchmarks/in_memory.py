"""Kernels against onnxruntime, NumPy and ml_dtypes on arrays in memory.

Results go into arrays that have been written before, as onnxruntime's arena holds its own: the
first touch of fresh memory would be what is measured.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from qtool import scales
from qtool.dtypes import resolve
from qtool.engine.tiling import TILE
from qtool.kernels import machine
from qtool.kernels.tensor import TileQuantizer, divided
from qtool.spec import Blocked, PerTensor, QuantSpec

Array = NDArray[Any]
COLUMNS = 4096
SCALE = np.array([0.03], np.float32)
NONE = np.empty(0, np.float32)


def medians(runs: int, *actions: Callable[[], object], pause: float = 0.0) -> list[float]:
    """Median seconds of every action, run in turn after a pause; the first round is not counted."""
    rounds = []
    for _ in range(2 * runs + 1):
        times = []
        for action in actions:
            time.sleep(pause)
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
        rounds.append(times)
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


class Work:
    """Quantizing an array into memory that is there, over threads."""

    def __init__(self, x: Array, spec: QuantSpec, width: int, *, measured: bool = False) -> None:
        self._x = x.reshape(-1)
        self._spec = spec.at(spec.granularity.resolve(x.shape))
        self._quantizer = TileQuantizer(x.shape, resolve(x.dtype), self._spec)
        self._width = width
        self._measured = measured
        self.out = np.zeros(x.size * width // 8, np.uint8)

    def given(self, begin: int, end: int) -> None:
        """With one scale."""
        for start in range(begin, end, TILE):
            self._quantize(start, min(start + TILE, end), SCALE, 0)

    def blocks(self, begin: int, end: int) -> None:
        """With the scales of the blocks, chosen by absmax."""
        assert isinstance(self._spec.granularity, Blocked)
        size, step = self._spec.granularity.block_size, TILE // 8
        for start in range(begin, end, step):
            part, first = self._x[start : start + step], start // size
            ranges = self._quantizer.ranges(part, start, first, part.size // size)
            assert ranges is not None
            scale, _ = scales.from_ranges(*ranges, self._spec, resolve(self._x.dtype), divided)
            self._quantize(start, start + part.size, scale.astype(np.float32), first)

    def _quantize(self, start: int, end: int, scale: Array, first: int) -> None:
        out = self.out[start * self._width // 8 : end * self._width // 8]
        quantize = self._quantizer.quantize if self._measured else self._quantizer.encode
        quantize(self._x[start:end], scale, NONE, start, first, self._width, out)

    def over(self, threads: int) -> None:
        """given(), over that many threads."""
        share = -(-self._x.size // threads)
        started = [
            threading.Thread(target=self.given, args=(i * share, (i + 1) * share))
            for i in range(threads)
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()


def onnxruntime_quantize(x: Array, threads: int) -> Callable[[], Array]:
    """QuantizeLinear to int8."""
    inputs = {"x": x, "scale": SCALE.reshape(()), "zero": np.array(0, np.int8)}
    node = helper.make_node("QuantizeLinear", list(inputs), ["y"])
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in inputs.items()
    ]
    made = helper.make_tensor_value_info("y", TensorProto.INT8, x.shape)
    graph = helper.make_graph([node], "g", infos, [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, inputs)[0]


def numpy_float8(x: Array) -> Callable[[], Array]:
    """Divide, clip and ml_dtypes' cast."""
    quotient = np.empty_like(x)
    out = np.empty(x.shape, ml_dtypes.float8_e4m3fn)

    def run() -> Array:
        np.divide(x, SCALE[0], out=quotient)
        np.clip(quotient, -448, 448, out=quotient)
        out[...] = quotient
        return out

    return run


def numpy_int4(x: Array) -> Callable[[], Array]:
    """Blocks of 32: absmax / 7, divide, round, clip, ml_dtypes' cast, pack."""

    def run() -> Array:
        blocks = x.reshape(-1, 32).astype(np.float32)
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 7).astype(x.dtype)
        codes = np.clip(np.rint(blocks / scale.astype(np.float32)), -8, 7)
        pairs = codes.astype(ml_dtypes.int4).view(np.uint8).reshape(-1, 2)
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)

    return run


def rows(runs: int, scale: float) -> Iterator[tuple[str, str, str]]:
    """Name, figure and bar of every line."""
    machine.load()
    size = round((64 << 20) * scale) // (COLUMNS * 64) * COLUMNS * 64
    x = np.random.default_rng(0).standard_normal((size // COLUMNS, COLUMNS), np.float32)
    threads = len(os.sched_getaffinity(0))
    millions = f"{size / 2**20:.0f} Mi float32"

    int8 = Work(x, QuantSpec("int8", PerTensor(), nonfinite="allow"), 8)
    reference = onnxruntime_quantize(x, threads)
    # onnxruntime's threads go on spinning for a while
    ours, theirs = medians(runs, lambda: int8.over(threads), reference, pause=0.1)
    assert int8.out.tobytes() == reference().tobytes()
    yield f"{millions} -> int8 / onnxruntime, {threads} threads", _figure(ours, theirs, x), "1.3"

    float8 = Work(x, QuantSpec("float8e4m3fn", PerTensor(), nonfinite="allow"), 8)
    cast = numpy_float8(x)
    ours, theirs = medians(runs, lambda: float8.given(0, size), cast)
    assert float8.out.tobytes() == cast().tobytes()
    yield (
        f"{millions} -> float8e4m3fn / NumPy, ml_dtypes, 1 thread",
        _figure(ours, theirs, x),
        "0.06",
    )

    half = x.astype(ml_dtypes.bfloat16)
    int4 = Work(half, QuantSpec("int4", Blocked(-1, 32)), 4)
    packed = numpy_int4(half)
    ours, theirs = medians(runs, lambda: int4.blocks(0, size), packed)
    assert int4.out.tobytes() == packed().tobytes()
    yield (
        "bfloat16 -> int4 block 32, packed / NumPy, ml_dtypes, 1 thread",
        _figure(ours, theirs, half),
        "0.10",
    )

    measured = Work(x, QuantSpec("int8", PerTensor(), nonfinite="allow"), 8, measured=True)
    one, two = medians(runs, lambda: measured.over(1), lambda: measured.over(2))
    yield "kernels with figures: two threads / one, rate", f"{one / two:.2f}", ">= 1.8"


def _figure(ours: float, theirs: float, x: Array) -> str:
    return f"{ours / theirs:.3f} ({x.nbytes / ours / 1e9:.1f} GB/s)"

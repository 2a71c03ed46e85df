"""How fast scales are searched for, on one core, and how near the search comes to the optimum.

The rate is that of the time beyond the one that absmax takes for the same tensor in memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sources
from numpy.typing import NDArray

import qtool
from qtool.kernels import machine

Array = NDArray[Any]

INT4 = {"dtype": "int4", "granularity": qtool.Blocked(1, 32), "scale_dtype": "bfloat16"}
NVFP4 = {
    "dtype": "float4e2m1", "granularity": qtool.Blocked(1, 16), "scale_dtype": "float8e4m3fn",
    "global_scale": True,
}  # fmt: skip
WORK = (
    ("mse, int4 blocks of 32", INT4, "mse", 150),
    ("mse, nvfp4", NVFP4, "mse", 100),
    ("optimal, int4 blocks of 32 with bfloat16 scales", INT4, "optimal", 20),
)


@contextmanager
def one_core() -> Iterator[None]:
    """Only the first of this process's cores, so that qtool takes one thread."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def rows(runs: int, scale: float) -> Iterator[tuple[str, str, str]]:
    """Name, figure and bar of every line."""
    machine.load()
    x = sources.layer()[: max(round(sources.ROWS * scale), 64)]
    with one_core():
        for name, options, method, bar in WORK:
            extra = [
                _seconds(x, options, method) - _seconds(x, options, "absmax")
                for _ in range(runs + 1)
            ]
            rate = x.size / statistics.median(extra[1:]) / 1e6
            yield f"{name}: millions of weights per second and core", f"{rate:.0f}", f">= {bar}"
    for name, options in (("int4 blocks of 32", INT4), ("nvfp4", NVFP4)):
        ratio = _error(x, options, "mse") / _error(x, options, "optimal")
        yield f"{name}: RMSE of mse / that of optimal", f"{ratio:.4f}", "1.01"


def _quantized(x: Array, options: dict[str, Any], method: str) -> qtool.QuantizedTensor:
    return qtool.quantize(x, qtool.QuantSpec(method=method, **options))


def _seconds(x: Array, options: dict[str, Any], method: str) -> float:
    started = time.perf_counter()
    _quantized(x, options, method)
    return time.perf_counter() - started


def _error(x: Array, options: dict[str, Any], method: str) -> float:
    return float(_quantized(x, options, method).stats.figures()["relative_error"])

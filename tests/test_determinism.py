"""The same bytes: for any number of threads and size of tiles, with and without kernels, for any
order of hashes, processor, and library of matrix products."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy._core._multiarray_umath import (  # type: ignore[attr-defined]
    __cpu_dispatch__,
    __cpu_features__,
)
from onnx import helper
from onnx_models import initializer, model, save
from safetensors.numpy import save_file

SCRIPT = Path(__file__).with_name("determinism.py")
RNG = np.random.default_rng(8)

ONE = {"jobs": 1, "kernels": True, "tile": 0}
TWO = {"jobs": 2, "kernels": True, "tile": 8192}
THREE = {"jobs": 3, "kernels": True, "tile": 4096}
PLAIN = {"jobs": 1, "kernels": False, "tile": 0}
PLAIN_TILES = {"jobs": 2, "kernels": False, "tile": 4096}

# A processor that has nothing but what every x86-64 has, as far as NumPy, libm and OpenBLAS go.
POOR = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(
        name for name in __cpu_dispatch__ if __cpu_features__[name]
    ),
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
    "OPENBLAS_CORETYPE": "Nehalem",
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_NUM_THREADS": "2",
}


def values(*shape: int) -> Any:
    """Values of many sizes, with zeros, negative zeros, ties and the smallest numbers."""
    x = RNG.standard_normal(shape).astype(np.float32) * np.float32(0.05)
    flat = x.reshape(-1)
    flat[::97], flat[1::101], flat[2::103] = 0.0, -0.0, 2.0**-149
    flat[3::53] = np.round(flat[3::53] * 64) / 64
    flat[5::1009] *= 40
    return x


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    np.save(folder / "x.npy", values(131, 256))
    tensors = {
        "one.weight": values(64, 128),
        "two.weight": values(32, 192).astype(bfloat16),
        "three.weight": values(32, 64).astype(np.float16),
        "four.weight": values(16, 64).astype(np.float64) * np.pi,
        "five.bias": values(64),
    }
    save_file(tensors, folder / "w.safetensors")
    rows = {name: values(300, w.shape[1]) + 0.1 for name, w in tensors.items() if w.ndim > 1}
    products = {name: x.T.astype(np.float64) @ x for name, x in rows.items()}
    np.savez(folder / "a.npz", **rows)
    np.savez(folder / "i.npz", **{name: (x * x).mean(axis=0) for name, x in rows.items()})
    np.savez(folder / "h.npz", **{name: h + h.T for name, h in products.items()})
    layers = {"l.q_proj.weight": values(32, 64), "l.k_proj.weight": values(32, 64)}
    checkpoints.save(folder / "folder", [{name: x} for name, x in layers.items()])
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    weights = [initializer("v", values(96, 128)), initializer("w", values(128, 64))]
    save(model(nodes, weights, inputs={"x": (None, 96)}), folder / "m.onnx")
    np.save(folder / "samples.npy", values(500, 96))
    return folder


def made(sources: Path, folder: Path, *ways: dict[str, Any], **environment: str) -> Any:
    """What determinism.py prints, in a process with that environment."""
    shutil.copytree(sources, folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(ways)], cwd=folder, capture_output=True,
        env=kept | environment, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def wanted(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("wanted") / "made"
    (found,) = made(sources, folder, ONE, PYTHONHASHSEED="0")
    assert sum(map(len, found.values())) > 80
    return found


def differing(found: Any, wanted: Any) -> list[tuple[str, str]]:
    assert found.keys() == wanted.keys()
    return [
        (line, name)
        for line in wanted
        for name in wanted[line].keys() | found[line].keys()
        if found[line].get(name) != wanted[line].get(name)
    ]


def test_threads_and_tiles_change_no_byte(sources: Path, wanted: Any, tmp_path: Path) -> None:
    (found,) = made(sources, tmp_path / "made", THREE, PYTHONHASHSEED="1")
    assert differing(found, wanted) == []


def test_the_processor_and_the_order_of_hashes_change_no_byte(
    sources: Path, wanted: Any, tmp_path: Path
) -> None:
    (found,) = made(sources, tmp_path / "made", PLAIN_TILES, PYTHONHASHSEED="random", **POOR)
    assert differing(found, wanted) == []


# Compiled anew for the one that is here; without and with fused multiply-add; with long vectors.
PROCESSORS = ["", "generic", "x86-64-v3", "skylake-avx512"]


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_compiled_for_any_processor_kernels_make_the_same_bytes(
    processor: str, sources: Path, wanted: Any, tmp_path: Path
) -> None:
    if processor == "skylake-avx512" and not __cpu_features__["AVX512_SKX"]:
        processor = "x86-64-v2"
    named = {"NUMBA_CPU_NAME": processor} if processor else {}
    cold, warm = (
        made(sources, tmp_path / f"made{number}", *ways, KEPT=str(tmp_path / "kept"), **named)
        for number, ways in enumerate([[TWO], [ONE, PLAIN]])
    )
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.suffix == ".o"
    for found in (*cold, *warm):
        assert differing(found, wanted) == []

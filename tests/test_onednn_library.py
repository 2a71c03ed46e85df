"""onednn_quantize against the real oneDNN library."""

from __future__ import annotations

import numpy as np
import pytest
from fetch import fetch
from onednn_library import Library

from qtool.ops import onednn_quantize

pytestmark = pytest.mark.network

PACKAGE = "onednn-cpu-gomp==2023.2.0"


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(fetch(PACKAGE, "onednn_cpu_gomp-2023.2.0.data/data/lib/libdnnl.so.3"))


def test_the_library_rounds_after_adding_the_zero_point(library: Library) -> None:
    src = np.array([0.5, 1.5, 2.5, -0.5], np.float32)
    assert library.quantize(src, 1.0, 1, np.uint8).tolist() == [2, 2, 4, 0]


@pytest.mark.parametrize("zp", [0, 1, 2, 7, 128, 255])
@pytest.mark.parametrize("scale", [2.0**-20, 0.125, 1.0, 4.0, 2.0**12], ids=str)
@pytest.mark.parametrize(("dst", "dtype"), [("u8", np.uint8), ("s8", np.int8)], ids=["u8", "s8"])
def test_quantize_gives_the_bytes_of_the_library_at_power_of_two_scales(
    library: Library, dst: str, dtype: type[np.generic], scale: float, zp: int
) -> None:
    """At these scales the library's product with the reciprocal is the quotient."""
    zero = zp if dst == "u8" else zp - 128
    ties = np.arange(-1200, 1201) / 4
    random = np.random.default_rng(20).normal(0, 200, 8000)
    near = np.nextafter(np.float32(np.arange(-300, 301) / 2), np.float32(np.inf))
    src = (np.concatenate([ties, random, near, [1e6, -1e6, 0, -0.0]]) * scale).astype(np.float32)
    expected = library.quantize(src, scale, zero, dtype)
    actual = onednn_quantize(src, [scale], [zero], dst=dst)
    assert actual.dtype == dtype
    assert actual.tobytes() == expected.tobytes()


def test_at_other_scales_the_library_multiplies_and_the_page_divides(library: Library) -> None:
    src = np.array([0.35, 1.55, 2.35], np.float32)
    assert library.quantize(src, 0.1, 0, np.int8).tolist() == [4, 16, 24]
    assert onednn_quantize(src, [0.1], [0], dst="s8").tolist() == [4, 15, 23]

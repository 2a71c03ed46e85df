"""onednn_quantize on values worked out by hand from the page of oneDNN's Quantize."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.ops import onednn_quantize, quantize_linear

Array = NDArray[Any]
INF, NAN = float("inf"), float("nan")


def f32(values: Any) -> Array:
    return np.array(values, np.float32)


# fmt: off
VECTORS = [
    # name, src, scales, zps, attributes, dst
    ("an odd zero point flips the ties", f32([0.5, 1.5, 2.5, 3.5, -0.5, -1.5]), [1], [3],
     {"dst": "u8"}, [4, 4, 6, 6, 2, 2]),
    ("a negative odd zero point", f32([0.5, 1.5, -0.5, -1.5]), [1], [-7],
     {"dst": "s8"}, [-6, -6, -8, -8]),
    ("an even zero point does not", f32([0.5, 1.5, 2.5]), [1], [4], {"dst": "u8"}, [4, 6, 6]),
    ("zero point 1 of u8", f32([0.5, 1.5, 2.5, -0.5]), [1], [1], {}, [2, 2, 4, 0]),
    ("divided, not multiplied by a reciprocal", f32([0.35, 1.55, 2.35]), [0.1], None,
     {"dst": "s8"}, [4, 15, 23]),
    ("without zps they are zero", f32([0.5, 1.5, 300, -1]), [1], None, {}, [0, 2, 255, 0]),
    ("Inf saturates, NaN gives the zero point", f32([INF, -INF, NAN, 3e38]), [1e-30], [9],
     {"dst": "s8"}, [127, -128, 9, 127]),
    ("a zero point outside the type", f32([0, -200, 900, NAN]), [1], [300],
     {}, [255, 100, 255, 255]),
    ("a zero point below the type", f32([0, 300, NAN]), [1], [-200], {}, [0, 100, 0]),
    ("a sum beyond float32's whole numbers", f32([0.5, 0.25]), [1], [2**24], {"dst": "s8"},
     [127, 127]),
    # 0.49999997 + 1 is the tie 1.5 in float32, and 1.49999997 in float64
    ("the sum is rounded to float32", f32([0.49999997]), [1], [1], {}, [2]),
    ("so is the zero point", f32([-(2**24)]), [1], [2**24 + 1], {}, [0]),
    ("channels along axis 1, the default", f32([[1, 2, 3], [4, 5, 6]]), [1, 2, 3], None,
     {"qtype": "per_channel", "dst": "s8"}, [[1, 1, 1], [4, 2, 2]]),
    ("channels along axis 0", f32([[1, 2, 3], [4, 5, 6]]), [1, 2], [0, 1],
     {"qtype": "per_channel", "axis": 0, "dst": "s8"}, [[1, 2, 3], [3, 4, 4]]),
    ("channels along axis -2", f32([[1, 2, 3], [4, 5, 6]]), [1, 2], [0, 1],
     {"qtype": "per_channel", "axis": -2, "dst": "s8"}, [[1, 2, 3], [3, 4, 4]]),
    ("per tensor leaves axis aside", f32([1, 2]), [1], [1], {"axis": 9}, [2, 3]),
    ("a scalar", f32(7), [2], [0], {}, 4),
    ("no channels", np.zeros((2, 0), np.float32), [], [], {"qtype": "per_channel"},
     np.zeros((2, 0))),
    ("float64 is rounded to float32", np.array([2.5 + 1e-9]), [1], None, {}, [2]),
]
# fmt: on


@pytest.mark.parametrize(
    ("src", "scales", "zps", "attributes", "expected"),
    [pytest.param(*row[1:], id=row[0]) for row in VECTORS],
)
def test_integers_hold_the_values_that_the_page_gives(
    src: Array,
    scales: list[float],
    zps: list[int] | None,
    attributes: dict[str, Any],
    expected: Any,
) -> None:
    dst = onednn_quantize(src, scales, zps, **attributes)
    assert dst.dtype == (np.int8 if attributes.get("dst") == "s8" else np.uint8)
    assert dst.shape == src.shape
    assert dst.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize(
    ("dst", "expected"),
    [("f8_e4m3", "00 80 38 7e 7e fe 7e fe 7f"), ("f8_e5m2", "00 80 3c 5f 7b fb 7b fb 7e")],
)
def test_float8_destinations_saturate(dst: str, expected: str) -> None:
    src = f32([0, -0.0, 2, 896, 1e6, -1e6, INF, -INF, NAN])
    assert onednn_quantize(src, [2.0], dst=dst).tobytes().hex(" ") == expected


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(("u8", "uint8", 2, np.uint8), np.uint8), (("s8", "int8", 3, np.int8), np.int8)],
)
def test_dst_takes_onednn_and_onnx_names_codes_and_types(
    names: tuple[Any, ...], dtype: type[np.generic]
) -> None:
    for name in names:
        assert onednn_quantize(f32([1]), [1.0], dst=name).dtype == dtype


def test_the_attributes_have_the_defaults_of_the_page() -> None:
    parameters = inspect.signature(onednn_quantize).parameters
    assert list(parameters) == ["src", "scales", "zps", "qtype", "axis", "dst"]
    assert parameters["qtype"].default == "per_tensor"
    assert parameters["axis"].default == 1
    assert parameters["zps"].default is None


def test_onnx_and_onednn_differ_only_at_ties_beside_an_odd_zero_point() -> None:
    src = f32(np.arange(-40, 41) / 4)
    onnx = quantize_linear(src, f32(1), np.uint8(101)).tolist()
    onednn = onednn_quantize(src, [1.0], [101]).tolist()
    differing = [x for x, a, b in zip(src.tolist(), onnx, onednn, strict=True) if a != b]
    assert differing == [k + 0.5 for k in range(-10, 10)]

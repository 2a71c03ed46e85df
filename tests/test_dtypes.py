"""The table of element types against the standards, each fact typed out by hand."""

from __future__ import annotations

import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import oracle
import pytest
from onnx import defs, helper

from qtool.dtypes import BY_SAFETENSORS, DTYPES, TARGETS, DType, resolve, resolve_target
from qtool.errors import SpecError

# fmt: off
RANGES = [
    ("int2", -2, 1), ("uint2", 0, 3), ("int4", -8, 7), ("uint4", 0, 15),
    ("int8", -128, 127), ("uint8", 0, 255), ("int16", -32768, 32767), ("uint16", 0, 65535),
    ("int32", -2147483648, 2147483647),
    ("float4e2m1", -6, 6), ("float6e2m3", -7.5, 7.5), ("float6e3m2", -28, 28),
    ("float8e4m3fn", -448, 448), ("float8e4m3fnuz", -240, 240),
    ("float8e5m2", -57344, 57344), ("float8e5m2fnuz", -57344, 57344),
    ("float8e8m0", 2.0**-127, 2.0**127), ("float16", -65504, 65504),
    ("bfloat16", -255 * 2.0**120, 255 * 2.0**120),
    ("float32", -(2.0**24 - 1) * 2.0**104, (2.0**24 - 1) * 2.0**104),
]
BITS = {
    "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16,
    "float4e2m1": 4, "float6e2m3": 6, "float6e3m2": 6, "float8e4m3fn": 8, "float8e4m3fnuz": 8,
    "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8, "float16": 16, "bfloat16": 16,
    "float32": 32, "float64": 64, "bool": 8, "int32": 32, "int64": 64, "uint32": 32, "uint64": 64,
    "complex64": 64, "complex128": 128,
}
TARGET_NAMES = [
    "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float4e2m1",
    "float6e2m3", "float6e3m2", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
]
SAFETENSORS = {
    "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "F4": "float4e2m1", "F6_E2M3": "float6e2m3", "F6_E3M2": "float6e3m2",
    "F8_E4M3": "float8e4m3fn", "F8_E5M2": "float8e5m2", "F8_E8M0": "float8e8m0",
    "F8_E4M3FNUZ": "float8e4m3fnuz", "F8_E5M2FNUZ": "float8e5m2fnuz", "BOOL": "bool",
    "C64": "complex64",
}
# fmt: on
VERSIONS = (10, 13, 19, 21, 23, 24, 25, 28)  # of QuantizeLinear


@pytest.mark.parametrize(("name", "qmin", "qmax"), RANGES)
def test_ranges(name: str, qmin: float, qmax: float) -> None:
    assert (DTYPES[name].qmin, DTYPES[name].qmax) == (qmin, qmax)


def test_bits() -> None:
    assert {dtype.name: dtype.bits for dtype in DTYPES.values()} == BITS


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_codes_are_those_of_onnx(dtype: DType) -> None:
    assert dtype.code == getattr(onnx.TensorProto, dtype.name.upper(), dtype.code)
    spelled = {"FLOAT": "float32", "DOUBLE": "float64"}
    name = onnx.TensorProto.DataType.Name(dtype.code or 0)
    assert spelled.get(name, name.lower()) == dtype.name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_element_types_are_those_of_onnx(dtype: DType) -> None:
    assert helper.tensor_dtype_to_np_dtype(dtype.code or 0) == dtype.numpy


def onnx_types(version: int, letter: str) -> set[str]:
    """Allowed types of T1, T2 or T3 of QuantizeLinear, by qtool's names."""
    schema = defs.get_schema("QuantizeLinear", version)
    names = next(c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == letter)
    spelled = {"tensor(float)": "float32"}
    return {spelled.get(n, n.removeprefix("tensor(").removesuffix(")")) for n in names}


@pytest.mark.parametrize("version", VERSIONS)
def test_targets_have_the_first_opset_that_has_them(version: int) -> None:
    letter = "T3" if version >= 23 else "T2"
    expected = {d.name for d in TARGETS if d.opset is not None and d.opset <= version}
    assert onnx_types(version, letter) == expected


@pytest.mark.parametrize("version", [v for v in VERSIONS if v >= 23])
def test_scales_have_the_first_opset_that_has_them(version: int) -> None:
    expected = {d.name for d in DTYPES.values() if d.scale_opset and d.scale_opset <= version}
    assert onnx_types(version, "T2") == expected


@pytest.mark.parametrize("version", [19, 21])
def test_scales_before_opset_23_have_the_type_of_x(version: int) -> None:
    expected = {d.name for d in DTYPES.values() if d.scale_opset and d.scale_opset <= version}
    assert onnx_types(version, "T1") == expected


def test_targets_are_what_quantize_linear_produces() -> None:
    assert [dtype.name for dtype in TARGETS] == TARGET_NAMES


def test_safetensors_names() -> None:
    assert {key: dtype.name for key, dtype in BY_SAFETENSORS.items()} == SAFETENSORS


def test_onednn_names() -> None:
    names = {dtype.onednn: dtype.name for dtype in DTYPES.values() if dtype.onednn}
    assert names == {
        "s8": "int8",
        "u8": "uint8",
        "f8_e4m3": "float8e4m3fn",
        "f8_e5m2": "float8e5m2",
        "f32": "float32",
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_kinds(dtype: DType) -> None:
    letters = re.split(r"\d", dtype.name)[0].removeprefix("b")
    assert dtype.kind == letters.replace("ool", "bool")
    assert dtype.is_integer == (dtype.kind in ("int", "uint"))


def test_small_floats_are_the_float_targets_and_the_scale_type() -> None:
    small = [dtype.name for dtype in DTYPES.values() if dtype.is_small_float]
    assert small == [*(n for n in TARGET_NAMES if n.startswith("float")), "float8e8m0"]


@pytest.mark.parametrize("name", BITS)
def test_has_nan_says_whether_nan_survives(name: str) -> None:
    if DTYPES[name].kind != "float":
        assert DTYPES[name].has_nan is False
        return
    nan = np.array(np.nan, np.float32).astype(DTYPES[name].numpy)
    assert DTYPES[name].has_nan == bool(np.isnan(nan.astype(np.float32)))


@pytest.mark.parametrize("name", oracle.EXPONENT_BITS)
def test_every_code_means_what_its_bits_say(name: str) -> None:
    codes = np.arange(1 << DTYPES[name].bits, dtype=np.uint8)
    actual = codes.view(DTYPES[name].numpy).astype(np.float64).tolist()
    assert list(map(repr, actual)) == [repr(oracle.decode(int(c), name)) for c in codes]


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [("int4", 0, 0), ("int4", 1, 1), ("int4", 3, 2), ("uint2", 5, 2), ("float6e2m3", 1, 1),
     ("float6e2m3", 4, 3), ("float6e3m2", 5, 4), ("int8", 3, 3), ("float32", 3, 12),
     ("complex128", 1, 16)],
)  # fmt: skip
def test_nbytes_pads_the_last_byte(name: str, count: int, expected: int) -> None:
    assert DTYPES[name].nbytes(count) == expected


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_resolve_takes_names_codes_and_element_types(dtype: DType) -> None:
    ways: list[Any] = [dtype, dtype.name, dtype.code, np.int64(dtype.code or 0), dtype.numpy,
                       dtype.numpy.type, dtype.numpy.newbyteorder(">")]  # fmt: skip
    assert [resolve(way) for way in ways] == [dtype] * len(ways)
    assert str(dtype) == dtype.name


@pytest.mark.parametrize(
    "value", ["", "INT4", 0, 999, -1, True, 1.0, None, int, float, np.generic, object,
              np.dtype("V2"), np.dtype("O"), ml_dtypes],
    ids=repr,
)  # fmt: skip
def test_resolve_refuses_what_is_no_element_type(value: Any) -> None:
    with pytest.raises(SpecError) as error:
        resolve(value, "output_dtype")
    assert error.value.thing == "output_dtype"
    assert error.value.rule == f"{value!r} is not an element type"
    assert error.value.remedy == (
        "did you mean int4, uint4 or int64?" if value == "INT4" else "use " + ", ".join(DTYPES)
    )


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("itn4", "int4 or uint4"),
        ("int9", "int8, int4 or int2"),
        ("float8", "float8e5m2 or float8e4m3fn"),
        ("e2m1", "float4e2m1"),
        ("bfloat", "bfloat16, float64 or float32"),
    ],
)
def test_resolve_names_the_nearest_types(value: str, right: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve(value) if value == "bfloat" else resolve_target(value)
    assert error.value.thing == "dtype"
    assert error.value.remedy == f"did you mean {right}?"


@pytest.mark.parametrize("name", [n for n in BITS if n not in TARGET_NAMES])
def test_resolve_target_refuses_what_quantize_linear_does_not_produce(name: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve_target(name)
    assert str(error.value) == (
        f"dtype: QuantizeLinear does not produce {name}; use one of {', '.join(TARGET_NAMES)}"
    )


def test_a_type_that_another_process_was_sent_is_its_own_row() -> None:
    assert pickle.loads(pickle.dumps(DTYPES["int4"])) is DTYPES["int4"]

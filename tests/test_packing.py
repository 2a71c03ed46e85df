"""pack() and unpack() against bytes worked out by hand and against onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from strategies import bits

from qtool.dtypes import DTYPES
from qtool.errors import FormatError
from qtool.packing import pack, unpack

Array = NDArray[Any]
SUB_BYTE = ["int2", "uint2", "int4", "uint4", "float4e2m1", "float6e2m3", "float6e3m2"]


def array(dtype: str, values: Any) -> Array:
    return np.array(values, np.float64).astype(DTYPES[dtype].numpy)


# fmt: off
BYTES = [
    # name, type, codes, bytes
    ("odd count int4", "int4", [1, -2, 7], "e107"),
    ("odd count uint4", "uint4", [1, 14, 7], "e107"),
    ("one int4", "int4", [-8], "08"),
    ("rows run on uint4", "uint4",
     [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]], "21436587a9cbed0f"),
    ("rows run on int4", "int4", [[1, -1, 2], [-2, 3, -3]], "f1e2d3"),
    ("int2", "int2", [1, -2, 0, -1, 1], "c901"),
    ("uint2", "uint2", [1, 2, 0, 3, 1], "c901"),
    ("three uint2", "uint2", [3, 2, 1], "1b"),
    ("float4e2m1", "float4e2m1", [0.5, -6, -0.0], "f108"),
    # 6 bits, lowest first: 000001 111111 100000 000010 -> 11000001 00001111 00001010
    ("float6e2m3", "float6e2m3", [0.125, -7.5, -0.0, 0.25], "c10f0a"),
    ("two float6e3m2", "float6e3m2", [28, -0.0625], "5f08"),
    ("one float6e3m2", "float6e3m2", [-28], "3f"),
    ("no codes", "int4", [], ""),
    ("no float6 codes", "float6e2m3", [], ""),
    ("a scalar", "int4", -1, "0f"),
    ("int8", "int8", [1, -1], "01ff"),
    ("int16", "int16", [1, -2], "0100feff"),
    ("rows of int16", "int16", [[1, -2], [3, 4]], "0100feff03000400"),
    ("float8e4m3fn", "float8e4m3fn", [1, -448], "38fe"),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "values", "expected"), [pytest.param(*row[1:], id=row[0]) for row in BYTES]
)
def test_codes_and_their_bytes(name: str, values: Any, expected: str) -> None:
    codes = array(name, values)
    packed = pack(codes, DTYPES[name])
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert packed.tobytes().hex() == expected
    back = unpack(packed, DTYPES[name], codes.shape)
    assert (back.dtype, back.shape) == (codes.dtype, codes.shape)
    assert back.tobytes() == codes.tobytes()


@given(st.data())
@pytest.mark.parametrize("name", SUB_BYTE)
def test_bytes_are_those_of_onnx(name: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    codes = data.draw(bits(name, shape))
    expected = numpy_helper.from_array(codes)
    assert pack(codes, DTYPES[name]).tobytes() == expected.raw_data
    packed = np.frombuffer(expected.raw_data, np.uint8)
    assert unpack(packed, DTYPES[name], shape).tobytes() == codes.tobytes()


@pytest.mark.parametrize("name", ["int4", "uint4", "float4e2m1", "int2", "uint2"])
def test_bytes_are_those_that_onnx_s_helper_packs(name: str) -> None:
    values = np.arange(11) % 2
    code = DTYPES[name].code or 0
    tensor = helper.make_tensor("t", code, [11], values.tolist())
    assert tensor.data_type == getattr(TensorProto, name.upper())
    packed = np.array(tensor.int32_data, np.int32).astype(np.uint8)
    assert pack(array(name, values), DTYPES[name]).tobytes() == packed.tobytes()


@pytest.mark.parametrize("name", SUB_BYTE)
def test_the_order_of_memory_does_not_count(name: str) -> None:
    codes = array(name, np.arange(15).reshape(3, 5) % 2)
    expected = pack(codes, DTYPES[name]).tobytes()
    assert pack(np.asfortranarray(codes), DTYPES[name]).tobytes() == expected
    assert pack(np.repeat(codes, 2, axis=1)[:, ::2], DTYPES[name]).tobytes() == expected


def test_high_bits_of_an_element_do_not_reach_its_neighbours() -> None:
    codes = np.array([0xF1, 0x02], np.uint8).view(DTYPES["int4"].numpy)
    assert pack(codes, DTYPES["int4"]).tobytes().hex() == "21"


def test_packed_rows_are_one_stream() -> None:
    packed = np.array([[0x21, 0x43], [0x65, 0x87]], np.uint8)
    assert unpack(packed, DTYPES["uint4"], (2, 4)).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("name", ["int8", "uint8", "float8e4m3fn", "uint16"])
def test_codes_of_whole_bytes_are_not_copied(name: str) -> None:
    codes = array(name, [[1, 2], [3, 4]])
    packed = pack(codes, DTYPES[name])
    assert np.shares_memory(packed, codes)
    assert np.shares_memory(unpack(packed, DTYPES[name], codes.shape), packed)


@pytest.mark.parametrize(
    ("name", "size", "shape", "message"),
    [
        ("int4", 1, (3,), "packed data: 1 bytes for 3 values of int4; 2 are needed"),
        ("int4", 3, (3,), "packed data: 3 bytes for 3 values of int4; 2 are needed"),
        ("float6e2m3", 2, (1, 3), "packed data: 2 bytes for 3 values of float6e2m3; 3 are needed"),
        ("int16", 3, (2,), "packed data: 3 bytes for 2 values of int16; 4 are needed"),
        ("int2", 1, (0,), "packed data: 1 bytes for 0 values of int2; 0 are needed"),
        ("int4", 0, (2**40, 2**40),
         f"packed data: 0 bytes for {2**80} values of int4; {2**79} are needed"),
    ],
)  # fmt: skip
def test_bytes_that_do_not_fit_the_shape_are_refused(
    name: str, size: int, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(FormatError) as error:
        unpack(np.zeros(size, np.uint8), DTYPES[name], shape)
    assert str(error.value) == message

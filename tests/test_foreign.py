"""Tensors that other tools have quantized, known by their names and types."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.dtypes import DTYPES
from qtool.layouts.foreign import find, recognise
from qtool.layouts.foreign_config import Config
from qtool.layouts.foreign_table import LAYOUTS
from qtool.layouts.foreign_weight import quantization
from qtool.spec import TensorInfo


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, shape, DTYPES[dtype], DTYPES[dtype].nbytes(math.prod(shape)))


@pytest.mark.parametrize(
    ("tool", "tensors"),
    [
        pytest.param("compressed-tensors", {
            "a.weight_packed": "int32", "a.weight_scale": "bfloat16", "a.weight_shape": "int64",
            "a.weight_zero_point": "int32", "a.weight_g_idx": "int32",
        }, id="pack-quantized"),
        pytest.param("compressed-tensors", {
            "a.weight_packed": "uint8", "a.weight_scale": "float8e4m3fn",
            "a.weight_global_scale": "float32", "a.input_global_scale": "float32",
        }, id="nvfp4-pack-quantized"),
        pytest.param("compressed-tensors", {
            "a.weight": "int8", "a.weight_scale": "float32", "a.weight_zero_point": "int8",
        }, id="int-quantized"),
        pytest.param("compressed-tensors", {
            "a.weight": "float8e4m3fn", "a.weight_scale": "float32", "a.input_scale": "float32",
        }, id="float-quantized"),
        pytest.param("ModelOpt", {
            "a.weight": "uint8", "a.weight_scale": "float8e4m3fn", "a.weight_scale_2": "float32",
        }, id="modelopt-nvfp4"),
        pytest.param("block float8", {
            "a.weight": "float8e4m3fn", "a.weight_scale_inv": "float32",
        }, id="block-float8"),
        pytest.param("GPTQ", {
            "a.qweight": "int32", "a.qzeros": "int32", "a.scales": "float16", "a.g_idx": "int32",
        }, id="gptq"),
        pytest.param("GPTQ or AWQ", {
            "a.qweight": "int32", "a.scales": "float16",
        }, id="gptq-without-zero-points"),
        pytest.param("compressed-tensors or ModelOpt", {
            "a.weight": "uint16", "a.weight_scale": "float64",
        }, id="nobody's-types"),
        pytest.param("MLX", {
            "a.weight": "uint32", "a.scales": "bfloat16", "a.biases": "bfloat16",
        }, id="mlx"),
        pytest.param("ComfyUI", {
            "a.weight": "float8e4m3fn", "a.scale_weight": "float32", "a.scale_input": "float32",
        }, id="comfyui"),
        pytest.param("bitsandbytes", {
            "a.weight": "uint8", "a.weight.absmax": "float32", "a.weight.quant_map": "float32",
            "a.weight.quant_state.bitsandbytes__nf4": "uint8",
        }, id="bitsandbytes-nf4"),
        pytest.param("bitsandbytes", {
            "a.weight": "int8", "a.SCB": "float32", "a.weight_format": "uint8",
        }, id="bitsandbytes-int8"),
        pytest.param("qtool, without its metadata", {
            "a.weight": "uint8", "a.weight.scale": "float32", "a.weight.zero_point": "uint8",
        }, id="qtool"),
    ],
)  # fmt: skip
def test_the_tool_is_told_for_codes_and_parameters_alone(
    tool: str, tensors: dict[str, str]
) -> None:
    others = [info("b.weight", "float32", 4, 4), info("a.bias", "float32", 4),
              info("b.weight_scale", "float32", 1), info("ids", "int64", 4)]  # fmt: skip
    quantized = [info(name, dtype, 4, 4) for name, dtype in tensors.items()]
    for order in ([*quantized, *others], [*others, *reversed(quantized)]):
        assert recognise(order) == dict.fromkeys(tensors, tool)


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"a.weight": "float32", "a.weight_scale": "float32"}, id="float-codes"),
        pytest.param({"a.weight": "bfloat16", "a.scales": "bfloat16"}, id="a-layer-named-scales"),
        pytest.param({"norm": "float16", "norm.scale": "float16"}, id="a-norm-with-a-scale"),
        pytest.param({"a.weight": "int8"}, id="codes-without-parameters"),
        pytest.param({"a.weight_scale": "float32"}, id="parameters-without-codes"),
        pytest.param({"a.weight": "int8", "b.weight_scale": "float32"}, id="another-module"),
        pytest.param({"mask": "bool", "mask.scale": "float32"}, id="bool"),
    ],
)
def test_other_tensors_are_left_alone(tensors: dict[str, str]) -> None:
    assert recognise([info(name, dtype, 4) for name, dtype in tensors.items()]) == {}


def test_the_first_tool_that_fits_is_told() -> None:
    tensors = {"a.weight": "int8", "a.weight_scale": "float32", "a.SCB": "float32"}
    found = recognise([info(name, dtype, 4, 4) for name, dtype in tensors.items()])
    assert found == dict.fromkeys(["a.weight", "a.weight_scale"], "compressed-tensors")


def test_two_tools_in_one_file_are_told_apart() -> None:
    tensors = {"a.weight": "int8", "a.SCB": "float32", "b.qweight": "int32", "b.scales": "float16"}
    found = recognise([info(name, dtype, 4) for name, dtype in tensors.items()])
    assert found == {"a.weight": "bitsandbytes", "a.SCB": "bitsandbytes",
                     "b.qweight": "GPTQ or AWQ", "b.scales": "GPTQ or AWQ"}  # fmt: skip


SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(data=st.data())
def test_tensors_of_any_shape_are_described(data: st.DataObject) -> None:
    """Whatever a damaged file holds, there is an answer, and shapes are of whole numbers."""
    layout = data.draw(st.sampled_from(LAYOUTS))
    endings = {layout.codes[0]: layout.codes[1], layout.scale[0]: layout.scale[1]}
    endings |= dict.fromkeys([*layout.needs, layout.zero_point, *layout.extras], ("int32",))
    infos = [
        info(f"a{ending}", data.draw(st.sampled_from(sorted(types or ("int8",)))),
             *data.draw(SHAPES))
        for ending, types in endings.items() if ending in layout.needs or data.draw(st.booleans())
        or ending in (layout.codes[0], layout.scale[0])
    ]  # fmt: skip
    bits, size = data.draw(st.tuples(*[st.sampled_from([None, 1, 3, 4, 8, 10**9])] * 2))
    for weight in find(infos, Config(None, bits, size)):
        shape, how = quantization(weight, lambda name: np.array(data.draw(SHAPES)))
        assert shape is None or all(type(n) is int and n >= 0 for n in shape)
        assert how["granularity"] in (None, "per_tensor", "per_axis", "blocked", "tiled")
        assert {part.name for part in weight.parts} <= {i.name for i in infos}

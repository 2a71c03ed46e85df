"""The kernels and the streaming engine give the bytes and the figures of the plain path."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streaming import check_restored, check_same, values

import qtool
from qtool import engine, memory, ops
from qtool.dtypes import DTYPES, TARGETS, resolve
from qtool.engine import (
    can_stream,
    operators,
    plain,
    request,
    searching,
    stream,
    tiling,
)
from qtool.errors import SpecError, TensorError
from qtool.kernels.tensor import TileQuantizer, TileRestorer, grid
from qtool.packing import pack as packing_pack
from qtool.pool import in_order, started
from qtool.spec import (
    Blocked,
    Granularity,
    OnnxGranularity,
    PerAxis,
    PerTensor,
    QuantSpec,
    Shape,
    Tiled,
    reader_of,
)

Array = NDArray[Any]

SHAPES: list[Shape] = [(1,), (97, 384), (37, 33, 5), (50_001,), (13, 4099), (5, 7, 2, 150), (2, 1)]
SOURCES = [np.float32, np.float16, ml_dtypes.bfloat16]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"symmetric": False},
    {"narrow_range": True},
    {"scale_dtype": "float8e4m3fn"},
    {"scale_dtype": "float8e4m3fn", "global_scale": True},
    {"scale_dtype": "float8e4m3fn", "global_scale": True, "method": "mse"},
    {"scale_dtype": "float8e8m0"},
    {"scale_dtype": "float8e8m0", "symmetric": True, "mx_rule": "even"},
    {"scale_dtype": "bfloat16", "symmetric": True},
    {"method": "mse"},
    {"method": "optimal"},
    {"method": "optimal", "scale_dtype": "bfloat16", "negative_scale": True, "symmetric": True},
    {"method": "optimal", "scale_dtype": "float8e4m3fn", "global_scale": True},
    {"method": "mse", "symmetric": False},
    {"method": "mse", "scale_dtype": "float16", "negative_scale": True},
    {"method": "absmax", "negative_scale": True},
    {"semantics": "onednn"},
    {"semantics": "dynamic"},
]


def onnx_granularities(shape: Shape) -> list[OnnxGranularity]:
    middle = len(shape) // 2
    return [
        PerTensor(), PerAxis(0), PerAxis(-1), PerAxis(middle), Blocked(-1, 32), Blocked(0, 3),
        Blocked(middle, 2), Blocked(-1, 5000),
    ]  # fmt: skip


def granularities(shape: Shape) -> list[Granularity]:
    tiles = [(128, 128), (3, 32), (1, 5000), (5000, 1)] if len(shape) > 1 else []
    return [*onnx_granularities(shape), *map(Tiled, tiles)]


def specs(shape: Shape, target: str, nonfinite: str) -> Iterator[QuantSpec]:
    """Every spec of the target that is possible and that the kernels know."""
    for granularity, options in itertools.product(granularities(shape), OPTIONS):
        try:
            spec = QuantSpec(target, granularity, nonfinite=nonfinite, **options)
            asked = request("x", shape, DTYPES["float32"], spec, None, None)
        except SpecError:
            continue
        if (spec.semantics != "dynamic" or nonfinite == "error") and can_stream(asked):
            yield spec


@pytest.fixture(params=[(4096, 1 << 20), (8192, 100), (tiling.TILE, 1 << 21)], ids=str)
def _tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles; groups that are read with their tile, and ones that need a pass of their own."""
    tile, longest = request.param
    monkeypatch.setattr(tiling, "TILE", tile)
    monkeypatch.setattr(tiling, "_SMALL_TILE", min(tile, tiling._SMALL_TILE))
    monkeypatch.setattr(tiling, "LARGEST_WINDOW", request.param[1])
    monkeypatch.setattr(stream, "_LONGEST_SPAN", longest)
    monkeypatch.setattr(stream, "_GROUPS", max(longest, 1000) // 10)


@pytest.mark.usefixtures("_tiling")
@pytest.mark.parametrize("target", [dtype.name for dtype in TARGETS])
def test_streaming_equals_the_plain_path(target: str) -> None:
    combinations = itertools.cycle(itertools.product(SOURCES, (1, 2), (False, True)))
    for shape in SHAPES:
        for number, (source, jobs, nonfinite) in zip(range(8), combinations, strict=False):
            possible = list(specs(shape, target, "allow" if nonfinite else "error"))
            spec = possible[(number * 7) % len(possible)]
            check_same(values(shape, source, number, nonfinite=nonfinite), spec, jobs)


@st.composite
def tiled(draw: st.DrawFn) -> tuple[Shape, Tiled]:
    """A shape of rank 2 and more of up to some ten thousand elements, and tiles of any shape."""
    sides = draw(st.sampled_from([(200, 200), (1, 20000), (20000, 1), (40, 700)]))
    matrix = tuple(draw(st.integers(1, side)) for side in sides)
    before = draw(st.sampled_from([(), (), (1,), (3,), (2, 3)])) if matrix[0] <= 40 else ()
    rows, columns = (
        draw(st.one_of(st.integers(1, side + 3), st.just(128), st.integers(1, 9)))
        for side in matrix
    )
    return (*before, *matrix), Tiled((rows, columns))


@given(
    case=tiled(),
    target=st.sampled_from([d.name for d in TARGETS]),
    options=st.sampled_from(
        [o for o in OPTIONS if o.get("semantics", "onnx") == "onnx" and "narrow_range" not in o]
    ),
    source=st.sampled_from(SOURCES),
    nonfinite=st.booleans(),
    jobs=st.integers(1, 3),
    tile=st.sampled_from([4096, 8192, tiling.TILE]),
    longest=st.sampled_from([1, 5000, 1 << 22]),
    seed=st.integers(0, 99),
)
@settings(max_examples=300)
def test_tiles_and_global_scales_stream_as_in_the_plain_path(
    case: tuple[Shape, Tiled],
    target: str,
    options: dict[str, Any],
    source: Any,
    nonfinite: bool,
    jobs: int,
    tile: int,
    longest: int,
    seed: int,
) -> None:
    shape, granularity = case
    if not DTYPES[target].is_integer and not options.get("symmetric", True):
        options = {}
    if not DTYPES[target].is_integer and "negative_scale" in options:
        options = {"method": "mse"}
    if DTYPES[target].kind == "uint" and {"global_scale", "negative_scale"} & set(options):
        options = {**options, "symmetric": True}
    if options.get("method") == "optimal":  # not by parts, and not of 16 bits with float32 scales
        longest = 1 << 22
        options = options if DTYPES[target].bits < 16 else {"method": "mse"}
    allowed = "allow" if nonfinite else "error"
    spec = QuantSpec(target, granularity, nonfinite=allowed, **options)
    x = values(shape, source, seed, nonfinite=nonfinite)
    if seed % 3 == 0:
        x[..., x.shape[-2] // 2 :, :] = 0  # whole tiles of zeros
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiling, "TILE", tile)
        patched.setattr(tiling, "_SMALL_TILE", min(tile, 8192))
        patched.setattr(stream, "_LONGEST_SPAN", longest)
        patched.setattr(tiling, "LARGEST_WINDOW", longest)
        patched.setattr(searching, "_TILE", tile // 8)
        check_same(x, spec, jobs)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_the_magnitude_that_fused_tensors_share_is_that_of_all_finite_elements(
    method: str, source: Any, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values((37, 1111), source, 5, nonfinite=True)
    largest = float(np.abs(x.astype(np.float64))[np.isfinite(x.astype(np.float64))].max())
    spec = QuantSpec("float4e2m1", Blocked(1, 16), method=method, scale_dtype="float8e4m3fn",
                     global_scale=True, nonfinite="allow")  # fmt: skip
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    for pays in (False, True):
        monkeypatch.setattr(engine, "kernels_pay", lambda elements, pays=pays: pays)
        for over in (None, 1e4):
            asked = request("x", x.shape, resolve(x.dtype), spec, None, None, over)
            assert engine.find_absmax(reader_of(x), asked, jobs=jobs) == largest
            want, got = plain.quantize(x, asked), stream.quantize_array(x, asked, jobs=jobs)
            # the smallest power of two of which 6 * 448 times reach the magnitude; twice that where
            # a search shares it
            power = 2.0 ** np.ceil(np.log2((over or largest) / 2688))
            assert want.global_scale == got.global_scale
            if method == "absmax" or over:
                assert got.global_scale == power * (1 + (method == "mse"))
            assert (want.y.tobytes(), want.scale.tobytes()) == (
                got.y.tobytes(),
                got.scale.tobytes(),
            )


@pytest.mark.parametrize("target", ["int2", "uint2", "int4", "uint4", "float4e2m1", "int8"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float8e8m0"])
@pytest.mark.parametrize("longest", [100, 1 << 20])
def test_scales_of_the_largest_values_are_those_of_the_plain_path(
    target: str, storage: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups whose values would hardly be finite keep the scales that the search begins with."""
    monkeypatch.setattr(tiling, "LARGEST_WINDOW", longest)
    largest = np.finfo(np.float32).max * np.random.default_rng(6).choice([1, 0.3, 0.2], (64, 1))
    x = (np.random.default_rng(7).uniform(-1, 1, (64, 64)) * largest).astype(np.float32)
    for granularity in (Blocked(1, 16), PerAxis(1)):
        spec = QuantSpec(target, granularity, method="mse", scale_dtype=storage)
        check_same(x, spec, 1)


def test_a_magnitude_is_refused_where_an_element_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = QuantSpec("float4e2m1", Blocked(1, 16), scale_dtype="float8e4m3fn", global_scale=True)
    x = values((37, 1111), np.float32, 5, nonfinite=True)
    asked = request("w", x.shape, DTYPES["float32"], spec, None, None)
    messages = []
    for quantize in (plain.quantize, lambda x, asked: stream.quantize_array(x, asked, jobs=2)):
        with pytest.raises(TensorError) as caught:
            quantize(x, asked)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith("tensor w: nan at [0, 0]: 3 of 41107 values are not finite")


@pytest.mark.parametrize("target", ["int4", "uint8", "float8e4m3fn", "float6e3m2"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float8e8m0", "float8e4m3fn"])
def test_given_scales_of_every_type_divide_as_in_the_plain_path(target: str, storage: str) -> None:
    x = values((64, 96), np.float32, 1, nonfinite=False)
    scale = np.exp2(np.arange(64) % 5 - 2).astype(DTYPES[storage].numpy)
    spec = QuantSpec(target, PerAxis(0), precision="float32")
    check_same(x, spec, 2, scale=scale)
    if DTYPES[target].is_integer:
        check_same(x, spec, 2, scale=scale, zero_point=np.arange(64) % 8)


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    target=st.sampled_from(TARGETS),
)
@settings(max_examples=150)
def test_any_bits_give_the_codes_of_the_operator(
    bits: list[int], scale: float, target: Any
) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    spec = QuantSpec(target, PerTensor(), nonfinite="allow")
    asked = request("x", x.shape, DTYPES["float32"], spec, np.float32(scale), None)
    got = stream.quantize_array(x, asked, jobs=1).y
    want = ops.quantize_linear(x, np.float32(scale), output_dtype=target)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
def test_every_value_of_16_bits_is_read_as_its_float32(source: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(source)
    finite = every[np.isfinite(every.astype(np.float32))]
    spec = QuantSpec("uint8", PerAxis(0), nonfinite="error")
    ranges = TileQuantizer(finite.shape, resolve(finite.dtype), spec).ranges(
        finite, 0, 0, finite.size
    )
    assert ranges is not None
    for found in ranges:
        assert found.tobytes() == finite.astype(np.float32).tobytes()
    check_same(every, QuantSpec("int8", PerTensor(), nonfinite="allow"), 1, scale=np.float32(0.1))


@pytest.mark.parametrize("target", [d.name for d in TARGETS if not d.is_integer])
def test_halfway_points_and_their_neighbours_round_as_the_operator_does(target: str) -> None:
    dtype = DTYPES[target]
    every = np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy).astype(np.float64)
    points = np.unique(every[np.isfinite(every)])
    middles = ((points[1:] + points[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, -np.float32(np.inf))]
    x = np.concatenate([points.astype(np.float32), middles, *beside, [-0.0, 1e30, -1e30]])
    spec = QuantSpec(target, PerTensor())
    asked = request("x", x.shape, DTYPES["float32"], spec, np.float32(1), None)
    got = stream.quantize_array(x.astype(np.float32), asked, jobs=1).y
    want = ops.quantize_linear(x.astype(np.float32), np.float32(1), output_dtype=target)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("target", ["int2", "uint4", "float4e2m1", "float6e3m2"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 1023, 1026, 4096, 4099])
def test_packing_equals_the_plain_one_and_comes_back(target: str, count: int) -> None:
    dtype = DTYPES[target]
    x = values((count,), np.float32, count, nonfinite=False)
    spec = QuantSpec(target, PerTensor())
    scale, zeros = np.float32([0.25]), np.empty(0, np.float32)
    out = np.empty(dtype.nbytes(count), np.uint8)
    TileQuantizer(x.shape, DTYPES["float32"], spec).quantize(x, scale, zeros, 0, 0, dtype.bits, out)
    codes = ops.quantize_linear(x, np.float32(0.25), output_dtype=target)
    assert out.tobytes() == packing_pack(codes, dtype).tobytes()
    back = np.empty(count, np.float32)
    for width, stored in ((dtype.bits, out), (8, codes.view(np.uint8))):
        restorer = TileRestorer(x.shape, dtype, PerTensor(), scale, zeros, width)
        restorer.dequantize(stored, 0, back)
        assert back.tolist() == (codes.astype(np.float32) * np.float32(0.25)).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_gets_the_scale_of_its_group(shape: Shape) -> None:
    ones = np.ones(int(np.prod(shape)), np.uint8)
    for granularity in granularities(shape):
        resolved = granularity.resolve(shape)
        scale_shape = resolved.scale_shape(shape)
        numbers = np.arange(int(np.prod(scale_shape)), dtype=np.float32).reshape(scale_shape)
        attributes = {"axis": 0, "block_size": 0} | resolved.attributes
        if isinstance(resolved, Tiled):
            rows, columns = (
                np.arange(n) // k for n, k in zip(shape[-2:], resolved.shape, strict=True)
            )
            want = numbers[..., rows[:, None], columns]
        else:
            want = np.broadcast_to(ops.expand(numbers, shape, **attributes, thing="x"), shape)
        none = np.empty(0, np.float32)
        restorer = TileRestorer(shape, DTYPES["uint8"], resolved, numbers.reshape(-1), none, 8)
        for start in (0, 1, 777):
            out = np.empty(max(0, ones.size - start), np.float32)
            restorer.dequantize(ones[start:], start, out)
            assert out.tolist() == want.reshape(-1)[start:].tolist()


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_leave_out_what_is_not_finite_and_order_negative_values(*, symmetric: bool) -> None:
    x = np.float32([[1, -3, np.nan, 2], [-np.inf, -0.5, -0.25, np.inf], [np.nan] * 4])
    ends = ([-3, -0.5, 0], [3, 0.5, 0]) if symmetric else ([-3, -0.5, 0], [2, 0, 0])
    for nonfinite, want in (("allow", ends), ("error", None)):
        spec = QuantSpec("int8", PerAxis(0), symmetric=symmetric, nonfinite=nonfinite)
        found = TileQuantizer(x.shape, DTYPES["float32"], spec).ranges(x.reshape(-1), 0, 0, 3)
        assert (found and tuple(part.tolist() for part in found)) == want
    negative_nan = np.array([0xFFFFFFFF, 0], np.uint32).view(np.float32)
    spec = QuantSpec("int8", PerTensor(), symmetric=symmetric)
    assert TileQuantizer((2,), DTYPES["float32"], spec).ranges(negative_nan, 0, 0, 1) is None


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_a_value_that_is_not_finite_is_named_as_in_the_plain_path(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    x = values((100, 384), np.float32, 0, nonfinite=False)
    x[20, 7], x[90, 1] = -np.inf, np.nan
    asked = request("w", x.shape, DTYPES["float32"], QuantSpec("int8", PerAxis(0)), None, None)
    text = "tensor w: -inf at [20, 7]: 2 of 38400 values are not finite; mend the weights, or use "
    for quantize in (plain.quantize, lambda x, asked: stream.quantize_array(x, asked, jobs=jobs)):
        with pytest.raises(TensorError) as caught:
            quantize(x, asked)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("jobs", [1, 3])
def test_work_is_done_in_order_and_its_failure_is_the_first_one(jobs: int) -> None:
    done: list[int] = []
    in_order(lambda n: n * n, range(100), jobs, done.append)
    assert done == [n * n for n in range(100)]

    def fail(number: int) -> int:
        if number % 10 == 7:
            raise ValueError(number)
        return number

    done.clear()
    with pytest.raises(ValueError, match=r"^7$"):
        in_order(fail, range(100), jobs, done.append)
    assert done == list(range(7))


def test_threads_that_find_too_little_memory_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter([False, False, True])
    monkeypatch.setattr(memory, "is_short", lambda _: next(found))
    before = threading.active_count()
    with pytest.raises(MemoryError):
        started(3, "short")
    gc.collect()  # with their pool threads end that nobody can give work
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_no_thread_is_at_work_after_an_error_of_who_takes_the_results() -> None:
    ended: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.02)
        ended.append(number)
        return number

    def take(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_order(work, range(100), 3, take)
    count = len(ended)
    time.sleep(0.1)
    assert len(ended) == count < 10


def test_no_thread_is_at_work_after_signals_while_waiting() -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.3)
        ended.append(number)

    def interrupt() -> None:
        for _ in range(3):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            in_order(work, range(100), 2, lambda _: None)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert sorted(ended) == [0, 1]
    time.sleep(0.4)
    assert sorted(ended) == [0, 1]


def test_nan_without_a_zero_point_stays_within_a_narrow_range() -> None:
    x = np.ones(5000, np.float32)
    x[5] = np.nan
    spec = QuantSpec("uint8", PerTensor(), narrow_range=True, nonfinite="allow")
    check_same(x, spec, 2, scale=np.float32(1))


def test_dynamic_refuses_nan_before_a_range_that_overflows() -> None:
    x = np.zeros(5000, np.float32)
    x[:3] = np.nan, 3e38, -3e38
    spec = QuantSpec("uint8", PerTensor(), semantics="dynamic", nonfinite="allow")
    asked = request("x", x.shape, DTYPES["float32"], spec, None, None)
    for quantize in (plain.quantize, lambda x, asked: stream.quantize_array(x, asked, jobs=2)):
        with pytest.raises(TensorError, match=r"nan at \[0\]: 1 of 5000 values is") as caught:
            quantize(x, asked)
        assert caught.value.remedy == "mend the weights"


RESTORED = [
    pytest.param(target.name, output, id=f"{target}-{output}")
    for target in TARGETS
    for output in ("float32", "float16", "bfloat16", "float64")
    if target.bits <= 8 or DTYPES[output].bits >= 32  # a difference of 16-bit codes needs more
]


@pytest.mark.parametrize(("target", "output"), RESTORED)
def test_dequantizing_in_tiles_equals_the_operator(
    target: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_SMALL_TILE", 4096)
    for shape in SHAPES[2:6:2]:
        for number, granularity in enumerate(granularities(shape)):
            options: dict[str, Any] = {"symmetric": bool(number % 2)}
            if not DTYPES[target].is_integer:
                options = {}
            if options.get("symmetric", True) and number % 3 == 0:
                options |= {"symmetric": True, "scale_dtype": "float8e4m3fn", "global_scale": True}
            spec = QuantSpec(target, granularity, **options)
            x = values(shape, np.float32, number, nonfinite=False)
            asked = request("x", shape, DTYPES["float32"], spec, None, None)
            check_restored(plain.quantize(x, asked), output)


def test_the_grid_of_float8e4m3fn_is_what_the_format_says() -> None:
    numbers, limits = grid(DTYPES["float8e4m3fn"])
    normal, *others = numbers.tolist()
    assert others == [120 << 3, 0x7E, 0x80, 0x7F]
    assert np.int32(normal).view(np.float32) == 2.0**-6
    assert limits.tolist() == [2.0**14]


@pytest.mark.parametrize("target", [dtype.name for dtype in TARGETS])
def test_the_operator_gives_the_same_codes_for_large_arrays(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "kernels_pay", lambda elements: True)
    dtype = DTYPES[target]
    for number, shape in enumerate(SHAPES):
        for source, granularity in itertools.product(SOURCES, onnx_granularities(shape)):
            x = values(shape, source, number, nonfinite=True)
            resolved = granularity.resolve(shape)
            scale_shape = resolved.scale_shape(shape)
            count = int(np.prod(scale_shape))
            scale = (np.arange(1, count + 1) % 7 - 3.5).astype(np.float32).reshape(scale_shape)
            zero_point = None
            if dtype.is_integer and number % 2:
                zero_point = (np.arange(count) % 2).astype(dtype.numpy).reshape(scale_shape)
            arguments = (x, scale, zero_point)
            options = {"output_dtype": target, **resolved.attributes}
            got = qtool.quantize_linear(*arguments, **options)
            want = ops.quantize_linear(*arguments, **options)
            assert got.dtype == want.dtype
            assert got.tobytes() == want.tobytes()


def test_the_operator_refuses_shapes_of_large_arrays_as_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "kernels_pay", lambda elements: True)
    x = np.ones((4, 6), np.float32)
    with pytest.raises(SpecError, match="y_scale: length 5 for axis 1"):
        qtool.quantize_linear(x, np.ones(5, np.float32))
    with pytest.raises(SpecError, match="y_zero_point"):
        qtool.quantize_linear(x, np.ones(6, np.float32), np.zeros(5, np.uint8))
    with pytest.raises(SpecError, match="cannot divide"):
        qtool.quantize_linear(x, np.zeros(6, np.float32))
    assert qtool.quantize_linear(x[:, ::2], np.float32([0.5])).tolist() == [[2, 2, 2]] * 4


def test_signalling_nan_gives_no_warning_and_empty_tensors_take_the_plain_path() -> None:
    x = np.full(5000, 0x7F81, np.uint16).view(ml_dtypes.bfloat16)
    spec = QuantSpec("int8", PerTensor())
    asked = request("x", x.shape, DTYPES["bfloat16"], spec, None, None)
    for quantize in (plain.quantize, lambda x, asked: stream.quantize_array(x, asked, jobs=1)):
        with pytest.raises(TensorError, match=r"nan at \[0\]: 5000 of 5000 values are not finite"):
            quantize(x, asked)
    assert not can_stream(request("x", (3, 0), DTYPES["bfloat16"], spec, None, None))

"""`qtool inspect` on files of other tools: what it says of the weights, and what it warns of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command import ok, refused
from foreign_files import (
    FILES,
    IN,
    OUT,
    Foreign,
    awq,
    e4m3,
    fp4,
    gptq,
    mlx,
    nf4,
    note,
    pack_quantized,
    packed,
    powers,
    scales,
    unsigned,
)
from safetensors.numpy import save_file


def inspected(foreign: Foreign, folder: Path, *options: str) -> tuple[dict[str, Any], Any]:
    """The row of the weight, and the rows of all other tensors by name."""
    found = ok("inspect", foreign.save(folder), "--json", *options).json
    rows = {row["name"]: row for row in found["tensors"]}
    assert found["totals"]["tensors"] == len(rows)
    return rows.pop("a.weight"), rows


@pytest.mark.parametrize("name", FILES)
def test_a_weight_is_described_from_its_headers(name: str, tmp_path: Path) -> None:
    foreign = FILES[name]()
    row, others = inspected(foreign, tmp_path)
    how = row["quantization"]
    assert {key: how[key] for key in foreign.known} == foreign.known
    assert row["shape"] == [OUT, IN]
    assert how["problems"] == []
    parts = {k: v for k, v in foreign.tensors.items() if k.startswith("a.")}
    assert sorted(how["parts"]) == sorted(parts)
    assert row["bytes"] == sum(part.nbytes for part in parts.values())
    assert others.keys() == {"norm.weight", "ids"} | (foreign.tensors.keys() - parts.keys())


@pytest.mark.parametrize("name", FILES)
def test_the_equation_gives_the_weight(name: str, tmp_path: Path) -> None:
    foreign = FILES[name]()
    how = inspected(foreign, tmp_path)[0]["quantization"]
    values = eval(how["equation"], {"__builtins__": {}}, dict(foreign.values))
    np.testing.assert_allclose(values, foreign.weight, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", FILES)
def test_good_values_have_no_problems(name: str, tmp_path: Path) -> None:
    foreign = FILES[name]()
    row, others = inspected(foreign, tmp_path, "--stats")
    how = row["quantization"]
    assert how["problems"] == []
    assert (how["scales"]["zero_count"], how["scales"]["nonfinite_count"]) == (0, 0)
    assert row["stats"] is None
    assert others["norm.weight"]["stats"]["max"] == 1


def test_one_line_tells_each_way_of_quantizing(tmp_path: Path) -> None:
    foreign = gptq(version="gptq")
    tensors = {f"{base}{k[1:]}": v for base in ("a", "b") for k, v in foreign.tensors.items()}
    path = replace(foreign, tensors=tensors).save(tmp_path)
    lines = ok("inspect", path).out.decode().splitlines()
    assert lines[0].endswith("4 tensors, quantized with GPTQ")
    assert lines[-1] == ("2 weights in GPTQ v1: uint4 /32, float16 scales, "
                         "(code - qzeros - 1) * scale")  # fmt: skip
    assert ["a.weight", "uint4", "/32", f"{OUT}x{IN}", "5.8", "kB"] in [x.split() for x in lines]


def test_a_folder_is_described_like_its_file(tmp_path: Path) -> None:
    """Through its configuration: MLX's bits are in no header."""
    foreign = mlx(8, 32)
    path = foreign.save(tmp_path)
    for options in ([], ["--stats"]):
        rows = [ok("inspect", p, "--json", *options).json["tensors"] for p in (path, tmp_path)]
        assert rows[0] == rows[1]
        [row] = [row for row in rows[1] if row["quantization"]]
        assert {key: row["quantization"][key] for key in foreign.known} == foreign.known


def test_tiles_are_shown(tmp_path: Path) -> None:
    path = FILES["block-fp8"]().save(tmp_path)
    assert "float8e4m3fn /8x128" in ok("inspect", path).out.decode()


def test_a_file_of_another_tool_is_not_quantized_again(tmp_path: Path) -> None:
    for name, make in FILES.items():
        (tmp_path / name).mkdir()
        path = make().save(tmp_path / name)
        tool = ok("inspect", path, "--json").json["quantized_by"]
        line = refused("quantize", path, "--dtype", "int8")
        assert "is quantized already (" in line
        assert len(tool) == 1


# ---------------------------------------------------------------- headers that do not tell all


def test_without_a_configuration_mlx_does_not_tell_its_bits(tmp_path: Path) -> None:
    row, _ = inspected(replace(mlx(4), documents={}), tmp_path)
    how = row["quantization"]
    assert (how["layout"], how["dtype"], how["block_size"]) == ("MLX affine", None, None)
    assert row["dtype"] == "uint32"
    assert ok("inspect", tmp_path / "model.safetensors").code == 0


def test_modules_of_mlx_may_have_bits_of_their_own(tmp_path: Path) -> None:
    foreign = mlx(8, 32)
    said = {"group_size": 64, "bits": 4, "a": {"group_size": 32, "bits": 8}, "lm_head": False}
    row, _ = inspected(
        replace(foreign, documents={"config.json": {"quantization": said}}), tmp_path
    )
    assert (row["quantization"]["dtype"], row["quantization"]["block_size"]) == ("uint8", 32)
    assert row["quantization"]["problems"] == []


def test_bits_of_compressed_tensors_follow_from_zero_points_or_the_configuration(
    tmp_path: Path,
) -> None:
    foreign = pack_quantized(8, zero=True)
    without = {k: v for k, v in foreign.tensors.items() if k != "a.weight_shape"}
    row, _ = inspected(replace(foreign, tensors=without), tmp_path)
    assert (row["quantization"]["dtype"], row["shape"]) == ("int8", [OUT, IN])
    foreign = pack_quantized(4)
    without = {k: v for k, v in foreign.tensors.items() if k != "a.weight_shape"}
    weights = {"num_bits": 4, "group_size": 64, "type": "int"}
    document = {
        "config.json": {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": weights}},
            }
        }
    }
    row, _ = inspected(replace(foreign, tensors=without, documents=document), tmp_path)
    assert (row["quantization"]["dtype"], row["shape"]) == ("int4", [OUT, IN])


def test_the_configuration_decides_between_tools_of_the_same_spelling(tmp_path: Path) -> None:
    foreign = FILES["ct-float-tensor"]()
    for method, layout in (("compressed-tensors", "compressed-tensors float-quantized"),
                           ("fp8", "float8"), ("none of these", "compressed-tensors float-"
                           "quantized")):  # fmt: skip
        document = {"config.json": {"quantization_config": {"quant_method": method}}}
        row, _ = inspected(replace(foreign, documents=document), tmp_path)
        assert row["quantization"]["layout"] == layout


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"quantization_config": 3}',
        b"\xff",
        b'{"quantization": {"bits": "4", "a": {"bits": true}}}',
    ],
)
def test_a_damaged_configuration_says_nothing(content: bytes, tmp_path: Path) -> None:
    path = gptq().save(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    [row] = [r for r in ok("inspect", path, "--json").json["tensors"] if r["quantization"]]
    assert (row["quantization"]["layout"], row["quantization"]["dtype"]) == ("GPTQ v1", "uint4")


def test_comfyui_is_known_by_its_metadata_too(tmp_path: Path) -> None:
    foreign = FILES["comfyui-fp8"]()
    tensors = {k: v for k, v in foreign.tensors.items() if k != "a.comfy_quant"}
    layers = {"format_version": "1.0", "layers": {"a": {"format": "float8_e4m3fn"}}}
    save_file(tensors, tmp_path / "m.safetensors",
              metadata={"_quantization_metadata": json.dumps(layers)})  # fmt: skip
    [row] = ok("inspect", tmp_path / "m.safetensors", "--json").json["tensors"]
    assert row["quantization"]["layout"] == "ComfyUI float8"


def test_swizzled_scales_of_comfyui_have_blocks_of_the_format(tmp_path: Path) -> None:
    """Padded to whole squares of 128 rows and 4 blocks, their shape does not tell."""
    scale = e4m3(128, 16)
    foreign = fp4("ComfyUI nvfp4", 1, ".weight", e4m3(OUT, IN),
                  over=(".weight_scale_2", 0.5), scale_dtype="float8e4m3fn")  # fmt: skip
    tensors = {**foreign.tensors, "a.weight_scale": scale, **note(format="nvfp4")}
    row, _ = inspected(replace(foreign, tensors=tensors), tmp_path)
    how = row["quantization"]
    assert (how["layout"], how["block_size"], row["shape"]) == ("ComfyUI nvfp4", 16, [OUT, IN])


def test_only_small_tensors_are_read_without_stats(tmp_path: Path) -> None:
    """A file of 1 TB, all holes."""
    header = json.dumps({
        "a.qweight": {"dtype": "I32", "shape": [2**17, 2**20], "data_offsets": [0, 2**39]},
        "a.qzeros": {"dtype": "I32", "shape": [1, 2**17], "data_offsets": [2**39, 2**39 + 2**19]},
        "a.scales": {"dtype": "F16", "shape": [1, 2**20],
                     "data_offsets": [2**39 + 2**19, 2**39 + 2**19 + 2**21]},
    }).encode()  # fmt: skip
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**39 + 2**19 + 2**21)
    [row] = ok("inspect", path, "--json").json["tensors"]
    assert (row["shape"], row["quantization"]["granularity"]) == ([2**20, 2**20], "per_axis")


# ---------------------------------------------------------------- problems in headers

MARLIN = "blocks of 16, but vLLM's Marlin kernels take 32, 64, 128 alone"
PROBLEMS: list[Any] = [
    ("gptq-16", lambda: gptq(4, 16), MARLIN),
    ("ct-16", lambda: pack_quantized(4, 16),
     MARLIN),
    ("mlx-16", lambda: mlx(4, 16), "blocks of 16, but MLX takes 32, 64, 128 alone"),
    ("nvfp4-32", lambda: fp4("", 32, ".weight_packed", e4m3(OUT, IN // 32),
     over=(".weight_global_scale", 2.0), scale_dtype="float8e4m3fn"),
     "blocks of 32, but NVFP4 has 16 alone"),
    ("said-bits", lambda: said(gptq(8), bits=4), "the configuration says 4 bits, the shapes 8"),
    ("said-blocks", lambda: said(awq(64), group_size=128),
     "the configuration says blocks of 128, the shapes 64"),
    ("scale-shape", lambda: replace(FILES["ct-float-channel"](), tensors={
        **FILES["ct-float-channel"]().tensors, "a.weight_scale": scales(3, 5)}),
     "scales of shape [3, 5] fit no blocks of [32, 256]"),
]  # fmt: skip


def said(foreign: Foreign, **changes: Any) -> Foreign:
    """The file beside a configuration that says something else."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128} | changes
    if "a.g_idx" in foreign.tensors:
        config["group_size"] = 32
    return replace(foreign, documents={"config.json": {"quantization_config": config}})


@pytest.mark.parametrize(
    ("make", "problem"), [pytest.param(*case[1:], id=case[0]) for case in PROBLEMS]
)
def test_what_readers_refuse_is_told_from_headers(
    make: Callable[[], Foreign], problem: str, tmp_path: Path
) -> None:
    row, _ = inspected(make(), tmp_path)
    assert row["quantization"]["problems"] == [problem]
    lines = ok("inspect", tmp_path / "model.safetensors").out.decode().splitlines()
    assert lines[-1] == f"problem in a.weight: {problem}"


def test_rows_that_are_no_whole_blocks_are_told(tmp_path: Path) -> None:
    codes = unsigned(4, OUT, 200)
    save_file({"a.weight_packed": packed(codes, 4, np.int32), "a.weight_scale": scales(OUT, 2),
               "a.weight_shape": np.array([OUT, 200])}, tmp_path / "m.safetensors")  # fmt: skip
    [row] = ok("inspect", tmp_path / "m.safetensors", "--json").json["tensors"]
    assert row["shape"] == [OUT, 200]
    assert row["quantization"]["block_size"] == 100  # with whole blocks, if no other size is said
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "group_size": 128}}}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    [row] = ok("inspect", tmp_path / "m.safetensors", "--json").json["tensors"]
    assert row["quantization"]["problems"] == ["rows of 200 are not whole blocks of 128"]


def test_the_same_problem_of_many_weights_takes_one_line(tmp_path: Path) -> None:
    foreign = gptq(4, 16)
    tensors = {f"{base}{k[1:]}": v for base in "abc" for k, v in foreign.tensors.items()}
    path = replace(foreign, tensors=tensors).save(tmp_path)
    lines = ok("inspect", path).out.decode().splitlines()
    assert [line for line in lines if line.startswith("problem")] == [
        f"problem in a.weight and 2 more: {MARLIN}"
    ]


# ---------------------------------------------------------------- problems in values


def spoiled(foreign: Foreign, part: str, **values: Any) -> Foreign:
    """The file with other values at some places of a tensor."""
    array = foreign.tensors[part].copy()
    for place, value in values.items():
        array.reshape(-1)[int(place[1:])] = value
    return replace(foreign, tensors={**foreign.tensors, part: array})


VALUES: list[Any] = [
    ("nan", lambda: spoiled(gptq(), "a.scales", _3=math.nan, _4=math.inf),
     "2 of 256 scales are NaN or infinite"),
    ("zero", lambda: spoiled(mlx(4), "a.scales", _7=0), "1 of 128 scales is zero"),
    ("e8m0-nan", lambda: spoiled(FILES["ct-mxfp4"](), "a.weight_scale", _0=255),
     "1 of 256 scales is NaN or infinite"),
    ("e4m3-nan", lambda: spoiled(FILES["mlx-nvfp4"](), "a.scales", _1=0x7F),
     "1 of 512 scales is NaN or infinite"),
    ("tensor", lambda: spoiled(FILES["ct-float-tensor"](), "a.weight_scale", _0=0),
     "1 of 1 scales is zero"),
    ("absmax", lambda: spoiled(nf4(), "a.weight.absmax", _2=math.nan),
     "1 of 128 scales is NaN or infinite"),
    ("codes", lambda: replace(gptq(), tensors={**gptq().tensors, "a.qweight":
     np.full((IN // 8, OUT), 0x77777777, np.int32)}), "all code words are 0x77777777"),
    ("float8", lambda: replace(FILES["ct-float-tensor"](), tensors={
     **FILES["ct-float-tensor"]().tensors, "a.weight": np.ones((OUT, IN),
     ml_dtypes.float8_e4m3fn)}), "all code words are 0x38"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "problem"), [pytest.param(*case[1:], id=case[0]) for case in VALUES]
)
def test_stats_find_scales_and_codes_that_break_readers(
    make: Callable[[], Foreign], problem: str, tmp_path: Path
) -> None:
    row, _ = inspected(make(), tmp_path, "--stats")
    assert row["quantization"]["problems"] == [problem]
    assert inspected(make(), tmp_path)[0]["quantization"]["problems"] == []


def test_stats_give_the_range_of_the_scales(tmp_path: Path) -> None:
    row, _ = inspected(spoiled(gptq(), "a.scales", _0=-4, _1=math.nan), tmp_path, "--stats")
    scale = gptq().tensors["a.scales"]
    found = row["quantization"]["scales"]
    assert (found["min"], found["max"]) == (-4, 1.5 * 2.0**-1)
    assert scale.max() == found["max"]


@pytest.mark.parametrize(
    ("version", "stored", "problem"),
    [
        ("gptq", 0x88888888, "8 in version 2 of the format and 9 in version 1"),
        ("gptq_v2", 0x77777777, "8 in version 1 of the format and 7 in version 2"),
        ("gptq", 0x77777777, None),
        ("gptq_v2", 0x88888888, None),
        ("gptq", 0x66666666, None),
        ("gptq", 0x78888888, None),
    ],
)
def test_zero_points_of_the_other_version_of_gptq_are_told(
    version: str, stored: int, problem: str | None, tmp_path: Path
) -> None:
    foreign = gptq(version=version)
    words = np.full(foreign.tensors["a.qzeros"].shape, stored, np.uint32).view(np.int32)
    changed = replace(foreign, tensors={**foreign.tensors, "a.qzeros": words})
    problems = inspected(changed, tmp_path, "--stats")[0]["quantization"]["problems"]
    assert len(problems) == (problem is not None)
    assert all(str(problem) in found for found in problems)


def test_files_of_qtool_are_looked_at_too(tmp_path: Path) -> None:
    """Scales that were damaged after quantization, in two layouts."""
    weights = {"a.weight": np.ones((OUT, IN), np.float32)}
    for layout, scale in (("native", "a.weight.scale"), ("mlx", "a.scales")):
        save_file(weights, tmp_path / "m.safetensors")
        target = tmp_path / f"{layout}.safetensors"
        ok("quantize", tmp_path / "m.safetensors", "--dtype", "int4", "--block-size", "32",
           "--layout", layout, "-o", target)  # fmt: skip
        data = bytearray(target.read_bytes())
        size = int.from_bytes(data[:8], "little")
        start = json.loads(data[8 : 8 + size])[scale]["data_offsets"][0] + 8 + size
        data[start : start + 4] = np.float32(np.nan).tobytes()
        target.write_bytes(data)
        [row] = ok("inspect", target, "--stats", "--json").json["tensors"]
        [first, second] = row["quantization"]["problems"]
        assert first == f"1 of {OUT * IN // 32} scales is NaN or infinite"
        assert second.startswith("all code words are 0x")
        assert row["quantization"]["scales"]["nonfinite_count"] == 1


def test_scales_of_powers_are_read_as_such(tmp_path: Path) -> None:
    row, _ = inspected(FILES["ct-mxfp8"](), tmp_path, "--stats")
    scale = row["quantization"]["scales"]
    assert (scale["min"], scale["max"]) == (2.0**-7, 2.0**2)
    assert powers(1).dtype == np.uint8

"""Names for sets of options of `qtool quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.errors import UsageError, nearest
from qtool.spec import SEARCHES

_MX = {"block_size": 32, "scale_dtype": "float8e8m0"}

# What each stands for, under the names of quantize_file's arguments.
PRESETS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8", "dynamic_activations": True},
    "w8a16": {"dtype": "int8", "block_size": 128},
    "w4a16": {"dtype": "int4", "block_size": 128},
    "w4a16-asym": {"dtype": "int4", "block_size": 128, "symmetric": False},
    "int2": {"dtype": "int2", "block_size": 64, "symmetric": False},
    "fp8": {"dtype": "float8e4m3fn", "dynamic_activations": True},
    "fp8-block": {"dtype": "float8e4m3fn", "tile": (128, 128), "dynamic_activations": True},
    "mxfp4": {"dtype": "float4e2m1", **_MX},
    "mxfp6-e2m3": {"dtype": "float6e2m3", **_MX},
    "mxfp6-e3m2": {"dtype": "float6e3m2", **_MX},
    "mxfp8": {"dtype": "float8e4m3fn", **_MX},
    "nvfp4": {
        "dtype": "float4e2m1", "block_size": 16, "scale_dtype": "float8e4m3fn",
        "global_scale": True,
    },
}  # fmt: skip


def expanded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, completed by those that the preset among them stands for.

    One that says which elements share a scale takes the place of the preset's choice of that.
    """
    given = dict(options)
    preset = given.pop("preset", None)
    if preset is None:
        return given
    if preset not in PRESETS:
        raise UsageError("--preset", f"{preset!r} is unknown", nearest(preset, PRESETS))
    gone: set[str] = set()
    if given.keys() & (sharing := {"axis", "block_size", "tile"}):
        gone |= sharing
    if given.get("method") not in (None, *SEARCHES):
        gone.add("symmetric")
    return {k: v for k, v in PRESETS[preset].items() if k not in gone} | given


def command_line(preset: str) -> str:
    """A preset as options of the command line."""
    words = []
    for name, value in PRESETS[preset].items():
        option = name.replace("_", "-")
        if value is True:
            words.append(f"--{option}")
        elif name == "symmetric":
            words.append("--asymmetric")
        else:
            text = "x".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"--{option} {text}")
    return " ".join(words)

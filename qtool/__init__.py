"""Quantize tensors of .npy, .npz, .safetensors and ONNX files with exactly the ONNX arithmetic."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtool.engine import quantize as quantize
    from qtool.engine.operators import quantize_linear as quantize_linear
    from qtool.errors import GateError as GateError
    from qtool.errors import QtoolError as QtoolError
    from qtool.formats import open as open
    from qtool.jobs.compare import compare_file as compare_file
    from qtool.jobs.dequantize import dequantize_file as dequantize_file
    from qtool.jobs.dynamic import dynamic_file as dynamic_file
    from qtool.jobs.finish import finish_folder as finish_folder
    from qtool.jobs.inspect import inspect_file as inspect_file
    from qtool.jobs.quantize import quantize_file as quantize_file
    from qtool.jobs.verify import verify_file as verify_file
    from qtool.ops import dequantize_linear as dequantize_linear
    from qtool.ops import dynamic_quantize_linear as dynamic_quantize_linear
    from qtool.ops import onednn_quantize as onednn_quantize
    from qtool.report import read_report as read_report
    from qtool.spec import Blocked as Blocked
    from qtool.spec import PerAxis as PerAxis
    from qtool.spec import PerTensor as PerTensor
    from qtool.spec import QuantSpec as QuantSpec
    from qtool.spec import Tiled as Tiled
    from qtool.tensor import QuantizedTensor as QuantizedTensor

__version__ = "0.1.0"

# public name -> the module that it lives in
_HOMES = {
    "Blocked": "qtool.spec",
    "GateError": "qtool.errors",
    "PerAxis": "qtool.spec",
    "PerTensor": "qtool.spec",
    "QtoolError": "qtool.errors",
    "QuantSpec": "qtool.spec",
    "Tiled": "qtool.spec",
    "QuantizedTensor": "qtool.tensor",
    "compare_file": "qtool.jobs.compare",
    "dequantize_file": "qtool.jobs.dequantize",
    "dequantize_linear": "qtool.ops",
    "dynamic_file": "qtool.jobs.dynamic",
    "dynamic_quantize_linear": "qtool.ops",
    "finish_folder": "qtool.jobs.finish",
    "inspect_file": "qtool.jobs.inspect",
    "onednn_quantize": "qtool.ops",
    "open": "qtool.formats",
    "quantize": "qtool.engine",
    "quantize_file": "qtool.jobs.quantize",
    "quantize_linear": "qtool.engine.operators",
    "read_report": "qtool.report",
    "verify_file": "qtool.jobs.verify",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `qtool --help` loads none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qtool' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

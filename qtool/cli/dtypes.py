"""qtool dtypes."""

from __future__ import annotations

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool dtypes"


def dtypes(json: options.Json = False) -> None:
    """List the types that can be quantized to: range, bits, ONNX code, first opset."""
    with exit_code():
        from qtool import render
        from qtool.dtypes import TARGETS

        rows = [
            {"name": d.name, "bits": d.bits, "qmin": d.qmin, "qmax": d.qmax, "code": d.code,
             "opset": d.opset}
            for d in TARGETS
        ]  # fmt: skip
        if json:
            options.show({"dtypes": rows})
        else:
            render.dtypes(rows)

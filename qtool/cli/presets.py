"""qtool presets."""

from __future__ import annotations

from qtool.cli import options
from qtool.cli.exits import exit_code

EXAMPLE = "Example: qtool presets"


def presets(json: options.Json = False) -> None:
    """List the presets of `qtool quantize`, and the options that each one stands for."""
    with exit_code():
        from qtool import render
        from qtool.presets import PRESETS, command_line

        rows = [{"name": name, "options": command_line(name)} for name in PRESETS]
        if json:
            options.show({"presets": rows})
        else:
            render.presets(rows)

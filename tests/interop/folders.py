"""Folders that qtool writes, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from command import ok
from tiny_llama import Llama


class Folders:
    """Checkpoint folders by the options that made them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def source(self, model: Llama) -> Path:
        """The model as transformers saves it, in two shards."""
        return self._made(model.name, model.save)

    def quantized(self, model: Llama, *options: str) -> Path:
        """What `qtool quantize` makes of it."""
        source = self.source(model)
        name = "_".join([model.name, *(option.strip("-") for option in options)])
        return self._made(name, lambda folder: ok("quantize", source, "-o", folder, *options))

    def dequantized(self, model: Llama, *options: str) -> Path:
        """What `qtool dequantize` makes of that: float32."""
        folder = self.quantized(model, *options)
        return self._made(f"{folder.name}_back", lambda back: ok("dequantize", folder, "-o", back))

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        folder = self.root / name
        if not folder.exists():
            make(folder)
        return folder

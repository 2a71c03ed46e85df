"""What made a file, in its own metadata: the tool, its version, and the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool import __version__


@dataclass(frozen=True, slots=True)
class Provenance:
    """The recipe as TOML, and who followed it."""

    recipe: str
    name: str = "qtool"
    version: str = __version__

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Provenance | None:
        """What to_json() gives; None where a document says nothing of it, as those of qtool's first
        days do. Raises KeyError or TypeError where it is damaged."""
        if "tool" not in document and "recipe" not in document:
            return None
        tool, recipe = document["tool"], document["recipe"]
        texts = recipe, tool["name"], tool["version"]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("tool and recipe are no texts")
        return cls(*texts)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for a document that may say more."""
        return {"tool": {"name": self.name, "version": self.version}, "recipe": self.recipe}

    def to_text(self) -> str:
        """The same as a text of its own, for an ONNX model."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=False)

"""What the JSON files of a quantized folder tell its readers, beside what its tensors are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.formats import Source
from qtool.layouts.metadata import read_metadata
from qtool.spec import TensorInfo

_GROUPS = "config_groups"
_LONGEST = 80  # characters of a value that is shown


def differences(original: Mapping[str, TensorInfo], quantized: Source) -> Iterator[str]:
    """Where files of a folder do not say what its layout has them say; none elsewhere.

    original: the tensors before quantization, by name.
    """
    if quantized.container != "checkpoint":
        return
    made = read_metadata(quantized)
    others = [n for n, i in original.items() if n not in made.tensors and len(i.shape) == 2]
    documents = made.layout.documents(made.tensors, others) if made.tensors else {}
    for file, wanted in documents.items():
        held = _held(quantized.path / file)
        for key, value in wanted.items():
            if _unnamed(held.get(key)) != _unnamed(value):
                yield f"{file}: {_difference(key, held.get(key), value)}"


def _held(path: Path) -> Mapping[str, Any]:
    """What a file says; nothing where it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unnamed(said: Any) -> Any:
    """The same without the names of groups, which say nothing."""
    groups = said.get(_GROUPS) if isinstance(said, dict) else None
    if not isinstance(groups, dict):
        return said
    return {**said, _GROUPS: sorted(json.dumps(g, sort_keys=True) for g in groups.values())}


def _difference(path: str, held: Any, wanted: Any) -> str:
    """The first one: quantization_config.format is "x", its tensors need "y"."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for key in {**wanted, **held}:
            if _unnamed(held.get(key)) != _unnamed(wanted.get(key)):
                return _difference(f"{path}.{key}", held.get(key), wanted.get(key))
    return f"{path} is {_shown(held)}, its tensors need {_shown(wanted)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"

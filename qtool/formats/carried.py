"""The files of a checkpoint folder that are no weights: tokenizer, licence, code, pictures."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from qtool.errors import FormatError
from qtool.formats.checkpoint import CONFIG, INDEX, SINGLE, inside

# The same weights in another format or precision, by file name.
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data*",
    "*.onnx.data", "*.h5", "*.h5.index.json", "*.msgpack", "*.msgpack.index.json", "*.ot",
    "*.ckpt*", "*.pt", "*.pth", "pytorch_model*.bin", "*.bin.index.json", "model*.bin",
    "openvino_model.*", "*.tflite", "*.mlmodel", "*.mlpackage",
)  # fmt: skip
# Weights of these kinds belong to a module of the model where they stand in a sub-folder that has
# a configuration of its own, as in the models of sentence-transformers.
_MODULE = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")
# Folders that a download leaves beside the model.
_WORKING = (".git", ".cache")


@dataclass(frozen=True)
class Others:
    """Paths relative to the folder, sorted: files to carry over, and what is left out."""

    carried: tuple[str, ...]
    left_out: tuple[str, ...]


def others(folder: Path, shards: Collection[str]) -> Others:
    """What a checkpoint folder holds besides its config.json, its index and its shards.

    Raises FormatError for what is neither a file nor a folder, and links that leave the folder or
    lead to a folder.
    """
    own = {CONFIG, INDEX, SINGLE, *shards}
    carried: list[str] = []
    left_out: list[str] = []

    def visit(below: str) -> None:
        with os.scandir(folder / below) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        is_module = below != "" and any(entry.name == CONFIG for entry in found)
        for entry in found:
            path = f"{below}{entry.name}"
            if path in own:
                continue
            if path in _WORKING or _is_copy(entry.name, is_module=is_module):
                left_out.append(path)
            elif entry.is_dir(follow_symlinks=False):
                visit(f"{path}/")
            else:
                _check(folder, path)
                carried.append(path)

    visit("")
    return Others(tuple(carried), tuple(left_out))


def _is_copy(name: str, *, is_module: bool) -> bool:
    if is_module and any(fnmatchcase(name, pattern) for pattern in _MODULE):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHTS)


def _check(folder: Path, path: str) -> None:
    real = inside(folder, path)
    if not real.is_file():
        kind = "is a link to a folder" if real.is_dir() else "is no regular file"
        raise FormatError(
            str(folder / path), kind, "replace it by what it stands for, or remove it"
        )

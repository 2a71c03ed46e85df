"""Releases by the example script: models in three forms, and faults in them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RECIPE = (EXAMPLES / "recipe.toml").read_text(encoding="utf-8")

Tensors = Mapping[str, NDArray[Any]]


def release(
    model: Path, folder: Path, *recipe: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script, with this Python's qtool first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [EXAMPLES / "release.sh", model, folder, *recipe],
        env=os.environ | {"PATH": path} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes | str]:
    """All files of a folder, and where links lead to; not the report of what failed."""
    paths = [path for path in folder.rglob("*") if path.name != "failed.json"]
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def save_safetensors(tensors: Tensors, folder: Path) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder / "model.safetensors"


def save_checkpoint(tensors: Tensors, folder: Path) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    save_safetensors(tensors, folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "digits"}')
    return folder / "model"


def save_onnx(tensors: Tensors, folder: Path) -> Path:
    model = onnx.load(EXAMPLES / "digits.onnx")
    for initializer in model.graph.initializer:
        initializer.CopyFrom(numpy_helper.from_array(tensors[initializer.name], initializer.name))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@dataclass(frozen=True)
class Fault:
    """What is planted in a tensor, or said of it in the recipe, and what standard error says then.

    {name} stands for the tensor's name.
    """

    says: str
    plant: Callable[[NDArray[Any]], None] = lambda x: None
    rule: str = ""

    def planted(self, tensors: Tensors, name: str) -> Tensors:
        found = {key: values.copy() for key, values in tensors.items()}
        self.plant(found[name])
        return found

    def recipe(self, name: str, folder: Path) -> Path:
        path = folder / "recipe.toml"
        path.write_text(RECIPE + self.rule.format(name=name), encoding="utf-8")
        return path


def _nan(x: NDArray[Any]) -> None:
    x[3, 5] = np.nan


def _outliers(x: NDArray[Any]) -> None:
    x[::8, ::32] *= 1e3


def _outlying_row(x: NDArray[Any]) -> None:
    x[7] *= 1e3


FAULTS = {
    "nan": Fault("{name}: holds 1 NaN (--strict)", _nan),
    "outliers": Fault("{name}: max_abs_error is ", _outliers),
    "outlying-row": Fault("{name}: max_abs_error is ", _outlying_row),
    "no-match": Fault("pattern '{name}.old' matches no tensor (--strict)",
                      rule="[[rules]]\npattern = '{name}.old'\ndtype = 'int8'\n"),
    "regression": Fault("in the baseline), fails 'sqnr_db worse by 0.5'",
                        rule="[[rules]]\npattern = '{name}'\nblock_size = 128\n"),
}  # fmt: skip


def check_stopped(done: subprocess.CompletedProcess[str], fault: Fault, name: str) -> None:
    """That the script ended with 3 and one line of qtool's, which names the tensor."""
    assert done.returncode == 3, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("qtool: ")]
    assert len(said) == 1
    assert name in said[0]
    assert fault.says.format(name=name) in said[0]
    assert done.stdout.count("released") == 0


def digits() -> Tensors:
    return load_file(EXAMPLES / "digits.safetensors")

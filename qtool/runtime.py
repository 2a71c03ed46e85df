"""Runs ONNX models, in onnxruntime on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import memory
from qtool.errors import QtoolError

Array = NDArray[Any]

_TYPES = {"float": "float32", "double": "float64"}
# What onnxruntime says of itself in front of its messages: a code, and a function of its sources.
_PLACE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+\.(?:cc|h):\d+ .*?\) ")

# Where onnxruntime cannot start all its threads it waits for the others without end: bytes of one.
_THREAD = 80 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """An input that a model needs. shape: None for a size that the model leaves open."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class Session:
    """A model that is ready to run, its graph computed as it stands, without onnxruntime's
    rewriting.

    content: the file's bytes. folder: where its external data is. threads: of one operator.
    outputs: names of those that are arrays of numbers.
    Raises QtoolError where onnxruntime is not installed, or cannot run the model; MemoryError where
    there is too little for its threads.
    """

    def __init__(self, content: bytes, folder: Path, name: str, threads: int) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # which would go to its maker
        memory.check(memory.LIBRARIES)
        try:
            import onnxruntime
        except ImportError as error:
            if memory.caused(error):
                raise MemoryError from error
            raise QtoolError(
                "onnxruntime", f"is needed to run a model ({error})", "pip install 'qtool[runtime]'"
            ) from None
        self._name = name
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        folder_entry = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(folder_entry, str(folder.resolve()))
        memory.check((threads + 1) * _THREAD)
        try:
            self._session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors have no class in common
            raise self._failed(error) from error
        self.inputs = [self._input(found) for found in self._session.get_inputs()]
        self.outputs = [found.name for found in self._session.get_outputs() if _is_array(found)]

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Those outputs of the model for one set of inputs."""
        try:
            found: list[Array] = self._session.run(outputs, dict(feeds))
        except Exception as error:
            raise self._failed(error) from error
        return found

    def _input(self, found: Any) -> Input:
        shape = tuple(size if isinstance(size, int) else None for size in found.shape)
        kind = found.type.removeprefix("tensor(").removesuffix(")")
        try:
            return Input(found.name, np.dtype(_TYPES.get(kind, kind)), shape)
        except TypeError:
            rule = f"input {found.name} is a {found.type}, which no array of numbers is"
            raise QtoolError(self._name, rule) from None

    def _failed(self, error: Exception) -> QtoolError:
        text = _PLACE.sub("", " ".join(str(error).split()))
        return QtoolError(self._name, f"onnxruntime cannot run it: {text}")


def _is_array(found: Any) -> bool:
    kind = str(found.type)
    return kind.startswith("tensor(") and kind != "tensor(string)"

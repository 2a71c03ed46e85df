"""Arrays that belong to tensors by name, such as the inputs of a layer for its weight."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import ops
from qtool.errors import FormatError, QtoolError, TensorError, UsageError
from qtool.jobs import streams
from qtool.recipe import SOURCE_FLOATS, unmatched
from qtool.spec import TensorInfo

Array = NDArray[Any]

Words = str | Path | Sequence[str | Path] | None

_FORMS = "use NAME=FILE or FILE"
_BATCH = 1 << 22  # elements that are read at once


@dataclass(frozen=True)
class Held:
    """An array in a file, of the tensor of its name, or of those that pattern matches.

    file: its name as the user gave it.
    """

    path: Path  # absolute, for workers that stand elsewhere
    info: TensorInfo
    pattern: str | None
    file: str

    @property
    def words(self) -> str:
        """The array in the words of a message."""
        return f"{self.info.name} of {self.file}"

    def is_matched(self, tensor: str) -> bool:
        """Whether the pattern, where there is one, matches that name."""
        return self.pattern is not None and not unmatched([self.pattern], [tensor])


class NamedArrays:
    """Arrays of .npy, .npz and .safetensors files, which belong to tensors.

    option: what messages call them. words: each FILE, whose arrays are called as the tensors (one
    of .npy as its file, less the suffix), or NAME=FILE, of one array, which belongs to the tensors
    that NAME, a name or a pattern as in --include, matches.
    paths: the files. Headers are read here, values when they are asked for.
    """

    def __init__(self, option: str, words: Sequence[str | Path]) -> None:
        self._option = option
        self._held = [held for word in words for held in self._read(str(word))]
        self.paths = sorted({held.path for held in self._held})
        self._named: dict[str, list[int]] = {}
        for i, held in enumerate(self._held):
            if held.pattern is None:
                self._named.setdefault(held.info.name, []).append(i)

    def of(self, tensor: str) -> list[Held]:
        """The arrays of a tensor, in the order of the files."""
        matched = [i for i, held in enumerate(self._held) if held.is_matched(tensor)]
        return [self._held[i] for i in sorted([*matched, *self._named.get(tensor, [])])]

    def check_names(self, tensors: Collection[str]) -> None:
        """Refuse an array that belongs to none of all tensors of the source."""
        known = set(tensors)
        for held in self._held:
            if held.pattern is None and held.info.name in known:
                continue
            if any(map(held.is_matched, tensors)):
                continue
            import difflib

            name = held.pattern or held.info.name
            near = difflib.get_close_matches(name, tensors, n=1, cutoff=0.0)
            raise UsageError(
                self._option,
                f"{name!r} is no tensor of the source",
                f"the nearest name is {near[0]!r}; NAME={held.file} says whose it is"
                if near
                else None,
            )

    def _read(self, word: str) -> Iterator[Held]:
        name, path = self._split(word)
        if os.path.isdir(path) or streams.is_pipe(path):
            rule = f"{path} is no file that can be read more than once"
            raise UsageError(self._option, rule, "give .npy, .npz or .safetensors files")
        with streams.opened(path) as source:
            infos = source.infos()
            if source.container == "onnx":
                raise FormatError(str(path), "is a model", "give .npy, .npz or .safetensors files")
        if not infos or (name is not None and len(infos) != 1):
            rule = f"{path} holds {len(infos)} arrays" + ("" if name is None else ", not one")
            raise UsageError(self._option, rule, "give FILE alone, its arrays named as the tensors")
        for info in infos:
            yield Held(path.absolute(), info, name, str(path))

    def _split(self, word: str) -> tuple[str | None, Path]:
        """NAME, where there is one, and FILE."""
        if not word or word.endswith("="):
            raise UsageError(self._option, f"{word!r} has no FILE", _FORMS)
        if os.path.exists(word) or "=" not in word:
            return None, Path(word)
        places = [i for i, c in enumerate(word) if c == "="]
        at = next((i for i in places if i and os.path.isfile(word[i + 1 :])), places[0])
        if not at:
            raise UsageError(self._option, f"{word!r} has no NAME", _FORMS)
        return word[:at], Path(word[at + 1 :])


class Activations:
    """Inputs of layers, by the names of their weights; words: see NamedArrays.

    Each array is (..., inputs); leading axes are samples, several arrays more of them.
    """

    def __init__(self, words: Sequence[str | Path], option: str = "--activations") -> None:
        self.arrays = NamedArrays(option, words)

    def check(self, tensor: str, inputs: int) -> None:
        """Refuse arrays of that tensor that are not (..., inputs) of floats. Raises FormatError."""
        for held in self.arrays.of(tensor):
            shape, dtype = held.info.shape, held.info.dtype
            if dtype not in SOURCE_FLOATS:
                raise FormatError(held.words, f"holds {dtype}", "give float32 inputs")
            if not shape or shape[-1] != inputs:
                rule = f"shape {shape}, but {tensor} has {inputs} inputs"
                raise FormatError(held.words, rule, f"give (..., {inputs})")

    def batches(self, tensor: str) -> Iterator[Array] | None:
        """The inputs of a layer as float32 (rows, inputs), one batch in memory at a time; None
        where none are given for its weight.

        Raises TensorError where one is not finite in float32.
        """
        found = self.arrays.of(tensor)
        return (batch for held in found for batch in _batches(held)) if found else None


def _batches(held: Held) -> Iterator[Array]:
    info = held.info
    width = info.shape[-1]
    step = max(_BATCH // max(width, 1), 1) * width
    with streams.opened(held.path) as source, source.reading(info.name) as read:
        for start in range(0, info.size, step or 1):
            stored = np.empty(min(step, info.size - start), info.dtype.numpy)
            read(start, stored)
            batch = ops.cast(stored, ops.FLOAT32)
            if not np.isfinite(batch).all():
                first = int(np.argmin(np.isfinite(batch)))
                at = [int(i) for i in np.unravel_index(start + first, info.shape)]
                rule = f"{stored[first]} at {at} is not finite in float32"
                raise TensorError(held.words, rule, "leave that sample out")
            yield batch.reshape(-1, width)


def mean_square(batches: Iterable[Array]) -> Array:
    """(inputs,): the mean of x^2 over all samples, in float64: the diagonal of H.

    The squares are added one by one in the order of the samples.
    """
    total, rows = np.zeros(1), 0
    for batch in batches:
        squares = np.square(batch.astype(np.float64))
        if not rows:
            total = np.zeros(squares.shape[1])
        total = np.add.accumulate(np.concatenate([total[None], squares]))[-1]
        rows += len(batch)
    if not rows:
        raise QtoolError("activations", "hold no sample", "give some")
    return np.asarray(total / rows)


def listed(words: Words) -> list[str]:
    """One or several words as texts."""
    if words is None:
        return []
    return [str(words)] if isinstance(words, str | Path) else [str(word) for word in words]

"""How much the errors of every element count, as the command line says it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qtool.engine import weighted
from qtool.errors import FormatError, UsageError
from qtool.jobs import fingerprint, streams
from qtool.jobs.activations import Activations, Held, NamedArrays, mean_square
from qtool.plan import Planned
from qtool.pool import default_jobs
from qtool.recipe import SOURCE_FLOATS
from qtool.spec import QuantSpec, TensorInfo

Array = NDArray[Any]

OPTION = "--importance"
_ACTIVATIONS = "activations:"


class Importance:
    """Weights of squared errors, for the tensors that files hold them of.

    words: NamedArrays' words. An array has one weight per element, or per input channel: (inputs,).
    After "activations:" they are of inputs (..., inputs) of layers, whose mean squares are the
    weights of the channels.
    paths: the files.
    """

    def __init__(self, words: Sequence[str]) -> None:
        of_layers = [w.removeprefix(_ACTIVATIONS) for w in words if w.startswith(_ACTIVATIONS)]
        self._inputs = Activations(of_layers, OPTION)
        self._given = NamedArrays(OPTION, [w for w in words if not w.startswith(_ACTIVATIONS)])
        self.paths = sorted({*self._given.paths, *self._inputs.arrays.paths})
        self._prints: dict[Path, fingerprint.Fingerprint] = {}

    def named(self, tensors: Collection[str]) -> frozenset[str]:
        """Those of all tensors of the source that have weights. Raises UsageError for an array of
        none of them."""
        for arrays in (self._given, self._inputs.arrays):
            arrays.check_names(tensors)
        return frozenset(name for name in tensors if self.has(name))

    def has(self, name: str) -> bool:
        """Whether there are weights for the tensor."""
        return bool(self._given.of(name) or self._inputs.arrays.of(name))

    def check(self, plan: Sequence[Planned]) -> None:
        """Refuse arrays that do not fit their tensors, from headers alone."""
        for planned in plan:
            if planned.spec is not None and self.has(planned.info.name):
                self.kind(planned.info, planned.spec)

    def kind(self, info: TensorInfo, spec: QuantSpec) -> str:
        """What the weights of a tensor are of: "element", "channel" or "activations".

        Raises UsageError where there are several, FormatError where they do not fit.
        """
        given, inputs = self._given.of(info.name), self._inputs.arrays.of(info.name)
        if len(given) + bool(inputs) > 1:
            one, other = [*given, *inputs][:2]
            rule = f"two for {info.name}: {one.words} and {other.words}"
            raise UsageError(OPTION, rule, "leave one of them out")
        for held in [*given, *inputs]:
            if held.info.dtype not in SOURCE_FLOATS:
                raise FormatError(held.words, f"holds {held.info.dtype}", "give float32 weights")
        axis = weighted.input_axis(info, spec)
        channels = weighted.channels(info, axis)
        if inputs:
            self._inputs.check(info.name, _width(inputs[0], channels))
            return "activations"
        shape = given[0].info.shape
        if shape == info.shape:
            return "element"
        if shape in channels:
            return "channel"
        rule = f"shape {shape}, but {info.name} has {info.shape}"
        raise FormatError(given[0].words, rule, "give " + weighted.wanted(info, axis))

    def weights(self, info: TensorInfo, spec: QuantSpec) -> Array:
        """float32 in the tensor's shape, finite, not negative and not all zero.

        Raises SpecError for others.
        """
        if self.kind(info, spec) == "activations":
            words = f"activations of {info.name}"
            batches = self._inputs.batches(info.name)
            assert batches is not None
            found = mean_square(batches)
        else:
            [held] = self._given.of(info.name)
            words = held.words
            with streams.opened(held.path) as source:
                found = source.read(held.info.name)
        single = weighted.checked(found, words)
        return weighted.spread(single, info.shape, weighted.input_axis(info, spec))

    def words(self, names: Collection[str]) -> Iterator[bytes]:
        """All that decides the weights of these tensors, besides their headers and specs."""
        for name in names:
            arrays = [("given", self._given), ("activations", self._inputs.arrays)]
            for kind, held in ((kind, held) for kind, all_ in arrays for held in all_.of(name)):
                if held.path not in self._prints:
                    self._prints[held.path] = fingerprint.of_file(held.path, default_jobs())
                yield f"{kind} {name} {held.info.name} {self._prints[held.path]}".encode()

    def warnings(self, plan: Sequence[Planned]) -> list[str]:
        """What the user should know of tensors that are quantized without weights."""
        without = [p.info.name for p in plan if p.spec is not None and not self.has(p.info.name)]
        idle = [p.info.name for p in plan if p.spec is None and self.has(p.info.name)]
        return [
            *_about(without, "quantized without importance, as none is given"),
            *_about(idle, "left alone although importance is given"),
        ]


def _width(held: Held, channels: Sequence[tuple[int]]) -> int:
    """The number of inputs that an array of them means, or should have."""
    widths = [width for (width,) in channels]
    last = held.info.shape[-1] if held.info.shape else 0
    return last if last in widths else next(iter(widths), 0)


def _about(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    shown = [*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])]
    return [f"{what}: {', '.join(shown)}"]

"""Second-order rounding as the command line asks for it: of which tensors, by which Hessians."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qtool import rounding
from qtool.engine import Request, default_jobs, second_order
from qtool.errors import FormatError, TensorError, UsageError
from qtool.jobs import fingerprint, streams
from qtool.jobs.activations import Activations, NamedArrays, Words, listed
from qtool.plan import Planned
from qtool.recipe import SOURCE_FLOATS
from qtool.rounding.products import kernels_pay
from qtool.spec import QuantSpec, TensorInfo
from qtool.tensor import QuantizedTensor

Array = NDArray[Any]

_LARGEST_DAMPING = 1000  # with more, columns no longer see each other's errors


class SecondOrder:
    """Rounds the weights whose inputs are known so that their layers' outputs change least.

    hessian, activations: one or several of NamedArrays' words; of Hessians (inputs, inputs), the
    sum or mean of x x^T, or of inputs x. damping, act_order: see rounding.factored().
    """

    def __init__(self, hessian: Words, activations: Words, damping: float, *, act_order: bool):
        self._hessians, self._activations = listed(hessian), listed(activations)
        self._damping, self._act_order = damping, act_order
        self._inputs = Activations(self._activations)
        self._given = NamedArrays("--hessian", self._hessians)
        self._arrays = self._inputs.arrays if self._activations else self._given
        self.paths = self._arrays.paths
        self._prints: dict[Path, fingerprint.Fingerprint] = {}

    @classmethod
    def of(
        cls, hessian: Words, activations: Words, damping: float | None, act_order: bool | None
    ) -> SecondOrder | None:
        """From the options of the command line; None where they ask for nearest rounding."""
        if hessian and activations:
            raise UsageError("--hessian", "replaces --activations", "leave one of them out")
        if damping is not None and not 0 <= damping <= _LARGEST_DAMPING:
            rule = f"{damping} is outside [0, {_LARGEST_DAMPING}]"
            raise UsageError("--damping", rule, "use for example 0.01")
        if hessian or activations:
            order = act_order is not False
            damping = rounding.DAMPING if damping is None else damping
            return cls(hessian, activations, damping, act_order=order)
        for option, value in (("--damping", damping), ("--act-order", act_order)):
            if value is not None:
                rule = "is for second-order rounding"
                raise UsageError(option, rule, "give --activations or --hessian")
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """What the report says of it."""
        return {
            "hessian": self._hessians,
            "activations": self._activations,
            "damping": self._damping,
            "act_order": self._act_order,
        }

    def check(self, plan: Sequence[Planned]) -> None:
        """Refuse arrays of unknown tensors, or that do not fit theirs, from headers alone."""
        self._arrays.check_names([planned.info.name for planned in plan])
        for info, spec in self._rounded(plan):
            second_order.check_spec(spec)
            inputs = _inputs(info, spec)
            if self._activations:
                self._inputs.check(info.name, inputs)
                continue
            first, *others = self._given.of(info.name)
            if others:
                rule = f"two Hessians for {info.name}: {first.words} and {others[0].words}"
                raise UsageError("--hessian", rule, "leave one of them out")
            if first.info.shape != (inputs, inputs) or first.info.dtype not in SOURCE_FLOATS:
                rule = f"{first.info.dtype} {first.info.shape}, but {info.name} has {inputs} inputs"
                raise FormatError(first.words, rule, f"give floats, ({inputs}, {inputs})")

    def warnings(self, plan: Sequence[Planned]) -> list[str]:
        """What the user should know of tensors that are not rounded so."""
        known = {info.name for info, _ in self._rounded(plan)}
        nearest = [p.info.name for p in plan if p.spec is not None and p.info.name not in known]
        idle = [p.info.name for p in plan if p.spec is None and self._arrays.of(p.info.name)]
        return [
            *_about(nearest, "rounded to nearest, as no inputs are given"),
            *_about(idle, "left alone although inputs are given"),
        ]

    def has(self, name: str) -> bool:
        """Whether there is a Hessian of the tensor's inputs."""
        return bool(self._arrays.of(name))

    def words(self, names: Collection[str]) -> Iterator[bytes]:
        """All that decides the codes of these tensors, besides their values and specs."""
        for name in names:
            for held in self._arrays.of(name):
                if held.path not in self._prints:
                    self._prints[held.path] = fingerprint.of_file(held.path, default_jobs())
                yield f"{name} {held.info.name} {self._prints[held.path]}".encode()

    def load(self, info: TensorInfo, spec: QuantSpec, note: Callable[[str], None]) -> None:
        """Load the kernels where they pay. note: told where they are compiled first."""
        if kernels_pay(info.size * _inputs(info, spec)):
            from qtool.kernels import machine

            machine.load(note)

    def quantize(self, x: Array, asked: Request, info: TensorInfo, jobs: int) -> QuantizedTensor:
        """The tensor as asked; has() is true of it."""
        axis = rounding.input_axis(info, asked.spec.granularity)
        inputs = rounding.input_count(info.shape, axis)
        hessian = self._hessian(info.name, inputs, jobs)
        return second_order.quantize(
            x, asked, hessian, axis, damping=self._damping, act_order=self._act_order, jobs=jobs
        )

    def _hessian(self, name: str, inputs: int, jobs: int) -> Array:
        batches = self._inputs.batches(name)
        if batches is not None:
            hessian, rows = rounding.mean_of_products(batches, inputs, jobs)
            if not rows:
                raise TensorError(f"activations of {name}", "hold no sample", "give some")
            return hessian
        (held,) = self._given.of(name)
        with streams.opened(held.path) as source:
            return rounding.checked(source.read(held.info.name), inputs, name)

    def _rounded(self, plan: Sequence[Planned]) -> Iterator[tuple[TensorInfo, QuantSpec]]:
        for planned in plan:
            if planned.spec is not None and self.has(planned.info.name):
                yield planned.info, planned.spec


def _inputs(info: TensorInfo, spec: QuantSpec) -> int:
    return rounding.input_count(info.shape, rounding.input_axis(info, spec.granularity))


def _about(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    shown = [*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])]
    return [f"{what}: {', '.join(shown)}"]

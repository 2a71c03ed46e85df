"""Finds weights that other tools have quantized, by the names and types of tensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qtool.layouts.foreign_config import Config
from qtool.layouts.foreign_layout import Candidate, Layout
from qtool.layouts.foreign_table import LAYOUTS
from qtool.spec import TensorInfo


@dataclass(frozen=True)
class ForeignWeight:
    """A quantized weight: its layout, and what it is made of, by the endings of names."""

    layout: Layout
    candidate: Candidate

    @property
    def name(self) -> str:
        """What the weight was called before."""
        return self.candidate.base + (".weight" if self.layout.codes[0] else "")

    @property
    def codes(self) -> TensorInfo:
        return self.candidate.tensors[self.candidate.base + self.layout.codes[0]]

    @property
    def scale(self) -> TensorInfo:
        return self.candidate.tensors[self.candidate.base + self.layout.scale[0]]

    @property
    def zero_point(self) -> TensorInfo | None:
        ending = self.layout.zero_point
        return self.candidate.get(ending) if ending else None

    @property
    def parts(self) -> list[TensorInfo]:
        """All its tensors, the codes first."""
        layout = self.layout
        endings = (layout.scale[0], layout.zero_point, *layout.needs, *layout.extras)
        found = [self.candidate.get(ending) for ending in dict.fromkeys(endings) if ending]
        return [self.codes, *(info for info in found if info is not None)]


def find(infos: Iterable[TensorInfo], config: Config | None = None) -> list[ForeignWeight]:
    """The weights among those tensors, in the order of their codes.

    Layouts of which the configuration speaks come before others.
    """
    said = config or Config()
    layouts = sorted(LAYOUTS, key=lambda layout: said.method not in layout.methods)
    by_name = {info.name: info for info in infos}
    found = []
    for name in by_name:
        for layout in layouts:
            ending = layout.codes[0]
            if name.endswith(ending):
                candidate = Candidate(name.removesuffix(ending), by_name, said)
                if layout.fits(candidate):
                    found.append(ForeignWeight(layout, candidate))
                    break
    return found


def recognise(infos: Iterable[TensorInfo]) -> dict[str, str]:
    """The tool whose quantized tensors and parameters these are, by tensor name."""
    found: dict[str, str] = {}
    for weight in find(infos):
        for part in weight.parts:
            found.setdefault(part.name, weight.layout.tool)
    return found

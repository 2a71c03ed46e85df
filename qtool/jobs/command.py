"""What a command line asks of quantize or dynamic, for a file or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qtool import engine
from qtool.jobs.division import Division
from qtool.jobs.given import Given
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.tensors import OnnxLayout
from qtool.jobs.terms import Terms
from qtool.recipe import Recipe

if TYPE_CHECKING:
    from qtool.jobs.importance import Importance
    from qtool.jobs.second_order import SecondOrder


@dataclass(frozen=True)
class Command:
    """The arguments of quantize_file and dynamic_file, checked as far as they can be without the
    source.

    name: quantize or dynamic. tag: part of the default name of dst. graph: how weights are spelled
    in ONNX models, where not by DequantizeLinear. second_order: rounds the weights that it knows.
    terms: what the result must hold. dry_run: plan alone. hashes: the report has those of files.
    """

    name: str
    src: str | Path
    dst: str | Path | None
    recipe: Recipe
    tag: str
    given: Given | None = None
    report_to: str | Path | None = None
    save_recipe: str | Path | None = None
    division: Division = field(default_factory=Division)
    jobs: int | None = None
    force: bool = False
    progress: Progress = field(default_factory=Silent)
    graph: OnnxLayout | None = None
    second_order: SecondOrder | None = None
    terms: Terms = field(default_factory=Terms)
    dry_run: bool = False
    hashes: bool = False

    @property
    def threads(self) -> int:
        return self.jobs or engine.default_jobs()

    @property
    def requantize(self) -> bool:
        return bool(self.recipe.options.get("requantize", False))

    @cached_property
    def importance(self) -> Importance | None:
        """The weights of errors that the recipe names; None where it names none."""
        if not (words := self.recipe.options.get("importance")):
            return None
        from qtool.jobs.importance import Importance

        return Importance(words)

    def weighted(self, names: Sequence[str]) -> frozenset[str]:
        """Those of the tensors that have weights of errors."""
        return self.importance.named(names) if self.importance else frozenset()

    @property
    def inputs(self) -> list[Path]:
        """The files that are read besides the source."""
        known = (self.given, self.second_order, self.importance)
        return [path for one in known if one for path in one.paths]

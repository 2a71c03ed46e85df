"""What every candidate costs for every tensor: its size, and its error on the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtool.errors import QtoolError
from qtool.formats import Source
from qtool.jobs import fusing
from qtool.jobs.progress import Part, Progress
from qtool.jobs.tensors import Job
from qtool.layouts import Layout
from qtool.plan import Planned
from qtool.stats import Stats

if TYPE_CHECKING:
    from qtool.jobs.importance import Importance

# Of each candidate, by its number, one plan for all tensors.
Plans = Sequence[Sequence[Planned]]
# Sums of it are finite.
_INFINITE = 1e290


@dataclass(frozen=True)
class Way:
    """Tensors that must be quantized alike, as one candidate has them; with their figures."""

    planned: Sequence[Planned]
    stats: Sequence[Stats]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(p.bytes_after for p in self.planned)

    @property
    def error(self) -> float:
        """The sum of squared errors, weighted where there are weights; one that is not finite is
        very large."""
        errors = [squares(stats)[1] for stats in self.stats]
        return math.fsum(e if math.isfinite(e) else _INFINITE for e in errors)


def squares(stats: Stats) -> tuple[float, float]:
    """The sums of squared values and errors of a tensor, weighted where it has weights."""
    signal, error = stats.sums[:2] if stats.weighted is None else stats.weighted[1:]
    return float(signal), float(error)


# The ways of a tensor, or of several that must be quantized alike, by the candidate's number.
Curve = Mapping[int, Way]


def curves(
    source: Source,
    plans: Plans,
    layout: Layout,
    jobs: int,
    progress: Progress,
    importance: Importance | None = None,
) -> list[Curve]:
    """One for each tensor that some candidate suits, or for those together that the layout's
    readers fuse, or that share a global scale; candidates that come to the same are left out.

    Raises QtoolError where fused tensors have no candidate in common.
    """
    units = [_ways(plans, places) for places in _places(plans, layout)]
    tensors = [[p for unit in units for p in unit.get(n, ())] for n in range(len(plans))]
    sizes = [p.info.nbytes for planned in tensors for p in planned]
    progress.begin(len(sizes), sum(sizes))
    measured: list[dict[str, Stats]] = []
    for plan, planned in zip(plans, tensors, strict=True):
        # what tensors share is a matter of all of them, measured already or not
        absmax = Job(source, plan, None, layout, None, jobs).shared_absmax()
        job = Job(
            source, planned, None, layout, Part(progress), jobs, absmax, importance=importance
        )
        measured.append(job.measured())
    return [
        {n: Way(way, [measured[n][p.info.name] for p in way]) for n, way in unit.items()}
        for unit in units
    ]


def _places(plans: Plans, layout: Layout) -> list[list[int]]:
    """Where in the plans the tensors of each curve stand."""
    shares = any(p.stored and p.stored.global_scale for plan in plans for p in plan)
    found: dict[object, list[int]] = {}
    for place, fates in enumerate(zip(*plans, strict=True)):
        if any(p.spec is not None for p in fates):
            name = fates[0].info.name
            group = fusing.group(name) if layout.fuses or shares else None
            found.setdefault(group or name, []).append(place)
    return list(found.values())


def _ways(plans: Plans, places: Sequence[int]) -> dict[int, Sequence[Planned]]:
    """How the tensors there are quantized by those candidates that suit all of them."""
    found: dict[int, Sequence[Planned]] = {}
    seen: list[object] = []
    for number, plan in enumerate(plans):
        way = [plan[place] for place in places]
        how = [(p.spec, p.stored) for p in way]
        if all(p.spec is not None for p in way) and how not in seen:
            found[number] = way
            seen.append(how)
    if not found:
        names = " and ".join(plans[0][place].info.name for place in places)
        rule = "no candidate suits all of them, and readers put them together"
        raise QtoolError(names, rule, "give others by --candidates")
    return found

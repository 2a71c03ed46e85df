"""The work of quantizing one shard, which can be done by another process, and of all shards."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool import formats
from qtool.formats import Source
from qtool.formats.checkpoint import CheckpointSource
from qtool.jobs import fingerprint, fusing, screening
from qtool.jobs.command import Command
from qtool.jobs.given import Given
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.tensors import Job
from qtool.layouts import LAYOUTS, Layout
from qtool.layouts.provenance import Provenance
from qtool.plan import Planned

if TYPE_CHECKING:
    from qtool.jobs.importance import Importance
    from qtool.jobs.second_order import SecondOrder


@dataclass(frozen=True)
class QuantizeShard:
    """The work on one shard.

    plan: without parts, which the layout of that name makes again. given: scales of its tensors
    that the user gives. absmax: the magnitude that tensors share with others in other shards.
    provenance: for its metadata.
    second_order: rounds the weights that it knows. importance: of those whose errors are weighted.
    """

    plan: tuple[Planned, ...]
    layout: str
    given: Given | None
    absmax: dict[str, float]
    provenance: Provenance
    second_order: SecondOrder | None = None
    importance: Importance | None = None

    @property
    def size(self) -> tuple[int, int]:
        quantized = [p.info.nbytes for p in self.plan if p.spec is not None]
        return len(quantized), sum(quantized)

    def key(self, settings: Mapping[str, Any]) -> str:
        """Differs wherever the result of the same source would."""
        choices = [settings, self.layout, self.absmax, self.provenance.recipe]
        words = [json.dumps(choices), repr(self.plan)]
        given = _words(self.plan, self.given)
        quantized = [p.info.name for p in self.plan if p.spec is not None]
        known = [known for known in (self.second_order, self.importance) if known is not None]
        inputs = [word for one in known for word in one.words(quantized)]
        return fingerprint.of_words([*(word.encode() for word in words), *given, *inputs])

    def write(self, source: Source, target: Path, jobs: int, progress: Progress) -> dict[str, Any]:
        global_scale = [p.info.name for p in self.plan if p.stored and p.stored.global_scale]
        own = set(fusing.fused(global_scale)) - set(self.absmax)
        absmax = fusing.shared(self.largest(source, own, jobs)) | self.absmax
        job = self._job(source, jobs, progress, absmax)
        job.write(target, "safetensors", external_data=False, force=True)
        return {
            "tensors": [record | {"stats": stats.to_json()} for record, stats in job.records],
            "skipped": [[p.info.name, p.reason] for p in self.plan if p.reason is not None],
        }

    def nbytes(self, source: Source) -> int:
        """Bytes of the shard that would be written."""
        job = self._job(source, 1, Silent(), {})
        return job.nbytes(source.path, "safetensors", external_data=False)

    def largest(self, source: Source, names: Collection[str], jobs: int) -> dict[str, float]:
        """The largest magnitude of each of these tensors, as far as they are in this shard."""
        if not any(p.info.name in names for p in self.plan):
            return {}
        return self._job(source, jobs, Silent(), {}).absmax(names)

    def _job(
        self, source: Source, jobs: int, progress: Progress, absmax: Mapping[str, float]
    ) -> Job:
        layout = LAYOUTS[self.layout]
        plan = [
            p if p.stored is None else replace(p, parts=layout.parts(p.info.name, p.stored))
            for p in self.plan
        ]
        readable = screening.readable(source, requantize=True)
        return Job(
            readable, plan, self.given, layout, progress, jobs, absmax,
            second_order=self.second_order, importance=self.importance,
            provenance=self.provenance,
        )  # fmt: skip


def works_of(
    command: Command,
    source: CheckpointSource,
    plan: Sequence[Planned],
    layout: Layout,
    made_by: Provenance,
) -> dict[str, QuantizeShard]:
    """The work on each shard, but for what its tensors share with those of others."""
    planned = {p.info.name: replace(p, parts=()) for p in plan}
    works = {}
    for name, shard in source.shards.items():
        with closing(formats.open(shard.path)) as opened:
            names = [info.name for info in screening.readable(opened, requantize=True).infos()]
        own = tuple(planned[name] for name in names)
        part = None if command.given is None else command.given.part(names)
        works[name] = QuantizeShard(
            own, layout.name, part, {}, made_by, command.second_order, command.importance
        )
    return works


def with_shared_absmax(
    source: CheckpointSource, works: Mapping[str, QuantizeShard], jobs: int
) -> dict[str, QuantizeShard]:
    """The works with the magnitudes that their tensors share with those of other shards."""
    files = {
        p.info.name: name
        for name, work in works.items()
        for p in work.plan
        if p.stored is not None and p.stored.global_scale
    }
    names = set(fusing.fused_across(files))
    found: dict[str, float] = {}
    for name, work in works.items():
        with closing(formats.open(source.shards[name].path)) as opened:
            found |= work.largest(opened, names, jobs)
    shared = fusing.shared(found)
    return {
        name: replace(work, absmax={k: v for k, v in shared.items() if files[k] == name})
        for name, work in works.items()
    }


def bytes_of(source: CheckpointSource, works: Mapping[str, QuantizeShard]) -> int:
    """Bytes of the shards that these works will write."""
    nbytes = 0
    for name, work in works.items():
        with closing(formats.open(source.shards[name].path)) as opened:
            nbytes += work.nbytes(opened)
    return nbytes


def _words(plan: Sequence[Planned], given: Given | None) -> Iterator[bytes]:
    """The given scales and zero points of the tensors, as bytes."""
    for planned in plan if given is not None else ():
        for array in given.of(planned.info.name) or () if given is not None else ():
            if array is not None:
                yield f"{planned.info.name} {array.dtype} {array.shape}".encode()
                yield array.tobytes()

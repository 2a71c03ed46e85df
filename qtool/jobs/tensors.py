"""Quantizes the tensors of a file, one by one, into another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from numpy.typing import NDArray

from qtool import engine, report
from qtool.errors import UsageError
from qtool.formats import Source, files
from qtool.jobs import fusing, streams
from qtool.jobs.given import Given
from qtool.jobs.progress import Progress, Silent
from qtool.layouts import Layout
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import Description
from qtool.layouts.provenance import Provenance
from qtool.layouts.writer import Writer
from qtool.plan import Planned
from qtool.recipe import Recipe
from qtool.stats import Stats
from qtool.tensor import Outcome, QuantizedTensor, Target

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.jobs.importance import Importance
    from qtool.jobs.second_order import SecondOrder


class Taker(Protocol):
    """Takes quantized tensors one by one."""

    def add(self, name: str, tensor: QuantizedTensor) -> object: ...

    def target(self, name: str) -> AbstractContextManager[Target]: ...


class Output(Taker, AbstractContextManager["Output"], Protocol):
    """A file being made of them; nbytes: of all of it, when it is complete."""

    @property
    def nbytes(self) -> int: ...


class OnnxLayout(Protocol):
    """How quantized weights are spelled in an ONNX model, where not by DequantizeLinear.

    option: what asks for it. settings: what the report says of it.
    """

    option: str
    settings: dict[str, Any]

    def plan(self, source: OnnxSource, recipe: Recipe) -> list[Planned]:
        """The fate of every tensor of the model."""
        ...

    def writer(
        self,
        source: OnnxSource,
        plan: Sequence[Planned],
        path: Path,
        *,
        external_data: bool,
        force: bool,
        provenance: Provenance | None,
    ) -> Output:
        """Writes the model to path; see formats.onnx.writer."""
        ...


class _Nowhere:
    """A Taker that keeps nothing."""

    def add(self, name: str, tensor: QuantizedTensor) -> None:
        """Nothing is kept."""

    @contextmanager
    def target(self, name: str) -> Iterator[Target]:
        """Where nothing is kept."""

        def write(offset: int, data: NDArray[Any]) -> None: ...

        yield Target(write, write, None, is_packed=True)


class Job:
    """Quantizes what the plan says and writes the file.

    layout: of .safetensors and .npz files; graph: of ONNX models, None: DequantizeLinear. absmax:
    the largest magnitude of tensors that share a global scale with others, also in other files;
    None: shared in this file alone. second_order: rounds the weights that it knows. importance: of
    those whose errors are weighted. provenance: for the file's metadata.
    """

    def __init__(
        self,
        source: Source,
        plan: Sequence[Planned],
        given: Given | None,
        layout: Layout,
        progress: Progress | None,
        jobs: int,
        absmax: Mapping[str, float] | None = None,
        graph: OnnxLayout | None = None,
        second_order: SecondOrder | None = None,
        importance: Importance | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._given = given
        self._layout = layout
        self._progress = progress or Silent()
        self._jobs = jobs
        self._absmax = absmax
        self._graph = graph
        self._second_order = second_order
        self._importance = importance
        self._provenance = provenance
        self.records: list[tuple[dict[str, Any], Stats]] = []

    def write(
        self,
        path: Path,
        container: str,
        *,
        external_data: bool,
        force: bool,
        accept: Callable[[int], None] | None = None,
    ) -> None:
        """Write the output to path, whole or not at all.

        force: replace what is there by then. accept: asked, with the bytes of the output, before
        it appears under its name; what it raises leaves the path as it was.
        """
        if container == "onnx":
            with self._onnx_writer(path, external_data=external_data, force=force) as model:
                self._quantize_into(model)
                if accept is not None:
                    accept(model.nbytes)
            return
        landing = files.replacing(path, force=force)
        with landing as temporary, streams.named(temporary, str(path)):
            with self._writer(temporary, container) as writer:
                self._quantize_into(writer)
                writer.copy_rest()
            if accept is not None:
                accept(writer.nbytes)

    def nbytes(self, path: Path, container: str, *, external_data: bool) -> int:
        """Bytes of the output that write() would make; raises what it would before any work."""
        if container == "onnx":
            return self._onnx_writer(path, external_data=external_data).nbytes
        return self._writer(path, container).nbytes

    def _writer(self, path: Path, container: str) -> Writer:
        quantized = [p for p in self._plan if p.stored is not None]
        tensors = {p.info.name: p.stored for p in quantized if p.stored is not None}
        original, kept = self._source, {}
        copied = {p.info.name: p.entries for p in self._plan if p.spec is None}
        if isinstance(self._source, DequantizedSource):
            original = self._source.original
            kept = {k: v for k, v in self._source.tensors.items() if k in copied}
            copied |= {name: self._source.parts(name) for name in kept}
            self._check_kept(kept)
        return Writer(
            container,
            path,
            {p.info.name: p.parts for p in quantized},
            [entry for entries in copied.values() for entry in entries],
            description=Description(self._layout, {**kept, **tensors}, self._provenance),
            source=original,
        )

    def measured(self) -> dict[str, Stats]:
        """The figures of every tensor; nothing is written."""
        self._quantize_into(_Nowhere())
        return {record["name"]: stats for record, stats in self.records}

    def _check_kept(self, kept: Collection[str]) -> None:
        """Refuse two layouts in one file."""
        layout = cast("DequantizedSource", self._source).layout
        if kept and layout is not self._layout:
            raise UsageError(
                "--layout",
                f"{next(iter(kept))} stays quantized in the {layout.name} layout",
                "quantize all that is, or dequantize the file first",
            )

    def _onnx_writer(self, path: Path, *, external_data: bool, force: bool = True) -> Output:
        source = cast("OnnxSource", self._source)
        if self._graph is not None:
            return self._graph.writer(
                source, self._plan, path, external_data=external_data, force=force,
                provenance=self._provenance,
            )  # fmt: skip
        from qtool.layouts.onnx_qdq import OnnxQdq
        from qtool.layouts.onnx_weight import Weight

        weights = {
            p.info.name: Weight(p.spec, p.stored.scale_dtype, has_zero_point=p.stored.zero_point)
            for p in self._plan
            if p.spec is not None and p.stored is not None
        }
        return OnnxQdq(
            source, weights, path, external_data=external_data, force=force,
            provenance=self._provenance,
        )  # fmt: skip

    def absmax(self, names: Collection[str]) -> dict[str, float]:
        """The largest magnitude of each of those tensors that are quantized."""
        found = {}
        for planned in self._plan:
            info = planned.info
            if planned.spec is not None and info.name in names:
                asked = engine.request(info.name, info.shape, info.dtype, planned.spec)
                with self._source.reading(info.name) as read:
                    found[info.name] = engine.find_absmax(read, asked, jobs=self._jobs)
        return found

    def shared_absmax(self) -> dict[str, float]:
        """absmax() of what is fused, where global scales are chosen in this file alone."""
        names = [p.info.name for p in self._plan if p.stored and p.stored.global_scale]
        return fusing.shared(self.absmax(set(fusing.fused(names))))

    def _quantize_into(self, writer: Taker) -> None:
        quantized = [(p, p.spec) for p in self._plan if p.spec is not None]
        shared = self.shared_absmax() if self._absmax is None else self._absmax
        self._progress.begin(len(quantized), sum(p.info.nbytes for p, _ in quantized))
        kernels_pay = engine.kernels_pay(sum(engine.work(s, p.info.size) for p, s in quantized))
        for planned, spec in quantized:
            info = planned.info
            scale, zero = (self._given and self._given.of(info.name)) or (None, None)
            absmax = shared.get(info.name)
            asked = engine.request(info.name, info.shape, info.dtype, spec, scale, zero, absmax)
            pays = kernels_pay and engine.work(spec, info.size) >= engine.TILES_PAY
            kind = None
            if self._importance is not None and self._importance.has(info.name):
                kind = self._importance.kind(info, spec)
                asked = replace(asked, weights=self._importance.weights(info, spec))
            if self._second_order is not None and self._second_order.has(info.name):
                outcome = self._round(self._second_order, planned, asked, writer)
            elif pays and engine.can_stream(asked):
                outcome = self._stream(asked, writer)
            else:
                threads = self._jobs if pays else 0
                tensor = engine.plain.quantize(self._source.read(info.name), asked, threads)
                writer.add(info.name, tensor)
                outcome = tensor.outcome
                self._progress.advance(info.nbytes)
            record = report.tensor_record(
                info, outcome.describe(), outcome.stats, planned.bytes_after, kind
            )
            self.records.append((record, outcome.stats))
            self._progress.finish(info.name)

    def _round(
        self, second_order: SecondOrder, planned: Planned, asked: engine.Request, writer: Taker
    ) -> Outcome:
        """Quantize a tensor for the least error of its layer's outputs."""
        info = planned.info
        second_order.load(info, asked.spec, self._progress.note)
        tensor = second_order.quantize(self._source.read(info.name), asked, info, self._jobs)
        writer.add(info.name, tensor)
        self._progress.advance(info.nbytes)
        return tensor.outcome

    def _stream(self, asked: engine.Request, writer: Taker) -> Outcome:
        from qtool.engine.stream import Stream
        from qtool.kernels import machine

        machine.load(self._progress.note)
        with (
            self._source.reading(asked.name) as read,
            writer.target(asked.name) as target,
        ):
            return Stream(read, asked, self._jobs, self._progress.advance).quantize(target)

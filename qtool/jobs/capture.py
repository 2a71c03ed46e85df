"""qtool capture: what the weights of an ONNX model are multiplied with, on given samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from qtool import engine, formats
from qtool.dtypes import DTYPES
from qtool.errors import FormatError, TensorError, UsageError
from qtool.formats import Entry, files
from qtool.jobs import screening, streams
from qtool.jobs.collected import Moments, Spool
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.rows import rows
from qtool.jobs.samples import Samples
from qtool.recipe import Recipe
from qtool.runtime import Session

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource
    from qtool.formats.onnx.operands import Operand

Array = NDArray[Any]

KINDS = ("activations", "hessian", "mean-square")
_FLOAT32 = DTYPES["float32"]
# Bytes of the sums that are kept at once; the model runs again for others.
_SUMS = 2 << 30


def capture_file(
    model: str | Path,
    samples: Sequence[str | Path],
    dst: str | Path | None = None,
    *,
    kind: str = "activations",
    batch: int = 1,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run an ONNX model on samples, and write what every weight that `qtool quantize` would
    quantize is multiplied with, under the weight's name.

    samples, batch: see Samples. dst None: STEM.KIND.safetensors beside the model.
    kind: "activations": x, float32 (rows, in_features); see rows(). "hessian": sum of x x^T over
        the rows, divided by their number, (in_features, in_features). "mean-square": its diagonal.
        Sums are float64, results float32.
    jobs: threads of onnxruntime.
    Returns what was done as plain data. Raises QtoolError; dst is then as it was.
    """
    started = time.perf_counter()
    if kind not in KINDS:
        raise UsageError("kind", f"{kind!r} is unknown", "use " + ", ".join(KINDS))
    if batch < 1:
        raise UsageError("--batch", f"{batch} is not positive", "use for example 16")
    streams.check_once(model, *samples)
    with ExitStack() as stack:
        opened = stack.enter_context(streams.opened(model))
        if opened.container != "onnx":
            rule = f"is {opened.container}, which cannot be run"
            raise FormatError(str(model), rule, "give an ONNX model")
        source = cast("OnnxSource", opened)
        name, container = streams.target(model, dst, None, "safetensors", kind)
        read = [*streams.source_files(model, source), *map(Path, samples)]
        streams.check_target(read, name, force=force)
        recipe = Recipe({"dtype": "int8"}, include=include, exclude=exclude)
        operands, skipped = _operands(source, recipe)
        held = [stack.enter_context(streams.kept(file)) for file in samples]
        threads = jobs or engine.default_jobs()
        job = _Job(source, operands, held, batch, threads, progress or Silent())
        with streams.placed(name, f"{source.path.stem}.{container}") as path:
            job.write(path, container, kind, force=force)
            written = streams.written(path, name, container)
        return {
            "command": "capture",
            "source": {"name": str(model), "container": "onnx", "bytes": source.nbytes},
            "samples": {"names": list(map(str, samples)), "runs": job.runs},
            "output": written,
            "kind": kind,
            "tensors": [
                {"name": n, "rows": job.rows[n], "in_features": found[0].features}
                for n, found in operands.items()
            ],
            "skipped": [{"name": n, "reason": reason} for n, reason in skipped],
            "seconds": round(time.perf_counter() - started, 6),
        }


def _operands(
    source: OnnxSource, recipe: Recipe
) -> tuple[dict[str, list[Operand]], list[tuple[str, str]]]:
    """What every weight is multiplied with; the names of others, and why they are left out."""
    from qtool.formats.onnx.operands import Operands

    screening.readable(source, requantize=False, remedy="dequantize it first")
    found, skipped = {}, []
    finder = Operands(source)
    for info in source.infos():
        reason = recipe.reason_against(info)
        operands = finder.of(info.name) if reason is None else reason
        if isinstance(operands, str):
            skipped.append((info.name, operands))
        else:
            found[info.name] = operands
    if not found:
        text = "; ".join(dict.fromkeys(reason for _, reason in skipped)) or "no tensors"
        raise FormatError(str(source.path), f"no weight whose inputs can be captured: {text}")
    return found, skipped


class _Job:
    """Runs a model on samples and writes what is captured.

    rows: of every weight, once that is done.
    """

    def __init__(
        self,
        source: OnnxSource,
        operands: Mapping[str, Sequence[Operand]],
        samples: Sequence[Path],
        batch: int,
        threads: int,
        progress: Progress,
    ) -> None:
        self._source = source
        self._operands = operands
        self._files = samples
        self._batch = batch
        self._threads = threads
        self._progress = progress
        self.rows: dict[str, int] = {}
        self.runs = 0

    def write(self, path: Path, container: str, kind: str, *, force: bool) -> None:
        """Write the file at path, whole or not at all. force: replace what is there by then."""
        nbytes = 0
        for file in self._files:
            with streams.opened(file) as source:
                nbytes += source.nbytes
        landing = files.replacing(path, force=force)
        with landing as temporary, streams.named(temporary, str(path)):
            if kind == "activations":
                self._progress.begin(len(self._operands), nbytes)
                self._write_rows(temporary, container)
            else:
                groups = list(_groups(self._operands, 1 if kind == "hessian" else 0))
                self._progress.begin(len(self._operands), nbytes * len(groups))
                self._write_means(temporary, container, groups, is_diagonal=kind != "hessian")

    def _write_rows(self, path: Path, container: str) -> None:
        with Spool(path.parent) as spool:
            self._run(self._distinct(self._operands), spool)
            self.rows = {name: spool.rows(found) for name, found in self._operands.items()}
            entries = [
                Entry(name, _FLOAT32, (self.rows[name], found[0].features))
                for name, found in self._operands.items()
            ]
            with formats.sink(container, path, entries, {}) as sink:
                for name, found in self._operands.items():
                    sink.write(name, spool.pieces(found))
                    self._progress.finish(name)

    def _write_means(
        self, path: Path, container: str, groups: Sequence[list[str]], *, is_diagonal: bool
    ) -> None:
        entries = [
            Entry(name, _FLOAT32, (found[0].features,) * (1 if is_diagonal else 2))
            for name, found in self._operands.items()
        ]
        with formats.sink(container, path, entries, {}) as sink:
            for names in groups:
                wanted = self._distinct(names)
                moments = Moments(wanted, self._threads, is_diagonal=is_diagonal)
                self._run(wanted, moments)
                for name in names:
                    self.rows[name] = moments.rows(self._operands[name])
                    sink.write(name, moments.mean(self._operands[name]))
                    self._progress.finish(name)

    def _distinct(self, names: Iterable[str]) -> list[Operand]:
        """The operands of weights of those names, each of them once."""
        return list(dict.fromkeys(o for name in names for o in self._operands[name]))

    def _run(self, wanted: Sequence[Operand], taker: Spool | Moments) -> None:
        """Let the taker have all rows of those operands."""
        from qtool.formats.onnx.outputs import with_outputs

        content, outputs = with_outputs(self._source, [operand.tensor for operand in wanted])
        path = self._source.path
        session = Session(content, path.parent, str(path), self._threads)
        del content
        self.runs = 0
        for feeds in Samples(self._files, session.inputs, self._batch).runs():
            values = session.run(feeds, list(outputs.values()))
            found = dict(zip(outputs, values, strict=True))
            self._check(found)
            for operand in wanted:
                for piece in rows(found[operand.tensor], operand):
                    taker.add(operand, piece)
            self.runs += 1
            self._progress.advance(sum(array.nbytes for array in feeds.values()))

    def _check(self, found: Mapping[str, Array]) -> None:
        """Refuse values that would spoil every sum."""
        for name, values in found.items():
            if not np.isfinite(values).all():
                rule = f"holds NaN or Inf in run {self.runs + 1}"
                raise TensorError(f"tensor {name}", rule, "leave that sample out")


def _groups(operands: Mapping[str, Sequence[Operand]], power: int) -> Iterator[list[str]]:
    """The weights, as many at once as _SUMS has room for; power: of the features, in a row of
    whose sums."""
    names: list[str] = []
    held: set[Operand] = set()
    room = _SUMS
    for name, found in operands.items():
        needed = sum(8 * o.features ** (1 + power) for o in set(found) - held)
        if names and needed > room:
            yield names
            names, held, room = [], set(), _SUMS
            needed = sum(8 * o.features ** (1 + power) for o in set(found))
        names.append(name)
        held |= set(found)
        room -= needed
    yield names

"""qtool calibrate: scales and zero points for tensors of which there are batches."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import engine, formats, scales
from qtool.dtypes import DType, DTypeLike, resolve
from qtool.errors import FormatError, UsageError, usage_errors
from qtool.formats import Entry, files
from qtool.jobs import streams
from qtool.jobs.batches import Batch, Batches
from qtool.jobs.progress import Progress, Silent
from qtool.recipe import Recipe, unmatched
from qtool.scales import streamed
from qtool.spec import PerAxis, PerTensor, QuantSpec, describe, writer_of
from qtool.tensor import Outcome, Target

Array = NDArray[Any]


def calibrate_files(
    batches: Sequence[str | Path],
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis: int | None = None,
    symmetric: bool | None = None,
    method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    narrow_range: bool = False,
    nonfinite: str = "error",
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose a scale and a zero point for each tensor from all of its batches, and write them as
    NAME.scale and NAME.zero_point, which quantize_file(scale=...) takes.

    batches: .npz and .safetensors files of arrays named like the tensors, and .npy files, which
        are batches of one tensor: NAME of NAME=FILE, or else the first one's stem. They may be
        larger than memory together. dst None: STEM.scales.safetensors beside the first one.
    axis: one scale for each index along that axis, which must have the same size in all batches,
        as must those behind it; None: one scale per tensor.
    dtype ... nonfinite: see QuantSpec. jobs: threads.
    Returns what was done as plain data, with the figures of the batches quantized like that, in
    float32. Raises QtoolError; dst is then as it was.
    """
    started = time.perf_counter()
    if dtype is None:
        raise UsageError("--dtype", "no type to quantize to", "give one")
    with usage_errors():
        spec = QuantSpec(
            dtype, PerTensor() if axis is None else PerAxis(axis), symmetric=symmetric,
            method=method, scale_dtype=scale_dtype, narrow_range=narrow_range,
            nonfinite=nonfinite, precision="float32",
        )  # fmt: skip
        raw = None if source_dtype is None else resolve(source_dtype, "source_dtype")
    with ExitStack() as stack:
        sources = [stack.enter_context(_opened(word)) for word in batches]
        first = str(batches[0]).rpartition("=")[2]
        kind = "safetensors"
        name, container = streams.target(first, dst, None, kind, "scales", [kind])
        streams.check_target([path for _, path in sources], name, force=force)
        recipe = Recipe({"dtype": dtype}, include=include, exclude=exclude, all_ranks=True)
        tensors, skipped = _tensors(sources, recipe, spec, raw)
        job = _Job(spec, progress or Silent(), jobs or engine.default_jobs())
        with streams.placed(name, "scales.safetensors") as path:
            job.write(path, tensors, force=force)
            written = streams.written(path, name, container)
    return {
        "command": "calibrate",
        "sources": list(map(str, batches)),
        "output": written,
        "tensors": job.records,
        "skipped": [{"name": n, "reason": reason} for n, reason in skipped.items()],
        "warnings": [
            f"pattern '{pattern}' matches no tensor"
            for pattern in unmatched([*include, *exclude], [*(t.name for t in tensors), *skipped])
        ],
        "seconds": round(time.perf_counter() - started, 6),
    }


@contextmanager
def _opened(word: str | Path) -> Iterator[tuple[str | None, Path]]:
    """The NAME of NAME=FILE, or None, and a file; standard input and pipes are kept in one."""
    name, is_named, file = str(word).partition("=")
    if not is_named or os.path.exists(word):
        name, file = "", str(word)
    if file == streams.STANDARD or streams.is_pipe(Path(file)):
        with streams.opened(file) as source:
            yield name or None, source.path
    else:
        yield name or None, Path(file)


def _tensors(
    sources: Sequence[tuple[str | None, Path]],
    recipe: Recipe,
    spec: QuantSpec,
    source_dtype: DType | None,
) -> tuple[list[Batches], dict[str, str]]:
    """The batches of every tensor, and the names of what is left alone, with the reason."""
    found: dict[str, list[Batch]] = {}
    skipped: dict[str, str] = {}
    bare, refused = None, None
    for label, path in sources:
        with closing(formats.open(path, source_dtype=source_dtype)) as source:
            infos = source.infos()
            if source.container not in streams.NATIVE:
                rule = f"is {source.container}, which holds no activations"
                raise FormatError(str(path), rule, "give .npy, .npz or .safetensors files")
            if label and len(infos) != 1:
                rule = f"holds {len(infos)} arrays, {label} is the name of one"
                raise FormatError(str(path), rule, "leave the name out")
            for info in infos:
                name = label or info.name
                if source.container == "npy" and not label:
                    name = bare = bare or info.name
                reason = recipe.reason_against(replace(info, name=name))
                if reason is not None:
                    skipped[name] = reason
                    refused = refused or path
                array = Batch(path, info.name, info.shape, info.dtype, source_dtype)
                found.setdefault(name, []).append(array)
    refuses = spec.nonfinite == "error"
    axis = spec.granularity.axis if isinstance(spec.granularity, PerAxis) else None
    wanted = [
        Batches(name, arrays, axis, refuses=refuses)
        for name, arrays in found.items()
        if name not in skipped
    ]
    if not wanted:
        text = ", ".join(dict.fromkeys(skipped.values())) or "no arrays"
        patterns = recipe.include or recipe.exclude
        remedy = f"its arrays are {', '.join([*found][:5])}" if patterns and found else None
        raise FormatError(str(refused or sources[0][1]), f"nothing to calibrate: {text}", remedy)
    return wanted, skipped


class _Job:
    """Chooses scales and zero points; records: what the report says of each tensor."""

    def __init__(self, spec: QuantSpec, progress: Progress, jobs: int) -> None:
        self._spec = spec
        self._progress = progress
        self._jobs = jobs
        self.records: list[dict[str, Any]] = []

    def write(self, path: Path, tensors: Sequence[Batches], *, force: bool) -> None:
        """Write the scales and zero points of tensors to path, whole or not at all.

        force: replace what is there by then.
        """
        self._progress.begin(len(tensors), sum(tensor.nbytes for tensor in tensors))
        parts: dict[str, Array] = {}
        for tensor in tensors:
            scale, zero_point, outcome = self._quantized(tensor)
            parts[f"{tensor.name}.scale"] = scale
            if zero_point is not None:
                parts[f"{tensor.name}.zero_point"] = _stored(zero_point)
            self.records.append(
                {"name": tensor.name, "batches": tensor.count}
                | outcome.describe()
                | describe(self._spec.granularity)
                | outcome.stats.figures()
            )
            self._progress.finish(tensor.name)
        entries = [Entry(name, resolve(array.dtype), array.shape) for name, array in parts.items()]
        with (
            files.replacing(path, force=force) as temporary,
            streams.named(temporary, str(path)),
            formats.sink("safetensors", temporary, entries, {}) as sink,
        ):
            for name, array in parts.items():
                sink.write(name, array)

    def _quantized(self, tensor: Batches) -> tuple[Array, Array | None, Outcome]:
        """Scale, zero point, and what becomes of the batches with them; codes are not kept."""
        spec = self._spec.at(tensor.granularity)
        given = _from_ranges(tensor, spec) if spec.needs_distribution else ()
        asked = engine.request(tensor.name, tensor.shape, tensor.dtype, spec, *given)
        pays = engine.kernels_pay(engine.work(asked.spec, tensor.size))
        if not (engine.can_stream(asked) and pays):
            self._progress.advance(tensor.nbytes)
            found = engine.plain.quantize(tensor.read(), asked, self._jobs if pays else 0)
            return found.scale, found.zero_point, found.outcome
        from qtool.engine.stream import Stream
        from qtool.kernels import machine

        machine.load(self._progress.note)
        shape = spec.granularity.scale_shape(tensor.shape)
        scale = np.empty(shape, asked.storage.numpy)
        zero_point = np.empty(shape, spec.dtype.numpy)
        target = Target(_drop, writer_of(scale), writer_of(zero_point), is_packed=False)
        with tensor.reading() as read:
            outcome = Stream(read, asked, self._jobs, self._progress.advance).quantize(target)
        return scale, zero_point if outcome.has_zero_point else None, outcome


def _from_ranges(tensor: Batches, spec: QuantSpec) -> tuple[Array, Array | None]:
    """The scale, in its storage type, and the zero point by the range that the method finds."""
    shape = spec.granularity.scale_shape(tensor.shape)
    low, high = streamed.ranges(tensor.pieces, tensor.groups, spec)
    storage = spec.storage_dtype(tensor.dtype)
    return scales.from_ranges(low.reshape(shape), high.reshape(shape), spec, storage)


def _stored(zero_point: Array) -> Array:
    """A zero point in a type of whole bytes, which every file can hold."""
    dtype = resolve(zero_point.dtype)
    return zero_point.astype(f"{dtype.kind}8") if dtype.bits < 8 else zero_point


def _drop(_offset: int, _data: Array) -> None:
    """A Writer that keeps nothing."""

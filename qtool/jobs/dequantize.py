"""qtool dequantize: a quantized file back in floats, in the same container."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import engine
from qtool.dtypes import DTYPES, DType, DTypeLike, resolve
from qtool.errors import FormatError, SpecError, UsageError, usage_errors
from qtool.formats import Entry, Source, files, sink
from qtool.jobs import streams
from qtool.jobs.division import Division
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.progress import Progress, Silent
from qtool.layouts.dequantized import DequantizedSource
from qtool.layouts.metadata import read_metadata
from qtool.recipe import SOURCE_FLOATS
from qtool.spec import (
    SCALE_DTYPES,
    Blocked,
    Granularity,
    PerAxis,
    PerTensor,
    Shape,
    Tiled,
    Writer,
    bytes_of,
)
from qtool.tensor import Codes

# A dequantized tensor: its name, its shape and the type of its codes.
Done = tuple[str, Shape, DType]
# What the command line says of bare codes: scale, zero point, axis, block size, tile.
_Parameters = tuple[
    GivenValue | None, GivenValue | None, int | None, int | None, tuple[int, int] | None
]

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


def dequantize_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike = "float32",
    scale: GivenValue | None = None,
    zero_point: GivenValue | None = None,
    axis: int | None = None,
    block_size: int | None = None,
    tile: tuple[int, int] | None = None,
    source_dtype: DTypeLike | None = None,
    external_data: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write (y - zero_point) * scale for every quantized tensor; the rest byte for byte.

    src, dst: as in quantize_file; dst None: STEM.DTYPE.CONTAINER beside src.
    dtype: float32, float16, bfloat16 (the product is rounded once to it) or float64 (of float32
        values).
    scale, zero_point, axis, block_size, tile: for a .npy of codes, which holds none of them.
    resume: go on with what an earlier run for a folder has left.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns what was done as plain data. Raises QtoolError; dst is then as it was.
    """
    started = time.perf_counter()
    with usage_errors():
        output = resolve(dtype, "dtype", SOURCE_FLOATS)
    if output not in SOURCE_FLOATS:
        raise UsageError(
            "dtype",
            f"{output} is not a float type to dequantize to",
            "use float32, float16, bfloat16 or float64",
        )
    parameters = (scale, zero_point, axis, block_size, tile)
    if os.path.isdir(src):
        from qtool.jobs.dequantize_folder import dequantize_folder

        _check_no_parameters("a folder of", parameters)
        streams.check_folder(None, external_data=external_data)
        return dequantize_folder(
            src, dst, output, source_dtype=source_dtype, resume=resume, jobs=jobs, force=force,
            progress=progress,
        )  # fmt: skip
    Division(resume).check_unused(src)
    with streams.opened(src, source_dtype) as source:
        kind = source.container
        name, container = streams.target(src, dst, None, kind, output.name, [kind])
        _check_usage(container, parameters, external_data=external_data)
        streams.check_target(streams.source_files(src, source), name, force=force)
        with streams.placed(name, f"{source.path.stem}.{container}") as path:
            threads = jobs or engine.default_jobs()
            job = _Job(source, output, progress or Silent(), threads, force=force)
            if container == "npy":
                done = job.write_codes(path, *_given_codes(*parameters))
            elif container == "onnx":
                done = job.write_onnx(path, external_data=external_data)
            else:
                check_quantized(source)
                done = job.write_native(path)
            written = streams.written(path, name, container)
        return {
            "command": "dequantize",
            "source": {"name": str(src), "container": container, "bytes": source.nbytes},
            "output": written,
            "tensors": described(done, output),
            "seconds": round(time.perf_counter() - started, 6),
        }


def _check_usage(container: str, parameters: _Parameters, *, external_data: bool) -> None:
    """Refuse options that do not fit the container."""
    if container != "npy":
        _check_no_parameters(container, parameters)
    if external_data and container != "onnx":
        raise UsageError("--external-data", f"{container} has none", "it is for ONNX models")


def _check_no_parameters(container: str, parameters: _Parameters) -> None:
    if any(given is not None for given in parameters):
        raise UsageError(
            "--scale",
            f"{container} files hold their own scales",
            "leave --scale, --zero-point, --axis, --block-size and --tile out",
        )


def check_quantized(source: Source) -> None:
    """Refuse a file that qtool did not quantize."""
    if not read_metadata(source).tensors:
        raise FormatError(
            str(source.path),
            "holds nothing that qtool quantized",
            "give a file that `qtool quantize` wrote",
        )


def write(source: Source, output: DType, path: Path, jobs: int, progress: Progress) -> list[Done]:
    """Write one .safetensors file with its tensors dequantized, whichever are quantized."""
    return _Job(source, output, progress, jobs, force=True).write_native(path)


def _given_codes(
    scale: GivenValue | None,
    zero_point: GivenValue | None,
    axis: int | None,
    block_size: int | None,
    tile: tuple[int, int] | None,
) -> tuple[Given, Granularity]:
    """The parameters of the codes in a .npy file."""
    if scale is None:
        raise UsageError("--scale", "a .npy file holds codes alone", "give the scale of them")
    if tile is not None:
        if axis is not None or block_size is not None:
            raise UsageError("--tile", "replaces --axis and --block-size", "leave one of them out")
        return Given(scale, zero_point), Tiled(tile)
    if block_size is not None:
        return Given(scale, zero_point), Blocked(-1 if axis is None else axis, block_size)
    return Given(scale, zero_point), PerTensor() if axis is None else PerAxis(axis)


def described(done: Sequence[Done], output: DType) -> list[dict[str, Any]]:
    """What is said of dequantized tensors."""
    return [
        {"name": name, "shape": list(shape), "source_dtype": codes.name, "dtype": output.name}
        for name, shape, codes in done
    ]


class _Job:
    """Dequantizes what a source holds and writes the file.

    force: replace what is there by then.
    """

    def __init__(
        self, source: Source, output: DType, progress: Progress, jobs: int, *, force: bool
    ) -> None:
        self._source = source
        self._output = output
        self._progress = progress
        self._jobs = jobs
        self._force = force
        self._kernels_pay = False

    def write_codes(self, path: Path, given: Given, granularity: Granularity) -> list[Done]:
        """The codes of a .npy file."""
        (info,) = self._source.infos()
        if not (info.dtype.is_target or info.dtype.name == "int32"):
            raise FormatError(
                str(self._source.path),
                f"holds {info.dtype}, which are no codes",
                "give a file of quantized codes, or --source-dtype",
            )
        found = given.of(info.name)
        if found is None:
            raise SpecError("scale", f"the file holds none for {info.name}", "give it as a .npy")
        granularity = granularity.resolve(info.shape)
        stored = resolve(found[0].dtype, "scale")
        scale = engine.given_scale(
            found[0], stored if stored in SCALE_DTYPES else DTYPES["float32"],
            granularity.scale_shape(info.shape), "scale", negative=True,
        )  # fmt: skip
        zero_point = None
        if found[1] is not None:
            zero_point = engine.given_codes(found[1], info.dtype, scale.shape)
        entry = Entry(info.name, self._output, info.shape)
        self._begin([(info.dtype, info.shape)])
        with (
            files.replacing(path, force=self._force) as temporary,
            sink("npy", temporary, [entry], {}) as writer,
            self._source.reading(info.name) as read,
            writer.writing(info.name) as write,
        ):
            parameters = (scale, zero_point, granularity)
            read_bytes = bytes_of(read, info.dtype)
            codes = Codes(read_bytes, info.dtype, info.shape, *parameters, is_packed=False)
            self._restore(codes, write, info.name)
        return [(info.name, info.shape, info.dtype)]

    def write_native(self, path: Path) -> list[Done]:
        """A file that qtool quantized."""
        readable = DequantizedSource(self._source, self._output)
        tensors = readable.tensors
        infos = readable.infos()
        entries = [Entry(info.name, info.dtype, info.shape) for info in infos]
        self._begin([(stored.dtype, stored.shape) for stored in tensors.values()])
        with (
            files.replacing(path, force=self._force) as temporary,
            sink(self._source.container, temporary, entries, readable.metadata) as writer,
        ):
            for info in infos:
                if info.name not in tensors:
                    writer.write(info.name, readable.chunks(info.name))
                    continue
                with readable.codes(info.name) as codes, writer.writing(info.name) as write:
                    self._restore(codes, write, info.name)
        return [(name, stored.shape, stored.dtype) for name, stored in tensors.items()]

    def write_onnx(self, path: Path, *, external_data: bool) -> list[Done]:
        """An ONNX model."""
        from qtool.layouts.onnx_dequantize import OnnxDequantized

        model = OnnxDequantized(cast("OnnxSource", self._source), self._output)
        if not model.folded:
            raise FormatError(
                str(self._source.path),
                "has no node that qtool knows to dequantize or multiply stored codes",
                "give a file that `qtool quantize` wrote",
            )
        self._begin([(folded.dtype, folded.shape) for folded in model.folded])
        model.write(path, external_data=external_data, restore=self._restore, force=self._force)
        return [(folded.name, folded.shape, folded.dtype) for folded in model.folded]

    def _begin(self, tensors: Sequence[tuple[DType, Shape]]) -> None:
        """Prepare for the codes of that type and shape."""
        sizes = [math.prod(shape) for _, shape in tensors]
        self._kernels_pay = engine.kernels_pay(sum(sizes))
        self._progress.begin(len(sizes), sum(map(self._output.nbytes, sizes)))

    def _restore(self, codes: Codes, write: Writer, name: str) -> None:
        """Store the values of codes, tile by tile."""
        size = math.prod(codes.shape)
        pays = self._kernels_pay and size >= engine.TILES_PAY
        if pays and engine.can_restore(codes, self._output):
            from qtool.engine.restore import restore
            from qtool.kernels import machine

            machine.load(self._progress.note)
            restore(codes, write, self._output, jobs=self._jobs, moved=self._progress.advance)
        else:
            engine.restore_plain.restore(codes, write, self._output, self._jobs)
            self._progress.advance(self._output.nbytes(size))
        self._progress.finish(name)

"""qtool dequantize: a quantized file back in floats, in the same container."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool import engine
from qtool.dtypes import DTYPES, DType, DTypeLike, resolve
from qtool.errors import FormatError, SpecError, UsageError, usage_errors
from qtool.formats import Entry, Source, files, sink
from qtool.jobs import streams
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.progress import Progress, Silent
from qtool.layouts.dequantized import DequantizedSource
from qtool.recipe import SOURCE_FLOATS
from qtool.spec import (
    PRECISIONS,
    SCALE_DTYPES,
    Blocked,
    Granularity,
    PerAxis,
    PerTensor,
    Shape,
    Writer,
)
from qtool.tensor import dequantize

# A dequantized tensor: its name, its shape and the type of its codes.
Done = tuple[str, Shape, DType]
# What the command line says of bare codes: scale, zero point, axis, block size.
_Parameters = tuple[GivenValue | None, GivenValue | None, int | None, int | None]

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
    source_dtype: DTypeLike | None = None,
    external_data: bool = False,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write (y - zero_point) * scale for every quantized tensor; the rest byte for byte.

    src, dst: as in quantize_file; dst None: STEM.DTYPE.CONTAINER beside src.
    dtype: float32, float16, bfloat16 (the product is rounded once to it) or float64 (of float32
        values).
    scale, zero_point, axis, block_size: for a .npy of codes, which holds none of them.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns what was done as plain data. Raises QtoolError; dst is then as it was.
    """
    started = time.perf_counter()
    with usage_errors():
        output = resolve(dtype, "dtype")
    if output not in SOURCE_FLOATS:
        raise UsageError(
            "dtype",
            f"{output} is not a float type to dequantize to",
            "use float32, float16, bfloat16 or float64",
        )
    with streams.opened(src, source_dtype) as source:
        name, container = streams.target(src, dst, None, source.container, output.name)
        parameters = (scale, zero_point, axis, block_size)
        _check_usage(source, name, container, parameters, external_data=external_data)
        streams.check_target(streams.source_files(src, source), name, force=force)
        with streams.placed(name, f"{source.path.stem}.{container}") as path:
            if container == "npy":
                done = _write_codes(source, _given_codes(*parameters), output, path)
            elif container == "onnx":
                done = _write_onnx(source, output, path, external_data=external_data)
            else:
                threads = jobs or engine.default_jobs()
                done = _write_native(source, output, path, threads, progress or Silent())
            written = streams.written(path, name, container)
        return {
            "command": "dequantize",
            "source": {"name": str(src), "container": container, "bytes": source.nbytes},
            "output": written,
            "tensors": [
                {
                    "name": name,
                    "shape": list(shape),
                    "source_dtype": codes.name,
                    "dtype": output.name,
                }
                for name, shape, codes in done
            ],
            "seconds": round(time.perf_counter() - started, 6),
        }


def _check_usage(
    source: Source, name: str, container: str, parameters: _Parameters, *, external_data: bool
) -> None:
    """Refuse options that do not fit the container."""
    if container != source.container:
        raise UsageError(
            name,
            f"{source.container} is dequantized to the same container",
            f"end its name in .{source.container}",
        )
    if container != "npy" and any(given is not None for given in parameters):
        raise UsageError(
            "--scale",
            f"{container} files hold their own scales",
            "leave --scale, --zero-point, --axis and --block-size out",
        )
    if external_data and container != "onnx":
        raise UsageError("--external-data", f"{container} has none", "it is for ONNX models")


def _given_codes(
    scale: GivenValue | None,
    zero_point: GivenValue | None,
    axis: int | None,
    block_size: int | None,
) -> tuple[Given, Granularity]:
    """The parameters of the codes in a .npy file."""
    if scale is None:
        raise UsageError("--scale", "a .npy file holds codes alone", "give the scale of them")
    if block_size is not None:
        return Given(scale, zero_point), Blocked(-1 if axis is None else axis, block_size)
    return Given(scale, zero_point), PerTensor() if axis is None else PerAxis(axis)


def _write_codes(
    source: Source, parameters: tuple[Given, Granularity], output: DType, path: Path
) -> list[Done]:
    (info,) = source.infos()
    given, granularity = parameters
    if not (info.dtype.is_target or info.dtype.name == "int32"):
        raise FormatError(
            str(source.path),
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
    compute = output if output in PRECISIONS else DTYPES["float32"]
    values = dequantize(source.read(info.name), scale, zero_point, granularity, compute)
    with (
        files.replacing(path) as temporary,
        sink("npy", temporary, [Entry(info.name, output, info.shape)], {}) as writer,
    ):
        writer.write(info.name, values.astype(output.numpy))
    return [(info.name, info.shape, info.dtype)]


def _write_native(
    source: Source, output: DType, path: Path, jobs: int, progress: Progress
) -> list[Done]:
    readable = DequantizedSource(source, output)
    if not readable.tensors:
        raise FormatError(
            str(source.path),
            "holds nothing that qtool quantized",
            "give a file that `qtool quantize` wrote",
        )
    infos = readable.infos()
    entries = [Entry(info.name, info.dtype, info.shape) for info in infos]
    progress.begin(len(infos), sum(info.nbytes for info in infos))
    sizes = (info.size for info in infos if info.name in readable.tensors)
    kernels_pay = sum(sizes) >= engine.KERNELS_PAY and source.container == "safetensors"
    with (
        files.replacing(path) as temporary,
        sink(source.container, temporary, entries, readable.metadata) as writer,
    ):
        for info in infos:
            stored = readable.tensors.get(info.name)
            pays = kernels_pay and info.size >= engine.TILES_PAY
            if pays and stored is not None and engine.can_restore(stored.dtype, output):
                with writer.writing(info.name) as write:
                    _restore(readable, info.name, write, output, jobs, progress)
            else:
                writer.write(info.name, readable.chunks(info.name))
                progress.advance(info.nbytes)
            progress.finish(info.name)
    return [(name, stored.shape, stored.dtype) for name, stored in readable.tensors.items()]


def _restore(
    source: DequantizedSource,
    name: str,
    write: Writer,
    output: DType,
    jobs: int,
    progress: Progress,
) -> None:
    """Dequantize one tensor tile by tile."""
    from qtool.engine.restore import restore
    from qtool.kernels import machine

    stored = source.tensors[name]
    machine.load(progress.note)
    with source.reading_codes(name) as read:
        restore(
            read, write, stored.shape, stored.dtype, stored.granularity,
            *source.parameters(name), output, jobs=jobs, moved=progress.advance,
        )  # fmt: skip


def _write_onnx(source: Source, output: DType, path: Path, *, external_data: bool) -> list[Done]:
    from qtool.layouts.onnx_dequantize import OnnxDequantized

    model = OnnxDequantized(cast("OnnxSource", source), output)
    if not model.folded:
        raise FormatError(
            str(source.path),
            "has no DequantizeLinear node of stored tensors",
            "give a file that `qtool quantize` wrote",
        )
    model.write(path, external_data=external_data)
    return [(folded.name, folded.shape, folded.dtype) for folded in model.folded]

"""qtool compare: what quantizing in several ways would cost, without writing files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtool import report
from qtool.dtypes import DTypeLike
from qtool.formats import files
from qtool.jobs import streams
from qtool.jobs.activations import Words, listed
from qtool.jobs.combinations import Names, combinations, items_of
from qtool.jobs.outcomes import ordered
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.sweep import Sweep
from qtool.report import table


def compare_file(
    src: str | Path,
    *,
    dtypes: Names = (),
    block_sizes: Names = (),
    methods: Names = (),
    presets: Names = (),
    candidates: Sequence[str] = (),
    axis: int | None = None,
    symmetric: bool | None = None,
    scale_dtype: DTypeLike | None = None,
    nonfinite: str | None = None,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    importance: Words = None,
    layout: str | None = None,
    requantize: bool = False,
    per_tensor: bool = False,
    csv: str | Path | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantize a source in several ways, keep nothing but the figures, and compare them.

    dtypes, block_sizes, methods: each is tried with each; None given: int8, int4 and float8e4m3fn;
        one scale per output channel (per array) and blocks of 128 and 32; the type's own method.
        block_sizes may hold "axis" and "tensor": one scale per channel, or per tensor.
    presets: tried with every method. candidates: further ones, as in quantize_file.
    axis ... requantize: as in quantize_file, for all combinations.
    per_tensor: the figures of every tensor too. csv: a file for to_csv() of the result; force:
        replace it.

    Returns plain data; ../compare.schema.json is its JSON Schema: "command", "source", "settings",
    "warnings", "left_out": [{"words", "preset", "dtype", "block_size", "method", "reason"}], and
    "combinations", ordered by size and error:
      words: what quantizes so, as a rule or --candidates has it. preset: None without.
      dtype, granularity, axis, block_size, tile, method, symmetric, scale_dtype: what all tensors
        have in common, else None.
      tensors, skipped: how many are quantized, and not.
      bits_per_weight, bytes_after, sqnr_db, relative_error, rmse, max_abs_error, clipped_fraction,
        weighted_sqnr_db, weighted_relative_error: over the quantized ones, to the last bit the
        totals of the Report of quantize_file.
      file_bytes_after: of the file, or of the shards, that quantize_file would write.
      overall_bits_per_weight, overall_relative_error: over all tensors that any combination
        quantizes; where this one leaves some alone, they have their size and no error. Errors
        count with their weights, where there is importance.
      pareto: no other combination is better in one of these two and as good in the other.
      worst: {"name", "sqnr_db"} of the tensor with the least SQNR; None where all are exact.
      seconds: what quantizing took, without writing: a measurement, the only one here.
      per_tensor: where asked for, [{"name", "dtype", ..., "bits_per_weight", ...}].
    Raises QtoolError, UsageError for a word that there is not; where no combination can be
    quantized, the reason.
    """
    asked = combinations(dtypes, block_sizes, methods, presets, candidates)
    shared: dict[str, Any] = {
        "axis": axis, "symmetric": symmetric, "scale_dtype": scale_dtype, "nonfinite": nonfinite,
        "source_dtype": source_dtype, "include": include, "exclude": exclude,
        "importance": listed(importance), "layout": layout, "requantize": requantize,
    }  # fmt: skip
    with streams.opened(src, source_dtype) as source:
        sweep = Sweep(src, source, shared, jobs)
        trials, left_out = sweep.trials(asked)
        read = [*streams.source_files(src, source), *trials[0].command.inputs]
        _check_csv(csv, read, force=force)
        outcomes = sweep.outcomes(trials, progress or Silent())
        result = {
            "command": "compare",
            "tool": report.tool(),
            "source": {
                "name": str(src),
                "container": source.container,
                "bytes": source.nbytes,
                "tensors": len(trials[0].plan),
            },
            "settings": {
                "dtypes": items_of(dtypes),
                "block_sizes": items_of(block_sizes),
                "methods": items_of(methods),
                "presets": items_of(presets),
                "candidates": list(candidates),
                **{name: _plain(value) for name, value in shared.items()},
            },
            "combinations": ordered(outcomes, per_tensor=per_tensor),
            "left_out": left_out,
            "warnings": sweep.warnings(trials, outcomes),
        }
    if csv is not None:
        with files.replacing(Path(csv), force=force) as temporary:
            temporary.write_bytes(table.to_csv(result).encode("utf-8", "backslashreplace"))
    return result


def _plain(value: Any) -> Any:
    """An option as plain data."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return value if value is None or isinstance(value, bool | int) else str(value)


def _check_csv(path: str | Path | None, sources: Sequence[Path], *, force: bool) -> None:
    """Refuse a file that must not be written, before any work is done for it."""
    for source in [*sources, Path(streams.STANDARD)] if path is not None else []:
        files.check_target(Path(str(path)), source, force=force)

"""qtool quantize: every selected tensor of a file, and the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.dtypes import DTypeLike
from qtool.errors import UsageError
from qtool.jobs import recipes, streams
from qtool.jobs.activations import Words, listed
from qtool.jobs.command import Command
from qtool.jobs.division import Division
from qtool.jobs.given import Given, GivenValue
from qtool.jobs.nbits import NBits
from qtool.jobs.progress import Progress, Silent
from qtool.jobs.terms import Terms
from qtool.layouts import nbits
from qtool.recipe import Recipe
from qtool.report import Report

if TYPE_CHECKING:
    from qtool.jobs.second_order import SecondOrder


def quantize_file(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis: int | None = None,
    block_size: int | None = None,
    tile: tuple[int, int] | None = None,
    preset: str | None = None,
    symmetric: bool | None = None,
    method: str | None = None,
    scale: GivenValue | None = None,
    zero_point: GivenValue | None = None,
    scale_dtype: DTypeLike | None = None,
    global_scale: bool | None = None,
    mx_rule: str | None = None,
    precision: DTypeLike | None = None,
    saturate: bool | None = None,
    nonfinite: str | None = None,
    semantics: str | None = None,
    narrow_range: bool | None = None,
    negative_scale: bool | None = None,
    source_dtype: DTypeLike | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[str] = (),
    recipe: str | Path | None = None,
    target_bits: float | None = None,
    target_sqnr: float | None = None,
    candidates: Sequence[str] = (),
    save_recipe: str | Path | None = None,
    importance: Words = None,
    layout: str | None = None,
    dynamic_activations: bool | None = None,
    hessian: Words = None,
    activations: Words = None,
    damping: float | None = None,
    act_order: bool | None = None,
    to: str | None = None,
    external_data: bool = False,
    requantize: bool = False,
    allow_empty: bool = False,
    report: str | Path | None = None,
    fail_if: Sequence[str] = (),
    baseline: str | Path | None = None,
    strict: bool = False,
    dry_run: bool = False,
    hash: bool = False,
    resume: bool = False,
    shards: str | None = None,
    scheduler: str | Executor | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize a .npy, .npz, .safetensors or ONNX file, or a checkpoint folder; the arguments are
    the command line's.

    src, dst: file names, "-" for standard input and output. dst None: STEM.DTYPE.CONTAINER beside
        src, or FOLDER-DTYPE. report: where its JSON goes; None: STEM.report.json beside a named
        dst.
    dtype ... negative_scale: see QuantSpec; None: its default. axis, block_size, tile: see Choice.
        scale, zero_point: see Given. preset: gives those of them that are None, see presets.
    rules: such as "*.mlp.*: dtype=int8, block_size=64", for the tensors of a pattern; see Recipe.
    recipe: TOML with the same words; see recipe.toml. Arguments take precedence.
    target_bits, target_sqnr, candidates: the type and blocks of each tensor are chosen; see Target.
    save_recipe: where the recipe goes that says all of this, and what was chosen.
    importance: files of weights of errors, see Importance; their tensors are quantized by a search
        for the least weighted error.
    layout: how quantized tensors are spelled, see layouts; None: "native", or "qdq" in ONNX.
    dynamic_activations: readers are to quantize activations too, where the layout can say it.
    hessian, activations: what is known of the inputs of layers, for second-order rounding of their
        weights; see SecondOrder. damping: None: 0.01. act_order: None: True.
    fail_if: what makes the result fail, such as "sqnr_db < 20"; see report.gates. baseline: the
        report that they compare it with. strict: it fails where a tensor is not quantized as
        asked; see unmet.
    dry_run: return the plan, from headers alone; nothing is written but the report and the recipe
        where they are named.
    hash: the report has the SHA-256 of every file of src and dst.
    resume, shards, scheduler: see Division; a slice's Report is on its own shards and not written.
    jobs: threads for large tensors; None: the cores that the process may use.
    Returns the Report. Raises QtoolError; dst is then as it was. GateError: the result fails; the
    report is written all the same.
    """
    asked = recipes.asked(
        recipe=recipe, rules=rules, include=include, exclude=exclude,
        dtype=dtype, preset=preset, axis=axis, block_size=block_size, tile=tile,
        symmetric=symmetric, method=method, scale=scale, zero_point=zero_point,
        scale_dtype=scale_dtype, global_scale=global_scale, mx_rule=mx_rule,
        precision=precision, saturate=saturate, nonfinite=nonfinite, semantics=semantics,
        narrow_range=narrow_range, negative_scale=negative_scale, source_dtype=source_dtype,
        layout=layout, dynamic_activations=dynamic_activations, hessian=listed(hessian),
        activations=listed(activations), damping=damping, act_order=act_order, to=to,
        external_data=external_data, requantize=requantize, allow_empty=allow_empty,
        target_bits=target_bits, target_sqnr=target_sqnr, candidates=candidates,
        importance=listed(importance),
    )  # fmt: skip
    given = _given(asked)
    return run(
        Command(
            "quantize", src, dst, asked, asked.tag, given,
            report_to=report, save_recipe=save_recipe,
            division=Division.of(resume=resume, shards=shards, scheduler=scheduler),
            jobs=jobs, force=force, progress=progress or Silent(),
            graph=NBits(given) if asked.options.get("layout") == nbits.NAME else None,
            second_order=_second_order(asked),
            terms=Terms.of(fail_if, baseline, strict=strict), dry_run=dry_run, hashes=hash,
        )
    )  # fmt: skip


def _given(recipe: Recipe) -> Given | None:
    """The scales that the recipe gives."""
    scale, zero_point = (recipe.options.get(name) for name in ("scale", "zero_point"))
    if scale is None:
        return None
    return Given(scale, zero_point, recipe.words.get("scale_dtype"))


def _second_order(recipe: Recipe) -> SecondOrder | None:
    """What rounds weights by the inputs of their layers; None where the recipe gives none."""
    names = ("hessian", "activations", "damping", "act_order")
    if not any(name in recipe.options for name in names):
        return None
    if recipe.options.get("target_sqnr") is not None:
        raise UsageError(
            "--target-sqnr",
            "second-order rounding gives up weights' errors for outputs'",
            "use --target-bits, or leave --hessian and --activations out",
        )
    from qtool.jobs.second_order import SecondOrder

    return SecondOrder.of(*(recipe.options.get(name) for name in names))


def run(command: Command) -> Report:
    """Quantize a file, or every file of a folder; see quantize_file."""
    if command.dry_run:
        if command.hashes:
            raise UsageError("--hash", "a dry run reads headers alone", "leave one of them out")
        command.terms.check_planned()
    if not os.path.isdir(command.src):
        from qtool.jobs.quantize_single import quantize_single

        return quantize_single(command)
    from qtool.jobs.quantize_folder import quantize_folder

    options = command.recipe.options
    streams.check_folder(options.get("to"), external_data=options.get("external_data", False))
    if command.graph is not None:
        raise UsageError(command.graph.option, "a checkpoint has no graph", "it is for ONNX models")
    return quantize_folder(command)

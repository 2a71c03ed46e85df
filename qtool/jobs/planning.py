"""How a command's plan is made, and what is said of it before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from qtool.errors import UsageError, nearest
from qtool.formats import Source
from qtool.jobs import screening
from qtool.jobs.command import Command
from qtool.layouts import LAYOUTS, ONNX_LAYOUTS, Layout, native
from qtool.plan import Planned, make_plan
from qtool.recipe import Recipe
from qtool.report import planned_record

if TYPE_CHECKING:
    from qtool.formats.onnx import OnnxSource


def plan_of(command: Command, source: Source, layout: Layout, recipe: Recipe) -> list[Planned]:
    """The fate of every tensor.

    Under --strict NaN and Inf stop nothing here: the result fails in the end, with all of them.
    """
    if command.graph is not None:
        plan = command.graph.plan(cast("OnnxSource", source), recipe)
    else:
        header = None if command.given is None else command.given.header
        plan = make_plan(screening.marked(source), recipe, header, layout)
    if command.importance is not None:
        command.importance.check(plan)
    if command.terms.strict:
        plan = [
            p if p.spec is None else replace(p, spec=replace(p.spec, nonfinite="allow"))
            for p in plan
        ]
    return plan


def warnings(command: Command, plan: Sequence[Planned]) -> list[str]:
    """What the user should know of tensors that other files were to say something of."""
    known = [one for one in (command.second_order, command.importance) if one is not None]
    return [warning for one in known for warning in one.warnings(plan)]


def records(plan: Sequence[Planned]) -> list[dict[str, Any]]:
    """What a plan says of the tensors that are to be quantized."""
    return [
        planned_record(p.info, p.stored.described(), p.bytes_after)
        for p in plan
        if p.stored is not None
    ]


def skipped(plan: Sequence[Planned]) -> list[dict[str, Any]]:
    """What a plan says of the other tensors."""
    return [
        {
            "name": p.info.name,
            "shape": list(p.info.shape),
            "dtype": p.info.dtype.name,
            "bytes": p.info.nbytes,
            "reason": p.reason,
        }
        for p in plan
        if p.reason is not None
    ]


def chosen_layout(name: str | None, container: str, recipe: Recipe) -> Layout:
    """The layout of that name. Raises UsageError where it does not fit what is asked for."""
    if container == "onnx":
        if name not in (None, *ONNX_LAYOUTS):
            rule = f"{name} cannot be written to ONNX"
            raise UsageError("--layout", rule, "use " + " or ".join(ONNX_LAYOUTS))
        if recipe.gives_activations:
            rule = "ONNX says it by operators in the graph"
            raise UsageError("--dynamic-activations", rule, "use `qtool dynamic --graph`")
        return native
    if name in ONNX_LAYOUTS:
        raise UsageError("--layout", f"{name} is for ONNX models, not {container}")
    if name is not None and name not in LAYOUTS:
        raise UsageError("--layout", f"{name!r} is unknown", nearest(name, LAYOUTS))
    layout = LAYOUTS[name or native.name]
    if layout is not native and container != "safetensors":
        raise UsageError("--layout", f"{name} is for .safetensors, not {container}")
    return layout
